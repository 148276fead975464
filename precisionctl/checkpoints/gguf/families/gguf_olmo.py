"""OLMo 2, OLMo 3 and OLMoE.

Sources: llama.cpp's src/models/olmo2.cpp and olmoe.cpp, and conversion/olmo.py.
"""

from collections.abc import Mapping
from typing import Any

from precisionctl.architectures.config_keys import Fields
from precisionctl.checkpoints.gguf.expert_keys import AS_LARGE_AS_MLP, EXPERT_COUNTS, IN_ALL_LAYERS
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys
from precisionctl.checkpoints.gguf.metadata import Described
from precisionctl.checkpoints.gguf.metadata_keys import (
    ATTENTION_BIAS,
    UNUSUAL_HEAD_SIZE,
    WINDOW,
    WINDOWS,
    GgufRule,
    hidden_by_heads,
)
from precisionctl.checkpoints.gguf.rope_keys import LOCAL_BASE, ROPE, TURNED
from precisionctl.checkpoints.gguf.tensor_rows import (
    ATTENTION,
    DECODER,
    EXPERTS,
    MLP,
    NORMS_BEHIND,
    QK_NORMS,
    ROUTER,
    in_layers,
    outside_layers,
)

_ROWS = [*outside_layers(), *in_layers({**NORMS_BEHIND, **QK_NORMS}), *ATTENTION, *MLP]
_COMPUTED: Mapping[str, Any] = {
    "kv_channels": hidden_by_heads,
    "tied_embeddings": False,
    "qk_layernorm": True,
    "qk_layernorm_over_heads": True,
    "pre_layernorms": False,
    "post_layernorms": True,
}


def _read_local_base(file: Described) -> Fields:
    file.expect("rope.freq_base_swa", file.said("rope.freq_base"))
    return {"rotary_base_local": ROPE.read(file)["rotary_base"]}


_LOCAL_BASE = GgufRule(LOCAL_BASE.fields, _read_local_base, LOCAL_BASE.write)
"""llama.cpp reads it and turns all layers with the one base."""


def _has_window(file: Described) -> bool:
    return bool(file.count("attention.sliding_window", 0))


FAMILIES = {
    "olmo2": GgufFamily(
        "olmo2",
        rows=_ROWS,
        keys=(*base_keys(), UNUSUAL_HEAD_SIZE),
        reads=(TURNED, ATTENTION_BIAS),
        computed=_COMPUTED,
        recognises=lambda file: not _has_window(file),
    ),
    "olmo3": GgufFamily(
        "olmo2",
        rows=_ROWS,
        keys=(*base_keys(rope=(ROPE, _LOCAL_BASE)), UNUSUAL_HEAD_SIZE),
        more=(WINDOW, WINDOWS),
        reads=(TURNED, ATTENTION_BIAS),
        computed={**_COMPUTED, "rotary_base_local": lambda fields: fields["rotary_base"]},
        recognises=_has_window,
    ),
    "olmoe": GgufFamily(
        "olmoe",
        rows=[*DECODER, *in_layers(QK_NORMS), *ROUTER, *EXPERTS],
        keys=(*base_keys(*EXPERT_COUNTS), UNUSUAL_HEAD_SIZE),
        computed={
            **IN_ALL_LAYERS,
            **AS_LARGE_AS_MLP,
            **dict.fromkeys(("qk_layernorm", "qk_layernorm_over_heads", "moe.pre_softmax"), True),
            "kv_channels": hidden_by_heads,
            "num_query_groups": lambda fields: fields["num_attention_heads"],
            "tied_embeddings": False,
        },
    ),
}
"""By the `model_type` of the text model."""
