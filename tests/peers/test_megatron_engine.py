"""Real megatron-core goes on from runs of the bundled trainer and hands them back, on CPUs with gloo: the same losses
but for rounding, from the same command on the same folder. What is printed is in docs/megatron_core.md."""

import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import tiny_wrappers
import torch
import trained_models
from conversations import write_rows
from engine_runs import BALANCE, RECIPE, ROUNDING, STEPS, by_core, finish, losses, start
from judges import LLAMA_3_1
from trainer_directories import deepspeed, hf_trainer, pytorch
from training import WORDS, add_tokenizer, contents, make_source, make_text

from precisionctl import api
from precisionctl.fp8 import sidecar
from precisionctl.fp8.state import DelayedScaling, Fp8State, Fp8States

FROM, KILLED, BACK = 10, 34, 40
CASES: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "dense": ("llama-3", {"rope_parameters": LLAMA_3_1}, {"tensor": 2, "pipeline": 2}),
    "biases": ("qwen2", {"tie_word_embeddings": False}, {"tensor": 2, "pipeline": 2}),
    "interleaved": ("mistral", {"num_hidden_layers": 4}, {"pipeline": 2, "virtual": 2}),
    "experts": ("qwen3-moe", {"mlp_only_layers": []}, {"expert": 2}),
}


def kill_at(step: int, started: subprocess.Popen[str], metrics: Path) -> None:
    """Kill torchrun and its ranks once they have made this step."""
    until = time.monotonic() + 240
    while not (metrics.is_file() and len(metrics.read_text().splitlines()) >= step):
        assert started.poll() is None and time.monotonic() < until, started.communicate()[0][-4000:]
        time.sleep(0.05)
    os.killpg(started.pid, signal.SIGKILL)
    started.communicate()


@pytest.mark.parametrize("case", CASES)
def test_megatron_core_goes_on_from_a_bundled_run_is_killed_and_hands_it_back(tmp_path: Path, case: str) -> None:
    family, changes, sizes = CASES[case]
    make_source(tmp_path / "source", family=family, **changes)
    make_text(tmp_path / "text.txt", words=6000)
    finish(start(tmp_path, "bundled"))
    begun = f"iter_{FROM:07d}"
    shutil.copytree(tmp_path / "bundled" / begun, tmp_path / "core" / begun)
    options, ranks = by_core(sizes)
    kill_at(KILLED - FROM, start(tmp_path, "core", *options, ranks=ranks), tmp_path / "core" / "metrics.jsonl")
    said = finish(start(tmp_path, "core", *options, ranks=ranks))
    assert (
        "continued" in said
        and f"on {ranks} ranks: {', '.join(f'{name} {size}' for name, size in sizes.items())}" in said
    )
    handed = f"iter_{BACK:07d}"
    shutil.copytree(tmp_path / "core" / handed, tmp_path / "back" / handed)
    finish(start(tmp_path, "back"))
    expected, core, back = (losses(tmp_path, out) for out in ("bundled", "core", "back"))
    assert list(core) == list(range(FROM + 1, STEPS + 1)) and list(back) == list(range(BACK + 1, STEPS + 1))
    differences = [max(abs(found[step] - expected[step]) for step in found) for found in (core, back)]
    print(f"{case}: {expected[FROM]:.4f} to {expected[STEPS]:.4f}; differ by at most {differences}")
    assert max(differences) < ROUNDING
    assert expected[FROM] - expected[STEPS] > 30 * max(differences)  # there was something to learn


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("saved", "sizes"), [(hf_trainer, {}), (pytorch, {"tensor": 2}), (deepspeed, {})])
def test_both_engines_go_on_alike_straight_from_another_trainers_directory(
    tmp_path: Path, saved: Callable[[Path, Any, Any], Path], sizes: dict[str, int]
) -> None:
    model, optimizer = trained_models.trained("llama-3", vocab_size=80, rope_parameters=LLAMA_3_1)
    saved(add_tokenizer(tmp_path / "source"), model, optimizer)
    make_text(tmp_path / "text.txt", words=6000)
    options, ranks = by_core(sizes)
    for out, engine, number in (("bundled", [], 1), ("core", options, ranks)):
        said = finish(start(tmp_path, out, *engine, "--set", "train.steps=12", ranks=number))
        assert "masters and moments of the checkpoint, after 2 updates" in said
    expected, core = (losses(tmp_path, out) for out in ("bundled", "core"))
    assert list(core) == list(expected) == list(range(3, 13))
    assert [core[step] for step in core] == pytest.approx([*expected.values()], abs=ROUNDING)
    assert expected[3] - expected[12] > 30 * ROUNDING


def in_fp32(place: Path, keys: Mapping[str, Any], ranks: int) -> tuple[list[float], list[float]]:
    """The losses of the bundled trainer and of Megatron-Core."""
    program = [Path(__file__).with_name("core_in_fp32.py"), place, *(f"{key}={value}" for key, value in keys.items())]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run([sys.executable, *torchrun, *program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-9000:]
    expected, core = json.loads((place / "losses.json").read_text())
    return expected, core


def test_padding_of_conversations_does_not_count_as_load_of_experts(tmp_path: Path) -> None:
    """Their biases move after each update, and with them what the next one computes."""
    make_source(tmp_path / "source", family="glm4-moe")
    pick = random.Random(0)
    talks = [" ".join(pick.choices(WORDS, k=pick.randrange(1, 24))) for _ in range(200)]
    write_rows(
        tmp_path / "text.jsonl",
        [
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}]}
            for answer in talks
        ],
    )
    keys = RECIPE | {"train.steps": 30, "router.bias_update_rate": 0.05, "parallel.expert": 2}
    expected, core = in_fp32(tmp_path, keys, ranks=2)
    assert core == pytest.approx(expected, rel=2e-6)


@pytest.mark.parametrize("case", ["dense", "biases", "experts"])
def test_in_fp32_both_engines_make_the_same_losses_to_their_last_bits(tmp_path: Path, case: str) -> None:
    family, changes, sizes = CASES[case]
    make_source(tmp_path / "source", family=family, **changes)
    make_text(tmp_path / "text.txt", words=6000)
    _, ranks = by_core(sizes)
    keys = RECIPE | {"train.steps": 30, "train.recompute": "layer"} | (BALANCE if case == "experts" else {})
    keys |= {f"parallel.{name}": size for name, size in sizes.items()}
    expected, core = in_fp32(tmp_path, keys, ranks)
    print(f"{case} in FP32: differ by at most {max(abs(a - b) for a, b in zip(expected, core, strict=True))}")
    assert core == pytest.approx(expected, rel=2e-6) and expected[-1] < expected[0] - 1


def test_an_optimizer_that_megatron_would_save_wrongly_is_refused(tmp_path: Path) -> None:
    """The masters of a tied embedding that it saved at these sizes were none of the weights."""
    make_source(tmp_path / "source", family="qwen2")
    make_text(tmp_path / "text.txt")
    options, ranks = by_core({"tensor": 2, "pipeline": 2})
    started = start(tmp_path, "core", *options, ranks=ranks)
    said, _ = started.communicate(timeout=300)
    assert started.returncode == 1 and "optimizer of a tied embedding wrongly" in said
    assert not list((tmp_path / "core").glob("iter_*"))


def test_what_is_not_trained_is_saved_as_by_the_bundled_trainer(tmp_path: Path) -> None:
    """A wrapper's towers, how weights were codes, FP8 state that nothing uses, and what Bridge reads of the model."""
    tiny_wrappers.save(tmp_path / "plain", "llava", dtype=torch.bfloat16)
    request = api.Request.export(tmp_path / "plain", tmp_path / "source", "vllm", "dynamic")
    api.convert(request, workers=1)
    state = Fp8States(DelayedScaling(amax_history_len=4), {"decoder.layers.1.mlp.linear_fc2": Fp8State.fresh(4)})
    sidecar.write(tmp_path / "source" / sidecar.RELATIVE, state)
    make_text(tmp_path / "text.txt")
    for out, options in (("bundled", ()), ("core", ("--engine", "megatron-core"))):
        for steps in (2, 3):  # the second time it goes on
            said = finish(
                start(tmp_path, out, *options, "--set", f"train.steps={steps}", "--set", "schedule.kind=constant")
            )
            assert steps == 3 or "FP8 state is carried along in the sidecar, unused" in said
    bundled, core = (contents(tmp_path / out / "iter_0000003", "run.json") for out in ("bundled", "core"))
    saved = {name for name in bundled if name.startswith("precisionctl/") or name == "run_config.yaml"}
    assert {"precisionctl/encodings.safetensors", "precisionctl/hf/towers.safetensors", str(sidecar.RELATIVE)} < saved
    assert {name: bundled[name] for name in saved} == {name: core.get(name) for name in saved}


def test_an_update_is_measured_beside_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    made = importlib.import_module("gpu").run_section("core", True, 300, keep=lambda _: None)
    assert made["ended"] == "complete", made["log"]
    assert [row["variant"] for row in made["rows"]] == ["bf16", "fp8-delayed", "Megatron-Core BF16"]
    assert all(row["tokens_per_second"] > 0 for row in made["rows"])


def test_a_new_run_begins_anew_after_a_kill_and_leaves_nothing_of_its_start(tmp_path: Path) -> None:
    make_source(tmp_path / "source", rope_parameters=LLAMA_3_1)
    make_text(tmp_path / "text.txt")
    left = tmp_path / "core" / "start" / "release"
    left.mkdir(parents=True)
    (left / "of another start").touch()
    said = finish(start(tmp_path, "core", "--engine", "megatron-core", "--set", "train.steps=2"))
    log = (tmp_path / "core" / "megatron.log").read_text()
    assert "megatron" in log and "corrupted" not in log + said and "Warning" not in said
    assert not list((tmp_path / "core").glob("start*")) and list((tmp_path / "core").glob("iter_*"))
