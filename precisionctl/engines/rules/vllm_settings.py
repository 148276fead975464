"""Settings of models that vLLM passes over or refuses: runs of its build for CPUs, 0.32, and the source of 0.33."""

from precisionctl.engines.rules.fixed_settings import (
    BY_LEADING_DENSE,
    BY_NUMBER,
    SHARED_FROM_THE_LAST_TWO,
    FixedSettings,
    dense_layers_first,
    in_every_other_layer,
    in_no_layer_unless_all,
    longrope_by_contexts,
    none_without_layers,
    off_where_every_other_before,
    off_where_some_layers_from,
    on_unless_said_by,
    one_share_of_heads,
    shared_from_the_last_two,
    window_off_by,
    yarn_of_deepseek,
)
from precisionctl.engines.rules.rule import EngineRule

_IN_SILENCE = "its class of this model passes over the setting, in silence"
_NOT_ALL_BIASES = "its class of this model has not all of these biases, and passes over the others in silence"
_NO_HEAD = "its class of this model has no head beside the embedding, and passes over that of the directory"
_ROPE = ("rope_parameters", "rope_scaling")

BY_NUMBER_IN_VLLM = (*BY_LEADING_DENSE, "axk1", "bailing_hybrid")

FIXED = (
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
        ("qwen2", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen3"),
        {"layer_types": in_no_layer_unless_all, "use_sliding_window": off_where_some_layers_from},
        EngineRule("it refuses windows in some layers alone", "vLLM 0.33 models/qwen2.py Qwen2Model; run"),
        refused=True,
    ),
    FixedSettings(
        (
            *("cohere", "cohere2", "cohere2_moe", "falcon_h1", "gemma", "granitemoe", "granitemoe_swa"),
            *("granitemoeshared", "hy_v3", "olmoe", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe"),
            "qwen3_next",
        ),
        {"attention_bias": False},
        EngineRule(
            _NOT_ALL_BIASES,
            "vLLM 0.33 models/commandr.py, cohere2_moe.py, falcon_h1.py, gemma.py, granitemoe.py, hy_v3.py, olmoe.py, "
            "qwen3.py, qwen3_moe.py, qwen3_next.py; run",
        ),
    ),
    FixedSettings(
        ("llama4_text",),
        {"attention_bias": False},
        EngineRule("its class of this model has no biases, and refuses them", "vLLM 0.33 models/llama4.py; run"),
        refused=True,
    ),
    FixedSettings(
        ("llama", "minicpm3", "phi3"),
        {key: longrope_by_contexts(key) for key in _ROPE},
        EngineRule(
            "of longrope it makes the attention_factor of the two contexts, whatever is said of it or of the factor",
            "vLLM 0.33 layers/rotary_embedding/phi3_long_rope_scaled_rope.py; run",
        ),
    ),
    FixedSettings(
        ("axk1", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_k2"),
        {key: yarn_of_deepseek(key) for key in _ROPE},
        EngineRule(
            "it takes any scaling for DeepSeek's YaRN, which rounds the channels between which it blends, makes its "
            "attention_factor of mscale and mscale_all_dim, and takes an attention_factor of 1 for scores without one",
            "vLLM 0.33 models/deepseek_v2.py DeepseekV2MLAAttention, AXK1.py, models/deepseek_v32/attention.py; run, "
            "but the last",
        ),
    ),
    FixedSettings(
        BY_NUMBER_IN_VLLM,
        {"mlp_layer_types": dense_layers_first},
        EngineRule(
            BY_NUMBER,
            "vLLM 0.33 models/deepseek_v2.py, AXK1.py, bailing_moe_linear.py, glm4_moe_lite.py, hy_v3.py, "
            "models/deepseek_v32, models/kimi_k3",
        ),
    ),
    FixedSettings(
        ("ernie4_5", "ernie4_5_moe"),
        {"use_bias": False},
        EngineRule(_NOT_ALL_BIASES, "vLLM 0.33 models/ernie45.py, ernie45_moe.py; run"),
    ),
    FixedSettings(
        (
            *("afmoe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa"),
            *("gpt_oss", "kimi_k2", "mimo_v2_flash", "minimax_m2", "olmoe", "qwen3_next"),
        ),
        {"tie_word_embeddings": False},
        EngineRule(
            "its class of this model has a head of its own, which stays as it was made where there is none",
            "vLLM 0.33 models/afmoe.py, deepseek_v2.py, glm4_moe.py, glm4_moe_lite.py, gpt_oss.py, mimo_v2.py, "
            "minimax_m2.py, olmoe.py, qwen3_next.py, models/deepseek_v32; run",
        ),
        head=False,
    ),
    FixedSettings(
        ("cohere", "cohere2", "cohere2_moe"),
        {"tie_word_embeddings": True},
        EngineRule(_NO_HEAD, "vLLM 0.33 models/commandr.py, cohere2_moe.py; run"),
        head=True,
    ),
    FixedSettings(
        ("cohere_compass_text",),
        {"tie_word_embeddings": True},
        EngineRule("it refuses a head beside the embedding", "vLLM 0.33 models/cohere_compass.py; its loader was run"),
        refused=True,
    ),
    FixedSettings(
        ("gptj",),
        {"tie_word_embeddings": False},
        EngineRule("it refuses the embedding as the head", "vLLM 0.33 models/gpt_j.py; its loader was run"),
        refused=True,
    ),
    FixedSettings(
        ("gemma2",),
        {},
        EngineRule(
            "its class of this model has no head beside the embedding, and refuses one, the same as the embedding or "
            "not",
            "vLLM 0.33 models/gemma2.py Gemma2ForCausalLM; run",
        ),
        head=True,
        refused=True,
    ),
    FixedSettings(
        ("gemma3n_text",),
        {"layer_types": shared_from_the_last_two},
        EngineRule(SHARED_FROM_THE_LAST_TWO, "vLLM 0.33 models/gemma3n.py Gemma3nAttention"),
    ),
    FixedSettings(
        ("lfm2", "lfm2_moe"),
        {"tie_embedding": True, "tie_word_embeddings": on_unless_said_by("tie_embedding")},
        EngineRule(_NO_HEAD, "vLLM 0.33 models/lfm2.py, lfm2_moe.py; run"),
        head=True,
    ),
    FixedSettings(
        ("phimoe",),
        {"router_jitter_noise": 0.01, "attention_bias": True},
        EngineRule(_IN_SILENCE, "vLLM 0.33 models/phimoe.py sparsemixer, PhiMoEAttention; run"),
    ),
    FixedSettings(
        ("phimoe",),
        {"lm_head_bias": False},
        EngineRule(
            "it loads the output layer's bias, and makes logits without it",
            "vLLM 0.33 models/phimoe.py PhiMoEForCausalLM.compute_logits; run",
            fatal=False,
        ),
    ),
    FixedSettings(
        ("exaone4",),
        {"sliding_window": none_without_layers},
        EngineRule(
            "without layers of this kind it turns queries and keys in all, and transformers in none",
            "vLLM 0.33 models/exaone4.py Exaone4Attention; run",
        ),
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
    "cohere_compass",
    "gemma3n",
    "granite_speech",
    "granite_speech_plus",
    "internvl",
    "internvl_chat",
    "kimi_k25",
    "kimi_vl",
    "lfm2_vl",
    "lighton_ocr",
    "llama4",
    "llava",
    "llava_next",
    "llava_onevision",
    "moss_transcribe_diarize",
    "paligemma",
    "qianfan_ocr",
    "qwen2_5_vl",
    "qwen2_audio",
    "qwen2_vl",
    "qwen3_5",
    "qwen3_5_moe",
)
"""Models of more than text whose text model is held against these. vLLM's classes of them

- call init_vllm_registered_model (models/utils.py) with its config, or
- make its class themselves (mllama4.py, qwen3_5.py, cohere_compass.py).

Others vLLM computes by transformers' own class (GOT-OCR 2), or refuses (Aya Vision)."""
