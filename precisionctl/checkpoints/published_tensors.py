"""The tensors of a Hugging Face directory under the names of published files, whoever saved it, and its config.json
with what other files say of their codes."""

from collections.abc import Collection, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from precisionctl.checkpoints.decoded import hqq_codes, inkling2_loop_codes, quanto_codes, sinq_codes
from precisionctl.checkpoints.decoded.quanto_codes import QUANTIZATION_MAP
from precisionctl.checkpoints.decoded.transposed_codes import FILES_BESIDE
from precisionctl.checkpoints.hf_directory.encodings_file import QUANT_CONFIG, said_quantization
from precisionctl.checkpoints.hf_directory.fused_experts import unpacked
from precisionctl.checkpoints.hf_directory.huggingface_files import (
    SAFETENSORS,
    WeightFileFormat,
    places_in,
    read_stored,
)
from precisionctl.checkpoints.hf_directory.safetensors_file import Places
from precisionctl.checkpoints.hf_directory.wrapped_names import names_inside
from precisionctl.checkpoints.mlx.mlx_names import in_published_names
from precisionctl.errors import DamagedCheckpoint, PrecisionError, shown
from precisionctl.quant_methods.coded_weights import quant_method_of
from precisionctl.untrusted.safe_files import has_file, read_json


def read_published(
    path: Path, file_format: WeightFileFormat, config: dict[str, Any], where: Path
) -> tuple[Places, dict[str, Any], str | None]:
    """The tensors in a directory's files of `file_format`, whose config.json is at `where`, by their published names;
    a config whose `quantization_config` says how they are coded, that of the text model where mlx-lm left nothing else
    of a wrapper; and the first tensor that is stored with a word of a module around the model, if there is one.

    Raises DamagedCheckpoint where files contradict one another, and PrecisionError for codes in pickles.
    """
    # Where config.json names another file to transformers, that and engines would read two models
    chosen = config.get("transformers_weights")
    if chosen not in (None, file_format.single, file_format.index):
        raise DamagedCheckpoint(
            f"with `transformers_weights`, transformers reads {shown(chosen)}, and engines read {file_format.single}",
            where=where,
            do="Keep the file that is the model, under the usual name, and remove the key.",
        )
    config = _with_quantization(config, path)
    if file_format is not SAFETENSORS and quant_method_of(config) == "torchao":
        raise PrecisionError(
            "tensors of torchao in pickles, which are not read",
            where=path,
            do="Let transformers 5 with torchao 0.15 or newer save it again, in safetensors.",
        )
    files = read_stored(path, file_format)
    inside = names_inside(chain(*files.values()), path)
    wrapped = next((stored for stored, name in inside.items() if stored != name), None)
    if wrapped:
        files = {file: {inside[name]: each for name, each in tensors.items()} for file, tensors in files.items()}
    places, config = in_published_names(unpacked(places_in(files)), config, where)
    if unsaid := _unsaid_codes(config, path, places):
        config |= {"quantization_config": unsaid}
    return places, config, wrapped


def _with_quantization(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """config.json, with the `quantization_config` that it has anywhere, or that older ModelOpts wrote in a file of its
    own. Some of them did not write `quant_method`, which is known by that file or by `quant_algo` then."""
    beside = path / QUANT_CONFIG
    found = said_quantization(config)
    from_file = not found and has_file(beside, path)
    if from_file:
        found = read_json(beside, path).get("quantization")
        if not isinstance(found, dict):
            raise DamagedCheckpoint("no `quantization`", where=beside)
    if isinstance(found, dict) and "quant_method" not in found and (from_file or "quant_algo" in found):
        found = {"quant_method": "modelopt"} | found
    return config | {"quantization_config": found} if found else config


def _unsaid_codes(config: Mapping[str, Any], path: Path, names: Collection[str]) -> dict[str, Any] | None:
    """The `quantization_config` of codes that config.json does not describe: that of Inkling 2 Mini's experts, of what
    sinq, hqq and quanto save themselves, and what AutoGPTQ or AutoAWQ wrote into a file of its own. None if there are
    none. Raises DamagedCheckpoint for two files."""
    if inkling2_loop_codes.are_there(config, names):
        return {"quant_method": inkling2_loop_codes.METHOD}
    if sinq_codes.are_there(names):
        beside = path / sinq_codes.MODULES
        said = read_json(beside, path) if has_file(beside, path) else {}
        return {"quant_method": sinq_codes.METHOD, "modules": said}
    if config.get("quantization_config"):
        return None
    if any(name.endswith(".W_q") for name in names):
        return {"quant_method": hqq_codes.METHOD}
    if any(name.endswith(".weight._scale") for name in names):
        said = read_json(path / QUANTIZATION_MAP, path) if has_file(path / QUANTIZATION_MAP, path) else {}
        return {"quant_method": quanto_codes.METHOD, "modules": said}
    there = [name for name in FILES_BESIDE if has_file(path / name, path)]
    if not there or not any(name.endswith(".qweight") for name in names):
        return None
    if len(there) > 1:
        what = f"{' and '.join(there)} both say how weights are coded, and config.json does not"
        raise DamagedCheckpoint(what, where=path, do="Keep the one of the tool that made them.")
    return {"quant_method": FILES_BESIDE[there[0]]} | read_json(path / there[0], path)
