"""Falcon-H1 in GGUF, whose weights are stored multiplied by config.json's multipliers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import WRITTEN, export, source
from safetensors.torch import load_file

from precisionctl.checkpoints.base import Hints
from precisionctl.checkpoints.chunks import read_rows, read_tensor
from precisionctl.checkpoints.gguf import tensors as gguf_tensors
from precisionctl.checkpoints.gguf.head import read_head
from precisionctl.checkpoints.hf_directory.companions import read_companions
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.codes.ggml_blocks import blocks_of
from precisionctl.codes.ggml_formats import named
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import execute
from precisionctl.errors import UnknownArchitecture
from precisionctl.param import Parallelism
from precisionctl.verify.compare import compare

IN_PROJ = "model.layers.1.mamba.in_proj.weight"
FACTORS = {
    "embed_tokens": (4.0,),
    "lm_head": (0.5,),
    "q_proj": (1.5,),
    "k_proj": (0.5, 1.5),
    "v_proj": (1.5,),
    "o_proj": (0.75,),
    "out_proj": (0.5,),
    "gate_proj": (1.5,),
    "down_proj": (0.5,),
}
PARTS = [(128, 0.5), (128, 0.75), (32, 1.25), (32, 1.5), (32, 0.25)]
"""What the model of `pico` says. In in_proj come z, x, B, C and dt, whose rows are multiplied by 1.25 first."""


def products(name: str, values: torch.Tensor) -> torch.Tensor:
    if name.endswith("in_proj.weight"):
        factors = torch.tensor([factor for rows, factor in PARTS for _ in range(rows)])
        return values.float() * 1.25 * factors[:, None]
    found = values.float()
    for factor in FACTORS.get(name.split(".")[-2], ()):
        found = found * factor
    return found


@pytest.fixture
def published(tmp_path: Path) -> Path:
    return source(tmp_path / "hf", "falcon-h1", **WRITTEN["falcon-h1"])


def described(published: Path) -> Hints:
    return Hints(companions=read_companions(published), reference=published)


def test_without_a_reference_products_are_the_weights_of_a_model_whose_multipliers_are_1(
    published: Path, tmp_path: Path
) -> None:
    file, coded = export(published, tmp_path / "bf16"), export(published, tmp_path / "q8_0", "q8_0")
    reader, codes = open_checkpoint(file), open_checkpoint(coded)
    assert reader.model.multipliers and reader.model.multipliers.ssm == (1.0,) * 5
    assert reader.model.embedding_multiplier == reader.model.logit_multiplier == 1
    stored = load_file(published / "model.safetensors")
    assert FACTORS.keys() <= {name.split(".")[-2] for name in stored}
    for name, values in stored.items():
        if not name.endswith(("A_log", "norm.weight")):
            assert torch.equal(read_tensor(reader, name), products(name, values).to(read_tensor(reader, name).dtype)), (
                name
            )
        if name == IN_PROJ:
            rounded = blocks_of(named("Q8_0")).rounded(products(name, values))
            assert torch.equal(read_tensor(codes, name), rounded)


@pytest.mark.parametrize(("scheme", "status"), [("bf16", "rounded"), ("q8_0", "encoded")])
def test_verify_knows_the_weights_that_were_multiplied(
    published: Path, tmp_path: Path, scheme: Any, status: str
) -> None:
    file = export(published, tmp_path / "out", scheme)
    sides = open_checkpoint(file, None, described(published)), open_checkpoint(published)
    for a, b in (sides, sides[::-1]):
        found = compare(a, b)
        assert found.equal and {each.status for each in found.tensors} <= {"exact", "rounded", status}
        assert {each.name: each.status for each in found.tensors}[IN_PROJ] == status
    data, place = bytearray(file.read_bytes()), read_head(file).tensors["blk.1.ssm_in.weight"].offset
    data[place + 3] ^= 0x40
    file.write_bytes(data)
    changed = compare(open_checkpoint(file, None, described(published)), sides[1])
    assert {each.name: each.status for each in changed.tensors}[IN_PROJ] == "differs"


def test_rows_are_divided_however_they_are_cut(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = open_checkpoint(export(published, tmp_path / "out"), None, described(published))
    whole = read_tensor(reader, IN_PROJ)
    assert torch.allclose(whole, load_file(published / "model.safetensors")[IN_PROJ].float(), rtol=2**-8, atol=0)
    monkeypatch.setattr(gguf_tensors, "PIECE", 100)
    for row, rows in ((0, 1), (127, 2), (250, 50), (351, 1), (100, 252)):
        assert torch.equal(read_rows(reader, IN_PROJ, row, rows), whole[row : row + rows])


def test_the_bytes_are_the_same_from_megatron(published: Path, tmp_path: Path) -> None:
    execute(plan_command(Request(published, tmp_path / "megatron", "megatron", parallelism=Parallelism(tensor=2))))
    files = [export(tmp_path / name, tmp_path / f"of-{name}" / "out") for name in ("hf", "megatron")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_an_output_layer_that_would_have_the_multiplier_of_the_embedding_is_refused(tmp_path: Path) -> None:
    tied = source(tmp_path / "hf", "falcon-h1", **WRITTEN["falcon-h1"], tie_word_embeddings=True)
    with pytest.raises(UnknownArchitecture, match="tied_embeddings True"):
        export(tied, tmp_path / "out")
