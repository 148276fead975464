"""Shapes that an engine refuses: the part of each linear that a GPU gets, and whether the engine's kernels take it.

Under tensor parallelism engines split most linears along their outputs, and those that follow them along their inputs;
linears with the same input are fused. Block scales are split and fused together with their weight, so no block may
cross such a boundary. Under expert parallelism an expert is not split: each GPU holds some of a layer's experts whole.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from precisionctl.param import GEMM_ALIGNMENT, TensorSpec
from precisionctl.quant_methods.base import SQUARE, Block

LATENT = ("q_a_proj", "kv_a_proj_with_mqa")
"""Fused in DeepSeek's attention. The second has 576 rows, not a multiple of 128; all engines but transformers serve it.
"""

_OLMO_HYBRID = tuple(f"linear_attn.{part}_proj" for part in "qkvg")
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("wq_a", "wkv"),
    ("in_proj_qkv", "in_proj_z"),
    ("q_proj", "index_q_proj", "index_k_proj"),  # MiniMax-M3's, beside the first; vLLM drops an indexer in another form
    _OLMO_HYBRID,  # of vLLM (models/olmo_hybrid.py), which alone has that model
)
"""Linears that every engine here but transformers fuses; with per-tensor scales, they have one scale. Where fewer of
these names are fused in other models, they are said with the name of their module."""

Ragged = Literal["never", "alone", "last"]
"""Which linears may end in a partial block of scales, on one GPU: none; those that are not fused with others; or also
the last of several that are fused."""

_STORED_FUSED = ("qkv_proj", "gate_up_proj")
_BY_OUTPUTS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "gate_proj",
    "up_proj",
    "w1",
    "w3",
    "q_b_proj",
    "kv_b_proj",
    "index_q_proj",
)
_BY_INPUTS = ("o_proj", "down_proj", "w2")
_EXPERTS = re.compile(r"(.+\.experts)\.\d+\..+")


def in_step(weight: str) -> str:
    """The name of the group of a weight: engines require all weights of a group in FP8, or none."""
    match = _EXPERTS.fullmatch(weight)
    return match[1] if match else fused(weight)


def fused(weight: str) -> str:
    """The name of the linear that an engine fuses a weight's linear into: that of the group's first one; its own if it
    is not fused."""
    module = weight.removesuffix(".weight")
    group = _group(module)
    return f"{module.rpartition('.')[0]}.{_linear(group[0])}" if group else module


_GROUPS = {part: group for group in (LATENT, *reversed(FUSED)) for part in group}
"""Of several groups that have a linear, the last here, and so the first of `FUSED`."""


def _group(module: str) -> tuple[str, ...] | None:
    """The group that a linear is fused in: the one that names its module too, if there is one."""
    above, _, linear = module.rpartition(".")
    return _GROUPS.get(f"{_linear(above)}.{linear}") or _GROUPS.get(linear)


def _linear(module: str) -> str:
    """The last word of a module's name."""
    return module.rpartition(".")[2]


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text model's part of a config.json; all of it where it has no `text_config`."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


@dataclass(frozen=True)
class ServingLayout:
    """A model that is served on `ranks` GPUs with tensor parallelism: the number of its query `heads`, and of its
    key-value heads (`groups`); its `model_type`, where config.json says one. With `expert_parallel` experts are dealt
    out to the GPUs whole."""

    heads: int
    groups: int
    ranks: int = 1
    model_type: object = None
    expert_parallel: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any], ranks: int = 1, *, expert_parallel: bool = False) -> "ServingLayout":
        """The model that a config.json describes, or that it has a `text_config` of."""
        config = config if "num_attention_heads" in config else text_config(config)
        heads = config.get("num_attention_heads")
        groups = config.get("num_key_value_heads") or heads
        found = [count if type(count) is int and count > 0 else 1 for count in (heads, groups)]
        return cls(found[0], found[1], ranks, config.get("model_type"), expert_parallel)

    def refusal(self, name: str, spec: TensorSpec, block: Block, ragged: Ragged) -> str | None:
        """Why an engine refuses the shape of a weight `[out, in]` with a scale for each block, in words; None if it
        takes it. Blocks are cut with a weight, so a part must have whole ones."""
        if self.ranks == 1 or not _EXPERTS.fullmatch(name):
            return self._refusal_of_share(name, spec, block, ragged)
        whole = replace(self, ranks=1)._refusal_of_share(name, spec, block, ragged)
        if self.expert_parallel:
            return whole
        cut = self._refusal_of_share(name, spec, block, ragged)
        return f"{cut}; with --expert-parallel experts are not cut" if cut and not whole else cut

    def _refusal_of_share(self, name: str, spec: TensorSpec, block: Block, ragged: Ragged) -> str | None:
        module = name.removesuffix(".weight")
        linear = _linear(module)
        parts, columns = self._parts(linear, spec.rows), spec.columns
        cut = linear in (*_BY_OUTPUTS, *_STORED_FUSED) and self.ranks > 1
        if cut:
            parts = [self._share(linear, rows) for rows in parts]
        elif linear in _BY_INPUTS:
            columns = self._divided(columns)
        shape = f"{[sum(parts), columns]}" + (f" on each of {self.ranks} GPUs" if self.ranks > 1 else "")
        if 0 in (columns, *parts):
            return f"shape {list(spec.shape)} cannot be cut for {self.ranks} GPUs"
        if spec.codes_name != "INT8" and any(size % GEMM_ALIGNMENT for size in (*parts, columns)):
            return f"shape {shape}, of which FP8 GEMMs need multiples of {GEMM_ALIGNMENT}"
        high, wide = block
        if high is None or wide is None:  # no scale is cut with the inputs
            return None
        if columns % wide:
            return f"shape {shape}, whose inputs are not a multiple of {wide}"
        if any(rows % high for rows in parts) and (cut or not self._may_be_ragged(module, parts, ragged)):
            return f"shape {shape}, whose outputs are not a multiple of {high}"
        return None

    def _may_be_ragged(self, module: str, parts: list[int], ragged: Ragged) -> bool:
        group = _group(module) or (module,)
        if ragged == "never":
            return sum(parts) < SQUARE[0]  # a single row of scales covers all of them
        if any(rows % SQUARE[0] for rows in parts[:-1]):
            return False
        if ragged == "last" or group == LATENT:
            return _linear(module) == _linear(group[-1])
        return len(group) == len(parts) == 1

    def _parts(self, linear: str, rows: int) -> list[int]:
        """The number of rows of each linear that is fused in a stored one; of one that is not fused, its own."""
        if linear == "gate_up_proj":
            return [rows // 2, rows - rows // 2]
        if linear == "qkv_proj":
            each = rows // (self.heads + 2 * self.groups)
            return [self.heads * each, self.groups * each, rows - (self.heads + self.groups) * each]
        return [rows]

    def _share(self, linear: str, rows: int) -> int:
        """The number of rows that each GPU gets, 0 if they cannot be split. With more GPUs than key-value heads, those
        heads are replicated."""
        if linear == "q_proj" and self.heads % self.ranks:
            return 0
        if linear in ("k_proj", "v_proj", "index_q_proj") and self.ranks > self.groups:
            return rows // self.groups if self.ranks % self.groups == 0 else 0
        return self._divided(rows)

    def _divided(self, size: int) -> int:
        return size // self.ranks if size % self.ranks == 0 else 0
