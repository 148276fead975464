"""Passes forward and backward by several ranks, for test_tensor_parallel.py.

`python shared_layers.py FILE CASES` writes into FILE how far each rank's part of the gradients is from that of one
process: in the CASES (JSON) of tensor and expert ranks in FP32, so that a sum that is missing somewhere cannot hide
behind rounding; of data ranks in FP8, whose scales start cold.
"""

import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pico
import pytest
import torch
import torch.distributed as dist
from forked import fork
from in_memory import InMemory, to_megatron
from soaking import in_soak
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from precisionctl.checkpoints.module import LiveModel
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.conversion.convert import convert
from precisionctl.fp8.state import Fp8State
from precisionctl.planning.make_plan import make_plan
from precisionctl.precision import PRESETS
from precisionctl.recipe import Optimizer, ParallelSettings
from precisionctl.trainer.backends.base import fp8_linears
from precisionctl.trainer.backends.choose import BackendName
from precisionctl.trainer.data.batch import Batch
from precisionctl.trainer.model.gpt import GPT
from precisionctl.trainer.model.router_balance import Balance
from precisionctl.trainer.optimizer.adamw import MasterAdamW
from precisionctl.trainer.parallel.shards import UNSHARDED, ModelShards
from precisionctl.trainer.parallel.world import ALONE, World, _meshes, together
from precisionctl.trainer.passes import backward
from precisionctl.trainer.sequences import PackedSequences
from precisionctl.trainer.shadow import compare_gradients

SIZES = {
    "tensor": (2, ParallelSettings(tensor=2)),
    "sequence": (2, ParallelSettings(tensor=2, sequence=True)),
    "sequence and data": (4, ParallelSettings(tensor=2, sequence=True)),
    "tensor in copies": (4, ParallelSettings(tensor=2, replicate=2)),
    "experts": (4, ParallelSettings(expert=4)),
    "experts in copies": (4, ParallelSettings(expert=2, replicate=2)),
    "experts and tensor": (4, ParallelSettings(tensor=2, expert=2)),
    "experts and sequence": (4, ParallelSettings(tensor=2, sequence=True, expert=2)),
}
"""How many ranks, and how they share a model."""


EVEN = [
    family
    for family in pico.FAMILIES
    if pico.shape(family).num_query_groups % 2 == 0 and family not in ("gemma3n", "qwen4", "muse-spark")
]
"""The families that two tensor ranks can share."""
SHARING = {
    "tensor": [
        pytest.param("mixtral"),
        *in_soak(*(one for one in pico.first_of_each(pico.block_kinds, EVEN) if one != "mixtral")),
    ],
    "sequence": pico.representing(
        pico.mixers, pico.first_of_each(lambda family: {*pico.rows(family), *pico.switches(family)}, EVEN)
    ),
    "sequence and data": in_soak("llama-3", "mixtral", "gemma4-small"),
    "tensor in copies": [pytest.param("gemma4-small"), *in_soak("llama-3", "mixtral")],
    "experts": [pytest.param("mixtral"), *in_soak("deepseek-v4", "gpt-oss", "deepseek-v3", "gemma4-moe")],
    "experts in copies": in_soak("mixtral", "gemma4-moe", "gpt-oss", "deepseek-v3", "deepseek-v4"),
    "experts and tensor": [pytest.param("gpt-oss"), *in_soak("mixtral", "deepseek-v3", "gemma4-moe")],
    "experts and sequence": [pytest.param("deepseek-v3"), *in_soak("mixtral", "gpt-oss", "gemma4-moe")],
}
"""The families that ranks share so, as parameters of a test."""
ROWS, LENGTH = 4, 16
BALANCE = Balance(seq_aux_loss=0.3, global_aux_loss=0.3, z_loss=0.02)
"""The losses of routers that do not depend on which ranks have which rows."""


_SETTINGS = {
    "deepseek-v4": {"initializer_range": 0.12},  # gradients of its streams would be too small to tell from rounding
    # nor is a matrix to leave streams that are copies as such, whose gradient would be rounding alone
    # (with 0.12 that of an `alpha_pre` cancels: 7e-7, where others have 1e-4)
    "glm-5.3": {"initializer_range": 0.2, "rms_norm_eps": 1e-2, "hc_eps": 0.3, "hc_mult": 4},
    # and of the weights to read them by in layer 0, where they are copies, a norm leaves what its epsilon makes of them
    "hy4": {"initializer_range": 0.12, "rms_norm_eps": 1e-2},
    "ling-3": {"rms_norm_eps": 1e-3},  # what a query reads may be next to nothing, with rounding that a norm magnifies
    "jamba": {"initializer_range": 0.05, "rms_norm_eps": 1e-3},  # of what its x_proj makes, too
}


def source_of(family: str) -> InMemory:
    with tempfile.TemporaryDirectory() as folder:
        pico.save(Path(folder), family, **_SETTINGS.get(family, {}))
        return to_megatron(open_checkpoint(Path(folder)))


def batch_of(rows: range, packed: bool) -> Batch:
    """Of the same tokens for all; the last positions of a row are padding."""
    tokens = torch.randint(250, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1))[rows.start : rows.stop]
    labels, real = tokens[:, 1:].clone(), torch.ones(len(rows), LENGTH, dtype=torch.bool)
    labels[:, -3:], real[:, -3:] = -100, False
    return Batch(tokens[:, :-1], labels, real, PackedSequences((5, 8, 3) * len(rows)) if packed else None)


def passed(
    source: InMemory, world: World, rows: range, family: str, backend: BackendName = "emulated"
) -> tuple[float, float, GPT, MasterAdamW]:
    """Loss and norm of the gradients, which are collected."""
    recompute = family == "qwen3" or (family == "gemma4-small" and world.data_count > 1)
    full = torch.float32
    model = GPT(source.model, PRESETS["bf16"], backend, full, world=world, recompute=recompute, balance=BALANCE)
    optimizer = MasterAdamW(model, Optimizer(clip_norm=0), model.shards)
    plan = make_plan(source, "megatron")
    tensors = {**optimizer.parameters, **optimizer.masters}
    convert(plan, source, LiveModel(plan.model, tensors, shards=model.shards.tensors))
    total = world.sum_over_data_ranks(backward(model, batch_of(rows, packed=family == "llama-3"), ROWS * (LENGTH - 3)))
    optimizer.collect()
    optimizer.reduce(world)
    return float(total), float(optimizer.clip()), model, optimizer


def apart(live: LiveModel, whole: Mapping[str, Tensor]) -> dict[str, float]:
    """By name, the largest difference of what is here from the same boxes of `whole`, as a share of its largest
    magnitude."""
    found = {}
    for name in live.tensors:
        expected = whole[name].view(live.specs[name].rows, -1)
        differences = [
            chunk.place.reshape(chunk.box.rows, -1)
            - expected[chunk.box.row :, chunk.box.column :][: chunk.box.rows, : chunk.box.columns]
            for chunk in live.chunks(name)
            if isinstance(chunk.place, Tensor)
        ]
        largest = max((float(each.abs().max()) for each in differences), default=0.0)
        found[name] = largest / max(float(expected.abs().max()), 1e-30)
    return found


def by_ranks(
    wanted: list[tuple[str, str]], expected: Mapping[str, Any], backend: BackendName = "emulated"
) -> dict[str, Any]:
    told = {}
    with together() as ranks:
        dist.init_process_group("gloo", store=ranks.store, rank=ranks.rank, world_size=ranks.count)
        for how, family in wanted:
            count, sizes = SIZES[how]
            world = World(ranks, *_meshes("cpu", count, sizes), sequence=sizes.sequence)
            each = ROWS // world.data_count
            mine = range(world.data_rank * each, (world.data_rank + 1) * each)
            source, loss, norm, gradients, likeness = expected[family]
            ours, length, model, optimizer = passed(source, world, mine, family, backend)
            live = LiveModel(source.model, optimizer.gradients, shards=model.shards.tensors)
            told[f"{how}: {family}"] = {
                "loss": ours / loss - 1,
                "norm": length / norm - 1,
                "likeness": bent(optimizer.gradients, model.shards) - likeness,
                "gradients": apart(live, gradients),
                "missing": [name for name in gradients if name not in live.tensors and live.shards[name].boxes],
            }
        dist.destroy_process_group()
    return told


def bent(gradients: Mapping[str, Tensor], shards: ModelShards) -> float:
    """The cosine of gradients and of them with larger ones of norms, which tensor ranks have alike."""
    larger = {name: 9 * each if re.search("layer_?norm", name) else each for name, each in gradients.items()}
    return compare_gradients(larger, gradients, shards)[0].cosine


def alone(family: str) -> tuple[InMemory, float, float, dict[str, Tensor], float]:
    source = source_of(family)
    loss, norm, _, optimizer = passed(source, ALONE, range(ROWS), family)
    return source, loss, norm, optimizer.gradients, bent(optimizer.gradients, UNSHARDED)


def in_fp8(
    backend: BackendName, source: Any, world: World, preset: str, recompute: bool = False
) -> tuple[list[float], GPT, MasterAdamW]:
    """Losses of two passes, in the first of which all scales are 1; their gradients are collected."""
    model = GPT(source.model, PRESETS[preset], backend, world=world, recompute=recompute)
    optimizer = MasterAdamW(model, Optimizer(clip_norm=0), model.shards)
    live = LiveModel(source.model, optimizer.masters, shards=model.shards.tensors)
    convert(make_plan(source, "megatron"), source, live)
    optimizer.publish()
    each = ROWS // world.data_count
    batch = batch_of(range(world.data_rank * each, (world.data_rank + 1) * each), packed=False)
    losses = []
    for _ in range(2):
        losses.append(float(world.sum_over_data_ranks(backward(model, batch, ROWS * (LENGTH - 3)))))
        optimizer.collect()
    optimizer.reduce(world)
    return losses, model, optimizer


def states_of(model: GPT) -> dict[str, Fp8State]:
    return {name: state for name, linear in fp8_linears(model).items() if (state := linear.fp8_state())}


def by_data_ranks(source: InMemory, backend: BackendName = "emulated") -> dict[str, Any]:
    """How far this one of two ranks, with and without recomputation, is from one process without, under delayed
    scaling; and whether nothing is recorded between passes."""
    expected, whole, alone = in_fp8(backend, source, ALONE, "fp8-delayed")
    states, told = states_of(whole), {}
    with together() as ranks:
        dist.init_process_group("gloo", store=ranks.store, rank=ranks.rank, world_size=ranks.count)
        for case, again in {"kept": False, "recomputed": True}.items():
            world = World(ranks, *_meshes("cpu", ranks.count, ParallelSettings()))
            losses, model, optimizer = in_fp8(backend, source, world, "fp8-delayed", again)
            live = LiveModel(source.model, optimizer.gradients, shards=model.shards.tensors)
            pairs = {
                f"{name} {role}": (part, states[name].roles[role])
                for name, state in states_of(model).items()
                for role, part in state.roles.items()
            }
            told[case] = {
                "losses": [ours / theirs - 1 for ours, theirs in zip(losses, expected, strict=True)],
                "gradients": apart(live, alone.gradients),
                "scales": {name: torch.equal(ours.scale, theirs.scale) for name, (ours, theirs) in pairs.items()},
                "histories": {n: torch.equal(ours.amax_history, its.amax_history) for n, (ours, its) in pairs.items()},
                "at rest": {name: not ours.amax_history[0] for name, (ours, _) in pairs.items()},
            }
        dist.destroy_process_group()
    return told


GATHERING: dict[str, dict[str, Any]] = {"per-pass": {}, "per-update": {"gathers_once": True}, "copies": {}}


class Collectives(TorchDispatchMode):
    """Counts what processes exchange, by the name of the operation."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def by_passes(source: InMemory, expected: tuple[Any, ...]) -> dict[str, Any]:
    """Collectives of an update of two passes on each of two ranks, and how far its gradients are from one pass of one
    process."""
    told = {}
    with together() as ranks:
        dist.init_process_group("gloo", store=ranks.store, rank=ranks.rank, world_size=ranks.count)
        for how, settings in GATHERING.items():
            sizes = ParallelSettings(replicate=2 if how == "copies" else 1)
            world = World(ranks, *_meshes("cpu", 2, sizes), **settings)
            model = GPT(source.model, PRESETS["bf16"], dtype=torch.float32, world=world)
            optimizer = MasterAdamW(model, Optimizer(clip_norm=0), model.shards)
            plan = make_plan(source, "megatron")
            convert(plan, source, LiveModel(plan.model, optimizer.masters, shards=model.shards.tensors))
            for _ in range(2):  # the first update sets FSDP2 up
                optimizer.take_gradients()
                with Collectives() as counted:
                    for turn in range(2):
                        world.begin_pass(model, last=turn == 1)
                        row = 2 * world.data_rank + turn
                        backward(model, batch_of(range(row, row + 1), packed=True), ROWS * (LENGTH - 3))
                        optimizer.collect()
            live = LiveModel(source.model, optimizer.gradients, shards=model.shards.tensors)
            told[how] = {
                "collectives": counted.counts,
                "gradients": apart(live, expected[3]),
            }
        dist.destroy_process_group()
    return told


def main(file: Path, cases: list[tuple[str, str]]) -> None:
    expected = {family: alone(family) for family in {family: None for _, family in cases} | {"llama-3": None}}
    told: dict[str, list[Any]] = {"shared": []}
    for count in (2, 4):
        wanted = [(how, family) for how, family in cases if SIZES[how][0] == count]
        told["shared"] += [answer for _, answer in fork(count, lambda rank, wanted=wanted: by_ranks(wanted, expected))]
    llama = expected["llama-3"][0], expected["llama-3"]
    told["data"] = [answer for _, answer in fork(2, lambda rank: by_data_ranks(llama[0]))]
    told["passes"] = [answer for _, answer in fork(2, lambda rank: by_passes(*llama))]
    file.write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
