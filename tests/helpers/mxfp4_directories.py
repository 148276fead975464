"""gpt-oss as it is published: its experts in MXFP4."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM

LAYERS, EXPERTS = 2, 4
SIZES = {
    "num_hidden_layers": LAYERS,
    "num_local_experts": EXPERTS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 250,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 8,
    "eos_token_id": 242,
    "pad_token_id": 249,
}
CONFIG = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "experts_per_token": 4,
    "hidden_act": "silu",
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_experts_per_tok": 4,
    "output_router_logits": False,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
    **SIZES,
}
NUMBERS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def packed(values: Tensor) -> Tensor:
    """Numbers `[experts, rows, columns]` as bytes `[experts, rows, columns / 32, 16]`: the earlier of two in the low
    bits."""
    codes = torch.searchsorted(torch.tensor(NUMBERS), values.abs()) + 8 * (values < 0)
    early, late = codes.view(-1, 2).unbind(1)
    return (early + 16 * late).byte().view(*values.shape[:2], -1, 16)


def make(
    directory: Path, exponents: tuple[int, int] = (118, 124), config: Mapping[str, Any] = CONFIG
) -> dict[str, Tensor]:
    """Write a model. Returns its tensors as stored."""
    torch.manual_seed(0)
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    model = GptOssForCausalLM(GptOssConfig(**plain)).bfloat16()
    stored: dict[str, Tensor] = {}
    for name, values in model.state_dict().items():
        if not name.endswith("_proj"):
            stored[name] = torch.randn_like(values) if values.dim() == 1 else values.clone()
            continue
        experts, columns, rows = values.shape
        numbers = torch.tensor(NUMBERS + [-x for x in NUMBERS[1:]])
        stored[f"{name}_blocks"] = packed(numbers[torch.randint(15, (experts, rows, columns))])
        stored[f"{name}_scales"] = torch.randint(*exponents, (experts, rows, columns // 32), dtype=torch.uint8)
    write(directory, stored, config)
    return stored


def write(directory: Path, stored: Mapping[str, Tensor], config: Mapping[str, Any] = CONFIG) -> None:
    directory.mkdir(exist_ok=True)
    save_file(dict(stored), directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
