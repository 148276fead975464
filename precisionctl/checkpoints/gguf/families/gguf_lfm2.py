"""LFM2, in some of whose layers a short convolution is in the place of attention.

Sources: llama.cpp's src/models/lfm2.cpp and lfm2moe.cpp, and conversion/lfm2.py.
"""

from precisionctl.architectures.config_keys import Fields
from precisionctl.checkpoints.gguf import expert_keys, metadata_keys as keys, tensor_rows as rows
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys
from precisionctl.checkpoints.gguf.metadata import Described
from precisionctl.checkpoints.tensor_changes import KERNEL

_ROWS = [
    *rows.outside_layers()[::2],
    rows.GgufRow("model.embedding_norm.weight", ("token_embd_norm.weight",)),
    *rows.in_layers(
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
            **{f"feed_forward.{hf}": gguf for hf, gguf in rows.W123.items()},
        }
    ),
    *rows.in_layers({"conv.conv": "shortconv.conv"}, KERNEL),
]


def _read_convolutions(file: Described) -> Fields:
    listed = file.counts(keys.HEADS_KV)
    return {**keys.read_some_heads(file, listed), "short_conv.layers": tuple(not number for number in listed)}


_CONVOLUTIONS = keys.GgufEntry(
    ("num_attention_heads", "num_query_groups", "short_conv.layers"),
    keys.HEADS.keys,
    _read_convolutions,
    lambda model: {
        "attention.head_count": model.num_attention_heads,
        keys.HEADS_KV: [
            0 if model.has_short_conv(layer) else model.num_query_groups for layer in range(model.num_layers)
        ],
    },
)
_TAPS = keys.integer("short_conv.kernel_dim", "shortconv.l_cache")

FAMILIES = {
    "lfm2": GgufFamily(
        "lfm2",
        rows=_ROWS,
        keys=base_keys(heads=_CONVOLUTIONS, head_size=keys.UNUSUAL_HEAD_SIZE),
        more=(keys.VOCABULARY, _TAPS),
        computed={"kv_channels": keys.hidden_by_heads, "qk_layernorm": True},
    ),
    "lfm2_moe": GgufFamily(
        "lfm2moe",
        rows=[
            *_ROWS,
            *rows.in_layers({"feed_forward.gate": "ffn_gate_inp"}),
            *rows.experts("feed_forward.experts", rows.W123),
            rows.GgufRow("model.layers.{layer}.feed_forward.expert_bias", rows.CORRECTION),
        ],
        keys=base_keys(*expert_keys.EXPERT_COUNTS, heads=_CONVOLUTIONS, head_size=keys.UNUSUAL_HEAD_SIZE),
        more=(
            expert_keys.EXPERT_SIZE,
            expert_keys.LEADING_DENSE,
            expert_keys.scored_by("sigmoid"),
            keys.VOCABULARY,
            _TAPS,
        ),
        computed={"kv_channels": keys.hidden_by_heads, "qk_layernorm": True, "moe.expert_bias": True},
    ),
}
