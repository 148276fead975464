"""Mistral's own files and Meta's that are damaged, or of a model that is not read: one clear error, and no result."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import conversions
import pytest
import torch
from consolidated_files import DENSE, FP8, LLAMAS_MLP, META, VISION, YARN, save_meta, save_mistral, saying
from safetensors.torch import load_file, save_file
from torch import Tensor

from precisionctl.errors import CheckpointError, MappingError, PrecisionError


def without(name: str) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        file = directory / "consolidated.safetensors"
        save_file({key: value for key, value in load_file(file).items() if key != name}, file)

    return change


def with_tensor(name: str, *shape: int) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        file = directory / "consolidated.safetensors"
        save_file(load_file(file) | {name: torch.zeros(shape, dtype=torch.bfloat16)}, file)

    return change


ODD: dict[str, tuple[Callable[[Path], object], str]] = {
    "an unknown key": (saying(use_magic=3), "use_magic is 3, which is not known"),
    "an unknown key of YaRN": (saying(yarn=YARN | {"apply_scale": True, "gamma": 1}), r"yarn\.gamma is 1"),
    "no magnitude of YaRN": (saying(yarn=YARN), r"no `yarn\.apply_scale`"),
    "a scale that is no switch": (saying(yarn=YARN | {"apply_scale": "no"}), "apply_scale is 'no'"),
    "sound": (saying(multimodal={"whisper_model_args": {}}), "multimodal is"),
    "another projector": (saying(vision_encoder=VISION | {"mm_projector_id": ""}), "mm_projector_id is ''"),
    "other codes": (saying(quantization={"qformat_weight": "int8"}), "codes of .*int8"),
    "two kinds of codes": (saying(**FP8, quantization_config={}), "`quantization` and `quantization_config`"),
    "codes of modules by name": (
        saying(quantization={"quant_method": "compressed-tensors", "config_groups": {"a": {"targets": ["re:.*"]}}}),
        "for some modules by name",
    ),
    "no size": (saying(dim=None), "no `dim`"),
    "a size that is text": (saying(dim="64"), "'64'"),
    "a pattern of no layers": (saying(sliding_window=[None, 4], n_layers=[2]), r"n_layers is \[2\].*params\.json"),
    "a huge size": (saying(n_layers=10**30), "1000"),
    "infinite": (saying(rope_theta=float("inf")), "rope_theta is inf"),
    "no number": (saying(norm_eps=float("nan")), "nan"),
    "another number of heads": (saying(n_kv_heads=1), r"wk\.weight` has 48 rows, and 1 heads of 24"),
    "heads of one row": (saying(head_dim=3), "heads of 3 rows"),
    "two windows": (saying(sliding_window=4, _sliding_window=8), "sliding_window and _sliding_window"),
    "a broken pattern": (saying(sliding_window=[None, 4, 5]), "no pattern"),
    "another size of the MLP": (saying(hidden_dim=64), r"(gate|up|down)_proj"),
    "another vocabulary": (saying(vocab_size=100), "embed_tokens"),
    "no norm": (without("norm.weight"), r"model\.norm\.weight"),
    "a strange tensor": (
        with_tensor("layers.0.attention.wz.weight", 2, 2),
        r"wz\.weight` is no tensor of such a model",
    ),
    "a tensor of no layer": (with_tensor("layers.2.ffn_norm.weight", 64), r"layers\.2\."),
    "a vector for queries": (with_tensor("layers.0.attention.wq.weight", 96), r"q_proj|wq"),
    "no JSON": (lambda directory: (directory / "params.json").write_text("{"), "JSON"),
    "a tensor in two files": (
        lambda directory: [
            save_file({"norm.weight": torch.ones(64)}, directory / f"consolidated-0000{each}-of-00002.safetensors")
            for each in (1, 2)
            if (directory / "consolidated.safetensors").unlink(missing_ok=True) is None
        ],
        r"`norm\.weight` is in .* too",
    ),
    "a part of several": (
        lambda directory: (directory / "consolidated.safetensors").rename(
            directory / "consolidated-00001-of-00002.safetensors"
        ),
        "1 of 2 files",
    ),
}


@pytest.mark.parametrize("odd", ODD)
def test_what_is_odd_is_one_clear_error(tmp_path: Path, odd: str) -> None:
    change, what = ODD[odd]
    save_mistral(tmp_path / "source", DENSE)
    change(tmp_path / "source")
    with pytest.raises((CheckpointError, MappingError, PrecisionError)) as refused:
        conversions.run(tmp_path / "source", tmp_path / "hf", "hf")
    assert re.search(what, str(refused.value)), str(refused.value)
    assert not (tmp_path / "hf").exists()


def rank_1(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def changed(directory: Path) -> None:
        file = directory / "consolidated.01.pth"
        state = torch.load(file)
        change(state)
        torch.save(state, file)

    return changed


ODD_PARTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a missing part": (lambda directory: (directory / "consolidated.00.pth").unlink(), r"00\.pth is missing"),
    "a part that is a pipe": (
        lambda directory: (file := directory / "consolidated.01.pth").unlink() or os.mkfifo(file),
        r"not a file .*01\.pth",
    ),
    "a part that is a folder": (
        lambda directory: (file := directory / "consolidated.01.pth").unlink() or file.mkdir(),
        r"not a file .*01\.pth",
    ),
    "too few parts": (lambda directory: (directory / "consolidated.01.pth").unlink(), "rows|shape"),
    "a part that lacks a tensor": (rank_1(lambda state: state.pop("norm.weight")), "`norm.weight` is in one of"),
    "parts of unequal shapes": (
        rank_1(lambda state: state.update({"output.weight": torch.zeros(1, 64)})),
        r"`output.weight` is \[64, 64\] bfloat16 in consolidated\.00\.pth, and something else in consolidated\.01",
    ),
    "another norm": (rank_1(lambda state: state["norm.weight"].add_(1)), "`norm.weight` is not the same"),
    "images": (saying(vision_chunk_size=448), "vision_chunk_size is 448"),
    "another multiple": (saying(multiple_of=10**40), "multiple_of"),
    "a huge factor": (saying(ffn_dim_multiplier=1e29), "ffn_dim_multiplier"),
}


@pytest.mark.parametrize("odd", ODD_PARTS)
def test_parts_that_do_not_fit_are_one_clear_error(tmp_path: Path, odd: str) -> None:
    change, what = ODD_PARTS[odd]
    save_meta(tmp_path / "source", META, LLAMAS_MLP, 2)
    change(tmp_path / "source")
    with pytest.raises((CheckpointError, MappingError)) as refused:
        conversions.run(tmp_path / "source", tmp_path / "hf", "hf")
    assert re.search(what, str(refused.value)), str(refused.value)
