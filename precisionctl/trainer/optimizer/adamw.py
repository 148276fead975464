"""AdamW over FP32 master weights; the learning rate of a step is in `learning_rate.py`.

torch.optim.AdamW updates the master weights; the model's parameters are their rounding. Gradients of micro-batches are
summed in FP32, as in Megatron (accumulate_allreduce_grads_in_fp32).
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from precisionctl.param import Kind
from precisionctl.recipe import Optimizer
from precisionctl.trainer.parallel.shards import UNSHARDED, ModelShards
from precisionctl.trainer.parallel.world import World, local


class RunOptimizer(Protocol):
    """The optimizer of a run: MasterAdamW, `muon.MasterMuon` or `fp8_lm.Fp8LmAdamW`."""

    @property
    def steps(self) -> int:
        """The number of updates made so far, for AdamW's bias correction."""
        ...

    @steps.setter
    def steps(self, steps: int) -> None: ...
    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The model's parameters (this rank's shards), by Megatron name."""
        ...

    @property
    def tensors(self) -> Mapping[Kind, Mapping[str, Tensor]]:
        """The FP32 tensors that a checkpoint stores, by kind and parameter."""

    @property
    def extra_state(self) -> Mapping[str, Any]:
        """Plain values that a checkpoint stores besides; empty if there are none."""

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restore `extra_state`, before the tensors saved with it are loaded. Raises KeyError, TypeError or ValueError
        for a state of another form."""

    def loading(self, kind: Kind) -> AbstractContextManager[Mapping[str, Tensor]]:
        """A context with FP32 tensors of a kind to fill in; they take effect at its end."""
        ...

    def publish(self) -> None:
        """Set the model's parameters to the rounding of the master weights; those without stay as they are."""

    def collect(self) -> None:
        """Add the gradients of a backward pass to those of the update."""

    def reduce(self, world: World) -> None:
        """Sum the gradients over all ranks, after the last pass of an update."""

    @property
    def gradients(self) -> dict[str, Tensor]:
        """The update's gradients, FP32, by parameter name."""
        ...

    def take_gradients(self) -> dict[str, Tensor]:
        """The update's gradients, as `gradients`; the optimizer drops them."""
        ...

    def clip(self) -> Tensor:
        """Scale the gradients down if their global norm is above `clip_norm`. Returns the norm before, FP32 `[]`."""
        ...

    def step(self, lr: float, skip: Tensor | None = None) -> None:
        """Update the parameters and drop the gradients; if `skip`, bool `[]` on the device, is True, only drop them."""

    def notes(self, lr: float) -> Iterable[str]:
        """Notes for the user before a run whose highest learning rate is `lr`."""
        ...


def is_decayed(name: str, parameter: Tensor) -> bool:
    """Whether a parameter has weight decay. Biases and norm weights, all of one dimension, have none; nor have the
    rates of a mixer, a matrix in Mamba-1 (mamba_ssm/modules/mamba_simple.py: A_log._no_weight_decay)."""
    return parameter.dim() > 1 and not name.endswith("A_log")


def with_state(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """The parameters that an optimizer has state of, by name: all but tables of integers, which FP32 does not hold."""
    return {name: parameter for name, parameter in parameters.items() if parameter.is_floating_point()}


class MasterAdamW:
    """AdamW with FP32 state. `masters`, `exp_avg` and `exp_avg_sq` are FP32 tensors by parameter name, of the
    parameters' shapes. A parameter that is FP32, as all that FSDP2 shards are, is its own master weight. State is
    sharded like the parameters. Of the parameters `others`, which a subclass updates, it has the masters alone."""

    def __init__(
        self,
        module: nn.Module,
        settings: Optimizer,
        shards: ModelShards = UNSHARDED,
        others: Collection[str] = (),
    ) -> None:
        self.parameters = dict(module.named_parameters())
        self._clip_norm, self._shards = settings.clip_norm or math.inf, shards
        self.masters = {
            name: p if p.dtype == torch.float32 else p.detach().to(torch.float32)
            for name, p in with_state(self.parameters).items()
        }
        mine = {name: master for name, master in self.masters.items() if name not in others}
        self.exp_avg = {name: torch.zeros_like(master) for name, master in mine.items()}
        self.exp_avg_sq = {name: torch.zeros_like(master) for name, master in mine.items()}
        decayed = [master for name, master in mine.items() if is_decayed(name, master)]
        spared = [master for name, master in mine.items() if not is_decayed(name, master)]
        groups: list[dict[str, Any]] = [{"params": decayed}, {"params": spared, "weight_decay": 0.0}]
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
        return int(self._made)

    @steps.setter
    def steps(self, steps: int) -> None:
        self._made = torch.tensor(steps, device=next(iter(self.masters.values())).device)
        for name, exp_avg in self.exp_avg.items():
            self._adamw.state[self.masters[name]] = {
                "step": torch.tensor(float(steps), device=exp_avg.device),
                "exp_avg": exp_avg,
                "exp_avg_sq": self.exp_avg_sq[name],
            }

    @property
    def tensors(self) -> Mapping[Kind, Mapping[str, Tensor]]:
        return {"param": self.masters, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}

    @property
    def extra_state(self) -> Mapping[str, Any]:
        return {}

    def load_extra_state(self, state: Mapping[str, Any]) -> None:
        """Nothing to do."""

    @contextmanager
    def loading(self, kind: Kind) -> Iterator[Mapping[str, Tensor]]:
        yield self.tensors[kind]

    def publish(self) -> None:
        rounded = {name: master for name, master in self.masters.items() if master is not self.parameters[name]}
        if rounded:
            with torch.no_grad():
                torch._foreach_copy_([self.parameters[name] for name in rounded], [*rounded.values()])

    def collect(self) -> None:
        """Add the model's gradients to the masters', in FP32. In an update's first pass each BF16 gradient is freed
        before the next is converted, so that at most one is in memory twice."""
        sums, new = [], []
        for name, master in self.masters.items():
            parameter = self.parameters[name]
            if parameter.grad is None or parameter is master:  # an FP32 parameter's is summed by autograd
                continue
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                sums.append(master.grad)
                new.append(parameter.grad)
            parameter.grad = None
        if sums:
            torch._foreach_add_(sums, new)

    def reduce(self, world: World) -> None:
        """FSDP2 already reduced these; only tensor-parallel partial gradients remain."""
        self._shards.all_reduce_partial(self.masters)

    @property
    def gradients(self) -> dict[str, Tensor]:
        return {name: master.grad for name, master in self.masters.items() if master.grad is not None}

    def take_gradients(self) -> dict[str, Tensor]:
        taken = self.gradients
        self._drop_gradients()
        return taken

    def clip(self) -> Tensor:
        gradients = self.gradients
        norm = self._shards.norm(gradients)
        factor = (self._clip_norm / (norm + 1e-6)).clamp(max=1.0)  # as nn.utils.clip_grad_norm_ has it
        if gradients:
            torch._foreach_mul_([local(gradient) for gradient in gradients.values()], factor)
        return norm

    def step(self, lr: float, skip: Tensor | None = None) -> None:
        for group in self._adamw.param_groups:
            group["lr"] = lr
        # GradScaler's way to skip a step: the fused kernel reads the flag on the device and changes nothing
        self._adamw.found_inf = None if skip is None else skip.float()  # type: ignore[attr-defined]
        self._adamw.step()
        self._drop_gradients()
        self._made += 1 if skip is None else ~skip
        self.publish()

    def notes(self, lr: float) -> Iterable[str]:
        return ()

    def _drop_gradients(self) -> None:
        for master in self.masters.values():
            master.grad = None
