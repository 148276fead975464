"""Phi-3 and Phi-4-mini: Llama whose q, k and v come in one tensor, and gate and up in another.

Trap: `qkv_proj` is all of q, then all of k, then all of v, not Megatron's order by query group.
"""

from dataclasses import replace

from precisionctl.architectures.config_keys import HEADS, SILU, SIZES, Config, Key, Rule, tied
from precisionctl.architectures.config_layers import everywhere, sliding_window
from precisionctl.architectures.head_rearrangements import QKV
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rearrangements import Joined
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared.llama_rows import (
    ATTENTION_NORM,
    JOINED_MLP,
    MLP_NORM,
    PROJ,
    QKV_LINEAR,
    model_rows,
)
from precisionctl.model.model_shape import ModelShape


def _write_original(model: ModelShape) -> Config:
    """Its class has a default for the original context, which would outdo what the scaling says."""
    original = (model.rope_scaling or {}).get("original_max_position_embeddings")
    return {"original_max_position_embeddings": original} if original else {}


ARCHITECTURE = Architecture(
    model_types={"phi3": "Phi3ForCausalLM"},
    rows=model_rows(
        *ATTENTION_NORM,
        replace(QKV_LINEAR[0], names="model.layers.{layer}.self_attn.qkv_proj.weight", rearrangement=Joined(QKV)),
        PROJ[0],
        *MLP_NORM,
        *JOINED_MLP,
    ),
    config=(
        *SIZES,
        HEADS,
        SILU,
        Key("norm_epsilon", "rms_norm_eps", 1e-5),
        rope(partial=True, original=4096),
        Rule((), lambda config: {}, _write_original),
        sliding_window(everywhere, listed=False),
        tied(False),
    ),
)
