"""Phi-3 and Phi-4.

Sources: llama.cpp's src/models/phi3.cpp, and conversion/phi.py.
"""

import math

from precisionctl.architectures.config_keys import Fields
from precisionctl.checkpoints.gguf.family import GgufFamily
from precisionctl.checkpoints.gguf.metadata import Described
from precisionctl.checkpoints.gguf.metadata_keys import (
    CONTEXT,
    EPSILON,
    HEAD_SIZE,
    HEADS,
    LAYERS,
    MLP_SIZE,
    NO_WINDOW,
    WIDTH,
    WINDOW,
    GgufRule,
    Said,
    hidden_by_heads,
    write_only,
)
from precisionctl.checkpoints.gguf.rope_keys import LONGROPE_ALONE, ORIGINAL, ROPE, TURNED
from precisionctl.checkpoints.gguf.tensor_rows import JOINED_MLP, NORMS, in_layers, linears, outside_layers
from precisionctl.errors import UnknownArchitecture, shown
from precisionctl.model.model_shape import ModelShape


def _original_context(model: ModelShape) -> int:
    return int((model.rope_scaling or {}).get(ORIGINAL) or model.max_position_embeddings)


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
    return {"rope_scaling": {"rope_type": "longrope", ORIGINAL: original}} if scaled else {}


def _write_longrope(model: ModelShape) -> Said:
    factor = _longrope_factor(_original_context(model), model.max_position_embeddings)
    return {"rope.scaling.attn_factor": factor} if model.rope_scaling else {}


_ORIGINAL_CONTEXT = write_only(lambda model: {"rope.scaling.original_context_length": _original_context(model)})
_LONGROPE = GgufRule((), ("rope.scaling.attn_factor",), _read_longrope, _write_longrope)
"""By the key of _ORIGINAL_CONTEXT too."""
_WINDOW = GgufRule(
    WINDOW.fields,
    WINDOW.keys,
    lambda file: {"sliding_window": file.count("attention.sliding_window", 0) or None},
    lambda model: {"attention.sliding_window": model.sliding_window or 0},
)

FAMILIES = {
    "phi3": GgufFamily(
        "phi3",
        rows=[
            *outside_layers(),
            *in_layers(NORMS),
            *linears({"self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output"}),
            *JOINED_MLP,
        ],
        keys=(CONTEXT, _ORIGINAL_CONTEXT, WIDTH, MLP_SIZE, LAYERS, HEADS, EPSILON, TURNED, ROPE),
        more=(_WINDOW, _LONGROPE),
        reads=(HEAD_SIZE,),
        computed={"kv_channels": hidden_by_heads},
        ignored=NO_WINDOW,
        scalings=LONGROPE_ALONE,
    ),
}
"""By the `model_type` of the text model. LongRoPE's factor is passed over, as in transformers where the original
context is said."""
