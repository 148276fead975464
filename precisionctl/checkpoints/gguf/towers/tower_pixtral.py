"""Pixtral's tower, of a LLaVA (Pixtral 12B) and of Mistral 3, which also merges patches.

Sources: llama.cpp's tools/mtmd/models/pixtral.cpp and conversion/llava.py of llama-cpp-python 0.3.36.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from precisionctl.checkpoints.gguf.metadata_bytes import GgufValue
from precisionctl.checkpoints.gguf.towers.tower import (
    Tower,
    TowerKind,
    TowerRow,
    TowerSettings,
    linear,
    no_tower,
    norm,
)
from precisionctl.checkpoints.gguf.towers.tower_vit import block, patches
from precisionctl.checkpoints.tensor_changes import RotaryMove
from precisionctl.errors import shown

_LAYER = {
    "attn_q": "attention.q_proj",
    "attn_k": "attention.k_proj",
    "attn_v": "attention.v_proj",
    "attn_out": "attention.o_proj",
    "ln1": "attention_norm",
    "ln2": "ffn_norm",
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
}
_EPSILON = 1e-5
"""Of the tower's norms, a constant of transformers' modules."""
_END_OF_ROW = "[IMG_BREAK]"


def pixtral(settings: TowerSettings) -> Tower:
    """The tower of a `llava` with this tower, of Pixtral 12B."""
    if settings.tower.get("model_type") != "pixtral":
        raise no_tower("llama.cpp's converter knows no tower of a `llava` but Pixtral's")
    settings.check(settings.config, vision_feature_select_strategy="full")
    settings.check({"vision_feature_layer": -2} | {**settings.config}, vision_feature_layer=-1)
    return _tower(settings, {}, {}, with_bias=settings.config.get("multimodal_projector_bias", True) is not False)


def mistral3(settings: TowerSettings) -> Tower:
    merge, width = settings.config.get("spatial_merge_size", 2), settings.size("hidden_size")
    if type(merge) is not int or not 0 < merge <= 64:
        raise no_tower(f"its config.json has {shown(merge)} as `spatial_merge_size`")
    if settings.model.norm_epsilon != _EPSILON:
        what = f"llama.cpp has {_EPSILON} as the epsilon of its projector's norm"
        raise no_tower(f"{what}, and the text model's, {settings.model.norm_epsilon}, is what it has")
    merger = TowerRow(("mm.patch_merger.weight",), (width, width * merge * merge))
    rows = norm("multi_modal_projector.norm", "mm.input_norm", width, ["weight"]) | {
        "multi_modal_projector.patch_merger.merging_layer.weight": merger
    }
    settings.check({"vision_feature_layer": -1} | {**settings.config}, vision_feature_layer=-1)
    said = {"clip.vision.spatial_merge_size": np.uint32(merge)}
    return _tower(settings, rows, said, with_bias=settings.config.get("multimodal_projector_bias", False) is not False)


def _tower(
    settings: TowerSettings, rows: Mapping[str, TowerRow], said: Mapping[str, GgufValue], *, with_bias: bool
) -> Tower:
    width, mlp, layers, heads, image, patch = sizes = settings.sizes()
    settings.check(num_channels=3)
    settings.check({"projector_hidden_act": "gelu"} | {**settings.config}, projector_hidden_act="gelu")
    settings.check_rotary(heads, width)
    activation = settings.tower.get("hidden_act")
    size = settings.tower.get("head_dim", width // heads)
    if activation not in ("silu", "gelu") or size != width // heads:
        what = f"its tower has {heads} heads of {shown(size)} in {width}, and {shown(activation)} in its MLPs"
        raise no_tower(what)
    if (token := settings.token(_END_OF_ROW)) is None:
        raise no_tower(f"its tokenizer has no {_END_OF_ROW}, which llama.cpp puts behind a row of patches")
    text = settings.model.hidden_size
    projector = linear("multi_modal_projector.linear_1", "mm.1", text, width)
    projector |= linear("multi_modal_projector.linear_2", "mm.2", text, text)
    rows = (
        block("vision_tower.transformer.layers", _LAYER, width, mlp, pairs=RotaryMove("gguf", heads), with_bias=False)
        | patches("vision_tower.patch_conv", width, patch, with_bias=False)
        | norm("vision_tower.ln_pre", "v.pre_ln", width, ["weight"])
        | {name: row for name, row in projector.items() if with_bias or name.endswith(".weight")}
        | {**rows}
    )
    metadata = settings.common(sizes) | {
        "clip.projector_type": "pixtral",
        "clip.vision.attention.layer_norm_epsilon": np.float32(_EPSILON),
        f"clip.use_{activation}": True,
        **said,
    }
    return Tower(layers, rows, metadata, token=("v.token_embd.img_break", token))


_OF_CLASS: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 1024,
    "patch_size": 16,
    "hidden_act": "gelu",
}
TOWERS = {"llava": TowerKind(pixtral, _OF_CLASS), "mistral3": TowerKind(mistral3, _OF_CLASS)}
"""By the `model_type` of the wrapper."""
