"""GGUF's families: one table of tensors' names, of what metadata say, and of what llama.cpp computes whatever they say.

A family's rows and entries stand in the file of its makers, entries in the order of llama.cpp's converter.

Sources: llama.cpp's src/models/*.cpp (load_arch_hparams and graphs), its conversion/*.py (set_gguf_parameters,
modify_tensors) and gguf-py/gguf/tensor_mapping.py, of llama-cpp-python 0.3.36.
"""

from collections.abc import Mapping, Sequence

from precisionctl.checkpoints.gguf.families import (
    afmoe,
    cohere,
    deepseek,
    ernie,
    exaone,
    gemma,
    gemma4,
    glm,
    gpt_oss,
    granite,
    hunyuan,
    lfm2,
    llama,
    mimo,
    minimax,
    nemotron_h,
    olmo,
    phi,
    qwen,
    qwen3_next,
    seed_oss,
    starcoder,
)
from precisionctl.checkpoints.gguf.family import GgufFamily
from precisionctl.checkpoints.gguf.metadata import Described
from precisionctl.errors import UnknownArchitecture
from precisionctl.model_shape import ModelShape

FAMILIES: Mapping[str, GgufFamily] = {
    **llama.FAMILIES,
    **qwen.FAMILIES,
    **qwen3_next.FAMILIES,
    **gemma.FAMILIES,
    **gemma4.FAMILIES,
    **gpt_oss.FAMILIES,
    **deepseek.FAMILIES,
    **glm.FAMILIES,
    **phi.FAMILIES,
    **olmo.FAMILIES,
    **granite.FAMILIES,
    **nemotron_h.FAMILIES,
    **lfm2.FAMILIES,
    **minimax.FAMILIES,
    **mimo.FAMILIES,
    **cohere.FAMILIES,
    **exaone.FAMILIES,
    **ernie.FAMILIES,
    **hunyuan.FAMILIES,
    **seed_oss.FAMILIES,
    **starcoder.FAMILIES,
    **afmoe.FAMILIES,
}
"""By the `model_type` of a config.json. Several may have one `general.architecture`."""


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
