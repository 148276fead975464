"""Quantizes models as mlx-lm does and saves, beside each, what MLX makes of its weights. Arguments: a folder, and as
JSON a list of cases: the model's folder in it, the result's, the keywords of `quantize_model`, and settings of modules
by parts of their names."""

import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.mla import QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear
from mlx_lm.utils import load_model, quantize_model, save_config, save_model

CODED = (nn.QuantizedLinear, nn.QuantizedEmbedding, QuantizedMultiLinear, QuantizedSwitchLinear)


def decoded(module: nn.Module) -> mx.array:
    whole = module.get("global_scale")
    if whole is None:
        return mx.dequantize(
            module.weight, module.scales, module.get("biases"), module.group_size, module.bits, module.mode
        )
    experts = zip(module.weight, module.scales, whole, strict=True)
    return mx.stack([mx.dequantize(*one, mode=module.mode, global_scale=of) for *one, of in experts])


def main(folder: Path, cases: list[tuple[str, str, dict[str, Any], dict[str, Any]]]) -> None:
    for source, result, said, own in cases:
        model, config = load_model(folder / source)
        if said.pop("quantize", True):
            said["quant_predicate"] = lambda path, _, own=own: next((own[key] for key in own if key in path), True)
            model, config = quantize_model(model, config, said.pop("group_size", None), said.pop("bits", None), **said)
        save_model(folder / result, model)
        save_config(config, folder / result / "config.json")
        values = {name: each for name, each in tree_flatten(model.parameters()) if name.endswith((".weight", ".bias"))}
        coded = {name: module for name, module in model.named_modules() if isinstance(module, CODED)}
        values |= {f"{name}.weight": decoded(module) for name, module in coded.items()}
        mx.save_safetensors(str(folder / f"{result}-values"), values)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
