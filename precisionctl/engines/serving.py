"""Shapes that an engine refuses: the part of each linear that a GPU gets, and whether the engine's kernels take it.

Under tensor parallelism engines split most linears along their outputs, and those that follow them along their inputs;
linears with the same input are fused. Block scales are split and fused together with their weight, so no block may
cross such a boundary. Under expert parallelism an expert is not split: each GPU holds some of a layer's experts whole.

How a linear is split follows from its family's table (`planning/served_model.py`); of a model without a table, from the
linear's name.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from precisionctl.model.text_config import text_part
from precisionctl.param import TensorSpec, divides_heads, gemm_misfit, is_slice
from precisionctl.quant_methods.base import SQUARE, Block
from precisionctl.sizes import listed

LATENT = ("q_a_proj", "kv_a_proj_with_mqa")
"""Fused in DeepSeek's attention. The second has 576 rows, not a multiple of 128; all engines but transformers serve it.
"""

_OLMO_HYBRID = tuple(f"linear_attn.{part}_proj" for part in "qkvg")
INDEXED = ("q_proj", "index_q_proj", "index_k_proj")
"""MiniMax-M3's, beside the others of attention; vLLM drops an indexer in another form."""
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("gate_proj", "up_proj"),
    ("c_fc_0", "c_fc_1"),
    ("w1", "w3"),
    ("wq_a", "wkv"),
    ("in_proj_qkv", "in_proj_z"),
    INDEXED,
    _OLMO_HYBRID,  # of vLLM (models/olmo_hybrid.py), which alone has that model
)
"""Linears that every engine here but transformers fuses; with per-tensor scales, they have one scale. Where fewer of
these names are fused in other models, they are said with the name of their module."""

Ragged = Literal["never", "alone", "last"]
"""Which linears may end in a partial block of scales, on one GPU: none; those that are not fused with others; or also
the last of several that are fused."""


class HeadCounts(NamedTuple):
    """So many heads of one kind, called `what`, that GPUs divide; they have the keys and values of `groups`."""

    heads: int
    groups: int
    what: str = "attention heads"


class Part(NamedTuple):
    """Neighbouring outputs of a linear that are divided on their own: their number relative to that of other parts.
    They are cut into no more than `most` pieces; of more GPUs, several have the same piece."""

    size: int
    most: int | None = None


@dataclass(frozen=True)
class Cut:
    """How GPUs divide a linear's stored weight: along its `outputs`, of which `parts` are divided one by one, along its
    `inputs`, or not at all (`nothing`): each has all of it. `transposed` is one that is stored as `[in, out]`.
    `by_row`: rows that all GPUs need stand among others, and engines look for the place of each in scales too (vLLM's
    mamba_v2_sharded_weight_loader)."""

    along: Literal["outputs", "inputs", "nothing"]
    parts: tuple[Part, ...] = (Part(1),)
    transposed: bool = False
    by_row: bool = False

    def share(self, outputs: int, inputs: int, ranks: int) -> tuple[list[int], int]:
        """The outputs of each part, and the inputs, that a GPU gets; 0 where they cannot be divided."""
        whole = sum(part.size for part in self.parts)
        parts = [outputs * part.size // whole for part in self.parts]
        if self.along == "outputs":
            pieces = (min(ranks, part.most or ranks) for part in self.parts)
            parts = [_divided(rows, each) if ranks % each == 0 else 0 for rows, each in zip(parts, pieces, strict=True)]
        return parts, _divided(inputs, ranks) if self.along == "inputs" else inputs


def _divided(size: int, pieces: int) -> int:
    return size // pieces if size % pieces == 0 else 0


WHOLE = Cut("nothing")

_OF_KEYS = ("k_proj", "v_proj", "index_q_proj")
_BY_OUTPUTS = ("gate_proj", "up_proj", "w1", "w3", "q_b_proj", "kv_b_proj")
_BY_INPUTS = ("o_proj", "down_proj", "w2")
_UNCUT = (*LATENT, "index_k_proj")

EXPERT = re.compile(r"(.+\.experts)\.\d+(?:\.(.+))?\.weight")
"""The weight of an expert that is stored by itself: the module of all of its layer, and its linear, if it is not one
itself."""
_STACKED = re.compile(r"(.+\.experts)(?:\.[a-z_]+)?|(.+\.block_sparse_moe)\.(?:input|output)_linear(?:\.weight)?")


def experts_module(name: str) -> str | None:
    """What engines call the module of a layer's experts, of a tensor or module in which all of them are: Granite calls
    the tensors by other names. None for any other name."""
    match = _STACKED.fullmatch(name)
    return match and (match[1] or f"{match[2]}.experts")


def precision_group(weight: str) -> str:
    """The name of the group of a weight: engines require all weights of a group in FP8, or none."""
    match = EXPERT.fullmatch(weight)
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


def served_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text model's part of a config.json; all of it where it has none."""
    text = text_part(config)
    return text if isinstance(text, Mapping) else config


@dataclass(frozen=True)
class ServingLayout:
    """A model that is served on `ranks` GPUs with tensor parallelism: its `heads`, where they are known, and its
    `model_type`, where config.json says one. With `expert_parallel` experts are dealt out to the GPUs whole. `cuts` are
    those of a family's weights, by name; None: they are told by the linears' names."""

    heads: tuple[HeadCounts, ...]
    ranks: int = 1
    model_type: object = None
    expert_parallel: bool = False
    cuts: Mapping[str, Cut] | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any], ranks: int = 1, *, expert_parallel: bool = False) -> "ServingLayout":
        """The model without a table that a config.json describes, or that it has a `text_config` of."""
        config = config if "num_attention_heads" in config else served_config(config)
        heads = config.get("num_attention_heads")
        groups = config.get("num_key_value_heads") or heads
        found: tuple[HeadCounts, ...] = ()
        if type(heads) is int and type(groups) is int and min(heads, groups) > 0:
            found = (HeadCounts(heads, groups),)
        return cls(found, ranks, str(config.get("model_type")), expert_parallel)

    def on(self, ranks: int) -> "ServingLayout":
        """The same model on another number of GPUs."""
        return replace(self, ranks=ranks, expert_parallel=self.expert_parallel and ranks > 1)

    def on_fewer(self) -> "Iterator[ServingLayout]":
        """The same model on every smaller number of GPUs, the largest first."""
        return map(self.on, range(self.ranks - 1, 0, -1))

    @property
    def uneven(self) -> str | None:
        """Which heads the GPUs do not divide evenly, in words; None if there are none."""
        for heads, groups, what in self.heads:
            if not divides_heads(self.ranks, heads, groups):
                in_groups = f" in {groups} query groups" if groups != heads else ""
                return f"{heads} {what}{in_groups} on {self.ranks} GPUs"
        return None

    @property
    def shares_rows(self) -> bool:
        """Whether several GPUs get the same rows of a weight whose other rows they divide, by places looked up."""
        return self.ranks > 1 and any(cut.by_row for cut in (self.cuts or {}).values())

    def unknown(self, weights: Iterable[str]) -> list[str]:
        """The weights of which it is not known how several GPUs divide them."""
        if self.ranks == 1:
            return []
        whole = self.expert_parallel
        cut = (name for name in weights if not (whole and (is_slice(name) or EXPERT.fullmatch(name))))
        return [name for name in cut if self._cut(name) is None]

    def refusal(self, name: str, spec: TensorSpec, block: Block, ragged: Ragged, *, aligned: bool = True) -> str | None:
        """Why an engine refuses the shape of codes `[out, in]` with a scale for each block, in words; None if it takes
        it. Blocks are cut with a weight, so a part must have whole ones. `aligned`: it multiplies codes."""
        if self.ranks == 1 or not EXPERT.fullmatch(name):
            return self._refusal_of_share(name, spec, block, ragged, aligned)
        whole = replace(self, ranks=1)._refusal_of_share(name, spec, block, ragged, aligned)
        if self.expert_parallel:
            return whole
        cut = self._refusal_of_share(name, spec, block, ragged, aligned)
        return f"{cut}; with --expert-parallel experts are not cut" if cut and not whole else cut

    def _refusal_of_share(self, name: str, spec: TensorSpec, block: Block, ragged: Ragged, aligned: bool) -> str | None:
        cut = self._cut(name) or WHOLE
        outputs, inputs = (spec.columns, spec.rows) if cut.transposed else (spec.rows, spec.columns)
        parts, columns = cut.share(outputs, inputs, self.ranks)
        if 0 in (columns, *parts):
            return f"shape {list(spec.shape)} cannot be cut for {self.ranks} GPUs"
        high, wide = block
        split = self.ranks > 1
        if aligned and spec.codes_name != "INT8" and (words := gemm_misfit((sum(parts), columns), spec.codes_name)):
            misfit = f"of which {words}"
        elif cut.by_row and split and not (high == 1 and spec.codes_name in ("FP8", "INT8")):
            misfit = "of rows that are found only in codes of one byte with a scale for each row"
        elif high is None or wide is None:  # no scale is cut with the inputs
            return None
        elif columns % wide:
            misfit = f"whose inputs are not a multiple of {wide}"
        elif _ends_blocks(name, parts, high, ragged, split=split and cut.along == "outputs"):
            return None
        else:
            misfit = f"whose outputs are not a multiple of {high}"
            if len(parts) > 1:  # the sum that `shape` shows may be one
                misfit = f"whose outputs, in parts of {listed(map(str, parts))}, are not multiples of {high}"
        shape = [columns, sum(parts)] if cut.transposed else [sum(parts), columns]
        return f"shape {shape}{f' on each of {self.ranks} GPUs' if split else ''}, {misfit}"

    def _cut(self, name: str) -> Cut | None:
        """How GPUs divide a weight; None if that is not known."""
        if self.cuts is not None:
            return self.cuts.get(name)
        linear = _linear(name.removesuffix(".weight"))
        if linear in _BY_OUTPUTS:
            return Cut("outputs")
        if linear in _BY_INPUTS:
            return Cut("inputs")
        if linear in _UNCUT:
            return WHOLE
        if linear == "gate_up_proj":
            return Cut("outputs", (Part(1), Part(1)))
        if not self.heads:
            return None
        heads, groups, _ = self.heads[0]
        queries, keys = Part(heads), Part(groups, groups)
        parts = {"q_proj": (queries,), "qkv_proj": (queries, keys, keys)} | dict.fromkeys(_OF_KEYS, (keys,))
        return Cut("outputs", parts[linear]) if linear in parts else None


def _ends_blocks(name: str, parts: list[int], high: int, ragged: Ragged, *, split: bool) -> bool:
    """Whether blocks of `high` rows end with each part of a weight's outputs, or may be ragged there. `split`: GPUs
    divide the outputs."""
    if ragged == "never":  # it computes what is stored as one as one linear, and a single row of scales may cover that
        outputs = sum(parts)
        return outputs % high == 0 or not split and outputs < SQUARE[0]
    if all(rows % high == 0 for rows in parts):
        return True
    if split or any(rows % SQUARE[0] for rows in parts[:-1]):
        return False
    module = name.removesuffix(".weight")
    group = _group(module) or (module,)
    if ragged == "last" or group == LATENT:
        return _linear(module) == _linear(group[-1])
    return len(group) == len(parts) == 1
