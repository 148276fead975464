"""Tiny models of images whose towers llama.cpp computes, with the settings that releases have."""

import json
from pathlib import Path
from typing import Any

import gguf_files
import gguf_tokenizers
import tiny_wrappers
import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING

from precisionctl.export.gguf.gguf_pretokenizers import QWEN2

_PAIRS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [16, 24, 24]}
_WIDE = {"initializer_range": 0.02, "hidden_size": 512, "head_dim": None, "use_sliding_window": False}
_DEEP = {"depth": 4, "deepstack_visual_indexes": [2, 0, 1], "num_position_embeddings": 16}
_VIT = {"num_hidden_layers": 3, "image_size": 56}
_PIXTRAL = _VIT | {"head_dim": 32, "hidden_act": "silu"}
_LAST_LAYER = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}

_TOWERS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": (
        _WIDE | {"rope_parameters": _PAIRS, "rms_norm_eps": 1e-6},
        {"depth": 3, "embed_dim": 64, "hidden_size": 512},
        {},
    ),
    "qwen2_5_vl": (
        gguf_files.WRAPPED["qwen2_5_vl"],
        {"depth": 4, "fullatt_block_indexes": [1, 3], "out_hidden_size": 512},
        {},
    ),
    "qwen3_vl": (gguf_files.WRAPPED["qwen3_vl"], _DEEP, {}),
    "qwen3_vl_moe": (gguf_files.WRAPPED["qwen3_vl_moe"], _DEEP, {}),
    "qwen3_5": (gguf_files.AS_RELEASED["qwen3-5"], {"depth": 3, "num_position_embeddings": 16}, {}),
    "qwen3_5_moe": (gguf_files.AS_RELEASED["qwen3-5-moe"], {"depth": 3, "num_position_embeddings": 16}, {}),
    "gemma3": (
        {"query_pre_attn_scalar": 32, "num_hidden_layers": 7, "layer_types": None},
        _VIT,
        {"mm_tokens_per_image": 4},
    ),
    "gemma4": (
        {"use_bidirectional_attention": "vision"},
        {"num_key_value_heads": 4, "head_dim": 32, "position_embedding_size": 64, "standardize": True}
        | {"num_hidden_layers": 3, "use_clipped_linears": True},
        {},
    ),
    "kimi_k25": (
        {},
        {"num_hidden_layers": 3, "pos_emb_height": 4, "pos_emb_width": 4}
        | {"init_pos_emb_height": 4, "init_pos_emb_width": 4},
        {"architectures": ["KimiK25ForConditionalGeneration"]},
    ),
    "llava": (
        {},
        _PIXTRAL
        | {"model_type": "pixtral", "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
        | {"patch_size": 14},
        _LAST_LAYER,
    ),
    "mistral3": ({"rms_norm_eps": 1e-5, "sliding_window": None}, _PIXTRAL, {}),
    "internvl": ({}, {"num_hidden_layers": 4, "image_size": [56, 56], "architectures": ["InternVisionModel"]}, {}),
    "glm4v": (gguf_files.WRAPPED["glm4v"], {"depth": 3, "image_size": 56, "out_hidden_size": 256}, {}),
    "glm4v_moe": (gguf_files.WRAPPED["glm4v_moe"], {"depth": 3, "image_size": 56, "out_hidden_size": 128}, {}),
    "glm_ocr": (gguf_files.WRAPPED["glm_ocr"], {"depth": 3, "image_size": 56, "out_hidden_size": 128}, {}),
    "step3p7": (
        gguf_files.AS_RELEASED["step3p5"],
        {"num_hidden_layers": 3, "image_size": 56},
        {"understand_projector_stride": 2},
    ),
    "llama4": (
        gguf_files.CHUNKS,
        _VIT | dict.fromkeys(("projector_input_dim", "projector_output_dim", "vision_output_dim"), 160),
        {},
    ),
}
TOWERS = {kind: changes for kind, changes in _TOWERS.items() if kind in CONFIG_MAPPING}
"""By `model_type`: changes of the text model, of the tower, and of the top of config.json."""


def save(folder: Path, kind: str, **tower: Any) -> Path:
    """Save one in BF16, as the converter reads it: of InternVL by the names in memory. No tensor is all zeros, and no
    bound infinite."""
    text, vision, config = TOWERS[kind]
    in_memory = kind == "internvl"
    vision = vision | tower
    size = gguf_tokenizers.SIZE
    tiny_wrappers.save(folder, kind, vocab_size=size, dtype=torch.bfloat16, vision=vision, in_memory=in_memory, **text)
    said = json.loads((folder / "config.json").read_text()) | config
    said["vision_config"] |= vision  # some keys are no part of the tower's class
    (folder / "config.json").write_text(json.dumps(said))
    made, tensors = torch.Generator().manual_seed(0), tiny_wrappers.stored(folder)
    for name, tensor in tensors.items():
        if not tensor.any() or not tensor.isfinite().all():
            tensors[name] = torch.randn(tensor.shape, generator=made).to(tensor.dtype)
    if kind == "gemma3" and not any("vision_model." in name for name in tensors):
        tensors = {name.replace("vision_tower.", "vision_tower.vision_model."): t for name, t in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    gguf_tokenizers.byte_level(QWEN2, also=["[IMG_BREAK]"]).save_pretrained(folder)
    processor = {"image_mean": [0.48, 0.45, 0.41], "image_std": [0.27, 0.26, 0.28], "image_seq_length": 4}
    if kind == "gemma4":
        processor |= {"image_mean": [0.0] * 3, "image_std": [1.0] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder
