"""Tiny DeepSeek-V4 models: as transformers makes them, and as DeepSeek publishes them, by a slow writer of its own.

Published files have DeepSeek's own names, norms in BF16, experts in MXFP4 and most other linears in blocks of FP8, both
under scales that are powers of two, called `scale`; and the layers of multi-token prediction, which transformers skips.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from four_bit_directories import SPELLINGS, coded
from safetensors.torch import save_file
from torch import Tensor
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 128,
    "q_lora_rank": 128,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "max_position_embeddings": 256,
    "layer_types": [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "partial_rotary_factor": 0.125,
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
    "sliding_window": 8,
    "o_groups": 2,
    "o_lora_rank": 128,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 2,
    "swiglu_limit": 1.0,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}


def make(**changes: Any) -> DeepseekV4ForCausalLM:
    """A model of FP32 numbers that BF16 holds, except those that its class keeps in FP32, with routes and logits that
    are not small."""
    generator = torch.Generator().manual_seed(1)
    settings = SIZES | {"rope_parameters": YARN | {"rope_type": "yarn"}} | changes
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**settings)).float()

    def drawn(tensor: Tensor) -> Tensor:
        return torch.randn(tensor.shape, generator=generator)

    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" in name:
                tensor.copy_((1 + 0.1 * drawn(tensor)).bfloat16())
            elif tensor.dim() == 1:
                tensor.add_(0.3 * drawn(tensor))
            else:
                value = 0.08 * drawn(tensor)
                tensor.copy_(value if re.search(r"_hc\.|hc_head|position_bias", name) else value.bfloat16())
        for name, tensor in model.named_buffers():
            if "tid2eid" in name:
                tensor.copy_(torch.rand(len(tensor), 4, generator=generator).argsort(dim=1)[:, : tensor.shape[1]])
            elif "correction_bias" in name:
                tensor.copy_(0.1 * drawn(tensor))
    return model.eval()


_IN_BLOCKS = re.compile(r".*attn\.(wq_a|wq_b|wkv|wo_a|wo_b)|.*indexer\.wq_b|.*shared_experts\.w\d|mtp\.\d+\.[eh]_proj")
_EXPERTS = re.compile(r".*\.ffn\.experts\.\d+\.w\d")
_WIDE = re.compile(r"(.*\.)?(hc_\w+|attn_sink|ape|gate\.bias)")


def _native(name: str) -> str:
    """DeepSeek's name of a tensor of transformers' state_dict."""
    for pattern, new in (
        (r"^model\.", ""),
        (r"^embed_tokens", "embed"),
        (r"^lm_head", "head"),
        (r"^hc_head\.hc_", "hc_head_"),
        (r"self_attn\.", "attn."),
        (r"mlp\.", "ffn."),
        (r"input_layernorm", "attn_norm"),
        (r"post_attention_layernorm", "ffn_norm"),
        (r"attn_hc\.", "hc_attn_"),
        (r"ffn_hc\.", "hc_ffn_"),
        (r"sinks", "attn_sink"),
        (r"compressor\.indexer\.scorer\.", "indexer."),
        (r"compressor\.indexer\.(kv_proj|gate_proj|kv_norm|position_bias)", r"indexer.compressor.\1"),
        (r"compressor\.indexer\.", "indexer."),
        (r"compressor\.kv_norm", "compressor.norm"),
        (r"position_bias", "ape"),
        (r"attn\.gate_proj|compressor\.gate_proj", "compressor.wgate"),
        (r"kv_proj", "wkv"),
        (r"\b([qo])_([ab])_proj", r"w\1_\2"),
        (r"q_a_norm", "q_norm"),
        (r"e_score_correction_bias", "bias"),
        (r"shared_experts\.gate_proj", "shared_experts.w1"),
        (r"shared_experts\.down_proj", "shared_experts.w2"),
        (r"shared_experts\.up_proj", "shared_experts.w3"),
    ):
        name = re.sub(pattern, new, name)
    return name


def native(model: DeepseekV4ForCausalLM) -> dict[str, Tensor]:
    """Every tensor under DeepSeek's name, FP32, experts one by one."""
    found = {}
    for name, tensor in model.state_dict().items():
        prefix = _native(name).rpartition(".")[0]
        if name.endswith("experts.gate_up_proj"):
            for number, both in enumerate(tensor):
                found[f"{prefix}.{number}.w1.weight"], found[f"{prefix}.{number}.w3.weight"] = both.chunk(2)
        elif name.endswith("experts.down_proj"):
            found |= {f"{prefix}.{number}.w2.weight": each for number, each in enumerate(tensor)}
        else:
            found[_native(name)] = tensor
    return {name: tensor.contiguous() for name, tensor in found.items()}


def _in_blocks(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """E4M3 codes of a matrix, their E8M0 scales for 128 x 128, and what they decode to."""
    rows, columns = (-(-size // 128) for size in values.shape)
    exponents = torch.empty(rows, columns)
    codes, decoded = torch.empty(values.shape, dtype=torch.float8_e4m3fn), torch.empty(values.shape)
    for row in range(rows):
        for column in range(columns):
            here = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
            exponents[row, column] = torch.ceil(torch.log2(values[here].abs().max() / 448))
            scale = torch.exp2(exponents[row, column])
            codes[here] = (values[here] / scale).to(torch.float8_e4m3fn)
            decoded[here] = codes[here].float() * scale
    return codes, (exponents + 127).to(torch.uint8).view(torch.float8_e8m0fnu), decoded


def publish(directory: Path, **changes: Any) -> dict[str, Tensor]:
    """Write a model as DeepSeek publishes it. Returns what each of its tensors is worth, in the dtype of its values."""
    model, generator = make(**changes), torch.Generator().manual_seed(2)
    tensors = native(model)
    predicting = {name: tensor for name, tensor in tensors.items() if name.startswith("layers.0.")}
    predicting |= {f"layers.0.{kind}": tensors[kind] for kind in ("hc_head_fn", "hc_head_base", "hc_head_scale")}
    predicting |= {f"layers.0.{kind}.weight": tensors["norm.weight"] for kind in ("enorm", "hnorm", "norm")}
    predicting |= {f"layers.0.{kind}.weight": tensors["layers.0.attn.wq_a.weight"] for kind in ("e_proj", "h_proj")}
    predicting["layers.0.ffn.gate.bias"] = torch.zeros(4)
    del predicting["layers.0.ffn.gate.tid2eid"]
    tensors |= {name.replace("layers.0.", "mtp.0."): tensor.clone() for name, tensor in predicting.items()}
    stored, worth = {}, {}
    for name, values in tensors.items():
        module = name.removesuffix(".weight")
        if _EXPERTS.fullmatch(module):
            written, decoded = coded(tuple(values.shape), SPELLINGS["fp8-fp4-experts"], generator)
            exponents = torch.randint(121, 124, written["weight_scale_inv"].shape, generator=generator)
            factors = torch.exp2(exponents - written["weight_scale_inv"].view(torch.uint8).int())
            stored[name] = written["weight"]
            stored[f"{module}.scale"] = exponents.to(torch.uint8).view(torch.float8_e8m0fnu)
            worth[name] = (decoded * factors.repeat_interleave(32, dim=1)).bfloat16()
        elif _IN_BLOCKS.fullmatch(module):
            stored[name], stored[f"{module}.scale"], decoded = _in_blocks(values)
            worth[name] = decoded.bfloat16()
        else:
            kept = _WIDE.fullmatch(name) or not values.is_floating_point()
            stored[name] = worth[name] = values if kept else values.bfloat16()
    directory.mkdir(parents=True, exist_ok=True)
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(published_config(model.config), indent=2))
    return worth


def published_config(config: DeepseekV4Config) -> dict[str, Any]:
    """A config.json with DeepSeek's keys. transformers makes layers of 0, 4 and 128 of `compress_ratios`; here their
    kinds and rates stand for themselves."""
    told = config.to_dict()
    for key in ("rope_parameters", "partial_rotary_factor", "mlp_layer_types", "dtype", "transformers_version"):
        told.pop(key, None)
    rates = {"sliding_attention": 0, **config.compress_rates}
    told |= {
        "compress_ratios": [*(rates[kind] for kind in config.layer_types), 0],
        "topk_method": "noaux_tc",
        "architectures": ["DeepseekV4ForCausalLM"],
        "torch_dtype": "bfloat16",
        "qk_rope_head_dim": int(config.head_dim * config.partial_rotary_factor),
        "num_hash_layers": config.mlp_layer_types.count("hash_moe"),
        "num_nextn_predict_layers": 1,
        "rope_scaling": YARN,
        "expert_dtype": "fp4",
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        },
    }
    return told
