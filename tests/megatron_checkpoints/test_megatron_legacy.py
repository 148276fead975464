"""The `torch` format of Megatron, written and read: any sizes, other spellings, older orders, FP8 state."""

import argparse
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pico
import pytest
import torch
from in_memory import InMemory, recorded, to_megatron
from soaking import in_soak
from torch import Tensor

from precisionctl.architectures.families import supported
from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.chunks import read_tensor, write_rows
from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.checkpoints.megatron.carried_run import CarriedRun
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.checkpoints.torch_dist.writer import TorchDistWriter
from precisionctl.checkpoints.torch_files.torch_zip import LocatedTensor, skeleton
from precisionctl.checkpoints.torch_legacy.names import parallel_of
from precisionctl.checkpoints.torch_legacy.optimizer import common_optimizer, optimizer_tensors
from precisionctl.checkpoints.torch_legacy.reader import LegacyReader
from precisionctl.checkpoints.torch_legacy.writer import LegacyWriter
from precisionctl.conversion.convert import convert
from precisionctl.dtypes import DType
from precisionctl.errors import ShapeMismatch
from precisionctl.fp8.state import ROLES, DelayedScaling, Fp8State, Fp8States, RoleState
from precisionctl.param import GATED_ROWS, Parallelism, TensorSpec
from precisionctl.planning.make_plan import make_plan

DENSE = [
    Parallelism(),
    Parallelism(tensor=2),
    Parallelism(pipeline=2),
    Parallelism(tensor=2, pipeline=2, virtual=2),
    Parallelism(pipeline=4),
    Parallelism(pipeline=3, first_layers=2),
    Parallelism(pipeline=2, first_layers=3),
    Parallelism(tensor=2, pipeline=3, first_layers=1, last_layers=2),
]
EXPERTS = [
    Parallelism(expert=2),
    Parallelism(tensor=2, pipeline=2, expert=2),
    Parallelism(tensor=2, expert=4, expert_tensor=1),
    Parallelism(tensor=4, expert=2, expert_tensor=2),
]


def model(tmp_path: Path, family: str, tensor: int = 1) -> InMemory:
    pico.save(tmp_path / "hf", family, dtype=torch.bfloat16, num_hidden_layers=4, num_key_value_heads=4)
    return to_megatron(HuggingFaceReader(tmp_path / "hf"), parallelism=Parallelism(tensor))


def write(source: Reader, directory: Path, sizes: Parallelism, fp8: Fp8States | None = None, **settings: Any) -> None:
    plan = make_plan(source, "megatron", parallelism=sizes)
    writer = LegacyWriter(directory, plan.model, plan.targets, parallelism=plan.parallelism, **settings)
    convert(plan, source, writer)
    writer.finish(fp8)


def same(a: Reader, b: Reader) -> None:
    assert a.specs.keys() == b.specs.keys()
    for name in a.specs:
        assert torch.equal(read_tensor(a, name), read_tensor(b, name)), name


@pytest.mark.parametrize("sizes", DENSE, ids=str)
@pytest.mark.parametrize("family", ["llama-tied", *in_soak("llama-3", "llama-all-biases")])
def test_what_is_written_for_any_sizes_is_read_as_it_was(tmp_path: Path, family: str, sizes: Parallelism) -> None:
    source = model(tmp_path, family)
    write(source, tmp_path / "release", sizes, companions=source.companions)
    reader = LegacyReader(tmp_path / "release")
    same(reader, source)
    assert reader.parallelism == replace(sizes, first_layers=None, last_layers=None)  # layers are counted
    assert reader.model == source.model
    assert reader.iteration is None


@pytest.mark.parametrize("family", pico.representing(pico.mixers))
def test_every_family_is_cut_and_put_together_again(tmp_path: Path, family: str) -> None:
    pico.save(tmp_path / "hf", family, dtype=torch.bfloat16)
    hf = HuggingFaceReader(tmp_path / "hf")
    source = to_megatron(hf)
    stages = next(size for size in range(2, 100) if source.model.num_layers % size == 0)
    sizes = Parallelism(tensor=2, pipeline=stages, expert=2 if source.model.moe else 1)
    write(source, tmp_path / "release", sizes, companions=source.companions)
    same(LegacyReader(tmp_path / "release"), source)


@pytest.mark.parametrize("family", ["qwen3", "gemma4", "olmo2"])
def test_as_many_ranks_as_heads_have_norms_of_one_head_whole_and_norms_over_all_in_parts(
    tmp_path: Path, family: str
) -> None:
    """Each is as long as what its rank gives linear_proj, and config.json says which of the two it is."""
    source = model(tmp_path, family, 4)
    assert source.model.num_attention_heads == 4
    write(source, tmp_path / "release", Parallelism(tensor=4), companions=source.companions)
    same(LegacyReader(tmp_path / "release"), source)


@pytest.mark.parametrize("sizes", EXPERTS, ids=str)
def test_experts_are_dealt_out_and_found_again(tmp_path: Path, sizes: Parallelism) -> None:
    source = model(tmp_path, "qwen3-moe", sizes.tensor)
    write(source, tmp_path / "release", sizes)
    reader = LegacyReader(tmp_path / "release")
    same(reader, source)
    assert reader.parallelism == sizes


def test_an_expert_tensor_size_that_has_no_directories_is_refused(tmp_path: Path) -> None:
    source = model(tmp_path, "qwen3-moe")
    with pytest.raises(ShapeMismatch, match="no place in directories of 1 tensor ranks"):
        write(source, tmp_path / "release", Parallelism(expert_tensor=2))


def archives(directory: Path) -> dict[str, bytes]:
    return {path.parent.name: path.read_bytes() for path in directory.rglob("*.pt")}


def test_going_through_torch_dist_and_back_gives_the_same_bytes(tmp_path: Path) -> None:
    source, sizes = model(tmp_path, "llama-tied"), Parallelism(tensor=2, pipeline=2)
    write(source, tmp_path / "first", sizes)
    reader = LegacyReader(tmp_path / "first")
    plan = make_plan(reader, "megatron", parallelism=Parallelism(4))
    (tmp_path / "dist").mkdir()
    writer = TorchDistWriter(tmp_path / "dist", plan.model, plan.targets, parallelism=Parallelism(4))
    convert(plan, reader, writer)
    writer.finish(None)
    write(TorchDistReader(tmp_path / "dist"), tmp_path / "second", sizes)
    assert len(archives(tmp_path / "first")) == 4
    assert archives(tmp_path / "first") == archives(tmp_path / "second")


def same_states(a: Fp8States, b: Fp8States) -> None:
    assert (a.recipe, a.iteration, a.producer) == (b.recipe, b.iteration, b.producer)
    assert a.modules.keys() == b.modules.keys()
    for module, state in a.modules.items():
        for role in ROLES:
            assert torch.equal(state.roles[role].scale, b.modules[module].roles[role].scale), module
            assert torch.equal(state.roles[role].amax_history, b.modules[module].roles[role].amax_history), module


def of_experts() -> Fp8States:
    """A different state for each of eight experts in the layers that have some."""
    generator = torch.Generator().manual_seed(1)
    modules = {}
    for layer in (1, 2, 3):
        for linear in ("linear_fc1", "linear_fc2"):
            parts = {role: torch.rand(8, 5, generator=generator) + 0.5 for role in ROLES}
            state = Fp8State({role: RoleState(part[:, 0], part[:, 1:]) for role, part in parts.items()})
            modules[f"decoder.layers.{layer}.mlp.experts.{linear}"] = state
    return Fp8States(DelayedScaling(amax_history_len=4), modules, iteration=7)


@pytest.mark.parametrize("sizes", [Parallelism(), Parallelism(tensor=2, pipeline=2, expert=2)], ids=str)
def test_fp8_state_goes_into_every_rank_and_comes_back_by_expert(tmp_path: Path, sizes: Parallelism) -> None:
    source = model(tmp_path, "qwen3-moe")
    states = of_experts()
    write(source, tmp_path / "release", sizes, states)
    reader = LegacyReader(tmp_path / "release")
    assert reader.fp8 is not None
    same_states(reader.fp8, states)
    assert reader.args["fp8_recipe"] == "delayed"
    same(reader, source)


def test_fp8_state_can_stay_in_the_sidecar(tmp_path: Path) -> None:
    source = model(tmp_path, "llama-3")
    states = recorded(source)
    write(source, tmp_path / "release", Parallelism(2), states, live=False)
    reader = LegacyReader(tmp_path / "release")
    assert reader.fp8 is not None
    same_states(reader.fp8, states)
    content = skeleton(tmp_path / "release" / "mp_rank_01" / "model_optim_rng.pt")["model"]
    payloads = {name: value for name, value in content.items() if "_extra_state" in name}
    assert "decoder.layers.3.self_attention.linear_qkv._extra_state" in payloads
    assert "decoder.final_layernorm._extra_state" in payloads
    assert all(value.shape == (0,) for value in payloads.values())


@pytest.mark.parametrize("sizes", [Parallelism(2, 2), Parallelism(1, 2, expert=2)], ids=str)
def test_an_optimizer_is_written_by_parameter(tmp_path: Path, sizes: Parallelism) -> None:
    source = model(tmp_path, "qwen3-moe" if sizes.expert > 1 else "llama-tied")
    torch.manual_seed(0)
    optimizer = {
        f"optimizer.state.{kind}.{name}": torch.randn(spec.shape)
        for name, spec in source.specs.items()
        for kind in ("exp_avg", "exp_avg_sq", "param")
    }
    plan = make_plan(source, "megatron", parallelism=sizes)
    targets = dict(plan.targets)
    for name, values in optimizer.items():
        parameter = name.split(".", 3)[3]
        targets[name] = TensorSpec(tuple(values.shape), DType.of(values.dtype), plan.targets[parameter].parallel)
    groups = [{"lr": 0.5, "wd_mult": 1.0, "params": []}, {"lr": 0.25, "wd_mult": 0.0, "params": []}]
    settings = {"optimizer": {"state": {"common_step": 9}, "param_groups": groups}}
    writer = LegacyWriter(
        tmp_path / "iter_0000009",
        plan.model,
        targets,
        parallelism=sizes,
        run=CarriedRun(
            iteration=9,
            args={"use_distributed_optimizer": True},
            common={"optimizer": settings, "opt_param_scheduler": {"num_steps": 3}},
        ),
    )
    writer.lay_out()
    for name, values in {**source.tensors, **optimizer}.items():
        write_rows(writer, name, 0, values)
    writer.finish(None)
    reader = LegacyReader(tmp_path / "iter_0000009")
    same(reader, source)
    assert reader.optimizer_specs.keys() == optimizer.keys()
    both = SimpleNamespace(specs=reader.optimizer_specs, chunks=reader.chunks)
    for name, values in optimizer.items():
        assert torch.equal(read_tensor(both, name), values), name
    found = reader.common["optimizer"]["optimizer"]
    assert found["state"] == {"common_step": 9}
    assert [(group["lr"], group["wd_mult"]) for group in found["param_groups"]] == [(0.5, 1.0), (0.25, 0.0)]
    assert reader.common["opt_param_scheduler"] == {"num_steps": 3}
    assert reader.iteration == 9
    assert reader.args["use_distributed_optimizer"] is False


@pytest.mark.parametrize(("step", "known"), [(9, True), (9.0, True), (2.0**63, False), (math.inf, False), ("9", False)])
def test_the_step_of_an_optimizer_is_a_number_of_updates_or_unknown(step: object, known: bool) -> None:
    saved = {"optimizer": {"state": {0: {"step": step}}, "param_groups": []}}
    state = common_optimizer(saved, Path("here"))["optimizer"]["state"]
    assert state == ({"common_step": 9} if known else {})


@pytest.mark.parametrize("groups", [[[0, 1]], [[0], [1]]])
def test_parameters_of_one_dimension_are_apart_only_where_a_group_is_without_weight_decay(
    groups: list[list[int]],
) -> None:
    """Megatron makes such a group for them, unless all weights decay alike (`_get_param_groups`)."""
    shapes = {"fc.weight": (4, 2), "norm.weight": (4,)}
    values = {
        name: LocatedTensor(DType.float32, shape, 8 * number) for number, (name, shape) in enumerate(shapes.items())
    }
    inner = {
        "state": {number: {"exp_avg": value} for number, value in enumerate(values.values())},
        "param_groups": [{"params": each, "wd_mult": float(not index)} for index, each in enumerate(groups)],
    }
    found = dict(optimizer_tensors({"optimizer": inner}, [values], Path("here")))
    assert found == {f"optimizer.state.exp_avg.{name}": value for name, value in values.items()}


BEFORE_CORE = {
    "embedding.word_embeddings.weight": "embedding.word_embeddings.weight",
    "self_attention.linear_qkv.layer_norm_weight": "encoder.layers.{}.input_layernorm.weight",
    "self_attention.linear_qkv.weight": "encoder.layers.{}.self_attention.query_key_value.weight",
    "self_attention.linear_qkv.bias": "encoder.layers.{}.self_attention.query_key_value.bias",
    "self_attention.linear_proj.weight": "encoder.layers.{}.self_attention.dense.weight",
    "self_attention.linear_proj.bias": "encoder.layers.{}.self_attention.dense.bias",
    "mlp.linear_fc1.layer_norm_weight": "encoder.layers.{}.post_attention_layernorm.weight",
    "mlp.linear_fc1.weight": "encoder.layers.{}.mlp.dense_h_to_4h.weight",
    "mlp.linear_fc1.bias": "encoder.layers.{}.mlp.dense_h_to_4h.bias",
    "mlp.linear_fc2.weight": "encoder.layers.{}.mlp.dense_4h_to_h.weight",
    "mlp.linear_fc2.bias": "encoder.layers.{}.mlp.dense_4h_to_h.bias",
    "decoder.final_layernorm.weight": "encoder.final_layernorm.weight",
    "output_layer.weight": "output_layer.weight",
}
"""Megatron-LM's names before Megatron-Core, below `language_model`."""


def nested(state: dict[str, Tensor]) -> dict[str, Any]:
    """As those models saved: `embedding.word_embeddings`, `encoder` and `output_layer` are tables of their own."""
    found: dict[str, Any] = {"embedding": {"word_embeddings": {}}, "encoder": {}, "output_layer": {}}
    for name, values in state.items():
        part, _, rest = name.partition(".")
        if part == "embedding":
            found["embedding"]["word_embeddings"]["weight"] = values
        else:
            found[part][rest] = values
    return {"language_model": found}


@pytest.mark.parametrize("version", [0, 1.0, 2.0, 3.0])
def test_the_order_of_qkv_before_checkpoint_version_2_is_undone(tmp_path: Path, version: float) -> None:
    """0: [3, heads, channels]; 1.0: [heads, channels, 3]; since 2.0: [heads, 3, channels]."""
    source = model(tmp_path, "llama-all-biases")
    write(source, tmp_path / "new", Parallelism(tensor=2))
    heads, channels = 4, 16
    for rank in ("mp_rank_00", "mp_rank_01"):
        path = tmp_path / "new" / rank / "model_optim_rng.pt"
        content = torch.load(path, weights_only=False)
        old = {}
        for name, values in content["model"].items():
            if "_extra_state" in name:
                continue
            layer = name.split(".")[2] if ".layers." in name else ""
            if ".linear_qkv.weight" in name or ".linear_qkv.bias" in name:
                by_head = values.view(heads // 2, 3, channels, *values.shape[1:])
                order = {0: (1, 0, 2), 1.0: (0, 2, 1)}.get(version, (0, 1, 2))
                values = by_head.permute(*order, *range(3, by_head.dim())).reshape(values.shape)
            old[BEFORE_CORE[name.removeprefix(f"decoder.layers.{layer}.")].format(layer)] = values.clone()
        args = argparse.Namespace(**vars(content["args"]))
        (tmp_path / "old" / rank).mkdir(parents=True)
        torch.save(
            {"args": args, "checkpoint_version": version, "iteration": 1, "model": nested(old)},
            tmp_path / "old" / rank / "model_optim_rng.pt",
        )
    same(LegacyReader(tmp_path / "old"), source)


@pytest.mark.parametrize("model_type", supported())
def test_parameters_are_cut_as_the_rows_of_every_family_say(model_type: str) -> None:
    for row in supported()[model_type].all_rows:
        name = re.sub(r"\{\w+\}", "0", row.megatron)
        # by shapes, and of delta nets, Mamba's mixers and gates of heads by arguments
        by_shape = re.search(r"(_q_down_proj|_kv_down_proj|\.[qk]_layernorm)\.weight$", name)
        if not by_shape and not re.search(r"\.(in_proj|conv1d)\.\w+$", name) and not row.parallel.names:
            assert parallel_of(name, row.parallel == GATED_ROWS) == row.parallel, name
