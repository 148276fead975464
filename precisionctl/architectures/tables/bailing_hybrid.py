"""Ling 3: Kimi delta attention whose decays have a bound, in every sixth layer latent attention with a gate for each
head, DeepSeek-V3's experts, and a layer of multi-token prediction.

Traps: Ling 2.5 has the same `model_type`, and is another model, which transformers does not have. Published files and
transformers' class call everything about attention otherwise, and what the class saves calls the output projection of
delta attention as that of latent attention. `head_dim` is the size of the heads of delta attention in published files,
and that of rotary embeddings in those that the class saves, which say the other in `linear_head_dim`. The layer of
prediction is behind the decoder's, and transformers neither reads nor writes it.
"""

from typing import Any

from precisionctl.architectures.config_keys import Always, Config, Fields, Key, Only, Rule, is_on, size
from precisionctl.architectures.config_layers import all_but_every, layers_of
from precisionctl.architectures.param_map import Architecture, Either, Row, only_in, renamed
from precisionctl.architectures.rope import KEYS, rope
from precisionctl.architectures.shared.deepseek_keys import SHARED_EXPERT_SIZE, experts_by_list
from precisionctl.architectures.shared.deepseek_rows import LATENT_ATTENTION, ROUTING, prediction
from precisionctl.architectures.shared.delta_net_keys import KINDS, write_layers
from precisionctl.architectures.shared.kda_keys import common
from precisionctl.architectures.shared.kda_rows import either, in_memory, kda
from precisionctl.architectures.shared.llama_rows import (
    EMBEDDING,
    FINAL_NORM,
    LINEAR_GATE,
    MLP,
    MLP_NORM,
    OUTPUT,
    SEPARATE_NORM,
)
from precisionctl.architectures.shared.moe_rows import EXPERT_BIAS, EXPERTS, MOE_NORM
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture, shown
from precisionctl.model.model_shape import ModelShape

_PUBLISHED = {
    "model.embed_tokens.": "model.word_embeddings.",
    ".self_attn.": ".attention.",
    ".e_score_correction_bias": ".expert_bias",
}
_DENSE = {".attention.o_proj.": ".attention.dense."}
_OF_KDA = kda(low_rank=False)
_KDA, _OUT = _OF_KDA[:-1], _OF_KDA[-1:]


def _either(rows: tuple[Row, ...], dense: bool = False) -> tuple[Row | Either, ...]:
    """By the names in published files, or those in memory."""
    published = renamed(rows, _PUBLISHED)
    return either(rows, renamed(published, _DENSE) if dense else published)


_ATTENTION = only_in("attention", (*LATENT_ATTENTION, *LINEAR_GATE))
_BESIDE = tuple(row for row in ROUTING if row not in EXPERT_BIAS)

_SAVED = {
    "linear_num_heads": "num_attention_heads",
    "linear_head_dim": "head_dim",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}
"""Sizes of delta attention in what transformers saves, and where it looks for them in files without these keys."""


_UNLISTED = all_but_every(6, "layer_group_size")


def _read_kda(config: Config) -> Fields:
    with_delta_net = layers_of(KINDS, config, _UNLISTED)
    said = {"head_dim": 128, "short_conv_kernel_size": 4} | dict(config)
    heads, head, taps = (size({first: said.get(then)} | dict(config), first) for first, then in _SAVED.items())
    bounded, bound = is_on(config, "kda_safe_gate", absent=True), config.get("kda_lower_bound", -5.0)
    if bounded and bound is None:
        raise DamagedCheckpoint("kda_lower_bound is None, not a negative number")
    return {
        "gdn.layers": tuple(with_delta_net),
        **dict.fromkeys(("gdn.num_key_heads", "gdn.num_value_heads"), heads),
        **dict.fromkeys(("gdn.key_head_dim", "gdn.value_head_dim"), head),
        "gdn.conv_kernel_dim": taps,
        "gdn.kda": True,
        "gdn.kda_lower_bound": bound if bounded else None,
    }


def _write_kda(model: ModelShape) -> Config:
    if model.gdn is None:
        return {}
    bound = model.gdn.kda_lower_bound
    bounded = {"kda_safe_gate": bound is not None, **({} if bound is None else {"kda_lower_bound": bound})}
    sizes = {"head_dim": model.gdn.key_head_dim, "short_conv_kernel_size": model.gdn.conv_kernel_dim}
    if model.gdn.num_value_heads != model.num_attention_heads:
        sizes["linear_num_heads"] = model.gdn.num_value_heads
    return {**write_layers(model), **sizes, **bounded}


_ROPE = rope(6e6)


def _read_rope(config: Config) -> Fields:
    """Unscaled ones are made for all of `qk_rope_head_dim`, whatever share of a head config.json says."""

    def whole(said: Config) -> dict[str, Any]:
        return {key: value for key, value in said.items() if key != "partial_rotary_factor"}

    inner = config.get("rope_parameters")
    fields = _ROPE.read(whole(config) | ({"rope_parameters": whole(inner)} if isinstance(inner, dict) else {}))
    return fields if fields["rope_scaling"] is None else _ROPE.read(config)


_LIMITS = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")


def _read_limits(config: Config) -> Fields:
    for key in _LIMITS:
        limits = config.get(key) or []
        if not isinstance(limits, list) or any(limits):
            raise UnknownArchitecture(f"no bailing_hybrid known here has {key}={shown(limits)}")
    return {}


ARCHITECTURE = Architecture(
    model_types={"bailing_hybrid": "BailingHybridForCausalLM"},
    rows=(
        *_either(EMBEDDING),
        *SEPARATE_NORM,
        *either(in_memory(_KDA), renamed(_KDA, _PUBLISHED)),
        Either(renamed(_OUT, _PUBLISHED), _OUT, also=renamed(_OUT, _PUBLISHED | _DENSE), second_is="in memory"),
        *_either(_ATTENTION, dense=True),
        *MLP_NORM,
        *MLP,
        *MOE_NORM,
        *_BESIDE,
        *_either(EXPERT_BIAS),
        *EXPERTS,
        *FINAL_NORM,
        *OUTPUT,
        *prediction(
            (*SEPARATE_NORM, *renamed(renamed(_ATTENTION, _PUBLISHED), _DENSE)),
            (*_BESIDE, *renamed(EXPERT_BIAS, _PUBLISHED)),
            last_norm="final_layernorm",
        ),
    ),
    config=(
        *common(published=False, number=512, group_counts=(8, 4), scaling=2.5),
        Only("q_lora_rank", None),
        Always("linear_gate", "sigmoid per head"),
        Only("gated_attention_proj_granularity_type", "head_wise"),
        Rule(
            ("layer_types", "layer_group_size", "head_dim", "short_conv_kernel_size", *_SAVED)
            + ("kda_safe_gate", "kda_lower_bound"),
            _read_kda,
            _write_kda,
        ),
        Only("no_kda_lora", True),
        Only("use_kda_lora", False),
        experts_by_list(dense=2, key="first_k_dense_replace"),
        SHARED_EXPERT_SIZE,
        Rule(_LIMITS, _read_limits),
        Only("group_norm_size", 1),
        Only("use_mla_nope", False),
        Only("use_qk_norm", True),
        Only("rope_interleave", True),
        Rule(KEYS, _read_rope, _ROPE.write),
        Key("norm_epsilon", "rms_norm_eps", 1e-6),
        Key("mtp_num_layers", "num_nextn_predict_layers", 1, synonym="num_mtp_layers"),
        Only("mtp_use_kda", False),
    ),
    aliases=(),
)
