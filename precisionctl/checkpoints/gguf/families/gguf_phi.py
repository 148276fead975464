"""Phi-3 and Phi-4.

Sources: llama.cpp's src/models/phi3.cpp, and conversion/phi.py.
"""

import math

from precisionctl.architectures.config_keys import Fields
from precisionctl.checkpoints.gguf import metadata_keys as keys, rope_keys, tensor_rows as rows
from precisionctl.checkpoints.gguf.family import GgufFamily
from precisionctl.checkpoints.gguf.metadata import Described
from precisionctl.errors import UnknownArchitecture, shown
from precisionctl.model.model_shape import ModelShape


def _original_context(model: ModelShape) -> int:
    return int((model.rope_scaling or {}).get(rope_keys.ORIGINAL) or model.max_position_embeddings)


def _longrope_factor(original: int, most: int) -> float:
    return math.sqrt(1 + math.log(most / original) / math.log(original)) if 1 < original < most else 1.0


def _read_longrope(file: Described) -> Fields:
    most = file.count("context_length")
    original = file.count("rope.scaling.original_context_length", most)
    scaled = file.has("rope_factors_long.weight")
    usual = _longrope_factor(original, most) if scaled else 1.0
    key = "rope.scaling.attn_factor"
    if not math.isclose(file.number(key, usual), usual, rel_tol=1e-5):
        what = f"{file.architecture}.{key} is {shown(file.said(key))}, and {usual} as usual"
        raise UnknownArchitecture(what)
    return {"rope_scaling": {"rope_type": "longrope", rope_keys.ORIGINAL: original}} if scaled else {}


def _write_longrope(model: ModelShape) -> keys.Said:
    factor = _longrope_factor(_original_context(model), model.max_position_embeddings)
    return {"rope.scaling.attn_factor": factor} if model.rope_scaling else {}


_ORIGINAL_CONTEXT = keys.write_only(lambda model: {"rope.scaling.original_context_length": _original_context(model)})
_LONGROPE = keys.GgufEntry((), ("rope.scaling.attn_factor",), _read_longrope, _write_longrope)
"""By the key of _ORIGINAL_CONTEXT too."""
_WINDOW = keys.integer_or_none("sliding_window", "attention.sliding_window")

FAMILIES = {
    "phi3": GgufFamily(
        "phi3",
        rows=[
            *rows.outside_layers(),
            *rows.in_layers(rows.NORMS),
            *rows.linears({"self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output"}),
            *rows.JOINED_MLP,
        ],
        keys=(
            keys.CONTEXT,
            _ORIGINAL_CONTEXT,
            keys.WIDTH,
            keys.MLP_SIZE,
            keys.LAYERS,
            keys.HEADS,
            keys.EPSILON,
            rope_keys.TURNED,
            rope_keys.ROPE,
        ),
        more=(_WINDOW, _LONGROPE),
        reads=(keys.HEAD_SIZE,),
        computed={"kv_channels": keys.hidden_by_heads},
        ignored=keys.NO_WINDOW,
        scalings=rope_keys.LONGROPE_ALONE,
    ),
}
"""By the `model_type` of the text model. LongRoPE's factor is passed over, as in transformers where the original
context is said."""
