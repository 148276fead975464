"""OpenRLHF's own strategy of DeepSpeed, on gloo ranks of a CPU: openrlhf_save.py OUT STAGE [CHECKPOINT].

Two updates, a save as OUT/_actor, and three more updates; or from CHECKPOINT on, a universal one. OUT/live.pt is what a
run with ZeRO 2 held at the save, and OUT/losses-RANK.json the losses of the last three updates. The optimizer is
DeepSpeed's FusedAdam, which counts in Python: what its kernel computes is computed here.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import SupportsInt
from unittest.mock import MagicMock

os.environ |= {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}

import deepspeed.ops
import deepspeed.ops.adam.fused_adam as fused_adam
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from without_init import without_init

deepspeed.ops.__compatible_ops__.clear()  # nothing is compiled

OUT, STAGE, CHECKPOINT = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else None

without_init("openrlhf", "openrlhf.models", "openrlhf.utils", "openrlhf.utils.deepspeed")
sys.modules["openrlhf.models"].Actor = type("Actor", (), {})  # type: ignore[attr-defined]  # of flash-attn
for name in ("openrlhf.models.ring_attn_utils", "openrlhf.utils.distributed_sampler"):
    sys.modules[name] = MagicMock()
from openrlhf.utils.deepspeed import deepspeed as strategies  # type: ignore[import-not-found]  # noqa: E402

torch.cuda.set_device = lambda *_: None
torch.cuda.synchronize = lambda *_: None
strategies.init_device_mesh = lambda _, *shape, **names: init_device_mesh("cpu", *shape, **names)


class Kernel:
    @staticmethod
    def multi_tensor_adam(
        _: int,
        overflow: Tensor,
        tensors: list[list[Tensor]],
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        step: SupportsInt,  # the kernel's is an int, and takes what can be one
        decoupled: int,
        corrects: int,
        decay: float,
    ) -> None:
        assert decoupled and corrects
        count = int(step)
        for gradient, parameter, first, second in zip(*tensors, strict=True):
            first.lerp_(gradient, 1 - beta1)
            second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            moved = (first / (1 - beta1**count)) / ((second / (1 - beta2**count)).sqrt() + eps)
            parameter.sub_(lr * (moved + decay * parameter))


fused_adam.FusedAdamBuilder = lambda: argparse.Namespace(load=Kernel)


def main() -> None:
    ds = argparse.Namespace(param_dtype="bf16", use_universal_ckpt=bool(CHECKPOINT), zpg=1)
    args = argparse.Namespace(ds=ds, train=argparse.Namespace(dynamic_batch_enable=False), local_rank=-1)
    ranks = int(os.environ["WORLD_SIZE"])
    strategy = strategies.DeepspeedStrategy(
        max_norm=1.0, micro_train_batch_size=2, train_batch_size=2 * ranks, zero_stage=STAGE, args=args
    )
    strategy.setup_distributed()
    rank = dist.get_rank()
    torch.manual_seed(0)
    sizes = {"vocab_size": 95, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    if rank == 0:
        config.save_pretrained(OUT / "config")
    adam = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    settings = {"optim": "adam", "adam": adam, "scheduler_steps": 100, "lr_scheduler": "constant", "max_norm": 1.0}
    engine, optimizer, _ = strategy._ds_init_train_model(transformers.LlamaForCausalLM(config), settings)
    if CHECKPOINT:
        _, states = strategy.load_ckpt(engine, CHECKPOINT)
        assert states["consumed_samples"] == 8
    losses = []
    for step in range(2 if CHECKPOINT else 0, 5):
        if step == 2 and not CHECKPOINT:
            strategy.save_ckpt(engine, str(OUT / "_actor"), "global_step2", client_state={"consumed_samples": 8})
        ids = torch.randint(0, 95, (2, 16), generator=torch.Generator().manual_seed(10 * step + rank))
        loss = engine(input_ids=ids, labels=ids).loss
        strategy.backward(loss, engine, optimizer)
        strategy.optimizer_step(optimizer, engine, None)
        losses += [loss.item()] if step > 1 else []
    (OUT / f"losses-{rank}.json").write_text(json.dumps(losses))
    dist.barrier()
    dist.destroy_process_group()


main()
