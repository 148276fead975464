"""Gemma 4 (text): Gemma 3 whose layers without a window have heads of their own size. In the larger models, the dense
31B and the 26B with experts, they have another number of heads too, and values that are their keys; in the smaller
ones, E2B and E4B, tokens have an embedding for each layer, and the last layers read keys and values of earlier ones.

Traps: norms store their factor, not less one as in earlier Gemmas; scores are not scaled; a value is the key before its
norm and rotary embeddings, and has a norm without weights; the last layer has no window whatever is listed; rotary
embeddings are `proportional`, of all pairs of a head, whose last ones have a frequency of 0; a layer's factor is a
buffer. Experts are beside the MLP of each layer, not in its place: router, experts and MLP each have a norm before
them, the last two one after, and so has their sum; the weights of the chosen experts sum to 1 before each is multiplied
by a number of its expert. Layers that share keys and values have projections and a norm of their own in published files
of E2B and E4B, but not of their QAT, and nothing reads them: transformers neither loads nor saves them. transformers
5.24 saves what single layers have otherwise as `per_layer_config`, where published files have `global_head_dim` and
`num_global_key_value_heads`, which counts only where keys are values.
"""

from dataclasses import replace
from typing import Any

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.config_layers import (
    all_but_every,
    layers_in_window,
    sizes_by_layer,
    window_fields,
    write_window,
)
from precisionctl.architectures.param_map import Architecture, Either, Row, only_in, renamed, when
from precisionctl.architectures.rearrangements import GAMMA
from precisionctl.architectures.rope import rope_by_kind
from precisionctl.architectures.shared import llama_rows as llama, moe_rows as moe
from precisionctl.architectures.shared.gemma_rows import KEY, PER_LAYER, QKV, QUERY, sharing_attention
from precisionctl.architectures.tables.gemma2 import SCALED_EMBEDDING
from precisionctl.errors import UnknownArchitecture, shown
from precisionctl.model.model_shape import ModelShape

_ABSENT = {"num_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512}
"""What its class takes for keys that are not there."""

_ROPE = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}

_GLOBAL = (
    replace(QKV, present=when("global_values")),
    replace(QKV, names=(QUERY, KEY), present=when("global_keys_are_values")),
)

_WIDE = {"fc1_size": "kv_shared_fc1_size", "ffn_hidden_size": "kv_shared_ffn_hidden_size"}
_AFTER_ATTENTION = (
    *(row for row in llama.AFTER_ATTENTION if row not in llama.MLP),
    *(replace(row, shares_kv=False) for row in llama.MLP),
    *(replace(row, shares_kv=True, sizes=tuple(_WIDE.get(str(size), size) for size in row.sizes)) for row in llama.MLP),
)
"""With an MLP of another size where layers share keys and values."""

_LAYER_SCALAR = Row("model.layers.{layer}.layer_scalar", "decoder.layers.{layer}.layer_scalar", (1,))


def _norm(hf: str, megatron: str) -> Row:
    """One of the norms of a layer with experts."""
    hf, megatron = f"model.layers.{{layer}}.{hf}.weight", f"decoder.layers.{{layer}}.mlp.{megatron}"
    return Row(hf, megatron, ("hidden_size",), GAMMA, layers="moe")


_BESIDE_EXPERTS = (
    _norm("pre_feedforward_layernorm", "shared_experts.linear_fc1.layer_norm_weight"),
    *renamed(moe.SHARED_EXPERTS, {"mlp.shared_experts": "mlp"}),
    _norm("post_feedforward_layernorm_1", "shared_experts.linear_fc2.post_layernorm.weight"),
)
"""The MLP, which is Megatron's shared experts where there are experts beside it."""

_EXPERTS: tuple[Row | Either, ...] = (
    *renamed(moe.ROUTER, {"mlp.gate": "router.proj"}),
    Row("model.layers.{layer}.router.scale", "decoder.layers.{layer}.mlp.router.scale", ("hidden_size",), layers="moe"),
    Row(
        "model.layers.{layer}.router.per_expert_scale",
        "decoder.layers.{layer}.mlp.router.per_expert_scale",
        ("moe.num_experts",),
        layers="moe",
    ),
    _norm("pre_feedforward_layernorm_2", "pre_moe_layernorm.weight"),
    *(each.renamed({"mlp.experts": "experts"}) for each in moe.FUSED_EXPERTS),
    _norm("post_feedforward_layernorm_2", "post_moe_layernorm.weight"),
    *moe.POST_MOE_NORM,
)
"""The router, and experts: in one tensor; one by one where they are codes, as llm-compressor writes them and engines
look for them (vLLM models/gemma4.py and SGLang models/gemma4_causal.py, load_weights)."""


def _windows(config: keys.Config) -> list[bool]:
    """Whether each layer has the window. Its class lets the last one have none."""
    return [*layers_in_window(config, all_but_every(6))[:-1], False]


def _read_experts(config: keys.Config) -> keys.Fields:
    if not keys.is_on(config, "enable_moe_block"):
        return {}
    if config.get("use_double_wide_mlp") and config.get("num_kv_shared_layers"):
        what = f"no {config.get('model_type')} known here has use_double_wide_mlp=True beside experts"
        raise UnknownArchitecture(what)
    numbers = {key: keys.size(config, key) for key in ("num_experts", "top_k_experts", "moe_intermediate_size")}
    return {
        "moe.num_experts": numbers["num_experts"],
        "moe.topk": numbers["top_k_experts"],
        "moe.ffn_hidden_size": numbers["moe_intermediate_size"],
        "moe.shared_ffn_hidden_size": keys.size(config, "intermediate_size"),
        "moe.layer_freq": (True,) * keys.layers(config),
        "moe.own_norms": True,
    }


def _write_experts(model: ModelShape) -> keys.Config:
    if model.moe is None:
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": model.moe.num_experts,
        "top_k_experts": model.moe.topk,
        "moe_intermediate_size": model.moe.ffn_hidden_size,
    }


def _read_heads(config: keys.Config) -> keys.Fields:
    sizes = {**_ABSENT, **config}
    keys_are_values = keys.is_on(config, "attention_k_eq_v")
    own: dict[str, Any]  # what layers without a window have otherwise than the others
    if "per_layer_config" in config:
        windows, by_layer = _windows(config), sizes_by_layer(config)
        own = by_layer.get(str(len(windows) - 1), {})
        expected = {str(layer): own for layer, in_window in enumerate(windows) if own and not in_window}
        if by_layer != expected or not own.keys() <= {"head_dim", "num_key_value_heads"}:
            what = f"per_layer_config={shown(config['per_layer_config'])} is not one number and size of heads"
            raise UnknownArchitecture(f"{what} for all layers without a window")
    else:
        own = {"head_dim": keys.size(sizes, "global_head_dim")}
        if keys_are_values and sizes.get("num_global_key_value_heads") is not None:
            own["num_key_value_heads"] = keys.size(sizes, "num_global_key_value_heads")
    groups, head = (keys.size(sizes, key) for key in ("num_key_value_heads", "head_dim"))
    return {
        "num_attention_heads": keys.size(config, "num_attention_heads"),
        "num_query_groups": groups,
        "kv_channels": head,
        "global_attention.num_query_groups": own.get("num_key_value_heads", groups),
        "global_attention.kv_channels": own.get("head_dim", head),
        "global_attention.keys_are_values": keys_are_values,
    }


def _write_heads(model: ModelShape) -> keys.Config:
    without_window = model.attention_of(in_window=False)
    return {
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "head_dim": model.kv_channels,
        "num_global_key_value_heads": without_window.num_query_groups,
        "global_head_dim": without_window.kv_channels,
        "attention_k_eq_v": without_window.keys_are_values,
    }


def _read_per_layer(config: keys.Config) -> keys.Fields:
    channels = keys.count(config, "hidden_size_per_layer_input", absent=256)
    if not channels:
        return {}
    known, tokens = keys.size(config, "vocab_size"), config.get("vocab_size_per_layer_input", 262144)
    if tokens != known:
        what = f"no {config.get('model_type')} known here has vocab_size_per_layer_input={shown(tokens)}"
        raise UnknownArchitecture(what, do=f"Its table was made for vocab_size, which is {known}.")
    return {"per_layer_embed_dim": channels}


def _write_per_layer(model: ModelShape) -> keys.Config:
    if model.per_layer_embed_dim is None:
        return {"hidden_size_per_layer_input": 0}
    return {
        "hidden_size_per_layer_input": model.per_layer_embed_dim,
        "vocab_size_per_layer_input": model.vocab_size,
    }


ARCHITECTURE = Architecture(
    model_types={"gemma4_text": "Gemma4ForCausalLM"},
    behind={"q_norm": "q_proj", "k_norm": "q_norm"},
    rows=llama.model_rows(
        *llama.ATTENTION_NORM,
        *only_in("windowed", sharing_attention(QKV)),
        *only_in("global", sharing_attention(*_GLOBAL)),
        *_AFTER_ATTENTION,
        *_BESIDE_EXPERTS,
        *_EXPERTS,
        *PER_LAYER,
        _LAYER_SCALAR,
    ),
    config=(
        *keys.SIZES,
        keys.Rule(
            (
                *("num_attention_heads", "num_key_value_heads", "head_dim", "global_head_dim"),
                *("num_global_key_value_heads", "per_layer_config", "attention_k_eq_v"),
            ),
            _read_heads,
            _write_heads,
        ),
        keys.Rule(("hidden_size_per_layer_input", "vocab_size_per_layer_input"), _read_per_layer, _write_per_layer),
        keys.Key("num_kv_shared_layers", "num_kv_shared_layers", 0),
        keys.Key("use_double_wide_mlp", "use_double_wide_mlp", False),
        keys.Rule(
            ("enable_moe_block", "num_experts", "top_k_experts", "moe_intermediate_size"), _read_experts, _write_experts
        ),
        keys.only("attention_bias", False),
        keys.only("use_bidirectional_attention", "vision"),
        SCALED_EMBEDDING,
        keys.activation("hidden_activation", keys.GELU_TANH, "gelu_pytorch_tanh"),
        keys.always("qk_layernorm", True),
        keys.always("v_l2_norm", True),
        keys.always("query_pre_attn_scalar", 1.0),
        keys.always("post_layernorms", True),
        keys.always("layer_scalar", True),
        keys.Key("final_logit_softcapping", "final_logit_softcapping", None),
        keys.Key("norm_epsilon", "rms_norm_eps", 1e-6),
        rope_by_kind(1e6, 1e4, absent=_ROPE),
        keys.Rule(
            ("sliding_window", "layer_types"),
            lambda config: window_fields(config, _windows(config), 512),
            write_window,
        ),
        keys.tied(True),
    ),
    names_by="this project",
)
