"""The towers of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5.

Sources: llama.cpp's tools/mtmd/models/qwen2vl.cpp and qwen3vl.cpp, which merge 2 x 2 patches of two equal frames, and
conversion/qwenvl.py and qwen3vl.py, of llama-cpp-python 0.3.36.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from precisionctl.checkpoints.gguf.metadata_bytes import GgufValue
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
from precisionctl.checkpoints.gguf.towers.tower_changes import FRAMES
from precisionctl.checkpoints.tensor_changes import THREE_EQUAL
from precisionctl.errors import shown

_EPSILON = np.float32(1e-6)
"""Of all norms of these towers: a constant of transformers' modules. The converter writes the text model's."""
_BLOCK, _BLK = "visual.blocks.{layer}", "v.blk.{layer}"


def qwen2_vl(settings: TowerSettings) -> Tower:
    settings.check(hidden_act="quick_gelu")
    width = settings.size("embed_dim")
    mlp = width * settings.size("mlp_ratio")
    rows = (
        _split_attention(width)
        | linear(f"{_BLOCK}.mlp.fc1", f"{_BLK}.ffn_up", mlp, width)
        | linear(f"{_BLOCK}.mlp.fc2", f"{_BLK}.ffn_down", width, mlp)
        | norm(f"{_BLOCK}.norm1", f"{_BLK}.ln1", width)
        | norm(f"{_BLOCK}.norm2", f"{_BLK}.ln2", width)
        | norm("visual.merger.ln_q", "v.post_ln", width)
    )
    # the converter writes hidden_size, which is the projector's, as the width of MLPs, and llama.cpp needs none
    said = _common(settings, width, settings.size("hidden_size"), 560)
    metadata = said | {"clip.projector_type": "qwen2vl_merger", **_epsilon()}
    return Tower(settings.size("depth"), rows | _merger(settings, width), metadata)


def qwen2_5_vl(settings: TowerSettings) -> Tower:
    settings.check(hidden_act="silu", window_size=112)
    width, mlp, depth = (settings.size(key) for key in ("hidden_size", "intermediate_size", "depth"))
    whole = settings.tower["fullatt_block_indexes"]
    every = whole[0] + 1 if isinstance(whole, list) and whole and type(whole[0]) is int else 0
    if every < 1 or whole != [*range(every - 1, depth, every)]:
        what = f"fullatt_block_indexes are {shown(whole)} of {depth} layers"
        raise no_tower(f"{what}; in llama.cpp every n-th layer attends to all of an image")
    rows = (
        _split_attention(width)
        | linear(f"{_BLOCK}.mlp.gate_proj", f"{_BLK}.ffn_gate", mlp, width)
        | linear(f"{_BLOCK}.mlp.up_proj", f"{_BLK}.ffn_up", mlp, width)
        | linear(f"{_BLOCK}.mlp.down_proj", f"{_BLK}.ffn_down", width, mlp)
        | norm(f"{_BLOCK}.norm1", f"{_BLK}.ln1", width, ["weight"])
        | norm(f"{_BLOCK}.norm2", f"{_BLK}.ln2", width, ["weight"])
        | norm("visual.merger.ln_q", "v.post_ln", width, ["weight"])
    )
    metadata = _common(settings, width, mlp, 560) | {
        "clip.projector_type": "qwen2.5vl_merger",
        "clip.use_silu": True,
        "clip.vision.n_wa_pattern": np.uint32(every),
        **_epsilon(),
    }
    return Tower(depth, rows | _merger(settings, width), metadata)


def qwen3_vl(settings: TowerSettings) -> Tower:
    settings.check(hidden_act="gelu_pytorch_tanh")
    width, mlp, depth = (settings.size(key) for key in ("hidden_size", "intermediate_size", "depth"))
    positions, patch_size = settings.size("num_position_embeddings"), settings.size("patch_size")
    side = math.isqrt(positions)
    if side * side != positions:
        raise no_tower(f"its {positions} position embeddings are no square")
    deep = settings.tower.get("deepstack_visual_indexes") or []
    known = isinstance(deep, list) and all(type(layer) is int and 0 <= layer < depth for layer in deep)
    if not known or len({*deep}) < len(deep):
        raise no_tower(f"deepstack_visual_indexes are {shown(deep)} of {depth} layers")
    merged, text = 4 * width, settings.model.hidden_size
    rows = (
        linear(f"{_BLOCK}.attn.qkv", f"{_BLK}.attn_qkv", 3 * width, width)
        | linear(f"{_BLOCK}.attn.proj", f"{_BLK}.attn_out", width, width)
        | linear(f"{_BLOCK}.mlp.linear_fc1", f"{_BLK}.ffn_up", mlp, width)
        | linear(f"{_BLOCK}.mlp.linear_fc2", f"{_BLK}.ffn_down", width, mlp)
        | norm(f"{_BLOCK}.norm1", f"{_BLK}.ln1", width)
        | norm(f"{_BLOCK}.norm2", f"{_BLK}.ln2", width)
        | norm("visual.merger.norm", "v.post_ln", width)
        | linear("visual.merger.linear_fc1", "mm.0", merged, merged)
        | linear("visual.merger.linear_fc2", "mm.2", text, merged)
        | _patches(settings, width)
        | {
            "visual.patch_embed.proj.bias": TowerRow(("v.patch_embd.bias",), (width,)),
            "visual.pos_embed.weight": TowerRow(("v.position_embd.weight",), (positions, width)),
        }
    )
    for number, layer in enumerate(deep):
        hf, gguf = f"visual.deepstack_merger_list.{number}", f"v.deepstack.{layer}"
        rows |= norm(f"{hf}.norm", f"{gguf}.norm", merged)
        rows |= linear(f"{hf}.linear_fc1", f"{gguf}.fc1", merged, merged)
        rows |= linear(f"{hf}.linear_fc2", f"{gguf}.fc2", text, merged)
    metadata = _common(settings, width, mlp, side * patch_size) | {
        "clip.projector_type": "qwen3vl_merger",
        "clip.use_gelu": True,
        "clip.vision.spatial_merge_size": np.uint32(2),
        **_epsilon(),
        "clip.vision.is_deepstack_layers": np.isin(np.arange(depth), deep),
    }
    return Tower(depth, rows, metadata)


def _common(settings: TowerSettings, width: int, mlp: int, image_size: int) -> dict[str, GgufValue]:
    """The keys of all towers of images, of a tower whose heads turn as llama.cpp turns them."""
    settings.check(spatial_merge_size=2, temporal_patch_size=2, in_channels=3)
    depth, heads, patch = (settings.size(key) for key in ("depth", "num_heads", "patch_size"))
    settings.check_rotary(heads, width)
    return settings.common(TowerSizes(width, mlp, depth, heads, image_size, patch))


def _epsilon() -> dict[str, GgufValue]:
    return {"clip.vision.attention.layer_norm_epsilon": _EPSILON}


def _patches(settings: TowerSettings, width: int) -> dict[str, TowerRow]:
    """The kernel over two frames, in llama.cpp one for each."""
    patch = settings.size("patch_size")
    names = ("v.patch_embd.weight", "v.patch_embd.weight.1")
    return {"visual.patch_embed.proj.weight": TowerRow(names, (width, 3, 2, patch, patch), FRAMES)}


def _split_attention(width: int) -> dict[str, TowerRow]:
    """Queries, keys and values, which are three tensors, and the output."""
    parts = [f"{_BLK}.attn_{part}" for part in "qkv"]
    qkv: Mapping[str, tuple[int, ...]] = {"weight": (3 * width, width), "bias": (3 * width,)}
    rows = {
        f"{_BLOCK}.attn.qkv.{end}": TowerRow(tuple(f"{part}.{end}" for part in parts), shape, THREE_EQUAL)
        for end, shape in qkv.items()
    }
    return rows | linear(f"{_BLOCK}.attn.proj", f"{_BLK}.attn_out", width, width)


def _merger(settings: TowerSettings, width: int) -> dict[str, TowerRow]:
    """What makes one token of 2 x 2 patches, and the kernel over two frames."""
    merged, text = 4 * width, settings.model.hidden_size
    first, second = (f"visual.merger.mlp.{number}" for number in (0, 2))
    return linear(first, "mm.0", merged, merged) | linear(second, "mm.2", text, merged) | _patches(settings, width)


_DEFAULTS: dict[str, Any] = {"in_channels": 3, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
_QWEN_3 = _DEFAULTS | {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "num_position_embeddings": 2304,
}
_QWEN_2 = _DEFAULTS | {
    "depth": 32,
    "embed_dim": 1280,
    "hidden_size": 3584,
    "hidden_act": "quick_gelu",
    "mlp_ratio": 4,
    "num_heads": 16,
}
_QWEN_2_5 = _DEFAULTS | {
    "depth": 32,
    "hidden_size": 3584,
    "hidden_act": "silu",
    "intermediate_size": 3420,
    "num_heads": 16,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
_DEEP = _QWEN_3 | {"deepstack_visual_indexes": [8, 16, 24]}
TOWERS = {
    "qwen2_vl": TowerKind(qwen2_vl, _QWEN_2),
    "qwen2_5_vl": TowerKind(qwen2_5_vl, _QWEN_2_5),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), TowerKind(qwen3_vl, _DEEP)),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), TowerKind(qwen3_vl, _QWEN_3)),
}
"""By the `model_type` of the wrapper."""
