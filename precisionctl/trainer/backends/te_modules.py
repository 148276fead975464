"""The GPT's linears, norms and attention on Transformer Engine from 2.9 on.

`te_backend.py` makes them. Parameters, FP8 state and numerics are those of `emulated.py`. State is copied straight into
the modules' tensors, never through TE's pickles, and TE's `_extra_state` keys stay out of state dicts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import torch  # before Transformer Engine, which needs torch's libraries to be loaded
import transformer_engine.pytorch as te
from torch import Tensor, nn
from transformer_engine.common.recipe import Recipe

from precisionctl.errors import PrecisionError
from precisionctl.fp8.state import BACKWARD, FORWARD, IN_USE, ROLES, Fp8State, Role, RoleState
from precisionctl.trainer.backends.base import Mode, Norm, require_alignment
from precisionctl.trainer.sequences import PackedSequences

if TYPE_CHECKING:
    from precisionctl.trainer.backends.te_backend import TransformerEngineBackend

Group = Literal["scaling_fwd", "scaling_bwd"]

COLUMNS: dict[Group, tuple[Role, ...]] = {"scaling_fwd": FORWARD, "scaling_bwd": BACKWARD}
"""The role of each column in TE's `scale` `[columns]` and `amax_history` `[history, columns]`, by direction. A grouped
linear has these columns for its first GEMM, then for its second, and so on (grouped_linear.py, _get_quantizers; since
TE 2.3)."""


class _NoExtraState(nn.Module):
    """Added to TE's modules: undoes their overrides, which put `_extra_state` into state dicts."""

    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state


class Stateful(_NoExtraState):
    """Added to TE's linears: whether they run in FP8, and access to their state as an Fp8State with scales of
    `shape`."""

    backend: "TransformerEngineBackend"
    """That made it. TE's modules use its `precision`, `recipe`, `world`, `recorder` and `is_first_microbatch`."""
    module_name: str
    mode: Mode | None
    in_fp8: bool
    shape: tuple[int, ...] = ()
    fp8_meta: dict[str, Any]
    _fp8_workspaces: dict[str, Any]
    init_fp8_meta_tensors: Callable[[Recipe], None]

    @property
    def keeps_state(self) -> bool:
        return self.in_fp8 and self.backend.precision.keeps_state

    def _of(self, role: Role) -> tuple[Tensor, Tensor]:
        """Views of a role's part of TE's tensors: `scale` of `shape`, `amax_history` of `[*shape, history]`."""
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
        return ((role, RoleState(*self._of(role))) for role in IN_USE if self.keeps_state)


class _Fp8Linear(Stateful):
    """Added to TE's linears of one GEMM, with and without a fused norm."""

    weight: Tensor

    def forward(self, values: Tensor) -> Tensor:
        """`[..., in]` to `[..., out]`."""
        recorder = self.backend.recorder
        out: Tensor
        if self.in_fp8 and not recorder:
            require_alignment(self.backend.precision, self.module_name, "a batch of tokens", values.shape[:-1].numel())
            out = super().forward(values, is_first_microbatch=self.backend.is_first_microbatch)
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


class RMSNorm(_NoExtraState, te.RMSNorm):  # type: ignore[misc]
    """te.RMSNorm."""


class LayerNorm(_NoExtraState, te.LayerNorm):  # type: ignore[misc]
    """te.LayerNorm."""


class GroupedLinear(Stateful, te.GroupedLinear):  # type: ignore[misc]
    """te.GroupedLinear with an Fp8State of `[experts]`. Each expert's tokens are padded with rows of zeros to the
    alignment of FP8 GEMMs, which changes no amax and no sum. If tensor ranks' results will be summed, only the first
    rank adds the bias."""

    renamed: Mapping[str, str] = MappingProxyType({})
    """TE's names of parameters, which count from `weight0` on each rank -> names with the experts' own numbers."""
    adds_bias: bool
    return_bias: bool
    padding: nn.Module
    unpadding: nn.Module

    def forward(self, values: Tensor, counts: Sequence[int]) -> Tensor:
        """Tokens `[tokens, in]`, sorted by expert, with `counts[i]` of the i-th expert, to `[tokens, out]`."""
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
        return super().__getattr__(self.renamed.get(name, name))

    def number_from(self, first: int, experts: int) -> None:
        """Rename the parameters to have the numbers of experts from `first` on, where TE's count from 0."""
        each = ((kind, expert) for kind in ("weight", "bias") for expert in range(experts if first else 0))
        renamed = {f"{kind}{expert}": f"{kind}{first + expert}" for kind, expert in each}
        for name, numbered in renamed.items():
            if name in self._parameters:
                self._parameters[numbered] = self._parameters.pop(name)
        self.renamed = renamed

    def fp8_state(self) -> Fp8State | None:
        if not self.keeps_state:
            return None
        gathered = self.backend.world.experts.all_gather
        return Fp8State({role: RoleState(*(gathered(part).cpu().clone() for part in self._of(role))) for role in ROLES})

    def set_fp8_state(self, state: Fp8State) -> None:
        mine = self.backend.world.experts.local_experts(len(state.roles["weight"].scale))
        super().set_fp8_state(state.of_expert(slice(mine.start, mine.stop)))

    def _product(self, values: Tensor, counts: list[int]) -> Tensor:
        group, first = self.backend.world.experts.replicas, self.backend.is_first_microbatch
        if self.in_fp8 and group is not None and not self.backend.recorder:
            # Amaxes are reduced over the ranks that have the same experts
            with te.autocast(enabled=True, recipe=self.backend.recipe, amax_reduction_group=group):
                made = super().forward(values, counts, is_first_microbatch=first)
        else:
            made = super().forward(values, counts, is_first_microbatch=first)
        out: Tensor = made[0] if self.return_bias else made
        return out


class Attention(_NoExtraState, te.DotProductAttention):  # type: ignore[misc]
    """te.DotProductAttention, causal, in the parameters' dtype."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences | None, window: int | None
    ) -> Tensor:
        """Queries `[B, S, G * R, D]`, keys and values `[B, S, G, D]` to `[B, S, G * R * D]`, or of texts that share
        rows to `[T, G * R * D]`."""
        longest, ends = query.shape[1], None
        if packed is not None:
            longest, ends = packed.longest, packed.cu_seqlens(query.device)
            query, key, value = (heads.flatten(0, 1) for heads in (query, key, value))
        seen = window if window is not None and window < longest else 0
        with te.autocast(enabled=False):
            out: Tensor = super().forward(
                query.contiguous(),
                key.contiguous(),
                value.contiguous(),
                qkv_format="bshd" if packed is None else "thd",
                cu_seqlens_q=ends,
                cu_seqlens_kv=ends,
                max_seqlen_q=longest,
                max_seqlen_kv=longest,
                attn_mask_type="causal" if packed is None else "padding_causal",
                window_size=(seen - 1, 0),  # TE does not count the query itself; -1 is all keys before it
            )
        return out
