"""Settings of models that vLLM passes over, by runs of its build for CPUs, 0.32, and by the source of 0.33."""

from precisionctl.engines.rules.fixed_settings import (
    FixedSettings,
    in_every_other_layer,
    in_no_layer_unless_all,
    off_where_every_other_before,
    off_where_some_layers_from,
    on_unless_said_by,
    one_share_of_heads,
    window_off_by,
)
from precisionctl.engines.rules.rule import EngineRule

_IN_SILENCE = "its class of this model passes over the setting, in silence"
_NOT_ALL_BIASES = "its class of this model has not all of these biases, and passes over the others in silence"
_NO_HEAD = (
    "its class of this model has no head beside the embedding, and passes over that of the directory, or refuses it"
)

PASSED_OVER = (
    FixedSettings(
        ("olmoe",),
        {"norm_topk_prob": False, "rms_norm_eps": 1e-5},
        EngineRule(_IN_SILENCE, "vLLM 0.33 models/olmoe.py; run"),
    ),
    FixedSettings(
        ("gpt_oss",),
        {"swiglu_limit": 7.0, "rms_norm_eps": 1e-5, "layer_types": in_every_other_layer},
        EngineRule(
            _IN_SILENCE,
            "vLLM 0.33 models/gpt_oss.py, layers/fused_moe/activation.py; run",
        ),
    ),
    FixedSettings(
        ("qwen2_moe",),
        {
            "layer_types": in_no_layer_unless_all,
            "use_sliding_window": off_where_every_other_before,
            "qkv_bias": True,
        },
        EngineRule(_IN_SILENCE, "vLLM 0.33 models/qwen2_moe.py; run"),
    ),
    FixedSettings(
        ("qwen2", "qwen3"),
        {"layer_types": in_no_layer_unless_all, "use_sliding_window": off_where_some_layers_from},
        EngineRule("it refuses windows in some layers alone", "vLLM 0.33 models/qwen2.py Qwen2Model; run"),
    ),
    FixedSettings(
        ("cohere", "cohere2", "cohere2_moe", "falcon_h1", "gemma", "olmoe", "qwen3_moe"),
        {"attention_bias": False},
        EngineRule(
            _NOT_ALL_BIASES,
            "vLLM 0.33 models/commandr.py, cohere2_moe.py, falcon_h1.py, gemma.py, olmoe.py, qwen3_moe.py; run",
        ),
    ),
    FixedSettings(
        ("ernie4_5", "ernie4_5_moe"),
        {"use_bias": False},
        EngineRule(_NOT_ALL_BIASES, "vLLM 0.33 models/ernie45.py, ernie45_moe.py; run"),
    ),
    FixedSettings(
        ("afmoe", "deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "gpt_oss", "kimi_k2", "olmoe"),
        {"tie_word_embeddings": False},
        EngineRule(
            "its class of this model has a head of its own, which stays as it was made where there is none",
            "vLLM 0.33 models/afmoe.py, deepseek_v2.py, glm4_moe.py, glm4_moe_lite.py, gpt_oss.py, olmoe.py; run",
        ),
        head=False,
    ),
    FixedSettings(
        ("cohere", "cohere2", "cohere2_moe", "gemma2"),
        {"tie_word_embeddings": True},
        EngineRule(_NO_HEAD, "vLLM 0.33 models/commandr.py, cohere2_moe.py, gemma2.py; run"),
        head=True,
    ),
    FixedSettings(
        ("lfm2", "lfm2_moe"),
        {"tie_embedding": True, "tie_word_embeddings": on_unless_said_by("tie_embedding")},
        EngineRule(_NO_HEAD, "vLLM 0.33 models/lfm2.py, lfm2_moe.py; run"),
        head=True,
    ),
    FixedSettings(
        ("mimo_v2_flash",),
        {"rope_parameters": one_share_of_heads},
        EngineRule("it turns one share of all heads", "vLLM 0.33 models/mimo_v2.py MiMoV2FlashDecoderLayer; run"),
    ),
    FixedSettings(
        ("mimo_v2_flash",),
        {"sliding_window_size": window_off_by(-1, "sliding_window_size")},
        EngineRule(
            "it counts the token itself, and SGLang and transformers do not",
            "vLLM 0.33 models/mimo_v2.py MiMoV2Attention; run",
            fatal=False,
        ),
    ),
    FixedSettings(
        ("cohere2", "cohere2_moe"),
        {"sliding_window": window_off_by(1)},
        EngineRule(
            "it says that the model was trained so; in transformers a window is as wide as config.json says",
            "vLLM 0.33 models/commandr.py CohereAttention, cohere2_moe.py; run",
            fatal=False,
        ),
    ),
)

WRAPPERS = (
    "audioflamingo3",
    "cohere2_vision",
    "internvl",
    "internvl_chat",
    "kimi_k25",
    "kimi_vl",
    "lfm2_vl",
    "lighton_ocr",
    "llava",
    "llava_next",
    "llava_onevision",
    "paligemma",
    "qianfan_ocr",
    "qwen2_audio",
)
"""Models of more than text whose text model is held against these. Their classes call init_vllm_registered_model
(models/utils.py) with its config; others, as GOT-OCR 2, vLLM computes by transformers' own class, or refuses as Aya
Vision."""
