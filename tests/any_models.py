"""Tiny models of whatever kind transformers registers: its own default config, with small sizes in it."""

import re
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PretrainedConfig,
    PreTrainedModel,
)

SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim", "out_hidden_size"), 128),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "ffn_hidden_size", "block_ff_dim"), 256),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "shared_intermediate_size"), 256),
    **dict.fromkeys(("moe_intermediate_size", "moe_ffn_hidden_size", "shared_expert_intermediate_size"), 128),
    **dict.fromkeys(("expert_ffn_hidden_size", "moe_shared_expert_intermediate_size"), 128),
    **dict.fromkeys(("intermediate_size_mlp",), 256),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "depth", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "n_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads", "n_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads",), 4),
    **dict.fromkeys(("num_key_value_heads", "n_kv_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "attention_head_dim", "d_kv", "global_head_dim", "mamba_head_dim"), 64),
    **dict.fromkeys(("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_groups", "mamba_n_groups", "num_expert_group"), 1),
    **dict.fromkeys(("vocab_size", "padded_vocab_size"), 256),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 128),
    **dict.fromkeys(("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "attention_latent_dim"), 64),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "index_head_dim", "qk_rope_head_dim"), 32),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 32),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "index_n_heads"), 4),
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size"), 16),
    **dict.fromkeys(("mamba_num_heads", "mamba_n_heads"), 8),
    **dict.fromkeys(("image_size",), 28),
    **dict.fromkeys(("patch_size",), 14),
    "index_topk": 4,
    "sliding_window": 8,
    "num_nextn_predict_layers": 0,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 256,
    "num_kv_shared_layers": 0,
    "mamba_d_ssm": 256,
    "mamba_d_head": 16,
    "mamba_expand": 2,
    "time_step_rank": 16,
    "n_shared_experts": 1,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}

_BY_LAYER = (
    *("layer_types", "mlp_layer_types", "layers_block_type", "transformers_version", "dtype", "per_layer_config"),
    *("activation_sparsity_pattern", "num_attention_heads_per_layer", "full_attn_idxs", "no_rope_layers"),
)
"""Keys with an entry for each layer: the config's class makes them anew."""

_AUTO = (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSeq2SeqLM, AutoModelForMaskedLM, AutoModel)


def shrunk(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The same config with small sizes, in the configs within it too."""
    small = {}
    for key, value in config.items():
        if isinstance(value, dict) and key.endswith("_config"):
            small[key] = shrunk(value, changes)
        elif key in changes:
            small[key] = changes[key]
        elif key.endswith("token_id"):
            small[key] = SMALL.get(key, 250 if isinstance(value, int) else value)
        elif key in SMALL:
            small[key] = value if value is None else SMALL[key]
        elif key not in _BY_LAYER:
            small[key] = value
    return small


def make(model_type: str, *, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> PreTrainedModel:
    """A randomly initialised model of a type, with small sizes and these `changes`."""
    torch.manual_seed(0)
    told = AutoConfig.for_model(model_type).to_dict()
    config: PretrainedConfig = AutoConfig.for_model(**{"model_type": model_type} | shrunk(told, changes))
    auto = next(each for each in _AUTO if type(config) in each._model_mapping)
    model: PreTrainedModel = auto.from_config(config)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if re.search(r"norm|ln_|bias$", name):
                tensor.add_(torch.randn_like(tensor) * 0.1)
    return model.to(dtype).eval()


def save(directory: Path, model_type: str, **settings: Any) -> PreTrainedModel:
    """Make a model and let transformers save it."""
    model = make(model_type, **settings)
    model.save_pretrained(directory)
    return model
