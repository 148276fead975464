"""GGUF's families: one table of tensors' names, of what metadata say, and of what llama.cpp computes whatever they say.

A family's rows and entries stand in the file of its makers, entries in the order of llama.cpp's converter.

Sources: llama.cpp's src/models/*.cpp (load_arch_hparams and graphs), its conversion/*.py (set_gguf_parameters,
modify_tensors) and gguf-py/gguf/tensor_mapping.py, of llama-cpp-python 0.3.36.
"""

from collections.abc import Mapping, Sequence

from precisionctl.checkpoints.gguf.families import (
    gguf_afmoe,
    gguf_arcee,
    gguf_bailing,
    gguf_cohere,
    gguf_deepseek,
    gguf_dots,
    gguf_ernie,
    gguf_exaone,
    gguf_falcon_h1,
    gguf_gemma,
    gguf_gemma4,
    gguf_glm,
    gguf_gpt,
    gguf_gpt_oss,
    gguf_granite,
    gguf_hunyuan,
    gguf_jamba,
    gguf_kimi_linear,
    gguf_laguna,
    gguf_layer_norms,
    gguf_lfm2,
    gguf_llama,
    gguf_mamba2,
    gguf_mellum,
    gguf_mimo,
    gguf_minicpm3,
    gguf_minimax,
    gguf_nemotron,
    gguf_nemotron_h,
    gguf_olmo,
    gguf_phi,
    gguf_qwen,
    gguf_qwen3_next,
    gguf_seed_oss,
    gguf_starcoder,
)
from precisionctl.checkpoints.gguf.family import GgufFamily
from precisionctl.checkpoints.gguf.metadata import Described
from precisionctl.errors import UnknownArchitecture
from precisionctl.model.model_shape import ModelShape

FAMILIES: Mapping[str, GgufFamily] = {
    **gguf_llama.FAMILIES,
    **gguf_qwen.FAMILIES,
    **gguf_qwen3_next.FAMILIES,
    **gguf_gemma.FAMILIES,
    **gguf_gemma4.FAMILIES,
    **gguf_gpt_oss.FAMILIES,
    **gguf_deepseek.FAMILIES,
    **gguf_kimi_linear.FAMILIES,
    **gguf_bailing.FAMILIES,
    **gguf_glm.FAMILIES,
    **gguf_phi.FAMILIES,
    **gguf_olmo.FAMILIES,
    **gguf_granite.FAMILIES,
    **gguf_nemotron_h.FAMILIES,
    **gguf_lfm2.FAMILIES,
    **gguf_falcon_h1.FAMILIES,
    **gguf_minimax.FAMILIES,
    **gguf_mimo.FAMILIES,
    **gguf_mamba2.FAMILIES,
    **gguf_minicpm3.FAMILIES,
    **gguf_laguna.FAMILIES,
    **gguf_mellum.FAMILIES,
    **gguf_cohere.FAMILIES,
    **gguf_exaone.FAMILIES,
    **gguf_ernie.FAMILIES,
    **gguf_hunyuan.FAMILIES,
    **gguf_seed_oss.FAMILIES,
    **gguf_starcoder.FAMILIES,
    **gguf_afmoe.FAMILIES,
    **gguf_arcee.FAMILIES,
    **gguf_jamba.FAMILIES,
    **gguf_dots.FAMILIES,
    **gguf_layer_norms.FAMILIES,
    **gguf_gpt.FAMILIES,
    **gguf_nemotron.FAMILIES,
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
