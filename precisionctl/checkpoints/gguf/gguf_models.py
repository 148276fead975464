"""GGUF's models: a table of what the metadata of each family say, and of what llama.cpp computes whatever they say.

A family's entries are in the order of llama.cpp's converter.

Sources: llama.cpp's src/models/*.cpp (load_arch_hparams and graphs), and conversion/*.py (set_gguf_parameters).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from precisionctl.checkpoints.gguf.dense_models import DENSE_MODELS
from precisionctl.checkpoints.gguf.gguf_experts import (
    AS_LARGE_AS_MLP,
    EXPERT_SIZE,
    EXPERTS,
    IN_ALL_LAYERS,
    SHARED_EXPERT_SIZE,
    is_scored_by,
)
from precisionctl.checkpoints.gguf.gguf_family_keys import (
    FINAL_CAP,
    GEMMA,
    GEMMA_KEYS,
    MULTIPLIERS,
    SWITCH,
    TIED_GEMMA,
    WINDOW_OF_GEMMA3,
    WINDOW_OF_PHI3,
    scored_as_gemma,
)
from precisionctl.checkpoints.gguf.gguf_keys import (
    ATTENTION_BIAS,
    CONTEXT,
    EPSILON,
    HEAD_SIZE,
    HEADS,
    LAYERS,
    MLP,
    MLP_BIAS,
    UNUSUAL_HEAD_SIZE,
    VOCABULARY,
    WIDTH,
    WINDOW,
    WINDOWS,
    GgufEntry,
    GgufKey,
    every,
    hidden_by_heads,
    number,
    write_each,
)
from precisionctl.checkpoints.gguf.gguf_metadata import Described
from precisionctl.checkpoints.gguf.gguf_model import GgufModel, base_keys
from precisionctl.checkpoints.gguf.gguf_names import FAMILIES
from precisionctl.checkpoints.gguf.gguf_rope import (
    AND_LLAMA3,
    LOCAL_BASE,
    LOCAL_BASE_OF_OLMO3,
    LONGROPE,
    LONGROPE_FACTOR,
    ORIGINAL_CONTEXT,
    ROPE,
    TURNED,
)
from precisionctl.checkpoints.gguf.metadata_bytes import GgufValue
from precisionctl.checkpoints.gguf.recurrent_models import RECURRENT_MODELS
from precisionctl.checkpoints.gguf.sparse_models import SPARSE_MODELS
from precisionctl.errors import UnknownArchitecture
from precisionctl.model_shape import ModelShape

_WINDOW = ("sliding_window", "window_layers")


_NORMS_OF_OLMO: Mapping[str, Any] = {
    "qk_layernorm": True,
    "qk_layernorm_over_heads": True,
    "pre_layernorms": False,
    "post_layernorms": True,
}
_OLMO2: Mapping[str, Any] = {"kv_channels": hidden_by_heads, "tied_embeddings": False, **_NORMS_OF_OLMO}
_BIASES_AND_SINKS = dict.fromkeys(("qkv_bias", "proj_bias", "mlp_bias", "softmax_offset", "moe.router_bias"), True)

_LLAMA = GgufModel(
    keys=(*base_keys(), HEAD_SIZE),
    more=(VOCABULARY, TURNED, ATTENTION_BIAS, MLP_BIAS),
    reads=(),
    ignored=_WINDOW,
    scalings=AND_LLAMA3,
)

MODELS: Mapping[str, GgufModel] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": GgufModel(
        keys=(*base_keys(*EXPERTS), UNUSUAL_HEAD_SIZE),
        more=(VOCABULARY, TURNED),
        reads=(),
        computed={**IN_ALL_LAYERS, **AS_LARGE_AS_MLP},
        ignored=_WINDOW,
    ),
    "granite": GgufModel(
        keys=(*base_keys(), UNUSUAL_HEAD_SIZE),
        more=(*MULTIPLIERS, ATTENTION_BIAS, MLP_BIAS),
        reads=(SWITCH,),
        scalings=AND_LLAMA3,
    ),
    "granitemoe": GgufModel(
        keys=(*base_keys(*EXPERTS), UNUSUAL_HEAD_SIZE),
        more=(*MULTIPLIERS, ATTENTION_BIAS),
        reads=(SWITCH,),
        computed={**IN_ALL_LAYERS, **AS_LARGE_AS_MLP},
        scalings=AND_LLAMA3,
    ),
    "smollm3": GgufModel(
        keys=(*base_keys(), UNUSUAL_HEAD_SIZE),
        more=(VOCABULARY, TURNED),
        reads=(ATTENTION_BIAS, MLP_BIAS),
        computed={"rope_layers": every(4)},
    ),
    "qwen2": GgufModel(keys=(*base_keys(), UNUSUAL_HEAD_SIZE), computed={"qkv_bias": True}, ignored=_WINDOW),
    "qwen2_moe": GgufModel(
        keys=(*base_keys(*EXPERTS), UNUSUAL_HEAD_SIZE),
        more=(EXPERT_SIZE, SHARED_EXPERT_SIZE),
        computed={
            **IN_ALL_LAYERS,
            **dict.fromkeys(("qkv_bias", "moe.pre_softmax", "moe.shared_expert_gate"), True),
            "tied_embeddings": False,
        },
        ignored=_WINDOW,
    ),
    "qwen3": GgufModel(
        keys=(*base_keys(), HEAD_SIZE),
        reads=(TURNED, ATTENTION_BIAS),
        computed={"qk_layernorm": True},
        ignored=_WINDOW,
    ),
    "qwen3_moe": GgufModel(
        keys=(*base_keys(*EXPERTS), HEAD_SIZE),
        more=(EXPERT_SIZE,),
        reads=(TURNED, ATTENTION_BIAS),
        computed={**IN_ALL_LAYERS, "qk_layernorm": True},
        ignored=_WINDOW,
    ),
    "gemma": GgufModel(keys=GEMMA_KEYS, computed=TIED_GEMMA),
    "gemma2": GgufModel(
        keys=GEMMA_KEYS,
        more=(
            number("attn_logit_softcapping", "attn_logit_softcapping", 50.0),
            number("final_logit_softcapping", "final_logit_softcapping", 30.0),
            GgufKey("sliding_window", "attention.sliding_window", 4096),
        ),
        reads=(TURNED, WINDOWS),
        computed={
            **TIED_GEMMA,
            "post_layernorms": True,
            "query_pre_attn_scalar": scored_as_gemma(46),
            "window_layers": every(2),
        },
    ),
    "gemma3_text": GgufModel(
        keys=(*base_keys(rope=(ROPE, LOCAL_BASE)), HEAD_SIZE),
        more=(FINAL_CAP, WINDOW_OF_GEMMA3),
        reads=(TURNED, WINDOWS),
        computed={
            **GEMMA,
            "post_layernorms": True,
            "qk_layernorm": True,
            "query_pre_attn_scalar": scored_as_gemma(62),
            "window_layers": every(6),
        },
    ),
    "phi3": GgufModel(
        keys=(CONTEXT, ORIGINAL_CONTEXT, WIDTH, MLP, LAYERS, HEADS, EPSILON, TURNED, ROPE),
        more=(WINDOW_OF_PHI3, LONGROPE_FACTOR),
        reads=(HEAD_SIZE,),
        computed={"kv_channels": hidden_by_heads},
        ignored=_WINDOW,
        scalings=LONGROPE,
    ),
    "olmo2": GgufModel(keys=(*base_keys(), UNUSUAL_HEAD_SIZE), reads=(TURNED, ATTENTION_BIAS), computed=_OLMO2),
    "olmo3": GgufModel(
        keys=(*base_keys(rope=(ROPE, LOCAL_BASE_OF_OLMO3)), UNUSUAL_HEAD_SIZE),
        more=(WINDOW, WINDOWS),
        reads=(TURNED, ATTENTION_BIAS),
        computed={**_OLMO2, "rotary_base_local": lambda fields: fields["rotary_base"]},
    ),
    "gpt_oss": GgufModel(
        keys=(*base_keys(*EXPERTS), HEAD_SIZE),
        more=(WINDOW, EXPERT_SIZE),
        reads=(TURNED, WINDOWS),
        computed={
            **IN_ALL_LAYERS,
            **_BIASES_AND_SINKS,
            "tied_embeddings": False,
            "activation": "quick_gelu",
            "activation_clamp": 7.0,
            "glu_offset": 1.0,
            "window_layers": every(2),
        },
        of_scaling=lambda scaling: {"truncate": False} if scaling.get("rope_type") == "yarn" else {},
    ),
    **DENSE_MODELS,
    **RECURRENT_MODELS,
    **SPARSE_MODELS,
}
"""By the `model_type` of the text model."""


def model_type_of(file: Described, of_architecture: Sequence[str]) -> str:
    """Which of the families with its `general.architecture` a file is of, as far as that changes what it computes."""
    if "mixtral" in of_architecture:
        return "mixtral" if file.count("expert_count", 0) else "llama"
    if "olmo3" in of_architecture:
        return "olmo3" if file.count("attention.sliding_window", 0) else "olmo2"
    if "deepseek_v3" in of_architecture:
        of_glm = file.rows("token_embd.weight") == 154880 and file.decoder_layers() in (47, 48)
        silent = file.said("expert_gating_func") is None  # deepseek2.cpp then takes softmax, but of GLM-4.7-Flash
        return "deepseek_v3" if is_scored_by("sigmoid", file) or (silent and of_glm) else "deepseek_v2"
    (only,) = of_architecture
    return only


def of_llama_cpp(model: ModelShape) -> GgufModel:
    """What llama.cpp computes of this model. Raises UnknownArchitecture for one of which it would compute something
    else, or nothing."""
    if model.architecture not in MODELS:
        raise UnknownArchitecture(
            f"`{model.architecture}` is not among the models that are written for llama.cpp",
            do=f"Known are {', '.join(sorted(MODELS))}. llama.cpp's convert_hf_to_gguf.py may "
            "know it: `convert --to hf --precision bf16` writes what that reads.",
        )
    found = MODELS[model.architecture]
    found.check(model)
    return found


def model_metadata(model: ModelShape, file_type: int) -> dict[str, GgufValue]:
    """What the file says of the model, under the name that its architecture has in llama.cpp. Raises as
    `of_llama_cpp`."""
    family, architecture = of_llama_cpp(model), FAMILIES[model.architecture].of(model).architecture

    def written(entries: Sequence[GgufEntry]) -> dict[str, GgufValue]:
        return {f"{architecture}.{key}": _value(value) for key, value in write_each(entries, model).items()}

    return {**written(family.keys), "general.file_type": np.uint32(file_type), **written(family.more)}


def _value(value: int | float | bool | str | list[bool] | list[int]) -> GgufValue:
    if isinstance(value, list):
        return np.array(value, np.bool_ if isinstance(value[0], bool) else np.int32)
    if isinstance(value, bool | str):
        return value
    return np.uint32(value) if isinstance(value, int) else np.float32(value)
