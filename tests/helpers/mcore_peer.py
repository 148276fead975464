"""Real megatron-core on CPUs under gloo, as a program: `python mcore_peer.py JOBS.json`.

The file holds `{"tensor_parallel": n, "pipeline_parallel": n, "jobs": [...]}`, and `expert_parallel` and
`data_parallel` where they are not 1; each job saves a random model or loads a checkpoint, whose own arguments make
the model. A machine without a GPU needs the stand-ins of `without_cuda`.
"""

import argparse
import copy
import json
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.multiprocessing

from precisionctl.mcore.stand_ins import without_cuda


def carry_extra_states():
    """The linears without Transformer Engine have no FP8 state: give them one to save, and keep what is loaded."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    for linear in (ColumnParallelLinear, RowParallelLinear):
        linear.get_extra_state = lambda self: getattr(self, "payload", None)
        linear.set_extra_state = lambda self, state: setattr(self, "payload", state)


def allow_latent_attention():
    """Without Transformer Engine megatron-core's plain attention does not take the sizes of latent attention's heads,
    and classes are None that are tested for."""
    from megatron.core.transformer import dot_product_attention, multi_latent_attention

    for name in ("TELinear", "TEColumnParallelLinear", "TELayerNormColumnParallelLinear", "Linear"):
        if not isinstance(getattr(multi_latent_attention, name, None), type):
            setattr(multi_latent_attention, name, type(name, (), {}))
    plain = dot_product_attention.DotProductAttention.__init__

    def without_sizes(self, *arguments, k_channels=None, v_channels=None, **others):
        plain(self, *arguments, **others)
        if v_channels is not None:  # a head's output is as wide as its values
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    dot_product_attention.DotProductAttention.__init__ = without_sizes


def allow_gated_delta_nets():
    """megatron-core's own implementation in plain PyTorch, which it takes where it must be deterministic, asks for the
    package with the kernels all the same."""
    try:
        from megatron.core.ssm import gated_delta_net
    except ImportError:  # before 0.16
        return

    def l2norm(heads):
        return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + 1e-6)

    gated_delta_net.HAVE_FLA, gated_delta_net.l2norm = True, l2norm
    gated_delta_net.chunk_gated_delta_rule = gated_delta_net.torch_chunk_gated_delta_rule


class TransformerEngineRMSNorm(torch.nn.Module):
    """Transformer Engine's: without it, megatron-core has none whose weight is the factor less one, where that is
    asked for."""

    def __init__(self, config, hidden_size, eps=1e-5):
        super().__init__()
        self.eps, self.weight = eps, torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        self.less = 1 if config.layernorm_zero_centered_gamma else 0

    def forward(self, values):
        wide = values.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (normed * (self.less + self.weight.float())).to(values.dtype)


def with_gated_delta_nets(layers: list[Any], config: Any) -> None:
    """Give layers of megatron-core's the attention that its specification has with Transformer Engine."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec

    parts = GatedDeltaNetSubmodules(ColumnParallelLinear, TransformerEngineRMSNorm, RowParallelLinear)
    for number, (layer, is_one) in enumerate(zip(layers, config.linear_attention_freq, strict=True)):
        layers[number] = layer = copy.deepcopy(layer)
        layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = TransformerEngineRMSNorm
        if is_one:
            layer.submodules.self_attention = ModuleSpec(GatedDeltaNet, submodules=parts)
            names = layer.submodules.sharded_state_dict_keys_map
            names["input_layernorm."] = "self_attention.in_proj.layer_norm_"
        else:
            norms = layer.submodules.self_attention.submodules
            norms.q_layernorm = norms.k_layernorm = TransformerEngineRMSNorm


def activation(args: argparse.Namespace) -> Any:
    from megatron.core.activations import quick_gelu, squared_relu

    if getattr(args, "squared_relu", False):
        return squared_relu
    if getattr(args, "quick_geglu", False):
        return quick_gelu
    return torch.nn.functional.silu if args.swiglu else torch.nn.functional.gelu


def config_of(args: argparse.Namespace, work: dict[str, Any]) -> Any:
    """What core_transformer_config_from_args makes of them."""
    from megatron.core.transformer.heterogeneous.heterogeneous_config import HeterogeneousTransformerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    same = (
        *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "normalization"),
        *("add_bias_linear", "add_qkv_bias", "layernorm_epsilon", "layernorm_zero_centered_gamma"),
        *("rotary_interleaved", "attention_dropout", "hidden_dropout", "params_dtype", "bf16"),
    )
    optional = (
        *("moe_ffn_hidden_size", "moe_router_topk", "moe_layer_freq", "moe_shared_expert_intermediate_size"),
        *("moe_router_enable_expert_bias", "moe_router_score_function", "mtp_num_layers", "qk_layernorm"),
        *("moe_router_pre_softmax", "moe_router_topk_scaling_factor", "moe_router_num_groups", "moe_router_group_topk"),
        *("moe_shared_expert_gate", "window_size", "window_attn_skip_freq", "no_rope_freq", "softmax_type"),
        *("glu_linear_offset", "activation_func_clamp_value"),
        *("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
        *("attention_output_gate", "experimental_attention_variant", "linear_attention_freq"),
        *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
        *("linear_num_key_heads", "linear_num_value_heads"),
        *("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json"),
        *("is_hybrid_model", "mamba_num_heads", "mamba_head_dim", "mamba_num_groups", "mamba_state_dim"),
    )
    of_latents = ("rotary_scaling_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "rotary_base")
    of_latents += ("original_max_position_embeddings", "rope_type", "rotary_percent", "q_lora_rank")
    latent = getattr(args, "multi_latent_attention", False)
    experts = getattr(args, "num_experts", None)
    kind = MLATransformerConfig if latent else TransformerConfig
    if getattr(args, "heterogeneous_layers_config_path", None) is not None:
        kind = HeterogeneousTransformerConfig
    config = kind(
        **{name: getattr(args, name) for name in same},
        **{name: getattr(args, name) for name in optional if getattr(args, name, None) is not None},
        **{name: getattr(args, name) for name in of_latents if latent and hasattr(args, name)},
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        gated_linear_unit=args.swiglu or getattr(args, "gated_linear_unit", False),
        activation_func=activation(args),
        tensor_model_parallel_size=work["tensor_parallel"],
        pipeline_model_parallel_size=work["pipeline_parallel"],
        expert_model_parallel_size=work.get("expert_parallel", 1),
        sequence_parallel=bool(experts) and work["tensor_parallel"] > 1,
        num_moe_experts=experts,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none",
        multi_latent_attention=latent,
        pipeline_dtype=args.params_dtype,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        bias_activation_fusion=bool(getattr(args, "bias_gelu_fusion", False)),
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
    )
    for name in vars(args):
        if name.startswith("yarn_"):  # no fields of its own, but GPTModel looks for them there
            setattr(config, name, getattr(args, name))
    return config


def spec_of(config: Any, args: argparse.Namespace, te_names: bool) -> Any:
    """The layers without Transformer Engine; `te_names`: asking for norms as its specification does."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import get_gpt_heterogeneous_layer_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    if config.heterogeneous_block_specs:
        return get_gpt_heterogeneous_layer_spec(config)  # which names norms as those of Transformer Engine
    if isinstance(config.moe_layer_freq, list):
        block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=args.normalization)
        layers = block.layer_specs
    else:
        block = get_gpt_layer_local_spec(
            num_experts=config.num_moe_experts,
            qk_layernorm=config.qk_layernorm,
            multi_latent_attention=config.multi_latent_attention,
            normalization=args.normalization,
        )
        layers = [block]
    if getattr(config, "experimental_attention_variant", None):  # since 0.16
        layers = layers * config.num_layers if len(layers) == 1 else layers
        with_gated_delta_nets(layers, config)
        block = TransformerBlockSubmodules(layers, TransformerEngineRMSNorm)
    frequency = config.moe_layer_freq if isinstance(config.moe_layer_freq, list) else [1] * len(layers)
    for layer, has_experts in zip(layers, frequency, strict=True) if te_names else []:
        names = layer.submodules.sharded_state_dict_keys_map
        if config.num_moe_experts and has_experts:
            names.pop("pre_mlp_layernorm.", None)
        else:
            names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
        for norm in ("q", "kv") if config.multi_latent_attention else ():
            names[f"self_attention.{norm}_layernorm."] = f"self_attention.linear_{norm}_up_proj.layer_norm_"
    return block


def build(args: argparse.Namespace, work: dict[str, Any], te_names: bool = False) -> Any:
    """The model that Megatron-LM makes of these arguments (core_transformer_config_from_args, gpt_builders.py)."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    config = config_of(args, work)
    if getattr(args, "is_hybrid_model", False):
        from mcore_hybrid import build_hybrid

        return build_hybrid(args, config)
    spec = spec_of(config, args, te_names)
    later = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if config.mtp_num_layers else None
    return GPTModel(
        config,
        spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=getattr(args, "use_rope_scaling", False),
        rope_scaling_factor=getattr(args, "rope_scaling_factor", 8.0),
        seq_len_interpolation_factor=getattr(args, "rotary_seq_len_interpolation_factor", None),
        mtp_block_spec=later,
    ).to(args.params_dtype)


def linears(model: Any) -> dict[str, Any]:
    """The model's linears that have an extra state, by name in the whole model."""
    first = model.decoder.layers[0].layer_number - 1  # layers count from 1, over all stages
    found = {}
    for name, module in model.named_modules():
        parts = name.split(".")
        if parts[-1].startswith("linear_") and parts[1] == "layers":
            found[".".join([*parts[:2], str(int(parts[2]) + first), *parts[3:]])] = module
    return found


def fill(model: Any) -> None:
    """Random values; what ranks have in common is the same on all of them."""
    from megatron.core import parallel_state

    tied = model.share_embeddings_and_output_weights
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias"):
                torch.manual_seed(zlib.crc32(name.encode()))
                buffer.copy_(torch.randn(buffer.shape) * 0.1)
        for name, parameter in model.named_parameters():
            if name == "embedding.word_embeddings.weight" or (tied and name == "output_layer.weight"):
                ranks = ["embedding"]
            else:
                ranks = [name, parallel_state.get_pipeline_model_parallel_rank()]
            if getattr(parameter, "tensor_model_parallel", False):
                ranks.append(parallel_state.get_tensor_model_parallel_rank())
            if ".experts." in name:
                ranks.append(parallel_state.get_expert_model_parallel_rank())
            torch.manual_seed(zlib.crc32(repr(ranks).encode()))
            parameter.copy_(torch.randn(parameter.shape) * 0.1)


def hold(model: Any, where: str) -> None:
    """Write what this rank has, by Megatron's names."""
    rules = {name: buffer for name, buffer in model.named_buffers() if name.endswith("expert_bias")}
    torch.save({name: value.clone() for name, value in (dict(model.named_parameters()) | rules).items()}, where)


def save(model: Any, args: argparse.Namespace, job: dict[str, Any], rank: int) -> None:
    """Save a random model, FP8 payloads and an optimizer with it, and beside it what each rank holds."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    fill(model)
    payloads = torch.load(job["payloads"]) if "payloads" in job else {}
    for name, module in linears(model).items():
        module.payload = payloads.get(name)
    way = job.get("optimizer")
    metadata = {"singleton_local_shards": job.get("singleton", False), "chained_optim_avoid_prefix": True}
    if way:
        from mcore_optimizer import hold_optimizer, updated

        if way != "plain":
            metadata["distrib_optim_sharding_type"] = way
        optimizer = updated(model, distributed=way != "plain")
        hold_optimizer(model, optimizer, f"{job['directory']}.optimizer", rank)
    hold(model, f"{job['directory']}.rank{rank}.pt")
    Path(job["directory"]).mkdir(parents=True, exist_ok=True)
    dist.barrier()
    state = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 7,
        "model": model.sharded_state_dict(metadata=dict(metadata, **groups())),
        "rng_state": ShardedObject("rng_state", [{"torch": torch.get_rng_state()}], (1,), (0,), replica_id=rank),
    }
    if way:
        state["optimizer"] = optimizer.sharded_state_dict(state, metadata=dict(metadata, **groups()))
    dist_checkpointing.save(state, job["directory"], content_metadata=metadata)


def groups() -> dict[str, Any]:
    """What else of metadata is not stored."""
    from megatron.core import parallel_state

    return {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}


def load(model: Any, job: dict[str, Any], rank: int) -> None:
    """Load with Megatron's default strictness; write logits and FP8 payloads; without tokens, what each rank holds."""
    from megatron.core import dist_checkpointing, parallel_state

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    metadata = dist_checkpointing.load_content_metadata(job["directory"]) or {}
    wanted = {"model": model.sharded_state_dict(metadata=dict(metadata, **groups()))}
    way = job.get("optimizer")
    if way:
        from mcore_optimizer import hold_optimizer, updated

        optimizer = updated(model, distributed=way != "plain")
        wanted["optimizer"] = optimizer.sharded_state_dict(wanted, is_loading=True, metadata=dict(metadata, **groups()))
    loaded = dist_checkpointing.load(wanted, job["directory"])
    model.load_state_dict(loaded["model"])
    if way:
        optimizer.load_state_dict(loaded["optimizer"])
        hold_optimizer(model, optimizer, f"{job['out']}.optimizer", rank)
    if "again" in job:
        Path(job["again"]).mkdir(parents=True)
        state = dist_checkpointing.load_common_state_dict(job["directory"])
        state |= {"model": model.sharded_state_dict(metadata=dict(metadata, **groups()))}
        dist_checkpointing.save(state, job["again"], content_metadata=metadata)
    if "tokens" not in job:
        return hold(model, f"{job['out']}.rank{rank}.pt")
    tokens = torch.tensor(job["tokens"])
    length = tokens.shape[1]
    later = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]
    if "record" in job:
        from precisionctl import api

        with api.record(model, job["record"]):
            model(tokens, torch.arange(length)[None].expand_as(tokens), later).float().square().sum().backward()
    with torch.no_grad():
        logits = model.eval()(tokens, torch.arange(length)[None].expand_as(tokens), later)
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(logits) for _ in range(group.size())]
    dist.all_gather(parts, logits.contiguous(), group=group)
    if rank == 0:
        payloads = {name: module.payload for name, module in linears(model).items()}
        torch.save({"logits": torch.cat(parts, -1), "payloads": payloads}, job["out"])


def ranks_of(work: dict[str, Any]) -> int:
    data = max(work.get("data_parallel", 1), work.get("expert_parallel", 1))
    return work["tensor_parallel"] * work["pipeline_parallel"] * data


def run(rank: int, work: dict[str, Any], rendezvous: str) -> None:
    from megatron.core import dist_checkpointing, parallel_state

    queue_without_imports()
    tensor, pipeline, expert = work["tensor_parallel"], work["pipeline_parallel"], work.get("expert_parallel", 1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks_of(work))
    parallel_state.initialize_model_parallel(tensor, pipeline, expert_model_parallel_size=expert)
    allow_latent_attention()
    allow_gated_delta_nets()
    carry_extra_states()
    numpy.product = numpy.prod  # which megatron-core 0.14 asks for, and numpy 2 has not
    with without_cuda():
        for job in work["jobs"]:
            if job["do"] == "save":
                args = argparse.Namespace(**job["args"])
                args.params_dtype = getattr(torch, job["dtype"])
                args.bf16 = job["dtype"] == "bfloat16"
                save(build(args, work), args, job, rank)
            else:
                args = dist_checkpointing.load_common_state_dict(job["directory"])["args"]
                load(build(args, work, job.get("te_names", False)), job, rank)
            dist.barrier()
    dist.destroy_process_group()


def start_ranks(run: Callable[..., None], arguments: tuple[Any, ...], count: int) -> None:
    """Forked from this process, which has imported Megatron for all of them."""
    torch.multiprocessing.start_processes(run, arguments, nprocs=count, start_method="fork")


def queue_without_imports() -> None:
    """megatron-core spawns a process for the queue of what has been written, and that imports PyTorch, for seconds;
    one that is forked need not."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    filesystem_async._results_queue = torch.multiprocessing.get_context("fork").Manager().Queue()


if __name__ == "__main__":
    path = Path(sys.argv[1])
    work = json.loads(path.read_text())
    if ranks_of(work) == 1:
        run(0, work, f"{path}.rendezvous")
    else:
        start_ranks(run, (work, f"{path}.rendezvous"), ranks_of(work))
