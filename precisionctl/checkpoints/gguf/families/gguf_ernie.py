"""ERNIE 4.5.

Sources: llama.cpp's src/models/ernie4-5.cpp and ernie4-5-moe.cpp, and conversion/ernie.py.
"""

from dataclasses import replace

from precisionctl.checkpoints.gguf import expert_keys, metadata_keys as keys, tensor_rows as rows
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys
from precisionctl.model.model_shape import ModelShape


def _write_shared(model: ModelShape) -> keys.Said:
    assert model.moe
    shared = model.moe.shared_ffn_hidden_size or 0
    size = {"expert_shared_feed_forward_length": shared} if shared else {}
    return {"expert_shared_count": shared // model.moe.ffn_hidden_size, **size}


_SHARED = replace(
    expert_keys.SHARED_COUNT,
    keys=(*expert_keys.SHARED_COUNT.keys, *expert_keys.SHARED_EXPERT_SIZE.keys),
    write=_write_shared,
)
"""The size, which is not read, is theirs together; the converter makes it of other numbers, which come to the same in
the releases."""
_STEP = keys.always("interleave_moe_layer_step", 1)

FAMILIES = {
    "ernie4_5": GgufFamily(
        "ernie4_5",
        rows=[*rows.DECODER, *rows.MLP],
        keys=base_keys(),
        computed={"rotary_interleaved": True},
    ),
    "ernie4_5_moe": GgufFamily(
        "ernie4_5-moe",
        rows=[
            *rows.DECODER,
            *rows.MLP,
            *rows.ROUTER,
            *rows.EXPERTS,
            *rows.SHARED_EXPERTS,
            rows.GgufRow("model.layers.{layer}.mlp.moe_statics.e_score_correction_bias", rows.CORRECTION),
        ],
        keys=base_keys(head_size=keys.UNUSUAL_HEAD_SIZE),
        more=(*expert_keys.EXPERT_COUNTS, _STEP, expert_keys.LEADING_DENSE, expert_keys.EXPERT_SIZE, _SHARED),
        computed={"rotary_interleaved": True, "moe.expert_bias": True},
        down_last=True,
    ),
}
