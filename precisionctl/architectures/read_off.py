"""A table read off a directory, for a model that no file here describes: from Hugging Face to Hugging Face alone.

Every tensor is a row of its own, as it is. Their place and name decide which of them are weights of GEMMs that an FP8
recipe computes in FP8. Shapes that an engine does not take are refused by the engine's own rules. What is not sure to
be such a weight stays as it is: that costs bytes, and encoding it would cost the model.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from precisionctl.architectures.param_map import Architecture, Naming, Place, Row
from precisionctl.dtypes import DType
from precisionctl.model.model_shape import ModelShape
from precisionctl.param import Layout, TensorSpec

VALUES = (DType.bfloat16, DType.float16, DType.float32)
"""What is rounded to the dtype that is asked for, as codes are decoded to it. Tensors of other dtypes travel as they
are."""


@dataclass(frozen=True)
class TensorRow(Row):
    """One tensor of a directory, of the shape that it has. `megatron` is only its name in a plan.

    That is its own name; of one of several numbered experts, `experts.3.w1.weight`, it is `experts.w1.weight3`, for
    FP8 state is one of all experts of a linear, as in Megatron.
    """

    stored: tuple[int, ...] = ()
    expert: bool = False

    @property
    def of_experts(self) -> bool:
        return self.expert

    def shape(self, model: ModelShape) -> tuple[int, ...]:
        return self.stored

    def shapes(self, model: ModelShape, layout: Layout) -> tuple[tuple[int, ...], ...]:
        return (self.stored,)

    def places(self, model: ModelShape) -> Iterator[Place]:
        yield {}

    def count(self, model: ModelShape) -> int:
        return 1


class ReadOff(Architecture):
    """The table of no family: its rows are the tensors that there are."""

    def spelled(
        self,
        stored: Mapping[str, TensorSpec],
        model: ModelShape,
        naming: Naming = "as stored",
        named_as_codes: Collection[str] = (),
    ) -> tuple[Row, ...]:
        return tuple(rows(stored))


READ_OFF = ReadOff(model_types={}, rows=(), config=(), aliases=(), derived=())


def rows(stored: Mapping[str, TensorSpec]) -> Iterator[TensorRow]:
    """A row for each tensor, in the order of their names, in which numbers count as numbers."""
    reasons = why_not_gemms(stored)
    numbered: dict[str, dict[int, str]] = defaultdict(dict)  # experts of a linear, by its name without a number
    for name in stored:
        if match := _EXPERT.fullmatch(name):
            numbered[f"{match[1]}.{match[3]}"][int(match[2])] = name
    names: dict[str, str] = {}  # in the plan, of experts that are numbered without a gap
    for linear, experts in numbered.items():
        named = {name: f"{linear}{number}" for number, name in experts.items()}
        taken = linear in stored or not stored.keys().isdisjoint(named.values())
        if experts.keys() == set(range(len(experts))) and not taken:
            names |= named

    for name in sorted(stored, key=_in_order):
        spec = stored[name]
        yield TensorRow(
            name,
            names.get(name, name),
            (),
            gemm=name not in reasons,
            keeps_dtype=not (spec.is_codes or spec.dtype in VALUES) or bool(_KEPT.fullmatch(name)),
            stored=spec.shape,
            expert=name in names,
        )


def _in_order(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(rf"({_NUMBER})", name)]


_NUMBER = r"\d{1,9}"
"""Python makes no integer of the thousands of digits that a stranger's name may have."""

_EXPERT = re.compile(rf"(.+\.experts)\.({_NUMBER})\.(.+\.weight)")

_KEPT = re.compile(
    r"(?:.+\.)?(?:A_log|D|dt_bias|(?:e_score_)?correction_bias|expert_bias|gate\.bias"
    r"|(?:.+_hc|hc_head)\.\w+|hc_\w+|attn_sink|sinks|ape|position_bias)(?:\[\d+\])?"
)
"""Tensors that keep their dtype, which are FP32 for a reason: state-space parameters, biases of a choice, and of
DeepSeek-V4 hyper-connections, sinks and the positions in a compressed window."""

_NEVER: Mapping[str, re.Pattern[str]] = {
    "a norm": re.compile(r".*norm.*|ln|ln_.+"),
    "an embedding": re.compile(r".*embed.*|(?:.+_)?emb|wte|wpe|.*position_bias.*|relative_attention_bias|rel_pos.*"),
    "a head": re.compile(r"(?:.+_)?head"),
    "of multi-token prediction": re.compile(r"eh_proj"),
}
"""What the last word of a matrix's module says: that it is no GEMM's weight, or one that no engine reads as codes."""

HEAD_OF_NUMBERS = re.compile(
    r"(?:.+\.)?(?:score|classifier|qa_outputs|(?:v|value|reward|rm|regression)_head|regression_layer|gating)"
    r"\.(?:.+\.)?weight"
)
"""Weights of heads for rewards or classes, of one linear or several: `score.0.weight`, `v_head.summary.weight`."""

_UNLESS_ASKED: Mapping[str, re.Pattern[str]] = {
    "of a tower or projector": re.compile(
        r".*(?:vision|visual|audio|speech|image|projector|connector|resampler|aligner|merger).*|vit|siglip|clip|mm_.+"
    ),
    "a router or gate": re.compile(
        r"gate|wg|wgate|gate_attn|.*_gate|.*gate_preact|router|.*_router|in_proj_(?:ba|b|a)|(?:f_a|f_b|a|b|f|g)_proj"
    ),
    "of an indexer": re.compile(r"indexer|compressor"),
    "of a state-space model's step": re.compile(r"x_proj|dt_proj"),
    "of a convolution": re.compile(r".*conv\d?d?"),
    "of a residual connection": re.compile(r".*hyper_connection.*|altup.*|per_layer_.*"),
}
"""What any word of a matrix's name may say: that it is not encoded unless somebody asks for it. Whole words, between
dots: `gate` is a router, `gate_proj` is not. Small, or costly to round: who chooses experts or tokens, how fast a state
is forgotten, and what sees and hears."""

_OUTSIDE = "outside of the layers"


def why_not_gemms(stored: Mapping[str, TensorSpec]) -> dict[str, str]:
    """The tensors that are no weights of GEMMs to compute in FP8, and why not, in words."""
    text = any("language_model" in name.split(".") for name in stored)
    transposed = set()  # as a Conv1D of GPT-2's is: its matrix is as long as its bias the other way around
    for name, spec in stored.items():
        bias = stored.get(f"{name.removesuffix('weight')}bias")
        if bias and len(spec.shape) == 2 and spec.shape[0] != spec.shape[1] and bias.shape == spec.shape[1:]:
            transposed.add(_leaf_module(name))
    found = {}
    for name, spec in stored.items():
        words, module = name.split("."), _leaf_module(name)
        if len(spec.shape) != 2 or 0 in spec.shape or not name.endswith((".weight", "]")):
            found[name] = "no matrix of a linear"
        elif not (spec.is_codes or spec.dtype in VALUES):
            found[name] = "no values"
        elif HEAD_OF_NUMBERS.fullmatch(name):
            found[name] = "a head"
        elif never := _says(module)[0]:
            found[name] = never
        elif module in transposed:
            found[name] = "stored as [in, out]"
        elif text and "language_model" not in words and not words[0].startswith("mtp"):
            found[name] = "of a tower or projector"
        elif unasked := next(filter(None, (_says(word)[1] for word in words[:-1])), None):
            found[name] = unasked
        elif not any(word.isdecimal() for word in words):
            found[name] = _OUTSIDE
    return found


def may_be_asked_for(why: str) -> bool:
    """Whether a matrix that is not encoded for this reason is a linear's all the same."""
    return why in _UNLESS_ASKED or why == _OUTSIDE


@lru_cache(maxsize=1 << 12)  # a million names are made of a few words
def _says(word: str) -> tuple[str | None, str | None]:
    """Two reasons not to encode a matrix: one if this is the last word of its module's name, one if it is any word of
    its name."""
    never, unasked = (
        next((why for why, pattern in reasons.items() if pattern.fullmatch(word)), None)
        for reasons in (_NEVER, _UNLESS_ASKED)
    )
    return never, unasked


def _leaf_module(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2]
