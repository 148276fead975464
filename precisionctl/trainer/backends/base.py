"""Backend: what makes the GPT's linears and norms.

Both make modules with the same parameter names, FP8 state and numerics: `te` (Transformer
Engine, on a GPU with FP8) and `emulated` (plain PyTorch, anywhere).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from precisionctl.errors import PrecisionError
from precisionctl.fp8.state import Fp8State, Role, RoleState
from precisionctl.model_shape import ModelShape
from precisionctl.precision import Precision
from precisionctl.trainer.backends.recorder import Recorder
from precisionctl.trainer.parallel.world import World

Mode = Literal["column", "inner column", "row"]
"""How tensor ranks shard a linear, as Megatron does. `column`: by its outputs; a region begins with it, so that under
sequence parallelism it is called with this rank's tokens. `inner column`: likewise, but called with all tokens. `row`:
by its inputs, and a region ends with it."""


def cut_sizes(mode: Mode | None, ranks: int, in_features: int, out_features: int) -> tuple[int, int]:
    """Inputs and outputs of a rank's shard of a linear."""
    if mode is None:
        return in_features, out_features
    return (in_features // ranks, out_features) if mode == "row" else (in_features, out_features // ranks)


@runtime_checkable
class Fp8Linear(Protocol):
    """A linear that may keep delayed-scaling state."""

    def fp8_state(self) -> Fp8State | None:
        """A copy, on the CPU; None where the GEMM keeps none (BF16, all but delayed scaling)."""
        ...

    def set_fp8_state(self, state: Fp8State) -> None:
        """Set scales and histories; a history of another length keeps its newest rows.
        Raises PrecisionError where the GEMM keeps no state."""
        ...

    def fp8_views(self) -> Iterator[tuple[Role, RoleState]]:
        """Views of the state of the roles in use, on the device, true until the next pass; none where the GEMM keeps no
        state. A linear of several experts may give a role once for each."""
        ...


@dataclass(frozen=True)
class Norm:
    """A normalisation over the last dimension; LayerNorm has a bias too. Under `zero_centered` the weight that is
    stored is what is multiplied by, minus one."""

    kind: Literal["RMSNorm", "LayerNorm"]
    epsilon: float
    zero_centered: bool = False

    @property
    def has_bias(self) -> bool:
        return self.kind == "LayerNorm"

    @property
    def initial_weight(self) -> float:
        return 0.0 if self.zero_centered else 1.0

    def multiplier(self, weight: Tensor) -> Tensor:
        """What normalised values are multiplied by, FP32."""
        return weight.float() + 1 if self.zero_centered else weight.float()

    def of(self, values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Computed and returned in FP32."""
        wide = values.float()
        multiplier = self.multiplier(weight)
        if self.kind == "RMSNorm":
            return multiplier * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon))
        assert bias is not None, "every LayerNorm has one"
        return F.layer_norm(wide, multiplier.shape, multiplier, bias.float(), self.epsilon)


def norm_of(model: ModelShape) -> Norm:
    """A model's norm."""
    return Norm(model.normalization, model.norm_epsilon, model.zero_centered_gamma)


class Backend(Protocol):
    """Makes the GPT's linears and norms, and keeps their FP8 state in step with its passes.

    `name` is the Megatron name of the module (`decoder.layers.0.mlp.linear_fc1`). Linears raise
    PrecisionError for sizes that an FP8 GEMM cannot have. Sizes are those of the whole, of which a linear with a `mode`
    has the part of its tensor rank, `world.tensor`.
    """

    dtype: torch.dtype
    device: torch.device
    world: World
    recorder: Recorder | None
    """While there is one, GEMMs run in BF16 and show it their tensors; its `forward_pass` replaces the backend's."""

    def linear(
        self, name: str, in_features: int, out_features: int, bias: bool, mode: Mode | None = None
    ) -> nn.Module: ...
    def layer_norm_linear(
        self, name: str, in_features: int, out_features: int, bias: bool, norm: Norm, mode: Mode | None = None
    ) -> nn.Module: ...
    def norm(self, size: int, norm: Norm) -> nn.Module: ...
    def grouped_linear(
        self, name: str, experts: int, in_features: int, out_features: int, bias: bool, mode: Mode | None = None
    ) -> nn.Module:
        """A linear for each of the `world.experts`' own, `weight{expert}` and `bias{expert}`, called with tokens
        `[tokens, in]` in the order of their experts and the number of each expert's: any number. Its state is of
        `[experts]`, of all of them; of an expert without tokens, that of input and gradient stays as it is. The region
        of tensor ranks that it is in begins and ends elsewhere: what it returns is a shard, or a partial sum."""
        ...

    def packed_attention(self, model: ModelShape, scale: float) -> nn.Module | None:
        """A kernel for texts that share rows, called with all queries of a batch `[T, G * R, D]`, keys and values `[T,
        G, D]`, the batch's PackedSequences and the window; gives `[T, G * R * D]`. It knows neither soft caps nor
        sinks. None where there is none: texts are then attended to one after another."""
        ...

    def same_weights(self) -> AbstractContextManager[None]:
        """A context for passes forward and backward between which no weight changes: each weight is cast in the
        first one alone. Under delayed scaling that is one row of its history, and one scale in all of them, as in
        Megatron. Not for a model that FSDP2 shards, whose weights are not whole between two passes."""
        ...

    def forward_pass(self) -> AbstractContextManager[None]:
        """A context for one pass through all modules. On leaving it with gradients enabled, forward scales are
        updated, as TE does when its outermost autocast ends; without gradients nothing is recorded."""
        ...

    def captured(
        self, layers: Iterable[nn.Module], positions: Any, like: Tensor, *, same_weights: bool
    ) -> Callable[[Tensor], Tensor]:
        """Passes with gradients through `layers` at `positions`, as CUDA graphs, of hidden states like these `[T, E]`;
        within `same_weights`, too, where that is said. FP8 state stays as it is. Raises EnvironmentProblem where there
        are none."""
        ...

    def after_backward(self) -> None:
        """Called when a pass's gradients are complete: backward scales are updated."""
        ...

    def forget_infinite(self, skipped: Tensor) -> None:
        """After an update that was skipped if `skipped`, bool `[]` on the device, is True: then remove the infinite
        amaxes of its passes from the histories, where they would freeze the scales."""
        ...

    def recomputed(self, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """`function(*arguments)` under activation recomputation: the backward computes it once more, with the scales of
        this pass, to the same bits. Its amaxes are recorded once."""
        ...


def recompute(function: Callable[..., Tensor], *arguments: Any, again: AbstractContextManager[None]) -> Tensor:
    """`function(*arguments)`, which the backward calls once more, in the context `again`."""
    made: Tensor = checkpoint(
        function,
        *arguments,
        use_reentrant=False,
        preserve_rng_state=False,  # nothing is drawn
        context_fn=lambda: (nullcontext(), again),
    )
    return made


def column_linear(
    backend: Backend, name: str, in_features: int, out_features: int, bias: bool, norm: Norm | None
) -> nn.Module:
    """A linear that begins a region of tensor ranks, with the norm that comes before it, if any."""
    if norm is None:
        return backend.linear(name, in_features, out_features, bias, "column")
    return backend.layer_norm_linear(name, in_features, out_features, bias, norm, "column")


def add_post_layernorm(linear: nn.Module, norm: nn.Module) -> None:
    """Normalise what a linear gives, by its child `post_layernorm` (Gemma, under Megatron-Bridge's names)."""
    linear.add_module("post_layernorm", norm)
    linear.register_forward_hook(lambda _, inputs, out: norm(out))


def fp8_linears(model: nn.Module) -> dict[str, Fp8Linear]:
    """The linears that keep delayed-scaling state, by Megatron name."""
    named = ((name, module) for name, module in model.named_modules() if isinstance(module, Fp8Linear))
    return {name: module for name, module in named if next(module.fp8_views(), None)}


def require_alignment(precision: Precision, name: str, what: str, *sizes: int) -> None:
    """Raises PrecisionError where a dimension of an FP8 GEMM is not what the recipe needs."""
    if any(size % precision.alignment for size in sizes):
        raise PrecisionError(
            f"an FP8 GEMM cannot take {what} of {' by '.join(map(str, sizes))}: "
            f"under {precision.scaling} scaling sizes must be divisible by {precision.alignment}",
            where=name,
            do="Choose other sizes, or keep the module in BF16 with `keep_bf16`.",
        )
