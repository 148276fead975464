"""A run of the real DeepSpeed on CPU ranks: torchrun deepspeed_run.py MODEL OUT STAGE [FLAG ...]

Three updates, OUT is saved, with live.pt of what it holds, and five more updates: their losses are printed. With
`resume` the three updates are not made, but loaded from OUT as a universal checkpoint. Further flags: `groups` (norms
without decay), `frozen` (a part of the model), `round_robin`, `subgroups` (of ZeRO 3), `fp32_gradients` (the BF16
optimizer).
"""

import json
import os
import sys
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from transformers import AutoModelForCausalLM

MODEL, OUT, STAGE, FLAGS = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
deepspeed.ops.__compatible_ops__.clear()  # nothing is compiled
deepspeed.init_distributed("gloo")

model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
for name, parameter in model.named_parameters():
    parameter.requires_grad = not ("frozen" in FLAGS and ("layers.0.mlp" in name or name.endswith("model.norm.weight")))
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
parts = [[p for p in trained if (p.dim() > 1) == many] for many in (True, False)] if "groups" in FLAGS else [trained]
groups = [{"params": part, "weight_decay": decay} for part, decay in zip(parts, (0.1, 0.0), strict=False)]
optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
zero = {"stage": STAGE, "round_robin_gradients": "round_robin" in FLAGS}
config = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": zero | ({"sub_group_size": 5000} if "subgroups" in FLAGS else {}),
    "data_types": {"grad_accum_dtype": "fp32"} if "fp32_gradients" in FLAGS else {},
    "checkpoint": {"load_universal": "resume" in FLAGS},
}
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=schedule, config=config)


def train(steps: range) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        ids = torch.randint(0, model.config.vocab_size, (2, 16), generator=generator)
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def moment(parameter: torch.nn.Parameter, kind: str) -> torch.Tensor:
    """A whole one; of ZeRO 1 and 2 put together here, as DeepSpeed's own function knows one group of parameters alone.
    (With round_robin_gradients DeepSpeed itself does not know where its fragments are.)"""
    if STAGE == 3:
        return safe_get_full_optimizer_state(parameter, kind)
    whole, fragment, inner = torch.zeros(parameter.numel()), parameter._hp_mapping, engine.optimizer
    if fragment is not None:
        flats = getattr(inner, "single_partition_of_fp32_groups", None) or inner.fp32_groups_flat_partition
        here, there = fragment.hp_fragment_address, fragment.lp_fragment_address
        state = inner.optimizer.state[flats[fragment.param_group_index]][kind]
        whole[there.start : there.start + there.numel] = state.narrow(0, here.start, here.numel)
    dist.all_reduce(whole)
    return whole.view(parameter.shape)


def save() -> None:
    engine.save_checkpoint(OUT)
    live = {"fp32": {}, "exp_avg": {}, "exp_avg_sq": {}, "bf16": {}}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            live["fp32"][name] = safe_get_full_fp32_param(parameter)
            live["exp_avg"][name], live["exp_avg_sq"][name] = (moment(parameter, k) for k in ("exp_avg", "exp_avg_sq"))
        with deepspeed.zero.GatheredParameters([parameter], enabled=STAGE == 3):
            live["bf16"][name] = parameter.detach().cpu().clone()
    if dist.get_rank() == 0:
        torch.save(live, OUT / "live.pt")


if "resume" in FLAGS:
    engine.load_checkpoint(OUT)
else:
    train(range(3))
    save()
losses = train(range(3, 8))
if dist.get_rank() == 0:
    print("LOSSES", json.dumps(losses), flush=True)
dist.barrier()
dist.destroy_process_group()
