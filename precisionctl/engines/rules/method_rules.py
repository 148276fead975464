"""What an engine does with the directories of one quant method."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from precisionctl.engines.rules.ignored_modules import TWO_KINDS_OF_EXPERTS, IgnoreList
from precisionctl.engines.rules.rule import EngineRule


@dataclass(frozen=True)
class ExpertsAsValues:
    """Models, by the `model_type` of their text model, whose experts an engine loads as values alone, by a `rule`;
    `why`, in words that follow what they are."""

    models: Sequence[str]
    why: str
    rule: EngineRule


BESIDE_THEIR_ROUTERS = ExpertsAsValues(
    TWO_KINDS_OF_EXPERTS,
    "which are ignored where their routers are",
    EngineRule(
        "experts are ignored where the list has a name that begins with theirs, as that of their router does",
        "vLLM 0.33 quant_utils.py, SGLang 0.5.23 utils.py, is_layer_skipped; run",
    ),
)
"""`mlp.text_experts` and `mlp.text_experts_gate`. Lists of compressed-tensors name linears of the first expert."""


@dataclass(frozen=True)
class ScalesInFP32:
    """Models, by the `model_type` of their text model, of which an engine keeps scales in FP32 beside BF16, so that it
    computes with none but these `formats`, by a `rule`."""

    models: Sequence[str]
    formats: Sequence[str]
    rule: EngineRule


@dataclass(frozen=True)
class MethodRules:
    """What an engine does with the directories of one quant method.

    formats, experts: the schemes, and formats of packed codes, that it loads, and of experts if not the same (None).
    of_models: those that it loads beside of single models, by config.json's `model_type`.
    ignored: how it finds out which modules are values; ignored_in: the same in a scheme where it does otherwise.
    bf16_scales: whether it rounds FP32 scales to BF16. cache: what it does with the scales of an FP8 KV cache, in words
    that follow its name; empty if nothing. joined: the rule on the format of tensors that it joins with others as it
    loads them; None if it joins nothing. in_fp32: models whose scales are not rounded; None if there are none.

    Of experts, beside codes: `as_values` are models whose experts it does not load as codes. `one_by_one` matches the
    slices of tensors in BF16 that must be stored expert by expert instead; `in_one`, by the `model_type` of the text
    model, the tensors of single experts that must be stored as one instead.
    """

    formats: Sequence[str]
    ignored: IgnoreList
    experts: Sequence[str] | None = None
    of_models: Mapping[str, Sequence[str]] = field(default_factory=dict)
    ignored_in: Mapping[str, IgnoreList] = field(default_factory=dict)
    bf16_scales: bool = False
    cache: str = ""
    joined: EngineRule | None = None
    in_fp32: ScalesInFP32 | None = None
    as_values: ExpertsAsValues | None = None
    one_by_one: re.Pattern[str] | None = None
    in_one: Mapping[str, re.Pattern[str]] = field(default_factory=dict)

    def list_of(self, scheme: str) -> IgnoreList:
        """How the engine finds out which modules are values in this scheme."""
        return self.ignored_in.get(scheme, self.ignored)
