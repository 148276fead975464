"""Falcon-H1: in each layer a mixer beside attention, then an MLP. llama.cpp has none of its multipliers: weights are
multiplied by them, in FP32, before they are rounded.

Sources: llama.cpp's src/models/falcon-h1.cpp and mamba-base.cpp, and conversion/falcon_h1.py and mamba.py.
"""

from precisionctl.checkpoints.gguf import metadata_keys as keys, rope_keys, tensor_rows as rows
from precisionctl.checkpoints.gguf.families.gguf_mamba2 import MIXER_AS_MAMBA2, mixer
from precisionctl.checkpoints.gguf.family import GgufFamily
from precisionctl.checkpoints.tensor_changes import SAME, Multiplied, TensorChange
from precisionctl.codes.row_factors import RowFactors
from precisionctl.model.model_shape import ModelShape


def _times(*fields: str) -> Multiplied:
    """All rows, by these fields one after the other."""
    return Multiplied(lambda model: RowFactors(((1, tuple(keys.value_of(model, field) for field in fields)),)))


def _of_mlp(number: int) -> Multiplied:
    return Multiplied(lambda model: RowFactors(((1, (keys.value_of(model, "multipliers.mlp")[number],)),)))


def _of_mixer(model: ModelShape) -> RowFactors:
    """A factor for all of what in_proj makes, and one for each part."""
    parts = zip(keys.value_of(model, "mamba.in_proj_parts"), keys.value_of(model, "multipliers.ssm"), strict=True)
    return RowFactors(tuple((size, (keys.value_of(model, "multipliers.ssm_in"), factor)) for size, factor in parts))


_KEYS, _INPUTS = ("multipliers.key", "multipliers.attention_in"), ("multipliers.attention_in",)
_MATRICES: dict[str, tuple[str, TensorChange]] = {
    "mamba.in_proj": ("ssm_in", Multiplied(_of_mixer)),
    "mamba.out_proj": ("ssm_out", _times("multipliers.ssm_out")),
    "self_attn.q_proj": ("attn_q", _times(*_INPUTS)),
    "self_attn.k_proj": ("attn_k", _times(*_KEYS)),
    "self_attn.v_proj": ("attn_v", _times(*_INPUTS)),
    "self_attn.o_proj": ("attn_output", _times("multipliers.attention_out")),
    "feed_forward.gate_proj": ("ffn_gate", _of_mlp(0)),
    "feed_forward.up_proj": ("ffn_up", SAME),
    "feed_forward.down_proj": ("ffn_down", _of_mlp(1)),
    "input_layernorm": ("attn_norm", SAME),
}
_ROWS = [
    rows.GgufRow("model.embed_tokens.weight", ("token_embd.weight",), _times("embedding_multiplier")),
    rows.GgufRow("model.final_layernorm.weight", ("output_norm.weight",)),
    rows.GgufRow("lm_head.weight", ("output.weight",), _times("logit_multiplier")),
    *(row for row in mixer("mamba") if "_proj." not in row.hf),
    *(rows.in_layer(f"{hf}.weight", f"{gguf}.weight", change) for hf, (gguf, change) in _MATRICES.items()),
    rows.in_layer("pre_ff_layernorm.weight", "ffn_norm"),
]


_MIXER_BESIDE = keys.GgufEntry(
    ("mamba.pattern", "mamba.gated_norm"),
    (),
    lambda file: {"mamba.pattern": "P" * file.layers(), "mamba.gated_norm": file.has("blk.0.ssm_norm.weight")},
)
_GROUPS = keys.write_only(lambda model: {keys.HEADS_KV: model.num_query_groups})
"""Behind the others, and what EQUAL_HEADS reads."""

FAMILIES = {
    "falcon_h1": GgufFamily(
        "falcon-h1",
        rows=_ROWS,
        keys=(keys.CONTEXT, keys.WIDTH, keys.MLP_SIZE, keys.EQUAL_HEADS, keys.LAYERS, MIXER_AS_MAMBA2, keys.EPSILON),
        more=(keys.VOCABULARY, _GROUPS, keys.HEAD_SIZE, rope_keys.ROPE, _MIXER_BESIDE),
        computed={"tied_embeddings": False},
        folded={
            **dict.fromkeys(("embedding_multiplier", "logit_multiplier"), 1.0),
            **{f"multipliers.{each}": 1.0 for each in ("attention_in", "attention_out", "key", "ssm_in", "ssm_out")},
            "multipliers.ssm": (1.0,) * 5,
            "multipliers.mlp": (1.0,) * 2,
        },
        scalings=rope_keys.UNSCALED_ALONE,
    )
}
