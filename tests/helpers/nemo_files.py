"""Checkpoints of NeMo 1 as NLPSaveRestoreConnector writes them, of a transformers model: names and order of rows are
those of NeMo's converters (scripts/checkpoint_converters/convert_{llama,qwen2,mixtral}_hf_to_nemo.py)."""

import json
import math
import re
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint
import transformers
import yaml
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter

TARGET = "nemo.collections.nlp.models.language_modeling.megatron_gpt_model.MegatronGPTModel"
State = dict[str, Tensor]


def fields(config: Any, **more: Any) -> dict[str, Any]:
    """What is in model_config.yaml, of a Llama, a Qwen2 or a Mixtral."""
    experts, window = getattr(config, "num_local_experts", None), getattr(config, "sliding_window", None)
    return {
        "target": TARGET,
        "mcore_gpt": True,
        "encoder_seq_length": config.max_position_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": None,
        "normalization": "rmsnorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "bias": False,
        "qkv_bias": config.model_type == "qwen2",
        "activation": "fast-swiglu",
        "position_embedding_type": "rope",
        "rotary_percentage": 1.0,
        "rotary_base": config.rope_parameters["rope_theta"],
        **({"window_size": [window, 0]} if window else {}),
        "share_embeddings_and_output_weights": config.tie_word_embeddings,
        "apply_query_key_layer_scaling": True,
        "make_vocab_size_divisible_by": 2,
        "tokenizer": {"library": "sentencepiece", "model": "nemo:0a_tokenizer.model"},
        **({"num_moe_experts": experts, "moe_router_topk": config.num_experts_per_tok} if experts else {}),
        **more,
    }


def state_of(weights: Mapping[str, Tensor], config: Any, *, rows: int | None = None) -> State:
    """The state dict of a Megatron-Core model, its vocabulary padded to so many rows."""
    groups, per_group = config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads
    vocabulary = config.vocab_size if rows is None else rows

    def padded(name: str) -> Tensor:
        return torch.nn.functional.pad(weights[name], (0, 0, 0, vocabulary - config.vocab_size))

    def qkv(layer: str, kind: str) -> Tensor:
        q, k, v = (weights[f"{layer}self_attn.{part}_proj.{kind}"] for part in "qkv")
        heads = [one.unflatten(0, (groups, -1, q.shape[0] // groups // per_group)) for one in (q, k, v)]
        return torch.cat(heads, 1).flatten(0, 2)

    state = {"embedding.word_embeddings.weight": padded("model.embed_tokens.weight")}
    for index in range(config.num_hidden_layers):
        old, new = f"model.layers.{index}.", f"decoder.layers.{index}."
        state[f"{new}self_attention.linear_qkv.layer_norm_weight"] = weights[f"{old}input_layernorm.weight"]
        state[f"{new}self_attention.linear_qkv.weight"] = qkv(old, "weight")
        if config.model_type == "qwen2":
            state[f"{new}self_attention.linear_qkv.bias"] = qkv(old, "bias")
        state[f"{new}self_attention.linear_proj.weight"] = weights[f"{old}self_attn.o_proj.weight"]
        norm = weights[f"{old}post_attention_layernorm.weight"]
        if config.model_type == "mixtral":
            state[f"{new}pre_mlp_layernorm.weight"] = norm
            state[f"{new}mlp.router.weight"] = weights[f"{old}block_sparse_moe.gate.weight"]
            for expert in range(config.num_local_experts):
                w1, w2, w3 = (weights[f"{old}block_sparse_moe.experts.{expert}.w{n}.weight"] for n in (1, 2, 3))
                state[f"{new}mlp.experts.local_experts.{expert}.linear_fc1.weight"] = torch.cat([w1, w3])
                state[f"{new}mlp.experts.local_experts.{expert}.linear_fc2.weight"] = w2
        else:
            gate, up, down = (weights[f"{old}mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
            state[f"{new}mlp.linear_fc1.layer_norm_weight"] = norm
            state[f"{new}mlp.linear_fc1.weight"] = torch.cat([gate, up])
            state[f"{new}mlp.linear_fc2.weight"] = down
    state["decoder.final_layernorm.weight"] = weights["model.norm.weight"]
    if not config.tie_word_embeddings:
        state["output_layer.weight"] = padded("lm_head.weight")
    return {f"model.{name}": tensor for name, tensor in state.items()}


LEGACY = (
    ("model.", "model.language_model."),
    (".decoder.", ".encoder."),
    (".self_attention.linear_qkv.layer_norm_", ".input_layernorm."),
    (".mlp.linear_fc1.layer_norm_", ".post_attention_layernorm."),
    (".linear_qkv.", ".query_key_value."),
    (".linear_proj.", ".dense."),
    (".linear_fc1.", ".dense_h_to_4h."),
    (".linear_fc2.", ".dense_4h_to_h."),
)
"""Names of Megatron-Core, and those of NeMo's own layers, in the order in which they are replaced."""


def legacy(name: str) -> str:
    for new, old in LEGACY:
        name = name.replace(new, old, 1)
    return name


def rank_of(state: State, rank: int, ranks: int) -> State:
    """What a tensor-parallel rank has."""
    cut = {}
    for name, tensor in state.items():
        if "norm" in name:
            cut[name] = tensor
        elif re.search(r"linear_proj|linear_fc2", name):
            cut[name] = tensor.chunk(ranks, 1)[rank].clone()
        elif "linear_fc1" in name:
            cut[name] = torch.cat([half.chunk(ranks)[rank] for half in tensor.chunk(2)])
        else:
            cut[name] = tensor.chunk(ranks)[rank].clone()
    return cut


def stacked(state: State) -> State:
    """Layers in one tensor each, as Megatron-Core's sharded state dicts have them."""
    found: dict[str, list[Tensor]] = {}
    for name, tensor in state.items():
        found.setdefault(re.sub(r"\.layers\.\d+\.", ".layers.", name), []).append(tensor)
    return {name: torch.stack(found[name]) if ".layers." in name else found[name][0] for name in found}


def write_torch_dist(folder: Path, state: State) -> None:
    folder.mkdir(parents=True)
    writer = FileSystemWriter(folder)
    torch.distributed.checkpoint.save(dict(stacked(state)), storage_writer=writer, no_dist=True)
    _mark(folder, "torch_dist")


def write_zarr(folder: Path, state: State, pieces: int = 2) -> None:
    """By zarr's specification, version 2: tensors of two dimensions and more in pieces along the last but one."""
    for name, tensor in stacked(state).items():
        shape, place = list(tensor.shape), folder / name
        size = [1 if ".layers." in name and axis == 0 else length for axis, length in enumerate(shape)]
        size[-2:-1] = [length // pieces for length in size[-2:-1]] if len(size) > 2 else size[-2:-1]
        place.mkdir(parents=True)
        dtype = {torch.bfloat16: "bfloat16", torch.float32: "<f4"}[tensor.dtype]
        about = {"zarr_format": 2, "shape": shape, "chunks": size, "dtype": dtype, "fill_value": None, "order": "C"}
        (place / ".zarray").write_text(json.dumps(about | {"compressor": None, "filters": None}))
        grid = [length // part for length, part in zip(shape, size, strict=True)]
        for number in range(math.prod(grid)):
            at = [int(one) for one in torch.unravel_index(torch.tensor(number), grid)]
            box = tuple(slice(n * part, (n + 1) * part) for n, part in zip(at, size, strict=True))
            data = tensor[box].contiguous().view(torch.uint8).numpy().tobytes()
            (place / ".".join(map(str, at))).write_bytes(data)
    _mark(folder, "zarr")


def _mark(folder: Path, backend: str) -> None:
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": backend, "sharded_backend_version": 1}))


def write_config(folder: Path, found: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model_config.yaml").write_text(yaml.safe_dump(dict(found)))
    (folder / "0a_tokenizer.model").write_bytes(b"tokens")


def write_ranks(folder: Path, states: Sequence[State]) -> None:
    """A state dict, or those of tensor-parallel ranks."""
    for number, state in enumerate(states):
        place = folder / f"mp_rank_{number:02d}" if len(states) > 1 else folder
        place.mkdir(parents=True, exist_ok=True)
        torch.save(state, place / "model_weights.ckpt")


def pack(folder: Path, path: Path, mode: Any = "w:") -> Path:
    with tarfile.open(path, mode) as tar:
        tar.add(folder, arcname=".")
    return path


_TINY = transformers.LlamaConfig(
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    vocab_size=16,
    max_position_embeddings=32,
)
FIELDS = fields(_TINY)
_SHAPES = {
    "embedding.word_embeddings.weight": (16, 8),
    "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": (8,),
    "decoder.layers.0.self_attention.linear_qkv.weight": (16, 8),
    "decoder.layers.0.self_attention.linear_proj.weight": (8, 8),
    "decoder.layers.0.mlp.linear_fc1.layer_norm_weight": (8,),
    "decoder.layers.0.mlp.linear_fc1.weight": (24, 8),
    "decoder.layers.0.mlp.linear_fc2.weight": (8, 12),
    "decoder.final_layernorm.weight": (8,),
    "output_layer.weight": (16, 8),
}
STATE = {f"model.{name}": torch.ones(shape, dtype=torch.bfloat16) for name, shape in _SHAPES.items()}
"""Of a tiny Llama, and its state dict."""
