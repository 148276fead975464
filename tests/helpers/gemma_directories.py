"""Directories of `quant_method: gemma`, as Google publishes them: random codes in the modules of transformers that hold
and decode them."""

import json
from pathlib import Path
from typing import Any

import pico
import tiny_wrappers
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.integrations.gemma_quant import QuantizedEmbedding, QuantizedLinear, replace_with_quant_layers
from transformers.utils.quantization_config import GemmaQuantizationConfig

PUBLISHED: dict[str, Any] = {
    "quant_method": "gemma",
    "num_bits": 4,
    "quantize_embeddings": True,
    "module_quant_configs": {
        r"^lm_head$": {"num_bits": 2},
        r"language_model\.embed_tokens$": {"num_bits": 2},
        r"language_model\.embed_tokens_per_layer$": {"num_bits": 4},
        r"language_model\.layers\.(\d|1[0-4])\.mlp\.up": {"num_bits": 4},
        r"language_model\.layers\.\d+\.mlp\.": {"num_bits": 2},
        r"language_model\.layers\.\d+\.per_layer_input_gate$": {"num_bits": 8},
        r"language_model\.layers\.\d+\.per_layer_projection$": {"num_bits": 8},
        r"language_model\.layers\.\d+\.self_attn\.": {"num_bits": 4},
        r"vision_tower": {"num_bits": 8},
        r"audio_tower(?!.*lconv1d\.linear_start)": {"num_bits": 2},
        r"audio_tower\.layers\.\d+\.lconv1d\.linear_start\.": {"num_bits": 4},
    },
    "modules_to_not_convert": ["per_layer_model_projection", "patch_embedder", "position_embedding_table"],
}
"""As in google/gemma-4-E2B-it-qat-mobile-transformers, but for a split within the MLPs."""
OF_TEXT = PUBLISHED | {
    "module_quant_configs": {
        name.replace("language_model", "model"): said for name, said in PUBLISHED["module_quant_configs"].items()
    }
}


FILE = "model.safetensors"


def make(directory: Path, kind: str, said: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Save a small model, a wrapper or one of `pico`'s, in codes of these settings. Returns their values, BF16, as
    transformers computes them."""
    (tiny_wrappers if kind in tiny_wrappers.WRAPPERS else pico).save(directory, kind, dtype=torch.bfloat16)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for part in (config, config.get("text_config", {})):
        part["tie_word_embeddings"] = False
    path.write_text(json.dumps(config))
    auto = AutoModelForImageTextToText if "text_config" in config else AutoModelForCausalLM
    model: PreTrainedModel = auto.from_pretrained(directory, dtype=torch.bfloat16)
    settings = GemmaQuantizationConfig(**said)
    replace_with_quant_layers(model, settings, settings.modules_to_not_convert)
    values, blocks = fill(model, model.config.get_text_config().num_hidden_layers)
    path.write_text(json.dumps(config | {"quantization_config": said}))
    save_file({name: each.contiguous() for name, each in {**model.state_dict(), **blocks}.items()}, directory / FILE)
    return values


def fill(model: PreTrainedModel, layers: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Give each coded module random codes, and its scales. Returns the values; and scales of a cache, which belong to
    no module."""
    generator, values, beside = torch.Generator().manual_seed(1), dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, module in model.named_modules():
        if name.endswith("self_attn") and "audio" not in name:
            beside |= {f"{name}.{kind}_cache_scale": torch.tensor(0.25) for kind in "kv"}
        if not isinstance(module, QuantizedLinear | QuantizedEmbedding):
            continue
        codes, scale = (
            (module.weight, module.weight_scale)
            if isinstance(module, QuantizedLinear)
            else (module.embedding_quantized, module.embedding_scale)
        )
        number = torch.iinfo(codes.dtype)
        codes.copy_(torch.randint(number.min, number.max + 1, codes.shape, generator=generator))
        shape = (len(scale), layers if name.endswith("embed_tokens_per_layer") else 1)
        scale.data = torch.rand(shape, generator=generator) * 0.05 + 0.001
        if isinstance(module, QuantizedLinear):
            values[f"{name}.weight"] = module._dequantize_weights(torch.bfloat16)
        else:
            values[f"{name}.weight"] = module.weight
    return values, beside
