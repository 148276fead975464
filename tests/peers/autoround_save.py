"""Quantizes a model with AutoRound in some ways and saves, beside each, the weights that AutoRound's own layers compute
with. Arguments: the model, a folder, and as JSON the ways by name: a format, arguments of AutoRound, and settings of
layers."""

import json
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from auto_round import AutoRound
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM


class NoTokenizer:
    """What AutoRound asks of one where it calibrates nothing."""

    model_max_length = 64

    def save_pretrained(self, *arguments: object, **named: object) -> None: ...


def main(source: str, folder: Path, ways: dict[str, tuple[str, dict[str, object], dict[str, object]]]) -> None:
    for name, (form, said, layers) in ways.items():
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
        tuned = {"iters": 0, "disable_opt_rtn": True, "device_map": "cpu", "layer_config": layers or None}
        AutoRound(model, NoTokenizer(), **said, **tuned).quantize_and_save(str(folder / name), format=form)
        (saved,) = (path.parent for path in (folder / name).rglob("config.json"))
        saved.rename(folder / f"{name}-saved")
        loaded = AutoModelForCausalLM.from_pretrained(folder / f"{name}-saved", device_map="cpu")
        decoded = {}
        for module, layer in loaded.named_modules():
            if hasattr(layer, "qweight"):
                layer.scales = layer.scales.float()  # else values are rounded to its dtype, too
                inputs = getattr(layer, "infeatures", None) or layer.in_features
                decoded[f"{module}.weight"] = layer(torch.eye(inputs)).reshape(inputs, -1).t().float().contiguous()
        save_file(decoded, folder / f"{name}-values")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
