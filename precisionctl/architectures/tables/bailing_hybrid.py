"""Ling 3: Kimi delta attention whose decays have a bound, in every sixth layer latent attention with a gate for each
head, DeepSeek-V3's experts, and a layer of multi-token prediction.

Traps: Ling 2.5 has the same `model_type`, and is another model, which transformers does not have. Published files and
transformers' class call everything about attention otherwise, and what the class saves calls the output projection of
delta attention as that of latent attention. `head_dim` is the size of the heads of delta attention in published files,
and that of rotary embeddings in those that the class saves, which say the other in `linear_head_dim`. The layer of
prediction is behind the decoder's, and transformers neither reads nor writes it.
"""

from typing import Any

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.config_layers import all_but_every, layers_of, write_layer_types
from precisionctl.architectures.param_map import Architecture, Either, Row, only_in, published_or_in_memory, renamed
from precisionctl.architectures.rope import KEYS, rope
from precisionctl.architectures.shared import deepseek_keys, deepseek_rows, llama_rows as llama, moe_rows as moe
from precisionctl.architectures.shared.delta_net_keys import KINDS
from precisionctl.architectures.shared.kda_keys import common
from precisionctl.architectures.shared.kda_rows import in_memory, kda
from precisionctl.errors import UnknownArchitecture, shown
from precisionctl.model.model_parts import check_negative
from precisionctl.model.model_shape import ModelShape

_PUBLISHED = {
    "model.embed_tokens.": "model.word_embeddings.",
    ".self_attn.": ".attention.",
    ".e_score_correction_bias": ".expert_bias",
}
_DENSE = {".attention.o_proj.": ".attention.dense."}
_OF_KDA = kda(low_rank=False)
_KDA, _OUT = _OF_KDA[:-1], _OF_KDA[-1:]


def _by_published_names(rows: tuple[Row, ...], dense: bool = False) -> tuple[Row | Either, ...]:
    """Rows by their names in published files, or those in memory."""
    published = renamed(rows, _PUBLISHED)
    return published_or_in_memory(rows, renamed(published, _DENSE) if dense else published)


_ATTENTION = only_in("attention", (*deepseek_rows.LATENT_ATTENTION, *llama.LINEAR_GATE))
_BESIDE = tuple(row for row in deepseek_rows.ROUTING if row not in moe.EXPERT_BIAS)

_SAVED = {
    "linear_num_heads": "num_attention_heads",
    "linear_head_dim": "head_dim",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}
"""Sizes of delta attention in what transformers saves, and where it looks for them in files without these keys."""


_UNLISTED = all_but_every(6, "layer_group_size")


def _read_kda(config: keys.Config) -> keys.Fields:
    with_delta_net = layers_of(KINDS, config, _UNLISTED)
    said = {"head_dim": 128, "short_conv_kernel_size": 4} | dict(config)
    heads, head, taps = (keys.size(config, first, absent=said.get(then)) for first, then in _SAVED.items())
    bounded, bound = keys.is_on(config, "kda_safe_gate", absent=True), config.get("kda_lower_bound", -5.0)
    if bounded:
        check_negative(bound, "kda_lower_bound")
    return {
        "gdn.layers": tuple(with_delta_net),
        **dict.fromkeys(("gdn.num_key_heads", "gdn.num_value_heads"), heads),
        **dict.fromkeys(("gdn.key_head_dim", "gdn.value_head_dim"), head),
        "gdn.conv_kernel_dim": taps,
        "gdn.kda": True,
        "gdn.kda_lower_bound": bound if bounded else None,
    }


def _write_kda(model: ModelShape) -> keys.Config:
    if model.gdn is None:
        return {}
    bound = model.gdn.kda_lower_bound
    bounded = {"kda_safe_gate": bound is not None, **({} if bound is None else {"kda_lower_bound": bound})}
    sizes = {"head_dim": model.gdn.key_head_dim, "short_conv_kernel_size": model.gdn.conv_kernel_dim}
    if model.gdn.num_value_heads != model.num_attention_heads:
        sizes["linear_num_heads"] = model.gdn.num_value_heads
    return {**write_layer_types(model), **sizes, **bounded}


_ROPE = rope(6e6)


def _read_rope(config: keys.Config) -> keys.Fields:
    """Unscaled ones are made for all of `qk_rope_head_dim`, whatever share of a head config.json says."""

    def whole(said: keys.Config) -> dict[str, Any]:
        return {key: value for key, value in said.items() if key != "partial_rotary_factor"}

    config = {"max_position_embeddings": 262144, **config}  # its class scales before it looks at the other word for it
    inner = config.get("rope_parameters")
    fields = _ROPE.read(whole(config) | ({"rope_parameters": whole(inner)} if isinstance(inner, dict) else {}))
    return fields if fields["rope_scaling"] is None else _ROPE.read(config)


_LIMITS = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")


def _read_limits(config: keys.Config) -> keys.Fields:
    for key in _LIMITS:
        limits = config.get(key) or []
        if not isinstance(limits, list) or any(limits):
            raise UnknownArchitecture(f"no bailing_hybrid known here has {key}={shown(limits)}")
    return {}


ARCHITECTURE = Architecture(
    model_types={"bailing_hybrid": "BailingHybridForCausalLM"},
    rows=(
        *_by_published_names(llama.EMBEDDING),
        *llama.SEPARATE_NORM,
        *published_or_in_memory(in_memory(_KDA), renamed(_KDA, _PUBLISHED)),
        Either(renamed(_OUT, _PUBLISHED), in_memory=_OUT, other=renamed(_OUT, _PUBLISHED | _DENSE)),
        *_by_published_names(_ATTENTION, dense=True),
        *llama.MLP_NORM,
        *llama.MLP,
        *moe.MOE_NORM,
        *_BESIDE,
        *_by_published_names(moe.EXPERT_BIAS),
        *moe.EXPERTS,
        *llama.FINAL_NORM,
        *llama.OUTPUT,
        *deepseek_rows.prediction(
            (*llama.SEPARATE_NORM, *renamed(renamed(_ATTENTION, _PUBLISHED), _DENSE)),
            (*_BESIDE, *renamed(moe.EXPERT_BIAS, _PUBLISHED)),
            last_norm="final_layernorm",
        ),
    ),
    config=(
        *common(published=False, number=512, group_counts=(8, 4), scaling=2.5),
        keys.only("q_lora_rank", None),
        keys.always("linear_gate", "sigmoid per head"),
        keys.only("gated_attention_proj_granularity_type", "head_wise"),
        keys.Rule(
            ("layer_types", "layer_group_size", "head_dim", "short_conv_kernel_size", *_SAVED)
            + ("kda_safe_gate", "kda_lower_bound"),
            _read_kda,
            _write_kda,
        ),
        keys.only("no_kda_lora", True),
        keys.only("use_kda_lora", False),
        deepseek_keys.experts_by_list(dense=2, key="first_k_dense_replace"),
        deepseek_keys.SHARED_EXPERT_SIZE,
        keys.Rule(_LIMITS, _read_limits),
        keys.only("group_norm_size", 1),
        keys.only("use_mla_nope", False),
        keys.only("use_qk_norm", True),
        keys.only("rope_interleave", True),
        keys.Rule(KEYS, _read_rope, _ROPE.write),
        keys.Key("norm_epsilon", "rms_norm_eps", 1e-6),
        keys.Key("mtp_num_layers", "num_nextn_predict_layers", 1, synonym="num_mtp_layers"),
        keys.only("mtp_use_kda", False),
    ),
    aliases=(),
)
