"""LFM2, in some of whose layers a short convolution is in the place of attention.

Sources: llama.cpp's src/models/lfm2.cpp and lfm2moe.cpp, and conversion/lfm2.py.
"""

from precisionctl.architectures.config_keys import Fields
from precisionctl.checkpoints.gguf.expert_keys import EXPERT_COUNTS, EXPERT_SIZE, LEADING_DENSE, scored_by
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys
from precisionctl.checkpoints.gguf.metadata import Described
from precisionctl.checkpoints.gguf.metadata_keys import (
    HEADS,
    HEADS_KV,
    UNUSUAL_HEAD_SIZE,
    VOCABULARY,
    GgufKey,
    GgufRule,
    Said,
    hidden_by_heads,
    read_some_heads,
)
from precisionctl.checkpoints.gguf.tensor_rows import CORRECTION, GgufRow, experts, in_layers, outside_layers
from precisionctl.checkpoints.tensor_changes import KERNEL
from precisionctl.model.model_shape import ModelShape

_W123 = {"w1": "ffn_gate", "w3": "ffn_up", "w2": "ffn_down"}
_ROWS = [
    *outside_layers()[::2],
    GgufRow("model.embedding_norm.weight", ("token_embd_norm.weight",)),
    *in_layers(
        {
            "operator_norm": "attn_norm",
            "ffn_norm": "ffn_norm",
            "conv.in_proj": "shortconv.in_proj",
            "conv.out_proj": "shortconv.out_proj",
            "self_attn.q_proj": "attn_q",
            "self_attn.k_proj": "attn_k",
            "self_attn.v_proj": "attn_v",
            "self_attn.out_proj": "attn_output",
            "self_attn.q_layernorm": "attn_q_norm",
            "self_attn.k_layernorm": "attn_k_norm",
            **{f"feed_forward.{hf}": gguf for hf, gguf in _W123.items()},
        }
    ),
    *in_layers({"conv.conv": "shortconv.conv"}, KERNEL),
]


def _read_convolutions(file: Described) -> Fields:
    listed = file.counts(HEADS_KV)
    return {**read_some_heads(file, listed), "short_conv.layers": tuple(not number for number in listed)}


def _write_convolutions(model: ModelShape) -> Said:
    heads = [0 if model.has_short_conv(layer) else model.num_query_groups for layer in range(model.num_layers)]
    return {"attention.head_count": model.num_attention_heads, HEADS_KV: heads}


_CONVOLUTIONS = GgufRule(
    ("num_attention_heads", "num_query_groups", "short_conv.layers"),
    HEADS.keys,
    _read_convolutions,
    _write_convolutions,
)
_TAPS = GgufKey("short_conv.kernel_dim", "shortconv.l_cache")

FAMILIES = {
    "lfm2": GgufFamily(
        "lfm2",
        rows=_ROWS,
        keys=(*base_keys(heads=_CONVOLUTIONS), UNUSUAL_HEAD_SIZE),
        more=(VOCABULARY, _TAPS),
        computed={"kv_channels": hidden_by_heads, "qk_layernorm": True},
    ),
    "lfm2_moe": GgufFamily(
        "lfm2moe",
        rows=[
            *_ROWS,
            *in_layers({"feed_forward.gate": "ffn_gate_inp"}),
            *experts("feed_forward.experts", {hf: f"{gguf}_exps" for hf, gguf in _W123.items()}),
            GgufRow("model.layers.{layer}.feed_forward.expert_bias", CORRECTION),
        ],
        keys=(*base_keys(*EXPERT_COUNTS, heads=_CONVOLUTIONS), UNUSUAL_HEAD_SIZE),
        more=(EXPERT_SIZE, LEADING_DENSE, scored_by("sigmoid"), VOCABULARY, _TAPS),
        computed={"kv_channels": hidden_by_heads, "qk_layernorm": True, "moe.expert_bias": True},
    ),
}
"""By the `model_type` of the text model."""
