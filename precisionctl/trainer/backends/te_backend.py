"""The backend that makes Transformer Engine's modules, and whether this machine can run them."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch  # before Transformer Engine, which needs torch's libraries to be loaded
import transformer_engine.pytorch as te
from torch import Tensor, nn
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QParams,
    Recipe,
)
from transformer_engine.pytorch.quantization import FP8GlobalStateManager

from precisionctl.fp8.delayed_scaling import without_infinite
from precisionctl.model.model_shape import ModelShape
from precisionctl.precision import Precision
from precisionctl.trainer.backends.base import Mode, Norm, cut_sizes, recompute, require_alignment
from precisionctl.trainer.backends.recorder import Recorder
from precisionctl.trainer.backends.te_graphs import Graphs
from precisionctl.trainer.backends.te_modules import (
    COLUMNS,
    Attention,
    GroupedLinear,
    LayerNorm,
    LayerNormLinear,
    Linear,
    RMSNorm,
    Stateful,
)
from precisionctl.trainer.parallel.world import ALONE, World


def fp8_problem() -> str | None:
    """Why this machine's GPU has no FP8; None if it has."""
    available, reason = te.is_fp8_available(return_reason=True)
    return None if available else reason


def recipe_problem(precision: Precision) -> str | None:
    """Why this machine cannot compute with a scaling; None if it can. 128-blocks need Hopper and CUDA 12.9, MXFP8
    compute capability 10.x, NVFP4 10.0 or higher (quantization.py, _compute_fp8_block_scaling_support,
    _compute_mxfp8_support, _compute_nvfp4_support)."""
    if precision.scaling == "block":
        available, reason = te.is_fp8_block_scaling_available(return_reason=True)
        if available and precision.block.use_f32_scales and torch.cuda.get_device_capability() >= (10, 0):
            return "Blackwell computes 128-blocks as MXFP8, whose scales are powers of two: use_f32_scales = false"
    elif precision.scaling == "mxfp8":
        available, reason = te.is_mxfp8_available(return_reason=True)
    elif precision.scaling == "nvfp4":
        available, reason = te.is_nvfp4_available(return_reason=True)
    else:
        return fp8_problem()
    return None if available else reason


class TransformerEngineBackend:
    """Makes TE's modules. TE itself updates their state after FP8 passes, from the amaxes of all ranks (its default
    group).

    Of weights that FSDP2 shards TE keeps no codes for the backward, which casts them again (linear.py,
    _linear_backward_impl). If forward scales were updated at the end of the forward, these would be other codes than
    the forward's, and their amaxes would count for the next pass. So with sharded weights, forward scales are updated
    after the backward."""

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
        self.recipe = _recipe(precision)
        self.is_first_microbatch: bool | None = None
        """The argument of TE's modules in FP8: True casts weights and caches the casts, False uses cached casts, None
        does not cache."""
        self._in_fp8: list[Stateful] = []
        self._keeps_casts = False
        """Whether CUDA graphs were captured that read cached casts of weights, which must then stay in memory."""

    def linear(self, name: str, in_features: int, out_features: int, bias: bool, mode: Mode | None = None) -> nn.Module:
        with self._weights(name):
            module = Linear(
                in_features,
                out_features,
                bias=bias,
                params_dtype=self.dtype,
                device=self.device,
                name=name,
                **self._cut(mode),
            )
        return self._adopt(module, name, mode, in_features, out_features)

    def layer_norm_linear(
        self, name: str, in_features: int, out_features: int, bias: bool, norm: Norm, mode: Mode | None
    ) -> nn.Module:
        with self._weights(name):
            module = LayerNormLinear(
                in_features,
                out_features,
                eps=norm.epsilon,
                bias=bias,
                normalization=norm.kind,
                zero_centered_gamma=norm.zero_centered,
                params_dtype=self.dtype,
                device=self.device,
                name=name,
                **self._cut(mode),
            )
        module.norm = norm
        return self._adopt(module, name, mode, in_features, out_features)

    def norm(self, size: int, norm: Norm) -> nn.Module:
        if norm.kind == "RMSNorm":
            return RMSNorm(
                size, eps=norm.epsilon, zero_centered_gamma=norm.zero_centered, dtype=self.dtype, device=self.device
            )
        return LayerNorm(
            size, eps=norm.epsilon, zero_centered_gamma=norm.zero_centered, dtype=self.dtype, device=self.device
        )

    def grouped_linear(
        self, name: str, experts: int, in_features: int, out_features: int, bias: bool, mode: Mode | None
    ) -> nn.Module:
        in_features, out_features = cut_sizes(mode, self.world.tensor.size, in_features, out_features)
        apart = bias and mode == "row" and self.world.tensor.size > 1
        here = self.world.experts.local_experts(experts)
        with self._weights(name):
            module = GroupedLinear(
                len(here),
                in_features,
                out_features,
                bias=bias,
                return_bias=apart,
                params_dtype=self.dtype,
                device=self.device,
            )
        module.adds_bias = apart and self.world.tensor.rank == 0
        module.number_from(here.start, len(here))
        module.shape = (len(here),)
        # For NVFP4 as by TE itself (quantization.py, get_align_size_for_quantization), for its grouped kernels
        rows = 128 if self.precision.scaling == "nvfp4" else self.precision.alignment
        module.padding, module.unpadding = te.Fp8Padding(len(here), rows), te.Fp8Unpadding(len(here), rows)
        return self._adopt(module, name, None, in_features, out_features)

    def attention(self, model: ModelShape, scale: float) -> nn.Module | None:
        mla, ranks = model.mla, self.world.tensor.size
        sizes = model.kv_channels, model.value_channels
        if mla:
            sizes = mla.qk_head_dim + mla.qk_pos_emb_head_dim, mla.v_head_dim
        # None where cuDNN has no kernel, as TE would then hold all scores: before Hopper there is none for packed texts
        major, _ = torch.cuda.get_device_capability(self.device)
        largest = 256 if major == 9 else 128
        has_sizes = sizes == (192, 128) or all(size % 8 == 0 and size <= largest for size in sizes)
        if self.dtype == torch.float32 or major < 9 or not has_sizes:
            return None
        return Attention(
            model.num_attention_heads // ranks,
            sizes,
            num_gqa_groups=model.num_query_groups // ranks,
            softmax_scale=scale,
        )

    @contextmanager
    def _weights(self, name: str) -> Iterator[None]:
        """A context in which to make a linear. With `fp8_weights` its weights are TE's quantized tensors, which cast
        values that are copied into them with the scale in the state (quantized_tensor.py, copy_)."""
        if self.fp8_weights and self.precision.in_fp8(name):
            # Without gradients, or there would also be a transposed copy for the backward (base.py, reset_parameters)
            with torch.no_grad(), te.quantized_model_init(recipe=self.recipe):
                yield
        else:
            yield

    def _cut(self, mode: Mode | None) -> dict[str, Any]:
        """TE's arguments for a mode. An `inner column` gets all tokens, a `column` only this rank's."""
        ranks = self.world.tensor
        if mode is None or ranks.size == 1:
            return {}
        sequence = ranks.sequence and mode != "inner column"
        parallel_mode = "row" if mode == "row" else "column"
        return {
            "tp_group": ranks.group,
            "tp_size": ranks.size,
            "parallel_mode": parallel_mode,
            "sequence_parallel": sequence,
        }

    def _adopt(self, module: Stateful, name: str, mode: Mode | None, in_features: int, out_features: int) -> nn.Module:
        """Set up a new module's FP8 state. Raises PrecisionError for sizes that an FP8 GEMM cannot have."""
        module.backend, module.module_name, module.mode = self, name, mode
        module.in_fp8 = self.precision.in_fp8(name)
        if module.in_fp8:
            cut = cut_sizes(mode, self.world.tensor.size, in_features, out_features)
            require_alignment(self.precision, name, "a weight", *reversed(cut))
            self._in_fp8.append(module)
        if module.keeps_state:
            module.fp8_meta["num_gemms"] = math.prod(module.shape)
            with torch.no_grad(), te.autocast(enabled=True, recipe=self.recipe):
                module.init_fp8_meta_tensors(self.recipe)
        return module

    @contextmanager
    def same_weights(self) -> Iterator[None]:
        self.is_first_microbatch = True
        try:
            yield
        finally:
            self.is_first_microbatch = None
            if not self._keeps_casts:  # free them before the optimizer needs memory
                for module in self._in_fp8:
                    module._fp8_workspaces.clear()

    def captured(
        self, layers: Iterable[nn.Module], positions: Any, like: Tensor, *, same_weights: bool
    ) -> Callable[[Tensor], Tensor]:
        self._keeps_casts = self._keeps_casts or same_weights
        first = (lambda: self.is_first_microbatch is not False) if same_weights else None
        return Graphs(layers, positions, like, self.recipe if self.precision.fp8 else None, first)

    @contextmanager
    def _autocast(self) -> Iterator[None]:
        """TE's autocast, which updates forward scales if gradients are enabled when it ends (quantization.py,
        autocast_exit). With sharded parameters they are disabled at that moment."""
        grad = torch.is_grad_enabled()
        with torch.set_grad_enabled(grad and not self.world.shards_parameters):
            with te.autocast(enabled=self.precision.fp8, recipe=self.recipe), torch.set_grad_enabled(grad):
                yield

    def begin_pass(self, *number: int) -> None:
        """TE draws from PyTorch's generator (csrc/quantizer.cpp)."""

    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        with self._autocast():
            yield
        if torch.is_grad_enabled():
            if self.is_first_microbatch:
                self.is_first_microbatch = False  # before the backward, which may recompute a layer
            return
        # TE records amaxes without gradients, too, and would count them for the next training step.
        for module in self._stateful:
            module.fp8_meta["scaling_fwd"].amax_history[0].zero_()

    @property
    def _stateful(self) -> list[Stateful]:
        return [module for module in self._in_fp8 if module.keeps_state]

    def after_backward(self) -> None:
        """Update forward scales if parameters are sharded. TE has already updated the backward scales."""
        if self.world.shards_parameters:
            FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=True)

    def forget_infinite(self, skipped: Tensor) -> None:
        histories = [module.fp8_meta[group].amax_history for module in self._stateful for group in COLUMNS]
        if histories:  # in one operation, as there are hundreds
            flat = without_infinite(torch.cat([history.flatten() for history in histories]), skipped)
            parts = torch.split(flat, [history.numel() for history in histories])
            torch._foreach_copy_(histories, [p.view_as(history) for p, history in zip(parts, histories, strict=True)])

    def recomputed(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if self.recorder:
            return recompute(function, *arguments, again=self.recorder.recomputing())
        if self.world.shards_parameters:  # scales are still those of this pass, and amaxes are the same again
            return recompute(function, *arguments, again=self._autocast())
        return te.checkpoint(function, *arguments, use_reentrant=False)  # it keeps the scales of this pass


def _recipe(precision: Precision) -> Recipe:
    """TE's recipe. What a class reads from the environment, once, as its defaults, is set on the object."""
    ours = precision.delayed
    if precision.scaling == "current":
        current = _made(Float8CurrentScaling, fp8_format=Format[ours.fp8_format])
        exact = QParams(power_2_scale=False, amax_epsilon=0.0)
        current.use_power_2_scales = False
        current.fp8_quant_fwd_inp = current.fp8_quant_fwd_weight = current.fp8_quant_bwd_grad = exact
        return current
    if precision.scaling == "mxfp8":
        return _made(MXFP8BlockScaling, fp8_format=Format[precision.block.fp8_format])
    if precision.scaling == "nvfp4":
        fours = _made(NVFP4BlockScaling)
        fours.fp4_quant_fwd_inp = QParams(random_hadamard_transform=True)
        fours.fp4_quant_fwd_weight = QParams(fp4_2d_quantization=True)
        fours.fp4_quant_bwd_grad = QParams(random_hadamard_transform=True, stochastic_rounding=True)
        fours.row_scaled_activation, fours.nvfp4_4over6 = False, "none"
        return fours
    if precision.scaling == "block":
        made = _made(Float8BlockScaling, fp8_format=Format[precision.block.fp8_format])
        scales = QParams(power_2_scale=not precision.block.use_f32_scales, amax_epsilon=0.0)
        made.use_f32_scales = precision.block.use_f32_scales
        made.fp8_quant_fwd_inp = made.fp8_quant_fwd_weight = made.fp8_quant_bwd_grad = scales
        return made
    return _made(
        DelayedScaling,
        margin=ours.margin,
        fp8_format=Format[ours.fp8_format],
        amax_history_len=ours.amax_history_len,
        amax_compute_algo=ours.amax_compute_algo,
        reduce_amax=ours.reduce_amax,
    )


def _made(kind: type[Any], **settings: Any) -> Any:
    """A recipe whose backward takes codes. Delayed scaling refuses any other as it is made, even the environment's; TE
    that is older has none."""
    of_codes = {"backward_override": None} if any(each.name == "backward_override" for each in fields(kind)) else {}
    return kind(**settings, **of_codes)
