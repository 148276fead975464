"""Directories of codes in which something was changed: one tensor, or what config.json says."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import conversions
import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.errors import PrecisionctlError

MODULE = "model.layers.0.mlp.up_proj"
UP = f"{MODULE}.weight"

Change: TypeAlias = Callable[[dict[str, Tensor], dict[str, Any]], object]
Hostile: TypeAlias = dict[str, tuple[Change, type[PrecisionctlError], str]]


def put(name: str, tensor: Tensor | None) -> Change:
    """Another tensor in the place of one of MODULE's, or none."""

    def changed(tensors: dict[str, Tensor], said: dict[str, Any]) -> None:
        tensors.pop(f"{MODULE}.{name}", None)
        tensors.update({} if tensor is None else {f"{MODULE}.{name}": tensor})

    return changed


def stray(name: str, tensor: Tensor) -> Change:
    """A tensor of no module that the model has."""
    return lambda tensors, said: tensors.update({name: tensor})


def says(**changed: object) -> Change:
    """Other settings in `quantization_config`."""
    return lambda tensors, said: said.update(changed)


def assert_refused(
    made: Path, folder: Path, case: tuple[Change, type[PrecisionctlError], str], beside: str | None = None
) -> None:
    """That a copy of a directory, in an empty folder, is one error once it was changed: where codes are read, or where
    a conversion is planned. What config.json says may be in a file `beside` it."""
    change, error, match = case
    tensors, config = load_file(made / "model.safetensors"), json.loads((made / "config.json").read_text())
    said = json.loads((made / beside).read_text()) if beside else config["quantization_config"]
    change(tensors, said)
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    if beside:
        (folder / beside).write_text(json.dumps(said))
    with pytest.raises(error, match=match):
        read_tensor(open_checkpoint(folder), UP)
        conversions.run(folder, folder / "out", "hf")
