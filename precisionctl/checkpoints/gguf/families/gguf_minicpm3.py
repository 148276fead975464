"""MiniCPM3: latent attention, whose keys and values llama.cpp makes of the latent as transformers does.

Sources: llama.cpp's src/models/minicpm3.cpp, and conversion/minicpm.py.
"""

from precisionctl.architectures.config_keys import Fields
from precisionctl.checkpoints.gguf.families.gguf_deepseek import LATENT_RANK, LATENT_TURNED
from precisionctl.checkpoints.gguf.family import GgufFamily
from precisionctl.checkpoints.gguf.metadata import Described
from precisionctl.checkpoints.gguf.metadata_keys import (
    CONTEXT,
    EPSILON,
    HEADS,
    LAYERS,
    MLP_SIZE,
    VOCABULARY,
    WIDTH,
    GgufKey,
    GgufRule,
    Said,
    hidden_by_heads,
    refused,
    value_of,
)
from precisionctl.checkpoints.gguf.rope_keys import LONGROPE_ALONE, ORIGINAL, UNUSUAL_BASE
from precisionctl.checkpoints.gguf.tensor_rows import MLP, NORMS, in_layers, outside_layers
from precisionctl.model.model_shape import ModelShape

_ATTENTION = {
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.o_proj": "attn_output",
}


def _read_key_size(file: Described) -> Fields:
    return {"mla.qk_head_dim": file.count("attention.key_length") - file.count("rope.dimension_count")}


def _write_key_size(model: ModelShape) -> Said:
    if value_of(model, "mla.q_lora_rank") is None:
        raise refused(model, "that projects queries in one step")
    return {"attention.key_length": value_of(model, "mla.qk_head_dim") + value_of(model, "mla.qk_pos_emb_head_dim")}


def _read_longrope(file: Described) -> Fields:
    scaled = file.has("rope_factors_long.weight")
    return {"rope_scaling": {"rope_type": "longrope", ORIGINAL: file.count("context_length")}} if scaled else {}


def _write_longrope(model: ModelShape) -> Said:
    context = model.max_position_embeddings
    if model.rope_scaling and model.rope_scaling.get(ORIGINAL, context) != context:
        raise refused(model, "whose rotary embeddings are stretched, but with other factors for the same context")
    return {}


FAMILIES = {
    "minicpm3": GgufFamily(
        "minicpm3",
        rows=[*outside_layers(), *in_layers({**NORMS, **_ATTENTION}), *MLP],
        keys=(),
        more=(
            *(CONTEXT, WIDTH, LAYERS, MLP_SIZE, HEADS, EPSILON, VOCABULARY),
            GgufKey("mla.q_lora_rank", "attention.q_lora_rank"),
            LATENT_RANK,
            GgufRule(("mla.qk_head_dim",), ("attention.key_length",), _read_key_size, _write_key_size),
            LATENT_TURNED,
            UNUSUAL_BASE,
            GgufRule((), (), _read_longrope, _write_longrope),
        ),
        reads=(),
        computed={
            "kv_channels": hidden_by_heads,
            "mla.v_head_dim": hidden_by_heads,
            "embedding_multiplier": 12,
            "rounded_embedding_multiplier": True,
            "residual_multiplier": lambda fields: 1.4 / max(fields["num_layers"], 1) ** 0.5,
            "logits_scaling": lambda fields: fields["hidden_size"] / 256,
        },
        scalings=LONGROPE_ALONE,
    ),
}
"""By the `model_type` of the text model."""
