"""The GPT's linears and norms in plain PyTorch, with Transformer Engine's numerics of FP8 and NVFP4 (`fp8_gemm`)."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from precisionctl.errors import EnvironmentProblem
from precisionctl.fp8.state import BACKWARD, FORWARD, Fp8State, Role, RoleState
from precisionctl.model.model_shape import ModelShape
from precisionctl.precision import Precision
from precisionctl.trainer.backends.base import Mode, Norm, cut_sizes, recompute, require_alignment
from precisionctl.trainer.backends.bf16_products import product
from precisionctl.trainer.backends.fp8_gemm import (
    Casts,
    DelayedQuantizer,
    Quantizer,
    Quantizers,
    delayed,
    fp8_gemm,
    nvfp4_quantizers,
    set_state,
    state_of,
    stateless_quantizers,
    views_of,
)
from precisionctl.trainer.backends.recorder import Recorder
from precisionctl.trainer.backends.scaling_buffers import ScalingBuffers
from precisionctl.trainer.parallel.world import ALONE, World


class Linear(nn.Module):
    """`values @ weight.T + bias`, in FP8 if it has quantizers, else in the parameters' dtype; under tensor parallelism
    this rank's shard of it. Tokens are gathered before they are cast, so that all are cast with one scale. As in TE,
    products of `row` shards are rounded, then summed over the ranks, and then the bias is added."""

    weight: nn.Parameter

    def __init__(
        self,
        backend: "EmulatedBackend",
        name: str,
        in_features: int,
        out_features: int,
        bias: bool,
        mode: Mode | None = None,
    ) -> None:
        super().__init__()
        self.backend, self.name, self.mode = backend, name, mode
        self.ranks = backend.world.tensor
        in_features, out_features = cut_sizes(mode, self.ranks.size, in_features, out_features)
        self.quantizers = backend.quantizers(name, in_features, out_features)
        backend.add_weight(self, "weight", self.quantizers, out_features, in_features)
        self.bias = nn.Parameter(backend.full(0.0, out_features)) if bias else None

    def forward(self, values: Tensor) -> Tensor:
        """`[..., in]` to `[..., out]`."""
        return self.gemm(values)

    def gemm(self, values: Tensor) -> Tensor:
        """As `forward`, but values may be FP32 with parameters of any dtype."""
        if self.mode == "column":
            values = self.ranks.enter(values)
        elif self.mode == "inner column":
            values = self.ranks.copy(values)
        if self.mode != "row" or self.ranks.size == 1:
            return self._product(values, self.bias)
        total = self.ranks.leave(self._product(values, None))
        return total if self.bias is None else total + self.bias

    def _product(self, values: Tensor, bias: Tensor | None) -> Tensor:
        recorder = self.backend.recorder
        if recorder or not self.quantizers:
            out = product(F.linear, values.to(self.weight.dtype), self.weight, bias)
            if recorder:
                recorder.gemm(self.name, values, self.weight, out)
            return out
        require_alignment(self.backend.precision, self.name, "a batch of tokens", values.shape[:-1].numel())
        return fp8_gemm(values, self.weight, bias, self.quantizers, self.backend.casts)

    def fp8_state(self) -> Fp8State | None:
        return state_of(self.quantizers)

    def set_fp8_state(self, state: Fp8State) -> None:
        set_state(self.name, self.quantizers, state)

    def fp8_views(self) -> Iterator[tuple[Role, RoleState]]:
        return views_of(self.quantizers)


class LayerNormLinear(Linear):
    """TE's fusion of a norm and a linear. Under delayed scaling the norm's FP32 output is cast directly, under other
    scalings it is rounded first (normalization.cpp, rmsnorm_fwd)."""

    def __init__(
        self,
        backend: "EmulatedBackend",
        name: str,
        in_features: int,
        out_features: int,
        bias: bool,
        norm: Norm,
        mode: Mode | None = None,
    ) -> None:
        super().__init__(backend, name, in_features, out_features, bias, mode)
        self.norm = norm
        self.layer_norm_weight = nn.Parameter(backend.full(norm.initial_weight, in_features))
        self.layer_norm_bias = nn.Parameter(backend.full(0.0, in_features)) if norm.has_bias else None

    def forward(self, values: Tensor) -> Tensor:
        normed = self.gemm_input(values)
        return self.gemm(normed if self.backend.recorder or delayed(self.quantizers) else normed.to(values.dtype))

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
    """A linear for each of this rank's experts, each with its own quantizers, as in TE. It also has the quantizers of
    other ranks' experts, as all ranks have the FP8 state of all experts.

    The number of an expert's tokens needs no alignment here; TE pads them with rows of zeros, which change no amax and
    no sum. If tensor ranks' results will be summed, only the first rank adds the bias.
    """

    def __init__(
        self,
        backend: "EmulatedBackend",
        name: str,
        experts: int,
        in_features: int,
        out_features: int,
        bias: bool,
        mode: Mode | None = None,
    ) -> None:
        super().__init__()
        ranks = backend.world.tensor
        in_features, out_features = cut_sizes(mode, ranks.size, in_features, out_features)
        self.backend, self.name = backend, name
        self.adds_bias = bias and (mode != "row" or ranks.rank == 0)
        self.experts = backend.world.experts.local_experts(experts)
        self.quantizers = [backend.quantizers(name, in_features, out_features) for _ in range(experts)]
        for expert in self.experts:
            backend.add_weight(self, f"weight{expert}", self.quantizers[expert], out_features, in_features)
            if bias:
                self.register_parameter(f"bias{expert}", nn.Parameter(backend.full(0.0, out_features)))

    def forward(self, values: Tensor, counts: Sequence[int]) -> Tensor:
        """Tokens `[tokens, in]`, sorted by expert, with `counts[i]` of this rank's i-th expert, to `[tokens, out]`."""
        outputs = []
        for expert, part in zip(self.experts, torch.split(values, list(counts)), strict=True):
            weight, quantizers = self.get_parameter(f"weight{expert}"), self.quantizers[expert]
            bias = self.get_parameter(f"bias{expert}") if self.adds_bias else None
            if self.backend.recorder or not quantizers:
                outputs.append(product(F.linear, part, weight, bias))
            else:
                outputs.append(fp8_gemm(part, weight, bias, quantizers, self.backend.casts))
        out = torch.cat(outputs)
        if self.backend.recorder:
            weights = [self.get_parameter(f"weight{expert}") for expert in self.experts]
            self.backend.recorder.grouped_gemm(self.name, values, counts, weights, out)
        return out

    def fp8_state(self) -> Fp8State | None:
        states = [state for quantizers in self.quantizers if (state := state_of(quantizers))]
        return Fp8State.of_experts(states) if states else None

    def set_fp8_state(self, state: Fp8State) -> None:
        for expert, quantizers in enumerate(self.quantizers):
            set_state(self.name, quantizers, state.of_expert(expert))

    def fp8_views(self) -> Iterator[tuple[Role, RoleState]]:
        return (view for quantizers in self.quantizers for view in views_of(quantizers))


class EmulatedBackend:
    """Makes emulated modules and keeps their delayed-scaling state."""

    def __init__(
        self,
        precision: Precision,
        dtype: torch.dtype,
        device: torch.device,
        world: World = ALONE,
        *,
        fp8_weights: bool = False,
    ) -> None:
        self.precision, self.dtype, self.device, self.world = precision, dtype, device, world
        self.fp8_weights = fp8_weights
        self.recorder: Recorder | None = None
        self.casts: Casts | None = None
        """The casts of weights so far, inside `same_weights`; else None."""
        self._pass: tuple[int, ...] = ()
        self._rounding_gemms = 0
        recipe = precision.delayed
        self._forward = ScalingBuffers(recipe.dtype("input"), recipe, device, world)
        self._backward = ScalingBuffers(recipe.dtype("grad_output"), recipe, device, world)

    def linear(self, name: str, in_features: int, out_features: int, bias: bool, mode: Mode | None = None) -> Linear:
        return Linear(self, name, in_features, out_features, bias, mode)

    def layer_norm_linear(
        self, name: str, in_features: int, out_features: int, bias: bool, norm: Norm, mode: Mode | None
    ) -> LayerNormLinear:
        return LayerNormLinear(self, name, in_features, out_features, bias, norm, mode)

    def norm(self, size: int, norm: Norm) -> NormModule:
        return NormModule(self, size, norm)

    def grouped_linear(
        self, name: str, experts: int, in_features: int, out_features: int, bias: bool, mode: Mode | None
    ) -> GroupedLinear:
        return GroupedLinear(self, name, experts, in_features, out_features, bias, mode)

    def attention(self, model: ModelShape, scale: float) -> None:
        return None

    def full(self, value: float, size: int) -> Tensor:
        return torch.full((size,), value, dtype=self.dtype, device=self.device)

    def quantizers(self, name: str, in_features: int, out_features: int) -> Quantizers:
        if not self.precision.in_fp8(name):
            return {}
        require_alignment(self.precision, name, "a weight", out_features, in_features)
        if self.precision.scaling == "nvfp4":
            self._rounding_gemms += 1
            return nvfp4_quantizers(partial(self._generator, self._rounding_gemms))
        if not self.precision.keeps_state:
            return stateless_quantizers(self.precision, self.dtype)
        forward: dict[Role, Quantizer] = {role: DelayedQuantizer(self._forward.add_slot()) for role in FORWARD}
        return forward | {role: DelayedQuantizer(self._backward.add_slot()) for role in BACKWARD}

    def _generator(self, gemm: int) -> torch.Generator:
        """Random numbers for the gradients of a GEMM, by its number, in this pass. Ranks with the same data have the
        same, since gradients that they all compute must not differ."""
        key = hashlib.blake2b(repr((self._pass, self.world.data_rank, gemm)).encode(), digest_size=8).digest()
        return torch.Generator(self.device).manual_seed(int.from_bytes(key, "big"))

    def begin_pass(self, *number: int) -> None:
        self._pass = number

    def add_weight(
        self, module: nn.Module, name: str, quantizers: Quantizers, out_features: int, in_features: int
    ) -> None:
        """Give a linear a weight with random values or, with `fp8_weights`, one of codes; values are then cast when a
        state dict is loaded."""
        if self.fp8_weights and quantizers:
            codes = torch.zeros(out_features, in_features, dtype=self.precision.dtype("weight"), device=self.device)
            weight = nn.Parameter(codes, requires_grad=False)

            def cast(_: nn.Module, state_dict: dict[str, Tensor], prefix: str, *others: Any) -> None:
                if prefix + name in state_dict:
                    values = state_dict[prefix + name].to(self.device)
                    state_dict[prefix + name] = quantizers["weight"].quantize(values).rows.codes

            module.register_load_state_dict_pre_hook(cast)  # type: ignore[no-untyped-call]
        else:
            values = torch.empty(out_features, in_features, dtype=self.dtype, device=self.device)
            weight = nn.Parameter(values.normal_(std=0.02))
        module.register_parameter(name, weight)

    @contextmanager
    def same_weights(self) -> Iterator[None]:
        self.casts = {}
        try:
            yield
        finally:
            self.casts = None

    def captured(
        self, layers: Iterable[nn.Module], positions: Any, like: Tensor, *, same_weights: bool
    ) -> Callable[[Tensor], Tensor]:
        raise EnvironmentProblem("CUDA graphs need Transformer Engine, and this run is emulated")

    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        yield
        if torch.is_grad_enabled():
            self._forward.update()
        else:
            self._forward.discard_row_0()

    def after_backward(self) -> None:
        self._backward.update()

    def forget_infinite(self, skipped: Tensor) -> None:
        self._forward.forget_infinite(skipped)
        self._backward.forget_infinite(skipped)

    def recomputed(self, function: Callable[..., Any], *arguments: Any) -> Any:
        scale, recorder = self._forward.state.scale, self.recorder  # this pass's, as updates make new tensors

        @contextmanager
        def again() -> Iterator[None]:
            with self._forward.recomputing(scale), recorder.recomputing() if recorder else nullcontext():
                yield

        return recompute(function, *arguments, again=again())
