"""The towers of GLM-4.1V, GLM-4.5V and GLM-4.6V, and of GLM-OCR.

Sources: llama.cpp's tools/mtmd/models/glm4v.cpp, which merges 2 x 2 patches of two equal frames, and
conversion/qwen3vl.py, of llama-cpp-python 0.3.36.
"""

from typing import Any

from precisionctl.checkpoints.gguf.towers.tower import (
    Tower,
    TowerKind,
    TowerRow,
    TowerSettings,
    TowerSizes,
    linear,
    norm,
)
from precisionctl.checkpoints.gguf.towers.tower_changes import FRAMES

_BLOCK, _BLK = "visual.blocks.{layer}", "v.blk.{layer}"


def glm4v(settings: TowerSettings) -> Tower:
    settings.check(attention_bias=False)
    width, out, merged = (settings.size(key) for key in ("hidden_size", "out_hidden_size", "intermediate_size"))
    side = settings.size("image_size") // settings.size("patch_size")
    rows = (
        _block(width, out, ["weight"])
        | norm("visual.post_conv_layernorm", "v.norm_embd", width, ["weight"])
        | {"visual.embeddings.position_embedding.weight": TowerRow(("v.position_embd.weight",), (side * side, width))}
        | _projector(settings, width, out, merged)
    )
    return Tower(settings.size("depth"), rows, _metadata(settings, width))


def glm_ocr(settings: TowerSettings) -> Tower:
    """GLM-OCR's, whose queries and keys are normalised, and which learns no positions."""
    settings.check(attention_bias=True)
    width, out, mlp = (settings.size(key) for key in ("hidden_size", "out_hidden_size", "intermediate_size"))
    metadata = _metadata(settings, width)
    head = width // settings.size("num_heads")
    rows = (
        _block(width, mlp, ["weight", "bias"])
        | norm(f"{_BLOCK}.attn.q_norm", f"{_BLK}.attn_q_norm", head, ["weight"])
        | norm(f"{_BLOCK}.attn.k_norm", f"{_BLK}.attn_k_norm", head, ["weight"])
        | _projector(settings, width, out, 3 * out)
    )
    # a layer of multi-token prediction, which is among the text model's
    return Tower(settings.size("depth"), rows, metadata, unread=("language_model.layers.",))


def _metadata(settings: TowerSettings, width: int) -> dict[str, Any]:
    settings.check(hidden_act="silu", spatial_merge_size=2, temporal_patch_size=2, in_channels=3)
    # the width of MLPs is the projector's in GLM-4.1V, and llama.cpp needs none
    keys = ("intermediate_size", "depth", "num_heads", "image_size", "patch_size")
    sizes = TowerSizes(width, *(settings.size(key) for key in keys))
    settings.check_rotary(sizes.heads, width)
    return settings.common(sizes) | {
        "clip.projector_type": "glm4v",
        "clip.use_silu": True,
        "clip.vision.attention.layer_norm_epsilon": settings.epsilon(settings.tower["rms_norm_eps"]),
    }


def _block(width: int, mlp: int, ends: list[str]) -> dict[str, TowerRow]:
    """What is in a layer, and behind the last: linears with such ends."""
    linears = (
        linear(f"{_BLOCK}.attn.qkv", f"{_BLK}.attn_qkv", 3 * width, width)
        | linear(f"{_BLOCK}.attn.proj", f"{_BLK}.attn_out", width, width)
        | linear(f"{_BLOCK}.mlp.gate_proj", f"{_BLK}.ffn_gate", mlp, width)
        | linear(f"{_BLOCK}.mlp.up_proj", f"{_BLK}.ffn_up", mlp, width)
        | linear(f"{_BLOCK}.mlp.down_proj", f"{_BLK}.ffn_down", width, mlp)
    )
    return (
        {name: row for name, row in linears.items() if name.rpartition(".")[2] in ends}
        | norm(f"{_BLOCK}.norm1", f"{_BLK}.ln1", width, ["weight"])
        | norm(f"{_BLOCK}.norm2", f"{_BLK}.ln2", width, ["weight"])
        | norm("visual.post_layernorm", "v.post_ln", width, ["weight"])
    )


def _projector(settings: TowerSettings, width: int, out: int, merged: int) -> dict[str, TowerRow]:
    """The kernel over two frames, in llama.cpp one for each, and what makes one token of 2 x 2 patches."""
    text, patch = settings.model.hidden_size, settings.size("patch_size")
    names = ("v.patch_embd.weight", "v.patch_embd.weight.1")
    return norm("visual.merger.post_projection_norm", "mm.post_norm", out) | {
        "visual.patch_embed.proj.weight": TowerRow(names, (width, 3, 2, patch, patch), FRAMES),
        "visual.patch_embed.proj.bias": TowerRow(("v.patch_embd.bias",), (width,)),
        "visual.downsample.weight": TowerRow(("mm.patch_merger.weight",), (out, width, 2, 2)),
        "visual.downsample.bias": TowerRow(("mm.patch_merger.bias",), (out,)),
        "visual.merger.proj.weight": TowerRow(("mm.model.fc.weight",), (out, out)),
        "visual.merger.gate_proj.weight": TowerRow(("mm.gate.weight",), (merged, out)),
        "visual.merger.up_proj.weight": TowerRow(("mm.up.weight",), (merged, out)),
        "visual.merger.down_proj.weight": TowerRow(("mm.down.weight",), (text, merged)),
    }


_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "in_channels": 3,
    "image_size": 336,
    "patch_size": 14,
    "rms_norm_eps": 1e-5,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
_GLM4V = _DEFAULTS | {
    "attention_bias": False,
    "depth": 24,
    "hidden_size": 1536,
    "out_hidden_size": 4096,
    "intermediate_size": 13696,
    "num_heads": 12,
}
_GLM_OCR = _DEFAULTS | {
    "attention_bias": True,
    "depth": 24,
    "hidden_size": 1024,
    "out_hidden_size": 1536,
    "intermediate_size": 4096,
    "num_heads": 16,
}
TOWERS = {
    **dict.fromkeys(("glm4v", "glm46v", "glm4v_moe"), TowerKind(glm4v, _GLM4V)),
    "glm_ocr": TowerKind(glm_ocr, _GLM_OCR),
}
"""By the `model_type` of the wrapper."""
