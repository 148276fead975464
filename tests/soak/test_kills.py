"""Conversions killed at random moments, each followed by the same command again: the bytes of an undisturbed run."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pico
import pytest
import torch
from conversions import tree

KILLS = 20

COMMANDS = {
    "hf-to-megatron": ("hf", ["--to", "megatron", "--precision", "fp8", "--tp", "2"]),
    "megatron-to-hf": ("megatron", ["--to", "hf", "--max-shard-size", "40MB", "--verify"]),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of about 300 MB, as both: long enough under way to be met anywhere."""
    top = tmp_path_factory.mktemp("soak")
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "vocab_size": 8000}
    pico.save(top / "hf", dtype=torch.bfloat16, **sizes)
    start(top, "megatron", "hf-to-megatron").wait()
    return top


def start(top: Path, name: str, command: str) -> subprocess.Popen[bytes]:
    source, options = COMMANDS[command]
    arguments = [sys.executable, "-m", "precisionctl", "convert", str(top / source), str(top / name), *options]
    return subprocess.Popen(arguments, stderr=subprocess.DEVNULL, start_new_session=True)


def writing_since(destination: Path) -> float:
    """Wait until a run has planned and begun."""
    while not destination.with_name(destination.name + ".journal").exists():
        time.sleep(0.001)
    return time.monotonic()


@pytest.mark.parametrize("command", COMMANDS)
def test_a_kill_at_any_moment_is_gone_on_from(sources: Path, command: str) -> None:
    run = start(sources, "undisturbed", command)
    began = writing_since(sources / "undisturbed")
    assert run.wait() == 0
    writing, seed = time.monotonic() - began, int(os.environ.get("SOAK_SEED", random.randrange(1000)))
    print(f"SOAK_SEED={seed}")
    moments, undisturbed, hit = random.Random(seed), tree(sources / "undisturbed"), 0
    for _ in range(KILLS):
        run = start(sources, "killed", command)
        writing_since(sources / "killed")
        time.sleep(writing * moments.random() ** 2)  # the first run may have been slow
        # the parent alone in one half, as the kernel short of memory does; its workers too in the other
        os.killpg(run.pid, signal.SIGKILL) if moments.random() < 0.5 else run.kill()
        run.wait()
        if not (sources / "killed").exists():
            hit += 1
            assert start(sources, "killed", command).wait() == 0
        assert tree(sources / "killed") == undisturbed
        assert not (sources / "killed.partial").exists() and not (sources / "killed.journal").exists()
        shutil.rmtree(sources / "killed")
    shutil.rmtree(sources / "undisturbed")
    assert hit >= KILLS // 2, "the kills came too late to show anything"
