"""Kimi Linear: Kimi delta attention, in some layers latent attention without positions, and DeepSeek-V3's experts.

Sources: llama.cpp's src/models/kimi-linear.cpp, and conversion/kimi_linear.py.
"""

from precisionctl.checkpoints.gguf import expert_keys, metadata_keys as keys, tensor_rows as rows
from precisionctl.checkpoints.gguf.families.gguf_deepseek import LATENT_HEADS, LATENT_RANK, LATENT_TURNED
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys
from precisionctl.checkpoints.gguf.kda import BESIDE_KDA, KDA_HEADS, KDA_SIZES, delta_attention, latent_key
from precisionctl.checkpoints.tensor_changes import DECAY, LATENT_KEYS_VALUES

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
    *rows.in_layers({f"block_sparse_moe.shared_experts.{hf}": f"{gguf}_shexp" for hf, gguf in rows.GATED.items()}),
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
            "rope_layers": lambda fields: (False,) * fields["num_layers"],
            "gdn.kda_lora_rank": lambda fields: fields["gdn.key_head_dim"],
        },
    )
}
