"""Megatron-FSDP 2 with its own functions for checkpoints, on CPU processes: megatron_fsdp_2.py OUT [CHECKPOINT].

Eight steps with a save after three, or the last five from a checkpoint on. OUT/losses-RANK.json has the loss of each.
Streams and events of CUDA are replaced by such that do nothing.
"""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

OUT, CHECKPOINT = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None


class Stream:
    device = torch.device("cpu")

    def __init__(self, *_: Any) -> None:
        pass

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: THE_STREAM


THE_STREAM = Stream()
torch.cuda.Stream = torch.cuda.Event = Stream
torch.cuda.current_stream = lambda *_: THE_STREAM
torch.cuda.stream = lambda *_: contextlib.nullcontext()
torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None
torch.cuda.current_device = lambda: 0

import transformers  # noqa: E402
from megatron_fsdp.experimental import (  # noqa: E402
    DBuffer,
    Placements,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    load_checkpoint,
    save_checkpoint,
)
from megatron_fsdp.mixed_precision import MixedPrecisionPolicy  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import Shard  # noqa: E402

DBuffer.allocation_stream = property(lambda self: THE_STREAM, lambda self, stream: None)


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1 if CHECKPOINT else 0)
    sizes = {"vocab_size": 95, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    shards = Placements(dp_axes=(0,), parameter=(Shard(0),), gradient=(Shard(0),), optimizer=(Shard(0),))
    policy = MixedPrecisionPolicy(main_params_dtype=torch.float32, main_grads_dtype=torch.float32)
    with fully_shard_context(torch.device("cuda", 0)):
        for layer in model.model.layers:
            fully_shard(layer, mesh, shards, policy)
        fully_shard(model, mesh, shards, policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
    fully_shard_optimizer(optimizer)
    if CHECKPOINT:
        load_checkpoint(model, optimizer, CHECKPOINT)
    OUT.mkdir(parents=True, exist_ok=True)
    losses = []
    for step in range(3 if CHECKPOINT else 0, 8):
        ids = torch.randint(0, 95, (2, 16), generator=torch.Generator().manual_seed(10 * step + rank))
        loss = model(input_ids=ids, labels=ids, return_dict=False)[0]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == 2:
            save_checkpoint(model, optimizer, OUT / "checkpoint")
            if rank == 0:
                config.save_pretrained(OUT / "config")
    (OUT / f"losses-{rank}.json").write_text(json.dumps(losses))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
