"""Megatron's arguments that do not follow from the model, for what is written in any of its containers."""

from collections.abc import Mapping
from typing import Any

import torch

from precisionctl.checkpoints.megatron_logical import OPTIMIZER
from precisionctl.fp8.state import DelayedScaling
from precisionctl.param import Parallelism, TensorSpec


def run_args(
    specs: Mapping[str, TensorSpec], sizes: Parallelism, iteration: int | None, container: str
) -> dict[str, Any]:
    """What the tensors, the sizes and the container (`--ckpt-format`) say."""
    dtype = next(spec.dtype for name, spec in specs.items() if not name.startswith(OPTIMIZER))
    return {
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "tensor_model_parallel_size": sizes.tensor,
        "pipeline_model_parallel_size": sizes.pipeline,
        "virtual_pipeline_model_parallel_size": sizes.virtual if sizes.virtual > 1 else None,
        "expert_model_parallel_size": sizes.expert,
        "ckpt_format": container,
        "iteration": iteration or 0,
    } | ({"expert_tensor_parallel_size": sizes.expert_tensor} if sizes.expert_tensor else {})


def fp8_args(recipe: DelayedScaling) -> dict[str, Any]:
    """What a run that takes the FP8 state up is started with."""
    return {
        "fp8": recipe.fp8_format.lower(),
        "fp8_recipe": "delayed",
        "fp8_margin": recipe.margin,
        "fp8_amax_history_len": recipe.amax_history_len,
        "fp8_amax_compute_algo": recipe.amax_compute_algo,
        "fp8_dot_product_attention": recipe.fp8_dpa,
        "fp8_multi_head_attention": recipe.fp8_mha,
    }
