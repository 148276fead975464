"""Ling 2 and Ling 3. The second has Kimi delta attention with a bound of decays, in some layers latent attention with a
gate for each head, and DeepSeek-V3's experts.

Sources: llama.cpp's src/models/bailingmoe2.cpp and bailingmoe3.cpp, and conversion/bailingmoe.py and bailingmoe3.py.
"""

from dataclasses import replace

from precisionctl.architectures.config_keys import Fields
from precisionctl.checkpoints.gguf import expert_keys, metadata_keys as keys, rope_keys, tensor_rows as rows
from precisionctl.checkpoints.gguf.families.gguf_deepseek import LATENT_HEADS, LATENT_RANK, LATENT_TURNED
from precisionctl.checkpoints.gguf.families.gguf_kimi_linear import (
    BESIDE_KDA,
    KDA_HEADS,
    KDA_SIZES,
    delta_attention,
    latent_key,
)
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys
from precisionctl.checkpoints.gguf.metadata import Described
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
_OUTSIDE = [*rows.outside_layers()[1:], rows.GgufRow("model.word_embeddings.weight", ("token_embd.weight",))]
_EXPERTS = [
    *rows.MLP,
    *rows.ROUTER,
    rows.GgufRow("model.layers.{layer}.mlp.gate.expert_bias", rows.CORRECTION),
    *rows.EXPERTS,
    *rows.SHARED_EXPERTS,
    *(row for row in rows.PREDICTION if "shared_head" not in row.hf),
    rows.in_layer("final_layernorm.weight", "layer_output_norm.weight"),
]
_ROWS = [
    *_OUTSIDE,
    *rows.in_layers({**rows.NORMS, **{f"attention.{part}_proj": f"attn_{part}" for part in "qkv"}}),
    *(replace(row, only=rows.outside_delta_nets) for row in rows.in_layers(_LATENT_ATTENTION)),
    rows.replaced_by("attention.kv_b_proj", ("attn_k_b", "attn_v_b"), LATENT_KEYS_VALUES),
    *(replace(row, only=rows.in_delta_nets) for row in rows.in_layers(_DELTA_ATTENTION)),
    *delta_attention("attention", Both(BOUNDED_DECAY, VECTOR_AS_COLUMN)),
    *_EXPERTS,
]
_ATTENTION_2 = {
    "attention.query_key_value": "attn_qkv",
    "attention.dense": "attn_output",
    "attention.query_layernorm": "attn_q_norm",
    "attention.key_layernorm": "attn_k_norm",
}


_LATENT = latent_key(lambda model: int(keys.value_of(model, "gdn.key_head_dim")))


def _read_bound(file: Described) -> Fields:
    file.expect("kda.safe_gate", True)
    return {"gdn.kda_lower_bound": file.number("kda.gate_lower_bound")}


def _write_bound(model: ModelShape) -> keys.Said:
    bound = keys.value_of(model, "gdn.kda_lower_bound")
    if bound is None:
        raise keys.refused(model, "whose decays have no bound")
    return {"kda.safe_gate": True, "kda.gate_lower_bound": float(bound)}


_BOUND = keys.GgufEntry(("gdn.kda_lower_bound",), ("kda.safe_gate", "kda.gate_lower_bound"), _read_bound, _write_bound)


def _write_shared_count(model: ModelShape) -> keys.Said:
    size, each = keys.value_of(model, "moe.shared_ffn_hidden_size"), keys.value_of(model, "moe.ffn_hidden_size")
    if not size:
        raise keys.refused(model, "without shared experts")
    return {"expert_shared_count": max(size // each, 1)}


_SHARED_COUNT = keys.ignored_keys("expert_shared_count", write=_write_shared_count)
"""Beside their size, with which llama.cpp computes."""


def _write_heads(model: ModelShape) -> keys.Said:
    if model.num_attention_heads * model.kv_channels != model.hidden_size:
        raise keys.refused(model, "whose heads together are not as wide as the hidden states")
    return {}


_WHOLE_HEADS = keys.write_only(_write_heads)
"""llama.cpp takes queries for as wide as the hidden states."""


def _write_one_shared(model: ModelShape) -> keys.Said:
    if keys.value_of(model, "moe.shared_ffn_hidden_size") != keys.value_of(model, "moe.ffn_hidden_size"):
        raise keys.refused(model, "with another number of shared experts than one")
    return {"expert_shared_count": 1}


_ONE_SHARED = replace(expert_keys.ONE_SHARED, write=_write_one_shared)
"""Of several, llama.cpp multiplies the size of all by their number."""

_PREDICTION = keys.write_only(lambda model: {"nextn_predict_layers": model.mtp_num_layers})
"""What LAYERS_AND_PREDICTION reads too, written also where there are none."""

_LING_2 = GgufFamily(
    "bailingmoe2",
    rows=[*_OUTSIDE, *rows.in_layers({**rows.NORMS, **_ATTENTION_2}), *_EXPERTS],
    keys=base_keys(
        *expert_keys.DEEPSEEK_CHOICE,
        layers=keys.LAYERS_AND_PREDICTION,
    ),
    more=(
        rope_keys.TURNED,
        expert_keys.LEADING_DENSE,
        keys.VOCABULARY,
        expert_keys.EXPERT_SIZE,
        expert_keys.SHARED_EXPERT_SIZE,
        expert_keys.WEIGHTS_SCALE,
        _ONE_SHARED,
        expert_keys.NORMALISED,
        _PREDICTION,
        _WHOLE_HEADS,
    ),
    computed={**expert_keys.TWO_SCORES, "moe.expert_bias": True, "qk_layernorm": True, "tied_embeddings": False},
)

FAMILIES = {
    "bailing_moe_v2": _LING_2,
    "bailing_moe": replace(_LING_2, recognises=lambda file: False),
    "bailing_hybrid": GgufFamily(
        "bailingmoe3",
        rows=_ROWS,
        keys=base_keys(
            *expert_keys.DEEPSEEK_CHOICE,
            _LATENT,
            layers=keys.LAYERS_AND_PREDICTION,
            heads=KDA_HEADS,
            head_size=None,
        ),
        more=(
            keys.VOCABULARY,
            *KDA_SIZES,
            _BOUND,
            LATENT_RANK,
            LATENT_TURNED,
            LATENT_HEADS,
            expert_keys.EXPERT_SIZE,
            expert_keys.SHARED_EXPERT_SIZE,
            _SHARED_COUNT,
            expert_keys.LEADING_DENSE,
            expert_keys.WEIGHTS_SCALE,
            expert_keys.NORMALISED,
            keys.PREDICTION_LAYERS,
        ),
        computed={**expert_keys.TWO_SCORES, **BESIDE_KDA, "linear_gate": "sigmoid per head"},
        scalings=rope_keys.UNSCALED_ALONE,
    ),
}
