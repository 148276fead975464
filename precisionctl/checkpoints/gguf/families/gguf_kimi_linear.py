"""Kimi Linear: Kimi delta attention, in some layers latent attention without positions, and DeepSeek-V3's experts.
Ling 3 has such delta attention too (`gguf_bailing.py`).

Sources: llama.cpp's src/models/kimi-linear.cpp and bailingmoe3.cpp, and conversion/kimi_linear.py and bailingmoe3.py.
"""

from collections.abc import Callable, Mapping
from typing import Any

from precisionctl.architectures.config_keys import Fields
from precisionctl.checkpoints.gguf import expert_keys, metadata_keys as keys, tensor_rows as rows
from precisionctl.checkpoints.gguf.families.gguf_deepseek import LATENT_HEADS, LATENT_RANK, LATENT_TURNED
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys
from precisionctl.checkpoints.gguf.metadata import Described
from precisionctl.checkpoints.tensor_changes import DECAY, KERNEL_IN_FOUR, LATENT_KEYS_VALUES, TensorChange
from precisionctl.model.model_shape import ModelShape

# Delta attention beside latent attention, of both families


def delta_attention(module: str, decay: TensorChange) -> list[rows.GgufRow]:
    """The rows that both families have of delta attention in such modules."""
    return [
        *rows.in_layers({f"{module}.{part}_conv1d": f"ssm_conv1d_{part}" for part in "qkv"}, KERNEL_IN_FOUR),
        *rows.in_layers({f"{module}.b_proj": "ssm_beta", f"{module}.o_norm": "ssm_norm"}),
        rows.in_layer(f"{module}.dt_bias", "ssm_dt.bias"),
        rows.in_layer(f"{module}.A_log", "ssm_a", decay),
    ]


def _read_heads(file: Described) -> Fields:
    heads, layers = file.count("attention.head_count", least=1), file.decoder_layers()
    delta = tuple(not groups for groups in file.counts(keys.HEADS_KV)[:layers])
    return {"num_attention_heads": heads, "num_query_groups": heads, "gdn.layers": delta}


KDA_HEADS = keys.GgufEntry(
    ("num_attention_heads", "num_query_groups", "gdn.layers"),
    ("attention.head_count", keys.HEADS_KV),
    _read_heads,
    lambda model: {
        "attention.head_count": model.num_attention_heads,
        keys.HEADS_KV: [
            0 if delta else 1 for delta in (*keys.value_of(model, "gdn.layers"), *[False] * model.mtp_num_layers)
        ],
    },
)
"""To llama.cpp all heads have one key, the latent, and layers of delta attention none."""
KDA_SIZES = (keys.integer("gdn.conv_kernel_dim", "ssm.conv_kernel"), keys.integer("gdn.key_head_dim", "kda.head_dim"))


def _read_key_size(file: Described) -> Fields:
    file.expect("attention.key_length", file.count("attention.kv_lora_rank") + file.count("rope.dimension_count"))
    return {}


def latent_key(head_dim: Callable[[ModelShape], int]) -> keys.GgufEntry:
    """What is a key to llama.cpp, and what published files call `head_dim`, with which it computes nothing."""

    def write(model: ModelShape) -> keys.Said:
        key = keys.value_of(model, "mla.kv_lora_rank") + keys.value_of(model, "mla.qk_pos_emb_head_dim")
        return {"attention.key_length": key, "attention.value_length": head_dim(model)}

    return keys.GgufEntry((), ("attention.key_length", "attention.value_length"), _read_key_size, write)


BESIDE_KDA: Mapping[str, Any] = {
    "kv_channels": keys.SameAs("mla.v_head_dim"),
    "moe.expert_bias": True,
    "mla.q_lora_rank": None,
    "gdn.kda": True,
    "gdn.value_head_dim": keys.SameAs("gdn.key_head_dim"),
    **dict.fromkeys(("gdn.num_key_heads", "gdn.num_value_heads"), keys.SameAs("num_attention_heads")),
}
"""What llama.cpp computes of both families whatever a file says."""

# Kimi Linear

_ROWS = [
    *rows.outside_layers(),
    *rows.in_layers(rows.NORMS),
    *rows.ATTENTION,
    *delta_attention("self_attn", DECAY),
    *rows.in_layers({f"self_attn.{part}_proj": f"ssm_{part}" for part in ("f_a", "f_b", "g_a", "g_b")}),
    *rows.in_layers({"self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm"}),
    rows.replaced_by("self_attn.kv_b_proj", ("attn_k_b", "attn_v_b"), LATENT_KEYS_VALUES),
    *rows.MLP,
    *rows.EXPERTS_OF_MIXTRAL,
    rows.in_layer("block_sparse_moe.gate.e_score_correction_bias", "exp_probs_b.bias"),
    *rows.shared_expert("block_sparse_moe.shared_experts"),
]
_ONE_GROUP = keys.always("expert_group_used_count", 1)
_LATENT = latent_key(lambda model: model.hidden_size // model.num_attention_heads)

FAMILIES = {
    "kimi_linear": GgufFamily(
        "kimi-linear",
        rows=_ROWS,
        keys=base_keys(
            *expert_keys.EXPERT_COUNTS,
            _ONE_GROUP,
            expert_keys.scored_by("sigmoid"),
            _LATENT,
            heads=KDA_HEADS,
            head_size=None,
        ),
        more=(
            keys.VOCABULARY,
            *KDA_SIZES,
            LATENT_RANK,
            LATENT_TURNED,
            LATENT_HEADS,
            expert_keys.EXPERT_SIZE,
            expert_keys.SHARED_COUNT,
            expert_keys.LEADING_DENSE,
            expert_keys.WEIGHTS_SCALE,
        ),
        computed={
            **BESIDE_KDA,
            "tied_embeddings": False,
            "rope_layers": keys.in_all_layers(False),
            "gdn.kda_lora_rank": keys.SameAs("gdn.key_head_dim"),
        },
    )
}
