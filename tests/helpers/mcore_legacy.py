"""Real megatron-core saves and loads checkpoints of the `torch` format: `python mcore_legacy.py JOBS.json`.

By the rules of megatron/training/checkpointing.py, which is in no package: a directory for each rank, and in it what
GPTModel.state_dict_for_save_checkpoint and the optimizer's state_dict give. The file is a list of jobs for four
ranks, each `{"sizes": {"tensor", "pipeline", "virtual", "expert"}, "save" or "load": DIR, "model": {...}}`; beside
what is saved, or after loading, each rank's parameters go to `DIR.rank<number>.pt` under their own names.
"""

import argparse
import json
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mcore_optimizer import optimizer_of
from mcore_peer import start_ranks

from precisionctl.mcore.stand_ins import without_cuda

MODEL: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 8,
    "vocab": 128,
    "tied": False,
    "qkv_bias": False,
    "qk_norm": False,
    "experts": None,
    "first": None,
    "last": None,
}


def config_of(model: dict[str, Any], sizes: dict[str, int]) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    same = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels")
    experts: dict[str, Any] = {}
    if model["experts"]:
        experts = {"num_moe_experts": model["experts"], "moe_router_topk": 2, "moe_ffn_hidden_size": 48}
        experts |= {"moe_token_dispatcher_type": "alltoall", "moe_router_load_balancing_type": "none"}
    return TransformerConfig(
        **{name: model[name] for name in same},
        **experts,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=model["qkv_bias"],
        qk_layernorm=model["qk_norm"],
        tensor_model_parallel_size=sizes["tensor"],
        pipeline_model_parallel_size=sizes["pipeline"],
        virtual_pipeline_model_parallel_size=sizes["virtual"] if sizes["virtual"] > 1 else None,
        expert_model_parallel_size=sizes["expert"],
        num_layers_in_first_pipeline_stage=model["first"],
        num_layers_in_last_pipeline_stage=model["last"],
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
    )


def build(model: dict[str, Any], sizes: dict[str, int]) -> list[Any]:
    """The stages of this rank, with values that every rank which holds the same parameter gives it."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    specification = get_gpt_layer_local_spec(
        num_experts=model["experts"], moe_grouped_gemm=False, qk_layernorm=model["qk_norm"], normalization="RMSNorm"
    )
    made = []
    for stage in range(sizes["virtual"]):
        which = {"vp_stage": stage, "ignore_virtual": False} if sizes["virtual"] > 1 else {}
        made.append(
            GPTModel(
                config_of(model, sizes),
                specification,
                vocab_size=model["vocab"],
                max_sequence_length=64,
                pre_process=parallel_state.is_pipeline_first_stage(**which),
                post_process=parallel_state.is_pipeline_last_stage(**which),
                share_embeddings_and_output_weights=model["tied"],
                position_embedding_type="rope",
                vp_stage=stage if sizes["virtual"] > 1 else None,
            ).to(torch.bfloat16)
        )
        fill(made[-1], model["tied"])
    return made


def fill(stage: Any, tied: bool) -> None:
    from megatron.core import parallel_state

    for name, parameter in stage.named_parameters():
        whole = "embedding.word_embeddings.weight" if tied and name == "output_layer.weight" else name
        parts = whole.split(".")
        if parts[1] == "layers":
            parts[2] = str(stage.decoder.layers[int(parts[2])].layer_number)
        cut = getattr(parameter, "tensor_model_parallel", False)
        tensor = parallel_state.get_tensor_model_parallel_rank() if cut else 0
        expert = parallel_state.get_expert_model_parallel_rank() if "local_experts" in name else 0
        torch.manual_seed(zlib.crc32(f"{'.'.join(parts)} {tensor} {expert}".encode()))
        with torch.no_grad():
            parameter.copy_(torch.randn(parameter.shape))


def arguments(model: dict[str, Any], sizes: dict[str, int]) -> argparse.Namespace:
    """Those of Megatron-LM 0.16.1 that say what the model is."""
    same = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels")
    return argparse.Namespace(
        **{name: model[name] for name in same},
        group_query_attention=True,
        swiglu=True,
        normalization="RMSNorm",
        add_bias_linear=False,
        add_qkv_bias=model["qkv_bias"],
        qk_layernorm=model["qk_norm"],
        num_experts=model["experts"],
        moe_router_topk=2,
        moe_ffn_hidden_size=48,
        layernorm_epsilon=1e-5,
        position_embedding_type="rope",
        rotary_base=10000,
        max_position_embeddings=64,
        padded_vocab_size=model["vocab"],
        untie_embeddings_and_output_weights=not model["tied"],
        tensor_model_parallel_size=sizes["tensor"],
        pipeline_model_parallel_size=sizes["pipeline"],
        virtual_pipeline_model_parallel_size=sizes["virtual"] if sizes["virtual"] > 1 else None,
        expert_model_parallel_size=sizes["expert"],
        params_dtype=torch.bfloat16,
        bf16=True,
    )


def directory(sizes: dict[str, int]) -> str:
    from megatron.core import parallel_state

    name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    name += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}" if sizes["pipeline"] > 1 else ""
    return name + (f"_{parallel_state.get_expert_model_parallel_rank():03d}" if sizes["expert"] > 1 else "")


def save(job: dict[str, Any], stages: list[Any], rank: int) -> None:
    out = Path(job["save"]) / "iter_0000010" / directory(job["sizes"])
    out.mkdir(parents=True)
    dist.barrier()
    names = ["model"] if len(stages) == 1 else [f"model{index}" for index in range(len(stages))]
    state: dict[str, Any] = {
        "args": arguments(job["model"], job["sizes"]),
        "checkpoint_version": 3.0,
        "iteration": 10,
        "rng_state": [{"torch_rng_state": torch.get_rng_state()}],
    }
    held = {}
    if job.get("optimizer"):
        distributed = job["optimizer"] == "distributed"
        optimizer = optimizer_of(stages[0], distributed)
        optimizer.step()
        state["optimizer"] = optimizer.state_dict()
        if distributed:
            optimizer.save_parameter_state(str(out / "distrib_optim.pt"))
        held = {} if distributed and job["sizes"]["expert"] > 1 else states(stages[0], optimizer)  # in parts there
    state |= {name: stage.state_dict_for_save_checkpoint() for name, stage in zip(names, stages, strict=True)}
    torch.save(state, out / "model_optim_rng.pt")
    (Path(job["save"]) / "latest_checkpointed_iteration.txt").write_text("10")
    torch.save({"optimizer": held, **parameters(stages)}, f"{job['save']}.rank{rank}.pt")


def parameters(stages: list[Any]) -> dict[int, dict[str, torch.Tensor]]:
    return {
        index: {name: value.detach().clone() for name, value in stage.named_parameters()}
        for index, stage in enumerate(stages)
    }


def states(stage: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """The optimizer's tensors of each parameter, masters as `param`."""
    held = {}
    for name, parameter in stage.named_parameters():
        held[f"param.{name}"] = parameter.main_param
        for one in optimizer.chained_optimizers:
            found = one.optimizer.state.get(parameter.main_param, {})
            held |= {f"{kind}.{name}": values for kind, values in found.items()}
        for kind in ("param", "exp_avg", "exp_avg_sq"):  # a distributed optimizer has them flat
            held[f"{kind}.{name}"] = held[f"{kind}.{name}"].view(parameter.shape)
    return held


def local(name: str) -> str:
    """A name of Transformer Engine's specification as the local one has it."""
    name = name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
    name = name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
    head, experts, tail = name.partition(".mlp.experts.")
    if not experts:
        return name
    leaf = tail.rstrip("0123456789")
    return f"{head}{experts}local_experts.{tail.removeprefix(leaf)}.{leaf}"


def load(job: dict[str, Any], stages: list[Any], rank: int) -> None:
    path = Path(job["load"]) / directory(job["sizes"]) / "model_optim_rng.pt"
    torch.serialization.add_safe_globals([argparse.Namespace])
    state = torch.load(path, weights_only=True, map_location="cpu")
    assert state["checkpoint_version"] == 3.0
    for index, stage in enumerate(stages):
        with torch.no_grad():
            for parameter in stage.parameters():
                parameter.fill_(float("nan"))
        wanted = stage.state_dict().keys()
        found = state["model" if len(stages) == 1 else f"model{index}"]
        spelled = {local(name): value for name, value in found.items()}
        surplus = {name: value for name, value in spelled.items() if name not in wanted and "_extra_state" in name}
        assert all(value.numel() == 0 for value in surplus.values())  # Transformer Engine's modules would take them
        stage.load_state_dict({name: v for name, v in spelled.items() if name not in surplus}, strict=True)
    held = {}
    if job.get("optimizer"):
        optimizer = optimizer_of(stages[0], distributed=False)
        optimizer.load_state_dict(state["optimizer"])
        held = states(stages[0], optimizer)
    torch.save({"optimizer": held, **parameters(stages)}, f"{job['load']}.rank{rank}.pt")


def run(rank: int, jobs: list[dict[str, Any]], rendezvous: str) -> None:
    from megatron.core import parallel_state

    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=RANKS)
    with without_cuda():
        for job in jobs:
            sizes = job["sizes"] = {"tensor": 1, "pipeline": 1, "virtual": 1, "expert": 1} | job["sizes"]
            job["model"] = MODEL | job.get("model", {})
            parallel_state.initialize_model_parallel(
                sizes["tensor"],
                sizes["pipeline"],
                sizes["virtual"] if sizes["virtual"] > 1 else None,
                expert_model_parallel_size=sizes["expert"],
            )
            (save if "save" in job else load)(job, build(job["model"], sizes), rank)
            dist.barrier()
            parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


RANKS = 4

if __name__ == "__main__":
    path = Path(sys.argv[1])
    start_ranks(run, (json.loads(path.read_text()), f"{path}.rendezvous"), RANKS)
