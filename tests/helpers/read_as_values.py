"""What holds of every directory of codes that are read as values alone."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import conversions
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from precisionctl.checkpoints.chunks import read_rows, read_tensor
from precisionctl.checkpoints.decoded.methods import METHODS
from precisionctl.checkpoints.hf_directory.safetensors_file import StoredTensors, read_header
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.param import Parallelism
from precisionctl.reports.inspect import describe
from precisionctl.verify.compare import compare


def assert_read_as_values(
    source: Path, values: Mapping[str, Tensor], words: str, *, megatron: bool = False
) -> tuple[tuple[str, ...], dict[str, Tensor]]:
    """That a directory converts to these values, rounded to BF16, and is told in these words; through Megatron too, if
    asked. Returns the notes and the tensors of the result."""
    out = source.parent / "bf16"
    notes = conversions.run(source, out, "hf", verify=True).notes
    assert f"{len(values)} weights were {words}. There is no way back to those codes." in notes
    found = load_file(out / "model.safetensors")
    for name, expected in values.items():
        assert torch.equal(found[name], expected.bfloat16()), name
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    reader = open_checkpoint(source)
    assert compare(reader, open_checkpoint(out)).equal
    assert describe(reader)["precision"] == words
    if megatron:
        conversions.run(source, source.parent / "megatron", "megatron", parallelism=Parallelism(2))
        assert compare(reader, open_checkpoint(source.parent / "megatron")).equal
    return notes, found


def assert_any_cut(
    source: Path, name: str, values: Tensor, monkeypatch: pytest.MonkeyPatch, *, piece: int = 300
) -> None:
    """That a weight, decoded in pieces of so many numbers, and rows of it from the 32nd on, are these values."""
    monkeypatch.setattr("precisionctl.checkpoints.decoded.base.PIECE", piece)
    reader, expected = open_checkpoint(source), values.bfloat16()
    assert torch.equal(read_tensor(reader, name), expected)
    assert torch.equal(read_rows(reader, name, 31, 34), expected[31:65])


def assert_decoded_once(source: Path, name: str, values: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """That a weight of some hundred rows, which are decoded one at a time, is these values, and that no vector of many
    outputs is decoded anew for each of its rows."""
    monkeypatch.setattr("precisionctl.checkpoints.decoded.base.PIECE", values.shape[1])
    reader, expected = open_checkpoint(source), values.bfloat16()
    read_rows(reader, name, 0, 1)  # and the codebooks
    with _Numbers() as numbers:
        assert torch.equal(read_tensor(reader, name), expected)
    assert numbers.made < 40 * expected.numel()


class _Numbers(TorchDispatchMode):
    """A context that counts the numbers that PyTorch makes."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        found = function(*arguments, **(keywords or {}))
        self.made += found.numel() if isinstance(found, Tensor) and not function.is_view else 0
        return found


def golden_cases(file: Path) -> list[str]:
    """The weights of a file in `golden/`, which has `<case>.decoded` beside what is stored of each."""
    return sorted(name.removesuffix(".decoded") for name in read_header(file) if name.endswith(".decoded"))


def assert_golden(file: Path, case: str, said: Mapping[str, Any]) -> None:
    """That a weight decodes to what its tool made of it, rounded to BF16, under this `quantization_config`."""
    stored = {name: (file, tensor) for name, tensor in read_header(file).items() if name != f"{case}.decoded"}
    of_case = StoredTensors({name: place for name, place in stored.items() if name.startswith(f"{case}.")})
    decoded = METHODS[said["quant_method"]](of_case, {"quantization_config": said}, file)
    assert torch.equal(read_tensor(decoded, f"{case}.weight"), load_file(file)[f"{case}.decoded"].bfloat16())
