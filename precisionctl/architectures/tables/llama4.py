"""Llama 4 (text): experts behind a sigmoid, chunks of attention, layers without rotary embeddings.

Traps: an expert's input is multiplied by its score, not what it gives; experts are stored `[in, out]`, gate and up in
one; `intermediate_size` is an expert's; a query of a layer without rotary embeddings grows with its position.
"""

from dataclasses import replace

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.config_layers import listed_layers, numbered_layers
from precisionctl.architectures.param_map import Architecture, Either, renamed
from precisionctl.architectures.rearrangements import Transposed
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared import llama_rows as llama, moe_rows as moe
from precisionctl.architectures.tables.smollm3 import ROPE_LAYERS, with_rope
from precisionctl.model.model_parts import real
from precisionctl.model.model_shape import ModelShape

_NAMES = {"mlp.gate.": "mlp.router.", "shared_experts": "shared_expert"}
_MLP = {"model.layers.{layer}.mlp": "model.layers.{layer}.feed_forward"}

_EXPERTS = Either(
    tuple(replace(row, rearrangement=Transposed(row.rearrangement)) for row in renamed(moe.FUSED, _MLP)),
    other=moe.experts("model.layers.{layer}.feed_forward.experts", "gate_proj", "up_proj", "down_proj"),
    only_read=True,
)
"""In one tensor; one by one where they are codes, as llm-compressor writes them."""

_KINDS = {"chunked_attention": True, "full_attention": False}


def _read_chunks(config: keys.Config) -> keys.Fields:
    chunk, listed = config.get("attention_chunk_size", 8192), listed_layers(config, _KINDS)
    chunked = _with_rope(config) if listed is None else tuple(listed)
    if chunk is None or not any(chunked):
        return {}
    return {"attention_chunk_size": chunk, "window_layers": chunked}


def _write_chunks(model: ModelShape) -> keys.Config:
    chunked = model.window_layers or (model.attention_chunk_size is not None,) * model.num_layers
    kinds = {means: kind for kind, means in _KINDS.items()}
    return {"attention_chunk_size": model.attention_chunk_size, "layer_types": [kinds[each] for each in chunked]}


def _with_rope(config: keys.Config) -> tuple[bool, ...]:
    """An empty list, as in published files, stands for none."""
    listed = config.get("no_rope_layers")
    return with_rope({**config, "no_rope_layers": None if listed == [] else listed})


def _read_query_scaling(config: keys.Config) -> keys.Fields:
    if not keys.is_on(config, "attn_temperature_tuning", True):
        return {}
    return {
        "query_scaling_beta": real(config.get("attn_scale", 0.1), "attn_scale"),
        "query_scaling_floor": keys.size(config, "floor_scale", absent=8192),
    }


def _write_query_scaling(model: ModelShape) -> keys.Config:
    if model.query_scaling_beta is None:
        return {"attn_temperature_tuning": False}
    return {"attn_scale": model.query_scaling_beta, "floor_scale": model.query_scaling_floor}


def _read_experts(config: keys.Config) -> keys.Fields:
    numbers, inner = keys.layers(config), keys.size(config, "intermediate_size", absent=8192)
    listed = config.get("moe_layers")
    if listed is None:
        step = keys.size(config, "interleave_moe_layer_step", absent=1)
        listed = [*range(step - 1, numbers, step)]
    with_experts = numbered_layers(listed, "moe_layers")
    return {
        "moe.layer_freq": tuple(layer in with_experts for layer in range(numbers)),
        "moe.ffn_hidden_size": inner,
        "moe.shared_ffn_hidden_size": inner,
    }


def _write_experts(model: ModelShape) -> keys.Config:
    inner = model.moe.ffn_hidden_size if model.moe else None
    return {
        "moe_layers": [layer for layer in range(model.num_layers) if model.has_experts(layer)],
        "intermediate_size": inner,
    }


_EXPERT_KEYS: tuple[keys.Entry, ...] = (
    keys.Rule(("moe_layers", "interleave_moe_layer_step", "intermediate_size"), _read_experts, _write_experts),
    keys.Key("moe.num_experts", "num_local_experts", 16),
    keys.Key("moe.topk", "num_experts_per_tok", 1),
    keys.always("moe.score_function", "sigmoid"),
    keys.always("moe.probs_on_input", True),
)

ARCHITECTURE = Architecture(
    model_types={"llama4_text": "Llama4ForCausalLM"},
    rows=llama.model_rows(
        *llama.ATTENTION_NORM,
        *llama.ATTENTION,
        *llama.MLP_NORM,
        *renamed(llama.MLP, _MLP),
        *moe.MOE_NORM,
        *renamed(renamed((*moe.ROUTER, *moe.SHARED_EXPERTS), _NAMES), _MLP),
        _EXPERTS,
    ),
    config=(
        *keys.SIZES_BESIDE_MLP,
        keys.Key("ffn_hidden_size", "intermediate_size_mlp", 16384),
        keys.heads(num_key_value_heads=8, head_dim=128),
        keys.ATTENTION_BIAS,
        keys.SILU,
        *_EXPERT_KEYS,
        keys.Key("qk_l2_norm", "use_qk_norm", True),
        keys.Key("norm_epsilon", "rms_norm_eps", 1e-5),
        keys.always("rotary_interleaved", True),
        rope(500000.0),
        keys.Rule(ROPE_LAYERS.keys, lambda config: {"rope_layers": _with_rope(config)}, ROPE_LAYERS.write),
        keys.Rule(("attention_chunk_size", "layer_types", *ROPE_LAYERS.keys), _read_chunks, _write_chunks),
        keys.Rule(("attn_temperature_tuning", "attn_scale", "floor_scale"), _read_query_scaling, _write_query_scaling),
        keys.tied(False),
    ),
)
