"""Checkpoints as verl 0.9.1 writes them of FSDP, by torch.save alone (tests/peers/test_trainers.py has the real
one)."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

MOMENTS = ("exp_avg", "exp_avg_sq")
SETTINGS: dict[str, Any] = {"lr": 2e-3, "initial_lr": 4e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def save(
    directory: Path,
    weights: Mapping[str, Tensor],
    moments: Mapping[str, Mapping[str, Tensor]],
    ranks: int,
    *,
    version: int = 2,
    replicas: int = 1,
    units: Sequence[Sequence[str]] = (),
    step: int = 5,
) -> Path:
    """The files of `ranks` that have the model together, for each of its `replicas`. `moments` are FP32 tensors by kind
    and parameter, in the model's order; with `units` of parameters they are flat, as FSDP 1 has them."""
    directory.mkdir(parents=True)
    world = ranks * replicas
    for rank in range(world):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)  # type: ignore[no-untyped-call]
        try:
            if replicas == 1:
                mesh, placements = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",)), [Shard(0)]
            else:
                mesh = init_device_mesh("cpu", (replicas, ranks), mesh_dim_names=("ddp", "fsdp"))
                placements = [Replicate(), Shard(0)]

            def cut(tensor: Tensor, mesh: Any = mesh, placements: Any = placements, at: int = rank % ranks) -> DTensor:
                rows = -(-len(tensor) // ranks)
                local = tensor[at * rows : (at + 1) * rows].clone()
                return DTensor.from_local(
                    local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
                )

            held: list[dict[str, Tensor]]
            if units:
                held = [
                    {kind: _flat([moments[kind][name] for name in unit], rank % ranks, ranks) for kind in MOMENTS}
                    for unit in units
                ]
            else:
                held = [{kind: cut(moments[kind][name]) for kind in MOMENTS} for name in moments["exp_avg"]]
            state = {number: {"step": torch.tensor(float(step)), **one} for number, one in enumerate(held)}
            end = f"world_size_{world}_rank_{rank}.pt"
            torch.save({name: cut(tensor) for name, tensor in weights.items()}, directory / f"model_{end}")
            groups = [SETTINGS | {"params": list(state)}]
            torch.save({"state": state, "param_groups": groups}, directory / f"optim_{end}")
            torch.save({"lr_scheduler": None, "rng": {}}, directory / f"extra_state_{end}")
        finally:
            dist.destroy_process_group()
    (directory / "fsdp_config.json").write_text(json.dumps({"FSDP_version": version, "world_size": world}))
    return directory


def _flat(tensors: Sequence[Tensor], rank: int, ranks: int) -> Tensor:
    whole = torch.cat([tensor.flatten() for tensor in tensors])
    each = math.ceil(len(whole) / ranks)
    padded = torch.cat([whole, torch.zeros(each * ranks - len(whole))])
    return padded[rank * each : (rank + 1) * each].clone()
