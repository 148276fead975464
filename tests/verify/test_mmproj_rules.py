"""A file of towers for llama.cpp that its loader would refuse, or that is of another text model: `verify --target`
names what."""

import struct
from pathlib import Path

import gguf_files
import gguf_towers
import pytest
from target_checks import check_directory

from precisionctl.checkpoints.gguf.head import read_head
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import LLAMA_CPP, Request
from precisionctl.conversion.command import execute
from precisionctl.verify.compare import compare

NAME = "mmproj-out-BF16.gguf"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wrapper in `hf`, and both of its files in `out`."""
    folder = tmp_path_factory.mktemp("towers")
    execute(plan_command(Request.export(gguf_towers.save(folder / "hf", "qwen3_vl"), folder / "out", LLAMA_CPP)))
    return folder


def beside(exported: Path, folder: Path, towers: bytes, text: bytes | None = None) -> Path:
    """A directory with the text model, and these bytes as its towers."""
    (folder / "out-BF16.gguf").write_bytes(text or (exported / "out" / "out-BF16.gguf").read_bytes())
    (folder / NAME).write_bytes(towers)
    return folder


def retyped(file: Path, key: str, old: int, new: int) -> bytes:
    """A file with the type of a key's value changed for one of the same size."""
    before, after = (gguf_files.string(key) + struct.pack("<I", kind) for kind in (old, new))
    data = file.read_bytes()
    assert data.count(before) == 1
    return data.replace(before, after)


def without(file: Path, name: str) -> bytes:
    """A file without a key, or without a tensor."""
    numbers = {"F32": gguf_files.F32, "BF16": gguf_files.BF16}
    stored = gguf_files.stored_tensors(file).items()
    tensors = {each: (tensor.shape, numbers[tensor.format.name], data) for each, (tensor, data) in stored}
    metadata = dict(read_head(file).metadata)
    for said in (metadata, tensors):
        said.pop(name, None)  # type: ignore[attr-defined]
    return gguf_files.file(metadata, tensors)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("clip.vision.image_mean", "not there, not list of float32"),
        ("clip.vision.feed_forward_length", "not there, not uint32"),
        ("clip.projector_type", "None, where a graph is named"),
        ("clip.has_vision_encoder", "no tower of images or of sound is said"),
        ("v.blk.2.attn_qkv.weight", "v.blk.2.attn_q.weight"),
        ("v.blk.1.ffn_down.weight", "not there: v.blk.1.ffn_down.weight"),
        ("mm.2.weight", "not there: mm.2.weight"),
        ("v.deepstack.1.fc1.weight", "of 2 layers, and the text model takes those of 3"),
    ],
)
def test_what_llama_cpp_asks_for_and_does_not_find_is_named(
    tmp_path: Path, exported: Path, name: str, what: str
) -> None:
    check = check_directory(beside(exported, tmp_path, without(exported / "out" / NAME, name)), LLAMA_CPP)
    (finding,) = check.findings
    assert finding.where.startswith(f"{NAME}: ") and what in finding.what and not check.passes


def test_an_integer_of_another_type_is_named(tmp_path: Path, exported: Path) -> None:
    key = "clip.vision.block_count"
    made = beside(exported, tmp_path, retyped(exported / "out" / NAME, key, gguf_files.U32, gguf_files.I32))
    (finding,) = check_directory(made, LLAMA_CPP).findings
    assert finding.where == f"{NAME}: {key}" and finding.what == "int32, not uint32"
    (said,) = compare(open_checkpoint(exported / "hf"), open_checkpoint(made)).settings
    assert said == f"{key} is int32 in B, and uint32 by the other's config.json"


def test_towers_of_a_text_model_of_another_width_are_named(tmp_path: Path, exported: Path) -> None:
    other = gguf_files.export(gguf_files.source(tmp_path / "hf", "qwen3"), tmp_path / "text")
    (tmp_path / "both").mkdir()
    made = beside(exported, tmp_path / "both", (exported / "out" / NAME).read_bytes(), other.read_bytes())
    width, layers = (finding.what for finding in check_directory(made, LLAMA_CPP).findings)
    assert width == "[128], beside hidden states of 64 in the text model" and "takes those of 0" in layers


def test_a_graph_of_which_nothing_is_known_is_no_mistake(tmp_path: Path, exported: Path) -> None:
    file = exported / "out" / NAME
    data = file.read_bytes().replace(b"qwen3vl_merger", b"qwen9vl_merger")
    check = check_directory(beside(exported, tmp_path, data), LLAMA_CPP)
    assert check.passes and "nothing is known" in check.findings[0].what
