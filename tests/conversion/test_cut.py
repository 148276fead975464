"""How a checkpoint is cut for ranks: shown before it is written, and of one that is there."""

import json
from pathlib import Path
from typing import Any

import pico
import pytest
import torch
from command_line import run

from precisionctl.sizes import size

CASES = {
    "llama-tied": (["--tp", 2, "--pp", 2], ["0", "1"]),
    "qwen3-moe": (["--pp", 2, "--ep", 4, "--tp", 2, "--last-stage-layers", 1], ["0", "1"]),
    "deepseek-v3": (["--pp", 3, "--ep", 2], ["0", "1", "2"]),
}


def tensors_in(value: Any) -> int:
    """Bytes of all tensors in what a rank saved."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(tensors_in, value.values()))
    return 0


@pytest.mark.parametrize("family", CASES)
def test_a_dry_run_says_what_each_gpu_will_hold_which_is_what_its_rank_s_file_has(tmp_path: Path, family: str) -> None:
    options, ranks = CASES[family]
    pico.save(tmp_path / "hf", family, dtype=torch.bfloat16)
    line = ("convert", tmp_path / "hf", tmp_path / "out", "--to", "megatron", "--container", "torch", *options)
    shown = [row.split() for row in run(*line, "--dry-run").stdout.partition("Split for ")[2].splitlines()]
    assert run(*line).exit_code == 0
    experts = "_???" if "--ep" in options else ""
    for rank in ranks:
        told = next(row for row in shown if row and row[0] == rank and row[-1].endswith("B"))  # not the title
        files = [*(tmp_path / "out" / "release").glob(f"mp_rank_??_{int(rank):03d}{experts}/model_optim_rng.pt")]
        held = {tensors_in(torch.load(file, weights_only=False)["model"]) for file in files}
        assert [size(nbytes).split() for nbytes in held] == [told[-2:]]


def test_inspect_shows_how_a_checkpoint_is_cut_in_the_options_of_convert(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "qwen3-moe", num_hidden_layers=3, dtype=torch.bfloat16)
    line = ("convert", tmp_path / "hf", tmp_path / "out", "--to", "megatron")
    run(*line, "--tp", 2, "--pp", 2, "--ep", 4)
    shown = run("inspect", tmp_path / "out").stdout
    assert "--tp 2 --pp 2 --last-stage-layers 1 --ep 4" in shown
    assert json.loads(run("inspect", tmp_path / "out", "--json").stdout)["cut"]["expert"] == 4
    assert json.loads(run("inspect", tmp_path / "hf", "--json").stdout)["cut"] is None
