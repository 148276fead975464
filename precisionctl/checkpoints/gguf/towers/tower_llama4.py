"""The tower of Llama 4.

Sources: llama.cpp's tools/mtmd/models/llama4.cpp and conversion/llama4.py of llama-cpp-python 0.3.36.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from precisionctl.checkpoints.gguf.towers.tower import Tower, TowerKind, TowerRow, TowerSettings, no_tower, norm
from precisionctl.checkpoints.gguf.towers.tower_vit import block
from precisionctl.errors import shown

_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ln1": "input_layernorm",
    "ln2": "post_attention_layernorm",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_EPSILON = 1e-5
"""Of the tower's norms, PyTorch's default, which transformers takes whatever `norm_eps` is."""


def llama4(settings: TowerSettings) -> Tower:
    settings.check(hidden_act="gelu", num_channels=3)
    width, mlp, layers, heads, image, patch = sizes = settings.sizes()
    inner, outer, last = (
        settings.size(key) for key in ("projector_input_dim", "projector_output_dim", "vision_output_dim")
    )
    ratio, side, text = settings.tower["pixel_shuffle_ratio"], image // patch, settings.model.hidden_size
    if ratio not in (1.0, 0.5, 0.25):
        raise no_tower(f"its tower has a pixel_shuffle_ratio of {shown(ratio)}")
    settings.check_rotary(heads, width)
    merge = int(1 / ratio)

    def weight(name: str, *shape: int) -> TowerRow:
        return TowerRow((name,), shape)

    rows = (
        block("vision_model.model.layers", _LAYER, width, mlp)
        | norm("vision_model.layernorm_pre", "v.pre_ln", width)
        | norm("vision_model.layernorm_post", "v.post_ln", width)
        | {
            "vision_model.class_embedding": weight("v.class_embd", width),
            "vision_model.positional_embedding_vlm": weight("v.position_embd.weight", side * side + 1, width),
            "vision_model.patch_embedding.linear.weight": weight("v.patch_embd.weight", width, 3 * patch * patch),
            "vision_model.vision_adapter.mlp.fc1.weight": weight("mm.model.mlp.1.weight", inner, mlp),
            "vision_model.vision_adapter.mlp.fc2.weight": weight("mm.model.mlp.2.weight", outer, outer),
            "multi_modal_projector.linear_1.weight": weight("mm.model.fc.weight", text, last),
        }
    )
    metadata = settings.common(sizes) | {
        "clip.projector_type": "llama4",
        "clip.vision.attention.layer_norm_epsilon": np.float32(_EPSILON),
        "clip.vision.projector.scale_factor": np.uint32(merge),
        "clip.use_gelu": True,
    }
    return Tower(layers, rows, metadata, otherwise=_BY_COLUMN)


_BY_COLUMN = "llama.cpp gives the tokens of an image column by column, and transformers row by row"


_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 5632,
    "num_hidden_layers": 34,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 448,
    "patch_size": 14,
    "hidden_act": "gelu",
    "pixel_shuffle_ratio": 0.5,
    "projector_input_dim": 4096,
    "projector_output_dim": 4096,
    "vision_output_dim": 7680,
}
TOWERS = {"llama4": TowerKind(llama4, _DEFAULTS)}
"""By the `model_type` of the wrapper."""
