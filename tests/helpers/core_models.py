"""Models that megatron-core saves and loads on CPUs, and what its ranks hold by our names."""

import json
from pathlib import Path
from typing import Any

import torch
from installed import judge
from programs import MEGATRON, run_program
from torch import Tensor

PEER = Path(__file__).with_name("mcore_peer.py")

# what Megatron-LM 0.16.1 itself has in `args` for these sizes, of the arguments that matter here
SAVED_ARGS: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "group_query_attention": True,
    "kv_channels": 16,
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "layernorm_epsilon": 1e-5,
    "layernorm_zero_centered_gamma": False,
    "rotary_interleaved": False,
    "window_size": None,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "padded_vocab_size": 256,
    "max_position_embeddings": 128,
    "untie_embeddings_and_output_weights": True,
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "rotary_base": 10000,
    "use_rope_scaling": False,
    "rope_scaling_factor": 8.0,
    "rotary_seq_len_interpolation_factor": None,
}
_EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 48, "moe_router_topk": 2}
_SHARED = {"moe_shared_expert_intermediate_size": 32}
_LATENT = {
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "group_query_attention": False,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
}
_BIASED = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
MODELS: dict[str, dict[str, Any]] = {
    "experts": {**SAVED_ARGS, **_EXPERTS},
    "shared experts after a dense layer": {**SAVED_ARGS, **_EXPERTS, **_SHARED, "moe_layer_freq": [0, 1, 1, 1]},
    "as DeepSeek": {
        **SAVED_ARGS,
        **_EXPERTS,
        **_SHARED,
        **_LATENT,
        **_BIASED,
        "moe_layer_freq": [0, 1, 1, 1],
        "mtp_num_layers": 1,
    },
    "tied": {**SAVED_ARGS, "untie_embeddings_and_output_weights": False, "add_qkv_bias": True, "qk_layernorm": True},
}


def peer(directory: Path, jobs: list[dict[str, Any]], **sizes: int) -> None:
    """Run megatron-core on as many ranks as these sizes make: `tensor_parallel`, `pipeline_parallel`, ..."""
    judge("psutil", "a save of megatron-core waits for ever without it")
    work = {"tensor_parallel": 1, "pipeline_parallel": 1, **sizes, "jobs": jobs}
    path = directory / f"jobs-{len(list(directory.glob('jobs-*.json')))}.json"
    path.write_text(json.dumps(work))
    run_program(PEER, path, imports=MEGATRON)


def whole(name: str, shards: list[Tensor]) -> Tensor:
    """The tensor of which tensor-parallel ranks hold these shards, by the rules of Megatron's layers."""
    if name.endswith("linear_fc1.weight"):
        gates, ups = zip(*(shard.chunk(2) for shard in shards), strict=True)
        return torch.cat([*gates, *ups])
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return torch.cat(shards, dim=1)
    return torch.cat(shards) if shards[0].dim() == 2 or name.endswith("linear_qkv.bias") else shards[0]


def logical(name: str, names: set[str], first_layer: int = 0, first_expert: int = 0) -> str:
    """Our name of a parameter of a rank's model without Transformer Engine."""
    parts = name.split(".")
    if parts[0] == "decoder" and parts[1] == "layers":
        here = ".".join(parts[:3])
        parts[2] = str(int(parts[2]) + first_layer)
    elif parts[0] == "mtp":
        here = ".".join(parts[:4])
    else:
        return name
    at = 3 if parts[0] == "decoder" else 4
    latent = f"{here}.self_attention.linear_kv_down_proj.weight" in names
    dense = f"{here}.mlp.linear_fc1.weight" in names
    inner = ".".join(parts[at:])
    if not latent:
        inner = inner.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
    else:
        for norm in ("q", "kv"):
            inner = inner.replace(f".{norm}_layernorm.", f".linear_{norm}_up_proj.layer_norm_")
    if dense:
        inner = inner.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
    if "local_experts" in inner:
        number, leaf = inner.removeprefix("mlp.experts.local_experts.").split(".", 1)
        inner = f"mlp.experts.{leaf}{int(number) + first_expert}"
    return ".".join([*parts[:at], inner])


def of_experts(held: str, ranks: int, experts: int = 4) -> dict[str, Tensor]:
    """What expert-parallel ranks hold together, by our names."""
    found = {}
    for rank in range(ranks):
        state = torch.load(f"{held}.rank{rank}.pt")
        for name, tensor in state.items():
            found[logical(name, set(state), first_expert=rank * experts // ranks)] = tensor
    return found


def of_stages(held: str, tensor: int, stages: int, layers: int = 4) -> dict[str, Tensor]:
    """What a grid of tensor- and pipeline-parallel ranks holds together, by our names."""
    found: dict[str, Tensor] = {}
    for stage in range(stages):
        states = [torch.load(f"{held}.rank{stage * tensor + rank}.pt") for rank in range(tensor)]
        for name in states[0]:
            mine = logical(name, set(states[0]), first_layer=stage * layers // stages)
            found[mine] = whole(name, [state[name] for state in states])
    return found
