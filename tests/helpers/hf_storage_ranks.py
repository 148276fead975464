"""A model saved by some ranks on gloo with PyTorch's HuggingFaceStorageWriter: hf_storage_ranks.py OUT RANKS.

Of OUT's directories `rows` and `columns` have the model cut so, and, of four ranks, `grid` by both; `few` has a tensor
of which the last rank has no rows. OUT/live.safetensors has the model whole, and OUT/config its config.json.
OUT/epoch_0_step_2 is what NeMo Automodel saves of two updates under FSDP 2, by its own writer's rules.
"""

import sys
from collections.abc import Mapping
from pathlib import Path

import pico
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forked import answers
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from trained_models import config_of

OUT, COUNT = Path(sys.argv[1]), int(sys.argv[2])


def save(path: Path, state: Mapping[str, Tensor]) -> None:
    dcp.save(dict(state), storage_writer=HuggingFaceStorageWriter(str(path), save_distributed=True))


def save_cut(path: Path, state: Mapping[str, Tensor], *dimensions: int) -> None:
    mesh = init_device_mesh("cpu", (COUNT,) if len(dimensions) == 1 else (2, COUNT // 2))
    ways = {
        name: [Shard(one) if one < tensor.dim() else Replicate() for one in dimensions]
        for name, tensor in state.items()
    }
    save(path, {name: distribute_tensor(tensor, mesh, ways[name]) for name, tensor in state.items()})


def step_of_automodel(path: Path) -> None:
    model = pico.make("llama-3", seed=3, vocab_size=253)
    mesh = init_device_mesh("cpu", (COUNT,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for _ in range(2):
        ids = torch.arange(2 * 16).view(2, 16)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    save(path / "model", get_model_state_dict(model))
    flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    dcp.save({"optim": flat, "sched": schedule.state_dict()}, checkpoint_id=path / "optim")
    states = {f"exp_avg.{name}": optimizer.state[one]["exp_avg"] for name, one in model.named_parameters()}
    live = {name: one.full_tensor() for name, one in (model.state_dict() | states).items()}  # type: ignore[union-attr]
    if dist.get_rank() == 0:
        config_of(model, path / "model" / ".hf_metadata")
        save_file(live, path / "live.safetensors")


def job(rank: int) -> None:
    dist.init_process_group("gloo")
    model = pico.make("llama-3", seed=3, vocab_size=253)  # a prime: rows of ranks are uneven
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_cut(OUT / "rows", state, 0)
    save_cut(OUT / "columns", state, 1)
    if COUNT == 4:
        save_cut(OUT / "grid", state, 0, 1)
    save_cut(OUT / "few", {"few": torch.arange(15.0).view(5, 3)}, 0)
    if rank == 0:
        save_file(state, OUT / "live.safetensors")
        config_of(model, OUT / "config")
    step_of_automodel(OUT / "epoch_0_step_2")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    print(answers(COUNT, job))
