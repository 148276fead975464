"""megatron-core as the judge of experts, latent attention, layers that differ, and optimizers of each kind.

What it saves we read bit for bit; what we write of it, cut in another way, it loads at its default strictness.
"""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from core_models import MODELS, of_experts, of_stages, peer
from programs import word_for_soak
from soaking import few
from torch import Tensor

from precisionctl.checkpoints.chunks import read_tensor, write_rows
from precisionctl.checkpoints.megatron.carried_run import NO_RUN, CarriedRun, carry_run
from precisionctl.checkpoints.megatron.keys import expert_of
from precisionctl.checkpoints.torch_dist.masters import differing_masters
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.checkpoints.torch_dist.writer import TorchDistWriter
from precisionctl.checkpoints.torch_files import torch_zip, torch_zip_writer
from precisionctl.checkpoints.torch_files.dcp_tensors import LogicalTensors
from precisionctl.model.model_shape import ModelShape
from precisionctl.param import COLUMNS, GATED_ROWS, REPLICATED, ROWS, Parallel, Parallelism

SHAPE = ModelShape("llama", 4, 64, 96, 8, 4, 16, 256, 256, 128)
WAYS = ("plain", "fully_reshardable", "dp_reshardable")
BRIEFLY = ("plain", "dp_reshardable")
"""Of tensors and stages: experts' ranks, and runs that go on, have the third way too."""
ROWS_OF = ("word_embeddings.weight", "output_layer.weight", "linear_qkv.weight", "linear_qkv.bias", "up_proj.weight")


def form(name: str) -> Parallel:
    """How tensor parallelism cuts a tensor, by the rules of Megatron's layers."""
    leaf = name.split("linear_fc1.")[-1]
    if "linear_fc1.weight" in name and leaf.startswith("weight"):
        return GATED_ROWS
    if "linear_fc2.weight" in name or name.endswith("linear_proj.weight"):
        return COLUMNS
    return ROWS if name.endswith(ROWS_OF) else REPLICATED


def rewrite(source: Path, target: Path, parallelism: Parallelism, run: CarriedRun = NO_RUN) -> None:
    """Write what is there by our Writer, with the run's own arguments."""
    reader = TorchDistReader(source)
    kept = reader.specs | (reader.optimizer_specs if run.common else {})
    specs = {name: dataclasses.replace(spec, parallel=form(name)) for name, spec in kept.items()}
    writer = TorchDistWriter(target, SHAPE, specs, parallelism=parallelism, run=dataclasses.replace(run, iteration=7))
    writer.lay_out()
    everything = SimpleNamespace(specs=kept, chunks=reader.chunks)
    for name in specs:
        write_rows(writer, name, 0, read_tensor(everything, name))
    writer.finish(None)
    common = torch_zip.load((target / "common.pt").read_bytes(), target)
    vars(common["args"]).update(reader.args)  # a ModelShape need not say what these models are
    (target / "common.pt").write_bytes(torch_zip_writer.dump(common))


def optimizer_of(reader: TorchDistReader) -> dict[str, Tensor]:
    state = SimpleNamespace(specs=reader.optimizer_specs, chunks=reader.chunks)
    return {name: read_tensor(state, name) for name in reader.optimizer_specs}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


EXPERTS = ("experts", "shared experts after a dense layer", "as DeepSeek")
EXPERTS_BRIEFLY = ("experts", "as DeepSeek", "singleton")
"""DeepSeek's have shared experts after a dense layer, too."""


@pytest.fixture(scope="module")
def experts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved by two expert-parallel ranks, written by us for other sizes, and loaded by two ranks again."""
    top = tmp_path_factory.mktemp("experts")
    names = EXPERTS if word_for_soak(request) else [name for name in EXPERTS if name in EXPERTS_BRIEFLY]
    saves = [{"directory": name, "args": MODELS[name]} for name in names]
    saves += [{"directory": "singleton", "args": MODELS["experts"], "singleton": True}]
    saves += [{"directory": way, "args": MODELS["experts"], "optimizer": way} for way in WAYS]
    for job in saves:
        job |= {"do": "save", "directory": str(top / job["directory"]), "dtype": "bfloat16"}
    peer(top, saves, expert_parallel=2)
    for name in (*names, "singleton"):
        rewrite(top / name, top / f"our {name}", Parallelism(tensor=2, pipeline=2, expert=4, expert_tensor=1))
    loads = [
        {"do": "load", "directory": str(top / f"our {name}"), "out": str(top / f"our {name}"), "te_names": True}
        for name in (*names, "singleton")
    ]
    peer(top, loads, expert_parallel=2)
    return top


@pytest.mark.parametrize("name", few([*EXPERTS, "singleton"], *EXPERTS_BRIEFLY))
def test_we_read_every_tensor_that_expert_parallel_ranks_saved_bit_for_bit(experts, name):
    reader = TorchDistReader(experts / name)
    assert same({tensor: read_tensor(reader, tensor) for tensor in reader.specs}, of_experts(f"{experts / name}", 2))


@pytest.mark.parametrize("name", few([*EXPERTS, "singleton"], *EXPERTS_BRIEFLY))
def test_expert_parallel_ranks_load_what_we_wrote_for_other_sizes(experts, name):
    """Strictly: a missing `_extra_state` of any linear would fail it."""
    saved = of_experts(f"{experts / name}", 2)
    assert same(of_experts(f"{experts}/our {name}", 2), saved)
    ours = TorchDistReader(experts / f"our {name}")
    assert len({path.name.split("_")[2] for path in ours.files}) == 8  # 2 stages x 4 expert-parallel ranks


def test_each_way_to_store_the_optimizer_of_experts_holds_the_same(experts):
    plain, *others = [TorchDistReader(experts / way) for way in WAYS]
    expected = optimizer_of(plain)
    assert any(expert_of(name) is not None for name in expected)
    assert len(expected) == 3 * len(plain.specs)
    for reader in (plain, *others):
        assert same(optimizer_of(reader), expected)
        assert differing_masters(reader) == []


@pytest.fixture(scope="module")
def grid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied embeddings at TP 2 x PP 2 with each optimizer; written by us for one rank, and loaded at TP 2 x PP 2."""
    top = tmp_path_factory.mktemp("grid")
    ways = WAYS if word_for_soak(request) else BRIEFLY
    for way in ways:
        (top / way).mkdir()
    saves = [
        {"do": "save", "directory": str(top / way), "args": MODELS["tied"], "dtype": "bfloat16", "optimizer": way}
        for way in ways
    ]
    peer(top, saves, tensor_parallel=2, pipeline_parallel=2)
    loads = []
    for way in ways:
        run = carry_run(TorchDistReader(top / way), Parallelism(1))
        rewrite(top / way, top / f"our {way}", Parallelism(1), run)
        kind = "plain" if way == "plain" else "fully_reshardable"
        loads.append({"do": "load", "directory": str(top / f"our {way}"), "optimizer": kind})
    for job in loads:
        job["out"] = job["directory"]
    peer(top, loads, tensor_parallel=2, pipeline_parallel=2)
    return top


@pytest.mark.soak
@pytest.mark.parametrize("way", WAYS)
def test_an_optimizer_cut_by_tensors_and_stages_is_read_by_parameter(grid, way):
    reader = TorchDistReader(grid / way)
    assert same(optimizer_of(reader), optimizer_of(TorchDistReader(grid / "plain")))
    assert len(reader.optimizer_specs) == 3 * len(reader.specs)
    assert differing_masters(reader) == []


@pytest.mark.parametrize("way", few(WAYS, *BRIEFLY))
def test_megatron_core_goes_on_with_the_weights_and_the_optimizer_that_we_wrote(grid, way):
    def held(kind: str, where: str) -> dict[str, Tensor]:
        return {f"{kind}.{name}": tensor for name, tensor in of_stages(f"{grid}/{where}{kind}", 2, 2).items()}

    assert same(of_stages(f"{grid}/our {way}", 2, 2), of_stages(f"{grid}/{way}", 2, 2))
    for kind in ("param", "exp_avg", "exp_avg_sq"):
        assert same(held(kind, f"our {way}.optimizer."), held(kind, f"{way}.optimizer."))


def test_parameters_in_another_order_would_not_pass(grid, monkeypatch):
    """The proof can fail: with two moved masters it names both parameters."""
    reader = TorchDistReader(grid / "dp_reshardable")
    one, other = (f"optimizer.state.param.decoder.layers.{layer}.mlp.linear_fc1.weight" for layer in (0, 3))
    tensors = reader._stored.tensors
    swapped = LogicalTensors({**tensors, one: tensors[other], other: tensors[one]})
    monkeypatch.setattr(reader, "_stored", swapped)
    assert sorted(differing_masters(reader)) == [name.removeprefix("optimizer.state.param.") for name in (one, other)]
