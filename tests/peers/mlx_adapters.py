"""Gives a model random adapters as `mlx_lm.lora` makes and saves them, and fuses them as `mlx_lm.fuse` does. Arguments:
the model's folder, that of the adapter, that of the fused model, and `lora` or `dora`."""

import json
import sys
from pathlib import Path

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters
from mlx_lm.utils import load_model, save_model


def main(source: Path, adapter: Path, fused: Path, kind: str) -> None:
    model, _ = load_model(source)
    said = {"rank": 4, "dropout": 0.0, "scale": 20.0}
    model.freeze()
    linear_to_lora_layers(model, 1, said, use_dora=kind == "dora")
    trained = {
        name: each + mx.random.normal(each.shape) * 0.1 for name, each in tree_flatten(model.trainable_parameters())
    }
    adapter.mkdir()
    mx.save_safetensors(str(adapter / "adapters.safetensors"), trained)
    config = {"fine_tune_type": kind, "num_layers": 1, "lora_parameters": said, "model": str(source)}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    model, _ = load_model(source)
    model = load_adapters(model, str(adapter))
    made = [(name, module.fuse()) for name, module in model.named_modules() if hasattr(module, "fuse")]
    model.update_modules(tree_unflatten(made))
    save_model(fused, model)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]), sys.argv[4])
