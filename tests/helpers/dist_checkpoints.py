"""Small `torch_dist` directories, written tensor by tensor."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from precisionctl.checkpoints.chunks import write_rows
from precisionctl.checkpoints.torch_dist.writer import TorchDistWriter
from precisionctl.dtypes import DType
from precisionctl.fp8.state import Fp8States
from precisionctl.model.model_shape import ModelShape
from precisionctl.param import COLUMNS, GATED_ROWS, REPLICATED, ROWS, TensorSpec

MODEL = ModelShape("llama", 2, 16, 24, 4, 2, 4, 50, 64, 32)
LAYER = {
    "self_attention.linear_qkv.layer_norm_weight": ((16,), REPLICATED),
    "self_attention.linear_qkv.weight": ((32, 16), ROWS),
    "self_attention.linear_qkv.bias": ((32,), ROWS),
    "self_attention.linear_proj.weight": ((16, 16), COLUMNS),
    "mlp.linear_fc1.layer_norm_weight": ((16,), REPLICATED),
    "mlp.linear_fc1.weight": ((48, 16), GATED_ROWS),
    "mlp.linear_fc2.weight": ((16, 24), COLUMNS),
}
ONCE = {
    "embedding.word_embeddings.weight": ((64, 16), ROWS),
    "decoder.final_layernorm.weight": ((16,), REPLICATED),
    "output_layer.weight": ((64, 16), ROWS),
}
NAMES = ONCE | {f"decoder.layers.{layer}.{name}": form for layer in range(2) for name, form in LAYER.items()}
MOMENTS = ("exp_avg", "exp_avg_sq", "param")


def specs(dtype: DType = DType.bfloat16, optimizer: bool = False) -> dict[str, TensorSpec]:
    found = {name: TensorSpec(shape, dtype, parallel) for name, (shape, parallel) in NAMES.items()}
    if optimizer:
        moments = {
            f"optimizer.state.{kind}.{name}": dataclasses.replace(spec, dtype=DType.float32)
            for kind in MOMENTS
            for name, spec in found.items()
        }
        found |= moments
    return found


def values(wanted: dict[str, TensorSpec]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(spec.shape).to(spec.dtype.torch) for name, spec in wanted.items()}


def write(directory: Path, tensors: dict[str, Tensor], fp8: Fp8States | None = None, **settings: Any) -> None:
    wanted = specs(DType.of(tensors["output_layer.weight"].dtype), optimizer=len(tensors) > len(NAMES))
    writer = TorchDistWriter(directory, MODEL, wanted, **settings)
    writer.lay_out()
    for name, tensor in tensors.items():
        write_rows(writer, name, 0, tensor)
    writer.finish(fp8)


# megatron/core/extensions/transformer_engine.py and megatron/core/models/gpt/gpt_layer_specs.py, 0.12 to 0.19
DEMANDED = {
    *(
        f"decoder.layers.{module}._extra_state/shard_{layer}_2"
        for layer in range(2)
        for module in (
            *("self_attention.linear_qkv", "self_attention.linear_proj", "self_attention.core_attention"),
            *("mlp.linear_fc1", "mlp.linear_fc2"),
        )
    ),
    "decoder.final_layernorm._extra_state/shard_0_1",
}
