"""Run with the Python of vLLM for CPUs: TOKENS, and for each directory DIRECTORY DTYPE OUT. vLLM serves each directory
in a process of its own, by its own kernels, and OUT, a safetensors file, gets its `logits` `[B, S - 1, V]` of the
tokens' prefixes, and the `input` and `output` of each linear before a residual connection. Where it fails, OUT.error
says how.

vLLM's emulations of NVFP4 and MXFP8 are in its lists of kernels for GPUs alone, though they need none: they are put
into that of CPUs. Its kernels for CPUs lack two operators of static FP8, and that of rotary embeddings turns other
channels where queries come by head: what they compute is done by its own PyTorch.
"""

import gc
import os
import sys
import traceback
from pathlib import Path

import torch
import vllm._custom_ops
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from vllm import LLM, SamplingParams
from vllm.model_executor.kernels.linear import register_linear_kernel
from vllm.model_executor.kernels.linear.mxfp8.emulation import EmulationMxfp8LinearKernel
from vllm.model_executor.kernels.linear.nvfp4.emulation import EmulationNvFp4LinearKernel
from vllm.model_executor.layers.fusion import fused_act_quant
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import PlatformEnum

register_linear_kernel(EmulationNvFp4LinearKernel, PlatformEnum.CPU, "nvfp4")
register_linear_kernel(EmulationMxfp8LinearKernel, PlatformEnum.CPU, "mxfp8")


def quantize(values: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return QuantFP8(static=True, group_shape=GroupShape.PER_TENSOR).forward_native(values, scale)


vllm._custom_ops.scaled_fp8_quant = quantize
RotaryEmbedding.forward_cpu = RotaryEmbedding.forward_native
fused_act_quant._FUSED_ACT_QUANT.clear()

SETTINGS = {"enforce_eager": True, "skip_tokenizer_init": True, "max_model_len": 64, "enable_prefix_caching": False}
LOGITS = {"max_logprobs": -1, "logprobs_mode": "raw_logits"}
LINEARS = (".o_proj", ".down_proj")


def compute(tokens: Tensor, directory: str, dtype: str, out: str) -> None:
    llm = LLM(directory, dtype=dtype, seed=0, **SETTINGS, **LOGITS)
    seen: dict[str, Tensor] = {}

    def keep(name: str, given: Tensor, made: Tensor) -> None:
        if f"{name}.input" not in seen and len(given) == tokens.numel():
            seen[f"{name}.input"], seen[f"{name}.output"] = given.clone(), made.clone()

    def look_at(model: nn.Module) -> None:
        for name, module in model.named_modules():
            if name.endswith(LINEARS):
                module.register_forward_hook(lambda _, given, made, name=name: keep(name, given[0], made[0]))

    llm.apply_model(look_at)
    asked = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=-1, detokenize=False)
    rows = [{"prompt_token_ids": row} for row in tokens.tolist()]
    answers = [answer.prompt_logprobs[1:] for answer in llm.generate(rows, asked, use_tqdm=False)]
    vocabulary = range(len(answers[0][0]))
    logits = [[[place[token].logprob for token in vocabulary] for place in answer] for answer in answers]
    save_file({"logits": torch.tensor(logits), **seen}, out)


tokens = load_file(sys.argv[1])["tokens"]
words = sys.argv[2:]
gc.freeze()  # vLLM collects eight times, and would look at all that is imported each time
for directory, dtype, out in zip(words[::3], words[1::3], words[2::3], strict=True):
    if child := os.fork():
        os.waitpid(child, 0)
        continue
    try:
        compute(tokens, directory, dtype, out)
    except BaseException:
        Path(f"{out}.error").write_text(traceback.format_exc())
    os._exit(0)
