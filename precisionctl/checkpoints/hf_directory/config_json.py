"""config.json of a result whose tensors are values, and what is written with it beside weights of Hugging Face's names:
companion files and FP8 state."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from precisionctl.architectures.families import TOKEN_KEYS, to_hf_config
from precisionctl.architectures.wrappers import is_wrapper
from precisionctl.checkpoints.base import Companions
from precisionctl.checkpoints.hf_directory.companions import to_json, write_companions
from precisionctl.checkpoints.hf_directory.encodings_file import without_quantization
from precisionctl.dtypes import DType
from precisionctl.fp8 import sidecar
from precisionctl.fp8.state import Fp8States
from precisionctl.model.model_shape import ModelShape
from precisionctl.model.text_config import config_parts, text_part
from precisionctl.param import TensorSpec
from precisionctl.untrusted.safe_json import parse_json


def write_beside(
    directory: Path, companions: Companions, config: Mapping[str, Any], fp8: Fp8States | None, *, live: bool = False
) -> None:
    """Write companion files, config.json and FP8 state into a directory of weights. The state goes where a run loads it
    from if it is `live`, else where it is only carried."""
    write_companions(directory, companions)
    (directory / "config.json").write_bytes(to_json(config))
    if fp8 is not None:
        sidecar.write(directory / (sidecar.LIVE if live else sidecar.RELATIVE), fp8)


def config_of_values(
    companions: Companions, config: Mapping[str, Any], specs: Mapping[str, TensorSpec]
) -> dict[str, Any]:
    """The config.json of a result whose tensors are values: that of the companions, else `config`, with its dtype.

    `config` describes the model alone that a wrapper is around. If the head of that is its embedding, all parts of the
    wrapper's say so: transformers 5.24 goes by the outermost or, in Llama 4, by the text model's, and makes a random
    head where that says nothing.
    """
    said = parse_json(companions.files.get("config.json", b"{}"), companions.config_path)
    found = without_quantization(said or config)
    found.pop("transformers_weights", None)  # the files have other names
    if not any(key in found for key in _DTYPE_KEYS):
        found["torch_dtype"] = None
    if is_wrapper(found) and config.get(_TIED):
        for part in config_parts(found):
            part[_TIED] = True
    dtype = config_dtype(specs)
    text = text_part(found)
    within = text.values() if isinstance(text, dict) else ()
    for part in (*config_parts(found), *(each for each in within if isinstance(each, dict))):
        keys = [key for key in _DTYPE_KEYS if not isinstance(part.get(key, 0), int)]  # a map of tokens has numbers
        part |= dict.fromkeys(keys, dtype)
    return found


def made_config(model: ModelShape, dtype: str, companions: Companions) -> dict[str, Any]:
    """A config.json for a model that never had one, with the tokens that its generation_config.json names. Raises as
    `to_hf_config`."""
    config = to_hf_config(model, dtype)
    said = parse_json(companions.files.get(GENERATION, b"{}"), GENERATION)
    for key in TOKEN_KEYS:
        named = said.get(key)
        tokens = named if isinstance(named, list) else [named]
        if tokens and all(is_token(token, model) for token in tokens):
            config[key] = named
    return config


def is_token(token: object, model: ModelShape) -> bool:
    """Whether this is the id of a token of the model."""
    return type(token) is int and 0 <= token < model.vocab_size


GENERATION = "generation_config.json"
_TIED = "tie_word_embeddings"
_DTYPE_KEYS = ("dtype", "torch_dtype")
"""The dtype of the weights, as transformers 5 writes it and as older ones did. Programs read one or the other, so both
say the same. Towers keep theirs, as their tensors do."""


def config_dtype(specs: Mapping[str, TensorSpec]) -> str:
    """The dtype of values for config.json: the one with the most bytes. Codes count as the BF16 that they decode to,
    and their scales do not count."""
    codes = sum(spec.rows * spec.columns for spec in specs.values() if spec.is_codes)
    counts: dict[DType, int] = {DType.bfloat16: codes * DType.bfloat16.itemsize}
    for name, spec in specs.items():
        if spec.dtype.is_floating_point and spec.dtype.itemsize > 1 and not name.endswith(("_scale", "_scale_inv")):
            counts[spec.dtype] = counts.get(spec.dtype, 0) + spec.nbytes
    return max(counts, key=lambda dtype: counts[dtype]).value
