"""Falcon-H1: in each layer a Mamba-2 mixer beside attention, which read one norm, and then an MLP. Names in Megatron
are Megatron-Bridge's (models/falcon_h1/falconh1_bridge.py).

Traps: many factors that are not trained, of which some are lists; the last norm is `final_layernorm`; without
`mamba_rms_norm` a mixer has no norm, whatever `mamba_norm_before_gate` says.
"""

from dataclasses import replace

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture, only_in, renamed, when
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared import llama_rows as llama
from precisionctl.architectures.shared.mamba_keys import mixer_heads, step_limits
from precisionctl.architectures.shared.mamba_rows import FINAL_NORM, MIXER
from precisionctl.errors import UnknownArchitecture
from precisionctl.model.model_shape import ModelShape

_MIXER = tuple(
    replace(row, present=when("mamba.gated_norm")) if row.megatron.endswith(".norm.weight") else row for row in MIXER
)
_ROWS = llama.model_rows(
    *renamed(llama.SEPARATE_NORM, {}, {".input_layernorm.": ".norm."}),
    *renamed(_MIXER, {".mixer.": ".mamba."}, {".mixer.": ".mamba_mixer."}),
    *only_in("attention", (*llama.QKV_LINEAR, *llama.PROJ)),
    *renamed(
        (*llama.MLP_NORM, *llama.MLP), {".mlp.": ".feed_forward.", ".post_attention_layernorm.": ".pre_ff_layernorm."}
    ),
    ending=renamed(FINAL_NORM, {"model.norm.": "model.final_layernorm."}),
)


def _read_norm(config: keys.Config) -> keys.Fields:
    normed = keys.is_on(config, "mamba_rms_norm")
    if normed and keys.is_on(config, "mamba_norm_before_gate", True):
        what = "no falcon_h1 known here has mamba_norm_before_gate=True beside mamba_rms_norm"
        raise UnknownArchitecture(what, do="Its table was made for norms after the gate.")
    return {"mamba.gated_norm": normed}


def _write_norm(model: ModelShape) -> keys.Config:
    normed = model.has("mamba.gated_norm")
    return {"mamba_rms_norm": normed, "mamba_norm_before_gate": not normed}


_FACTORS = {
    "attention_in_multiplier": "attention_in",
    "attention_out_multiplier": "attention_out",
    "key_multiplier": "key",
    "ssm_in_multiplier": "ssm_in",
    "ssm_out_multiplier": "ssm_out",
}
_LISTS = {"ssm_multipliers": ("ssm", 5), "mlp_multipliers": ("mlp", 2)}
_KEYS_OF_FACTORS = {
    f"multipliers.{field}": key for key, field in (*_FACTORS.items(), *((key, each[0]) for key, each in _LISTS.items()))
}


def _read_factors(config: keys.Config) -> keys.Fields:
    fields: dict[str, object] = {f"multipliers.{field}": config.get(key, 1.0) for key, field in _FACTORS.items()}
    for key, (field, number) in _LISTS.items():
        listed = [1.0] * number if config.get(key) is None else config[key]
        fields[f"multipliers.{field}"] = tuple(listed) if isinstance(listed, list | tuple) else listed
    return fields


def _write_factors(model: ModelShape) -> keys.Config:
    if model.multipliers is None:
        return {}
    factors = {key: getattr(model.multipliers, field) for key, field in _FACTORS.items()}
    return factors | {key: list(getattr(model.multipliers, field)) for key, (field, _) in _LISTS.items()}


ARCHITECTURE = Architecture(
    model_types={"falcon_h1": "FalconH1ForCausalLM"},
    rows=_ROWS,
    config=(
        *keys.SIZES,
        keys.heads(num_attention_heads=32, num_key_value_heads=8),
        keys.Rule((), lambda config: {"mamba.pattern": "P" * keys.layers(config)}),
        mixer_heads("mamba_n_heads", "mamba_d_head", "mamba_expand", "auto", "mamba_d_ssm"),
        keys.Key("mamba.num_groups", "mamba_n_groups", 1),
        keys.Key("mamba.state_dim", "mamba_d_state", 256),
        keys.Rule(("mamba_rms_norm", "mamba_norm_before_gate"), _read_norm, _write_norm),
        keys.only("mamba_d_conv", 4),
        keys.only("mamba_conv_bias", True),
        *(keys.only(key, False) for key in ("mamba_proj_bias", "projectors_bias", "attention_bias", "mlp_bias")),
        keys.only("mamba_use_mlp", True),
        keys.only("attn_layer_indices", None),
        step_limits("time_step_limit"),
        keys.SILU,
        keys.Rule((*_FACTORS, *_LISTS), _read_factors, _write_factors, _KEYS_OF_FACTORS),
        keys.Key("embedding_multiplier", "embedding_multiplier", 1.0),
        keys.Key("logit_multiplier", "lm_head_multiplier", 1.0),
        keys.Key("norm_epsilon", "rms_norm_eps", 1e-5),
        rope(),
        keys.tied(False),
    ),
    names_by="Megatron-Bridge",
)
