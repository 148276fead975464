"""The tower of Gemma 3, a SigLIP, whose tokens are averaged.

Sources: llama.cpp's tools/mtmd/models/siglip.cpp and conversion/gemma.py of llama-cpp-python 0.3.36.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from precisionctl.checkpoints.gguf.towers.tower import Tower, TowerKind, TowerRow, TowerSettings, no_tower, norm
from precisionctl.checkpoints.gguf.towers.tower_vit import block, patches
from precisionctl.checkpoints.tensor_changes import PLUS_ONE
from precisionctl.dtypes import DType

_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_POOLED = 4
"""Patches in a row of which one token is made, where the file does not say it."""


def gemma3(settings: TowerSettings) -> Tower:
    settings.check(hidden_act="gelu_pytorch_tanh", num_channels=3)
    width, mlp, layers, heads, image, patch = sizes = settings.sizes()
    side, tokens = image // patch, settings.config.get("mm_tokens_per_image", 256)
    pooled = side // max(math.isqrt(tokens), 1) if isinstance(tokens, int) and tokens > 0 else 0
    if not pooled or (side // pooled) ** 2 != tokens or side % pooled:
        raise no_tower(f"{side} x {side} patches of an image are no {tokens} tokens")
    text = settings.model.hidden_size
    rows = (
        block("vision_tower.encoder.layers", _LAYER, width, mlp)
        | patches("vision_tower.embeddings.patch_embedding", width, patch, dtype=DType.float32)
        | norm("vision_tower.post_layernorm", "v.post_ln", width)
        | {
            "vision_tower.embeddings.position_embedding.weight": TowerRow(
                ("v.position_embd.weight",), (side * side, width)
            ),
            "multi_modal_projector.mm_input_projection_weight": TowerRow(
                ("mm.input_projection.weight",), (width, text), dtype=DType.float16
            ),
            "multi_modal_projector.mm_soft_emb_norm.weight": TowerRow(
                ("mm.soft_emb_norm.weight",), (width,), change=PLUS_ONE
            ),
        }
    )
    metadata = settings.common(sizes) | {
        "clip.projector_type": "gemma3",
        "clip.vision.attention.layer_norm_epsilon": settings.epsilon(settings.tower["layer_norm_eps"]),
        "clip.use_gelu": True,
        **({"clip.vision.projector.scale_factor": np.uint32(pooled)} if pooled != _POOLED else {}),
    }
    spellings = {"model.": "", "vision_tower.vision_model.": "vision_tower."}
    return Tower(layers, rows, metadata, spellings=spellings, unread=("vision_tower.head.",))


_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
TOWERS = {"gemma3": TowerKind(gemma3, _DEFAULTS)}
"""By the `model_type` of the wrapper."""
