import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import conversions
import four_bit_directories
import fp8_directories
import pico
import pytest
import torch
import transposed_directories
from command_line import run
from safetensors import safe_open

from precisionctl.checkpoints.hf_directory.safetensors_file import read_header
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import execute
from precisionctl.dtypes import DType
from precisionctl.errors import DamagedCheckpoint
from precisionctl.fp8 import sidecar
from precisionctl.fp8.delayed_scaling import after_one_update
from precisionctl.fp8.state import DelayedScaling, Fp8State, Fp8States
from precisionctl.param import Parallelism, TensorSpec
from precisionctl.reports.inspect import describe, tables
from precisionctl.untrusted.safe_files import LENGTHS

RECIPE = DelayedScaling(amax_history_len=4)
MODULE = "decoder.layers.0.mlp.linear_fc1"


def with_state(directory: Path) -> Path:
    """One module that has recorded its input and nothing else, at iteration 70."""
    roles = dict(Fp8State.fresh(4).roles)
    roles["input"] = after_one_update(torch.tensor(2.0), "input", RECIPE)
    raw = {"other": torch.zeros(3, dtype=torch.uint8)}
    states = Fp8States(RECIPE, {MODULE: Fp8State(roles)}, raw, iteration=70)
    sidecar.write(directory / sidecar.RELATIVE, states)
    return directory


def test_a_description_counts_what_transformers_counts(tmp_path: Path) -> None:
    model = pico.make_and_save(tmp_path, dtype=torch.bfloat16)
    found = describe(open_checkpoint(tmp_path))
    assert found["parameters"] == model.num_parameters()
    assert found["bytes_by_dtype"] == {"bfloat16": 2 * model.num_parameters()}
    assert (found["container"], found["layout"], found["architecture"]) == ("safetensors", "hf", "llama")
    assert found["precision"] == "bfloat16"
    assert found["fp8"] is None and found["mismatch"] is None


def test_a_reference_says_which_model_it_is_of_what_does_not(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    expected = describe(open_checkpoint(tmp_path / "hf"))
    conversions.run(tmp_path / "hf", tmp_path / "dcp", "hf", container="dcp")
    (tmp_path / "dcp" / "config.json").unlink()
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "model.safetensors").write_bytes((tmp_path / "hf" / "model.safetensors").read_bytes())
    for name in ("dcp", "bare"):
        found = json.loads(run("inspect", tmp_path / name, "--reference", tmp_path / "hf", "--json").stdout)
        assert found["model"] == expected["model"] and found["mismatch"] is None
    assert "give --reference HF_DIR" in run("inspect", tmp_path / "dcp").stdout
    refused = run("inspect", tmp_path / "dcp", "--fp8")
    assert refused.exit_code == 1 and "with --reference" in " ".join(refused.stderr.split())
    refused = run("inspect", tmp_path / "bare")
    assert refused.exit_code == 1 and "with --reference" in " ".join(refused.stderr.split())


def test_tensors_that_are_not_the_models_are_said(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16, num_hidden_layers=3)
    conversions.run(tmp_path / "hf", tmp_path / "megatron", "megatron")
    path = tmp_path / "hf" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 2}))
    shown = run("inspect", tmp_path / "hf")
    assert (
        shown.exit_code == 0 and "WARNING: the checkpoint's tensors are not the model's: 9 unexpected" in shown.stdout
    )
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 3, "intermediate_size": 80}))
    assert "gate_proj.weight` is [" in json.loads(run("inspect", tmp_path / "hf", "--json").stdout)["mismatch"]
    assert describe(open_checkpoint(tmp_path / "megatron"))["mismatch"] is None


@pytest.mark.parametrize("family", ["gpt-oss", "granite-moe", "qwen3-moe"])
def test_tensors_are_as_many_as_the_file_has_also_where_experts_are_one(tmp_path: Path, family: str) -> None:
    model = pico.make_and_save(tmp_path, family, dtype=torch.bfloat16)
    found = describe(open_checkpoint(tmp_path))
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert found["tensors"] == len(file.keys())
    assert found["parameters"] == model.num_parameters()


@pytest.mark.parametrize(
    ("parallelism", "words"),
    [
        (Parallelism(2, expert=2), "--tp 2 --ep 2"),
        (Parallelism(2, expert=2, expert_tensor=1), "--tp 2 --ep 2 --etp 1"),
        (Parallelism(2, expert_tensor=2), "--tp 2"),
        (Parallelism(expert=2, expert_tensor=2), "--ep 2 --etp 2"),
        (Parallelism(), "one rank"),
    ],
)
def test_the_split_is_said_in_options_that_make_it_again(tmp_path: Path, parallelism: Parallelism, words: str) -> None:
    pico.save(tmp_path / "hf", "qwen3-moe")
    conversions.run(tmp_path / "hf", tmp_path / "out", "megatron", parallelism=parallelism)
    rows = [row for table in tables(describe(open_checkpoint(tmp_path / "out"))) for row in table.rows]
    assert ("split for", words) in [tuple(row) for row in rows]


def test_a_description_says_which_roles_were_never_recorded_and_when_the_rest_was(tmp_path: Path) -> None:
    pico.save(tmp_path)
    found = describe(open_checkpoint(with_state(tmp_path)))["fp8"]
    assert found["never_recorded"] == {"input": 0, "weight": 1, "output": 1, "grad_output": 1, "grad_input": 1}
    assert found["recorded_at_iteration"] == 70
    assert found["not_understood"] == ["other"]
    assert found["modules"][MODULE]["input"] == {"recorded": True, "amax": 2.0, "scale": 224.0, "rows_recorded": 1}
    assert found["modules"][MODULE]["weight"]["recorded"] is False


@pytest.mark.parametrize(("iteration", "age"), [(70, 0), (77, 7), (5, None)])
def test_state_of_a_later_iteration_than_its_container_counts_has_no_age(
    tmp_path: Path, iteration: int, age: int | None
) -> None:
    """As where a container counts updates, and the run that recorded the state counts steps."""
    pico.save(tmp_path / "hf")
    conversions.run(tmp_path / "hf", tmp_path / "run", "megatron")
    with_state(conversions.as_iteration(tmp_path / "run", iteration))
    found = describe(open_checkpoint(tmp_path / "run"))
    assert (found["fp8"]["recorded_at_iteration"], found["fp8"]["age_in_steps"]) == (70, age)
    (words,) = [words for name, words in tables(found)[0].rows if name == "FP8 state"]
    assert ("ago" in words) is bool(age)


def test_a_file_of_fp8_state_is_shown_as_state_in_a_checkpoint_is(tmp_path: Path) -> None:
    pico.save(tmp_path)
    in_checkpoint = describe(open_checkpoint(with_state(tmp_path)))["fp8"]
    shown = run("inspect", tmp_path / sidecar.RELATIVE)
    assert shown.exit_code == 0 and "recorded at iteration 70" in shown.stdout and "grad_output" in shown.stdout
    alone = json.loads(run("inspect", tmp_path / sidecar.RELATIVE, "--json").stdout)["fp8"]
    assert in_checkpoint | {"of_these_weights": None, "why_not_used": None, "age_in_steps": None} == alone


@pytest.mark.parametrize(
    ("make", "kind"),
    [(fp8_directories.make, "modelopt-block"), (four_bit_directories.make, "ct-nvfp4")]
    + [(transposed_directories.make, "gptq-desc-act")],
)
def test_headers_alone_say_what_the_whole_says(tmp_path: Path, make: Callable[..., Any], kind: str) -> None:
    make(tmp_path, kind)
    whole = describe(open_checkpoint(tmp_path))
    file = tmp_path / "model.safetensors"
    (tmp_path / LENGTHS).write_text(json.dumps({file.name: file.stat().st_size}))
    os.truncate(file, min(tensor.offset for tensor in read_header(file).values()))
    assert describe(open_checkpoint(tmp_path)) == whole


def test_experts_and_latents_are_told(tmp_path: Path) -> None:
    pico.save(tmp_path, "deepseek-v3")
    summary = dict(tables(describe(open_checkpoint(tmp_path)))[0].rows)
    assert summary["attention"] == "4 heads of latents of 16"
    assert summary["experts"] == "4 of 8 for a token, MLP 32, and shared ones of 32, in 2 layers"


@pytest.mark.parametrize(
    ("family", "attention", "name", "words"),
    [
        ("kimi-linear", "in 1 layer", "Kimi delta attention", "16 heads, keys of 32, values of 32, in 3 layers"),
        ("olmo-hybrid", "in 1 layer", "gated delta nets", "8 heads, keys of 16, values of 8, in 1 layer"),
        ("lfm2", "in 1 layer", "short convolutions", "of 3 tokens, in 2 layers"),
        ("nemotron-h", "in 2 layers", "Mamba-2 mixers", "32 heads of 4, states of 8, in 2 layers"),
        ("falcon-h1", "4 heads, 2 key-value groups", "Mamba-2 mixers", "32 heads of 4, states of 8"),
        ("jamba", "in 1 layer", "Mamba-1 mixers", "128 channels, states of 8, in 2 layers"),
    ],
)
def test_what_stands_in_the_place_of_attention_or_beside_it_is_told(
    tmp_path: Path, family: str, attention: str, name: str, words: str
) -> None:
    pico.save(tmp_path, family)
    summary = dict(tables(describe(open_checkpoint(tmp_path)))[0].rows)
    assert summary["attention"].endswith(attention)
    assert summary[name] == words


def test_heads_and_an_mlp_that_no_layer_has_are_not_told(tmp_path: Path) -> None:
    pico.save(tmp_path, "falcon-mamba")
    summary = dict(tables(describe(open_checkpoint(tmp_path)))[0].rows)
    assert "attention" not in summary and summary["layers"] == "2 of hidden size 64"
    assert summary["Mamba-1 mixers"] == "96 channels, states of 8"


@pytest.mark.parametrize(
    ("spelling", "words"),
    [
        ("fp8-block", "fp8: 14 with a scale for each block of 128 x 128"),
        ("compressed-channel", "compressed-tensors: 14 with a scale for each channel"),
        ("modelopt-tensor", "modelopt: 14 with a scale for each tensor; static input scales for 14"),
    ],
)
def test_the_spelling_of_fp8_weights_is_told_and_still_known_of_values_made_of_them(
    tmp_path: Path, spelling: str, words: str
) -> None:
    made = fp8_directories.make(tmp_path / "fp8", spelling, **fp8_directories.RAGGED)
    assert len(made) == 14  # of two layers: q, k, v, o, gate, up and down
    assert dict(tables(describe(open_checkpoint(tmp_path / "fp8")))[0].rows)["FP8 weights"] == words
    execute(plan_command(Request(tmp_path / "fp8", tmp_path / "megatron", "megatron")), workers=1)
    assert dict(tables(describe(open_checkpoint(tmp_path / "megatron")))[0].rows)["were FP8 weights"] == words


def test_an_optimizer_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pico.save(tmp_path / "hf")
    execute(plan_command(Request(tmp_path / "hf", tmp_path / "megatron", "megatron")), workers=1)
    reader = open_checkpoint(tmp_path / "megatron")
    assert dict(tables(describe(reader))[0].rows)["optimizer"] == "none"
    found = {"optimizer.state.exp_avg.x": TensorSpec((4,), DType.float32)}
    monkeypatch.setattr(type(reader), "optimizer_specs", property(lambda _: found))
    assert dict(tables(describe(reader))[0].rows)["optimizer"] == "1 tensor, 16 B"


def test_an_optimizer_that_cannot_be_read_keeps_nothing_else_from_being_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object) -> Mapping[str, TensorSpec]:
        raise DamagedCheckpoint("moments of another model")

    pico.save(tmp_path / "hf")
    execute(plan_command(Request(tmp_path / "hf", tmp_path / "old", "megatron", container="torch")), workers=1)
    reader = open_checkpoint(tmp_path / "old")
    monkeypatch.setattr(type(reader), "optimizer_specs", property(broken))
    summary = dict(tables(describe(reader))[0].rows)
    assert summary["optimizer"] == "cannot be read: moments of another model." and summary["architecture"] == "llama"
