"""A model saved by two ranks of FSDP2 on gloo, as trainers do: dcp_ranks.py OUT.

OUT/dcp has model and optimizer, and OUT/live.pt what the model was, whole.
"""

import sys
from pathlib import Path

import pico
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forked import answers
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

OUT, COUNT = Path(sys.argv[1]), 2


def job(rank: int) -> None:
    dist.init_process_group("gloo")
    model = pico.make("llama-3", seed=3, vocab_size=253)  # 127 rows and 126
    mesh = init_device_mesh("cpu", (COUNT,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.arange(2 * 16).view(2, 16)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    state, moments = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": moments}, checkpoint_id=OUT / "dcp")
    live = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    if rank == 0:
        torch.save(live, OUT / "live.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    print(answers(COUNT, job))
