"""AutoRound: GPTQ's and AWQ's packing under a config of its own, with bits and groups of modules' own."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transposed_directories
from safetensors.torch import load_file, save_file
from torch import Tensor

from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.errors import DamagedCheckpoint, PrecisionError
from precisionctl.reports.inspect import describe

DOWN, UP = "model.layers.0.mlp.down_proj", "model.layers.0.mlp.up_proj"
OF_DOWN = {"bits": 8, "group_size": -1}


def say(directory: Path, **said: object) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= said
    kept = {key: value for key, value in config["quantization_config"].items() if value is not ...}
    path.write_text(json.dumps(config | {"quantization_config": kept}))


def make_mixed(directory: Path, spelling: str) -> dict[str, Tensor]:
    """One linear in eight bits with one group a row, all others in four. Returns the values, FP64."""
    values = transposed_directories.make(directory, spelling)
    spelled = replace(transposed_directories.SPELLINGS[spelling], bits=8, group=0)
    tensors = load_file(directory / "model.safetensors")
    shape = tuple(values[f"{DOWN}.weight"].shape)
    own, values[f"{DOWN}.weight"] = transposed_directories.coded(shape, spelled, torch.Generator().manual_seed(2))
    tensors |= {f"{DOWN}.{kind}": tensor.contiguous() for kind, tensor in own.items()}
    save_file(tensors, directory / "model.safetensors")
    return values


@pytest.mark.parametrize("named", [DOWN, r".*down_proj.*", "(a+)+$"])
@pytest.mark.parametrize("spelling", ["auto-round", "auto-round-gptq"])
def test_modules_may_have_bits_and_groups_of_their_own(tmp_path: Path, spelling: str, named: str) -> None:
    """Which of the settings a module has is read off its tensors, and no pattern of a stranger's is matched."""
    values = make_mixed(tmp_path, spelling)
    say(tmp_path, extra_config={named: OF_DOWN, "lm_head": {"bits": 16, "data_type": None}})
    reader = open_checkpoint(tmp_path)
    for name in (f"{DOWN}.weight", f"{UP}.weight"):
        assert torch.equal(read_tensor(reader, name), values[name].float().bfloat16())
    assert describe(reader)["precision"] == "4-bit integers and 8-bit integers of auto-round, read as bfloat16"


def test_modules_that_it_left_as_they_are_have_settings_of_no_codes(tmp_path: Path) -> None:
    values = transposed_directories.make(tmp_path, "auto-round")
    left = {"bits": 16, "act_bits": 16, "data_type": "float", "act_data_type": "float"}  # AutoRound 0.16.1 writes these
    say(tmp_path, extra_config={"lm_head": left, "model.layers.0.mlp.gate": left | {"group_size": 64}})
    found = read_tensor(open_checkpoint(tmp_path), f"{UP}.weight")
    assert torch.equal(found, values[f"{UP}.weight"].float().bfloat16())
    say(tmp_path, extra_config={UP: left | {"bits": 4}})
    with pytest.raises(PrecisionError, match="`data_type` 'float'"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("said", "match"),
    [
        ({}, "no codes of 2, 4 or 8 bits"),
        ({"extra_config": {DOWN: {"group_size": -1}}}, "codes of 8 bits, and config.json"),
    ],
)
def test_bits_and_groups_that_nothing_says_are_refused(tmp_path: Path, said: dict[str, object], match: str) -> None:
    make_mixed(tmp_path, "auto-round")
    say(tmp_path, **said)
    with pytest.raises(DamagedCheckpoint, match=match):
        open_checkpoint(tmp_path)


def test_groups_of_two_sizes_that_both_fit_are_refused(tmp_path: Path) -> None:
    transposed_directories.make(tmp_path, "auto-round")
    say(tmp_path, extra_config={UP: {"group_size": 42}})  # four groups of 128 inputs, as of 32
    with pytest.raises(DamagedCheckpoint, match="groups of 32 or 42"):
        open_checkpoint(tmp_path)


def test_what_the_config_lacks_is_as_in_transformers(tmp_path: Path) -> None:
    values = transposed_directories.make(tmp_path, "auto-round-gptq")
    for missing in ("packing_format", "bits", "sym", "data_type"):
        say(tmp_path, **{missing: ...})
    found = read_tensor(open_checkpoint(tmp_path), f"{UP}.weight")
    assert torch.equal(found, values[f"{UP}.weight"].float().bfloat16())
    say(tmp_path, group_size=...)
    with pytest.raises(DamagedCheckpoint, match="groups of 128"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("said", "match"),
    [
        ({"packing_format": "auto_round:llm_compressor"}, "`packing_format` 'auto_round:llm_compressor'"),
        ({"packing_format": ["auto_round"]}, r"`packing_format` \['auto_round'\]"),
        ({"data_type": "mx_fp"}, "`data_type` 'mx_fp'"),
        ({"extra_config": {UP: {"data_type": "nv_fp"}}}, "`data_type` 'nv_fp'"),
        ({"act_bits": 8}, "`act_bits` 8"),
        ({"rotation_config": {"hadamard_type": "random_hadamard"}}, "`rotation_config`"),
        ({"super_bits": 6}, "`super_bits` 6"),
        ({"group_size": True}, "True as the size of a group"),
        ({"extra_config": {UP: {"group_size": 0}}}, "0 as the size of a group"),
        ({"dynamic": {"+:.*up_proj": {"bits": 8}}}, "`dynamic`"),
    ],
)
def test_settings_by_which_values_would_be_others_are_refused_by_name(
    tmp_path: Path, said: dict[str, object], match: str
) -> None:
    transposed_directories.make(tmp_path, "auto-round")
    say(tmp_path, **said)
    with pytest.raises(PrecisionError, match=match):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("own", [[UP], {UP: 8}, "all"])
def test_settings_of_modules_that_are_none_are_one_error(tmp_path: Path, own: object) -> None:
    transposed_directories.make(tmp_path, "auto-round")
    say(tmp_path, extra_config=own)
    with pytest.raises(DamagedCheckpoint, match="not an object of objects"):
        open_checkpoint(tmp_path)
