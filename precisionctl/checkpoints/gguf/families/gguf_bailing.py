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
from precisionctl.checkpoints.gguf.kda import BESIDE_KDA, KDA_HEADS, KDA_SIZES, delta_attention, latent_key
from precisionctl.checkpoints.gguf.metadata import Described
from precisionctl.checkpoints.gguf.metadata_keys import (
    LAYERS_AND_PREDICTION,
    PREDICTION_LAYERS,
    VOCABULARY,
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
_ROWS = [
    *outside_layers()[1:],
    GgufRow("model.word_embeddings.weight", ("token_embd.weight",)),
    *in_layers({**NORMS, **{f"attention.{part}_proj": f"attn_{part}" for part in "qkv"}}),
    *(replace(row, delta_nets=False) for row in in_layers(_LATENT_ATTENTION)),
    replaced_by("attention.kv_b_proj", ("attn_k_b", "attn_v_b"), LATENT_KEYS_VALUES),
    *(replace(row, delta_nets=True) for row in in_layers(_DELTA_ATTENTION)),
    *delta_attention("attention", Both(BOUNDED_DECAY, VECTOR_AS_COLUMN)),
    *MLP,
    *ROUTER,
    GgufRow("model.layers.{layer}.mlp.gate.expert_bias", CORRECTION),
    *EXPERTS,
    *SHARED_EXPERTS,
    *(row for row in PREDICTION if "shared_head" not in row.hf),
    in_layer("final_layernorm.weight", "layer_output_norm.weight"),
]


_LATENT = latent_key(lambda model: int(value_of(model, "gdn.key_head_dim")))


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
    )
}
"""By the `model_type` of the text model."""
