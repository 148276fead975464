"""Phi-3 and Phi-4-mini: Llama whose q, k and v come in one tensor, and gate and up in another.

Trap: `qkv_proj` is all of q, then all of k, then all of v, not Megatron's order by query group.
"""

from dataclasses import replace

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.config_layers import everywhere, sliding_window
from precisionctl.architectures.head_rearrangements import QKV
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rearrangements import Joined
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared import llama_rows as llama
from precisionctl.architectures.shared.llama_keys import llama_keys
from precisionctl.model.model_shape import ModelShape


def _write_original(model: ModelShape) -> keys.Config:
    """Its class has a default for the original context, which would outdo what the scaling says."""
    original = (model.rope_scaling or {}).get("original_max_position_embeddings")
    return {"original_max_position_embeddings": original} if original else {}


ARCHITECTURE = Architecture(
    model_types={"phi3": "Phi3ForCausalLM"},
    rows=llama.model_rows(
        *llama.ATTENTION_NORM,
        replace(llama.QKV_LINEAR[0], names="model.layers.{layer}.self_attn.qkv_proj.weight", rearrangement=Joined(QKV)),
        llama.PROJ[0],
        *llama.MLP_NORM,
        *llama.JOINED_MLP,
    ),
    config=llama_keys(
        epsilon=1e-5,
        rotary=rope(partial=True, original=4096),
        after_rotary=(
            keys.Rule((), write=_write_original),
            sliding_window(everywhere, listed=False),
        ),
    ),
)
