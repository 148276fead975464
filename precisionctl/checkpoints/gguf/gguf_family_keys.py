"""What the metadata of a GGUF file say of one family alone."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from precisionctl.architectures.config_keys import Fields
from precisionctl.checkpoints.gguf.gguf_keys import (
    CONTEXT,
    EPSILON,
    HEAD_SIZE,
    HEADS,
    LAYERS,
    MLP,
    VOCABULARY,
    WIDTH,
    WINDOW,
    WINDOWS,
    GgufKey,
    GgufRule,
    Said,
    every,
    head_size,
    number,
    refused,
    value_of,
)
from precisionctl.checkpoints.gguf.gguf_metadata import Described
from precisionctl.checkpoints.gguf.gguf_rope import TURNED, UNUSUAL_ROPE
from precisionctl.errors import UnknownArchitecture
from precisionctl.model_parts import real
from precisionctl.model_shape import ModelShape

# Granite


def _read_score_scale(file: Described) -> Fields:
    scale = file.number("attention.scale", None) or head_size(file) ** -0.5
    return {"query_pre_attn_scalar": real(scale, f"{file.architecture}.attention.scale", file.where) ** -2}


def _write_score_scale(model: ModelShape) -> Said:
    return {"attention.scale": float((model.query_pre_attn_scalar or model.kv_channels) ** -0.5)}


def _read_switch(file: Described) -> Fields:
    """llama.cpp takes the key for a switch of rotary embeddings. Of Granites 4 without mixers the converter writes keys
    of these too."""
    file.expect("rope.scaling.finetuned", True)
    for key in ("conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank"):
        file.said(f"ssm.{key}")
    if not file.count("expert_count", 0):
        for key in ("expert_used_count", "expert_shared_feed_forward_length"):
            file.said(key)
    return {}


SWITCH = GgufRule((), _read_switch)
MULTIPLIERS = (
    VOCABULARY,
    TURNED,
    GgufRule(("query_pre_attn_scalar",), _read_score_scale, _write_score_scale),
    number("embedding_multiplier", "embedding_scale", 1.0),
    number("residual_multiplier", "residual_scale", 1.0),
    number("logits_scaling", "logit_scale"),
)

# Gemma


def scored_as_gemma(layers_of_27b: int) -> Callable[[Fields], float]:
    """The `query_pre_attn_scalar`: in the largest model hidden_size / heads."""

    def scalar(fields: Fields) -> float:
        largest = fields["num_layers"] == layers_of_27b
        found: float = fields["hidden_size"] // fields["num_attention_heads"] if largest else fields["kv_channels"]
        return found

    return scalar


def _read_window_of_gemma3(file: Described) -> Fields:
    if not file.count("attention.sliding_window", 0):
        raise UnknownArchitecture("a Gemma 3 without a window", where=file.where)
    return WINDOW.read(file)


WINDOW_OF_GEMMA3 = GgufRule(WINDOW.fields, _read_window_of_gemma3, WINDOW.write)
WINDOW_OF_PHI3 = GgufRule(
    WINDOW.fields,
    lambda file: {"sliding_window": file.count("attention.sliding_window", 0) or None},
    lambda model: {"attention.sliding_window": model.sliding_window or 0},
)

_LAYERS_OF_EXAONE4_WITH_WINDOWS = 64


def _exaone4_windows(fields: Fields) -> tuple[bool, ...] | None:
    return every(4)(fields) if fields["num_layers"] == _LAYERS_OF_EXAONE4_WITH_WINDOWS else None


def _read_window_of_exaone4(file: Described) -> Fields:
    computed = _exaone4_windows({"num_layers": file.count("block_count")})
    file.said("attention.sliding_window_pattern")  # by which llama.cpp does not go
    window = file.count("attention.sliding_window", 4096 if computed else None)
    return {"sliding_window": window if computed else None, "window_layers": computed, "rope_layers": computed}


def _write_window_of_exaone4(model: ModelShape) -> Said:
    computed = _exaone4_windows(vars(model))
    if model.sliding_window is None and computed is None and model.rope_layers is None:
        return {}
    if computed is None or (model.window_layers, model.rope_layers) != (computed, computed) or not model.sliding_window:
        raise refused(model, f"of {model.num_layers} layers with such windows: of 64 three in four have one")
    return {**WINDOW.write(model), **WINDOWS.write(model)}


WINDOW_OF_EXAONE4 = GgufRule(
    ("sliding_window", "window_layers", "rope_layers"), _read_window_of_exaone4, _write_window_of_exaone4
)
"""By the number of layers: in the model of 32B, three in four have a window, and the others no rotary embeddings."""

GEMMA_KEYS = (CONTEXT, WIDTH, LAYERS, MLP, HEADS, EPSILON, HEAD_SIZE, UNUSUAL_ROPE)
GEMMA: Mapping[str, Any] = {
    "zero_centered_gamma": True,
    "hf_zero_centered_gamma": True,
    "activation": "gelu_tanh",
    "embedding_multiplier": lambda fields: math.sqrt(fields["hidden_size"]),
    "rounded_embedding_multiplier": True,
}
TIED_GEMMA: Mapping[str, Any] = {**GEMMA, "tied_embeddings": True}
"""Of the first two, whose output layer llama.cpp does not look for."""
FINAL_CAP = number("final_logit_softcapping", "final_logit_softcapping", None)

# DeepSeek


def _is_lite(fields: Fields) -> bool:
    """Whether llama.cpp takes a model for one that projects queries in one step: it goes by the number of layers."""
    return fields["num_layers"] in (26, 27) or (fields["num_layers"], fields["vocab_size"]) == (48, 128256)


def _read_query_rank(file: Described) -> Fields:
    rank = file.count("attention.q_lora_rank", None)
    return {"mla.q_lora_rank": rank if file.has("blk.0.attn_q_a.weight") else None}


def _write_query_rank(model: ModelShape) -> Said:
    rank: int | None = value_of(model, "mla.q_lora_rank")
    if (rank is None) != _is_lite(vars(model)):
        how = "one step" if rank is None else "two steps"
        raise refused(model, f"of {model.num_layers} layers that projects queries in {how}")
    return {} if rank is None else {"attention.q_lora_rank": rank}


QUERY_RANK = GgufRule(("mla.q_lora_rank",), _read_query_rank, _write_query_rank)


def _read_latent(file: Described) -> Fields:
    rank = file.count("attention.kv_lora_rank")
    file.expect("attention.key_length", rank + file.count("rope.dimension_count"))
    file.expect("attention.value_length", rank)
    return {"mla.kv_lora_rank": rank}


LATENT = GgufRule(
    ("mla.kv_lora_rank",),
    _read_latent,
    lambda model: {
        "attention.key_length": value_of(model, "mla.kv_lora_rank") + model.rotary_size,
        "attention.value_length": value_of(model, "mla.kv_lora_rank"),
    },
)
"""What is a head to llama.cpp."""
LATENT_RANK = GgufKey("mla.kv_lora_rank", "attention.kv_lora_rank")
LATENT_HEADS = GgufRule(
    ("mla.qk_head_dim", "mla.v_head_dim"),
    lambda file: {
        "mla.qk_head_dim": file.count("attention.key_length_mla") - file.count("rope.dimension_count"),
        "mla.v_head_dim": file.count("attention.value_length_mla"),
    },
    lambda model: {
        "attention.key_length_mla": value_of(model, "mla.qk_head_dim") + model.rotary_size,
        "attention.value_length_mla": value_of(model, "mla.v_head_dim"),
    },
)


def _read_latent_heads(file: Described) -> Fields:
    file.count("attention.head_count_kv", None)
    return dict.fromkeys(LATENT_KEYS.fields, file.count("attention.head_count", least=1))


LATENT_KEYS = GgufRule(
    ("num_attention_heads", "num_query_groups"),
    _read_latent_heads,
    lambda model: {"attention.head_count": model.num_attention_heads, "attention.head_count_kv": 1},
)
"""To llama.cpp all heads have one key: the latent."""


# Qwen3-Next


def _read_value_size(file: Described) -> Fields:
    return {"gdn.value_head_dim": file.count("ssm.inner_size") // file.count("ssm.time_step_rank", least=1)}


def _read_recurrent(file: Described) -> Fields:
    layers, number = file.decoder_layers(), file.count("full_attention_interval", 4, least=1)
    usual = [(layer + 1) % number != 0 for layer in range(layers)]
    return {"gdn.layers": tuple(file.flags("attention.recurrent_layers") or usual)[:layers]}


def _write_recurrent(model: ModelShape) -> Said:
    recurrent = [*value_of(model, "gdn.layers"), *[False] * model.mtp_num_layers]
    return {"attention.recurrent_layers": recurrent, "full_attention_interval": 4}


DELTA_NET = (
    GgufKey("gdn.conv_kernel_dim", "ssm.conv_kernel"),
    GgufKey("gdn.key_head_dim", "ssm.state_size"),
    GgufKey("gdn.num_key_heads", "ssm.group_count"),
    GgufKey("gdn.num_value_heads", "ssm.time_step_rank"),
    GgufRule(
        ("gdn.value_head_dim",),
        _read_value_size,
        lambda model: {"ssm.inner_size": value_of(model, "gdn.value_size")},
    ),
    GgufRule(("gdn.layers",), _read_recurrent, _write_recurrent),
)

# GLM, Hunyuan

TOKENS_OF_GLM = {"bos": "[gMASK]", "eot": "<|user|>", "unk": "<|endoftext|>", "eom": "<|observation|>"}
HUNYUAN = dict.fromkeys(("qk_layernorm", "qk_layernorm_after_rope"), True)
