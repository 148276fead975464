"""Ling 2 and Ling 3. The second has Kimi delta attention with a bound of decays, in some layers latent attention with a
gate for each head, and DeepSeek-V3's experts.

Sources: llama.cpp's src/models/bailingmoe2.cpp and bailingmoe3.cpp, and conversion/bailingmoe.py and bailingmoe3.py.
"""

from dataclasses import replace

from precisionctl.architectures.config_keys import Fields
from precisionctl.checkpoints.gguf.expert_keys import (
    EXPERT_COUNTS,
    EXPERT_SIZE,
    LEADING_DENSE,
    NORMALISED,
    ONE_SHARED,
    SHARED_EXPERT_SIZE,
    TWO_SCORES,
    WEIGHTS_SCALE,
    groups,
    scored_by,
)
from precisionctl.checkpoints.gguf.families.gguf_deepseek import LATENT_HEADS, LATENT_RANK, LATENT_TURNED
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys
from precisionctl.checkpoints.gguf.kda import BESIDE_KDA, KDA_HEADS, KDA_SIZES, delta_attention, latent_key
from precisionctl.checkpoints.gguf.metadata import Described
from precisionctl.checkpoints.gguf.metadata_keys import (
    HEAD_SIZE,
    LAYERS_AND_PREDICTION,
    PREDICTION_LAYERS,
    VOCABULARY,
    GgufRule,
    Said,
    ignored_keys,
    refused,
    value_of,
    write_only,
)
from precisionctl.checkpoints.gguf.rope_keys import TURNED, UNSCALED_ALONE
from precisionctl.checkpoints.gguf.tensor_rows import (
    CORRECTION,
    EXPERTS,
    MLP,
    NORMS,
    PREDICTION,
    ROUTER,
    SHARED_EXPERTS,
    GgufRow,
    in_delta_nets,
    in_layer,
    in_layers,
    outside_delta_nets,
    outside_layers,
    replaced_by,
)
from precisionctl.checkpoints.tensor_changes import (
    BOUNDED_DECAY,
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
}
_OUTSIDE = [*outside_layers()[1:], GgufRow("model.word_embeddings.weight", ("token_embd.weight",))]
_EXPERTS = [
    *MLP,
    *ROUTER,
    GgufRow("model.layers.{layer}.mlp.gate.expert_bias", CORRECTION),
    *EXPERTS,
    *SHARED_EXPERTS,
    *(row for row in PREDICTION if "shared_head" not in row.hf),
    in_layer("final_layernorm.weight", "layer_output_norm.weight"),
]
_ROWS = [
    *_OUTSIDE,
    *in_layers({**NORMS, **{f"attention.{part}_proj": f"attn_{part}" for part in "qkv"}}),
    *(replace(row, only=outside_delta_nets) for row in in_layers(_LATENT_ATTENTION)),
    replaced_by("attention.kv_b_proj", ("attn_k_b", "attn_v_b"), LATENT_KEYS_VALUES),
    *(replace(row, only=in_delta_nets) for row in in_layers(_DELTA_ATTENTION)),
    *delta_attention("attention", Both(BOUNDED_DECAY, VECTOR_AS_COLUMN)),
    *_EXPERTS,
]
_ATTENTION_2 = {
    "attention.query_key_value": "attn_qkv",
    "attention.dense": "attn_output",
    "attention.query_layernorm": "attn_q_norm",
    "attention.key_layernorm": "attn_k_norm",
}


_LATENT = latent_key(lambda model: int(value_of(model, "gdn.key_head_dim")))


def _read_bound(file: Described) -> Fields:
    file.expect("kda.safe_gate", True)
    return {"gdn.kda_lower_bound": file.number("kda.gate_lower_bound")}


def _write_bound(model: ModelShape) -> Said:
    bound = value_of(model, "gdn.kda_lower_bound")
    if bound is None:
        raise refused(model, "whose decays have no bound")
    return {"kda.safe_gate": True, "kda.gate_lower_bound": float(bound)}


_BOUND = GgufRule(("gdn.kda_lower_bound",), ("kda.safe_gate", "kda.gate_lower_bound"), _read_bound, _write_bound)


def _write_shared_count(model: ModelShape) -> Said:
    size, each = value_of(model, "moe.shared_ffn_hidden_size"), value_of(model, "moe.ffn_hidden_size")
    if not size:
        raise refused(model, "without shared experts")
    return {"expert_shared_count": max(size // each, 1)}


_SHARED_COUNT = ignored_keys("expert_shared_count", write=_write_shared_count)
"""Beside their size, with which llama.cpp computes."""


def _write_heads(model: ModelShape) -> Said:
    if model.num_attention_heads * model.kv_channels != model.hidden_size:
        raise refused(model, "whose heads together are not as wide as the hidden states")
    return {}


_WHOLE_HEADS = write_only(_write_heads)
"""llama.cpp takes queries for as wide as the hidden states."""


def _write_one_shared(model: ModelShape) -> Said:
    if value_of(model, "moe.shared_ffn_hidden_size") != value_of(model, "moe.ffn_hidden_size"):
        raise refused(model, "with another number of shared experts than one")
    return {"expert_shared_count": 1}


_ONE_SHARED = replace(ONE_SHARED, write=_write_one_shared)
"""Of several, llama.cpp multiplies the size of all by their number."""

_PREDICTION = replace(PREDICTION_LAYERS, write=lambda model: {"nextn_predict_layers": model.mtp_num_layers})

_LING_2 = GgufFamily(
    "bailingmoe2",
    rows=[*_OUTSIDE, *in_layers({**NORMS, **_ATTENTION_2}), *_EXPERTS],
    keys=(
        *base_keys(*EXPERT_COUNTS, groups(2), scored_by("sigmoid"), layers=LAYERS_AND_PREDICTION),
        HEAD_SIZE,
    ),
    more=(
        *(TURNED, LEADING_DENSE, VOCABULARY, EXPERT_SIZE, SHARED_EXPERT_SIZE, WEIGHTS_SCALE, _ONE_SHARED, NORMALISED),
        *(_PREDICTION, _WHOLE_HEADS),
    ),
    reads=(),
    computed={**TWO_SCORES, "moe.expert_bias": True, "qk_layernorm": True, "tied_embeddings": False},
)

FAMILIES = {
    "bailing_moe_v2": _LING_2,
    "bailing_moe": replace(_LING_2, recognises=lambda file: False),
    "bailing_hybrid": GgufFamily(
        "bailingmoe3",
        rows=_ROWS,
        keys=base_keys(
            *EXPERT_COUNTS, groups(2), scored_by("sigmoid"), _LATENT, layers=LAYERS_AND_PREDICTION, heads=KDA_HEADS
        ),
        more=(
            VOCABULARY,
            *KDA_SIZES,
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
        computed={**TWO_SCORES, **BESIDE_KDA, "linear_gate": "sigmoid per head"},
        scalings=UNSCALED_ALONE,
    ),
}
"""By the `model_type` of the text model."""
