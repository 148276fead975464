"""Megatron-Bridge's checkpoints of wrappers, as a program: `python bridge_wrappers.py FOLDER NAME...`.

For each name, Bridge imports the Hugging Face directory `NAME-hf` and saves what its training would, to `NAME-theirs`.
"""

import contextlib
import json
import os
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import bridge_on_cpu
import torch


def in_its_own_words(directory: Path) -> None:
    """Let config.json say what the transformers of Bridge's environment looks for."""
    config = json.loads((directory / "config.json").read_text())
    text = config["text_config"]
    text["architectures"] = config["architectures"]  # by which it knows Qwen2.5-VL
    rope = text["rope_parameters"]
    if "full_attention" in rope:
        text["rope_theta"] = rope["full_attention"]["rope_theta"]
        text["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
    else:
        text["rope_theta"] = rope["rope_theta"]
        text["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    (directory / "config.json").write_text(json.dumps(config))


def without_transformer_engine() -> None:
    """Give Gemma 3 and Qwen3-VL layers of megatron-core, under the names that they have with Transformer Engine."""
    from megatron.bridge.models.gemma import gemma3_provider
    from megatron.bridge.models.gemma_vl import modeling_gemma3_vl
    from megatron.bridge.models.qwen_vl import qwen3_vl_provider
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer import transformer_block
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class Norm(torch.nn.Module):
        def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((hidden_size,), torch.nan, dtype=config.params_dtype))

    class TERowParallelLinearLayerNorm(layers.RowParallelLinear):  # type: ignore[misc]
        def __init__(self, input_size: int, output_size: int, *, config: Any, **others: Any) -> None:
            super().__init__(input_size, output_size, config=config, **others)
            self.post_layernorm = Norm(config, output_size)

    spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec
    fused = spec(qk_layernorm=False).submodules.self_attention.submodules.linear_qkv
    layers.get_cuda_rng_tracker = lambda: types.SimpleNamespace(fork=contextlib.nullcontext)
    modeling_gemma3_vl.TENorm = gemma3_provider.TENorm = Norm
    gemma3_provider.TELayerNormColumnParallelLinear = fused
    gemma3_provider.Gemma3TEDotProductAttention = DotProductAttention
    gemma3_provider.TERowParallelLinearLayerNorm = TERowParallelLinearLayerNorm
    transformer_block.LayerNormImpl = Norm
    qwen3_vl_provider.get_gpt_layer_with_transformer_engine_spec = spec


def main(folder: Path, names: list[str]) -> None:
    bridge_on_cpu.without_packages_for_gpus()
    bridge_on_cpu.without_cuda()
    warnings.simplefilter("ignore")
    from megatron.bridge import AutoBridge
    from megatron.bridge.training.model_load_save import temporary_distributed_context

    bridge_on_cpu.with_names_of_transformer_engine()
    without_transformer_engine()
    for name in names:
        in_its_own_words(folder / f"{name}-hf")
        bridge = AutoBridge.from_hf_pretrained(folder / f"{name}-hf")
        with temporary_distributed_context(backend="gloo"):
            provider = bridge.to_megatron_provider(load_weights=True)
            provider.finalize()
            model = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)
            bridge.save_megatron_model(model, folder / f"{name}-theirs")
        for chosen in [variable for variable in os.environ if variable.startswith("NVTE_")]:
            del os.environ[chosen]  # Gemma 3 wants another attention than the others


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
