"""Backend: makes the GPT's linears and norms.

There are two, `te` (Transformer Engine, on a GPU with FP8) and `emulated` (plain PyTorch, anywhere), whose modules have
the same parameter names, FP8 state and numerics.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from precisionctl.errors import PrecisionError
from precisionctl.fp8.state import Fp8State, Role, RoleState
from precisionctl.model.model_shape import ModelShape
from precisionctl.precision import Precision
from precisionctl.trainer.backends.recorder import Recorder
from precisionctl.trainer.parallel.world import World

Mode = Literal["column", "inner column", "row"]
"""How tensor-parallel ranks shard a linear, as in Megatron. `column`: by outputs; a region (TensorRanks) begins with
it, so under sequence parallelism it is called with this rank's tokens. `inner column`: by outputs, inside a region, so
called with all tokens. `row`: by inputs; a region ends with it."""


def cut_sizes(mode: Mode | None, ranks: int, in_features: int, out_features: int) -> tuple[int, int]:
    """The numbers of inputs and outputs of a rank's shard of a linear."""
    if mode is None:
        return in_features, out_features
    return (in_features // ranks, out_features) if mode == "row" else (in_features, out_features // ranks)


@runtime_checkable
class Fp8Linear(Protocol):
    """A linear that may keep delayed-scaling state."""

    def fp8_state(self) -> Fp8State | None:
        """A copy of the state on the CPU; None if the GEMM has none (in BF16, and without delayed scaling)."""
        ...

    def set_fp8_state(self, state: Fp8State) -> None:
        """Set scales and histories; of a history of another length the newest rows are kept. Raises PrecisionError if
        the GEMM has no state."""
        ...

    def fp8_views(self) -> Iterator[tuple[Role, RoleState]]:
        """Views of the state of the roles in use, on the device, valid until the next pass; none if the GEMM has no
        state. A linear of several experts may yield a role once for each expert."""
        ...


@dataclass(frozen=True)
class Norm:
    """A normalisation over the last dimension. LayerNorm has a bias. With `zero_centered` the stored weight is the
    multiplier minus one."""

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
        """The normalised values, computed and returned in FP32."""
        wide = values.float()
        multiplier = self.multiplier(weight)
        if self.kind == "RMSNorm":
            return multiplier * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon))
        assert bias is not None, "every LayerNorm has one"
        return F.layer_norm(wide, multiplier.shape, multiplier, bias.float(), self.epsilon)


def norm_of(model: ModelShape) -> Norm:
    """The kind of norm that a model has."""
    return Norm(model.normalization, model.norm_epsilon, model.zero_centered_gamma)


def post_norm_of(model: ModelShape) -> Norm:
    """That of what attention and MLP give."""
    return replace(norm_of(model), epsilon=model.post_norm_epsilon or model.norm_epsilon)


def final_norm_of(model: ModelShape) -> Norm:
    """That after the last layer."""
    return replace(norm_of(model), zero_centered=model.zero_centered_gamma and not model.final_gamma_whole)


class Backend(Protocol):
    """Makes the GPT's linears and norms, and keeps their FP8 state in step with its passes.

    `name` is the Megatron name of the module (`decoder.layers.0.mlp.linear_fc1`). Sizes are those of the whole linear,
    of which a linear with a `mode` gets the shard of this tensor rank (`world.tensor`). Methods that make linears raise
    PrecisionError for sizes that an FP8 GEMM cannot have.
    """

    dtype: torch.dtype
    device: torch.device
    world: World
    recorder: Recorder | None
    """While it is set, GEMMs run in BF16 and pass it their tensors, and its `forward_pass` replaces the backend's."""

    def linear(
        self, name: str, in_features: int, out_features: int, bias: bool, mode: Mode | None = None
    ) -> nn.Module: ...
    def layer_norm_linear(
        self, name: str, in_features: int, out_features: int, bias: bool, norm: Norm, mode: Mode | None
    ) -> nn.Module: ...
    def norm(self, size: int, norm: Norm) -> nn.Module: ...
    def grouped_linear(
        self, name: str, experts: int, in_features: int, out_features: int, bias: bool, mode: Mode | None
    ) -> nn.Module:
        """A linear for each of this rank's experts (`world.experts`), with parameters `weight{expert}` and
        `bias{expert}`.

        It is called with tokens `[tokens, in]` sorted by expert and the number of tokens for each expert, which may be
        0. Its state is of `[experts]`, for the experts of all ranks; input and gradient state of an expert without
        tokens does not change. It neither begins nor ends a region of tensor ranks, so it returns a shard or a partial
        sum.
        """
        ...

    def attention(self, model: ModelShape, scale: float) -> nn.Module | None:
        """A kernel for causal attention, called with queries `[B, S, G * R, D]`, keys and values `[B, S, G, D]`, the
        batch's PackedSequences, if texts share rows, and the window, if there is one; it returns `[T, G * R * D]`, in
        any view. It supports neither soft caps nor sinks. None if there is no such kernel."""
        ...

    def same_weights(self) -> AbstractContextManager[None]:
        """A context for several passes between which no weight changes, so that each weight is cast only in the first.
        Under delayed scaling that fills one row of its history, and all passes use one scale, as in Megatron. Not for
        a model that FSDP2 shards, which does not keep whole weights between passes."""
        ...

    def begin_pass(self, *number: int) -> None:
        """Say which pass of which run comes next, before one with gradients: where the backend rounds at random, it
        does so by this number, so that a run that is killed repeats it. Transformer Engine draws from PyTorch's
        generator instead, whose state a checkpoint has."""
        ...

    def forward_pass(self) -> AbstractContextManager[None]:
        """A context for one forward pass through all modules. At its end forward scales are updated, as by TE when its
        outermost autocast ends; without gradients enabled nothing is recorded."""
        ...

    def captured(
        self, layers: Iterable[nn.Module], positions: Any, like: Tensor, *, same_weights: bool
    ) -> Callable[[Tensor], Tensor]:
        """Capture passes with gradients through `layers` at `positions` as CUDA graphs, for hidden states of the shape
        and dtype of `like` `[T, E]`, and with `same_weights` also for passes in that context. FP8 state does not
        change. Raises EnvironmentProblem if the backend has no graphs."""
        ...

    def after_backward(self) -> None:
        """Update backward scales; to be called when the gradients of a pass are complete."""
        ...

    def forget_infinite(self, skipped: Tensor) -> None:
        """If the update was skipped (`skipped`, bool `[]` on the device), remove the infinite amaxes of its passes from
        the histories: they would keep the scales from changing."""
        ...

    def recomputed(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """`function(*arguments)` with activation recomputation: the backward computes it again with the scales of this
        pass, to the same bits. Its amaxes are recorded only once."""
        ...


def recompute(function: Callable[..., Any], *arguments: Any, again: AbstractContextManager[None]) -> Any:
    """`function(*arguments)`, which the backward calls again, in the context `again`."""
    return checkpoint(
        function,
        *arguments,
        use_reentrant=False,
        preserve_rng_state=False,  # no random numbers are drawn
        context_fn=lambda: (nullcontext(), again),
    )


def column_linear(
    backend: Backend,
    name: str,
    in_features: int,
    out_features: int,
    bias: bool,
    norm: Norm | None,
    mode: Mode = "column",
) -> nn.Module:
    """A linear of which tensor ranks have rows, with the norm that comes before it, if any."""
    if norm is None:
        return backend.linear(name, in_features, out_features, bias, mode)
    return backend.layer_norm_linear(name, in_features, out_features, bias, norm, mode)


def plain_linear(in_features: int, out_features: int, backend: Backend) -> nn.Linear:
    """A linear without bias that no backend makes, of these sizes on every rank: it never computes in FP8."""
    made = nn.Linear(in_features, out_features, bias=False, dtype=backend.dtype, device=backend.device)
    nn.init.normal_(made.weight, std=0.02)
    return made


def add_post_layernorm(module: nn.Module, norm: nn.Module) -> None:
    """Normalise a module's output by a child module `post_layernorm` (a linear's in Gemma, with Megatron-Bridge's
    names)."""
    module.add_module("post_layernorm", norm)
    module.register_forward_hook(lambda _, inputs, out: norm(out))


def fp8_linears(model: nn.Module) -> dict[str, Fp8Linear]:
    """The linears that keep delayed-scaling state, by Megatron name."""
    named = ((name, module) for name, module in model.named_modules() if isinstance(module, Fp8Linear))
    return {name: module for name, module in named if next(module.fp8_views(), None)}


def require_alignment(precision: Precision, name: str, what: str, *sizes: int) -> None:
    """Raise PrecisionError if a size of a GEMM with codes is not a multiple of what the scaling needs."""
    if misfit := precision.misfit(sizes):
        raise PrecisionError(
            f"an {precision.codes} GEMM cannot take {what} of {' by '.join(map(str, sizes))}: {misfit}",
            where=name,
            do="Choose other sizes, or keep the module in BF16 with `keep_bf16`.",
        )
