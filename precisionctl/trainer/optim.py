"""AdamW over FP32 master weights, and the learning rate of a step.

The arithmetic is torch.optim.AdamW's own, on the masters; the model's parameters are their rounding.
Gradients of micro-batches are summed in FP32, as Megatron does (accumulate_allreduce_grads_in_fp32).
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from precisionctl.recipe import Optimizer, Schedule


class MasterAdamW:
    """`masters`, `exp_avg` and `exp_avg_sq` are FP32 tensors by parameter name, of the parameters' shapes. A parameter
    that is FP32 is its own master; so are those that are cut for several ranks, and all of this is cut as they are."""

    def __init__(self, module: nn.Module, settings: Optimizer) -> None:
        self.parameters = dict(module.named_parameters())
        self._clip_norm = settings.clip_norm or math.inf
        self.masters = {
            name: p if p.dtype == torch.float32 else p.detach().to(torch.float32) for name, p in self.parameters.items()
        }
        self.exp_avg = {name: torch.zeros_like(master) for name, master in self.masters.items()}
        self.exp_avg_sq = {name: torch.zeros_like(master) for name, master in self.masters.items()}
        # biases and norm weights, all vectors, are not decayed
        matrices = [master for master in self.masters.values() if master.dim() > 1]
        vectors = [master for master in self.masters.values() if master.dim() <= 1]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW(
            groups,
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.epsilon,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.steps = 0

    @property
    def steps(self) -> int:
        """Updates made so far; AdamW's bias correction counts them."""
        return self._steps

    @steps.setter
    def steps(self, steps: int) -> None:
        self._steps = steps
        for name, master in self.masters.items():
            self._adamw.state[master] = {
                "step": torch.tensor(float(steps), device=master.device),
                "exp_avg": self.exp_avg[name],
                "exp_avg_sq": self.exp_avg_sq[name],
            }

    @property
    def tensors(self) -> Mapping[str, Mapping[str, Tensor]]:
        """What a checkpoint keeps, under Megatron's names for it (`optimizer.state.<kind>.<parameter>`)."""
        return {"param": self.masters, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}

    def publish(self) -> None:
        """Make the model's parameters the rounding of the masters."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                if parameter is not self.masters[name]:
                    parameter.copy_(self.masters[name])

    def collect(self) -> None:
        """Take over the model's gradients: add them to the masters', in FP32."""
        for name, parameter in self.parameters.items():
            master = self.masters[name]
            if parameter.grad is None or parameter is master:  # autograd has added it up
                continue
            gradient = parameter.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None

    @property
    def gradients(self) -> dict[str, Tensor]:
        """Those that are collected, FP32, by parameter name."""
        return {name: master.grad for name, master in self.masters.items() if master.grad is not None}

    def take_gradients(self) -> dict[str, Tensor]:
        """Those that are collected, and let go of them."""
        taken = self.gradients
        self._adamw.zero_grad()
        return taken

    def clip(self) -> float:
        """The global norm of the gradients, which are then scaled down to `clip_norm` if it is above."""
        norm = nn.utils.clip_grad_norm_(self.masters.values(), self._clip_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def step(self, lr: float) -> None:
        """One update from the collected gradients, which are then gone."""
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self._adamw.zero_grad()
        self._steps += 1
        self.publish()


def learning_rate(step: int, steps: int, peak: float, schedule: Schedule) -> float:
    """The rate of update `step` (the first is 1) in a run of `steps` updates."""
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    floor = schedule.min_ratio
    match schedule.kind:
        case "constant":
            return peak
        case "cosine":
            done = min(1.0, (step - schedule.warmup_steps) / max(1, steps - schedule.warmup_steps))
            return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))
        case "wsd":
            done = min(1.0, max(0.0, 1 - (steps - step) / max(1, schedule.decay_steps)))
            return peak * (1 - (1 - floor) * done)
