"""Run with ModelOpt's Python: SOURCE TARGET SCHEME quantizes and exports a model as ModelOpt does."""

import sys

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from transformers import AutoModelForCausalLM

CONFIGS = {
    "static": mtq.FP8_DEFAULT_CFG,
    "dynamic": mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG,
    "block": mtq.FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG,
    "mxfp8": mtq.MXFP8_DEFAULT_CFG,
    "nvfp4": mtq.NVFP4_DEFAULT_CFG,
    "mxfp4": mtq.MXFP4_DEFAULT_CFG,
}

source, target, scheme = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
mtq.quantize(model, CONFIGS[scheme], lambda model: model(torch.arange(64).view(2, 32)))
export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=target)
