"""megatron-core as the judge of the `torch` format: what its ranks save is read bit for bit."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import repository
import torch
from programs import MEGATRON, run_program
from torch import Tensor

from precisionctl.checkpoints.chunks import read_rows, read_tensor, write_rows
from precisionctl.checkpoints.megatron.carried_run import CarriedRun
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.checkpoints.torch_legacy.reader import LegacyReader
from precisionctl.checkpoints.torch_legacy.writer import LegacyWriter
from precisionctl.param import Parallelism

PEER = repository.HELPERS / "mcore_legacy.py"

Case = dict[str, Any]
CASES: dict[str, Case] = {
    "dense": {
        "sizes": {"tensor": 2, "pipeline": 2},
        "model": {"qkv_bias": True},
        "optimizer": True,
        "layers": [2, 2],
    },
    "tied": {"sizes": {"tensor": 2, "pipeline": 2, "virtual": 2}, "model": {"tied": True}, "layers": [1, 1, 1, 1]},
    "uneven": {
        "sizes": {"tensor": 2, "pipeline": 2},
        "model": {"tied": True, "qk_norm": True, "first": 1, "last": 3},
        "layers": [1, 3],
    },
    "experts": {
        "sizes": {"pipeline": 2, "expert": 2},
        "model": {"experts": 4},
        "optimizer": True,
        "layers": [2, 2],
    },
}
CASES["buckets"] = CASES["dense"] | {"optimizer": "distributed"}
CASES["buckets of experts"] = CASES["experts"] | {"optimizer": "distributed"}
AGAIN: dict[str, Case] = {
    "dense": CASES["dense"] | {"sizes": {"pipeline": 4}, "layers": [1, 1, 1, 1]},
    "tied": {
        "sizes": {"tensor": 2, "pipeline": 2},
        "model": {"tied": True, "first": 3},
        "layers": [3, 1],
    },
    "uneven": {
        "sizes": {"tensor": 2, "pipeline": 2, "virtual": 2},
        "model": {"tied": True, "qk_norm": True},
        "layers": [1, 1, 1, 1],
    },
    "experts": CASES["experts"] | {"sizes": {"expert": 4}, "layers": [4]},
}
"""The same models at other sizes."""


def peer(top: Path, jobs: list[dict[str, Any]]) -> None:
    path = top / "jobs.json"
    path.write_text(json.dumps(jobs))
    run_program(PEER, path, imports=MEGATRON)
    Path(f"{path}.rendezvous").unlink(missing_ok=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("saved")
    peer(top, [{**case, "save": str(top / name)} for name, case in CASES.items()])
    return top


def coordinates(rank: int, sizes: dict[str, int]) -> tuple[int, int, int]:
    """(tensor, pipeline, expert) of one of four ranks, as megatron-core orders them."""
    tensor, pipeline, expert = (sizes.get(kind, 1) for kind in ("tensor", "pipeline", "expert"))
    return rank % tensor, rank // (4 // pipeline), rank // tensor % expert


def held(path: Path, case: Case) -> Iterator[tuple[str, int, Tensor]]:
    """Each parameter and optimizer state in the memory of each rank: logical name, tensor rank, values."""
    pipeline = case["sizes"].get("pipeline", 1)
    for rank in range(4):
        tensor, stage, expert = coordinates(rank, case["sizes"])
        found = torch.load(f"{path}.rank{rank}.pt")
        optimizer = found.pop("optimizer", {})
        for index, parameters in found.items():
            before = sum(case["layers"][: index * pipeline + stage])
            for local, values in parameters.items():
                yield logical(local, before, expert, case), tensor, values
        for local, values in optimizer.items():
            kind, _, parameter = local.partition(".")
            if kind != "step":
                whole_name = logical(parameter, sum(case["layers"][:stage]), expert, case)
                yield f"optimizer.state.{kind}.{whole_name}", tensor, values.detach()


def logical(local: str, before: int, expert: int, case: Case) -> str:
    parts = local.split(".")
    if parts[1] == "layers":
        parts[2] = str(int(parts[2]) + before)
    if "local_experts" in parts:
        number = int(parts[6]) + 4 // case["sizes"]["expert"] * expert
        return f"{'.'.join(parts[:5])}.{parts[7]}.{parts[8]}{number}"
    name = ".".join(parts).replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
    dense = "experts" not in case["model"]
    return name.replace(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_") if dense else name


def whole(name: str, shards: list[Tensor]) -> Tensor:
    """The tensor of which tensor-parallel ranks hold these shards, by the rules of Megatron's layers."""
    if "linear_fc1.weight" in name:
        gates, ups = zip(*(shard.chunk(2) for shard in shards), strict=True)
        return torch.cat([*gates, *ups])
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")) or "linear_fc2.weight" in name:
        return torch.cat(shards, dim=1)
    norm = "norm" in name or name.endswith("router.weight")
    return shards[0] if norm else torch.cat(shards)


def expected(path: Path, case: Case) -> dict[str, Tensor]:
    """The whole tensors in the memory of all ranks."""
    shards: dict[str, dict[int, Tensor]] = {}
    for parameter, tensor, values in held(path, case):
        known = shards.setdefault(parameter, {}).setdefault(tensor, values)
        assert torch.equal(known, values), parameter
    if case["model"].get("tied"):
        copy = shards.pop("output_layer.weight")
        assert all(torch.equal(copy[i], values) for i, values in shards["embedding.word_embeddings.weight"].items())
    return {parameter: whole(parameter, [found[i] for i in sorted(found)]) for parameter, found in shards.items()}


@pytest.mark.parametrize("name", [name for name in CASES if name != "buckets of experts"])
def test_every_tensor_that_megatron_core_saved_is_read_bit_for_bit(saved: Path, name: str) -> None:
    reader = LegacyReader(saved / name)
    wanted = expected(saved / name, CASES[name])
    specs = {**reader.specs, **reader.optimizer_specs}
    assert specs.keys() == wanted.keys()
    assert ("optimizer" in CASES[name]) == any(each.startswith("optimizer.") for each in wanted)
    both = SimpleNamespace(specs=specs, chunks=reader.chunks)
    for each, values in wanted.items():
        assert torch.equal(read_rows(both, each, 0, specs[each].rows).view(specs[each].shape), values), each


@pytest.mark.parametrize("name", ["buckets", "buckets of experts"])
def test_masters_of_a_distributed_optimizer_are_those_of_the_weights(saved: Path, name: str) -> None:
    reader = LegacyReader(saved / name)
    both = SimpleNamespace(specs=reader.optimizer_specs, chunks=reader.chunks)
    assert reader.optimizer_specs.keys() == {
        f"optimizer.state.{kind}.{each}" for each in reader.specs for kind in ("param", "exp_avg", "exp_avg_sq")
    }
    for each in reader.specs:
        assert torch.equal(read_tensor(both, f"optimizer.state.param.{each}").bfloat16(), read_tensor(reader, each))
    assert len(reader.files) == 8


def test_what_was_saved_says_what_it_is(saved: Path) -> None:
    reader = open_checkpoint(saved / "tied")
    assert isinstance(reader, LegacyReader)
    assert reader.container == "torch"
    assert reader.iteration == 10
    assert reader.parallelism == Parallelism(tensor=2, pipeline=2, virtual=2)
    assert reader.model.num_layers == 4
    assert reader.model.tied_embeddings
    assert reader.fp8 is None
    assert len(reader.files) == 4
    assert open_checkpoint(saved / "tied" / "iter_0000010").specs == reader.specs
    assert LegacyReader(saved / "experts").parallelism == Parallelism(pipeline=2, expert=2)


def test_settings_and_step_of_the_optimizer_are_where_torch_dist_has_them(saved: Path) -> None:
    optimizer = LegacyReader(saved / "dense").common["optimizer"]["optimizer"]
    assert optimizer["state"] == {"common_step": 1}
    assert [group["wd_mult"] for group in optimizer["param_groups"]] == [1.0, 0.0]


@pytest.fixture(scope="module")
def loaded(saved: Path) -> Path:
    """What the cases saved, written for other sizes, and what megatron-core holds after loading that, strictly."""
    jobs = []
    for name, case in AGAIN.items():
        reader, target = LegacyReader(saved / name), saved / f"{name}-again"
        sizes = Parallelism(**case["sizes"], first_layers=case["model"].get("first"))
        specs = {**reader.specs, **reader.optimizer_specs}
        common = {"optimizer": reader.common["optimizer"]} if "optimizer" in case else {}
        writer = LegacyWriter(target, reader.model, specs, parallelism=sizes, run=CarriedRun(10, common))
        writer.lay_out()
        both = SimpleNamespace(specs=specs, chunks=reader.chunks)
        for each in specs:
            write_rows(writer, each, 0, read_rows(both, each, 0, specs[each].rows))
        writer.finish(None)
        jobs.append({**case, "load": str(target)})
    peer(saved, jobs)
    return saved


@pytest.mark.parametrize("name", AGAIN)
def test_megatron_core_loads_what_we_write_for_other_sizes(loaded: Path, name: str) -> None:
    before, after = expected(loaded / name, CASES[name]), expected(loaded / f"{name}-again", AGAIN[name])
    assert before.keys() == after.keys()
    for each, values in before.items():
        assert torch.equal(values, after[each]), each
