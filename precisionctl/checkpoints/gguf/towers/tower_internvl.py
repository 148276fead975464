"""The tower of InternVL.

Sources: llama.cpp's tools/mtmd/models/internvl.cpp and conversion/internvl.py of llama-cpp-python 0.3.36.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from precisionctl.checkpoints.gguf.towers.tower import Tower, TowerKind, TowerRow, TowerSettings, linear, no_tower, norm
from precisionctl.checkpoints.gguf.towers.tower_vit import block, patches
from precisionctl.errors import shown

_LAYER = {
    "attn_q": "attention.q_proj",
    "attn_k": "attention.k_proj",
    "attn_v": "attention.v_proj",
    "attn_out": "attention.projection_layer",
    "ln1": "layernorm_before",
    "ln2": "layernorm_after",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_WITH_RMS = (3200, 45)
"""Width and layers of the tower that llama.cpp computes with RMS norms."""
_EMBEDDINGS, _LAYERS = "vision_tower.embeddings", "vision_tower.encoder.layer.{layer}"


def internvl(settings: TowerSettings) -> Tower:
    width, mlp, layers, heads, image, patch = sizes = settings.sizes()
    rms = (width, layers) == _WITH_RMS
    settings.check(num_channels=3, use_absolute_position_embeddings=True, use_mean_pooling=True)
    settings.check(norm_type="rms_norm" if rms else "layer_norm", use_qk_norm=rms, use_mask_token=False)
    settings.check(_OF_PROJECTOR | {**settings.config}, **_OF_PROJECTOR)
    activation, ratio = settings.tower.get("hidden_act"), settings.config.get("downsample_ratio", 0.5)
    if activation not in ("silu", "gelu") or ratio not in (1.0, 0.5, 0.25):
        raise no_tower(f"its tower has {shown(activation)} in MLPs, and a downsample_ratio of {shown(ratio)}")
    merge, side, text = int(1 / ratio), image // patch, settings.model.hidden_size
    merged = width * merge * merge
    rows = (
        block("vision_tower.encoder.layer", _LAYER, width, mlp, qkv_bias=settings.tower["attention_bias"] is not False)
        | patches(f"{_EMBEDDINGS}.patch_embeddings.projection", width, patch)
        | norm("multi_modal_projector.layer_norm", "mm.model.mlp.0", merged)
        | linear("multi_modal_projector.linear_1", "mm.model.mlp.1", text, merged)
        | linear("multi_modal_projector.linear_2", "mm.model.mlp.3", text, text)
        | {
            f"{_EMBEDDINGS}.cls_token": TowerRow(("v.class_embd",), (1, 1, width)),
            f"{_EMBEDDINGS}.position_embeddings": TowerRow(("v.position_embd.weight",), (1, side * side + 1, width)),
            f"{_LAYERS}.lambda_1": TowerRow(("v.blk.{layer}.ls1.weight",), (width,)),
            f"{_LAYERS}.lambda_2": TowerRow(("v.blk.{layer}.ls2.weight",), (width,)),
        }
    )
    if rms:
        for part in "qk":
            rows |= norm(f"{_LAYERS}.attention.{part}_norm", f"v.blk.{{layer}}.attn_{part}_norm", width, ["weight"])
    metadata = settings.common(sizes) | {
        "clip.projector_type": "internvl",
        "clip.vision.attention.layer_norm_epsilon": settings.epsilon(settings.tower["layer_norm_eps"]),
        f"clip.use_{activation}": True,
        "clip.vision.projector.scale_factor": np.uint32(merge),
    }
    return Tower(layers, rows, metadata, otherwise=_SHIFTED)


_SHIFTED = (
    "llama.cpp adds to each patch of an image the position of the one before it, as its class token stands behind the "
    "patches, whose first position it is"
)


_OF_PROJECTOR = {
    "projector_hidden_act": "gelu",
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "default",
}
_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 448,
    "patch_size": 14,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
    "norm_type": "layer_norm",
    "attention_bias": False,
    "use_qk_norm": False,
    "use_mask_token": False,
    "use_mean_pooling": True,
    "use_absolute_position_embeddings": True,
}
TOWERS = {"internvl": TowerKind(internvl, _DEFAULTS)}
"""By the `model_type` of the wrapper."""
