"""Families by what is special in their rows: the first of each kind is in every run of the tests, the others in `make
soak`."""

from collections.abc import Iterable
from typing import Any

import pico
import pytest
from transformers import AutoConfig

from precisionctl.architectures.families import from_hf_config


def kind(family: str) -> tuple[object, ...]:
    """What rows, modules and attention of a family are like; a family that is like no other has a kind of its own."""
    settings: dict[str, Any] = {"model_type": "llama"} | pico.SIZES | pico.NO_TOKENS | pico.FAMILIES[family]
    model = from_hf_config(AutoConfig.for_model(**settings).to_dict())
    parts = (model.moe is not None, model.mla is not None, model.softmax_offset, model.post_layernorms)
    return (*parts, model.normalization, model.position_embedding, model.gated_linear_unit)


def one_of_each(families: Iterable[str]) -> list[Any]:
    """Parameters of a test: those after the first of their kind have the mark `soak`."""
    known: set[object] = set()
    parameters = []
    for family in families:
        marks = [pytest.mark.soak] if kind(family) in known else []
        parameters.append(pytest.param(family, marks=marks))
        known.add(kind(family))
    return parameters
