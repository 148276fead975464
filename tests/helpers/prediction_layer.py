"""A layer of multi-token prediction for models of tests."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from precisionctl.architectures.families import architecture_of, from_hf_config
from precisionctl.architectures.param_map import names


def add_mtp(directory: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Give a saved model a prediction layer of random numbers, which transformers does not make; returns its
    tensors."""
    config = json.loads((directory / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (directory / "config.json").write_text(json.dumps(config))
    model, table = from_hf_config(config), architecture_of(config["model_type"])
    added = {
        name: torch.randn(shape, dtype=dtype)
        for row in table.spelled({}, model)
        if "{mtp}" in row.megatron and row.present.in_layout("hf", model)
        for place in row.places(model)
        for name, shape in zip(names(row, "hf", place), row.shapes(model, "hf"), strict=True)
    }
    assert any("norm" in name for name in added)
    save_file(load_file(directory / "model.safetensors") | added, directory / "model.safetensors", {"format": "pt"})
    return added
