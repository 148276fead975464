"""GGUF files by a small writer of its own, and a model in one as llama.cpp's converter has it."""

import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf_tokenizers
import numpy as np
import pico
import torch
from gguf_tokenizers import SIZE
from nemotron_nas import block
from safetensors.torch import load_file

from precisionctl.checkpoints.gguf.families import of_llama_cpp
from precisionctl.checkpoints.gguf.head import GgufTensor, read_head
from precisionctl.checkpoints.gguf.metadata_bytes import GgufValue
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import LLAMA_CPP, Request
from precisionctl.conversion.command import execute
from precisionctl.export.gguf.gguf_pretokenizers import QWEN2
from precisionctl.model.model_shape import ModelShape

F32, F16, Q8_0, BF16 = 0, 1, 8, 30
U32, I32, FLOAT, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Llama 3.2's."""

CHUNKS = {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1}
"""Llama 4's."""
_QWEN3_5_ROPE = {"rope_theta": 10000.0, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10]}
_MINISTRAL3_ROPE = pico.FAMILIES["ministral3"]["rope_parameters"] | {"beta_fast": 32.0, "beta_slow": 1.0}
OLMO3: dict[str, Any] = {
    "rope_parameters": {
        "full_attention": pico.YARN_ROPE | {"beta_fast": 32.0, "beta_slow": 1.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": pico.YARN_ROPE["rope_theta"]},
    }
}
"""One base for all layers."""
AS_RELEASED: dict[str, dict[str, Any]] = {
    "qwen3-5": {"linear_value_head_dim": 16, "rope_parameters": {"rope_type": "default", **_QWEN3_5_ROPE}},
    "qwen3-5-moe": {
        "linear_value_head_dim": 16,
        "rope_parameters": {"rope_type": "default", **_QWEN3_5_ROPE},
        "intermediate_size": None,
    },
    "gemma3n": {
        "num_hidden_layers": 20,
        "intermediate_size": [96] * 20,
        "layer_types": None,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 256,
        "laurel_rank": 64,
        "activation_sparsity_pattern": None,
        "final_logit_softcapping": 30.0,
    },
    "gemma4": {},
    "ling-2": {"head_dim": 16, "routed_scaling_factor": 2.5},
    "gemma4-moe": {},
    "gemma4-small": {},
    "minimax-m2": {"scoring_func": "sigmoid"},
    "llama4": CHUNKS | {"rope_parameters": LLAMA3 | {"factor": 16.0, "high_freq_factor": 1.0}},
    "deepseek-v3.2": {"scoring_func": "sigmoid", "index_head_dim": 64},
    "glm-moe-dsa": {"scoring_func": "sigmoid", "index_head_dim": 64},
    "nemotron-h": {
        "hybrid_override_pattern": "ME*EM*",
        "layers_block_type": [
            *("linear_attention", "moe", "full_attention"),
            *("moe", "linear_attention", "full_attention"),
        ],
    },
    "kimi-linear": {},
    "ling-3": {"num_nextn_predict_layers": 0},
    "falcon-h1": {"head_dim": 16},
    "falcon-h1-norm": {"head_dim": 16},
    "granite-hybrid": {},
    "granite-hybrid-dense": {
        "intermediate_size": 112,
        "num_experts_per_tok": 0,
        "position_embedding_type": "nope",
    },
    "lfm2": {},
    "lfm2-moe": {"routed_scaling_factor": 1.0},
    "seed-oss": {},
    "ernie4-5": {},
    "ernie4-5-moe": {"intermediate_size": 128},
    "exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 4},
    "olmoe": {"norm_topk_prob": False, "num_key_value_heads": 4},
    "cohere": {},
    "cohere2": {"rotary_pct": 1.0},
    "glm4": {},
    "starcoder2": {"sliding_window": None},
    "glm4-moe-lite": {
        "scoring_func": "sigmoid",
        "first_k_dense_replace": 1,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "ministral3": {"rope_parameters": {**_MINISTRAL3_ROPE, "mscale": 1.0, "mscale_all_dim": 1.0}},
    "hunyuan": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "hunyuan-moe": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "moe_intermediate_size": [96, 96],
        "num_shared_expert": [1, 1],
    },
    "afmoe": {"route_norm": True, "score_func": "sigmoid"},
    "arcee": {},
    "exaone-moe": {"first_k_dense_replace": 1, "scoring_func": "sigmoid"},
    "jamba": {},
    "cohere2-moe": {},
    "hy-v3": {},
    "exaone": {},
    "deepseek": {"routed_scaling_factor": 1.0},
    "dots1": {
        "scoring_func": "sigmoid",
        "num_key_value_heads": 4,
        "sliding_window": None,
        "layer_types": ["full_attention"] * 3,
        **dict.fromkeys(("n_group", "topk_group"), 1),
    },
    "granite-moe-shared": {},
    "stablelm": {},
    "phi": {"intermediate_size": 256, "num_key_value_heads": 4},
    "mimo-v2-flash": {
        "scoring_func": "sigmoid",
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.334},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.334},
        },
    },
    "nemotron": {},
    "nemotron-nas": {
        "num_hidden_layers": 4,
        "block_configs": [block(2, 2.625), block(None, 9.0), block(None, None), block(1, 5.25)],
    },
    "jais2": {},
    "glm": {},
    "olmo": {},
    "internlm3": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 6.0}},
    "iquestcoder": {},
    "solar-open": {},
    "gpt2": {},
    "gpt-bigcode": {"n_inner": 256},
    "gpt-neox": {},
    "falcon": {"ffn_hidden_size": 256, "max_position_embeddings": 2048},
    "falcon-40b": {"ffn_hidden_size": 256, "max_position_embeddings": 2048, "bias": False},
    "bloom": {},
    "mpt": {},
    "mellum": OLMO3 | {"mlp_layer_types": ["sparse"] * 3},
    "youtu": {"initializer_range": 0.02},
    "mistral4": {
        "rope_parameters": _MINISTRAL3_ROPE
        | {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0, "rope_theta": 10000.0}
    },
    "granite-swa": {"layer_rope_theta": [10000.0, 10000.0, 0, 10000.0, 0, 10000.0]},
    "granite-moe-swa": {},
    "minicpm3": {
        "initializer_range": 0.02,
        "scale_emb": 12,
        "dim_model_base": 256,
        "rope_parameters": pico.LONG_ROPE
        | {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0]}
        | {"original_max_position_embeddings": 512},
        "max_position_embeddings": 512,
    },
    "mamba2": {},
    "mamba": {},
    "falcon-mamba": {"intermediate_size": 128, "mixer_rms_eps": 1e-5},
    "step3p5": {
        **dict.fromkeys(("rope_theta", "partial_rotary_factors", "rope_scaling")),
        "rope_parameters": {
            "full_attention": {
                "rope_type": "llama3",
                "rope_theta": 5e6,
                "partial_rotary_factor": 0.5,
                "factor": 2.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 32.0,
                "original_max_position_embeddings": 131072,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        },
    },
    "laguna": {},
    "laguna-per-element": {},
}
"""Families, with what their releases say that small models of tests do not: of others llama.cpp computes something
else, or its converter knows none."""


def as_read(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A model's tensors under the names that they have when they are read of GGUF: experts that transformers saves
    `[in, out]` are `[out, in]`, as where engines look for codes: of gpt-oss, and of Llama 4 one by one."""
    made = dict[str, torch.Tensor]()
    turned = any("_proj_bias[" in name for name in tensors)  # gpt-oss alone has such
    for name, values in tensors.items():
        one_by_one = re.fullmatch(r"(.+feed_forward\.experts\.)(gate_up|down)_proj\[(\d+)\]", name)
        if one_by_one:
            module, kind, expert = one_by_one.groups()
            parts = values.t().chunk(2) if kind == "gate_up" else [values.t()]
            names = ["gate", "up"] if kind == "gate_up" else ["down"]
            made |= {f"{module}{expert}.{each}_proj.weight": part for each, part in zip(names, parts, strict=True)}
        elif turned and re.fullmatch(r".+\.mlp\.experts\.\w+_proj\[\d+\]", name):
            made[name.replace("_proj[", "_proj_blocks[")] = values.t()
        else:
            made[name] = values
    return made


def metadata(model: ModelShape) -> dict[str, GgufValue]:
    """What is written of a model, in BF16."""
    return of_llama_cpp(model).metadata(model, 32)


Described = tuple[tuple[int, ...], int, bytes]
"""A tensor's shape as PyTorch has it, the number of its format, and its bytes."""


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def value(given: Any) -> bytes:
    """A value with its type: of a list, that of its first element."""
    if isinstance(given, list):
        elements = [value(each) for each in given]
        return (
            struct.pack("<I", ARRAY)
            + elements[0][:4]
            + struct.pack("<Q", len(given))
            + b"".join(each[4:] for each in elements)
        )
    if isinstance(given, str):
        return struct.pack("<I", STRING) + string(given)
    letter, kind = {bool: ("?", BOOL), int: ("I", U32), float: ("f", FLOAT)}[type(given)]
    return struct.pack(f"<I{letter}", kind, given)


def head(metadata: Mapping[str, Any], tensors: Mapping[str, Described], version: int = 3, alignment: int = 32) -> bytes:
    made = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    made += b"".join(string(key) + value(each) for key, each in metadata.items())
    offset = 0
    for name, (shape, kind, data) in tensors.items():
        made += string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, offset)
        offset += -(-len(data) // alignment) * alignment
    return made


def file(metadata: Mapping[str, Any], tensors: Mapping[str, Described], alignment: int = 32) -> bytes:
    made = head(metadata, tensors, alignment=alignment)
    for _, _, data in tensors.values():
        made += bytes(-len(made) % alignment) + data
    return made + bytes(-len(made) % alignment)


def plain(tensor: torch.Tensor) -> Described:
    """A tensor in its own dtype."""
    kind = {torch.float32: F32, torch.float16: F16, torch.bfloat16: BF16}[tensor.dtype]
    return tuple(tensor.shape), kind, tensor.contiguous().view(torch.uint8).numpy().tobytes()


def q8_0(tensor: torch.Tensor) -> tuple[Described, torch.Tensor]:
    """A matrix in Q8_0, and its values: integers times an FP16 number for every 32 of a row."""
    groups = tensor.float().view(-1, 32)
    scales = (groups.abs().amax(1, keepdim=True) / 127).half()
    codes = (groups / scales.float()).round().clamp(-127, 127)
    blocks = np.concatenate([scales.numpy().view(np.uint8), codes.to(torch.int8).numpy().view(np.uint8)], 1)
    return (tuple(tensor.shape), Q8_0, blocks.tobytes()), (codes * scales.float()).view(tensor.shape)


def neighbours(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of queries or keys, whose rotary pairs are in the halves of heads, with each pair as neighbours."""
    size = len(rows) // heads
    order = [
        head * size + half * (size // 2) + place
        for head in range(heads)
        for place in range(size // 2)
        for half in (0, 1)
    ]
    return rows[order]


LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 128,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 500000.0,
    "llama.rope.dimension_count": 16,
    "tokenizer.ggml.tokens": ["<s>", "a", "b"],
}


def llama(directory: Path) -> tuple[dict[str, Any], dict[str, Described]]:
    """A small Llama 3 that is saved in a directory, in BF16: what a GGUF file has of it."""
    pico.save(directory, "llama-3", dtype=torch.bfloat16, rope_parameters=LLAMA3)
    tensors = load_file(directory / "model.safetensors")
    made = {
        "token_embd.weight": plain(tensors["model.embed_tokens.weight"]),
        "output_norm.weight": plain(tensors["model.norm.weight"].float()),
        "output.weight": plain(tensors["lm_head.weight"]),
        "rope_freqs.weight": plain(llama3_factors()),
    }
    for layer in range(2):
        for ours, theirs in LAYER.items():
            tensor = tensors[f"model.layers.{layer}.{ours}.weight"]
            if ours.endswith(("q_proj", "k_proj")):
                tensor = neighbours(tensor, 4 if ours.endswith("q_proj") else 2)
            made[f"blk.{layer}.{theirs}.weight"] = plain(tensor if tensor.dim() > 1 else tensor.float())
    return dict(METADATA), made


def llama3_factors() -> torch.Tensor:
    """By what LLAMA3 divides the frequency of each pair of 16 channels (Llama 3.1's own code, apply_scaling)."""
    found = []
    for pair in range(8):
        wavelength = 2 * torch.pi * 500000.0 ** (pair / 8)
        if wavelength < 8192 / 4:
            found.append(1.0)
        elif wavelength > 8192:
            found.append(32.0)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            found.append(1 / ((1 - smooth) / 32 + smooth))
    return torch.tensor(found)


_PAIRS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [24, 20, 20], "mrope_interleaved": True}
_HALF = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5}
WRAPPED: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "hidden_size": 512,
        "head_dim": None,
        "use_sliding_window": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [16, 24, 24]},
    },
    "qwen3_vl": {"head_dim": 128, "initializer_range": 0.02, "rope_parameters": _PAIRS},
    "qwen3_vl_moe": {"head_dim": 128, "initializer_range": 0.02, "mlp_only_layers": [], "rope_parameters": _PAIRS},
    "glm4v": {
        "initializer_range": 0.02,
        "hidden_size": 256,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": None,
        "rope_parameters": _HALF,
    },
    "glm4v_moe": {"head_dim": 128, "initializer_range": 0.02, "rope_parameters": _HALF},
    "glm_ocr": {
        "head_dim": 128,
        "initializer_range": 0.02,
        "rope_parameters": _HALF | {"mrope_section": [16, 24, 24], "partial_rotary_factor": 1.0},
    },
}
"""Wrappers whose text model llama.cpp has a family of its own for, with what releases say."""
SPARSE = {"mlp_only_layers": [], "decoder_sparse_step": 1}
_WRITTEN: dict[str, dict[str, Any]] = {
    "llama-3": {},
    "mistral": {},
    "mixtral": {},
    "granite": {},
    "qwen2": {},
    "qwen2-moe": SPARSE | {"norm_topk_prob": False},
    "qwen3": {},
    "qwen3-moe": SPARSE | {"norm_topk_prob": True},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3": {"query_pre_attn_scalar": 32},
    "gpt-oss": {"swiglu_limit": 7.0},
    "granite-moe": {},
    "smollm3": {},
    "phi3": {},
    "phi3-long": {},
    "olmo2": {},
    "olmo3": OLMO3,
    "deepseek-v2": {"q_lora_rank": 24},
    "deepseek-v3": {"rope_parameters": pico.YARN_ROPE | {"mscale": 0.8, "mscale_all_dim": 0.8}},
    "glm4-moe": {},
    "qwen3-next": SPARSE | {"linear_value_head_dim": 16},
    **AS_RELEASED,
}
WRITTEN = {family: changes for family, changes in _WRITTEN.items() if family not in pico.ABSENT}
"""Families that are written, each with the changes by which llama.cpp computes the model of `pico`."""


def source(folder: Path, family: str = "llama-3", **changes: Any) -> Path:
    pico.save(folder, family, vocab_size=SIZE, dtype=torch.bfloat16, **changes)
    gguf_tokenizers.byte_level(QWEN2).save_pretrained(folder)
    return folder


def export(made_of: Path, out: Path, scheme: Any = None, workers: int = 1, **options: Any) -> Path:
    command = plan_command(Request.export(made_of, out, LLAMA_CPP, scheme, **options))
    execute(command, workers=workers, verify=True)
    (file,) = (file for file in out.glob("*.gguf") if "mmproj" not in file.name)
    return file


def stored_tensors(file: Path) -> dict[str, tuple[GgufTensor, bytes]]:
    """The tensors of a file, each with its bytes."""
    data = file.read_bytes()
    tensors = read_head(file).tensors
    return {name: (each, data[each.offset : each.offset + each.nbytes]) for name, each in tensors.items()}
