"""GGUF's families: one table of tensors' names, of what metadata say, and of what llama.cpp computes whatever they say.

A family's rows and entries stand in the file of its makers, entries in the order of llama.cpp's converter.

Sources: llama.cpp's src/models/*.cpp (load_arch_hparams and graphs), its conversion/*.py (set_gguf_parameters,
modify_tensors) and gguf-py/gguf/tensor_mapping.py, of llama-cpp-python 0.3.36.
"""

import sys
from collections.abc import Mapping, Sequence

from precisionctl.checkpoints.gguf.family import GgufFamily
from precisionctl.checkpoints.gguf.metadata import Described
from precisionctl.discover import joined_tables
from precisionctl.errors import UnknownArchitecture
from precisionctl.model.model_shape import ModelShape

FAMILIES: Mapping[str, GgufFamily] = joined_tables(sys.modules[__name__], "FAMILIES")
"""By the `model_type` of a config.json, of a wrapper its text model's. Several may have one `general.architecture`."""


def model_type_of(file: Described, of_architecture: Sequence[str]) -> str:
    """Which of the families with its `general.architecture` a file is of, as far as that changes what it computes."""
    (only,) = (each for each in of_architecture if FAMILIES[each].recognises(file))
    return only


def of_llama_cpp(model: ModelShape) -> GgufFamily:
    """What llama.cpp computes of this model. Raises UnknownArchitecture for one of which it would compute something
    else, or nothing."""
    if model.architecture not in FAMILIES:
        raise UnknownArchitecture(
            f"`{model.architecture}` is not among the models that are written for llama.cpp",
            do=f"Known are {', '.join(sorted(FAMILIES))}. llama.cpp's convert_hf_to_gguf.py may "
            "know it: `convert --to hf --precision bf16` writes what that reads.",
        )
    found = FAMILIES[model.architecture].of(model)
    found.check(model)
    return found
