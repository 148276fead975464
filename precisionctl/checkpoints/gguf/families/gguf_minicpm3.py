"""MiniCPM3: latent attention, whose keys and values llama.cpp makes of the latent as transformers does.

Sources: llama.cpp's src/models/minicpm3.cpp, and conversion/minicpm.py.
"""

from precisionctl.architectures.config_keys import Fields
from precisionctl.checkpoints.gguf import metadata_keys as keys, rope_keys, tensor_rows as rows
from precisionctl.checkpoints.gguf.families.gguf_deepseek import LATENT_RANK, LATENT_TURNED
from precisionctl.checkpoints.gguf.family import GgufFamily
from precisionctl.checkpoints.gguf.metadata import Described
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


def _write_key_size(model: ModelShape) -> keys.Said:
    if keys.value_of(model, "mla.q_lora_rank") is None:
        raise keys.refused(model, "that projects queries in one step")
    return {
        "attention.key_length": keys.value_of(model, "mla.qk_head_dim")
        + keys.value_of(model, "mla.qk_pos_emb_head_dim")
    }


def _read_longrope(file: Described) -> Fields:
    scaled = file.has("rope_factors_long.weight")
    return (
        {"rope_scaling": {"rope_type": "longrope", rope_keys.ORIGINAL: file.count("context_length")}} if scaled else {}
    )


def _write_longrope(model: ModelShape) -> keys.Said:
    context = model.max_position_embeddings
    if model.rope_scaling and model.rope_scaling.get(rope_keys.ORIGINAL, context) != context:
        raise keys.refused(model, "whose rotary embeddings are stretched, but with other factors for the same context")
    return {}


FAMILIES = {
    "minicpm3": GgufFamily(
        "minicpm3",
        rows=[*rows.outside_layers(), *rows.in_layers({**rows.NORMS, **_ATTENTION}), *rows.MLP],
        keys=(),
        more=(
            *(keys.CONTEXT, keys.WIDTH, keys.LAYERS, keys.MLP_SIZE, keys.HEADS, keys.EPSILON, keys.VOCABULARY),
            keys.integer("mla.q_lora_rank", "attention.q_lora_rank"),
            LATENT_RANK,
            keys.GgufEntry(("mla.qk_head_dim",), ("attention.key_length",), _read_key_size, _write_key_size),
            LATENT_TURNED,
            rope_keys.UNUSUAL_BASE,
            keys.GgufEntry((), (), _read_longrope, _write_longrope),
        ),
        computed={
            "kv_channels": keys.hidden_by_heads,
            "mla.v_head_dim": keys.hidden_by_heads,
            "embedding_multiplier": 12,
            "rounded_embedding_multiplier": True,
            "residual_multiplier": lambda fields: 1.4 / max(fields["num_layers"], 1) ** 0.5,
            "logits_scaling": lambda fields: fields["hidden_size"] / 256,
        },
        scalings=rope_keys.LONGROPE_ALONE,
    ),
}
