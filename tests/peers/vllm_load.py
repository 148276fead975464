"""Run with vLLM's Python: DIRECTORY OUT, as many pairs as wanted. vLLM parses the config, builds the model and loads
the weights, on a CPU, each in a process of its own; what it loaded them into goes into OUT, a safetensors file, but for
parameters that it did not fill and that may keep a default. Where it fails, OUT.error says how."""

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torchvision_operators  # noqa: F401
from safetensors.torch import save_file
from transformers import AutoConfig, PretrainedConfig
from vllm.config import set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
from vllm.model_executor.layers.fused_moe.oracle.int_wna16 import WNA16MoEBackend
from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
from vllm.model_executor.layers.quantization import fp8, modelopt
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a4_nvfp4 as nvfp4_experts,
    compressed_tensors_moe_w8a8_int8 as int8_experts,
    compressed_tensors_moe_wna16 as int4_experts,
)
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import (
    compressed_tensors_w4a4_mxfp4 as mxfp4,
    compressed_tensors_w4a4_nvfp4 as nvfp4,
    compressed_tensors_w8a8_mxfp8 as mxfp8,
    compressed_tensors_wNa16 as int4,
)
from vllm.model_executor.layers.quantization.quark.schemes import quark_ocp_mx
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import registry
from vllm.platforms.cpu import CpuPlatform
from vllm.utils.torch_utils import set_default_torch_dtype


# Kernels for blocks and four bits ask for a GPU, or for a newer CPU than this; loading needs none.
def no_kernel(*_: object, **__: object) -> SimpleNamespace:
    return SimpleNamespace(input_quant_key=lambda: None)


quark_ocp_mx.init_mxfp4_linear_kernel = no_kernel
nvfp4.init_nvfp4_linear_kernel = modelopt.init_nvfp4_linear_kernel = mxfp4.init_mxfp4_linear_kernel = no_kernel
int4.choose_mp_linear_kernel = lambda *_, **__: no_kernel
no_kernel.__name__ = "none"
for experts in (nvfp4_experts, modelopt):
    experts.select_nvfp4_moe_backend = lambda *_, **__: (NvFp4MoeBackend.MARLIN, None)
int8_experts.select_int8_moe_backend = lambda *_, **__: (None, None)
int4_experts.select_wna16_moe_backend = lambda *_, **__: (WNA16MoEBackend.TRITON, None)
fp8.init_fp8_linear_kernel = modelopt.init_mxfp8_linear_kernel = mxfp8.init_mxfp8_linear_kernel = no_kernel
fp8.select_fp8_moe_backend = lambda *_, **__: (Fp8MoeBackend.TRITON, None)
torch.cpu._is_avx512_supported = lambda: True  # for a cache in FP8
backend_of = CpuPlatform.get_attn_backend_cls


def dense_backend(backend: object, attn_selector_config: Any, **more: object) -> str:
    return backend_of(backend, attn_selector_config._replace(use_sparse=False), **more)


CpuPlatform.get_attn_backend_cls = staticmethod(dense_backend)

KERNELS = torch.library.Library("_C", "FRAGMENT")
KERNELS.define("gelu_quick(Tensor(a!) out, Tensor input) -> ()")  # which a class looks for as it is made

registry._run_in_subprocess = lambda look: look()  # a class is looked at here, where torchvision can be imported


class Said(dict[str, Any]):
    """A part of a config, whose keys are its attributes."""

    def __init__(self, said: dict[str, Any]) -> None:
        super().__init__(said)
        vars(self).update(said)


class DeciLMConfig(PretrainedConfig):
    """That which Llama-Nemotron's files bring with them, as far as vLLM reads it: blocks have attributes."""

    model_type = "nemotron-nas"

    def __init__(self, block_configs: object = (), **given: Any) -> None:
        super().__init__(**given)
        self.block_configs = json.loads(json.dumps(block_configs), object_hook=Said)


class DeepseekConfig(PretrainedConfig):
    """That which the files of DeepSeekMoE bring with them, as far as vLLM reads it."""

    model_type = "deepseek"

    def __init__(self, norm_topk_prob: bool = False, **given: Any) -> None:
        super().__init__(**given)
        self.norm_topk_prob = norm_topk_prob


class ErnieVisionConfig(PretrainedConfig):
    """Of ErnieVlConfig, the tower's."""

    model_type = "DFNRope_vision_transformer"


class ErnieVlConfig(PretrainedConfig):
    """That which the published files of ERNIE 4.5 VL bring with them, as far as vLLM reads it."""

    model_type = "ernie4_5_moe_vl"

    def __init__(self, vision_config: object = (), **given: Any) -> None:
        super().__init__(**given)
        self.vision_config = ErnieVisionConfig(**dict(vision_config))


AutoConfig.register("nemotron-nas", DeciLMConfig)
AutoConfig.register("ernie4_5_moe_vl", ErnieVlConfig)
AutoConfig.register("deepseek", DeepseekConfig)

OPTIONAL = ("q_scale", "k_scale", "v_scale", "prob_scale", "zero_point")  # of the KV cache: 1 where not stored
OPTIONAL += ("input_global_scale",)  # of experts, which have the parameter where inputs stay as they are, too

SETTINGS = {"dtype": "bfloat16", "enforce_eager": True, "skip_tokenizer_init": True, "max_model_len": 64}
SETTINGS["enable_prefix_caching"] = False  # which recurrent layers beside latent attention do not have


def load(directory: str, out: str) -> None:
    config = EngineArgs(model=directory, **SETTINGS).create_engine_config()
    with set_current_vllm_config(config), tempfile.TemporaryDirectory() as folder:
        init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
        with set_default_torch_dtype(torch.bfloat16):
            model = initialize_model(vllm_config=config)
        loaded = model.load_weights(DefaultModelLoader(config.load_config).get_all_weights(config.model_config, model))
    parameters = dict(model.named_parameters(remove_duplicate=False))  # some have two names
    filled = {id(parameters[name]) for name in loaded if name in parameters}
    silent = [name for name, each in parameters.items() if id(each) not in filled and not name.endswith(OPTIONAL)]
    assert not silent, f"vLLM was given nothing for {silent}"
    held = parameters | dict(model.named_buffers())
    tensors = {name: held[name].detach().contiguous() for name in loaded if name in held}
    caches = {module.kv_cache_dtype for module in model.modules() if hasattr(module, "kv_cache_dtype")}
    fused = json.dumps(getattr(model, "packed_modules_mapping", {}))
    told = {"quantization": config.model_config.quantization or "", "cache": " ".join(sorted(caches)), "fused": fused}
    save_file(tensors, out, told)


words = sys.argv[1:]
for directory, out in zip(words[::2], words[1::2], strict=True):
    if child := os.fork():
        os.waitpid(child, 0)
        continue
    try:
        load(directory, out)
    except BaseException:
        Path(f"{out}.error").write_text(traceback.format_exc())
    os._exit(0)
