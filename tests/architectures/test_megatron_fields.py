"""config.json that was changed beside a Megatron checkpoint: each field of ModelShape that it says otherwise than the
arguments contradicts them, or is told of as one that they cannot say."""

import dataclasses
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from pico import shape

from precisionctl.architectures.families import from_hf_config, to_hf_config
from precisionctl.architectures.megatron.megatron_args import (
    otherwise_in_megatron,
    read_megatron_args,
    to_megatron_args,
)
from precisionctl.checkpoints.base import Companions
from precisionctl.checkpoints.megatron.directory import model_of
from precisionctl.dtypes import DType
from precisionctl.errors import DamagedCheckpoint, PrecisionctlError
from precisionctl.model.model_shape import ModelShape
from precisionctl.model.same_model import differences, used
from precisionctl.param import TensorSpec


def others(value: object) -> tuple[object, ...]:
    """Other values of a field."""
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int | float):
        return (value * 2, value / 2 if isinstance(value, float) else max(1, value // 2))
    if isinstance(value, tuple):
        return (tuple(not each for each in value), value[::-1])
    return (2, True, 4.0) if value is None else (None,)


def changed(model: ModelShape) -> Iterator[ModelShape]:
    """The family's models, each with another value of a field that a layer uses: those that its config.json says."""
    for name, value in used(model).items():
        part, _, field = name.rpartition(".")
        for other in others(value):
            with suppress(PrecisionctlError, TypeError, ValueError, AttributeError, KeyError):
                if part:
                    within = dataclasses.replace(getattr(model, part), **{field: other})
                    made = dataclasses.replace(model, **{part: within})
                else:
                    made = dataclasses.replace(model, **{name: other})
                said = from_hf_config(to_hf_config(made, "bfloat16"))
                if differences(model, said):
                    yield said


@pytest.mark.parametrize("family", ["mimo-v2-flash", "laguna", "laguna-per-element", "phimoe", "olmo"])
def test_a_field_that_the_config_says_otherwise_is_refused_or_told(family: str) -> None:
    model = shape(family)
    args, rows = to_megatron_args(model.padded(1)), model.padded_vocab_size
    specs = {"embedding.word_embeddings.weight": TensorSpec((rows, model.hidden_size), DType.bfloat16)}
    by_args, refused = read_megatron_args(args, rows, ""), 0
    for said in changed(model):
        config = Companions({"config.json": json.dumps(to_hf_config(said, "bfloat16")).encode()})
        try:
            read = model_of(Path("checkpoint"), args, config, specs)
        except DamagedCheckpoint as error:
            assert "contradicts the arguments of Megatron" in str(error) or "embedding has" in str(error), error
            refused += 1
            continue
        unsaid = otherwise_in_megatron(read)
        for name in differences(model, said).keys() & differences(read, by_args).keys():
            assert {name, name.partition(".")[0]} & unsaid.keys(), name
    assert refused
