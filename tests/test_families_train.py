"""Families other than Llama through the real commands: trained for some steps, saved, gone on with, evaluated."""

import json
from pathlib import Path

import pytest
import torch
from test_cli import run
from training import SMALL, make_source, make_text
from transformers import AutoModelForCausalLM

from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.evaluate import load

DENSE = ("qwen3",)
EXPERTS = ("mixtral", "qwen3-moe")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return make_text(tmp_path / "text.txt")


def train(source: Path, data: Path, out: Path, precision: str, steps: int) -> str:
    """What the command says."""
    keys = {**SMALL, "train.steps": steps, "schedule.kind": "constant"}
    settings = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    command = ("resume", source, "--precision", precision, "--data", data, "--out", out, "--backend", "emulated")
    done = run(*command, *settings)
    assert done.exit_code == 0, done.stderr
    return done.stdout + done.stderr


def perplexity(checkpoint: Path, data: Path) -> float:
    done = run("eval", checkpoint, "--data", data, "--sequence-length", 32, "--json")
    assert done.exit_code == 0, done.stderr
    return float(json.loads(done.stdout)["perplexity"])


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("family", DENSE + EXPERTS)
def test_a_run_learns_and_a_run_in_two_parts_is_the_same_run(
    family: str, precision: str, tmp_path: Path, data: Path
) -> None:
    source = make_source(tmp_path / "hf", family=family)
    said = train(source, data, tmp_path / "whole", precision, 4)
    assert ("routed experts stay in BF16" in said) == (precision == "fp8" and family in EXPERTS)
    train(source, data, tmp_path / "parts", precision, 2)
    train(source, data, tmp_path / "parts", precision, 4)
    whole, parts = (open_checkpoint(tmp_path / name) for name in ("whole", "parts"))
    (one, _), (other, _) = load(whole), load(parts)
    for (name, first), second in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(first, second), name
    assert perplexity(tmp_path / "whole", data) < 0.8 * perplexity(source, data)


@pytest.mark.parametrize("family", DENSE + EXPERTS)
def test_what_was_trained_is_what_transformers_then_computes(family: str, tmp_path: Path, data: Path) -> None:
    source = make_source(tmp_path / "hf", family=family)
    train(source, data, tmp_path / "run", "bf16", 2)
    assert run("convert", tmp_path / "run", tmp_path / "back", "--to", "hf").exit_code == 0
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    ours, _ = load(open_checkpoint(tmp_path / "run"))
    tokens = torch.randint(80, (2, 32))
    with torch.no_grad():
        expected = theirs(tokens).logits
        torch.testing.assert_close(ours.float()(tokens)[..., :80], expected, rtol=0, atol=1e-5 * float(expected.std()))
