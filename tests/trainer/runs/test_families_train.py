"""Families other than Llama through the real commands: trained for some steps, saved, gone on with, evaluated."""

import json
from pathlib import Path

import pico
import pytest
import torch
from command_line import run
from installed import BEFORE_5_23
from prediction_layer import add_mtp
from safetensors.torch import load_file
from soaking import few, in_soak
from training import SMALL, make_source, make_text
from transformers import AutoModelForCausalLM

from precisionctl.architectures.families import architecture_of
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.evaluate import load

BRIEFLY = ("mixtral",)
TRAINED = [
    pytest.param(family, marks=[] if family in BRIEFLY else [pytest.mark.soak])
    for family in pico.first_of_each(pico.mixers)
]
"""Families with each kind of mixer; in `make test` attention and experts."""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return make_text(tmp_path / "text.txt")


def train(
    source: Path, data: Path, out: Path, precision: str, steps: int, lr: float = 0.01, preset: str = "adamw"
) -> str:
    """What the command says."""
    keys = {**SMALL, "train.steps": steps, "schedule.kind": "constant", "optimizer.lr": lr, "optimizer.preset": preset}
    settings = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    command = ("resume", source, "--precision", precision, "--data", data, "--out", out, "--backend", "emulated")
    done = run(*command, *settings)
    assert done.exit_code == 0, done.stderr
    return done.stdout + done.stderr


def perplexity(checkpoint: Path, data: Path) -> float:
    done = run("eval", checkpoint, "--data", data, "--sequence-length", 32, "--json")
    assert done.exit_code == 0, done.stderr
    return float(json.loads(done.stdout)["perplexity"])


@pytest.mark.parametrize("family", TRAINED)
def test_an_fp8_run_learns_and_a_run_in_two_parts_is_the_same_run(family: str, tmp_path: Path, data: Path) -> None:
    assert_learns_alike_in_two_parts(family, "fp8", tmp_path, data)


@pytest.mark.soak  # a Llama's is held to the same by test_resume.py, one in FP8 of experts above
@pytest.mark.parametrize("family", ["mixtral", "qwen3"])
def test_a_bf16_run_learns_and_a_run_in_two_parts_is_the_same_run(family: str, tmp_path: Path, data: Path) -> None:
    assert_learns_alike_in_two_parts(family, "bf16", tmp_path, data)


def assert_learns_alike_in_two_parts(family: str, precision: str, tmp_path: Path, data: Path) -> None:
    source = make_source(tmp_path / "hf", family=family, **pico.fp8_sizes(family))
    gentle = 0.001  # at ten times as much some of these untrained models get worse, in BF16 as in FP8
    train(source, data, tmp_path / "whole", precision, 4, gentle)
    train(source, data, tmp_path / "parts", precision, 2, gentle)
    train(source, data, tmp_path / "parts", precision, 4, gentle)
    whole, parts = (open_checkpoint(tmp_path / name) for name in ("whole", "parts"))
    (one, _), (other, _) = load(whole), load(parts)
    for (name, first), second in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(first, second), name
    assert perplexity(tmp_path / "whole", data) < 0.99 * perplexity(source, data)


@pytest.mark.parametrize("family", few(pico.FAMILIES, "llama-2", "deepseek-v2"))
def test_what_was_trained_is_what_transformers_then_computes(family: str, tmp_path: Path, data: Path) -> None:
    sizes = pico.ONE_GROUP.get(family, {}) if BEFORE_5_23 else {}
    source = make_source(tmp_path / "hf", family=family, **pico.fp8_sizes(family) | sizes)
    train(source, data, tmp_path / "run", "bf16", 2)
    assert run("convert", tmp_path / "run", tmp_path / "back", "--to", "hf").exit_code == 0
    theirs = pico.as_its_config_says(AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32))
    ours, _ = load(open_checkpoint(tmp_path / "run"))
    tokens = torch.randint(80, (2, 32))
    with torch.no_grad():
        expected = theirs(tokens).logits
        torch.testing.assert_close(ours.float()(tokens)[..., :80], expected, rtol=0, atol=1e-5 * float(expected.std()))


@pytest.mark.parametrize("family", ["deepseek-v3", *in_soak("nemotron-h")])
def test_multi_token_prediction_layers_go_through_training_as_they_are(family: str, tmp_path: Path, data: Path) -> None:
    source = make_source(tmp_path / "hf", family=family)
    added = add_mtp(source)
    assert "prediction layers are carried along" in train(source, data, tmp_path / "run", "bf16", 2)
    assert run("convert", tmp_path / "run", tmp_path / "back", "--to", "hf").exit_code == 0
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    for name, values in added.items():
        dtype = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
        assert torch.equal(after[name], values.to(dtype)), name
    assert not torch.equal(after["lm_head.weight"], before["lm_head.weight"].bfloat16())


WITH_INTEGERS = [
    family
    for family in pico.FAMILIES
    if any(
        row.integers_below for row in architecture_of(pico.shape(family).architecture).spelled({}, pico.shape(family))
    )
]
"""With tables of integers: experts by token, and numbers of up to 2^57 that hash n-grams, which no float holds."""


@pytest.mark.parametrize("begins", ["hf", *in_soak("megatron")])
@pytest.mark.parametrize("preset", ["adamw", *in_soak("fp8-lm", "muon")])
@pytest.mark.parametrize("family", few(WITH_INTEGERS, "qwen4"))
def test_no_run_changes_tables_of_integers(family: str, preset: str, begins: str, tmp_path: Path, data: Path) -> None:
    more = {"n_routed_experts": 16} if family == "deepseek-v4" else {}  # numbers that FP16 under a scale rounds
    hf = make_source(tmp_path / "hf", family=family, **more)
    before = {
        name: table for name, table in load_file(hf / "model.safetensors").items() if not table.is_floating_point()
    }
    assert before
    source = hf
    if begins == "megatron":
        source = tmp_path / "megatron"
        assert run("convert", hf, source, "--to", "megatron").exit_code == 0
    for steps in (1, 2):  # the second run loads what the first one has saved
        train(source, data, tmp_path / "run", "bf16", steps, preset=preset)
    assert run("convert", tmp_path / "run", tmp_path / "back", "--to", "hf").exit_code == 0
    after = load_file(tmp_path / "back" / "model.safetensors")
    for name, table in before.items():
        assert torch.equal(after[name], table), name
