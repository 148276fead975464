"""The GPT's linears and norms on Transformer Engine 2.x; unproved until `tests/gpu` has passed.

No other file but `fused_adam_te` imports Transformer Engine. Parameters, FP8 state and numerics are those of
`modules_emulated`. State goes straight into the modules' tensors, never through TE's pickles, and TE's
`_extra_state` keys stay out of state dicts.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Literal

import torch  # before Transformer Engine, which needs torch's libraries to be loaded
import transformer_engine.pytorch as te
from torch import Tensor, nn
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    QParams,
    Recipe,
)

from precisionctl.errors import PrecisionError
from precisionctl.fp8.state import BACKWARD, FORWARD, IN_USE, ROLES, Fp8State, Role, RoleState
from precisionctl.model_shape import ModelShape
from precisionctl.precision import Precision
from precisionctl.trainer.backend import Mode, Norm, cut_sizes, recompute, require_alignment
from precisionctl.trainer.recorder import Recorder
from precisionctl.trainer.segments import Segments
from precisionctl.trainer.world import ALONE, World

Group = Literal["scaling_fwd", "scaling_bwd"]

COLUMNS: dict[Group, tuple[Role, ...]] = {"scaling_fwd": FORWARD, "scaling_bwd": BACKWARD}
"""TE's tensors by direction, `scale` `[columns]` and `amax_history` `[history, columns]`: what each column is of. A
grouped linear has these of its first GEMM, then those of its second (grouped_linear.py, _get_quantizers; TE 2.3 on)."""


def fp8_problem() -> str | None:
    """Why this machine's GPU has no FP8; None where it has."""
    available, reason = te.is_fp8_available(return_reason=True)
    return None if available else reason


def recipe_problem(precision: Precision) -> str | None:
    """Why this machine cannot compute under a recipe of FP8; None where it can. 128-blocks ask for Hopper and CUDA
    12.9, MXFP8 for compute capability 10.x (quantization.py, _compute_fp8_block_scaling_support and
    _compute_mxfp8_support)."""
    if precision.scaling == "block":
        available, reason = te.is_fp8_block_scaling_available(return_reason=True)
        if available and precision.block.use_f32_scales and torch.cuda.get_device_capability() >= (10, 0):
            return "Blackwell computes 128-blocks as MXFP8, whose scales are powers of two: use_f32_scales = false"
    elif precision.scaling == "mxfp8":
        available, reason = te.is_mxfp8_available(return_reason=True)
    else:
        return fp8_problem()
    return None if available else reason


class _Stateful(nn.Module):
    """What linears add to TE's: where they run in FP8, and their state as an Fp8State, of scales of `shape`."""

    get_extra_state = nn.Module.get_extra_state  # without an override of these two no `_extra_state` is in state dicts
    set_extra_state = nn.Module.set_extra_state

    backend: "TransformerEngineBackend"
    module_name: str
    mode: Mode | None
    in_fp8: bool
    shape: tuple[int, ...] = ()
    fp8_meta: dict[str, Any]
    init_fp8_meta_tensors: Callable[[Recipe], None]

    @property
    def keeps_state(self) -> bool:
        return self.in_fp8 and self.backend.precision.keeps_state

    def _of(self, role: Role) -> tuple[Tensor, Tensor]:
        """A role's part of TE's own tensors: `scale` of `shape`, `amax_history` of `[*shape, history]`."""
        group: Group = "scaling_fwd" if role in FORWARD else "scaling_bwd"
        state, columns = self.fp8_meta[group], COLUMNS[group]
        number = columns.index(role)
        scale = state.scale.view(*self.shape, len(columns))[..., number]
        return scale, state.amax_history.view(-1, *self.shape, len(columns))[..., number].movedim(0, -1)

    def fp8_state(self) -> Fp8State | None:
        if not self.keeps_state:
            return None
        return Fp8State({role: RoleState(*(part.cpu().clone() for part in self._of(role))) for role in ROLES})

    def set_fp8_state(self, state: Fp8State) -> None:
        if not self.keeps_state:
            raise PrecisionError("this GEMM keeps no FP8 state", where=self.module_name)
        for role in ROLES:
            scale, history = self._of(role)
            new = state.roles[role].resized(history.shape[-1])
            scale.copy_(new.scale)  # in place: TE's quantizers and global buffers hold these tensors
            history.copy_(new.amax_history)

    def fp8_views(self) -> Iterator[tuple[Role, RoleState]]:
        return ((role, RoleState(*self._of(role))) for role in IN_USE)


class _Fp8Linear(_Stateful):
    """What both linears of one GEMM add to TE's."""

    weight: Tensor

    def forward(self, values: Tensor) -> Tensor:
        """`[..., in]` to `[..., out]`."""
        recorder = self.backend.recorder
        out: Tensor
        if self.in_fp8 and not recorder:
            require_alignment(self.backend.precision, self.module_name, "a batch of tokens", values.shape[:-1].numel())
            out = super().forward(values)
        else:
            with te.autocast(enabled=False):
                out = super().forward(values)
        if recorder:
            ranks, scattered = self.backend.world.tensor, self.mode == "row"
            shown = self.gemm_input(values)
            recorder.gemm(
                self.module_name, ranks.gather(shown) if self.mode == "column" else shown, self.weight, out, scattered
            )
        return out

    def gemm_input(self, values: Tensor) -> Tensor:
        return values


class Linear(_Fp8Linear, te.Linear):  # type: ignore[misc]  # TE has no types
    """te.Linear with an Fp8State."""


class LayerNormLinear(_Fp8Linear, te.LayerNormLinear):  # type: ignore[misc]
    """te.LayerNormLinear with an Fp8State."""

    norm: Norm
    layer_norm_weight: Tensor
    layer_norm_bias: Tensor | None

    def gemm_input(self, values: Tensor) -> Tensor:
        with torch.no_grad():
            return self.norm.of(values, self.layer_norm_weight, self.layer_norm_bias)


class _Stateless(nn.Module):
    """Without `_extra_state`."""

    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state


class RMSNorm(_Stateless, te.RMSNorm):  # type: ignore[misc]
    """te.RMSNorm."""


class LayerNorm(_Stateless, te.LayerNorm):  # type: ignore[misc]
    """te.LayerNorm."""


class GroupedLinear(_Stateful, te.GroupedLinear):  # type: ignore[misc]
    """te.GroupedLinear with an Fp8State of `[experts]`. Each expert's tokens are padded with rows of zeros to what an
    FP8 GEMM takes, which change no amax and no sum. Of tensor ranks whose results will be summed, the first adds the
    bias."""

    numbers: Mapping[str, str] = MappingProxyType({})
    """TE's names of parameters, `weight0` of the first one here, to those by the experts' own numbers."""
    adds_bias: bool
    return_bias: bool
    padding: nn.Module
    unpadding: nn.Module

    def forward(self, values: Tensor, counts: Sequence[int]) -> Tensor:
        """Tokens `[tokens, in]`, `counts[0]` of expert 0 first and so on, to `[tokens, out]`."""
        recorder = self.backend.recorder
        out: Tensor
        if self.in_fp8 and not recorder:
            padded, rows = self.padding(values, list(counts))
            out = self.unpadding(self._product(padded, rows), list(counts))
        else:
            with te.autocast(enabled=False):
                out = self._product(values, list(counts))
        if self.adds_bias:
            biases = [self.get_parameter(f"bias{expert}") for expert in range(len(counts))]
            out = out + torch.cat([bias.expand(count, -1) for bias, count in zip(biases, counts, strict=True)])
        if recorder:
            weights = [self.get_parameter(f"weight{expert}") for expert in range(len(counts))]
            recorder.grouped_gemm(self.module_name, values, counts, weights, out)
        return out

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(self.numbers.get(name, name))

    def number_from(self, first: int, experts: int) -> None:
        """Let the parameters have the names of experts from `first` on, whose numbers are beyond TE's own."""
        each = ((kind, expert) for kind in ("weight", "bias") for expert in range(experts if first else 0))
        numbers = {f"{kind}{expert}": f"{kind}{first + expert}" for kind, expert in each}
        for name, numbered in numbers.items():
            if name in self._parameters:
                self._parameters[numbered] = self._parameters.pop(name)
        self.numbers = numbers

    def fp8_state(self) -> Fp8State | None:
        if not self.keeps_state:
            return None
        gathered = self.backend.world.experts.gathered
        return Fp8State({role: RoleState(*(gathered(part).cpu().clone() for part in self._of(role))) for role in ROLES})

    def set_fp8_state(self, state: Fp8State) -> None:
        mine = self.backend.world.experts.mine(len(state.roles["weight"].scale))
        here = slice(mine.start, mine.stop)
        roles = state.roles.items()
        super().set_fp8_state(
            Fp8State({role: RoleState(part.scale[here], part.amax_history[here]) for role, part in roles})
        )

    def _product(self, values: Tensor, counts: list[int]) -> Tensor:
        group = self.backend.world.experts.alike
        if self.in_fp8 and group is not None and not self.backend.recorder:
            # its amaxes are those of the ranks that have the same experts
            with te.autocast(enabled=True, recipe=self.backend.recipe, amax_reduction_group=group):
                made = super().forward(values, counts)
        else:
            made = super().forward(values, counts)
        out: Tensor = made[0] if self.return_bias else made
        return out


class PackedAttention(_Stateless, te.DotProductAttention):  # type: ignore[misc]
    """te.DotProductAttention over texts that share rows, in the parameters' dtype."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, segments: Segments, window: int | None) -> Tensor:
        """Queries `[T, G * R, D]`, keys and values `[T, G, D]` to `[T, G * R * D]`."""
        ends = segments.cu_seqlens(query.device)
        with te.autocast(enabled=False):
            out: Tensor = super().forward(
                query.contiguous(),
                key.contiguous(),
                value.contiguous(),
                qkv_format="thd",
                cu_seqlens_q=ends,
                cu_seqlens_kv=ends,
                max_seqlen_q=segments.longest,
                max_seqlen_kv=segments.longest,
                attn_mask_type="padding_causal",
                window_size=(-1 if window is None else window - 1, 0),  # TE does not count the query itself
            )
        return out


class TransformerEngineBackend:
    """Makes TE's modules. TE itself updates their state after FP8 passes, from the amaxes of all ranks (its group for
    that, where none is given, is all of them)."""

    def __init__(self, precision: Precision, dtype: torch.dtype, device: torch.device, world: World = ALONE) -> None:
        self.precision, self.dtype, self.device, self.world = precision, dtype, device, world
        self.recorder: Recorder | None = None
        self.recipe = _recipe(precision)
        self._stateful: list[_Stateful] = []

    def linear(self, name: str, in_features: int, out_features: int, bias: bool, mode: Mode | None = None) -> nn.Module:
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
        self, name: str, in_features: int, out_features: int, bias: bool, norm: Norm, mode: Mode | None = None
    ) -> nn.Module:
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
        self, name: str, experts: int, in_features: int, out_features: int, bias: bool, mode: Mode | None = None
    ) -> nn.Module:
        in_features, out_features = cut_sizes(mode, self.world.tensor.size, in_features, out_features)
        apart = bias and mode == "row" and self.world.tensor.size > 1
        here = self.world.experts.mine(experts)
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
        module.padding = te.Fp8Padding(len(here), self.precision.alignment)
        module.unpadding = te.Fp8Unpadding(len(here), self.precision.alignment)
        return self._adopt(module, name, None, in_features, out_features)

    def packed_attention(self, model: ModelShape, scale: float) -> nn.Module:
        mla, ranks = model.mla, self.world.tensor.size
        return PackedAttention(
            model.num_attention_heads // ranks,
            (mla.qk_head_dim + mla.qk_pos_emb_head_dim, mla.v_head_dim) if mla else model.kv_channels,
            num_gqa_groups=model.num_query_groups // ranks,
            softmax_scale=scale,
        )

    def _cut(self, mode: Mode | None) -> dict[str, Any]:
        """How TE is told of it. An `inner column` is given all tokens, of which a `column` has this rank's."""
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

    def _adopt(self, module: _Stateful, name: str, mode: Mode | None, in_features: int, out_features: int) -> nn.Module:
        module.backend, module.module_name, module.mode = self, name, mode
        module.in_fp8 = self.precision.in_fp8(name)
        if module.in_fp8:
            cut = cut_sizes(mode, self.world.tensor.size, in_features, out_features)
            require_alignment(self.precision, name, "a weight", *reversed(cut))
        if module.keeps_state:
            self._stateful.append(module)
            module.fp8_meta["num_gemms"] = math.prod(module.shape)
            with torch.no_grad(), te.autocast(enabled=True, recipe=self.recipe):
                module.init_fp8_meta_tensors(self.recipe)
        return module

    @contextmanager
    def forward_pass(self) -> Iterator[None]:
        with te.autocast(enabled=self.precision.fp8, recipe=self.recipe):
            yield
        if torch.is_grad_enabled():
            return
        # TE records in evaluation too, and would let its amaxes count for the next training step.
        for module in self._stateful:
            module.fp8_meta["scaling_fwd"].amax_history[0].zero_()

    def after_backward(self) -> None:
        """TE has updated the backward scales by then."""

    def recomputed(self, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
        if self.recorder:
            return recompute(function, *arguments, again=self.recorder.computed_again())
        out: Tensor = te.checkpoint(function, *arguments, use_reentrant=False)  # it keeps the scales of this pass
        return out


def _recipe(precision: Precision) -> Recipe:
    ours = precision.delayed
    if precision.scaling == "current":
        return Float8CurrentScaling(fp8_format=Format[ours.fp8_format])
    if precision.scaling == "mxfp8":
        return MXFP8BlockScaling(fp8_format=Format[precision.block.fp8_format])
    if precision.scaling == "block":
        made = Float8BlockScaling(fp8_format=Format[precision.block.fp8_format])
        scales = QParams(power_2_scale=not precision.block.use_f32_scales, amax_epsilon=0.0)
        made.use_f32_scales = precision.block.use_f32_scales
        # the class reads the environment once, whatever its constructor is told
        made.fp8_quant_fwd_inp = made.fp8_quant_fwd_weight = made.fp8_quant_bwd_grad = scales
        return made
    return DelayedScaling(
        margin=ours.margin,
        fp8_format=Format[ours.fp8_format],
        amax_history_len=ours.amax_history_len,
        amax_compute_algo=ours.amax_compute_algo,
        reduce_amax=ours.reduce_amax,
    )
