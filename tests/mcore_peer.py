"""Real megatron-core on CPUs under gloo, as a program: `python mcore_peer.py JOBS.json`.

The file holds `{"tensor_parallel": n, "pipeline_parallel": n, "jobs": [...]}`; each job saves a random model or
loads a checkpoint, whose own arguments make the model. A machine without a GPU needs a few stand-ins, all in
`without_cuda`.
"""

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing


def without_cuda():
    """megatron-core asks for CUDA in these places only, on the ways taken here."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from torch.overrides import TorchFunctionMode

    class CudaToCpu(TorchFunctionMode):  # masks of sliding windows are made on "cuda"
        def __torch_function__(self, function, types, args=(), kwargs=None):
            kwargs = dict(kwargs or {})
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = "cpu"
            return function(*args, **kwargs)

    torch.cuda.synchronize = lambda *_, **__: None
    torch.cuda.current_device = lambda: torch.device("cpu")
    CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()  # dropout is 0
    CudaToCpu().__enter__()


def carry_extra_states():
    """The linears without Transformer Engine have no FP8 state: give them one to save, and keep what is loaded."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    for linear in (ColumnParallelLinear, RowParallelLinear):
        linear.get_extra_state = lambda self: getattr(self, "payload", None)
        linear.set_extra_state = lambda self, state: setattr(self, "payload", state)


def build(args: argparse.Namespace, tensor_parallel: int, pipeline_parallel: int) -> Any:
    """The model that Megatron-LM makes of these arguments (core_transformer_config_from_args, gpt_builders.py)."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    same = (
        *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "normalization"),
        *("add_bias_linear", "add_qkv_bias", "layernorm_epsilon", "layernorm_zero_centered_gamma"),
        *("rotary_interleaved", "window_size", "attention_dropout", "hidden_dropout", "params_dtype", "bf16"),
    )
    config = TransformerConfig(
        **{name: getattr(args, name) for name in same},
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        gated_linear_unit=args.swiglu,
        activation_func=torch.nn.functional.silu,
        tensor_model_parallel_size=tensor_parallel,
        pipeline_model_parallel_size=pipeline_parallel,
        pipeline_dtype=args.params_dtype,
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization=args.normalization),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
    ).to(args.params_dtype)


def linears(model: Any) -> dict[str, Any]:
    """The model's linears that have an extra state, by name in the whole model."""
    first = model.decoder.layers[0].layer_number - 1  # layers count from 1, over all stages
    found = {}
    for name, module in model.named_modules():
        parts = name.split(".")
        if parts[-1].startswith("linear_"):
            found[".".join([*parts[:2], str(int(parts[2]) + first), *parts[3:]])] = module
    return found


def save(model: Any, args: argparse.Namespace, job: dict[str, Any], rank: int) -> None:
    """Save a random model, FP8 payloads with it, and beside it what each rank holds."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    torch.manual_seed(rank)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.1)
        if dist.get_world_size() > 1:  # what tensor parallelism does not cut is the same on all its ranks
            for parameter in model.parameters():
                if not getattr(parameter, "tensor_model_parallel", False):
                    torch.manual_seed(parameter.numel())
                    parameter.copy_(torch.randn(parameter.shape) * 0.1)
    payloads = torch.load(job["payloads"]) if "payloads" in job else {}
    for name, module in linears(model).items():
        module.payload = payloads.get(name)
    torch.save({name: value.clone() for name, value in model.named_parameters()}, f"{job['directory']}.rank{rank}.pt")
    Path(job["directory"]).mkdir(parents=True, exist_ok=True)
    dist.barrier()
    state = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 7,
        "model": model.sharded_state_dict(),
        "rng_state": ShardedObject("rng_state", [{"torch": torch.get_rng_state()}], (1,), (0,), replica_id=rank),
    }
    dist_checkpointing.save(state, job["directory"], content_metadata={"singleton_local_shards": False})


def load(model: Any, job: dict[str, Any], rank: int) -> None:
    """Load with Megatron's default strictness, and write logits and FP8 payloads."""
    from megatron.core import dist_checkpointing, parallel_state

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    model.load_state_dict(dist_checkpointing.load({"model": model.sharded_state_dict()}, job["directory"])["model"])
    tokens = torch.tensor(job["tokens"])
    length = tokens.shape[1]
    later = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]
    with torch.no_grad():
        logits = model.eval()(tokens, torch.arange(length)[None].expand_as(tokens), later)
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(logits) for _ in range(group.size())]
    dist.all_gather(parts, logits.contiguous(), group=group)
    if rank == 0:
        payloads = {name: module.payload for name, module in linears(model).items()}
        torch.save({"logits": torch.cat(parts, -1), "payloads": payloads}, job["out"])


def run(rank: int, work: dict[str, Any], rendezvous: str) -> None:
    from megatron.core import dist_checkpointing, parallel_state

    tensor, pipeline = work["tensor_parallel"], work["pipeline_parallel"]
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=tensor * pipeline)
    parallel_state.initialize_model_parallel(tensor, pipeline)
    without_cuda()
    carry_extra_states()
    for job in work["jobs"]:
        if job["do"] == "save":
            args = argparse.Namespace(**job["args"])
            args.params_dtype = getattr(torch, job["dtype"])
            args.bf16 = job["dtype"] == "bfloat16"
            save(build(args, tensor, pipeline), args, job, rank)
        else:
            args = dist_checkpointing.load_common_state_dict(job["directory"])["args"]
            load(build(args, tensor, pipeline), job, rank)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    path = Path(sys.argv[1])
    work = json.loads(path.read_text())
    count = work["tensor_parallel"] * work["pipeline_parallel"]
    if count == 1:
        run(0, work, f"{path}.rendezvous")
    else:  # not forked: megatron's imports start threads
        torch.multiprocessing.spawn(run, (work, f"{path}.rendezvous"), nprocs=count)
