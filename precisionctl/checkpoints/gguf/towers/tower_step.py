"""The tower of Step 3.7.

Sources: llama.cpp's tools/mtmd/models/step3vl.cpp and conversion/step3.py of llama-cpp-python 0.3.36.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from precisionctl.checkpoints.gguf.towers.tower import (
    Tower,
    TowerKind,
    TowerRow,
    TowerSettings,
    TowerSizes,
    linear,
    no_tower,
    norm,
)
from precisionctl.checkpoints.gguf.towers.tower_vit import patches
from precisionctl.errors import shown

_MERGED = 4
"""Sides of patches in a token: two convolutions with a stride of 2."""


def step3p7(settings: TowerSettings) -> Tower:
    tower = {_PUBLISHED.get(key, key): value for key, value in settings.tower.items()}
    settings = replace(settings, tower=tower, processor={**_OF_IMAGES, **settings.processor})
    settings.check(hidden_act="quick_gelu", num_channels=3)
    settings.check({**_OF_PROJECTOR, **settings.config}, **_OF_PROJECTOR)
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "image_size", "patch_size")
    width, layers, heads, image, patch = (settings.size(key) for key in keys)
    settings.check_rotary(heads, width)
    ratio = tower["mlp_ratio"]
    if not isinstance(ratio, int | float) or not 0 < ratio * width < 1 << 20:
        raise no_tower(f"its config.json has {shown(ratio)} as `mlp_ratio` of the tower")
    mlp = int(width * ratio)  # whatever is said beside it
    block, blk = "vision_model.transformer.resblocks.{layer}", "v.blk.{layer}"
    rows = (
        patches("vision_model.conv1", width, patch, with_bias=False)
        | norm("vision_model.ln_pre", "v.pre_ln", width)
        | norm(f"{block}.ln_1", f"{blk}.ln1", width)
        | norm(f"{block}.ln_2", f"{blk}.ln2", width)
        | linear(f"{block}.attn.out_proj", f"{blk}.attn_out", width, width)
        | linear(f"{block}.mlp.c_fc", f"{blk}.ffn_up", mlp, width)
        | linear(f"{block}.mlp.c_proj", f"{blk}.ffn_down", width, mlp)
        | {
            "vision_model.positional_embedding": TowerRow(("v.position_embd.weight",), ((image // patch) ** 2, width)),
            f"{block}.attn.in_proj_weight": TowerRow((f"{blk}.attn_qkv.weight",), (3 * width, width)),
            f"{block}.attn.in_proj_bias": TowerRow((f"{blk}.attn_qkv.bias",), (3 * width,)),
            f"{block}.ls_1.gamma": TowerRow((f"{blk}.ls1.weight",), (width,)),
            f"{block}.ls_2.gamma": TowerRow((f"{blk}.ls2.weight",), (width,)),
            "vision_model.vit_downsampler1.weight": TowerRow(("mm.0.weight",), (2 * width, width, 3, 3)),
            "vision_model.vit_downsampler1.bias": TowerRow(("mm.0.bias",), (2 * width,)),
            "vision_model.vit_downsampler2.weight": TowerRow(("mm.1.weight",), (4 * width, 2 * width, 3, 3)),
            "vision_model.vit_downsampler2.bias": TowerRow(("mm.1.bias",), (4 * width,)),
            "vit_large_projector.weight": TowerRow(("mm.model.fc.weight",), (settings.model.hidden_size, 4 * width)),
        }
    )
    metadata = settings.common(TowerSizes(width, mlp, layers, heads, image, patch)) | {
        "clip.projector_type": "step3vl",
        "clip.vision.attention.layer_norm_epsilon": settings.epsilon(tower["layer_norm_eps"]),
        "clip.vision.projector.scale_factor": np.uint32(_MERGED),
        "clip.vision.preproc_image_size": np.uint32(3024),
    }
    return Tower(layers, rows, metadata, otherwise=_ANTIALIASED)


_ANTIALIASED = (
    "llama.cpp brings the positions of patches to the size of a window of an image with antialiasing, and transformers "
    "without"
)
_PUBLISHED = {"width": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"}
"""What the release calls settings that transformers' class has other names for."""
_OF_PROJECTOR: Mapping[str, Any] = {"projector_bias": False, "understand_projector_stride": 2}
"""At the top of config.json; the second in the release's alone."""
_OF_IMAGES: Mapping[str, Any] = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
"""What its processor's class has where no file says them."""
_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 1536,
    "mlp_ratio": 8960 / 1536,
    "num_hidden_layers": 47,
    "num_attention_heads": 16,
    "num_channels": 3,
    "image_size": 728,
    "patch_size": 14,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
TOWERS = {"step3p7": TowerKind(step3p7, _DEFAULTS)}
"""By the `model_type` of the wrapper."""
