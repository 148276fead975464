"""AdamW's state in PyTorch's own checkpoints goes where its parameters go, and runs go on from it."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import conversions
import numpy as np
import pico
import pytest
import tiny_wrappers
import torch
from core_models import of_stages, peer
from soaking import first, in_soak
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from trained_models import MOMENTS, config_of, moments, save, states, train, trained
from trainer_directories import automodel, pytorch

from precisionctl.checkpoints.base import WithOptimizer
from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.dcp.dcp_model import DcpModelReader
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.checkpoints.other_trainers.trainer_run import ParameterGroup, muon_settings
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.commands.hints import open_hinted
from precisionctl.dtypes import DType
from precisionctl.errors import (
    CheckpointError,
    DamagedCheckpoint,
    MappingError,
    MissingTensor,
    PrecisionctlError,
    ShapeMismatch,
)
from precisionctl.param import STATE, Parallelism, TensorSpec, kinds_of, state_name
from precisionctl.planning.make_plan import make_plan
from precisionctl.planning.optimizer_jobs import optimizer_jobs
from precisionctl.recipe import load_recipe
from precisionctl.reports import inspect
from precisionctl.trainer.data.rows import EqualRows, Rows
from precisionctl.trainer.model.gpt import GPT
from precisionctl.trainer.optimizer.adamw import MasterAdamW
from precisionctl.trainer.optimizer.muon import MasterMuon
from precisionctl.trainer.run import Run
from precisionctl.trainer.saved import loading
from precisionctl.verify.compare import compare

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def optimizer_in(path: Path) -> dict[str, Tensor]:
    reader = open_checkpoint(path)
    assert isinstance(reader, TorchDistReader)
    return {name: read_tensor(WithOptimizer(reader), name) for name in reader.optimizer_specs}


def weights_as(tmp_path: Path, what: str, tensors: dict[str, Tensor], reference: Path) -> dict[str, Tensor]:
    """Tensors in the place of weights, by Megatron's names."""
    made = save(tmp_path / f"{what}-as-weights", tensors)
    conversions.run(made, tmp_path / f"{what}-in-megatron", "megatron", reference=reference)
    return conversions.tensors(tmp_path / f"{what}-in-megatron")


@pytest.mark.parametrize("family", ["qwen3-moe", "gpt2", *in_soak("llama-tied", "llama-3", "gemma2", "phi3")])
def test_masters_and_moments_go_where_weights_of_their_names_go(tmp_path: Path, family: str) -> None:
    model, optimizer = trained(family)
    reference = config_of(model, tmp_path / "config")
    made = save(tmp_path / "dcp", states(model, optimizer))
    conversions.run(made, tmp_path / "out", "megatron", "bf16", reference=reference, verify=True)
    found = optimizer_in(tmp_path / "out")
    weights = weights_as(tmp_path, "weights", model.state_dict(), reference)
    assert found.keys() == {f"optimizer.state.{kind}.{name}" for kind in (*MOMENTS, "param") for name in weights}
    assert all(tensor.dtype == torch.float32 for tensor in found.values())
    for kind in MOMENTS:
        expected = weights_as(tmp_path, kind, moments(model, optimizer, kind), reference)
        assert all(torch.equal(found[f"optimizer.state.{kind}.{name}"], one) for name, one in expected.items())
    rounded = conversions.tensors(tmp_path / "out")
    for name, master in weights.items():
        assert torch.equal(found[f"optimizer.state.param.{name}"], master)
        assert torch.equal(rounded[name], master.bfloat16())


@pytest.mark.soak
def test_a_plan_with_megatrons_optimizer_imports_no_torch(tmp_path: Path) -> None:
    model, optimizer = trained("llama-3")
    made = save(tmp_path / "dcp", states(model, optimizer))
    conversions.run(made, tmp_path / "megatron", "megatron", reference=config_of(model, tmp_path / "config"))
    for container in ("torch", "torch_dist"):
        command = ["convert", str(tmp_path / "megatron"), str(tmp_path / "none"), "--to", "megatron", "--dry-run"]
        code = (
            "import sys\n"
            "from precisionctl.cli import main\n"
            f"main({[*command, '--container', container]}, standalone_mode=False)\n"
            "assert 'torch' not in sys.modules\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_megatron_is_told_of_the_updates_and_of_adamw_as_it_was_set(tmp_path: Path) -> None:
    model, optimizer = trained("llama-3", updates=3)
    optimizer.param_groups[0]["initial_lr"] = 0.02
    made = save(tmp_path / "dcp", states(model, optimizer))
    told = conversions.run(made, tmp_path / "out", "megatron", reference=config_of(model, tmp_path / "config"))
    reader = open_checkpoint(tmp_path / "out")
    assert isinstance(reader, TorchDistReader) and reader.iteration == 3 and reader.args["no_save_optim"] is False
    inner = reader.common["optimizer"]["optimizer"]
    assert inner["state"] == {"common_step": 3}
    same = {"lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False, "step": 3, "lr": 0.01, "eps": 1e-8}
    same |= {"betas": (0.9, 0.95), "max_lr": 0.02, "min_lr": 0.0, "default_config": True, "bias_correction": True}
    assert inner["param_groups"] == [
        same | {"wd_mult": 1.0, "weight_decay": 0.1},
        same | {"wd_mult": 0.0, "weight_decay": 0.0},
    ]
    assert any("schedule of learning rates" in note for note in told.notes)


@pytest.mark.parametrize("flat", [True, *in_soak(False)])
def test_of_several_groups_the_settings_of_most_weights_go_along_and_others_are_named(
    tmp_path: Path, flat: bool
) -> None:
    """A rate of their own for embeddings, which do not decay; and a norm that does. The rate of most is a tensor, as
    compiled optimizers want it. `flat` is as torchtitan saves groups, each parameter for itself."""
    model = pico.make("llama-3")
    named = dict(model.named_parameters())
    embeddings = {"model.embed_tokens.weight", "lm_head.weight"}
    plain = {name for name in named if "layernorm" in name}
    groups: list[dict[str, Any]] = [
        {"params": [named[name] for name in sorted(embeddings)], "lr": 1e-3, "weight_decay": 0.0},
        {"params": [named["model.norm.weight"]], "lr": 1e-3, "weight_decay": 0.1},
        {"params": [named[name] for name in named.keys() - embeddings - plain - {"model.norm.weight"}]},
        {"params": [named[name] for name in plain], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=torch.tensor(0.5), weight_decay=0.1, betas=(0.9, 0.95))
    train(model, optimizer, range(1))
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    saved = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, options=options), strict=True))
    reader: Any = open_checkpoint(config_of(model, save(tmp_path / "dcp", saved)))
    assert reader.not_carried == () and reader.trainer_run.settings == {
        "lr": 0.5,
        "eps": 1e-8,
        "weight_decay": 0.1,
        "betas": (0.9, 0.95),
    }
    *_, rates, norms, matrices = reader.trainer_run.left
    assert (rates, norms) == ("different lr for groups of parameters", "weight decay of norms and biases")
    assert matrices.endswith(" and 1 more matrix do not decay")


def test_decay_and_direction_that_are_not_adamws_are_named(tmp_path: Path) -> None:
    model = pico.make("llama-3")
    optimizer = torch.optim.Adam(model.parameters(), weight_decay=0.1, maximize=True)
    train(model, optimizer, range(1))  # type: ignore[arg-type]
    saved = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    reader: Any = open_checkpoint(config_of(model, save(tmp_path / "dcp", saved)))
    *_, decay, direction = reader.trainer_run.left
    assert (decay, direction) == ("weight decay as part of the gradients, as torch.optim.Adam's", "that it maximizes")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, *in_soak(torch.int8)])
def test_moments_that_are_no_floating_point_are_refused_and_can_be_dropped(tmp_path: Path, dtype: torch.dtype) -> None:
    model, optimizer = trained("llama-3")
    whole = states(model, optimizer)
    state = whole["optimizer"]["state"]["model.norm.weight"]
    state["exp_avg"] = state["exp_avg"].to(dtype)
    made = config_of(model, save(tmp_path / "dcp", whole))
    message = r"exp_avg.model.norm.weight` is (int8|float8\w+), and AdamW's is floating.*--drop"
    with pytest.raises(CheckpointError, match=message):
        conversions.run(made, tmp_path / "out", "megatron")
    assert not [*tmp_path.glob("out*")]
    told = conversions.run(made, tmp_path / "out", "megatron", drop_optimizer=True)
    assert any("The optimizer stays behind: `optimizer.state.exp_avg.model.norm.weight`" in note for note in told.notes)


def test_without_its_optimizer_a_checkpoint_is_weights_alone(tmp_path: Path) -> None:
    model, optimizer = trained("llama-3")
    reference = config_of(model, tmp_path / "config")
    made = save(tmp_path / "dcp", states(model, optimizer))
    told = conversions.run(made, tmp_path / "out", "megatron", reference=reference, drop_optimizer=True)
    assert any("The optimizer stays behind: 42 tensors" in note for note in told.notes)
    reader = open_checkpoint(tmp_path / "out")
    assert isinstance(reader, TorchDistReader) and not reader.optimizer_specs and reader.iteration is None


@pytest.mark.parametrize("nested", [{"state": "optimizer"}, *in_soak({"app": None}, {"app": "optim"})])
def test_a_state_dict_one_level_deeper_is_the_same(tmp_path: Path, nested: dict[str, Any]) -> None:
    model, optimizer = trained("llama-3")
    reference = config_of(model, tmp_path / "config")
    ((outer, name),) = nested.items()
    whole = states(model, optimizer)
    inside = {"model": whole["model"]} | ({name: whole["optimizer"]} if name else {})
    conversions.run(save(tmp_path / "dcp", whole), tmp_path / "flat", "megatron", reference=reference)
    conversions.run(save(tmp_path / "deep", {outer: inside}), tmp_path / "out", "megatron", reference=reference)
    conversions.assert_same_tensors(tmp_path / "flat", tmp_path / "out")
    if name:
        deep, flat = optimizer_in(tmp_path / "out"), optimizer_in(tmp_path / "flat")
        assert deep.keys() == flat.keys() and all(torch.equal(deep[key], flat[key]) for key in flat)


@pytest.mark.parametrize("key", ["model", "state_dict"])
def test_pytorch_lightnings_optimizer_has_a_number(tmp_path: Path, key: str) -> None:
    """Its FSDP strategy has `model`, its ModelParallelStrategy `state_dict`, and the optimizers after it (lightning
    2.6.6, pytorch/strategies)."""
    model, optimizer = trained("llama-3")
    reference, whole = config_of(model, tmp_path / "config"), states(model, optimizer)
    conversions.run(save(tmp_path / "dcp", whole), tmp_path / "flat", "megatron", reference=reference)
    state = {key: whole["model"], "optimizer_0": whole["optimizer"]}
    conversions.run(save(tmp_path / "lightning", state), tmp_path / "out", "megatron", reference=reference)
    conversions.assert_same_tensors(tmp_path / "flat", tmp_path / "out")
    found, expected = optimizer_in(tmp_path / "out"), optimizer_in(tmp_path / "flat")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize(
    ("file", "saved"),
    [
        # what Lightning's Trainer has beside weights and optimizers (dump_checkpoint), or of it
        ("meta.pt", {"epoch": 0, "global_step": 7, "pytorch-lightning_version": "2.6.6", "callbacks": {}}),
        ("train/rank0.pt", {"global_step": 7, "rng": np.random.get_state(), "max_steps": 9}),
        ("step_scheduler.pt", {"step": 7, "epoch": 0}),
    ],
    ids=["Lightning", "OLMo-core", "Automodel"],
)
def test_the_step_that_a_trainer_has_beside_pytorchs_checkpoint_is_the_runs(
    tmp_path: Path, file: str, saved: dict[str, Any]
) -> None:
    """Adam may have fewer updates: OLMo-core's SkipStepAdamW skips some."""
    made, model, optimizer = tmp_path / "step7", *trained("llama-3")
    if file == "step_scheduler.pt":
        automodel(made, model, optimizer)
    else:
        pytorch(made / "model_and_optim" if "train/" in file else made, model, optimizer)
    reference = config_of(model, tmp_path / "config")

    def read() -> Any:
        return open_hinted(made, reference=None if "scheduler" in file else reference)

    assert read().iteration == 2, "Adam's count"
    (made / file).parent.mkdir(exist_ok=True)
    torch.save(saved, made / file)
    assert read().iteration == 7 and read().trainer_run.updates == 2
    torch.save({"a program's": "own"}, made / file)
    assert read().iteration == 2
    unread = {
        "is no plain number": {**saved, "global_step": "7", "step": np.int64(7)},
        "was not read": {**saved, "callbacks": json.JSONDecoder},  # a class, as a program may have its own
        "was not read: it is larger": {**saved, "rng": bytes(5 << 20)},
    }
    for why, content in unread.items():
        torch.save(content, made / file)
        reader = read()
        (note,) = [note for note in reader.notes() if "step of the run" in note]
        assert reader.iteration == 2 and "Adam's count stands in for it" in note and f"{file} {why}" in note
    (made / file).write_bytes(b"a program's own")
    if file == "meta.pt":
        assert read().iteration == 2
    else:
        with pytest.raises(DamagedCheckpoint):
            assert read().iteration


def test_lightning_fabrics_file_of_that_name_is_a_programs_own(tmp_path: Path) -> None:
    made = pytorch(tmp_path / "dcp", *trained("llama-3"))
    torch.save({"global_step": 7}, made / "meta.pt")
    assert open_checkpoint(made).iteration == 2


def test_two_optimizers_have_their_own_groups_and_never_one_parameter(tmp_path: Path) -> None:
    model, optimizer = trained("llama-3")
    whole = states(model, optimizer)
    groups, state = whole["optimizer"]["param_groups"], whole["optimizer"]["state"]
    apart: dict[str, Any] = {"model": whole["model"]}
    for number, group in enumerate(groups):
        own = {name: state[name] for name in group["params"]}
        apart[f"optimizer_{number}"] = {"state": own, "param_groups": [group]}
    one, two = (open_checkpoint(save(tmp_path / name, it)) for name, it in (("one", whole), ("two", apart)))
    assert isinstance(one, DcpModelReader) and isinstance(two, DcpModelReader)
    assert one.optimizer_specs == two.optimizer_specs and one.trainer_run == two.trainer_run
    apart["optimizer_1"]["state"]["model.norm.weight"] = state["model.norm.weight"]
    apart["optimizer_0"]["state"]["model.norm.weight"] = state["model.norm.weight"]
    with pytest.raises(DamagedCheckpoint, match="`optimizer_0.state.model.norm.weight.* and `optimizer_1"):
        open_checkpoint(save(tmp_path / "twice", apart))


@pytest.mark.parametrize("text_alone", [True, False])
@pytest.mark.parametrize("wrapper", ["", "_orig_mod.", "module."])
def test_moments_have_the_names_of_their_weights_when_a_part_of_the_model_was_trained(
    tmp_path: Path, wrapper: str, text_alone: bool
) -> None:
    names = ["language_model.model.layers.0.mlp.up_proj.weight", "language_model.lm_head.weight"]
    towers = [] if text_alone else ["vision_tower.patch_embed.weight"]
    weights = {wrapper + name: torch.ones(4, 4) for name in [*towers, *names]}
    state = {
        wrapper + name: {kind: torch.ones(4, 4) for kind in MOMENTS} | {"step": torch.tensor(3.0)} for name in names
    }
    groups = [{"lr": 1e-3, "params": list(state)}]
    made = save(tmp_path / "dcp", {"model": weights, "optimizer": {"state": state, "param_groups": groups}})
    reader = open_checkpoint(made)
    assert isinstance(reader, DcpModelReader) and set(names) <= reader.specs.keys()
    assert reader.optimizer_specs.keys() == {f"{STATE}{kind}.{name}" for kind in MOMENTS for name in names}


def test_a_tower_that_was_trained_goes_to_megatron_without_the_optimizer(tmp_path: Path) -> None:
    model = tiny_wrappers.make("llava")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    tiny_wrappers.save(tmp_path / "hf", "llava")
    made = save(tmp_path / "dcp", states(model, optimizer))
    message = r"`optimizer\.state\.exp_avg\.model\.\S+` is the state of a tower, and Megatron has .*--drop-optimizer"
    with pytest.raises(MappingError, match=message):
        conversions.run(made, tmp_path / "out", "megatron", reference=tmp_path / "hf")
    conversions.run(made, tmp_path / "out", "megatron", reference=tmp_path / "hf", drop_optimizer=True)
    conversions.run(made, tmp_path / "again", "hf", reference=tmp_path / "hf", container="dcp")


def test_accelerates_optimizer_beside_its_model_at_the_step_that_the_trainer_names(tmp_path: Path) -> None:
    model, optimizer = trained("llama-3")
    whole, step = states(model, optimizer), tmp_path / "checkpoint-7"
    save(step / "pytorch_model_fsdp_0", {"model": whole["model"]})
    save(step / "optimizer_0", {"optimizer": whole["optimizer"]})
    config_of(model, step)
    (step / "trainer_state.json").write_text(json.dumps({"global_step": 7}))
    conversions.run(step, tmp_path / "out", "megatron")
    reader = open_checkpoint(tmp_path / "out")
    assert isinstance(reader, TorchDistReader) and reader.iteration == 7
    assert reader.common["optimizer"]["optimizer"]["state"] == {"common_step": 2}
    assert len(reader.optimizer_specs) == 3 * len(reader.specs)
    (step / "trainer_state.json").write_text(json.dumps({"global_step": "7"}))
    with pytest.raises(CheckpointError, match="names no step"):
        conversions.run(step, tmp_path / "other", "megatron")


def test_an_optimizer_of_accelerates_that_was_not_saved_whole_is_refused(tmp_path: Path) -> None:
    """torch writes `.metadata` last."""
    model, optimizer = trained("llama-3")
    whole, step = states(model, optimizer), tmp_path / "checkpoint-7"
    save(step / "pytorch_model_fsdp_0", {"model": whole["model"]})
    apart = save(step / "optimizer_0", {"optimizer": whole["optimizer"]})
    config_of(model, step)
    (apart / ".metadata").rename(tmp_path / "metadata")
    with pytest.raises(CheckpointError, match=r"optimizer_0/ has no \.metadata, .* stopped.*--drop-optimizer"):
        conversions.run(step, tmp_path / "out", "megatron")
    told = conversions.run(step, tmp_path / "out", "megatron", drop_optimizer=True)
    assert any("The optimizer stays behind: optimizer_0/ has no .metadata" in note for note in told.notes)
    (tmp_path / "metadata").rename(apart / ".metadata")
    shutil.copytree(apart, step / "optimizer_1")
    with pytest.raises(CheckpointError, match="in optimizer_0, optimizer_1, of which one alone is read"):
        conversions.run(step, tmp_path / "other", "megatron")
    shutil.rmtree(apart)  # it holds what its names say
    told = conversions.run(step / "pytorch_model_fsdp_0", tmp_path / "weights", "hf", reference=step)
    assert any("Folders are left behind: optimizer_1/." in note for note in told.notes)
    assert not any("pytorch_model_fsdp_0" in note for note in told.notes)
    reader = open_checkpoint(step)
    assert isinstance(reader, DcpModelReader) and len(reader.optimizer_specs) == 2 * len(reader.specs)


def test_an_optimizer_beside_the_model_under_other_keys_is_refused_and_can_be_dropped(tmp_path: Path) -> None:
    model, optimizer = trained("llama-3")
    whole, step = states(model, optimizer), tmp_path / "checkpoint-7"
    save(step / "pytorch_model_fsdp_0", {"model": whole["model"]})
    save(step / "optimizer_0", {"adamw": whole["optimizer"]})
    config_of(model, step)
    with pytest.raises(CheckpointError, match=r"optimizer_0/ .*`adamw\.state\.lm_head\.weight.exp_avg`.*--drop-opt"):
        conversions.run(step, tmp_path / "out", "megatron")
    told = conversions.run(step, tmp_path / "out", "megatron", drop_optimizer=True)
    assert any("The optimizer stays behind: optimizer_0/" in note for note in told.notes)


def test_an_optimizer_that_is_not_adams_is_named_also_where_something_else_is_beside_it(tmp_path: Path) -> None:
    model, _ = trained("llama-3")
    step = tmp_path / "checkpoint-7"
    save(step / "pytorch_model_fsdp_0", {"model": model.state_dict()})
    adafactors = {"state": {"lm_head.weight": {"exp_avg_sq_row": torch.ones(3)}}}
    save(step / "optimizer_0", {"optimizer": adafactors, "ema": torch.ones(3)})
    config_of(model, step)
    with pytest.raises(CheckpointError, match=r"its optimizer has .*exp_avg_sq_row.*--drop-optimizer"):
        conversions.run(step, tmp_path / "out", "megatron")


def test_automodels_optimizer_that_was_not_saved_whole_is_refused(tmp_path: Path) -> None:
    step = automodel(tmp_path / "epoch_0_step_2", *trained("llama-3"))
    (step / "optim" / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"optim/ has no \.metadata, .* stopped.*--drop-optimizer"):
        conversions.run(step, tmp_path / "out", "megatron")


def test_automodels_moments_of_experts_are_those_of_their_linears(tmp_path: Path) -> None:
    model, optimizer = trained("qwen3-moe")
    conversions.run(pytorch(tmp_path / "dcp", model, optimizer), tmp_path / "expected", "megatron")
    step = automodel(tmp_path / "epoch_0_step_2", model, optimizer)
    conversions.run(step, tmp_path / "out", "megatron", verify=True)
    expected, found = (optimizer_in(tmp_path / name) for name in ("expected", "out"))
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def test_moments_of_experts_that_no_weight_or_two_have_are_refused(tmp_path: Path) -> None:
    model, optimizer = trained("qwen3-moe")
    step = automodel(tmp_path / "epoch_0_step_2", model, optimizer)
    experts = "optim.state.model.layers.1.mlp.experts"
    down = open_checkpoint(step).specs["model.layers.1.mlp.experts.0.down_proj.weight"].shape
    for name, shape, message in (
        ("down_projs", (2, 3, 5), r"down_projs\[0\]` is not the state of a parameter"),
        ("0.down_proj.weight", down, r"`model\S+down_projs\[0\]` and `model\S+0.down_proj.weight` are both"),
    ):
        shutil.rmtree(step / "optim")
        fitting = {f"{experts}.down_projs.{kind}": torch.ones(1, *down[::-1]) for kind in MOMENTS}
        save(step / "optim", fitting | {f"{experts}.{name}.{kind}": torch.ones(shape) for kind in MOMENTS})
        with pytest.raises(PrecisionctlError, match=message):
            conversions.run(step, tmp_path / "other", "megatron")


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    first(
        6,
        [
            (
                lambda state: state["model.norm.weight"]["step"].add_(1),
                CheckpointError,
                "different numbers of updates: .* 2 and",
            ),
            (lambda state: [one.pop("step") for one in state.values()], CheckpointError, "how many updates"),
            (
                lambda state: state["model.norm.weight"].pop("step"),
                CheckpointError,
                "updates .* of `model.norm.weight`",
            ),
            *(
                (
                    lambda state, step=step: [one.update(step=torch.tensor(step)) for one in state.values()],
                    DamagedCheckpoint,
                    rf"the step of .* is no count of updates: {said} as a number.*--drop-optimizer",
                )
                for step, said in ((1e30, "1.*"), (5.5, "5.5"), (-1.0, "-1"), ([2.0, 2.0], r"a tensor of shape \[2\]"))
            ),
            (
                lambda state: state.pop("model.norm.weight"),
                MissingTensor,
                r"no state of 1 parameter, such as `model\.norm\.weight`: frozen, or .*--drop-optimizer",
            ),
            (lambda state: state["model.norm.weight"].pop("exp_avg_sq"), MissingTensor, r"missing +\S+exp_avg_sq"),
            (
                lambda state: state.update(stranger=state["model.norm.weight"]),
                MappingError,
                r"`optimizer\.state\.exp_avg\.stranger` is not the state of a parameter",
            ),
            (
                lambda state: state["model.norm.weight"].update(exp_avg=torch.zeros(3)),
                ShapeMismatch,
                r"exp_avg\.model\.norm\.weight` is \[3\]",
            ),
        ],
    ),
)
def test_an_optimizer_that_does_not_fit_is_refused_and_can_be_dropped(
    tmp_path: Path, spoil: Any, error: Any, message: str
) -> None:
    model, optimizer = trained("llama-3")
    whole = states(model, optimizer)
    spoil(whole["optimizer"]["state"])
    made = save(tmp_path / "dcp", whole)
    reference = config_of(model, tmp_path / "config")
    with pytest.raises(error, match=message):
        conversions.run(made, tmp_path / "out", "megatron", reference=reference)
    conversions.run(made, tmp_path / "out", "megatron", reference=reference, drop_optimizer=True)


@pytest.mark.parametrize("family", ["deepseek-v3", *in_soak("gemma4", "gemma4-moe")])
def test_a_routers_bias_that_a_rule_changes_and_a_buffer_need_no_state(tmp_path: Path, family: str) -> None:
    model, optimizer = trained(family)
    reference = config_of(model, tmp_path / "config")
    conversions.run(save(tmp_path / "dcp", states(model, optimizer)), tmp_path / "out", "megatron", reference=reference)
    assert not any(name.endswith(("expert_bias", "layer_scalar")) for name in optimizer_in(tmp_path / "out"))


def test_megatron_core_and_resume_hold_the_optimizer_that_came_from_pytorch(tmp_path: Path) -> None:
    """Real megatron-core at TP 2, with its plain optimizer; and a run of ours."""
    model, optimizer = trained("llama-2")
    made = save(tmp_path / "dcp", states(model, optimizer))
    reference = config_of(model, tmp_path / "config")
    conversions.run(
        made, tmp_path / "out", "megatron", "bf16", reference=reference, parallelism=Parallelism(2), verify=True
    )
    reader = open_checkpoint(tmp_path / "out")
    assert isinstance(reader, TorchDistReader)
    job = {"do": "load", "directory": str(reader.path), "optimizer": "plain", "out": str(tmp_path / "held")}
    peer(tmp_path, [job], tensor_parallel=2)
    expected = optimizer_in(tmp_path / "out")
    for kind in ("param", *MOMENTS):
        held = of_stages(f"{tmp_path}/held.optimizer.{kind}", 2, 1, layers=2)
        assert all(torch.equal(tensor, expected[f"optimizer.state.{kind}.{name}"]) for name, tensor in held.items())
        assert len(held) * 3 == len(expected)
    recipe = load_recipe("bf16")
    gpt = GPT(reader.model, recipe.precision)
    run = Run(recipe, gpt, MasterAdamW(gpt, recipe.optimizer), no_rows())
    loading.load_optimizer(reader, run, loading.plan_optimizer(reader, run))
    assert run.optimizer.steps == 2
    for kind, tensors in run.optimizer.tensors.items():
        assert all(torch.equal(tensor, expected[f"optimizer.state.{kind}.{name}"]) for name, tensor in tensors.items())


def by_muon(tmp_path: Path, *others: str, frozen: tuple[str, ...] = ()) -> tuple[Any, torch.optim.Muon, Path]:
    """A model after an update by torch's Muon, of the layers' matrices but for `others`, and AdamW; neither has what is
    `frozen`."""
    model = pico.make("llama-3")
    parts: list[list[torch.nn.Parameter]] = [[], []]
    for name, parameter in model.named_parameters():
        if name.endswith(frozen):
            parameter.requires_grad_(False)
            continue
        parts[".layers." in name and parameter.dim() > 1 and not name.endswith(others)].append(parameter)
    muon = torch.optim.Muon(parts[True], lr=0.02, momentum=0.9)
    optimizers = [torch.optim.AdamW(parts[False], lr=1e-3), muon]
    ids = torch.arange(32).view(2, 16)
    model(input_ids=ids, labels=ids).loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    saved = dict(zip(("model", "optimizer"), get_state_dict(model, optimizers), strict=True))
    return model, muon, config_of(model, save(tmp_path / "run", saved))


def test_muons_momentum_goes_to_megatron_and_not_to_other_trainers(tmp_path: Path) -> None:
    model, muon, path = by_muon(tmp_path)
    told = conversions.run(path, tmp_path / "out", "megatron", parallelism=Parallelism(2), verify=True)
    assert any("Nesterov, scale and Newton-Schulz steps of Muon" in note for note in told.notes)
    found = optimizer_in(tmp_path / "out")
    kinds = {name: set() for name in conversions.tensors(tmp_path / "out")}
    for name in found:
        kind, _, parameter = name.removeprefix(STATE).partition(".")
        kinds[parameter].add(kind)
    for name, each in kinds.items():
        linear = ".linear_" in name and "norm" not in name
        assert each == ({"param", "momentum_buffer"} if linear else {"param", *MOMENTS}), name
    momenta = {name: muon.state[one]["momentum_buffer"] for name, one in model.named_parameters() if one in muon.state}
    expected = weights_as(tmp_path, "momenta", model.state_dict() | momenta, path)
    of_muon = [name for name, each in kinds.items() if "momentum_buffer" in each]
    assert all(torch.equal(found[f"{STATE}momentum_buffer.{name}"], expected[name]) for name in of_muon)
    reader: Any = open_checkpoint(tmp_path / "out")
    first, second = (one["optimizer"] for one in reader.common["optimizer"].values())
    (group,) = first["param_groups"]
    assert {key: group[key] for key in ("lr", "weight_decay", "momentum", "momentum_beta")} == {
        "lr": 0.02,
        "weight_decay": 0.1,
        "momentum": 0.9,
        "momentum_beta": 0.9,
    }
    assert (second["state"], second["param_groups"][0]["eps"]) == ({"common_step": 1}, 1e-8)
    both = compare(open_checkpoint(path), reader)
    assert both.equal and not any("settings" in each.what for each in both.not_compared)
    for container in ("dcp", "deepspeed-universal"):
        with pytest.raises(CheckpointError, match=r"Muon's momentum \(`momentum_buffer`\): .*--drop-optimizer"):
            conversions.run(path, tmp_path / container, "hf", container=container)
    with pytest.raises(CheckpointError, match=r"Muon.*preset=muon.*--skip optimizer"):
        loading.first_step(open_checkpoint(path), (), load_recipe("bf16"))
    conversions.run(path, tmp_path / "weights", "megatron", drop_optimizer=True)
    goes_on_by_muon(path, found)


def goes_on_by_muon(path: Path, expected: dict[str, Tensor]) -> None:
    """A run by Muon goes on from the momentum and moments of torch's optimizers, as a conversion has them."""
    reader, recipe = open_checkpoint(path), load_recipe("bf16", ["optimizer.preset=muon"])
    assert loading.first_step(reader, (), recipe) == 1
    gpt = GPT(reader.model, recipe.precision)
    run = Run(recipe, gpt, MasterMuon(gpt, reader.model, recipe.optimizer), no_rows())
    loading.load_optimizer(reader, run, loading.plan_optimizer(reader, run))
    assert run.optimizer.steps == 1
    for kind, tensors in run.optimizer.tensors.items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, expected[f"{STATE}{kind}.{name}"][: len(tensor)]), (kind, name)
    (note,) = (each for each in loading.loading_notes(recipe, reader, ()) if each.startswith("optimizer: "))
    assert "masters, moments and momentum of the checkpoint, after 1 update; it had" in note
    assert "momentum 0.9, here" not in note and "weight_decay 0.01" not in note  # which most weights never had
    assert "lr 0.02, here 1e-05 (--set optimizer.lr=0.02 keeps it)" in note
    for words in ("lr 0.02 by Muon and 0.001 by AdamW", "weight_decay 0.1 by Muon and 0.01 by AdamW"):
        assert f"{words}, and one value is for both from now on" in note
    keeping = load_recipe("bf16", ["optimizer.preset=muon", "optimizer.lr=0.02", "optimizer.weight_decay=0.5"])
    (note,) = (each for each in loading.loading_notes(keeping, reader, ()) if each.startswith("optimizer: "))
    assert "weight_decay 0.1, here 0.5 (--set optimizer.weight_decay=0.1 keeps it)" in note and "lr 0.02, h" not in note


def no_rows() -> Rows:
    return Rows(np.zeros(2, np.int32), None, EqualRows(1, 1), padding=0, largest=0, digest="")


def test_muons_settings_are_those_of_most_parameters_and_never_of_a_group_without_any(tmp_path: Path) -> None:
    own = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
    few, many = (
        ParameterGroup({**own, "lr": rate}, dict.fromkeys(names, (4, 4))) for rate, names in ((1, "a"), (2, "bc"))
    )
    empty = ParameterGroup({**own, "lr": -5.0}, {})
    assert muon_settings([empty, few, many], tmp_path) == {**own, "lr": 2.0}
    for wrong in ({"momentum": 1.0}, {"lr": None}, {"weight_decay": float("nan")}):
        with pytest.raises(DamagedCheckpoint, match="which Muon does not take.*--drop-optimizer"):
            muon_settings([many, ParameterGroup(own | wrong, {"d": (4, 4)})], tmp_path)


def test_momentum_that_megatrons_muon_would_not_go_on_from_is_refused_with_the_reason(tmp_path: Path) -> None:
    _, _, path = by_muon(tmp_path, "o_proj.weight")
    what = r"`model.layers.0.self_attn.o_proj.weight` was trained by AdamW, and Megatron's Muon takes it: .*--drop-opt"
    with pytest.raises(MappingError, match=what):
        conversions.run(path, tmp_path / "out", "megatron")
    model = pico.make("llama-3")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, optimizer, range(1))  # type: ignore[arg-type]
    path = config_of(model, save(tmp_path / "sgd", states(model, optimizer)))  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"of another optimizer than torch's Muon.*--drop-optimizer"):
        conversions.run(path, tmp_path / "out", "megatron")


@pytest.mark.parametrize("frozen", ["o_proj.weight", "k_proj.weight"])
def test_a_matrix_without_state_beside_muon_is_said_to_have_none(tmp_path: Path, frozen: str) -> None:
    """Alone, and beside others in Megatron's `linear_qkv`."""
    _, _, path = by_muon(tmp_path, frozen=(frozen,))
    what = rf"no state of 2 parameters, such as `model.layers.0.self_attn.{frozen}`: frozen, or .*--drop-optimizer"
    with pytest.raises(MissingTensor, match=what):
        conversions.run(path, tmp_path / "out", "megatron")


def test_an_indexer_without_state_beside_muon_is_not_said_to_be_adamws(tmp_path: Path) -> None:
    """No gradient comes to it in transformers. With AdamW it begins with zeros; of Muon a momentum is missing."""
    pico.save(tmp_path / "source", "deepseek-v3.2")
    jobs = make_plan(open_checkpoint(tmp_path / "source"), "megatron").jobs
    trained = [job for job in jobs if job.row.layers != "indexed"]
    kinds = {name: kinds_of(job.name, len(job.row.sizes), muon=True)[1:] for job in trained for name in job.reads}
    specs = {state_name(kind, name): TensorSpec((1,), DType.float32) for name, each in kinds.items() for kind in each}
    with pytest.raises(MappingError, match=r"indexer\..*` has no optimizer state, and Megatron's Muon takes it"):
        optimizer_jobs(jobs, SimpleNamespace(layout="hf", optimizer_specs=specs), "megatron", masters=True)


def test_an_optimizer_under_numbers_is_that_of_the_parameters_in_their_order(tmp_path: Path) -> None:
    """As megatron-fsdp's users save theirs: `optimizer.state_dict()` itself."""
    model, optimizer = trained("qwen3-moe")
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    reader: Any = open_checkpoint(config_of(model, save(tmp_path / "run", saved)))
    both = WithOptimizer(reader)
    assert reader.not_carried == () and reader.trainer_run.updates == 2
    for name, tensor in moments(model, optimizer, "exp_avg").items():
        rows = [read_tensor(both, found) for found in both.specs if found.startswith(f"{STATE}exp_avg.{name}")]
        assert torch.equal(torch.stack(rows) if len(rows) > 1 else rows[0], tensor), name
    one_by_one = {name: one for name, one in saved["model"].items() if ".experts." not in name}
    for name, one in saved["model"].items():
        if ".experts." in name:
            place, kind = name.rsplit(".", 1)
            kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
            for index, expert in enumerate(one):
                halves = expert.chunk(len(kinds))
                one_by_one |= {
                    f"{place}.{index}.{each}.weight": half.clone() for each, half in zip(kinds, halves, strict=True)
                }
    reader = open_checkpoint(config_of(model, save(tmp_path / "one-by-one", saved | {"model": one_by_one})))
    with pytest.raises(CheckpointError, match=r"gate_proj\.weight` and its like in one tensor, .*--drop-optimizer"):
        _ = reader.optimizer_specs


def _another_optimizer(saved: dict[str, Any]) -> None:
    saved["optim"] = saved["optimizer"]


def _names_too(saved: dict[str, Any]) -> None:
    kinds: dict[str, Tensor] = {"step": torch.tensor(2.0), **dict.fromkeys(MOMENTS, torch.ones(64))}
    saved["optim"] = {"state": {"model.norm.weight": kinds}, "param_groups": []}


def _in_state(change: Any) -> Any:
    return lambda saved: change(saved["optimizer"]["state"])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_in_state(lambda state: state[4].pop("step")), "state of parameter 4 has no `step`"),
        *in_soak((_in_state(lambda state: state[4].pop("exp_avg")), "state of parameter 4 has no `exp_avg`")),
        *in_soak(
            (
                _in_state(lambda state: state[3].update(dict.fromkeys(MOMENTS, torch.ones(5)))),
                r"state of `model\.layers\.0\.self_attn\.v_proj\.weight` is not of its shape",
            ),
        ),
        (lambda saved: saved["optimizer"]["param_groups"][0]["params"].pop(), "groups of 15 and 5 parameters"),
        (
            _in_state(lambda state: [one.update(max_exp_avg_sq=one["exp_avg"]) for one in state.values()]),
            r"its optimizer has \['max_exp_avg_sq'\], which AdamW has not",
        ),
        *in_soak((_in_state(lambda state: state.update({1 << 40: state[0]})), "1099511627776.* that no optimizer has")),
        (_another_optimizer, "`optimizer`, `optim` number their parameters, and nothing says which they are"),
        (_names_too, "`optimizer` has numbers for parameters, and another optimizer has names"),
    ],
)
def test_an_optimizer_under_numbers_that_is_not_known_is_refused_with_the_reason(
    tmp_path: Path, spoil: Any, message: str
) -> None:
    model, optimizer = trained("llama-3")
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    spoil(saved)
    path = config_of(model, save(tmp_path / "run", saved))
    for container in ("dcp", "deepspeed-universal"):
        with pytest.raises(CheckpointError, match=f"{message}.*--drop-optimizer"):
            conversions.run(path, tmp_path / container, "hf", container=container)
    with pytest.raises(CheckpointError, match=f"{message}.*--skip optimizer"):
        loading.first_step(open_checkpoint(path), (), load_recipe("bf16"))
    assert re.search(message, inspect.describe(open_checkpoint(path))["optimizer"]["unreadable"])
    told = conversions.run(path, tmp_path / "out", "hf")
    assert any(re.search(f"The optimizer stays behind: .*{message}", note) for note in told.notes)
    with_run = compare(open_checkpoint(tmp_path / "out"), open_checkpoint(path))
    assert with_run.equal and any("run" in str(one) for one in with_run.not_compared)


@pytest.mark.parametrize("family", ["falcon", *in_soak("gpt-j")])
def test_an_optimizer_under_numbers_of_a_family_whose_order_is_not_known_is_refused(
    tmp_path: Path, family: str
) -> None:
    model, optimizer = trained(family)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    path = config_of(model, save(tmp_path / "run", saved))
    with pytest.raises(CheckpointError, match="the order of this model's .* is not known.*--drop-optimizer"):
        conversions.run(path, tmp_path / "out", "megatron")
    conversions.run(path, tmp_path / "out", "megatron", drop_optimizer=True)


def test_amsgrads_largest_moments_are_refused_under_names_too(tmp_path: Path) -> None:
    model, optimizer = trained("llama-3")
    whole = states(model, optimizer)
    for one in whole["optimizer"]["state"].values():
        one["max_exp_avg_sq"] = one["exp_avg_sq"]
    path = config_of(model, save(tmp_path / "run", whole))
    with pytest.raises(CheckpointError, match=r"has \['max_exp_avg_sq'\], which AdamW has not.*--drop-optimizer"):
        conversions.run(path, tmp_path / "out", "megatron")
