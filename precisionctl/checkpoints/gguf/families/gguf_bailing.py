"""Ling 3: Kimi delta attention with a bound of decays, in some layers latent attention with a gate for each head, and
DeepSeek-V3's experts.

Sources: llama.cpp's src/models/bailingmoe3.cpp, and conversion/bailingmoe3.py.
"""

from dataclasses import replace

from precisionctl.architectures.config_keys import Fields
from precisionctl.checkpoints.gguf.expert_keys import (
    EXPERT_COUNTS,
    EXPERT_SIZE,
    LEADING_DENSE,
    NORMALISED,
    SHARED_EXPERT_SIZE,
    TWO_SCORES,
    WEIGHTS_SCALE,
    groups,
    scored_by,
)
from precisionctl.checkpoints.gguf.families.gguf_deepseek import LATENT_HEADS, LATENT_RANK, LATENT_TURNED
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys
from precisionctl.checkpoints.gguf.metadata import Described
from precisionctl.checkpoints.gguf.metadata_keys import (
    HEADS_KV,
    LAYERS_AND_PREDICTION,
    PREDICTION_LAYERS,
    VOCABULARY,
    GgufKey,
    GgufRule,
    Said,
    refused,
    value_of,
)
from precisionctl.checkpoints.gguf.rope_keys import UNSCALED_ALONE
from precisionctl.checkpoints.gguf.tensor_rows import (
    CORRECTION,
    EXPERTS,
    MLP,
    NORMS,
    PREDICTION,
    ROUTER,
    SHARED_EXPERTS,
    GgufRow,
    in_layer,
    in_layers,
    outside_layers,
    replaced_by,
)
from precisionctl.checkpoints.tensor_changes import (
    BOUNDED_DECAY,
    KERNEL_IN_FOUR,
    LATENT_KEYS_VALUES,
    VECTOR_AS_COLUMN,
    Both,
)
from precisionctl.model.model_shape import ModelShape

_LATENT_ATTENTION = {
    "attention.g_proj": "attn_gate",
    "attention.dense": "attn_output",
    "attention.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "attention.kv_a_layernorm": "attn_kv_a_norm",
}
_DELTA_ATTENTION = {
    "attention.g_proj": "ssm_g_a",
    "attention.o_proj": "attn_output",
    "attention.f_proj": "ssm_f_a",
    "attention.b_proj": "ssm_beta",
    "attention.o_norm": "ssm_norm",
}
_ROWS = [
    *outside_layers()[1:],
    GgufRow("model.word_embeddings.weight", ("token_embd.weight",)),
    *in_layers({**NORMS, **{f"attention.{part}_proj": f"attn_{part}" for part in "qkv"}}),
    *(replace(row, delta_nets=False) for row in in_layers(_LATENT_ATTENTION)),
    replaced_by("attention.kv_b_proj", ("attn_k_b", "attn_v_b"), LATENT_KEYS_VALUES),
    *(replace(row, delta_nets=True) for row in in_layers(_DELTA_ATTENTION)),
    *in_layers({f"attention.{part}_conv1d": f"ssm_conv1d_{part}" for part in "qkv"}, KERNEL_IN_FOUR),
    in_layer("attention.dt_bias", "ssm_dt.bias"),
    in_layer("attention.A_log", "ssm_a", Both(BOUNDED_DECAY, VECTOR_AS_COLUMN)),
    *MLP,
    *ROUTER,
    GgufRow("model.layers.{layer}.mlp.gate.expert_bias", CORRECTION),
    *EXPERTS,
    *SHARED_EXPERTS,
    *(row for row in PREDICTION if "shared_head" not in row.hf),
    in_layer("final_layernorm.weight", "layer_output_norm.weight"),
]


def _read_heads(file: Described) -> Fields:
    heads, layers = file.count("attention.head_count", least=1), file.decoder_layers()
    delta = tuple(not groups for groups in file.counts(HEADS_KV)[:layers])
    return {"num_attention_heads": heads, "num_query_groups": heads, "gdn.layers": delta}


def _write_heads(model: ModelShape) -> Said:
    kinds = [*value_of(model, "gdn.layers"), *[False] * model.mtp_num_layers]
    return {"attention.head_count": model.num_attention_heads, HEADS_KV: [0 if delta else 1 for delta in kinds]}


_HEADS = GgufRule(("num_attention_heads", "num_query_groups", "gdn.layers"), _read_heads, _write_heads)
"""To llama.cpp all heads have one key, the latent, and layers of delta attention none."""


def _read_sizes(file: Described) -> Fields:
    file.expect("attention.key_length", file.count("attention.kv_lora_rank") + file.count("rope.dimension_count"))
    file.said("attention.value_length")
    return {}


_LATENT = GgufRule(
    (),
    _read_sizes,
    lambda model: {
        "attention.key_length": value_of(model, "mla.kv_lora_rank") + value_of(model, "mla.qk_pos_emb_head_dim"),
        "attention.value_length": value_of(model, "gdn.key_head_dim"),
    },
)
"""What is a key to llama.cpp; and what published files call `head_dim`, with which nothing is computed there."""


def _read_bound(file: Described) -> Fields:
    file.expect("kda.safe_gate", True)
    return {"gdn.kda_lower_bound": file.number("kda.gate_lower_bound")}


def _write_bound(model: ModelShape) -> Said:
    bound = value_of(model, "gdn.kda_lower_bound")
    if bound is None:
        raise refused(model, "whose decays have no bound")
    return {"kda.safe_gate": True, "kda.gate_lower_bound": float(bound)}


_BOUND = GgufRule(("gdn.kda_lower_bound",), _read_bound, _write_bound)


def _read_shared_count(file: Described) -> Fields:
    file.count("expert_shared_count", least=1)
    return {}


def _write_shared_count(model: ModelShape) -> Said:
    size, each = value_of(model, "moe.shared_ffn_hidden_size"), value_of(model, "moe.ffn_hidden_size")
    if not size:
        raise refused(model, "without shared experts")
    return {"expert_shared_count": max(size // each, 1)}


_SHARED_COUNT = GgufRule((), _read_shared_count, _write_shared_count)
"""Beside their size, with which llama.cpp computes."""

FAMILIES = {
    "bailing_hybrid": GgufFamily(
        "bailingmoe3",
        rows=_ROWS,
        keys=base_keys(
            *EXPERT_COUNTS, groups(2), scored_by("sigmoid"), _LATENT, layers=LAYERS_AND_PREDICTION, heads=_HEADS
        ),
        more=(
            VOCABULARY,
            GgufKey("gdn.conv_kernel_dim", "ssm.conv_kernel"),
            GgufKey("gdn.key_head_dim", "kda.head_dim"),
            _BOUND,
            LATENT_RANK,
            LATENT_TURNED,
            LATENT_HEADS,
            EXPERT_SIZE,
            SHARED_EXPERT_SIZE,
            _SHARED_COUNT,
            LEADING_DENSE,
            WEIGHTS_SCALE,
            NORMALISED,
            PREDICTION_LAYERS,
        ),
        reads=(),
        computed={
            **TWO_SCORES,
            "kv_channels": lambda fields: fields["mla.v_head_dim"],
            "linear_gate": "sigmoid per head",
            "moe.expert_bias": True,
            "mla.q_lora_rank": None,
            "gdn.kda": True,
            "gdn.value_head_dim": lambda fields: fields["gdn.key_head_dim"],
            **dict.fromkeys(("gdn.num_key_heads", "gdn.num_value_heads"), lambda fields: fields["num_attention_heads"]),
        },
        scalings=UNSCALED_ALONE,
    )
}
"""By the `model_type` of the text model."""
