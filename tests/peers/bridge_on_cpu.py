"""Megatron-Bridge on a CPU, as a program: `python bridge_on_cpu.py FOLDER NAME...`.

For each name, Bridge loads the Megatron checkpoint `NAME-ours` by the description that is beside it, with the family
from the Hugging Face directory `NAME-hf`; what it exports goes to `NAME-exported.safetensors`, and its own checkpoint
of the model to `NAME-theirs`. Transformer Engine and other packages that ask for a GPU are not there: Bridge, which
imports them anyhow, gets empty modules, and the layers are megatron-core's own under the names that they have with
Transformer Engine.
"""

import builtins
import contextlib
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import torch

ABSENT = (
    *("transformer_engine", "transformer_engine_torch", "modelopt", "nvidia_resiliency_ext", "megatron.energon"),
    *("datasets", "qwen_vl_utils", "wandb"),
)


class Empty(types.ModuleType):
    """A module in which every name is something: a class, or in small letters such a module, that can be called."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__dict__.setdefault(name, type(name, (), {}) if name[0].isupper() else Empty(name))

    def __call__(self, *_: Any, **__: Any) -> None:
        """Does nothing: `restore_sharded_modelopt_state`, where there is none."""


def without_packages_for_gpus() -> None:
    plain = builtins.__import__

    def imported(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if level or not any(name == each or name.startswith(f"{each}.") for each in ABSENT):
            return plain(name, globals, locals, fromlist, level)
        if not (globals or {}).get("__name__", "").startswith("megatron.bridge"):
            raise ModuleNotFoundError(name)  # for megatron-core, which does without
        parts = name.split(".")
        for depth in range(1, len(parts) + 1):
            whole = ".".join(parts[:depth])
            above = sys.modules.get(".".join(parts[: depth - 1]))
            sys.modules.setdefault(whole, getattr(above, parts[depth - 1]) if above else Empty(whole))
        return sys.modules[name] if fromlist else sys.modules[parts[0]]

    builtins.__import__ = imported


def without_cuda() -> None:
    class Stream:  # of token dispatchers
        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: self

    torch.cuda.Stream = torch.cuda.current_stream = lambda *_, **__: Stream()
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.get_rng_state = lambda *_: torch.zeros(1, dtype=torch.uint8)


def with_names_of_transformer_engine() -> None:
    """Give Bridge layers of megatron-core whose norms are where Transformer Engine fuses them."""
    from megatron.bridge.models import gpt_provider
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import experimental_attention_variant_module_specs, gpt_layer_specs
    from megatron.core.ssm import gated_delta_net
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.moe_layer import MoELayer

    class TELayerNormColumnParallelLinear(ColumnParallelLinear):
        def __init__(self, input_size: int, *arguments: Any, config: Any, **others: Any) -> None:
            super().__init__(input_size, *arguments, config=config, **others)
            self.layer_norm_weight = torch.nn.Parameter(torch.full((input_size,), torch.nan, dtype=config.params_dtype))

    def renamed(layer: Any) -> Any:
        modules = layer.submodules
        modules.sharded_state_dict_keys_map = {}
        modules.input_layernorm = IdentityOp
        modules.self_attention.submodules.linear_qkv = TELayerNormColumnParallelLinear
        if modules.mlp.module is not MoELayer:
            modules.pre_mlp_layernorm = IdentityOp
            modules.mlp.submodules.linear_fc1 = TELayerNormColumnParallelLinear
        return layer

    def layer_spec(config: Any) -> Any:
        settings = {"qk_layernorm": config.qk_layernorm, "normalization": config.normalization}
        settings["num_experts"], config.moe_grouped_gemm = config.num_moe_experts, False
        return renamed(gpt_layer_specs.get_gpt_layer_local_spec(**settings))

    blocks = gpt_layer_specs.get_gpt_decoder_block_spec

    def block_spec(config: Any, use_transformer_engine: bool, vp_stage: int | None = None) -> Any:
        config.moe_grouped_gemm = False
        block = blocks(config, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage)
        block.layer_specs = [renamed(layer) for layer in block.layer_specs]
        return block

    class Norm(torch.nn.Module):  # megatron-core's own cannot be one whose weight is the factor less one
        def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((hidden_size,), torch.nan, dtype=config.params_dtype))

    class FusedNorms(LocalSpecProvider):
        def fuse_layernorm_and_linear(self) -> bool:
            return True

        def column_parallel_layer_norm_linear(self) -> type:
            return TELayerNormColumnParallelLinear

        def layer_norm(self, rms_norm: bool = False, for_qk: bool = False) -> type:
            return Norm

    def backend_of(config: Any) -> FusedNorms:
        config.moe_grouped_gemm = False
        return FusedNorms()

    def attention_spec(**settings: Any) -> Any:
        layer = renamed(gpt_layer_specs.get_gpt_layer_local_spec(qk_layernorm=settings["qk_layernorm"]))
        parts = layer.submodules.self_attention.submodules
        if settings["qk_layernorm"]:
            parts.q_layernorm = parts.k_layernorm = Norm
        return layer

    gated_delta_net.HAVE_FLA = True  # nothing is computed
    experimental_attention_variant_module_specs._get_backend_spec_provider = backend_of
    gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec = attention_spec
    moe_utils.te_general_gemm = None  # megatron-core 0.16 misses the name
    gpt_provider.transformer_engine_layer_spec = layer_spec
    gpt_layer_specs.get_gpt_decoder_block_spec = block_spec


def with_heterogeneous_layers() -> None:
    """Give Bridge those of megatron-core without Transformer Engine, under the names that they have with it."""
    from megatron.bridge.models.llama_nemotron import llama_nemotron_provider
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.heterogeneous import heterogeneous_layer_specs
    from megatron.core.transformer.identity_op import IdentityOp
    from transformers import AutoConfig, PretrainedConfig

    class DeciLMConfig(PretrainedConfig):
        model_type = "nemotron-nas"
        auto_map = {"AutoModelForCausalLM": "modeling_decilm.DeciLMForCausalLM"}

    def block_spec(config: Any, use_te: bool) -> Any:
        block = heterogeneous_layer_specs.get_gpt_heterogeneous_layer_spec(config, use_te=False)
        fused = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=False).submodules
        for layer in block.layer_specs:
            parts = layer.submodules
            parts.input_layernorm, parts.pre_mlp_layernorm = IdentityOp, IdentityOp
            parts.sharded_state_dict_keys_map = {}
            if parts.self_attention.submodules:
                parts.self_attention.submodules.linear_qkv = fused.self_attention.submodules.linear_qkv
            if parts.mlp.submodules:
                parts.mlp.submodules.linear_fc1 = fused.self_attention.submodules.linear_qkv
        return block

    AutoConfig.register("nemotron-nas", DeciLMConfig)  # which published files bring with them
    llama_nemotron_provider.get_gpt_heterogeneous_layer_spec = block_spec
    kind = llama_nemotron_provider.LlamaNemotronHeterogeneousProvider
    finalize = kind.finalize

    def finalize_without_kernels(provider: Any) -> None:
        provider.apply_rope_fusion = provider.persist_layer_norm = False
        finalize(provider)

    kind.finalize = finalize_without_kernels


def with_mixers() -> None:
    """Give Bridge a hybrid stack of megatron-core's modules, under the names that Transformer Engine's have."""
    from megatron.bridge.models.mamba import mamba_provider
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.ssm import mamba_block, mamba_mixer
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel.layers import RowParallelLinear
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
    from transformers import AutoConfig, PretrainedConfig

    class NemotronHConfig(PretrainedConfig):
        model_type = "nemotron_h"
        auto_map = {"AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM"}

    class Norm(torch.nn.Module):
        def __init__(self, size: int, *_: Any, dtype: torch.dtype, **__: Any) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((size,), torch.nan, dtype=dtype))

        def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
            return make_sharded_tensors_for_checkpoint(self.state_dict(), prefix, {"weight": 0}, sharded_offsets)

    def stack_spec(config: Any) -> Any:
        config.moe_grouped_gemm = False
        dense, sparse = (
            gpt_layer_specs.get_gpt_layer_local_spec(num_experts=number, normalization="RMSNorm")
            for number in (None, config.num_moe_experts)
        )
        first = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=False).submodules
        fused = first.self_attention.submodules.linear_qkv
        dense.submodules.mlp.submodules.linear_fc1 = fused
        attention = type(dense.submodules)(self_attention=first.self_attention, self_attn_bda=get_bias_dropout_add)
        mlp = type(dense.submodules)(mlp=dense.submodules.mlp, mlp_bda=get_bias_dropout_add)
        experts = type(dense.submodules)(
            pre_mlp_layernorm=sparse.submodules.pre_mlp_layernorm,
            mlp=sparse.submodules.mlp,
            mlp_bda=get_bias_dropout_add,
        )
        mixer = ModuleSpec(
            mamba_mixer.MambaMixer, submodules=mamba_mixer.MambaMixerSubmodules(fused, RowParallelLinear)
        )
        layers = mamba_block.MambaStackSubmodules(
            mamba_layer=ModuleSpec(MambaLayer, submodules=MambaLayerSubmodules(mixer=mixer)),
            attention_layer=ModuleSpec(dense.module, submodules=attention),
            mlp_layer=ModuleSpec(MLPLayer, submodules=mlp),
            moe_layer=ModuleSpec(dense.module, submodules=experts),
        )
        return ModuleSpec(mamba_block.MambaStack, submodules=layers)

    AutoConfig.register("nemotron_h", NemotronHConfig)  # which is of a later transformers
    mamba_mixer.get_cuda_rng_tracker = lambda: types.SimpleNamespace(fork=contextlib.nullcontext)
    mamba_mixer.HAVE_MAMBA_SSM, mamba_mixer.ExtendedRMSNorm = True, Norm
    mamba_block.TENorm = lambda config, hidden_size, eps: Norm(hidden_size, dtype=config.params_dtype)
    finalize = mamba_provider.MambaModelProvider.finalize

    def finalize_without_kernels(provider: Any) -> None:
        provider.apply_rope_fusion, provider.mamba_stack_spec = False, stack_spec
        provider.attention_backend = AttnBackend.auto
        finalize(provider)

    mamba_provider.MambaModelProvider.finalize = finalize_without_kernels


def group_experts(model: torch.nn.Module) -> None:
    """Name experts as Transformer Engine's grouped linears have them, which Bridge exports alone."""
    for module in list(model.modules()):
        experts = getattr(getattr(module, "experts", None), "local_experts", None)
        if experts is None:
            continue
        config, module.experts = module.config, torch.nn.Module()
        for linear, how in (("linear_fc1", "Column"), ("linear_fc2", "Row")):
            grouped = type(f"TE{how}ParallelGroupedLinear", (torch.nn.Module,), {})()  # Bridge goes by the class's name
            grouped.config = config
            for number, expert in enumerate(experts):
                grouped.register_parameter(f"weight{number}", getattr(expert, linear).weight)
            setattr(module.experts, linear, grouped)


def main(folder: Path, names: list[str]) -> None:
    without_packages_for_gpus()
    without_cuda()
    warnings.simplefilter("ignore")
    from megatron.bridge import AutoBridge
    from megatron.bridge.training.model_load_save import temporary_distributed_context
    from safetensors.torch import save_file

    with_names_of_transformer_engine()
    with_mixers()
    with_heterogeneous_layers()
    for name in names:
        bridge = AutoBridge.from_hf_pretrained(folder / f"{name}-hf")
        with temporary_distributed_context(backend="gloo"):
            model = bridge.load_megatron_model(folder / f"{name}-ours" / "release", wrap_with_ddp=False)
            bridge.save_megatron_model(model, folder / f"{name}-theirs")
            group_experts(model[0])
            exported = bridge.export_hf_weights(model, cpu=True, show_progress=False)
            tensors = {key: values.contiguous() for key, values in exported}
            save_file(tensors, folder / f"{name}-exported.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
