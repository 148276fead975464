"""The tower of Kimi K2.5.

Sources: llama.cpp's tools/mtmd/models/kimik25.cpp and conversion/kimivl.py of llama-cpp-python 0.3.36.
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
from precisionctl.checkpoints.gguf.towers.tower_changes import AxesApart
from precisionctl.checkpoints.gguf.towers.tower_vit import patches
from precisionctl.errors import shown

_EPSILON = 1e-5
"""Of all norms: a constant of the tower's modules."""
_MERGED = 2
_FEWEST_PATCHES = 8


def kimi_k25(settings: TowerSettings) -> Tower:
    settings = replace(settings, tower={_PUBLISHED.get(key, key): value for key, value in settings.tower.items()})
    settings.check(hidden_act="gelu_pytorch_tanh", projector_hidden_act="gelu", projector_ln_eps=_EPSILON)
    settings.check(merge_kernel_size=[_MERGED, _MERGED])
    settings.check({**_OF_PROJECTOR, **settings.config}, **_OF_PROJECTOR)
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "patch_size")
    width, mlp, layers, heads, patch = (settings.size(key) for key in keys)
    height, across, time = (settings.size(f"pos_emb_{key}") for key in ("height", "width", "time"))
    settings.check_rotary(heads, width)
    most = settings.processor.get("in_patch_limit", 16384)
    if type(most) is not int or not _FEWEST_PATCHES <= most <= 1 << 20 or most * patch * patch >= 1 << 32:
        raise no_tower(f"in_patch_limit of its preprocessor_config.json is {shown(most)}")
    block, blk, merged = "vision_tower.encoder.blocks.{layer}", "v.blk.{layer}", _MERGED * _MERGED * width
    rows = (
        linear(f"{block}.wqkv", f"{blk}.attn_qkv", 3 * width, width, change=AxesApart(heads))
        | linear(f"{block}.wo", f"{blk}.attn_out", width, width)
        | linear(f"{block}.mlp.fc0", f"{blk}.ffn_up", mlp, width)
        | linear(f"{block}.mlp.fc1", f"{blk}.ffn_down", width, mlp)
        | norm(f"{block}.norm0", f"{blk}.ln1", width)
        | norm(f"{block}.norm1", f"{blk}.ln2", width)
        | norm("vision_tower.encoder.final_layernorm", "v.post_ln", width)
        | norm("mm_projector.pre_norm", "mm.input_norm", width)
        | linear("mm_projector.proj.0", "mm.1", merged, merged)
        | linear("mm_projector.proj.2", "mm.2", settings.model.hidden_size, merged)
        | patches("vision_tower.patch_embed.proj", width, patch)
        | {"vision_tower.patch_embed.pos_emb.weight": TowerRow(("v.position_embd.weight",), (height, across, width))}
    )
    metadata = settings.common(TowerSizes(width, mlp, layers, heads, height * patch, patch)) | {
        "clip.projector_type": "kimik25",
        "vision.pos_emb_height": np.uint32(height),
        "vision.pos_emb_width": np.uint32(across),
        "vision.pos_emb_time": np.uint32(time),
        "clip.use_gelu": True,
        "clip.vision.attention.layer_norm_epsilon": np.float32(_EPSILON),
        "clip.vision.projector.scale_factor": np.uint32(_MERGED),
        "clip.vision.image_min_pixels": np.uint32(_FEWEST_PATCHES * patch * patch),
        "clip.vision.image_max_pixels": np.uint32(most * patch * patch),
    }
    return Tower(layers, rows, metadata)


_PUBLISHED = {
    **{f"vt_{key}": key for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")},
    **{f"init_pos_emb_{key}": f"pos_emb_{key}" for key in ("height", "width", "time")},
}
"""What the release calls settings that transformers' class has other names for."""
_OF_PROJECTOR: Mapping[str, Any] = {"projection_layer_norm_eps": _EPSILON}
"""At the top of transformers' config.json."""
_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "patch_size": 14,
    "pos_emb_height": 64,
    "pos_emb_width": 64,
    "pos_emb_time": 4,
    "hidden_act": "gelu_pytorch_tanh",
    "merge_kernel_size": [2, 2],
    "projector_hidden_act": "gelu",
    "projector_ln_eps": _EPSILON,
}
TOWERS = {"kimi_k25": TowerKind(kimi_k25, _DEFAULTS)}
"""By the `model_type` of the wrapper."""
