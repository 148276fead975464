"""Muon: its updates against Megatron-Core's and PyTorch's, its checkpoints, what goes on from them."""

import math
import os
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pico
import pytest
import repository
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from soaking import few, in_soak
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from training import as_module, contents, make_source, make_text, run, settings
from transformers import AutoConfig, AutoModelForCausalLM

from precisionctl.architectures.param_map import Row
from precisionctl.checkpoints.base import Companions, WithOptimizer
from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.dcp.dcp_writer import DcpWriter
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.checkpoints.other_trainers.torch_muon import torch_muon
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import execute
from precisionctl.dtypes import DType
from precisionctl.errors import CheckpointError, DamagedCheckpoint, MappingError, MissingTensor, RecipeError
from precisionctl.param import EMBEDDING, MOMENTUM, Parallelism, TensorSpec, muon_takes, state_name
from precisionctl.planning.make_plan import make_plan
from precisionctl.recipe import MUON_KEYS, Optimizer, Recipe, load_recipe
from precisionctl.trainer.data.rows import EqualRows, Rows
from precisionctl.trainer.model.gpt import GPT
from precisionctl.trainer.optimizer import muon
from precisionctl.trainer.optimizer.adamw import MasterAdamW
from precisionctl.trainer.optimizer.muon import MasterMuon, orthogonalized
from precisionctl.trainer.parallel.shards import ModelShards
from precisionctl.trainer.parallel.world import ALONE
from precisionctl.trainer.resume import resume
from precisionctl.trainer.run import Run
from precisionctl.trainer.saved import loading, other_settings
from precisionctl.verify.compare import compare

GOLDEN = repository.GOLDEN / "muon.safetensors"
SETTINGS = Optimizer(preset="muon", weight_decay=0.1, clip_norm=0.0)
MUON = {"optimizer__preset": "muon", "optimizer__muon_extra_scale_factor": 0.2}
LLAMA = replace(pico.shape("llama-3"), num_attention_heads=4, num_query_groups=2, kv_channels=4)
QKV = "decoder.layers.0.self_attention.linear_qkv.weight"


def module(**values: Tensor) -> nn.Module:
    """A module with these parameters, `__` in a name for a dot, and an embedding."""
    return as_module({EMBEDDING: torch.ones(3, 2), **{name.replace("__", "."): each for name, each in values.items()}})


def step(optimizer: MasterMuon, gradients: dict[str, Tensor], lr: float, skip: bool = False) -> None:
    for name, gradient in gradients.items():
        optimizer.masters[name].grad = gradient.clone()
    optimizer.step(lr, torch.tensor(skip))


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("plain", {}),
        ("tall", {"muon_nesterov": True, "muon_scale_mode": "unit_rms_norm"}),
        (
            "simple",
            {
                "muon_coefficient_type": "simple",
                "muon_scale_mode": "shape_scaling",
                "muon_extra_scale_factor": 0.2,
            },
        ),
        ("split", {}),
    ],
)
def test_updates_are_those_of_megatron_core(case: str, changes: dict[str, Any]) -> None:
    """On the CPU that made the file they are the same bit by bit; another sums products of BF16 in another order, which
    changes an update by a few 2^-8 of itself."""
    golden = load_file(GOLDEN)
    name = QKV if case == "split" else "linear.weight"
    made = module(**{name.replace(".", "__"): golden[f"{case}.before"]})
    optimizer = MasterMuon(made, LLAMA, replace(SETTINGS, **changes))
    for update in range(5):
        step(optimizer, {name: golden[f"{case}.gradient.{update}"]}, 0.02)
    after, moved = golden[f"{case}.after"], golden[f"{case}.after"] - golden[f"{case}.before"]
    assert (made.get_parameter(name) - after).norm() < 2**-5 * moved.norm()
    assert torch.allclose(optimizer.momentum[name], golden[f"{case}.momentum"], rtol=1e-6)


@pytest.mark.parametrize("rows_and_columns", [(16, 16), (32, 8), (8, 32)])
@pytest.mark.parametrize("nesterov", [False, True])
def test_a_step_is_torch_s_bit_by_bit_where_both_round_alike(rows_and_columns: Any, nesterov: bool) -> None:
    """PyTorch rounds to BF16 before it divides by the norm, and Megatron after. The average of signs is a power of two,
    and so is its norm, so that neither rounds. The scale is a power of two or 1, and multiplies another factor."""
    signs = torch.randn(rows_and_columns, generator=torch.Generator().manual_seed(0)).sign()
    weight = torch.randn(rows_and_columns, generator=torch.Generator().manual_seed(1))
    theirs = nn.Parameter(weight.clone())
    judge = torch.optim.Muon([theirs], lr=2**-6, weight_decay=2**-4, momentum=0.5, nesterov=nesterov)
    theirs.grad = signs.clone()
    judge.step()
    same = {"muon_coefficient_type": "simple", "muon_scale_mode": "shape_scaling", "muon_momentum": 0.5}
    made = module(linear__weight=weight)
    optimizer = MasterMuon(made, LLAMA, replace(SETTINGS, weight_decay=2**-4, muon_nesterov=nesterov, **same))
    step(optimizer, {"linear.weight": signs}, 2**-6)
    assert torch.equal(optimizer.momentum["linear.weight"], judge.state[theirs]["momentum_buffer"])
    assert torch.equal(made.get_parameter("linear.weight"), theirs)


def test_twenty_steps_are_torch_s_but_for_what_bf16_rounds() -> None:
    """Each of an update's products rounds to 2^-9, and steps whose slope at zero is 3.4 enlarge that where a singular
    value is small; the averages themselves are in FP32 in both."""
    pick = torch.Generator().manual_seed(0)
    weight = torch.randn(24, 40, generator=pick)
    theirs = nn.Parameter(weight.clone())
    judge = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    same = {"muon_coefficient_type": "simple", "muon_nesterov": True, "muon_momentum": 0.95}
    made = module(linear__weight=weight)
    optimizer = MasterMuon(made, LLAMA, replace(SETTINGS, muon_extra_scale_factor=0.2, **same))
    for _ in range(20):
        theirs.grad = torch.randn(24, 40, generator=pick)
        step(optimizer, {"linear.weight": theirs.grad}, 0.02)
        judge.step()
        assert torch.equal(optimizer.momentum["linear.weight"], judge.state[theirs]["momentum_buffer"])
    ours = made.get_parameter("linear.weight")
    assert (ours - theirs).norm() < 2**-5 * (theirs - weight).norm()


@pytest.mark.parametrize("rows_and_columns", [(24, 40), (40, 24), (1, 8)])
def test_singular_values_go_to_one_and_vectors_stay(rows_and_columns: Any) -> None:
    """As by a decomposition in FP64; the coefficients of `quintic` leave values between 0.8 and 1.2."""
    matrix = torch.randn(rows_and_columns, generator=torch.Generator().manual_seed(0))
    u, _, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    made = orthogonalized(matrix, replace(SETTINGS, muon_scale_mode="unit_rms_norm"))
    inside = u.mT @ (made.double() / math.sqrt(rows_and_columns[0] / rows_and_columns[1])) @ v.mT
    values = inside.diagonal()
    assert 0.7 < values.min() and values.max() < 1.3
    assert (inside - torch.diag(values)).abs().max() < 0.1


def test_matrices_are_muons_but_for_embedding_and_output_layer() -> None:
    """As megatron/core/optimizer/muon.py asks: is_embedding_or_output_parameter, and two dimensions."""
    two = {"router__weight": (4, 2), "experts__linear_fc1__weight0": (4, 2), "embedding__position_embeddings": (4, 2)}
    others = {"output_layer__weight": (4, 2), "conv1d__weight": (4, 1, 2), "norm__weight": (4,)}
    made = module(**{name: torch.ones(size) for name, size in {**two, **others}.items()})
    optimizer = MasterMuon(made, LLAMA, SETTINGS)
    assert {name.replace(".", "__") for name in optimizer.momentum} == set(two)
    rest = {name.replace("__", ".") for name in others} | {EMBEDDING}
    assert {*optimizer.exp_avg} == {*optimizer.exp_avg_sq} == rest
    assert {*optimizer.masters} == {*optimizer.momentum} | rest


def test_a_step_collects_the_gradients_once_however_many_matrices_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each matrix would be quadratic in their number."""
    of_all, reads = MasterMuon.gradients.fget, list[None]()  # type: ignore[attr-defined]
    monkeypatch.setattr(MasterMuon, "gradients", property(lambda self: reads.append(None) or of_all(self)))
    matrices = {f"linear{number}.weight": torch.ones(2, 2) for number in range(8)}
    step(MasterMuon(as_module({EMBEDDING: torch.ones(3, 2), **matrices}), LLAMA, SETTINGS), matrices, 0.1)
    assert len(reads) == 1


def test_a_step_with_nan_is_skipped_in_every_tensor() -> None:
    made = module(linear__weight=torch.randn(4, 6))
    optimizer = MasterMuon(made, LLAMA, SETTINGS)
    good = {"linear.weight": torch.randn(4, 6), EMBEDDING: torch.ones(3, 2)}
    step(optimizer, good, 0.1)
    before = {(kind, name): each.clone() for kind, all_of in optimizer.tensors.items() for name, each in all_of.items()}
    step(optimizer, {name: gradient * math.nan for name, gradient in good.items()}, 0.1, skip=True)
    now = {(kind, name): each for kind, all_of in optimizer.tensors.items() for name, each in all_of.items()}
    assert all(torch.equal(now[key], value) for key, value in before.items())
    assert optimizer.steps == 1 and not optimizer.gradients
    step(optimizer, {name: gradient * 0 for name, gradient in good.items()}, 0.1)
    assert all(each.isfinite().all() for all_of in optimizer.tensors.values() for each in all_of.values())


def test_rows_of_a_group_are_split_as_megatron_splits_them() -> None:
    """`_get_qkv_split_shapes` (core 0.19): with gates, as many rows of these as of queries."""
    assert muon.qkv_rows(LLAMA, 0) == (8, 4, 4)
    assert muon.qkv_rows(replace(LLAMA, attention_output_gate=True), 0) == (8, 8, 4, 4)
    behind = replace(LLAMA, head_wise_attn_gate=True)
    with pytest.raises(RecipeError, match=r"muon_split_qkv=false"):
        muon.check(behind, SETTINGS)
    muon.check(behind, replace(SETTINGS, muon_split_qkv=False))
    muon.check(behind, Optimizer())


OWN_KINDS = ("llama-3", "qwen3-next", "gemma4-small")
"""With gates; with layers that share keys and values, and others whose keys are values."""


@pytest.mark.parametrize("family", few(pico.FAMILIES, *OWN_KINDS))
def test_every_linear_qkv_is_made_of_groups_of_these_rows(family: str) -> None:
    model = pico.shape(family)
    shards = ModelShards.of(model, torch.bfloat16, ALONE).tensors
    linears = [name for name in shards if name.startswith("decoder") and name.endswith("linear_qkv.weight")]
    assert linears or family not in OWN_KINDS
    for name in linears:
        layer = int(name.split(".")[2])
        if model.of_layer(layer).head_wise_attn_gate:
            continue
        assert shards[name].spec.shape[0] == model.of_layer(layer).num_query_groups * sum(muon.qkv_rows(model, layer))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, text, and a run of each optimizer to step 4."""
    folder = tmp_path_factory.mktemp("muon")
    make_source(folder / "source")
    make_text(folder / "text.txt")
    make_text(folder / "more.txt", seed=1)
    for preset in ("muon", "adamw"):
        run(train_on(folder / "source", folder, folder / preset, preset, 4))
    return folder


def train_on(source: Path, place: Path, out: Path, preset: str, steps: int, text: str = "text.txt", **more: Any) -> Any:
    of_muon = MUON if preset == "muon" else {}
    return settings(source, place / text, out, train__steps=steps, **of_muon, **more)


def state_of(folder: Path) -> dict[str, Tensor]:
    """The optimizer's tensors in a checkpoint."""
    source = WithOptimizer(TorchDistReader(folder))
    return {name: read_tensor(source, name) for name in source.specs if name.startswith("optimizer.")}


def test_the_loss_falls_as_with_adamw_and_each_matrix_has_a_momentum(place: Path, tmp_path: Path) -> None:
    _, _, losses = run(train_on(place / "source", place, tmp_path / "run", "muon", 8))
    assert losses[-1] < losses[0] - 0.5
    kinds: dict[str, set[str]] = {}
    for name in state_of(tmp_path / "run"):
        kind, _, parameter = name.removeprefix("optimizer.state.").partition(".")
        kinds.setdefault(parameter, set()).add(kind)
    linear = ("linear_qkv.weight", "linear_proj.weight", "linear_fc1.weight", "linear_fc2.weight")
    for parameter, has in kinds.items():
        muons = parameter.endswith(linear)
        assert has == ({"param", "momentum_buffer"} if muons else {"param", "exp_avg", "exp_avg_sq"}), parameter


def test_a_run_that_was_stopped_goes_on_with_every_bit(place: Path, tmp_path: Path) -> None:
    made = train_on(place / "source", place, tmp_path / "run", "muon", 4)
    stopped = resume(made, lambda _: None, lambda m: os.kill(os.getpid(), signal.SIGTERM) if m.step == 3 else None)
    assert stopped.step == 3
    run(made)
    assert contents(tmp_path / "run" / "iter_0000004") == contents(place / "muon" / "iter_0000004")


def test_momentum_goes_to_megatron_and_back_into_a_run(place: Path, tmp_path: Path) -> None:
    """For two tensor ranks, with the settings that Megatron's two optimizers ask for; on from there is on from here."""
    execute(plan_command(Request(place / "muon", tmp_path / "cut", "megatron", parallelism=Parallelism(2))))
    held, before = state_of(tmp_path / "cut"), state_of(place / "muon")
    assert held.keys() == before.keys()
    assert all(torch.equal(held[name][: len(each)], each) for name, each in before.items())  # the vocabulary is padded
    assert all(values.any() for name, values in held.items() if "momentum_buffer" in name)
    first, second = (one["optimizer"] for one in TorchDistReader(tmp_path / "cut").common["optimizer"].values())
    (group,) = first["param_groups"]
    assert (group["momentum_beta"], group["momentum"], group["weight_decay"]) == (0.9, 0.9, 0.1)
    assert (second["state"]["common_step"], second["param_groups"][0]["betas"]) == (4, (0.9, 0.95))
    changed = {"optimizer__muon_momentum": 0.95}
    again = [
        run(train_on(source, place, tmp_path / f"on {number}", "muon", 6, "more.txt", **changed))
        for number, source in enumerate((place / "muon", tmp_path / "cut"))
    ]
    assert again[0][2] == again[1][2]
    (said,) = (note for note in again[1][0].notes if note.startswith("optimizer: "))
    assert said.startswith("optimizer: masters, moments and momentum of the checkpoint, after 4 updates")
    assert "muon_momentum 0.9, here 0.95 (--set optimizer.muon_momentum=0.9 keeps it)" in said
    assert "muon_extra_scale_factor" not in said
    recipe = load_recipe("bf16", ["optimizer.preset=muon"])
    said = settings_said(tmp_path / "cut", recipe)
    assert "it had muon_extra_scale_factor 0.2, here 1 (--set optimizer.muon_extra_scale_factor=0.2 keeps it)" in said


@pytest.mark.parametrize(("family", "with_biases"), [("gpt-oss", True), *in_soak(("qwen3-moe", False))])
def test_with_expert_parallelism_experts_have_a_muon_and_with_biases_an_adam_of_their_own(
    tmp_path: Path, family: str, with_biases: bool
) -> None:
    """In the order in which megatron-core 0.16.1 makes them (megatron/core/optimizer/muon.py; tests/peers has it load
    both). It loads as many as it has."""
    make_source(tmp_path / "source", family=family)
    make_text(tmp_path / "text.txt")
    run(train_on(tmp_path / "source", tmp_path, tmp_path / "run", "muon", 1))
    taken = tmp_path / "run"
    for ranks in (2, 1):
        made = tmp_path / f"for {ranks}"
        execute(plan_command(Request(taken, made, "megatron", parallelism=Parallelism(expert=ranks))))
        inner = [one["optimizer"]["param_groups"] for one in TorchDistReader(made).common["optimizer"].values()]
        kinds = ("is_expert_parallel", "wd_mult")
        found = [("momentum_beta" in one[0], [tuple(group[key] for key in kinds) for group in one]) for one in inner]
        of_experts = [(True, [(True, 1.0)])], [(False, [(True, 0.0)])] * with_biases  # which biases are: no decay
        muons, adams = of_experts if ranks == 2 else ([], [])
        assert found == [(True, [(False, 1.0)]), *muons, (False, [(False, 1.0), (False, 0.0)]), *adams]
        taken = made


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_momentum_goes_to_torchs_muon_and_back(place: Path, tmp_path: Path) -> None:
    request = Request(place / "muon", tmp_path / "dcp", "hf", container="dcp")
    execute(command := plan_command(request))
    assert any("torch.optim.Muon: it has one set of Newton-Schulz coefficients" in note for note in command.notes)
    assert any("orthogonalizes `gate_proj`, `up_proj` one by one" in note for note in command.notes)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "dcp"), dtype=torch.float32)
    parts: dict[str, list[nn.Parameter]] = {"matrices": [], "of tokens": [], "norms": []}
    for name, parameter in model.named_parameters():
        kind = "norms" if parameter.dim() == 1 else "matrices" if ".layers." in name else "of tokens"
        parts[kind].append(parameter)
    adamw = torch.optim.AdamW([{"params": parts["of tokens"]}, {"params": parts["norms"]}])
    muon = torch.optim.Muon(parts["matrices"], momentum=0.5)
    for group in (*adamw.param_groups, *muon.param_groups):
        group["initial_lr"] = group["lr"]
    state = dict(zip(("model", "optimizer"), get_state_dict(model, [adamw, muon]), strict=True))
    dcp.load(state, storage_reader=FileSystemReader(tmp_path / "dcp"), no_dist=True)
    set_state_dict(model, [adamw, muon], model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    before = state_of(place / "muon")
    momentum = {name: muon.state[one]["momentum_buffer"] for name, one in model.named_parameters() if one in muon.state}
    for layer in range(model.config.num_hidden_layers):
        ours, theirs = (state_name(MOMENTUM, f"decoder.layers.{layer}."), f"model.layers.{layer}.")
        gate_and_up = torch.cat([momentum[f"{theirs}mlp.{each}_proj.weight"] for each in ("gate", "up")])
        assert torch.equal(before[f"{ours}mlp.linear_fc1.weight"], gate_and_up)
        of_heads = (momentum[f"{theirs}self_attn.{each}_proj.weight"] for each in "qkv")
        in_groups = [each.view(model.config.num_key_value_heads, -1, each.shape[1]) for each in of_heads]
        assert torch.equal(before[f"{ours}self_attention.linear_qkv.weight"], torch.cat(in_groups, 1).flatten(0, 1))
    assert all(state["step"] == 4 for state in adamw.state.values()) and len(momentum) == len(parts["matrices"])
    (group,) = muon.param_groups
    rates = {key: group[key] for key in ("momentum", "weight_decay", "nesterov", "ns_steps", "adjust_lr_fn")}
    assert [*rates.values()] == [0.9, 0.1, False, 5, "match_rms_adamw"]
    assert group["lr"] == adamw.param_groups[0]["lr"] and group["initial_lr"] == adamw.param_groups[0]["initial_lr"]
    model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    for optimizer in (adamw, muon):
        optimizer.step()

    execute(plan_command(Request(tmp_path / "dcp", tmp_path / "back", "megatron")))
    back = state_of(tmp_path / "back")
    assert back.keys() == before.keys() and all(torch.equal(back[name], each) for name, each in before.items())
    for container, why in (("torchtitan", "`kimi_k2_7` models alone"), ("deepspeed-universal", "of Adam alone")):
        with pytest.raises(CheckpointError, match=rf"Muon.*{why}.*--drop-optimizer"):
            execute(plan_command(Request(place / "muon", tmp_path / container, "hf", container=container)))


@pytest.mark.parametrize(
    ("mode", "factor"),
    [("spectral", 1.0), ("spectral", 0.2), ("shape_scaling", 1.0), ("shape_scaling", 0.5), ("unit_rms_norm", 0.5)],
)
@pytest.mark.parametrize("rows_and_columns", [(24, 40), (40, 24)])
def test_torchs_muon_is_set_to_make_megatrons_updates(mode: Any, factor: float, rows_and_columns: Any) -> None:
    """But for what both round to BF16. Decay by itself is the same: lr x weight_decay."""
    same: dict[str, Any] = {"muon_coefficient_type": "simple", "muon_scale_mode": mode, "muon_nesterov": True}
    ours = replace(SETTINGS, weight_decay=0.1, muon_extra_scale_factor=factor, **same)
    args = {key: getattr(ours, key) for key in MUON_KEYS}
    group, notes = torch_muon(args, {"lr": 0.02, "weight_decay": 0.1, "momentum": ours.muon_momentum}, [], Path())
    assert any("weight_decay as many times smaller" in note for note in notes) == (
        factor != {"spectral": 0.2, "shape_scaling": 1.0, "unit_rms_norm": 1.0}[mode]
    )
    assert any("PyTorch before 2.14 does not know" in note for note in notes) == (mode == "unit_rms_norm")
    weight, gradient = (torch.randn(rows_and_columns, generator=torch.Generator().manual_seed(n)) for n in (0, 1))
    theirs, made = nn.Parameter(weight.clone()), module(linear__weight=weight)
    judge = torch.optim.Muon([theirs])
    judge.param_groups[0].update(group)
    if mode == "unit_rms_norm" and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14):
        scale = math.sqrt(rows_and_columns[0] / rows_and_columns[1])  # what `_adjust_lr` multiplies by from 2.14 on
        judge.param_groups[0].update(lr=group["lr"] * scale, weight_decay=group["weight_decay"] / scale)
    theirs.grad = gradient
    judge.step()
    step(MasterMuon(made, LLAMA, ours), {"linear.weight": gradient}, 0.02)
    assert (made.get_parameter("linear.weight") - theirs).norm() < 2**-5 * (theirs - weight).norm()


@pytest.mark.parametrize(
    "changes",
    [
        {"muon_scale_mode": "frobenius"},
        {"muon_scale_mode": ["spectral"]},
        {"muon_scale_mode": None},
        *(
            {"muon_extra_scale_factor": wrong}
            for wrong in (0.0, float("nan"), float("inf"), "1", True, 1e-320, 10**400)
        ),
        *({"muon_num_ns_steps": wrong} for wrong in (2.5, 100, 10**15)),
    ],
    ids=lambda changes: str(changes)[:40],
)
def test_a_muon_that_torchs_cannot_follow_is_refused(changes: dict[str, Any]) -> None:
    args = {key: getattr(Optimizer(), key) for key in MUON_KEYS} | changes
    with pytest.raises(CheckpointError, match=r"torch's Muon does not make the updates .*--drop-optimizer"):
        torch_muon(args, {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}, [], Path())


@pytest.mark.parametrize(
    ("factor", "lr", "what"),
    [(1e308, 0.02, "lr of 0.02 would be inf"), (1e-300, 1e-10, "lr of 1e-10 would be"), (1e300, 0.0, "weight_decay")]
    + [(1e308, 0.0, "lr of 0 would be nan")],
)
def test_rates_that_a_factor_makes_no_normal_numbers_are_refused(factor: float, lr: float, what: str) -> None:
    args = {key: getattr(Optimizer(), key) for key in MUON_KEYS} | {"muon_extra_scale_factor": factor}
    with pytest.raises(CheckpointError, match=rf"its {what}.*--drop-optimizer"):
        torch_muon(args, {"lr": lr, "weight_decay": 1e-10, "momentum": 0.9}, [], Path())
    settings, _ = torch_muon(
        args | {"muon_extra_scale_factor": 0.5}, {"lr": 0.0, "weight_decay": 0.0, "momentum": 0.9}, [], Path()
    )
    assert settings["lr"] == settings["weight_decay"] == 0


def rows_in_class(tmp_path: Path, family: str) -> list[Row]:
    """The rows of what Megatron's Muon takes, with the names that the model's class has."""
    pico.save(tmp_path / family, family)
    jobs = make_plan(open_checkpoint(tmp_path / family), "megatron").jobs
    return [job.row for job in jobs if muon_takes(job.name, len(job.row.sizes))]


@pytest.mark.parametrize(
    ("family", "fused", "parts"),
    [
        ("phi3", "qkv_proj", ""),
        ("llama-3", "", "`gate_proj`, `up_proj`"),
        *in_soak(
            ("gpt2", "c_attn", ""),
            ("gpt-neox", "query_key_value", ""),
            ("falcon", "query_key_value", ""),
            ("bloom", "query_key_value", ""),
            ("mpt", "Wqkv", ""),
        ),
    ],
)
def test_what_torchs_muon_orthogonalizes_otherwise_divided_is_said(
    tmp_path: Path, family: str, fused: str, parts: str
) -> None:
    """Matrices are those of transformers' class; no family but Llama's has gate and up apart here."""
    pico.save(tmp_path / "source", family)
    names = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "source").named_parameters())
    assert not fused or any(name.endswith(f"{fused}.weight") for name in names)
    assert bool(parts) == any(name.endswith("gate_proj.weight") for name in names)
    rows, group = rows_in_class(tmp_path, family), {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
    for split in (True, False):
        args = {key: getattr(Optimizer(), key) for key in MUON_KEYS} | {"muon_split_qkv": split}
        _, notes = torch_muon(args, group, rows, Path())
        said = " / ".join(notes)
        whole = f"it orthogonalizes `{fused}` whole, where the run had queries, keys and values one by one"
        assert (whole in said) == (bool(fused) and split) and ("whole, " in said) == (bool(fused) and split)
        assert ("`q_proj`, `k_proj`, `v_proj` one by one" in said) == (not fused and not split)
        assert (f"{parts} one by one, where the run had them in one matrix" in said) == bool(parts)
        assert bool(parts) or "gate" not in said


def test_a_transposed_matrix_has_no_scale_by_rows_over_columns_in_torchs_muon(tmp_path: Path) -> None:
    """Of GPT-2's Conv1D torch's factor is of the transpose: of a matrix of four times as many rows half as large."""
    pico.save(tmp_path / "source", "gpt2")
    stored = AutoModelForCausalLM.from_pretrained(tmp_path / "source").transformer.h[0].mlp.c_fc.weight
    same = replace(SETTINGS, muon_coefficient_type="simple", muon_scale_mode="shape_scaling")
    made = orthogonalized(stored.detach().mT, same)
    theirs = nn.Parameter(torch.zeros_like(stored))
    theirs.grad = stored.detach().clone()
    torch.optim.Muon([theirs], lr=1.0, weight_decay=0.0, adjust_lr_fn="original").step()
    assert made.shape == (256, 64) and 1.8 < made.norm() / theirs.norm() < 2.2
    rows, group = rows_in_class(tmp_path, "gpt2"), {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
    args = {key: getattr(Optimizer(), key) for key in MUON_KEYS}
    for mode in ("shape_scaling", "unit_rms_norm"):
        with pytest.raises(CheckpointError, match=rf"`c_attn` is \[in, out\].*{mode}.*--drop-optimizer"):
            torch_muon(args | {"muon_scale_mode": mode}, group, rows, Path())
    assert torch_muon(args, group, rows, Path())[0]["adjust_lr_fn"] == "match_rms_adamw"


def test_muons_momentum_of_experts_in_one_tensor_has_no_place_in_torchs(tmp_path: Path) -> None:
    name = state_name(MOMENTUM, "model.layers.0.mlp.experts.gate_up_proj[1]")
    with pytest.raises(MappingError, match=r"experts.gate_up_proj`.* torch's Muon takes matrices alone.*--drop-opt"):
        DcpWriter(tmp_path, {name: TensorSpec((4, 4), DType.float32)}, Companions(), {})


def test_settings_of_two_runs_by_muon_are_compared(place: Path, tmp_path: Path) -> None:
    other = {"optimizer__weight_decay": 0.2, "optimizer__beta1": 0.5, "optimizer__muon_momentum": 0.95}
    run(train_on(place / "source", place, tmp_path / "run", "muon", 1, **other))
    found = compare(TorchDistReader(place / "muon"), TorchDistReader(tmp_path / "run"))
    assert {
        line for line in found.optimizer if not line.removeprefix("Muon's ").startswith(("lr ", "initial_lr "))
    } == {
        "updates is 4 in A, 1 in B",
        "weight_decay is 0.1 in A, 0.2 in B",
        "betas is (0.9, 0.95) in A, (0.5, 0.95) in B",
        "Muon's momentum is 0.9 in A, 0.95 in B",
        "Muon's weight_decay is 0.1 in A, 0.2 in B",
    }
    assert not any("Muon" in each.what for each in found.not_compared)


def settings_said(source: Path, recipe: Recipe) -> str:
    """What is said of the optimizer's settings where a run goes on."""
    notes = loading.loading_notes(recipe, TorchDistReader(source), ())
    return "".join(note for note in notes if note.startswith("optimizer: ") and "AdamW trained" not in note)


@pytest.mark.parametrize("preset", ["muon", "adamw"])
def test_each_setting_of_the_optimizer_that_differs_is_said_with_what_keeps_it(place: Path, preset: str) -> None:
    """Of a run of ours. With all that is advised nothing differs any more."""
    asked = {"lr": 0.5, "beta1": 0.5, "beta2": 0.5, "epsilon": 0.5, "weight_decay": 0.5, "clip_norm": 0.5}
    of_muon = {"momentum": 0.5, "nesterov": "true", "num_ns_steps": 7, "coefficient_type": "simple"}
    of_muon |= {"scale_mode": "unit_rms_norm", "extra_scale_factor": 0.5, "split_qkv": "false"}
    asked |= {f"muon_{key}": value for key, value in of_muon.items()} if preset == "muon" else {}
    given = [f"optimizer.preset={preset}", *(f"optimizer.{key}={value}" for key, value in asked.items())]
    said = settings_said(place / preset, load_recipe("bf16", given))
    assert said.startswith("optimizer: the run before had ")
    keeping = re.findall(r"--set (optimizer\.(\w+)=\S+) keeps it", said)
    assert {key for _, key in keeping} == set(asked)
    assert not settings_said(place / preset, load_recipe("bf16", [*given, *(override for override, _ in keeping)]))
    other = settings_said(place / "adamw", load_recipe("bf16", ["optimizer.preset=fp8-lm"]))
    assert "preset adamw, here fp8-lm (--set optimizer.preset=adamw keeps it)" in other


def test_settings_in_megatrons_arguments_are_said_whatever_its_version(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names are those of megatron/training/arguments.py in core 0.16.1 and 0.19; a set of coefficients may be one that
    no recipe has, and a value anything."""
    monkeypatch.setattr(other_settings, "saved_of", lambda source: None)
    monkeypatch.setattr(loading, "saved_of", lambda source: None)
    whole, recipe = dict(TorchDistReader(place / "muon").args), load_recipe("bf16", ["optimizer.preset=muon"])
    plain = {key: value for key, value in whole.items() if not key.startswith("muon_")}
    older = {"muon_scale_mode": "shape_scaling", "muon_use_nesterov": True, "clip_grad": 0.25}
    newer = {"muon_scale_mode": "spectral", "muon_nesterov": True, "muon_coefficient_type": "polar_express"}
    broken = {"muon_num_ns_steps": [5], "muon_scale_mode": 3, "muon_extra_scale_factor": -1.0}
    endless = {"muon_num_ns_steps": 10**15}
    nesterov = "muon_nesterov true, here false (--set optimizer.muon_nesterov=true keeps it)"
    for args, expected in (
        (older, ("muon_scale_mode shape_scaling, here spectral (--set", nesterov, "clip_norm 0.25, here 1 (--set")),
        (newer, ("muon_coefficient_type polar_express, here quintic (no --set keeps it)", nesterov)),
        (broken, ("muon_scale_mode 3, here spectral (no --set keeps it)", "muon_extra_scale_factor -1, here 1 (no")),
        (endless, ("muon_num_ns_steps 1000000000000000, here 5 (no --set keeps it)",)),
    ):
        monkeypatch.setattr(TorchDistReader, "args", plain | args)
        said = settings_said(place / "muon", recipe)
        assert all(words in said for words in expected), said
        assert ("num_ns_steps" in said) == (args is endless)
    monkeypatch.setattr(TorchDistReader, "args", plain | older)
    simple = load_recipe("bf16", ["optimizer.preset=muon", "optimizer.muon_coefficient_type=simple"])
    assert "muon_coefficient_type quintic, here simple (--set" in settings_said(place / "muon", simple)


def test_what_adamw_trained_goes_on_with_momentum_of_zeros_and_what_it_has_besides(place: Path, tmp_path: Path) -> None:
    """With a rate of nothing the masters and moments that come out are those that went in."""
    still = {"optimizer__lr": 0.0, "optimizer__beta1": 0.0, "train__save_every": 5}
    started, _, _ = run(train_on(place / "adamw", place, tmp_path / "on", "muon", 5, "more.txt", **still))
    assert any("AdamW trained the checkpoint's matrices: their moments are left" in note for note in started.notes)
    before, after = state_of(place / "adamw"), state_of(tmp_path / "on")
    assert all(torch.equal(after[name], values) for name, values in before.items() if ".param." in name)
    own = [name for name in after if ".exp_avg_sq." in name]
    rest = {name: after[name] - 0.95 * before[name] for name in own}
    assert own and all((each > -1e-6).all() for each in rest.values())  # what one more squared gradient adds
    assert TorchDistReader(tmp_path / "on").common["optimizer"][1]["optimizer"]["state"]["common_step"] == 5


@pytest.mark.parametrize("preset", ["adamw", *in_soak("fp8-lm")])
def test_what_muon_trained_has_no_moments_for_adamw(place: Path, tmp_path: Path, preset: str) -> None:
    made = settings(place / "muon", place / "more.txt", tmp_path / "on", train__steps=6, optimizer__preset=preset)
    way = r"preset=muon, or --skip optimizer"
    with pytest.raises(CheckpointError, match=rf"no moments for optimizer\.preset = {preset}.*{way}"):
        run(made)
    started, _, _ = run(replace(made, skip=frozenset({"optimizer"})))
    assert any("optimizer state is left behind" in note for note in started.notes)


def test_momentum_of_other_parameters_is_refused(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a Muon that left linear_proj to AdamW."""
    whole = TorchDistReader.optimizer_specs.fget  # type: ignore[attr-defined]

    def without(reader: TorchDistReader) -> Any:
        specs = dict(whole(reader))
        name = "decoder.layers.0.self_attention.linear_proj.weight"
        specs[f"optimizer.state.exp_avg.{name}"] = specs.pop(f"optimizer.state.momentum_buffer.{name}")
        return specs

    monkeypatch.setattr(TorchDistReader, "optimizer_specs", property(without))
    with pytest.raises(
        MissingTensor, match=r"(?s)momentum_buffer.*linear_proj.*exp_avg.*linear_proj.*--skip optimizer"
    ):
        run(train_on(place / "muon", place, tmp_path / "on", "muon", 6, "more.txt"))


@pytest.mark.parametrize(
    ("preset", "kind", "wrong"),
    [("muon", "momentum_buffer", math.nan), ("muon", "exp_avg_sq", math.inf), ("adamw", "exp_avg", -math.inf)],
)
def test_moments_and_momentum_that_are_not_finite_are_refused_by_name(
    place: Path, tmp_path: Path, preset: str, kind: str, wrong: float
) -> None:
    """Large ones, whose sum overflows, are finite."""
    shutil.copytree(place / preset, tmp_path / "run")
    source, recipe = TorchDistReader(tmp_path / "run"), load_recipe("bf16", [f"optimizer.preset={preset}"])
    name = f"optimizer.state.{kind}.decoder.layers.1.mlp.linear_fc1.weight"
    name = name if name in source.optimizer_specs else f"optimizer.state.{kind}.{EMBEDDING}"
    gpt = GPT(source.model, recipe.precision)
    optimizer = (
        MasterMuon(gpt, source.model, recipe.optimizer) if preset == "muon" else MasterAdamW(gpt, recipe.optimizer)
    )
    rows = Rows(np.zeros(2, np.int32), None, EqualRows(1, 1), padding=0, largest=0, digest="")
    made = Run(recipe, gpt, optimizer, rows)

    def load(*numbers: float) -> None:
        (chunk, *_) = WithOptimizer(source).chunks(name)
        assert isinstance(chunk.place, Path)
        with open(chunk.place, "r+b") as file:
            file.seek(chunk.offset)
            file.write(np.array(numbers, np.float32).tobytes())
        loading.load_optimizer(source, made, loading.plan_optimizer(source, made))

    load(3e38, 3e38)
    with pytest.raises(DamagedCheckpoint, match=rf"`{re.escape(name)}` has NaN or infinity.*--skip optimizer"):
        load(3e38, wrong)
