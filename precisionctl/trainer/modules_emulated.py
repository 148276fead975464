"""The GPT's linears and norms in plain PyTorch, with Transformer Engine's FP8 numerics.

An FP8 GEMM multiplies code values, accumulates in FP32, multiplies by both scale_inv, adds the bias and
rounds once. Code values are exact in FP32, so FP32 matrix products stand in for the tensor cores:

    y     = (X @ W.T) * x.scale_inv * w.scale_inv + bias      X: input  [tokens, in]
    dgrad = (G @ W)   * g.scale_inv * w.scale_inv             W: weight [out, in]
    wgrad = (G.T @ X) * g.scale_inv * x.scale_inv             G: grad_output [tokens, out]

Under delayed scaling a cast uses the scale that earlier steps gave and records its tensor's amax in row 0 of
the history; `fp8.numerics.update_delayed` turns those rows into the next scales. TE also has roles `output`
and `grad_input`, which no GEMM here uses; their state is only kept.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from precisionctl.errors import PrecisionError
from precisionctl.fp8 import numerics
from precisionctl.fp8.state import BACKWARD, FORWARD, Fp8State, Role
from precisionctl.model_shape import ModelShape
from precisionctl.precision import Precision
from precisionctl.trainer.backend import Norm, recompute, require_alignment
from precisionctl.trainer.recorder import Recorder
from precisionctl.trainer.scaling_buffers import ScalingBuffers, Slot
from precisionctl.trainer.world import ALONE, World


class Quantized(NamedTuple):
    """FP8 codes and the FP32 `[]` multiplier that decodes them."""

    codes: Tensor
    scale_inv: Tensor


class Quantizer(Protocol):
    def quantize(self, values: Tensor) -> Quantized: ...


@dataclass(frozen=True)
class DelayedQuantizer:
    """Casts with the scale in its slot, and records the amax for the next one."""

    slot: Slot

    def quantize(self, values: Tensor) -> Quantized:
        self.slot.record(numerics.amax(values))
        scale = self.slot.scale
        return Quantized(numerics.encode(values, scale, self.slot.buffers.dtype), scale.reciprocal())


@dataclass(frozen=True)
class CurrentQuantizer:
    """Casts with the scale that the tensor's own amax gives."""

    dtype: torch.dtype

    def quantize(self, values: Tensor) -> Quantized:
        scale = numerics.current_scale(numerics.amax(values), self.dtype)
        return Quantized(numerics.encode(values, scale, self.dtype), scale.reciprocal())


class Fp8Matmul(torch.autograd.Function):
    """`linear(values, weight, bias)` in FP8, forward and backward.

    values `[tokens, in]` in FP32 or `dtype`, weight `[out, in]`, bias `[out]` or None; gives `[tokens, out]` in
    `dtype`, the activations' dtype, to which gradients are rounded as well.
    """

    @staticmethod
    def forward(
        ctx: Any,
        values: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        quantizers: Mapping[Role, Quantizer],
        dtype: torch.dtype,
    ) -> Tensor:
        x, w = quantizers["input"].quantize(values), quantizers["weight"].quantize(weight)
        ctx.save_for_backward(*x, *w)
        ctx.grad_quantizer, ctx.dtype = quantizers["grad_output"], dtype
        product = _scaled_product(x.codes, w.codes.t(), x.scale_inv * w.scale_inv)
        if bias is not None:
            product += bias.bfloat16()  # TE casts it for FP32 activations too: cuBLAS has no FP8 GEMM with an FP32 bias
        return product.to(dtype)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        x_codes, x_scale_inv, w_codes, w_scale_inv = ctx.saved_tensors
        g = ctx.grad_quantizer.quantize(grad_output)
        dgrad = wgrad = bias_grad = None
        if ctx.needs_input_grad[0]:
            dgrad = _scaled_product(g.codes, w_codes, g.scale_inv * w_scale_inv).to(ctx.dtype)
        if ctx.needs_input_grad[1]:
            wgrad = _scaled_product(g.codes.t(), x_codes, g.scale_inv * x_scale_inv).to(ctx.dtype)
        if ctx.needs_input_grad[2]:
            bias_grad = grad_output.sum(0, dtype=torch.float32).to(ctx.dtype)
        return dgrad, wgrad, bias_grad, None, None


def _scaled_product(left: Tensor, right: Tensor, scale_inv: Tensor) -> Tensor:
    return (left.float() @ right.float()).mul_(scale_inv)


Quantizers = Mapping[Role, Quantizer]
"""How a GEMM's tensors are cast, by role; empty where it stays in BF16."""


def _fp8_gemm(values: Tensor, weight: Tensor, bias: Tensor | None, quantizers: Quantizers) -> Tensor:
    """`Fp8Matmul` of values `[..., in]`, in the weight's dtype."""
    rows = values.flatten(0, -2)
    out: Tensor = Fp8Matmul.apply(rows, weight, bias, quantizers, weight.dtype)  # type: ignore[no-untyped-call]
    return out.view(*values.shape[:-1], len(weight))


def _delayed(quantizers: Quantizers) -> dict[Role, DelayedQuantizer]:
    return {role: q for role, q in quantizers.items() if isinstance(q, DelayedQuantizer)}


def _state(quantizers: Quantizers) -> Fp8State | None:
    delayed = _delayed(quantizers)
    return Fp8State({role: q.slot.state for role, q in delayed.items()}) if delayed else None


def _set_state(name: str, quantizers: Quantizers, state: Fp8State) -> None:
    delayed = _delayed(quantizers)
    if not delayed:
        raise PrecisionError("this GEMM keeps no FP8 state", where=name)
    for role, quantizer in delayed.items():
        quantizer.slot.set_state(state.roles[role])


class Linear(nn.Module):
    """`values @ weight.T + bias`, in FP8 where it has quantizers, else in the parameters' dtype."""

    def __init__(self, backend: "EmulatedBackend", name: str, in_features: int, out_features: int, bias: bool) -> None:
        super().__init__()
        self.backend, self.name = backend, name
        self.quantizers = backend.quantizers(name, in_features, out_features)
        self.weight = nn.Parameter(backend.empty(out_features, in_features).normal_(std=0.02))
        self.bias = nn.Parameter(backend.full(0.0, out_features)) if bias else None

    def forward(self, values: Tensor) -> Tensor:
        """`[..., in]` to `[..., out]`."""
        return self.gemm(values)

    def gemm(self, values: Tensor) -> Tensor:
        """As `forward`; values may be FP32 whatever the parameters' dtype."""
        recorder = self.backend.recorder
        if recorder or not self.quantizers:
            product = F.linear(values.to(self.weight.dtype), self.weight, self.bias)
            if recorder:
                recorder.gemm(self.name, values, self.weight, product)
            return product
        require_alignment(self.name, "a batch of tokens", values.shape[:-1].numel())
        return _fp8_gemm(values, self.weight, self.bias, self.quantizers)

    def fp8_state(self) -> Fp8State | None:
        return _state(self.quantizers)

    def set_fp8_state(self, state: Fp8State) -> None:
        _set_state(self.name, self.quantizers, state)


class LayerNormLinear(Linear):
    """A norm, then a linear: TE's fusion, in which delayed scaling casts the norm's FP32 values directly
    and current scaling casts them after rounding (normalization.cpp, rmsnorm_fwd)."""

    def __init__(
        self,
        backend: "EmulatedBackend",
        name: str,
        in_features: int,
        out_features: int,
        bias: bool,
        norm: Norm,
    ) -> None:
        super().__init__(backend, name, in_features, out_features, bias)
        self.norm = norm
        self.layer_norm_weight = nn.Parameter(backend.full(norm.initial_weight, in_features))
        self.layer_norm_bias = nn.Parameter(backend.full(0.0, in_features)) if norm.has_bias else None

    def forward(self, values: Tensor) -> Tensor:
        normed = self.gemm_input(values)
        return self.gemm(normed if self.backend.recorder or _delayed(self.quantizers) else normed.to(values.dtype))

    def gemm_input(self, values: Tensor) -> Tensor:
        """The norm's output, FP32."""
        return self.norm.of(values, self.layer_norm_weight, self.layer_norm_bias)


class NormModule(nn.Module):
    """A norm in FP32, rounded once to the input's dtype."""

    def __init__(self, backend: "EmulatedBackend", size: int, norm: Norm) -> None:
        super().__init__()
        self.norm = norm
        self.weight = nn.Parameter(backend.full(norm.initial_weight, size))
        self.bias = nn.Parameter(backend.full(0.0, size)) if norm.has_bias else None

    def forward(self, values: Tensor) -> Tensor:
        return self.norm.of(values, self.weight, self.bias).to(values.dtype)


class GroupedLinear(nn.Module):
    """A linear for each expert, each with quantizers of its own, as TE's has.

    Tokens of an expert need no alignment here: TE's are padded with rows of zeros, which change no amax and no sum.
    """

    def __init__(
        self, backend: "EmulatedBackend", name: str, experts: int, in_features: int, out_features: int, bias: bool
    ) -> None:
        super().__init__()
        self.backend, self.name, self.has_bias = backend, name, bias
        self.quantizers = [backend.quantizers(name, in_features, out_features) for _ in range(experts)]
        for expert in range(experts):
            weight = backend.empty(out_features, in_features).normal_(std=0.02)
            self.register_parameter(f"weight{expert}", nn.Parameter(weight))
            if bias:
                self.register_parameter(f"bias{expert}", nn.Parameter(backend.full(0.0, out_features)))

    def forward(self, values: Tensor, counts: Sequence[int]) -> Tensor:
        """Tokens `[tokens, in]`, `counts[0]` of expert 0 first and so on, to `[tokens, out]`."""
        parts = torch.split(values, list(counts))
        out = torch.cat([self._of(expert, part) for expert, part in enumerate(parts)])
        if self.backend.recorder:
            weights = [self.get_parameter(f"weight{expert}") for expert in range(len(parts))]
            self.backend.recorder.grouped_gemm(self.name, values, counts, weights, out)
        return out

    def _of(self, expert: int, values: Tensor) -> Tensor:
        weight, quantizers = self.get_parameter(f"weight{expert}"), self.quantizers[expert]
        bias = self.get_parameter(f"bias{expert}") if self.has_bias else None
        if self.backend.recorder or not quantizers:
            return F.linear(values, weight, bias)
        return _fp8_gemm(values, weight, bias, quantizers)

    def fp8_state(self) -> Fp8State | None:
        states = [state for quantizers in self.quantizers if (state := _state(quantizers))]
        return Fp8State.of_experts(states) if states else None

    def set_fp8_state(self, state: Fp8State) -> None:
        for expert, quantizers in enumerate(self.quantizers):
            _set_state(self.name, quantizers, state.of_expert(expert))


class EmulatedBackend:
    """Makes emulated modules and keeps their delayed-scaling state."""

    def __init__(self, precision: Precision, dtype: torch.dtype, device: torch.device, world: World = ALONE) -> None:
        self.precision, self.dtype, self.device, self.world = precision, dtype, device, world
        self.recorder: Recorder | None = None
        recipe = precision.delayed
        self._forward = ScalingBuffers(recipe.dtype("input"), recipe, device, world)
        self._backward = ScalingBuffers(recipe.dtype("grad_output"), recipe, device, world)

    def linear(self, name: str, in_features: int, out_features: int, bias: bool) -> Linear:
        return Linear(self, name, in_features, out_features, bias)

    def layer_norm_linear(
        self, name: str, in_features: int, out_features: int, bias: bool, norm: Norm
    ) -> LayerNormLinear:
        return LayerNormLinear(self, name, in_features, out_features, bias, norm)

    def norm(self, size: int, norm: Norm) -> NormModule:
        return NormModule(self, size, norm)

    def grouped_linear(self, name: str, experts: int, in_features: int, out_features: int, bias: bool) -> GroupedLinear:
        return GroupedLinear(self, name, experts, in_features, out_features, bias)

    def packed_attention(self, model: ModelShape, scale: float) -> None:
        return None

    def full(self, value: float, size: int) -> Tensor:
        return torch.full((size,), value, dtype=self.dtype, device=self.device)

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def quantizers(self, name: str, in_features: int, out_features: int) -> Quantizers:
        if not self.precision.in_fp8(name):
            return {}
        require_alignment(name, "a weight", out_features, in_features)
        if self.precision.scaling == "current":
            recipe = self.precision.delayed
            return {role: CurrentQuantizer(recipe.dtype(role)) for role in ("input", "weight", "grad_output")}
        forward: dict[Role, Quantizer] = {role: DelayedQuantizer(self._forward.add_slot()) for role in FORWARD}
        return forward | {role: DelayedQuantizer(self._backward.add_slot()) for role in BACKWARD}

    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        yield
        if torch.is_grad_enabled():
            self._forward.update()
        else:
            self._forward.discard_row_0()

    def after_backward(self) -> None:
        self._backward.update()

    def recomputed(self, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
        scale, recorder = self._forward.state.scale, self.recorder  # those of this pass; updates make new tensors

        @contextmanager
        def again() -> Iterator[None]:
            with self._forward.as_before(scale), recorder.computed_again() if recorder else nullcontext():
                yield

        return recompute(function, *arguments, again=again())
