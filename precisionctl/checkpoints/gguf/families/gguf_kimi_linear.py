"""Kimi Linear: Kimi delta attention, in some layers latent attention without positions, and DeepSeek-V3's experts.

Sources: llama.cpp's src/models/kimi-linear.cpp, and conversion/kimi_linear.py.
"""

from precisionctl.architectures.config_keys import Fields
from precisionctl.checkpoints.gguf.expert_keys import (
    EXPERT_COUNTS,
    EXPERT_SIZE,
    LEADING_DENSE,
    SHARED_COUNT,
    WEIGHTS_SCALE,
    scored_by,
)
from precisionctl.checkpoints.gguf.families.gguf_deepseek import LATENT_HEADS, LATENT_RANK, LATENT_TURNED
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys
from precisionctl.checkpoints.gguf.metadata import Described
from precisionctl.checkpoints.gguf.metadata_keys import HEADS_KV, VOCABULARY, GgufKey, GgufRule, Said, value_of
from precisionctl.checkpoints.gguf.tensor_rows import (
    ATTENTION,
    EXPERTS_OF_MIXTRAL,
    GATED,
    MLP,
    NORMS,
    in_layer,
    in_layers,
    outside_layers,
    replaced_by,
)
from precisionctl.checkpoints.tensor_changes import DECAY, KERNEL_IN_FOUR, LATENT_KEYS_VALUES
from precisionctl.model_shape import ModelShape

_ROWS = [
    *outside_layers(),
    *in_layers(NORMS),
    *ATTENTION,
    *in_layers({f"self_attn.{part}_conv1d": f"ssm_conv1d_{part}" for part in "qkv"}, KERNEL_IN_FOUR),
    *in_layers({f"self_attn.{part}_proj": f"ssm_{part}" for part in ("f_a", "f_b", "g_a", "g_b")}),
    *in_layers({"self_attn.b_proj": "ssm_beta", "self_attn.o_norm": "ssm_norm"}),
    in_layer("self_attn.dt_bias", "ssm_dt.bias"),
    in_layer("self_attn.A_log", "ssm_a", DECAY),
    *in_layers({"self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm"}),
    replaced_by("self_attn.kv_b_proj", ("attn_k_b", "attn_v_b"), LATENT_KEYS_VALUES),
    *MLP,
    *EXPERTS_OF_MIXTRAL,
    in_layer("block_sparse_moe.gate.e_score_correction_bias", "exp_probs_b.bias"),
    *in_layers({f"block_sparse_moe.shared_experts.{hf}": f"{gguf}_shexp" for hf, gguf in GATED.items()}),
]


def _read_layers(file: Described) -> Fields:
    heads = file.count("attention.head_count", least=1)
    delta = tuple(not groups for groups in file.counts(HEADS_KV))
    return {"num_attention_heads": heads, "num_query_groups": heads, "gdn.layers": delta}


_HEADS = GgufRule(
    ("num_attention_heads", "num_query_groups", "gdn.layers"),
    _read_layers,
    lambda model: {
        "attention.head_count": model.num_attention_heads,
        HEADS_KV: [0 if delta else 1 for delta in value_of(model, "gdn.layers")],
    },
)
"""To llama.cpp all heads have one key, the latent, and layers of delta attention none."""


def _read_groups(file: Described) -> Fields:
    file.expect("expert_group_used_count", 1)
    return {}


_ONE_GROUP = GgufRule((), _read_groups, lambda model: {"expert_group_used_count": 1})


def _read_sizes(file: Described) -> Fields:
    file.expect("attention.key_length", file.count("attention.kv_lora_rank") + file.count("rope.dimension_count"))
    file.said("attention.value_length")
    return {}


def _write_sizes(model: ModelShape) -> Said:
    return {
        "attention.key_length": value_of(model, "mla.kv_lora_rank") + value_of(model, "mla.qk_pos_emb_head_dim"),
        "attention.value_length": model.hidden_size // model.num_attention_heads,
    }


_LATENT = GgufRule((), _read_sizes, _write_sizes)
"""What is a key to llama.cpp; and what the release calls `head_dim`, with which nothing is computed."""

FAMILIES = {
    "kimi_linear": GgufFamily(
        "kimi-linear",
        rows=_ROWS,
        keys=base_keys(*EXPERT_COUNTS, _ONE_GROUP, scored_by("sigmoid"), _LATENT, heads=_HEADS),
        more=(
            VOCABULARY,
            GgufKey("gdn.conv_kernel_dim", "ssm.conv_kernel"),
            GgufKey("gdn.key_head_dim", "kda.head_dim"),
            LATENT_RANK,
            LATENT_TURNED,
            LATENT_HEADS,
            EXPERT_SIZE,
            SHARED_COUNT,
            LEADING_DENSE,
            WEIGHTS_SCALE,
        ),
        reads=(),
        computed={
            "kv_channels": lambda fields: fields["mla.v_head_dim"],
            "tied_embeddings": False,
            "rope_layers": lambda fields: (False,) * fields["num_layers"],
            "moe.expert_bias": True,
            "mla.q_lora_rank": None,
            "gdn.kda": True,
            "gdn.kda_lora_rank": lambda fields: fields["gdn.key_head_dim"],
            "gdn.value_head_dim": lambda fields: fields["gdn.key_head_dim"],
            **dict.fromkeys(("gdn.num_key_heads", "gdn.num_value_heads"), lambda fields: fields["num_attention_heads"]),
        },
    )
}
"""By the `model_type` of the text model."""
