"""The model that a GGUF file describes: made of what it says alone, or compared with a config.json."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from precisionctl.architectures.config_keys import Fields
from precisionctl.architectures.families import fields_of, from_hf_config, key_in, model_of_fields, to_hf_config
from precisionctl.checkpoints.base import WITH_REFERENCE
from precisionctl.checkpoints.gguf.families import FAMILIES
from precisionctl.checkpoints.gguf.family import GgufFamily
from precisionctl.checkpoints.gguf.metadata import Described
from precisionctl.checkpoints.gguf.metadata_keys import SameAs
from precisionctl.checkpoints.gguf.rotary_tensors import scaling_with_tensors
from precisionctl.dtypes import DType
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture, shown
from precisionctl.model.model_shape import ModelShape
from precisionctl.model.same_model import differences
from precisionctl.sizes import listed


def model_of_file(file: Described, model_type: str) -> ModelShape:
    """The model that a file says, as one of this family: what no key says is what llama.cpp computes. Raises
    DamagedCheckpoint for keys that describe no model, UnknownArchitecture for one that the family does not have, or
    whose rotary embeddings llama.cpp scales otherwise than the file says."""
    family = FAMILIES[model_type].of_file(file)
    said = family.read(file)
    said["rope_scaling"] = scaling_with_tensors(said, file, family, None)
    try:
        model = model_of_fields({"architecture": model_type, **family.completed(said)})
    except DamagedCheckpoint as error:
        raise _in_words_of(file, said, family, error) from None
    try:
        family.check_scaling(model)
    except UnknownArchitecture as error:
        raise UnknownArchitecture(error.what, do=WITH_REFERENCE) from None
    told = from_hf_config(to_hf_config(model, DType.float32.value), "")
    for name, (here, there) in differences(model, told).items():
        if not _same(here, there):
            what = f"{name} is {shown(here)}, and {shown(there)} in a {model_type}"
            raise UnknownArchitecture(what, do="Start from the release.")
    return model


def _in_words_of(file: Described, said: Fields, family: GgufFamily, error: DamagedCheckpoint) -> DamagedCheckpoint:
    """An error that begins with a field, with the key that says it, or says the field that it is the same as."""
    field, _, rest = error.what.partition(" ")
    if field not in said and isinstance(same := family.computed.get(field), SameAs):
        field = same.field
    for entry in family.entries:
        match entry.fields, entry.keys:
            case [name], [key] if field == name and _same(said.get(name), file.said(key)):
                field = f"{file.architecture}.{key}"
    return DamagedCheckpoint(f"{field} {rest}", do="Is the file whole, and of such a model?")


def check_same(file: Described, model: ModelShape, config: Mapping[str, Any], where: object) -> None:
    """Raise DamagedCheckpoint if a file says another model than the one of a config.json."""
    family = FAMILIES[model.architecture].of_file(file)
    said = family.read(file)
    said["rope_scaling"] = scaling_with_tensors(said, file, family, model)
    own = fields_of(model)
    here, there = ({name.partition(".")[0] for name in names if "." in name} for names in (own, said))
    beside = {name: value for name, value in own.items() if not name.startswith("moe.") or "moe" in there}
    parts = {name: value for name, value in family.completed(said).items() if name.partition(".")[0] in there - here}
    placed = {name: _placed(own.get(name), value) for name, value in said.items()}
    try:
        other = model_of_fields({**beside, **parts, **placed})
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(
            f"config.json is of another model: with the file's, {error.what}", where=where
        ) from None
    fields = differences(model, other)
    if model.vocab_size != other.vocab_size:
        fields["vocab_size"] = (model.vocab_size, other.vocab_size)
    if fields:
        words = [f"{key_in(config, name)} is {one}, and in the file {two}" for name, (one, two) in fields.items()]
        raise DamagedCheckpoint(f"config.json is of another model: {listed(words, 4)}", where=where)


def _placed(own: Any, said: Any) -> Any:
    """What is said; one's own value if that is the same."""
    if isinstance(own, Mapping) and isinstance(said, Mapping):
        return {**own, **{key: _placed(own.get(key), value) for key, value in said.items()}}
    return own if _same(own, said) else said


def _same(one: Any, other: Any) -> bool:
    """Whether two values are the same in FP32, or made of numbers that are."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if type(one) is float or type(other) is float:
        return all(type(each) in (int, float) for each in (one, other)) and bool(np.isclose(one, other, 2**-21, 0))
    return bool(one == other)
