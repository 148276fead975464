"""Nemotron-H and Nemotron 3: Mamba-2 mixers, attention, MLPs and experts, each a layer of its own with one norm. Names
in Megatron are those of Megatron-Core's hybrid stack (megatron/core/ssm/mamba_block.py, mamba_mixer.py).

Traps: every block is called `mixer` in Hugging Face, and its norm `norm`; attention has no positions; in_proj's rows
are in five parts of unequal size, which tensor parallelism cuts each by itself; the last norm is `final_norm`. What
clamps a mixer's steps is time_step_limit, in NVIDIA's own code as in Megatron-Core; transformers (5.24) takes
time_step_min for it, which is where steps of a new model begin. A prediction layer (Nemotron 3), which transformers
leaves out, is two blocks: Hugging Face counts them as layers, `mtp.layers.0` and `mtp.layers.1`, and in Megatron they
are the layers of `mtp_model_layer` (Megatron-Bridge's nemotron_h_bridge.py).
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import TIED, Architecture, Either, Row, only_in, renamed, when
from precisionctl.architectures.rearrangements import GAMMA, SAME
from precisionctl.architectures.shared import llama_rows as llama, moe_rows as moe
from precisionctl.architectures.shared.mamba_keys import step_limits
from precisionctl.architectures.shared.mamba_rows import FINAL_NORM, MIXER
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture, shown
from precisionctl.model.model_parts import MOST_LAYERS
from precisionctl.model.model_shape import ModelShape
from precisionctl.model.recurrent_parts import Mamba
from precisionctl.param import COLUMNS, ROWS

_HF = "model.layers.{layer}.mixer."


def _norm(layers: Literal["attention", "mamba", "dense", "moe"], of: str) -> Row:
    name = "model.layers.{layer}.norm.weight"
    return Row(name, f"decoder.layers.{{layer}}.{of}", ("hidden_size",), GAMMA, layers=layers)


def _as_mixer(rows: Iterable[Row]) -> tuple[Row, ...]:
    return renamed(rows, {".self_attn.": ".mixer.", ".mlp.": ".mixer."})


_SHARED_EXPERT = (
    replace(moe.SHARED_EXPERTS[0], names=f"{_HF}shared_experts.up_proj.weight", rearrangement=SAME, parallel=ROWS),
    *_as_mixer(moe.SHARED_EXPERTS[1:]),
)


LATENTS = only_in(
    "moe",
    (
        Row(
            f"{_HF}fc1_latent_proj.weight",
            "decoder.layers.{layer}.mlp.fc1_latent_proj.weight",
            ("moe.latent_size", "hidden_size"),
            present=when("moe.latent_size"),
            gemm=True,
        ),
        Row(
            f"{_HF}fc2_latent_proj.weight",
            "decoder.layers.{layer}.mlp.fc2_latent_proj.weight",
            ("hidden_size", "moe.latent_size"),
            present=when("moe.latent_size"),
            gemm=True,
        ),
    ),
)
"""Around experts, whole on every tensor rank (megatron/core/transformer/moe/moe_layer.py)."""


def _experts(up: str, down: str) -> tuple[Row, ...]:
    return (
        Row(_HF + up, moe.FC1, moe.FC1_SIZES, parallel=ROWS, layers="moe", gemm=True),
        Row(_HF + down, moe.FC2, moe.FC2_SIZES, parallel=COLUMNS, layers="moe", gemm=True),
    )


_ATTENTION = only_in(
    "attention",
    (_norm("attention", "self_attention.linear_qkv.layer_norm_weight"), *_as_mixer((*llama.QKV_LINEAR, *llama.PROJ))),
)
_BESIDE_EXPERTS = (
    _norm("moe", "pre_mlp_layernorm.weight"),
    *_as_mixer((*moe.WIDE_ROUTER, *moe.EXPERT_BIAS)),
    *_SHARED_EXPERT,
    *LATENTS,
)
_ROWS = (
    *renamed(llama.EMBEDDING, {"embed_tokens": "embeddings"}),
    _norm("mamba", "mixer.in_proj.layer_norm_weight"),
    *MIXER,
    *_ATTENTION,
    _norm("dense", "mlp.linear_fc1.layer_norm_weight"),
    *only_in("dense", _as_mixer(llama.UNGATED_MLP)),
    *_BESIDE_EXPERTS,
    *renamed(FINAL_NORM, {"model.norm.": "model.norm_f."}),
)
_NUMBERED = _experts("experts.{expert}.up_proj.weight", "experts.{expert}.down_proj.weight")
_STACKED = _experts("experts.up_proj[{expert}]", "experts.down_proj[{expert}]")


def _predicting(block: int, rows: Iterable[Row]) -> tuple[Row, ...]:
    """Rows of a layer as those of a block of the prediction layer."""
    in_megatron = {"decoder.layers.{layer}.": f"mtp.layers.{{mtp}}.mtp_model_layer.layers.{block}."}
    return renamed(only_in("all", rows), {"model.layers.{layer}.": f"mtp.layers.{block}."}, in_megatron)


_PREDICTION = llama.prediction_layer(
    ("mtp.layers.0.enorm", "mtp.layers.0.hnorm", "mtp.layers.0.eh_proj", "mtp.layers.1.final_layernorm"),
    (*_predicting(0, _ATTENTION), *_predicting(1, (*_BESIDE_EXPERTS, *_NUMBERED))),
)
"""Of which there may be one, made of attention and experts (Mamba.mtp_pattern)."""

_LETTERS = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*", "mlp": "-", "moe": "E"}
"""Of kinds of layers, with the names that transformers first had."""


def _read_layers(config: keys.Config) -> keys.Fields:
    listed, pattern = config.get("layers_block_type"), config.get("hybrid_override_pattern")
    if listed is not None:
        keys.as_list(listed, "layers_block_type", "layers")
        unknown = [kind for kind in listed if not isinstance(kind, str) or kind not in _LETTERS]
        if unknown:
            raise UnknownArchitecture(f"layers of type {shown(unknown[0])}")
        pattern = "".join(_LETTERS[kind] for kind in listed)
    if pattern is None:
        pattern = "ME*-"  # its class's
    if not isinstance(pattern, str) or len(pattern) > MOST_LAYERS:
        raise DamagedCheckpoint(f"hybrid_override_pattern is {shown(pattern)}, not a word")
    fields: dict[str, object] = {"mamba.pattern": pattern, "num_layers": len(pattern)}
    fields["rope_layers"] = (False,) * len(pattern)
    if "E" in pattern:
        fields |= {name: key.read(config)[name] for name, key in _EXPERT_KEYS.items()}
        number = keys.size(config, "n_shared_experts", absent=1)
        if number != 1:
            raise UnknownArchitecture(f"n_shared_experts={number}")
        fields |= {
            "moe.layer_freq": tuple(block == "E" for block in pattern),
            "moe.score_function": "sigmoid",
            "moe.expert_bias": True,
            "moe.group_scores": 2,
        }
    return fields


def _write_layers(model: ModelShape) -> keys.Config:
    if model.mamba is None:
        return {}
    config: dict[str, object] = {"hybrid_override_pattern": model.mamba.pattern, "num_hidden_layers": model.num_layers}
    if model.moe:
        for key in _EXPERT_KEYS.values():
            config |= key.write(model)
    return config


def _read_prediction(config: keys.Config) -> keys.Fields:
    number = keys.one_or_none(config, "num_nextn_predict_layers")
    for key, known in _PREDICTING.items():
        if number and config.get(key) not in known:
            what = f"no nemotron_h known here has {key}={shown(config[key])}"
            raise UnknownArchitecture(what, do="Known is a prediction layer of attention and experts.")
    return {"mtp_num_layers": number}


def _write_prediction(model: ModelShape) -> keys.Config:
    kinds = {"mtp_hybrid_override_pattern": model.mamba.mtp_pattern} if model.mamba and model.mtp_num_layers else {}
    return {"num_nextn_predict_layers": model.mtp_num_layers, **kinds}


_PREDICTING: dict[str, tuple[object, ...]] = {
    "mtp_hybrid_override_pattern": (None, Mamba.mtp_pattern),
    "mtp_layers_block_type": (None, ["attention", "moe"], ["full_attention", "moe"]),
}


_EXPERT_KEYS = {
    key.field: key
    for key in (
        keys.Key("moe.num_experts", "n_routed_experts", 8),
        keys.Key("moe.topk", "num_experts_per_tok", 2),
        keys.Key("moe.ffn_hidden_size", "moe_intermediate_size", 7688),
        keys.Key("moe.shared_ffn_hidden_size", "moe_shared_expert_intermediate_size", 7688),
        keys.Key("moe.num_groups", "n_group", 1),
        keys.Key("moe.group_topk", "topk_group", 1),
        keys.Key("moe.topk_scaling_factor", "routed_scaling_factor", 1.0),
        keys.Key("moe.latent_size", "moe_latent_size", None),
    )
}

_MIXER_KEYS: tuple[keys.Entry, ...] = (
    keys.Key("mamba.num_heads", "mamba_num_heads", 128),
    keys.Key("mamba.head_dim", "mamba_head_dim", 64),
    keys.Key("mamba.num_groups", "n_groups", 8, synonym="mamba_n_groups"),
    keys.Key("mamba.state_dim", "ssm_state_size", 128),
    *(keys.only(key, 4) for key in ("conv_kernel", "mamba_d_conv")),
    *(keys.only(key, True) for key in ("use_conv_bias", "mamba_conv_bias")),
    keys.only("use_bias", False),
    keys.only("mamba_hidden_act", "silu"),
    step_limits("time_step_limit", "mamba_dt_limit"),
)

_KEYS = ("layers_block_type", "hybrid_override_pattern", "n_shared_experts")

ARCHITECTURE = Architecture(
    model_types={"nemotron_h": "NemotronHForCausalLM"},
    behind={"gate": "experts"},
    otherwise_in_transformers="transformers 5.24 takes no step (dt) of a Mamba-2 mixer below config.json's "
    "time_step_min, 0.001 if it says none; NVIDIA's own code, Megatron-Core and `resume` take it as it is.",
    rows=(
        *(
            Either(renamed(published, {"model.": "backbone."}), in_memory=in_memory)
            for published, in_memory in ((_ROWS, _ROWS), (_NUMBERED, _STACKED))
        ),
        *_PREDICTION,
        *llama.OUTPUT,
    ),
    config=(
        keys.Rule(
            (*_KEYS, "num_hidden_layers", *(key.key for key in _EXPERT_KEYS.values())),
            _read_layers,
            _write_layers,
            {field: key.key for field, key in _EXPERT_KEYS.items()},
        ),
        keys.synonyms({"layer_types": "layers_block_type", "num_local_experts": "n_routed_experts"}),
        keys.Key("hidden_size", "hidden_size", 4096),
        keys.Key("ffn_hidden_size", "intermediate_size", 21504),
        keys.Key("max_position_embeddings", "max_position_embeddings", 4096),
        keys.VOCABULARY,
        keys.heads(num_attention_heads=32, num_key_value_heads=8, head_dim=128),
        *_MIXER_KEYS,
        keys.only("mlp_hidden_act", "relu2", "activation", "squared_relu"),
        keys.always("gated_linear_unit", False),
        keys.only("attention_bias", False),
        keys.only("mlp_bias", False),
        keys.only("sliding_window", None),
        keys.only("norm_topk_prob", True),
        keys.Rule(("num_nextn_predict_layers", *_PREDICTING), _read_prediction, _write_prediction),
        keys.only("residual_in_fp32", False),
        keys.Key("norm_epsilon", "layer_norm_epsilon", 1e-5),
        keys.tied(False),
    ),
    aliases=(replace(TIED, of="backbone.embeddings.weight"),),
)
