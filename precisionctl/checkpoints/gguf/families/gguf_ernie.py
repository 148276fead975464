"""ERNIE 4.5.

Sources: llama.cpp's src/models/ernie4-5.cpp and ernie4-5-moe.cpp, and conversion/ernie.py.
"""

from dataclasses import replace

from precisionctl.checkpoints.gguf.expert_keys import (
    EXPERT_COUNTS,
    EXPERT_SIZE,
    LEADING_DENSE,
    SHARED_COUNT,
    SHARED_EXPERT_SIZE,
)
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys
from precisionctl.checkpoints.gguf.metadata_keys import HEAD_SIZE, UNUSUAL_HEAD_SIZE, Said, always
from precisionctl.checkpoints.gguf.tensor_rows import (
    CORRECTION,
    DECODER,
    EXPERTS,
    MLP,
    ROUTER,
    SHARED_EXPERTS,
    GgufRow,
)
from precisionctl.model.model_shape import ModelShape


def _write_shared(model: ModelShape) -> Said:
    assert model.moe
    shared = model.moe.shared_ffn_hidden_size or 0
    size = {"expert_shared_feed_forward_length": shared} if shared else {}
    return {"expert_shared_count": shared // model.moe.ffn_hidden_size, **size}


_SHARED = replace(SHARED_COUNT, keys=(*SHARED_COUNT.keys, *SHARED_EXPERT_SIZE.keys), write=_write_shared)
"""The size, which is not read, is theirs together; the converter makes it of other numbers, which come to the same in
the releases."""
_STEP = always("interleave_moe_layer_step", 1)

FAMILIES = {
    "ernie4_5": GgufFamily(
        "ernie4_5", rows=[*DECODER, *MLP], keys=(*base_keys(), HEAD_SIZE), computed={"rotary_interleaved": True}
    ),
    "ernie4_5_moe": GgufFamily(
        "ernie4_5-moe",
        rows=[
            *DECODER,
            *MLP,
            *ROUTER,
            *EXPERTS,
            *SHARED_EXPERTS,
            GgufRow("model.layers.{layer}.mlp.moe_statics.e_score_correction_bias", CORRECTION),
        ],
        keys=(*base_keys(), UNUSUAL_HEAD_SIZE),
        more=(*EXPERT_COUNTS, _STEP, LEADING_DENSE, EXPERT_SIZE, _SHARED),
        computed={"rotary_interleaved": True, "moe.expert_bias": True},
        down_last=True,
    ),
}
"""By the `model_type` of the text model."""
