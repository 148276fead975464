"""Shapes that an engine refuses: what each GPU has of a linear, by its name, and whether the engine's kernels take it.

Under tensor parallelism engines cut most linears by their outputs, and those that follow them by their inputs; linears
of one input are computed as one. A grid of scales is cut and joined with its weight, so a block must not be.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from precisionctl.param import GEMM_ALIGNMENT, TensorSpec
from precisionctl.quant_methods.base import SQUARE

LATENT = ("q_a_proj", "kv_a_proj_with_mqa")
"""Computed as one in DeepSeek's attention. The second has 576 rows, and each engine but transformers serves that."""

FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("in_proj_qkv", "in_proj_z"),
)
"""Linears that every engine here computes as one, with one scale where scales are per tensor."""

Ragged = Literal["never", "alone", "last"]
"""Which linears may have a last block of scales that is cut off, on one GPU: none; those that are not fused with
others; or also the last of several that are fused."""

_STORED_FUSED = ("qkv_proj", "gate_up_proj")
_BY_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "w1", "w3", "q_b_proj", "kv_b_proj")
_BY_INPUTS = ("o_proj", "down_proj", "w2")
_EXPERTS = re.compile(r"(.+\.experts)\.\d+\..+")


def in_step(weight: str) -> str:
    """The name of the group that a weight is in: engines want all weights of a group in FP8, or none."""
    match = _EXPERTS.fullmatch(weight)
    return match[1] if match else fused(weight)


def fused(weight: str) -> str:
    """The name of the linear that an engine makes of a weight's and of those that it computes with it as one."""
    module = weight.removesuffix(".weight")
    stem, _, linear = module.rpartition(".")
    group = next((group for group in (*FUSED, LATENT) if linear in group), None)
    return f"{stem}.{group[0]}" if group else module


@dataclass(frozen=True)
class ServingLayout:
    """A model that is served on `ranks` GPUs with tensor parallelism: its `heads` of queries, and its `groups` of keys
    and values."""

    heads: int
    groups: int
    ranks: int = 1

    @classmethod
    def of(cls, config: Mapping[str, Any], ranks: int = 1) -> "ServingLayout":
        """The model that a config.json describes, or that it has a `text_config` of."""
        text = config.get("text_config")
        config = text if isinstance(text, Mapping) and "num_attention_heads" not in config else config
        heads = config.get("num_attention_heads")
        groups = config.get("num_key_value_heads") or heads
        found = [count if type(count) is int and count > 0 else 1 for count in (heads, groups)]
        return cls(found[0], found[1], ranks)

    def refusal(self, name: str, spec: TensorSpec, scheme: str, ragged: Ragged) -> str | None:
        """What is wrong with the shape of a weight `[out, in]` under a scheme; None for nothing."""
        linear = name.removesuffix(".weight").rpartition(".")[2]
        parts, columns = self._parts(linear, spec.rows), spec.columns
        cut = linear in (*_BY_OUTPUTS, *_STORED_FUSED) and self.ranks > 1
        if cut:
            parts = [self._share(linear, rows) for rows in parts]
        elif linear in _BY_INPUTS:
            columns = self._divided(columns)
        shape = f"{[sum(parts), columns]}" + (f" on each of {self.ranks} GPUs" if self.ranks > 1 else "")
        if 0 in (columns, *parts):
            return f"shape {list(spec.shape)} cannot be cut for {self.ranks} GPUs"
        if any(size % GEMM_ALIGNMENT for size in (*parts, columns)):
            return f"shape {shape}, of which FP8 GEMMs need multiples of {GEMM_ALIGNMENT}"
        if scheme not in ("block", "mxfp8"):
            return None
        high, wide = SQUARE if scheme == "block" else (1, 32)
        if columns % wide:
            return f"shape {shape}, whose inputs are not a multiple of {wide}"
        if any(rows % high for rows in parts) and (cut or not self._may_be_ragged(linear, parts, ragged)):
            return f"shape {shape}, whose outputs are not a multiple of {high}"
        return None

    def _may_be_ragged(self, linear: str, parts: list[int], ragged: Ragged) -> bool:
        group = next((group for group in (*FUSED, LATENT) if linear in group), (linear,))
        if ragged == "never":
            return sum(parts) < SQUARE[0]  # one row of scales is for all of them
        if any(rows % SQUARE[0] for rows in parts[:-1]):
            return False
        if ragged == "last" or group == LATENT:
            return linear == group[-1]
        return len(group) == len(parts) == 1

    def _parts(self, linear: str, rows: int) -> list[int]:
        """The rows of each of the linears that a stored one consists of."""
        if linear == "gate_up_proj":
            return [rows // 2, rows - rows // 2]
        if linear == "qkv_proj":
            each = rows // (self.heads + 2 * self.groups)
            return [self.heads * each, self.groups * each, rows - (self.heads + self.groups) * each]
        return [rows]

    def _share(self, linear: str, rows: int) -> int:
        """The rows that each GPU gets, 0 where they cannot be cut. Heads of keys and values are copied where there are
        more GPUs than heads."""
        if linear == "q_proj" and self.heads % self.ranks:
            return 0
        if linear in ("k_proj", "v_proj") and self.ranks > self.groups:
            return rows // self.groups if self.ranks % self.groups == 0 else 0
        return self._divided(rows)

    def _divided(self, size: int) -> int:
        return size // self.ranks if size % self.ranks == 0 else 0
