"""AdamW with FP8-LM's state: gradients and first moment in FP8, second moment and master weights in FP16, each tensor
with one scale. That is 6 bytes for each parameter, where FP32 takes 16.

Peng et al., "FP8-LM: Training FP8 Large Language Models" (2023, arXiv 2310.18313), section 2.2. The arithmetic is that
of Transformer Engine's FusedAdam: state is decoded, updated in FP32, and encoded under a scale from its new amax.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from precisionctl.checkpoints.module import LazyTensors
from precisionctl.param import KINDS, Kind
from precisionctl.recipe import Optimizer
from precisionctl.trainer.optimizer.adamw import is_decayed, with_state
from precisionctl.trainer.optimizer.fp8_gradients import Fp8Gradients
from precisionctl.trainer.optimizer.scaled_tensor import ScaledTensor
from precisionctl.trainer.parallel.world import World

if TYPE_CHECKING:
    from precisionctl.trainer.optimizer.fused_adam_te import FusedMoments


class Moments:
    """The master weight and moments of a parameter. An FP32 parameter is its own master weight."""

    def __init__(self, parameter: nn.Parameter, settings: Optimizer) -> None:
        self._settings = settings
        values = parameter.detach()
        self.kinds: dict[Kind, ScaledTensor] = {
            "param": ScaledTensor(values, torch.ones(1, device=values.device))
            if values.dtype == torch.float32
            else ScaledTensor.zeros(values, torch.float16),
            "exp_avg": ScaledTensor.zeros(values, torch.float8_e4m3fn),
            "exp_avg_sq": ScaledTensor.zeros(values, torch.float16),
        }

    def update(self, gradient: Tensor, lr: float, step: int) -> None:
        """AdamW's update number `step`, counted from 1, with an FP32 gradient."""
        master, exp_avg, exp_avg_sq = (self.kinds[kind].read() for kind in KINDS)
        adam(master, exp_avg, exp_avg_sq, gradient, self._settings, lr=lr, step=step)
        for kind, values in zip(KINDS, (master, exp_avg, exp_avg_sq), strict=True):
            self.kinds[kind].write(values)


def adam(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradient: Tensor,
    settings: Optimizer,
    *,
    lr: float,
    step: int,
) -> None:
    """Update FP32 tensors in place, operation by operation as TE's kernel (adam.cu, adam_update), except that a GPU
    fuses products and sums."""
    beta1, beta2 = _fp32(settings.beta1), _fp32(settings.beta2)
    exp_avg.mul_(beta1).add_(gradient * (1 - beta1))
    exp_avg_sq.mul_(beta2).add_((gradient * (1 - beta2)).mul_(gradient))
    # In FP64: PyTorch's FP32 square root on a CPU is off by one bit for one number in six
    root = (exp_avg_sq / _fp32(1 - beta2**step)).double().sqrt_().float()
    update = (exp_avg / _fp32(1 - beta1**step)).div_(root.add_(settings.epsilon))
    master.sub_(update.add_(master * settings.weight_decay).mul_(lr))


def _fp32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()


class Fp8LmAdamW:
    """FP8-LM as the optimizer of a run (`adamw.RunOptimizer`)."""

    def __init__(self, module: nn.Module, settings: Optimizer, *, fused: bool = False) -> None:
        """With `fused`, on a GPU, updates are made by Transformer Engine's FusedAdam."""
        self.parameters = dict(module.named_parameters())
        self.steps = 0
        self._clip_norm = settings.clip_norm or math.inf
        self._gradients = Fp8Gradients({name: p for name, p in self.parameters.items() if p.requires_grad})
        self._moments: dict[str, Moments | FusedMoments] = {}
        for name, parameter in with_state(self.parameters).items():
            # For an FP32 parameter FusedAdam would allocate a master weight that it does not use
            by_te = fused and parameter.requires_grad and parameter.dtype != torch.float32
            its = settings if is_decayed(name, parameter) else replace(settings, weight_decay=0.0)
            self._moments[name] = _fused_moments(parameter, its) if by_te else Moments(parameter, its)
        self._scales: Mapping[str, Mapping[str, float]] = {}

    @property
    def tensors(self) -> Mapping[Kind, Mapping[str, Tensor]]:
        """The tensors that a checkpoint stores, decoded to FP32 when they are read."""
        return {
            kind: LazyTensors({name: each.kinds[kind].read for name, each in self._moments.items()}) for kind in KINDS
        }

    @property
    def extra_state(self) -> dict[str, Any]:
        """The factor `mu`, and the FP32 scales with which the decoded tensors can be encoded to the same codes."""
        scales = {
            kind: {name: float(each.kinds[kind].scale_inv) for name, each in self._moments.items()} for kind in KINDS
        }
        return {"mu": self._gradients.mu, "scale_inv": scales}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        mu = float(state["mu"])
        if not 0 < mu < math.inf:
            raise ValueError(f"mu is {mu}")
        self._gradients.mu = mu
        self._scales = {kind: {name: float(s) for name, s in state["scale_inv"][kind].items()} for kind in KINDS}

    @contextmanager
    def loading(self, kind: Kind) -> Iterator[Mapping[str, Tensor]]:
        tensors = {name: each.kinds[kind].read() for name, each in self._moments.items()}
        yield tensors
        scales = self._scales.get(kind, {})
        for name, values in tensors.items():
            self._moments[name].kinds[kind].write(values, scales.get(name))

    def publish(self) -> None:
        """Make the model's parameters the rounding of the masters."""
        with torch.no_grad():
            for name, moments in self._moments.items():
                parameter = self.parameters[name]
                if parameter.dtype != torch.float32:
                    parameter.copy_(moments.kinds["param"].read())

    def collect(self) -> None:
        """Nothing to do: autograd sums the gradients of an update's passes in BF16, which takes less memory, and loses
        less, than an FP8 sum beside each pass's gradients."""

    def reduce(self, world: World) -> None:
        found = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        for parameter in self.parameters.values():
            parameter.grad = None
        self._gradients.all_reduce(found, world)

    @property
    def gradients(self) -> dict[str, Tensor]:
        """The update's gradients, decoded to FP32, by parameter name."""
        return {name: held.read() for name, held in self._gradients.held.items()}

    def take_gradients(self) -> dict[str, Tensor]:
        taken = self.gradients
        self._gradients.clear()
        return taken

    def clip(self) -> Tensor:
        norm = self._gradients.norm()
        self._gradients.scale_by((self._clip_norm / (norm.double() + 1e-6)).clamp(max=1.0))
        return norm

    def step(self, lr: float, skip: Tensor | None = None) -> None:
        """As RunOptimizer's, but it waits for `skip`, as FusedAdam cannot skip a step on the device."""
        if skip is not None and bool(skip):
            self._gradients.clear()
            return
        self.steps += 1
        for name, held in self._gradients.held.items():
            self._moments[name].update(held.read(), lr, self.steps)
        self._gradients.end_update()
        self.publish()

    def notes(self, lr: float) -> Iterator[str]:
        masters = [each.kinds["param"] for each in self._moments.values()]
        in_fp16 = [master for master in masters if master.codes.dtype == torch.float16]
        unmoved = int(sum(master.count_unmoved_by(lr) for master in in_fp16))
        share = unmoved / max(1, sum(master.codes.numel() for master in in_fp16))
        if share > 0.01:
            yield (
                f"FP16 masters round an update of {lr:g} away in {share:.0%} of the weights, the largest ones: "
                "raise optimizer.lr, or leave optimizer.preset out"
            )


def _fused_moments(parameter: nn.Parameter, settings: Optimizer) -> "FusedMoments":
    from precisionctl.trainer.optimizer.fused_adam_te import FusedMoments  # imports Transformer Engine

    return FusedMoments(parameter, settings)
