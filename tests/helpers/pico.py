"""Models small enough to make on the spot, of real architectures, by transformers itself."""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import kimi_k3  # noqa: F401, which gives transformers a class of it
import ling2  # noqa: F401, and of this
import muse
import pytest
import torch
import transformers
from nemotron_nas import block
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from precisionctl.architectures.families import architecture_of, from_hf_config
from precisionctl.model.model_shape import ModelShape
from precisionctl.model.same_model import TENSORS, used

if "mistral4" in CONFIG_MAPPING:
    # It is published within Mistral 3's wrapper alone, and so has no name of its own there. `register` of transformers
    # 5.17 passes over classes of its own.
    AutoModelForCausalLM._model_mapping._extra_content[CONFIG_MAPPING["mistral4"]] = transformers.Mistral4ForCausalLM

if "hy_v4" in CONFIG_MAPPING:
    # transformers 5.24 turns halves of channels, for which no published weights were trained
    # (architectures/tables/hy_v4.py).
    modeling_hy_v4 = import_module("transformers.models.hy_v4.modeling_hy_v4")
    modeling_hy_v4.apply_rotary_pos_emb = modeling_glm_moe_dsa.apply_rotary_pos_emb_interleave

if "mistral_large4_text" in CONFIG_MAPPING:
    from mistral_large4 import MistralLarge4ForCausalLM

    AutoModelForCausalLM._model_mapping._extra_content[MistralLarge4ForCausalLM.config_class] = MistralLarge4ForCausalLM

if "deepseek_ocr2_text" in CONFIG_MAPPING:
    import deepseek_moe  # noqa: F401, which gives transformers a class of it

if "glm5_next_text" in CONFIG_MAPPING:
    from glm5_next import Glm5NextForCausalLM

    AutoModelForCausalLM._model_mapping._extra_content[Glm5NextForCausalLM.config_class] = Glm5NextForCausalLM

if "step3p5" in CONFIG_MAPPING:
    from step3p5 import Step3p5ForCausalLM

    AutoModelForCausalLM._model_mapping._extra_content[Step3p5ForCausalLM.config_class] = Step3p5ForCausalLM

for _alone in muse.CLASSES:
    AutoModelForCausalLM._model_mapping._extra_content[_alone.config_class] = _alone

SIZES: dict[str, Any] = {
    "vocab_size": 250,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}

NO_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
"""Of config.json: the defaults are tokens beyond so small a vocabulary."""

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

YARN_ROPE = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5],
}

_GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
_NEMOTRON_H = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "ME*-M*",
    "head_dim": 16,
    "mamba_num_heads": 32,
    "mamba_head_dim": 4,
    "n_groups": 4,
    "ssm_state_size": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 48,
    "time_step_min": 1e-30,  # transformers 5.24 clamps steps at it, as nobody else does
    "time_step_floor": 0.5,  # of a new model's steps: most heads forget a token within a dozen
}
_EXPERTS = {
    "num_hidden_layers": 3,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
_LATENTS = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
}
_DEEPSEEK = {**_EXPERTS, **_LATENTS}

DELTA_NET = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "rms_norm_eps": 1e-3,  # a query may read next to nothing, which the norm magnifies, with FP32's rounding of it
}
_KDA = {
    **_LATENTS,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "qk_rope_head_dim": 16,
    "moe_intermediate_size": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 4,
    "rms_norm_eps": 1e-6,  # that of latents' norms, whatever config.json says
}
_OLMO_HYBRID = {**DELTA_NET, "model_type": "olmo_hybrid", "head_dim": 16, "linear_num_value_heads": 8}
"""With as many channels of values as of keys, as transformers 5.24 saves convolutions in thirds."""
_INDEXED = {**_DEEPSEEK, "q_lora_rank": 24, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 128}

_GRANITE = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.25,
    "attention_multiplier": 0.125,
    "logits_scaling": 0.5,
}

_FALCON_H1 = {
    "model_type": "falcon_h1",
    "mamba_d_ssm": 128,
    "mamba_n_heads": 32,
    "mamba_n_groups": 4,
    "mamba_d_state": 8,
}
_GRANITE_MIXERS = {"mamba_n_heads": 32, "mamba_n_groups": 4, "mamba_d_state": 8}

_DEEPSEEK_V4 = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 3,
    "intermediate_size": 32,  # its experts'
    "num_key_value_heads": 1,
    "head_dim": 32,
    "partial_rotary_factor": 0.25,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 16,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 3,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "sliding_window": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "swiglu_limit": 0.5,
    "num_nextn_predict_layers": 0,
    "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama-2": {"num_key_value_heads": 4, "rms_norm_eps": 1e-5},
    "llama-3": {"rope_parameters": LLAMA3_ROPE, "rms_norm_eps": 1e-5},
    "llama-tied": {"tie_word_embeddings": True},
    "llama-attention-bias": {"attention_bias": True},
    "llama-all-biases": {"attention_bias": True, "mlp_bias": True},
    "llama-head-dim": {"head_dim": 32},
    "yi": {"num_key_value_heads": 1, "rope_theta": 5000000.0},
    "mistral": {"model_type": "mistral", "sliding_window": 8},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2-window": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "sliding_window": 8},
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
    },
    "qwen3-moe-scores-of-all": {
        "model_type": "qwen3_moe",
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
    },
    "phi3": {"model_type": "phi3"},
    "phi3-long": {
        "model_type": "phi3",
        "rope_parameters": LONG_ROPE,
        "original_max_position_embeddings": 32,
        "sliding_window": 8,
    },
    "nemotron": {"model_type": "nemotron", "head_dim": 16},
    "nemotron-biases": {"model_type": "nemotron", "head_dim": 16, "attention_bias": True, "mlp_bias": True},
    "jais2": {"model_type": "jais2"},
    "gpt2": {"model_type": "gpt2", **_GPT},
    "gemma2": {
        "model_type": "gemma2",
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 5.0,
        "sliding_window": 8,
        "num_hidden_layers": 3,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "sliding_window": 8,
        "num_hidden_layers": 7,
    },
    "gemma4": {
        "model_type": "gemma4_text",
        "head_dim": 16,
        "global_head_dim": 32,
        "num_key_value_heads": 4,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 5.0,
        "sliding_window": 8,
        "num_hidden_layers": 3,
    },
    "gemma4-moe": {
        "model_type": "gemma4_text",
        "head_dim": 16,
        "global_head_dim": 32,
        "num_key_value_heads": 4,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 8,
        "num_hidden_layers": 3,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 3,
        "moe_intermediate_size": 32,
    },
    "gemma4-small": {
        "model_type": "gemma4_text",
        "head_dim": 16,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 250,
        "final_logit_softcapping": 5.0,
        "sliding_window": 8,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
    },
    "gemma3n": {
        "model_type": "gemma3n_text",
        "head_dim": 16,
        "intermediate_size": [96] * 6,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 200,
        "final_logit_softcapping": 5.0,
        "sliding_window": 8,
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 3,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.9, 0.6, 0.0, 0.0, 0.0, 0.0],
    },
    "gpt-oss": {
        "model_type": "gpt_oss",
        "head_dim": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 8,
        "swiglu_limit": 0.5,
        "rope_parameters": YARN_ROPE | {"truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
    },
    "deepseek": {
        "model_type": "deepseek",
        **_EXPERTS,
        "routed_scaling_factor": 2.0,
    },
    "deepseek-v2": {"model_type": "deepseek_v2", **_DEEPSEEK, "q_lora_rank": None},
    "deepseek-v2-groups": {
        "model_type": "deepseek_v2",
        **_DEEPSEEK,
        "q_lora_rank": 24,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 16.0,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        **_DEEPSEEK,
        "q_lora_rank": 24,
        "n_shared_experts": 1,
        "n_group": 4,
        "topk_group": 2,
        "rope_parameters": YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 0.8},
    },
    "gemma": {"model_type": "gemma", "head_dim": 32},
    "glm": {"model_type": "glm", "head_dim": 16},
    "glm4": {"model_type": "glm4", "head_dim": 16},
    "olmo2": {"model_type": "olmo2"},
    "olmo3": {
        "model_type": "olmo3",
        "num_hidden_layers": 4,
        "sliding_window": 8,
        "rope_scaling": YARN_ROPE | {"beta_fast": 32.0, "beta_slow": 1.0},
    },
    "olmoe": {"model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True},
    "qwen2-moe": {
        "model_type": "qwen2_moe",
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 64,
        "mlp_only_layers": [0],
    },
    "granite": {"model_type": "granite", **_GRANITE, "mlp_bias": True},
    "granite-moe": {"model_type": "granitemoe", **_GRANITE, "num_local_experts": 4},
    "granite-moe-shared": {
        "model_type": "granitemoeshared",
        **_GRANITE,
        "num_local_experts": 4,
        "shared_intermediate_size": 48,
    },
    "granite-swa": {
        "model_type": "granite_swa",
        **_GRANITE,
        "num_hidden_layers": 6,
        "sliding_window": 8,
        "layer_rope_theta": [500000.0, 10000.0, 0, 10000.0, 0, 10000.0],
    },
    "granite-moe-swa": {
        "model_type": "granitemoe_swa",
        **_GRANITE,
        "num_hidden_layers": 3,
        "num_local_experts": 4,
        "shared_intermediate_size": 48,
        "sliding_window": 8,
        "layer_rope_theta": [0, 10000.0, 10000.0],
    },
    "granite-hybrid": {
        "model_type": "granitemoehybrid",
        **_GRANITE,
        **_GRANITE_MIXERS,
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 4,
        "shared_intermediate_size": 48,
    },
    "granite-hybrid-dense": {
        "model_type": "granitemoehybrid",
        **_GRANITE,
        **_GRANITE_MIXERS,
        "layer_types": ["attention", "mamba"],
        "position_embedding_type": "rope",
        "num_local_experts": 0,
        "shared_intermediate_size": 112,
    },
    "bamba": {"model_type": "bamba", **_GRANITE_MIXERS, "num_hidden_layers": 3, "attn_layer_indices": [1]},
    "smollm3": {"model_type": "smollm3", "num_hidden_layers": 4},
    "smollm3-window": {
        "model_type": "smollm3",
        "no_rope_layers": [1, 0],
        "use_sliding_window": True,
        "sliding_window": 8,
    },
    "seed-oss": {"model_type": "seed_oss", "head_dim": 32},
    "cwm": {
        "model_type": "cwm",
        "bos_token_id": 1,
        "num_hidden_layers": 5,
        "head_dim": 16,
        "sliding_window": 8,
    },
    "vaultgemma": {
        "model_type": "vaultgemma",
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 5.0,
        "sliding_window": 8,
        "num_hidden_layers": 3,
    },
    "hyperclovax": {"model_type": "hyperclovax", **_GRANITE, "mlp_bias": True},
    "hyperclovax-without-post-norm": {"model_type": "hyperclovax", "use_post_norm": False},
    "iquestcoder": {"model_type": "iquestcoder", "head_dim": 32},
    "helium": {"model_type": "helium", "head_dim": 16, "attention_bias": True},
    "ministral": {
        "model_type": "ministral",
        "head_dim": 16,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "starcoder2": {"model_type": "starcoder2", "sliding_window": 8},
    "cohere": {"model_type": "cohere", "logit_scale": 0.5},
    "cohere2": {"model_type": "cohere2", "logit_scale": 0.5, "num_hidden_layers": 4, "sliding_window": 8},
    "cohere-compass": {
        "model_type": "cohere_compass_text",
        "logit_scale": 0.5,
        "num_hidden_layers": 4,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 50000.0},
            "full_attention": None,
        },
    },
    "cohere-compass-turning": {
        "model_type": "cohere_compass_text",
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
        },
    },
    "cohere2-moe": {
        "model_type": "cohere2_moe",
        "logit_scale": 0.5,
        "num_hidden_layers": 5,
        "head_dim": 16,
        "sliding_window": 8,
        "first_k_dense_replace": 1,
        "prefix_dense_intermediate_size": 48,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "expert_selection_fn": "sigmoid",
        "norm_topk_prob": False,
        "num_shared_experts": 2,
        "rms_norm_eps": 1e-6,
    },
    "cohere2-moe-layer-norm": {
        "model_type": "cohere2_moe",
        "logit_scale": 0.5,
        "head_dim": 16,
        "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "prefix_dense_sliding_window_pattern": 2,
        "num_experts": 4,
        "num_shared_experts": 1,
        "shared_expert_combination_strategy": "sum",
    },
    "ernie4-5": {"model_type": "ernie4_5", "head_dim": 32},
    "exaone4": {"model_type": "exaone4", "num_hidden_layers": 4, "sliding_window": 8},
    "arcee": {"model_type": "arcee"},
    "minimax-m2": {
        "model_type": "minimax_m2",
        "head_dim": 16,
        "rotary_dim": 8,  # of released files; transformers 5.17 looks for the factor alone
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000000.0, "partial_rotary_factor": 0.5},
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
    },
    "minimax-m3": {
        "model_type": "minimax_m3_vl_text",
        "num_hidden_layers": 3,
        "intermediate_size": 32,  # its experts'
        "dense_intermediate_size": 96,
        "shared_intermediate_size": 48,
        "head_dim": 16,
        "rotary_dim": 8,  # which its class passes over
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000000.0, "partial_rotary_factor": 0.5},
        "swiglu_limit": 0.5,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "dots1": {
        "model_type": "dots1",
        **_EXPERTS,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "sliding_window": 8,
        "max_window_layers": 1,
    },
    "glm4-moe-lite": {
        "model_type": "glm4_moe_lite",
        **{name: size for name, size in _DEEPSEEK.items() if name != "first_k_dense_replace"},
        "q_lora_rank": 24,
        "rms_norm_eps": 1e-6,  # that of latents' norms, whatever config.json says
        "mlp_layer_types": ["dense", "sparse", "dense"],
    },
    "axk1": {
        "model_type": "axk1",
        **_DEEPSEEK,
        "q_lora_rank": 24,
        "n_group": 4,
        "topk_group": 2,
    },
    "axk2": {
        "model_type": "axk2",
        **_INDEXED,
        "gated_norm_rank": 8,
        "rms_norm_eps": 1e-6,  # that of latents' norms, whatever config.json says
    },
    "nanochat": {"model_type": "nanochat"},
    "apertus": {"model_type": "apertus", "rope_parameters": LLAMA3_ROPE},
    "hunyuan": {
        "model_type": "hunyuan_v1_dense",
        "head_dim": 16,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0},
    },
    "hunyuan-moe": {
        "model_type": "hunyuan_v1_moe",
        "head_dim": 16,
        "num_experts": 8,
        "moe_topk": [3, 3],
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0},
    },
    "ministral3": {
        "model_type": "ministral3",
        "head_dim": 16,
        "rope_parameters": YARN_ROPE | {"original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.5},
    },
    "ernie4-5-moe": {
        "model_type": "ernie4_5_moe",
        "num_hidden_layers": 3,
        "moe_intermediate_size": 32,
        "moe_num_experts": 8,
        "moe_k": 3,
    },
    "deepseek-v3.2": {
        "model_type": "deepseek_v32",
        **_INDEXED,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
    },
    "glm-moe-dsa": {
        "model_type": "glm_moe_dsa",
        **_INDEXED,
        "rms_norm_eps": 1e-6,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "indexer_types": ["full", "shared", "full"],
    },
    "hy4": {
        "model_type": "hy_v4",
        **{name: size for name, size in _INDEXED.items() if name != "first_k_dense_replace"},
        "n_shared_experts": 1,
        "indexer_types": ["full", "shared", "full"],
        "hc_mult": 2,
        "hc_magnitude": 1.5,
        "swiglu_limit": 0.5,
        "rms_norm_eps": 1e-6,  # that of latents' norms, whatever config.json says
        "initializer_range": 0.02,
    },
    "internlm3": {"model_type": "internlm3", "head_dim": 16},
    "stablelm": {"model_type": "stablelm", "use_qkv_bias": True},
    "phi": {"model_type": "phi"},
    "gpt-j": {"model_type": "gptj", **_GPT, "rotary_dim": 8},
    "gpt-neox": {"model_type": "gpt_neox", "num_key_value_heads": 4},
    "qwen3-next": {
        "model_type": "qwen3_next",
        **DELTA_NET,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 64,
        "mlp_only_layers": [0],
    },
    "qwen3-5": {"model_type": "qwen3_5_text", **DELTA_NET},
    "qwen3-5-moe": {
        "model_type": "qwen3_5_moe_text",
        **DELTA_NET,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 64,
    },
    "qwen4": {
        "model_type": "qwen4_exp_text",
        **DELTA_NET,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "output_gate_type": "sigmoid",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 64,  # not less than the channels that turn of a head of the class's own size
        "indexer_budget": 6,
        "indexer_compress_ratio": 3,
        "hc_count": 2,
        "hc_lowrank": 16,
        "ple_layer_ids": [1, 3],
        "ple_embed_dim": 32,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 20,
        "make_ngram_vocab_size_divisible_by": 2,
        "split_ngram_parts": 3,
        "eos_token_id": 2,
    },
    "lfm2": {
        "model_type": "lfm2",
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "intermediate_size": 144,
        "block_multiple_of": 32,
        "tie_word_embeddings": False,
    },
    "lfm2-moe": {
        "model_type": "lfm2_moe",
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 1,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "routed_scaling_factor": 1.5,
    },
    "lfm3": {
        "model_type": "lfm3",
        "num_hidden_layers": 5,
        "head_dim": 16,
        "sliding_window": 8,
    },
    "lfm3-plain": {
        "model_type": "lfm3",
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "head_dim": 16,
        "use_sandwich_norm": False,
        "use_attention_gate": False,
        "tie_word_embeddings": False,
    },
    "falcon-h1": {
        **_FALCON_H1,
        "embedding_multiplier": 4.0,
        "lm_head_multiplier": 0.5,
        "key_multiplier": 0.5,
        "attention_in_multiplier": 1.5,
        "attention_out_multiplier": 0.75,
        "ssm_in_multiplier": 1.25,
        "ssm_out_multiplier": 0.5,
        "ssm_multipliers": [0.5, 0.75, 1.25, 1.5, 0.25],
        "mlp_multipliers": [1.5, 0.5],
    },
    "falcon-h1-norm": {
        **_FALCON_H1,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
    },
    "olmo-hybrid": {
        **_OLMO_HYBRID,
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "linear_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": None},
    },
    "olmo-hybrid-rope": {
        **_OLMO_HYBRID,
        "linear_allow_neg_eigval": False,
        "layer_types": ["full_attention", "linear_attention"] * 2,
    },
    "glm4-moe": {"model_type": "glm4_moe", **_EXPERTS, "head_dim": 32, "use_qk_norm": True, "attention_bias": True},
    "solar-open": {"model_type": "solar_open", **_EXPERTS, "head_dim": 16, "n_group": 4, "topk_group": 2},
    "youtu": {"model_type": "youtu", **_LATENTS, "q_lora_rank": 24, "tie_word_embeddings": True},
    "hy-v3": {
        "model_type": "hy_v3",
        "num_hidden_layers": 3,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "num_shared_experts": 2,
        "moe_intermediate_size": 32,
    },
    "exaone-moe": {
        "model_type": "exaone_moe",
        "num_hidden_layers": 4,
        "head_dim": 16,
        "sliding_window": 8,
        "num_experts": 8,
        "num_experts_per_tok": 4,
        "num_shared_experts": 2,
        "moe_intermediate_size": 32,
        "n_group": 4,
        "topk_group": 2,
    },
    "afmoe": {
        "model_type": "afmoe",
        "num_hidden_layers": 4,
        "head_dim": 16,
        "sliding_window": 8,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "route_scale": 2.5,
        "mup_enabled": True,
    },
    "mellum": {
        "model_type": "mellum",
        "num_hidden_layers": 3,
        "head_dim": 16,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "rope_parameters": {
            "full_attention": YARN_ROPE | {"beta_fast": 32.0, "beta_slow": 1.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
        },
    },
    "mistral4": {
        "model_type": "mistral4",
        **_DEEPSEEK,
        "q_lora_rank": 24,
        "rope_parameters": YARN_ROPE
        | {"original_max_position_embeddings": 8, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5},
    },
    "mistral-large-4": {
        "model_type": "mistral_large4_text",
        **{name: size for name, size in _INDEXED.items() if name != "q_lora_rank"},
        "num_hidden_layers": 4,
        "no_rope_layers": [1, 0, 1, 0],
        "kv_source_layers": [0, 1, 0, 1],
        "indexer_types": ["full", "full", "shared", "shared"],
        "final_logit_softcapping": 2.0,
        "rope_parameters": YARN_ROPE | {"original_max_position_embeddings": 8, "attention_factor": 1.0},
    },
    "llama4": {
        "model_type": "llama4_text",
        "num_hidden_layers": 4,
        "head_dim": 16,
        "intermediate_size_mlp": 64,
        "interleave_moe_layer_step": 2,
        "num_local_experts": 4,
        "attention_chunk_size": 8,
        "floor_scale": 4,
        "attn_scale": 0.5,
        "rope_parameters": LLAMA3_ROPE,
    },
    "mimo-v2-flash": {
        "model_type": "mimo_v2_flash",
        "num_hidden_layers": 3,
        "head_dim": 48,
        "v_head_dim": 32,
        "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "dense", "sparse"],
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.334},
        },
    },
    "laguna": {
        "model_type": "laguna",
        "num_hidden_layers": 3,
        "num_attention_heads_per_layer": [4, 8, 8],
        "head_dim": 16,
        "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "moe_routed_scaling_factor": 2.5,
        "rope_parameters": {
            "full_attention": YARN_ROPE | {"beta_fast": 64.0, "beta_slow": 1.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        },
    },
    "laguna-per-element": {
        "model_type": "laguna",
        "head_dim": 16,
        "gating": "per-element",
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "rope_parameters": {"full_attention": YARN_ROPE | {"beta_fast": 64.0, "beta_slow": 1.0}},
    },
    "step3p5": {
        "model_type": "step3p5",
        "pad_token_id": 1,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 32},
        "head_dim": 16,
        "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "rope_theta": [5e6, 1e4, 1e4, 5e6],
        "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5],
        "rope_scaling": {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"},
        "yarn_only_types": ["full_attention"],
        "moe_layers_enum": "1,2,3",
        "moe_num_experts": 8,
        "moe_top_k": 3,
        "moe_intermediate_size": 32,
        "share_expert_dim": 48,
        "moe_router_scaling_factor": 3.0,
        "swiglu_limits": [0.0, 0.0, 0.1, 0.2],
        "swiglu_limits_shared": [0.3, 0.0, 0.0, 0.1],
    },
    "phimoe": {
        "model_type": "phimoe",
        "num_local_experts": 8,
        "attention_bias": True,
        "lm_head_bias": True,
        "sliding_window": 8,
        "router_jitter_noise": 0.4,
    },
    "olmo": {"model_type": "olmo", "clip_qkv": 0.4},
    "flex-olmo": {"model_type": "flex_olmo", "num_experts": 8, "num_experts_per_tok": 3},
    "opt": {"model_type": "opt", "ffn_dim": 96},
    "opt-without-biases": {"model_type": "opt", "ffn_dim": 96, "enable_bias": False, "activation_function": "gelu"},
    "gpt-neo": {
        "model_type": "gpt_neo",
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 8,
    },
    "bloom": {"model_type": "bloom", "num_attention_heads": 6, "hidden_size": 96, "initializer_range": 0.06},
    "mpt": {
        "model_type": "mpt",
        "hidden_size": 96,
        "num_attention_heads": 6,
        "initializer_range": 0.06,
        "attn_config": {"clip_qkv": 0.4},
    },
    "flint": {
        "model_type": "flint",
        "num_hidden_layers": 5,
        "head_dim": 16,
        "sliding_window": 8,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
    },
    "minicpm3": {
        "model_type": "minicpm3",
        **_LATENTS,
        "q_lora_rank": 24,
        "v_head_dim": None,
        "scale_emb": 12.3,  # no BF16 number, as the published 12 is
        "dim_model_base": 128,  # logits twice as large: not tiny
        "rms_norm_eps": 1e-6,
    },
    "minicpm3-plain": {
        "model_type": "minicpm3",
        **_LATENTS,
        "q_lora_rank": None,
        "rms_norm_eps": 1e-6,
        "scale_emb": 1,
        "scale_depth": None,
        "dim_model_base": None,
        "initializer_range": 0.02,
    },
    "falcon": {"model_type": "falcon", "ffn_hidden_size": 96},
    "falcon-40b": {
        "model_type": "falcon",
        "ffn_hidden_size": 96,
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "bias": True,
        "tie_word_embeddings": False,
    },
    "falcon-11b": {
        "model_type": "falcon",
        "ffn_hidden_size": 96,
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "num_ln_in_parallel_attn": 1,
    },
    "gpt-bigcode": {"model_type": "gpt_bigcode", **_GPT, "n_inner": 96},
    "gpt-bigcode-by-head": {"model_type": "gpt_bigcode", **_GPT, "multi_query": False},
    "kolibri1": {
        "model_type": "kolibri1",
        "num_hidden_layers": 5,
        "head_dim": 16,
        "sliding_window": 8,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
    },
    "kimi-linear": {
        "model_type": "kimi_linear",
        **_KDA,
        "linear_attn_config": {
            "kda_layers": [1, 2, 4],
            "full_attn_layers": [3],
            "num_heads": 16,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
        },
    },
    "ling-3": {
        "model_type": "bailing_hybrid",
        **_KDA,
        "head_dim": 32,
        "layer_group_size": 2,
        "n_group": 4,
        "topk_group": 2,
    },
    "kimi-k3": {
        "model_type": "kimi_k3_text",
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "attn_res_block_size": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "num_experts": 8,
        "num_experts_per_token": 4,
        "num_shared_experts": 2,
        "moe_intermediate_size": 32,
        "routed_expert_hidden_size": 32,
        "latent_moe_use_norm": True,
        "num_expert_group": 4,
        "topk_group": 2,
        "rms_norm_eps": 1e-2,  # as other delta nets'
        "linear_attn_config": {
            "kda_layers": [1, 2, 4],
            "full_attn_layers": [3],
            "num_heads": 4,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
            "gate_lower_bound": -5.0,
            "use_full_rank_gate": True,
        },
    },
    "glm-5.3": {
        "model_type": "glm5_next_text",
        **{name: size for name, size in _INDEXED.items() if name != "first_k_dense_replace"},
        "num_hidden_layers": 4,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 0,
        "n_shared_experts": 1,
        "index_topk": 256,
        "index_kpool": 4,
        "layer_types": ["linear_attention", "full_attention", "full_attention", "linear_attention"],
        "indexer_types": ["full", "full", "shared", "full"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "linear_num_heads": 16,
        "linear_head_dim": 16,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 3,
        "swiglu_limit": 0.5,
        "rms_norm_eps": 1e-2,  # as other delta nets'
    },
    "deepseek-v4": _DEEPSEEK_V4,
    "exaone": {"model_type": "exaone"},
    "ling-2": {
        "model_type": "bailing_moe_v2",
        "num_hidden_layers": 3,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "head_dim": 32,
        "partial_rotary_factor": 0.5,
        "routed_scaling_factor": 2.5,
    },
    "sarvam-moe": {
        "model_type": "sarvam_moe",
        **_EXPERTS,
        "n_shared_experts": 1,
        "head_dim": 32,
        "initializer_range": 0.02,
    },
    "sarvam-mla": {
        "model_type": "sarvam_mla",
        **_DEEPSEEK,
        "n_shared_experts": 1,
        "initializer_range": 0.02,
        "rope_parameters": YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "lara-mini": {
        "model_type": "lara_mini",
        **DELTA_NET,
        "num_hidden_layers": 5,
        "head_dim": 16,
        "sliding_window": 8,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "tie_word_embeddings": False,
    },
    "muse-glimmer": {
        "model_type": "muse_glimmer_text",
        "num_hidden_layers": 4,
        "head_dim": 16,
        "sliding_window": 8,
        "output_multiplier": 1.5,
        "qk_scale_factor": 2.0,  # others are rounded where they are multiplied by, here and in transformers
        "final_logit_softcapping": 2.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "muse-spark": {
        "model_type": "muse_spark_text",
        "num_hidden_layers": 4,
        "head_dim": 16,
        "sliding_window": 8,
        "final_logit_softcapping": 2.0,
        "output_multiplier": 2.5,
        "qk_scale_factor": 2.0,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "moe_hidden_size": 48,
    },
    "mamba2": {
        "model_type": "mamba2",
        "num_heads": 32,
        "head_dim": 4,
        "n_groups": 4,
        "state_size": 8,
        "time_step_floor": 0.5,  # as Nemotron-H's
    },
    "jamba": {
        "model_type": "jamba",
        "num_hidden_layers": 3,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "num_experts": 4,
        "mamba_d_state": 8,
        "mamba_dt_rank": 8,
    },
    "mamba": {
        "model_type": "mamba",
        "intermediate_size": 128,
        "state_size": 8,
        "time_step_rank": 8,
    },
    "falcon-mamba": {
        "model_type": "falcon_mamba",
        "expand": 16,  # as its release has it, which also says how many channels there are
        "state_size": 8,
        "mixer_rms_eps": 0.01,
        "tie_word_embeddings": False,
    },
    "nemotron-nas": {
        "model_type": "nemotron-nas",
        "num_hidden_layers": 5,
        "block_configs": [block(1, 2.625), block(None, 9.0), block(2, None), block(None, None), block(1, 5.25)],
        "rope_parameters": LLAMA3_ROPE | {"original_max_position_embeddings": 8192},
        "rms_norm_eps": 1e-5,
    },
    "nemotron-h": _NEMOTRON_H,
    "nemotron-h-latent": _NEMOTRON_H | {"hybrid_override_pattern": "MEE*", "moe_latent_size": 32},
}
"""What each named family is made of, beside SIZES: settings of its config, and `model_type` where that is not Llama."""

ABSENT = {
    name: FAMILIES.pop(name)
    for name, its in [*FAMILIES.items()]
    if its.get("model_type", "llama") not in CONFIG_MAPPING
}
"""Those that the installed transformers does not have: InternLM3 and Kolibri 1 are newer than 5.17."""

ONE_GROUP = {
    **dict.fromkeys(("granite-hybrid", "granite-hybrid-dense", "bamba"), {"mamba_n_groups": 1}),
    "mamba2": {"n_groups": 1},
}
"""Of families whose mixers' norm had one group before transformers 5.23, whatever config.json said."""

BY_HAND = ("kimi-k3", "ling-2", "nemotron-nas")
"""Families of which transformers has no class: tests have one, made of public sources."""

ALSO = {"kimi_k2": "deepseek_v3", "mimo": "qwen2", "bailing_moe": "bailing_moe_v2"}
"""Names of families whose class has another one; transformers does not know these."""


@cache
def shape(family: str) -> ModelShape:
    """What a family's config.json describes, without making the model."""
    return from_hf_config(AutoConfig.for_model(**settings(family)).to_dict())


def settings(family: str) -> dict[str, Any]:
    """Of its config. Copies, as a config's class may write into what it is given (Mistral 4's rotary parameters)."""
    return {"model_type": "llama"} | SIZES | NO_TOKENS | deepcopy(FAMILIES[family])


def config(family: str, **changes: Any) -> dict[str, Any]:
    """Its config.json as transformers writes it, with changes."""
    told: dict[str, Any] = AutoConfig.for_model(**settings(family)).to_dict()
    return told | changes


def first_of_each(kinds: Callable[[str], set[Any]], families: Iterable[str] = FAMILIES) -> list[str]:
    """The families that have one of the `kinds` that none before them has."""
    chosen: list[str] = []
    known: set[Any] = set()
    for family in families:
        if new := kinds(family) - known:
            chosen.append(family)
            known |= new
    return chosen


def representing(
    kinds: Callable[[str], set[Any]], families: Iterable[str] = FAMILIES, *, most: int | None = None
) -> list[Any]:
    """Parameters of a slow test: families. All but the first of each of the `kinds`, and those behind `most` of them,
    are marked `soak`: they run in `make soak` alone."""
    families = list(families)
    first = first_of_each(kinds, families)[:most]
    return [pytest.param(family, marks=[] if family in first else [pytest.mark.soak]) for family in families]


def block_kinds(family: str) -> set[Any]:
    """What a family's layers are made of: what tests are for that train."""
    model = shape(family)
    fields = ("softmax_offset", "normalization", "position_embedding", "gated_linear_unit", "qk_layernorm_over_heads")
    fields += ("pre_layernorms", "post_layernorms", "parallel_residual")
    made = {(name, getattr(model, name)) for name in fields}
    made |= {("a gate of shared experts", model.has("moe.shared_expert_gate"))}
    made |= {("experts", model.moe is not None), ("latent attention", model.mla is not None)}
    made |= {("heads of two sizes", model.global_attention is not None)}
    made |= {("keys of other layers", model.num_kv_shared_layers > 0)}
    made |= {("experts beside attention", model.moe is not None and model.parallel_residual)}
    made |= {("experts with norms of their own", model.moe is not None and model.moe.own_norms)}
    made |= {("compressed keys", model.csa is not None), ("blocks of keys", model.msa is not None)}
    made |= {("embeddings of n-grams", model.ple is not None)}
    made |= {("Mamba-1 mixers", model.mamba is not None and model.mamba.dt_rank is not None)}
    made |= {("layers of several sizes", model.heterogeneous is not None)}
    made |= {("attention residuals", model.attn_res_block_size is not None)}
    made |= {("alternating updates", model.altup is not None)}
    made |= {("decays of channels", model.gdn is not None and model.gdn.kda)}
    made |= {("short convolutions", model.short_conv is not None), ("mixers beside attention", model.parallel_mixers)}
    return made | {("gated delta nets", model.gdn is not None), ("Mamba-2 mixers", model.mamba is not None)}


def mixers(family: str) -> set[Any]:
    """What a family's layers mix tokens with and choose experts by: what keeps something of its own in training."""
    model = shape(family)
    parts = ("moe", "mla", "csa", "msa", "gdn", "mamba", "short_conv")
    return {"attention", *(part for part in parts if getattr(model, part) is not None)}


def rows(family: str) -> set[Any]:
    """The kinds of a family's rows: what becomes of a parameter on its way to Megatron and back."""
    model = shape(family)
    table = [row for row in architecture_of(model.architecture).spelled({}, model) if row.count(model)]
    return {
        (row.megatron, repr(row.rearrangement), row.parallel, len(row.hf), row.present.in_layout("hf", model))
        for row in table
        if row.present.in_layout("megatron", model)
    }


def switches(family: str) -> set[Any]:
    """What a family's model computes otherwise than a plain Llama: fields of ModelShape, and of a choice the value."""
    own, plain = used(shape(family)), used(ModelShape("", *[1] * 9))
    return {
        (name, value["rope_type"] if isinstance(value, dict) else value if isinstance(value, str | bool) else True)
        for name, value in own.items()
        if value is not None and value != plain.get(name) and name not in _SIZES
    } | {(name, getattr(shape(family), name)) for name in TENSORS}


def gemms(family: str) -> set[Any]:
    """The linears that compute in FP8."""
    model = shape(family)
    table = architecture_of(model.architecture).spelled({}, model)
    there = (row for row in table if row.count(model) and row.present.in_layout("megatron", model))
    return {row.megatron for row in there if row.gemm and "{mtp}" not in row.megatron}


def fp8_sizes(family: str) -> dict[str, int]:
    """Settings with which a family's sizes are those that FP8 GEMMs take."""
    latent = shape(family).mla
    if latent is None:
        return {}
    rope = {"qk_rope_head_dim": 16} if latent.qk_pos_emb_head_dim else {}
    return rope | ({"q_lora_rank": 32} if latent.q_lora_rank else {})


_SIZES = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("norm_epsilon", "rotary_base", "max_position_embeddings", "moe.num_experts", "moe.topk", "moe.ffn_hidden_size"),
    *("moe.layer_freq", "mla.kv_lora_rank", "mla.qk_head_dim", "mla.qk_pos_emb_head_dim", "mla.v_head_dim"),
)


def make(family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A randomly initialised model whose biases and norms are random too, so that a mix-up shows."""
    torch.manual_seed(seed)
    if family == "gemma4-small" and "vocab_size" in changes:
        changes = {"vocab_size_per_layer_input": changes["vocab_size"]} | changes
    if family == "gemma3n" and "vocab_size" in changes:
        changes = {"vocab_size_per_layer_input": changes["vocab_size"] - 10} | changes
    config = AutoConfig.for_model(**settings(family) | changes)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.is_floating_point() and re.search(
                r"norm|ln_|bias$|sinks$|layer_scalar$|_hc\.(base|scale)$|hc_(base|scale)$|router\.\w*scale$|router\.gate\.weight$"
                r"|softmax_scaling\.scale$|rotary_emb\.alpha$|ple\.conv1d\.weight$|residual_gate\.gate$|correct_output_scale$",
                name,
            ):
                tensor.add_(torch.randn_like(tensor) * 0.1)
            if name.endswith("tid2eid"):
                tensor.copy_(torch.rand(len(tensor), config.n_routed_experts).argsort(1)[:, : tensor.shape[1]])
            if name.endswith("layer_scalar"):  # a buffer has no master that keeps what BF16 does not
                tensor.copy_(tensor.bfloat16())
            if family.startswith(("gemma3n", "gemma4")) and name.endswith(
                "q_norm.weight"
            ):  # scores are not scaled: softmax would be all or none
                tensor.mul_(0.25)
            elif name.endswith("mlp.gate.weight") and not tensor.is_meta and not tensor.any():
                # transformers 5.17 leaves ERNIE 4.5's at zero
                tensor.normal_(std=config.initializer_range)
            elif name.endswith("A_log"):  # at initial values most heads have forgotten a token by the next one
                tensor.sub_(3 * (tensor != 0))  # and not where Kimi K3's is filled up
    return as_its_config_says(model).to(dtype).eval()


def as_its_config_says(model: PreTrainedModel) -> PreTrainedModel:
    """transformers 5.17 clamps gpt-oss' experts at 7 whatever is written, and where attention is not eager leaves Gemma
    2's caps out."""
    model.set_attn_implementation("eager")
    for experts in model.modules():
        if isinstance(experts, GptOssExperts):
            experts.limit = model.config.swiglu_limit
    return model


def make_and_save(
    directory: Path, family: str = "llama-3", *, max_shard_size: str = "5GB", **changes: Any
) -> PreTrainedModel:
    """Make a model and let transformers save it."""
    model = make(family, **changes)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    if published := PUBLISHED.get(model.config.model_type):
        _with_published_names(directory, published)
    return model


@dataclass
class _Kept:
    """What was saved: by its settings a folder, and the state of PyTorch's generator after the model was made."""

    folder: Path
    saved: dict[str, tuple[Path, torch.Tensor]] = field(default_factory=dict)


_kept: list[_Kept] = []


@contextmanager
def models_kept() -> Iterator[None]:
    """Each model that is saved is made once: to make and save one takes 25 times as long as to copy it, and most tests
    begin with one of a few."""
    with TemporaryDirectory() as folder:
        _kept.append(_Kept(Path(folder)))
        yield
        _kept.pop()


def save(directory: Path, family: str = "llama-3", *, max_shard_size: str = "5GB", **changes: Any) -> None:
    """`make_and_save`, for whoever needs the files alone."""
    if not _kept or (directory.exists() and any(directory.iterdir())):  # of which transformers removes some
        make_and_save(directory, family, max_shard_size=max_shard_size, **changes)
        return
    key = repr((family, max_shard_size, sorted(changes.items())))
    if key not in _kept[-1].saved:
        folder = _kept[-1].folder / str(len(_kept[-1].saved))
        make_and_save(folder, family, max_shard_size=max_shard_size, **changes)
        _kept[-1].saved[key] = folder, torch.get_rng_state()
    folder, state = _kept[-1].saved[key]
    torch.set_rng_state(state)
    shutil.copytree(folder, directory, copy_function=shutil.copy, dirs_exist_ok=True)


def _of_deepseek_v4(name: str) -> str:
    name = name.removeprefix("model.").replace("hc_head.hc_", "hc_head_").replace("embed_tokens.", "embed.")
    return name.replace(".attn.norm.", ".attn.kv_norm.")


def _of_hy_v4(name: str) -> str:
    name = re.sub(r"\.hc_pre\.(hc_\w+_layer)\.", r".\1.hc_pre.", name).replace(".hc_pre.hc_head.", ".hc_head.")
    return name if ".self_attn." in name else name.replace(".linear_gate.", ".gate_proj.")


def _of_olmo_hybrid(name: str) -> str:
    name = name.replace(".attention_layer_norm.", ".input_layernorm.")
    return name.replace(".feedforward_layer_norm.", ".post_attention_layernorm.")


PUBLISHED: dict[str, Callable[[str], str]] = {
    "deepseek_v4": _of_deepseek_v4,
    "hy_v4": _of_hy_v4,
    "olmo_hybrid": _of_olmo_hybrid,
    "kimi_linear": lambda name: re.sub(r"block_sparse_moe(\.(gate|up|down)_proj)", r"mlp\1", name),
    # of its layers those with even numbers have delta attention
    "bailing_hybrid": lambda name: re.sub(r"(layers\.[02]\.attention)\.dense", r"\1.o_proj", name),
}
"""From the names under which transformers 5.24 saves to published ones, which we write, and it reads as well."""


def _with_published_names(directory: Path, published: Callable[[str], str]) -> None:
    for path in directory.glob("*.safetensors"):
        save_file({published(name): tensor for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    for path in directory.glob("*.index.json"):
        index = json.loads(path.read_text())
        index["weight_map"] = {published(name): file for name, file in index["weight_map"].items()}
        path.write_text(json.dumps(index))
