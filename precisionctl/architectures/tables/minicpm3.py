"""MiniCPM3 (OpenBMB): DeepSeek's latent attention before Llama's MLP; embedding, residual and logits are multiplied.

Traps: the two numbers of a rotary pair are in two halves here, and neighbours in Megatron's latent attention; the
published config.json says no `v_head_dim`; `scale_depth` is divided by the root of the number of layers, and logits by
`hidden_size / dim_model_base`; one that is null multiplies by 1.
"""

from dataclasses import replace

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.head_rearrangements import KEY_PAIRS, QUERY_PAIRS
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared import deepseek_keys, deepseek_rows, llama_rows as llama
from precisionctl.model.model_parts import real
from precisionctl.model.model_shape import ModelShape

_LATENT = deepseek_keys.latent_attention(768)
_LATENT_KEYS = tuple(key for entry in _LATENT for key in entry.keys)
_KEYS_OF_LATENTS = {entry.field: entry.key for entry in _LATENT if isinstance(entry, keys.Key)}
_PAIRS = {
    "linear_q_proj.weight": QUERY_PAIRS,
    "linear_q_up_proj.weight": QUERY_PAIRS,
    "linear_kv_down_proj.weight": KEY_PAIRS,
}
_ATTENTION = tuple(
    replace(row, rearrangement=_PAIRS.get(row.megatron.partition(".self_attention.")[2], row.rearrangement))
    for row in deepseek_rows.ATTENTION
)


def _read_latents(config: keys.Config) -> keys.Fields:
    if config.get("v_head_dim") is None:
        heads = keys.size(config, "num_attention_heads")
        config = {**config, "v_head_dim": keys.size(config, "hidden_size") // heads}
    return {name: value for entry in _LATENT for name, value in entry.read(config).items()}


def _read_scales(config: keys.Config) -> keys.Fields:
    said = {"scale_depth": 1.4, "dim_model_base": 256} | dict(config)
    depth, root = said["scale_depth"], keys.layers(config) ** 0.5
    base = "hidden_size" if said["dim_model_base"] is None else "dim_model_base"
    return {
        "residual_multiplier": 1.0 if depth is None else real(depth, "scale_depth") / root,
        "logits_scaling": keys.size(config, "hidden_size") / keys.size(said, base),
    }


def _write_scales(model: ModelShape) -> keys.Config:
    depth = model.residual_multiplier * model.num_layers**0.5
    return {
        "scale_depth": None if model.residual_multiplier == 1 else round(depth, 12),  # 1.4, as it was said
        "dim_model_base": round(model.hidden_size / model.logits_scaling),
    }


ARCHITECTURE = Architecture(
    model_types={"minicpm3": "MiniCPM3ForCausalLM"},
    rows=llama.model_rows(*_ATTENTION, *llama.MLP_NORM, *llama.MLP),
    config=(
        keys.Rule(
            _LATENT_KEYS,
            _read_latents,
            lambda model: {key: value for entry in _LATENT for key, value in entry.write(model).items()},
            _KEYS_OF_LATENTS,
        ),
        keys.only("mlp_bias", False),
        keys.Key("embedding_multiplier", "scale_emb", 12),
        keys.always("rounded_embedding_multiplier", True),
        keys.Rule(("scale_depth", "dim_model_base"), _read_scales, _write_scales),
        keys.Key("norm_epsilon", "rms_norm_eps", 1e-5),
        rope(),
        keys.tied(True),
    ),
)
