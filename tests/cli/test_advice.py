"""Advice fits the command that is given it: it names options of that command, or the command that has them."""

import json
import re
from pathlib import Path
from typing import Any

import gguf_files
import pico
import pytest
import torch
from command_line import run
from safetensors.torch import save_file
from scoring import save
from trained_models import save as save_dcp

from precisionctl.checkpoints import open as opening
from precisionctl.checkpoints.base import WITH_REFERENCE, Reader
from precisionctl.checkpoints.foreign import TENSORS, UNREAD
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.cli import main, writing
from precisionctl.errors import UnknownArchitecture


def options_of(command: str) -> set[str]:
    return {flag for parameter in main.commands[command].params for flag in parameter.opts}


def misplaced(do: str, command: str) -> list[str]:
    """The options in advice that neither the command has nor one that is named before them."""
    known, wrong = options_of(command), []
    for word in re.findall(r"[a-z-]+", do):
        if word in main.commands:
            known |= options_of(word)
        elif word.startswith("--") and word not in known:
            wrong.append(word)
    return wrong


TO_FP8 = ("convert", "hf", "out", "--to", "hf", "--precision", "fp8")
CASES: dict[str, tuple[str, tuple[Any, ...], str]] = {
    "no state": ("qwen3", TO_FP8, "export-inference --scheme dynamic"),
    "shapes": ("qwen3", (*TO_FP8, "--recipe", "fp8-block"), "`export-inference` has --scheme static or dynamic"),
    "transposed": ("gpt2", (*TO_FP8, "--recipe", "fp8-current"), "export-inference --scheme static"),
    "length": (
        "qwen3",
        ("calibrate", "hf", "--data", "text.txt", "--out", "state", "--sequence-length", 512),
        "Give --sequence-length 128.",
    ),
    "length of a run": (
        "qwen3",
        ("resume", "hf", "--precision", "bf16", "--data", "text.txt", "--out", "run", "--dry-run"),
        "Give --set data.sequence_length=128.",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_advice_is_for_the_command_that_was_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    family, line, words = CASES[name]
    save(tmp_path / "hf", family, dtype=torch.bfloat16)
    (tmp_path / "text.txt").write_text("w1 w2 " * 40)
    failed = run(*line)
    assert failed.exit_code in (1, 2) and words in failed.stderr
    assert misplaced(failed.stderr.partition("). ")[2] or failed.stderr.rpartition(": ")[2], line[0]) == []


@pytest.mark.parametrize("do", [WITH_REFERENCE, *(each.do for each in (*UNREAD, *TENSORS))])
def test_advice_for_any_command_that_opens_a_checkpoint_names_one_that_has_a_reference(do: str) -> None:
    assert "--reference" not in misplaced(do, "inspect")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("command", [("inspect",), ("doctor",), ("launch-args", "--framework", "megatron-lm")])
def test_a_command_without_a_reference_is_not_told_to_take_one(tmp_path: Path, command: tuple[str, ...]) -> None:
    """For an adapter without its base, and trainers' weights without a config."""
    lora = {"base_model.model.lm_head.lora_A.weight": torch.ones(2, 4)}
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    save_file(lora, tmp_path / "adapter" / "adapter_model.safetensors")
    save_dcp(tmp_path / "dcp", pico.make("llama-2").state_dict())
    for path, words in (("adapter", "without the model that it changes"), ("dcp", "not said: ")):
        told = run(*command, tmp_path / path)
        if command == ("inspect",):
            assert words in told.output and "--reference" in told.output
        assert "--reference" not in misplaced(" ".join(told.output.split()), command[0])


def test_verify_gives_its_own_command_again_with_the_side_that_says_what_the_other_lacks(tmp_path: Path) -> None:
    gguf_files.source(tmp_path / "hf", rope_parameters=gguf_files.LLAMA3 | {"original_max_position_embeddings": 32})
    run("export-inference", tmp_path / "hf", tmp_path / "gguf", "--target", "llama.cpp", "--workers", 1)
    for a, b in (("hf", "gguf"), ("gguf", "hf")):
        told = run("verify", tmp_path / a, tmp_path / b, "--fp8").stderr
        command = f"precisionctl verify {tmp_path / a} {tmp_path / b} --fp8 --reference {tmp_path / 'hf'}"
        assert told.endswith(f" Give the other's config.json: `{command}`.\n")
        assert run(*command.split()[1:]).exit_code == 0
    told = run("verify", tmp_path / "gguf", tmp_path / "gguf").stderr
    assert told.endswith(f"`precisionctl verify {tmp_path / 'gguf'} {tmp_path / 'gguf'} --reference HF_DIR`.\n")


def test_two_checkpoints_are_told_who_compares_them(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "qwen3")
    (tmp_path / "empty").mkdir()
    assert "To compare two checkpoints: `precisionctl verify A B`." in run("compare", *[tmp_path / "hf"] * 2).stderr
    assert "verify" not in run("compare", *[tmp_path / "empty"] * 2).stderr


def test_an_unknown_family_is_told_what_helps_and_not_all_that_is_known(tmp_path: Path) -> None:
    pico.save(tmp_path, "qwen3")
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "qwenn3"}))
    told = run("convert", tmp_path, tmp_path / "out", "--to", "megatron").stderr
    assert (
        "The nearest that is known is qwen3. Without a table" in told
        and "docs/families.md" in told
        and "starcoder2" not in told
    )
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "qwen4"}))
    told = run("convert", tmp_path, tmp_path / "out", "--to", "megatron").stderr
    assert "unsupported architecture `qwen4`" in told and "nearest" not in told  # it is no Qwen 3


def test_a_head_is_told_not_to_become_codes(tmp_path: Path) -> None:
    pico.save(tmp_path, "qwen3", dtype=torch.bfloat16)
    line = ("export-inference", tmp_path, tmp_path / "out", "--target", "vllm", "--scheme", "dynamic")
    told = run(*line, "--include", "lm_head")
    assert told.exit_code == 2 and "names `lm_head.weight`, which never becomes codes: it is a head" in told.stderr


def test_what_four_bits_cost_is_told_before_it_is_paid(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    pico.save(tmp_path / "hf", "qwen3", dtype=torch.bfloat16)
    line = ("export-inference", tmp_path / "hf", tmp_path / "out", "--target", "vllm", "--workers", 1)
    told = run(*line, "--scheme", "nvfp4a16", "--dry-run").stdout
    assert (
        "14 weights are rounded to NVFP4: Gaussian ones keep 21.2 dB" in told and f"inspect {tmp_path}/hf --fp8" in told
    )
    assert "rounded to" not in run(*line, "--scheme", "dynamic", "--dry-run").stdout
    run(*line, "--scheme", "nvfp4a16")
    again = ("export-inference", tmp_path / "out", tmp_path / "again", "--target", "vllm", "--scheme", "nvfp4a16")
    assert "are rounded to" not in run(*again, "--dry-run").stdout  # they are codes of it already


def test_what_stands_for_a_word_that_is_no_format_is_understood(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "qwen3")
    advised = dict.fromkeys(re.findall(r"`(.+)`", " ".join(writing._ASKED_OTHERWISE.values()).replace("? ", "?\n")))
    assert len(advised) > 9
    for options in advised:
        command = [] if options.startswith("export-inference") else ["convert"]
        words = [*command, *options.split(), str(tmp_path / "hf"), str(tmp_path / "out"), "--dry-run"]
        found = run(*words)
        assert found.exit_code != 2, f"{options}: {found.stderr}"  # the model lacks a tokenizer and FP8 state


@pytest.mark.parametrize("options", [(), ("--restart",), ("--reference", "hf")])
def test_a_destination_that_exists_is_to_be_removed_whatever_options_are_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    pico.save(tmp_path / "hf", "qwen3")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "kept").write_text("")
    failed = run("convert", "hf", "out", "--to", "hf", *options)
    assert failed.exit_code == 1 and [path.name for path in (tmp_path / "out").iterdir()] == ["kept"]
    assert "Remove it and give the command again, or choose another destination: no option overwrites" in failed.stderr


def test_an_option_of_another_command_is_answered_with_that(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    pico.save(tmp_path / "hf", "qwen3", dtype=torch.bfloat16)
    line = ("convert", tmp_path / "hf", tmp_path / "out", "--to", "hf", "--precision", "fp8")
    assert "No such option '--scheme'. `export-inference` has it." in run(*line, "--scheme", "block").stderr
    assert "No such option '--target'. Give it to `export-inference`." in run(*line, "--target", "vllm").stderr
    assert "No such option '--lr'.\n" in run(*line, "--lr", "1").stderr, "which no command has"


def test_a_pattern_that_matches_no_whole_name_is_answered_with_one_that_does(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    pico.save(tmp_path / "hf", "qwen3", dtype=torch.bfloat16)
    line = ("export-inference", tmp_path / "hf", tmp_path / "out", "--target", "vllm", "--scheme", "dynamic")
    for pattern, meant in (
        ("v_proj", "*.v_proj"),
        ("v_proj.weight", "*.v_proj"),
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj"),
        ("model.layers.0", "model.layers.0.*"),
        ("layers.0", "*.layers.0.*"),
        ("mlp", "*.mlp.*"),
    ):
        assert f"Did you mean '{meant}'?" in run(*line, "--exclude", pattern).stderr
        assert run(*line, "--exclude", meant, "--dry-run").exit_code == 0
    told = run(*line, "--exclude", "decoder.layers.0.*").stderr
    assert "whole names of modules in the result, such as `model.layers.0.self_attn.q_proj`." in told
    assert "none that --exclude names" in run(*line, "--exclude", "*").stderr


@pytest.mark.parametrize(
    ("family", "engine", "ranks", "do", "more"),
    [
        ("qwen3", "vllm", "2", "Leave --expert-parallel out.", ()),
        ("qwen3", "vllm", "3", "Leave --expert-parallel out, and choose another --tp, such as 2.", ("--tp", "2")),
        ("qwen3-moe", "sglang", "3", "Choose another --tp, such as 2.", ("--tp", "2", "--expert-parallel")),
    ],
)
def test_advice_on_the_number_of_gpus_can_be_followed(
    tmp_path: Path, family: str, engine: str, ranks: str, do: str, more: tuple[str, ...]
) -> None:
    (tmp_path / "hf").mkdir()
    pico.save(tmp_path / "hf", family, dtype=torch.bfloat16)
    line = ("export-inference", tmp_path / "hf", tmp_path / "out", "--target", engine, "--scheme", "dynamic")
    assert do in " ".join(run(*line, "--tp", ranks, "--expert-parallel").stderr.split())
    followed = run(*line, *more, "--keep-misfits", "--dry-run")
    assert "cannot divide it" not in followed.stderr and followed.exit_code == 0


def test_a_directory_within_a_checkpoint_or_in_place_of_a_file_of_state_is_answered(tmp_path: Path) -> None:
    (tmp_path / "hf" / "precisionctl").mkdir(parents=True)
    (tmp_path / "hf" / "precisionctl" / "notes.txt").touch()
    pico.save(tmp_path / "hf", "qwen3", dtype=torch.bfloat16)
    told = " ".join(run("inspect", tmp_path / "hf" / "precisionctl").stderr.split())
    assert f"Did you mean {tmp_path / 'hf'}?" in told
    run("convert", tmp_path / "hf", tmp_path / "megatron", "--to", "megatron")
    (tmp_path / "runs" / "notes").mkdir(parents=True)
    (tmp_path / "runs" / "notes" / "notes.txt").touch()
    (tmp_path / "megatron" / "release").rename(tmp_path / "runs" / "one")
    assert "Looked for:" in run("inspect", tmp_path / "runs" / "notes").stderr, "beside a checkpoint, and in none"
    line = ("export-inference", tmp_path / "hf", tmp_path / "out", "--target", "vllm")
    told = run(*line, "--fp8-state", tmp_path / "hf").stderr
    assert "a directory. Give a file of `calibrate`" in " ".join(told.split())
    told = " ".join(run("launch-args", tmp_path / "hf", "--framework", "torchtitan").stderr.split())
    assert "`convert --to torchtitan` writes what it loads" in told


@pytest.mark.parametrize("error", [UnknownArchitecture("no table"), PermissionError("closed")])
def test_no_error_of_the_next_step_fails_a_command_whose_result_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A GGUF file that does not say all of its model is opened to see whether `inspect` needs a reference."""
    gguf_files.source(tmp_path / "hf")

    def unread(path: Path, *arguments: Any, **named: Any) -> Reader:
        if path == tmp_path / "out":
            raise error
        return open_checkpoint(path, *arguments, **named)

    monkeypatch.setattr(opening, "open_checkpoint", unread)
    told = run("export-inference", tmp_path / "hf", tmp_path / "out", "--target", "llama.cpp", "--workers", 1)
    assert told.exit_code == 0 and f"inspect {tmp_path}/out --reference {tmp_path}/hf" in told.stdout
