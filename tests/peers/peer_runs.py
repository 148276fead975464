"""Programs of trainers on several ranks, and what is compared of the checkpoints that they save."""

import os
import subprocess
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from forked import free_port
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader

HERE = Path(__file__).parent


def run_ranks(python: str | Path, ranks: int, program: str | Path, *arguments: object, **environment: str) -> None:
    command = [python, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", f"--master_port={free_port()}"]
    env = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    program = HERE / program
    done = subprocess.run(
        [*command, program, *map(str, arguments)], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[:-2000][-3000:]


def read_by_torch(path: Path, expected: dict[str, Any]) -> dict[str, Any]:
    """What torch's own loader finds in a directory where `expected` should be."""
    state = {key: {name: torch.full_like(tensor, 7) for name, tensor in one.items()} for key, one in expected.items()}
    dcp.load(state, storage_reader=FileSystemReader(path), no_dist=True)
    return state


def as_state_dict(weights: dict[str, Tensor], **kinds: dict[str, Tensor]) -> dict[str, Any]:
    """Flat keys of `{"model": ..., "optimizer": {"state": ...}}`."""
    moments = {f"{name}.{kind}": tensor for kind, found in kinds.items() for name, tensor in found.items()}
    return {"model": weights, "optimizer.state": moments}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for key, tensors in expected.items():
        assert [name for name, tensor in tensors.items() if not torch.equal(found[key][name], tensor)] == []
