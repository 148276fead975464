"""megatron-core's hybrid model on CPUs, for `mcore_peer.py`: layers of one block each, under the names that they have
with Transformer Engine. Attention, MLPs and experts are computed; mixers, whose kernels want a GPU, are only made."""

import argparse
import contextlib
import sys
import types
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear


class Uncalled(types.ModuleType):
    """A module of kernels in Triton, which is not there."""

    def __getattr__(self, name: str) -> None:
        return None


sys.modules["megatron.core.inference.contexts.attention_context.triton.tensor_ops"] = Uncalled("tensor_ops")


def normed(values: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return F.rms_norm(values.float(), weight.shape, weight.float(), epsilon).to(values.dtype)


class Norm(torch.nn.Module):
    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps, self.weight = eps, torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return normed(values, self.weight, self.eps)


class NormOfMixer(torch.nn.Module):
    """Of mamba_ssm, which is not called."""

    def __init__(self, size: int, *_: Any, dtype: torch.dtype, **__: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=dtype))

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

        return make_sharded_tensors_for_checkpoint(self.state_dict(), prefix, {"weight": 0}, sharded_offsets)


class NormAndColumnParallelLinear(ColumnParallelLinear):
    def __init__(self, input_size: int, *arguments: Any, config: Any, **others: Any) -> None:
        super().__init__(input_size, *arguments, config=config, **others)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))

    def forward(self, values: torch.Tensor, *arguments: Any, **others: Any) -> Any:
        read = normed(values, self.layer_norm_weight, self.config.layernorm_epsilon)
        return super().forward(read, *arguments, **others)


def stack_spec(config: Any) -> Any:
    """As models/mamba/mamba_layer_specs.py has it with Transformer Engine."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add as added
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.ssm import mamba_block, mamba_mixer
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.spec_utils import ModuleSpec

    dense, sparse = (
        get_gpt_layer_local_spec(num_experts=experts, normalization="RMSNorm")
        for experts in (None, config.num_moe_experts)
    )
    attention, mlp = dense.submodules.self_attention, dense.submodules.mlp
    attention.submodules.linear_qkv = mlp.submodules.linear_fc1 = NormAndColumnParallelLinear
    of_layer = type(dense.submodules)
    of_mixer = mamba_mixer.MambaMixerSubmodules(NormAndColumnParallelLinear, RowParallelLinear)
    mixer = MambaLayerSubmodules(mixer=ModuleSpec(mamba_mixer.MambaMixer, submodules=of_mixer), mamba_bda=added)
    experts = of_layer(pre_mlp_layernorm=Norm, mlp=sparse.submodules.mlp, mlp_bda=added)
    layers = mamba_block.MambaStackSubmodules(
        mamba_layer=ModuleSpec(MambaLayer, submodules=mixer),
        attention_layer=ModuleSpec(dense.module, submodules=of_layer(self_attention=attention, self_attn_bda=added)),
        mlp_layer=ModuleSpec(MLPLayer, submodules=of_layer(mlp=mlp, mlp_bda=added)),
        moe_layer=ModuleSpec(dense.module, submodules=experts),
    )
    return ModuleSpec(mamba_block.MambaStack, submodules=layers)


def build_hybrid(args: argparse.Namespace, config: Any) -> Any:
    """The model that Megatron-LM makes of these arguments (mamba_builders.py)."""
    from megatron.core import parallel_state
    from megatron.core.models.mamba import MambaModel
    from megatron.core.ssm import mamba_block, mamba_context_parallel, mamba_mixer

    mamba_mixer.get_cuda_rng_tracker = lambda: types.SimpleNamespace(fork=contextlib.nullcontext)
    mamba_mixer.HAVE_MAMBA_SSM = mamba_mixer.HAVE_EINOPS = mamba_context_parallel.HAVE_EINOPS = True
    mamba_mixer.ExtendedRMSNorm, mamba_block.TENorm = NormOfMixer, Norm
    return MambaModel(
        config,
        stack_spec(config),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        hybrid_override_pattern=args.hybrid_override_pattern,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
    ).to(args.params_dtype)
