"""Runs of both engines from one command on one folder, as programs on CPUs, and their losses."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

STEPS = 60
ROUNDING = 0.003
"""The most that a loss may differ: computed in BF16, in another order, over 50 updates."""


RECIPE = {
    "train.steps": STEPS,
    "train.batch_size": 8,
    "train.micro_batch_size": 2,
    "train.save_every": 10,
    "train.keep": 10,
    "data.sequence_length": 32,
    "optimizer.lr": 0.003,
    "schedule.warmup_steps": 5,
}


BALANCE = {"router.pooled_loss": 0, "router.aux_loss": 0.01, "router.z_loss": 0.001}
"""Losses of routers that both have; without experts these are refused."""


def start(place: Path, out: str, *options: str, ranks: int = 1) -> subprocess.Popen[str]:
    recipe = RECIPE | {"data.cache": place / "tokens"}
    config = place / "source" / "config.json"  # which a run of ours has elsewhere
    if config.is_file() and "num_experts_per_tok" in json.loads(config.read_text()):
        recipe |= BALANCE
    keys = [word for key, value in recipe.items() for word in ("--set", f"{key}={value}")]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *torchrun, "-m", "precisionctl", "resume", place / "source", "--precision", "bf16"]
    return subprocess.Popen(
        [*command, "--data", place / "text.txt", "--out", place / out, *keys, *options],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(started: subprocess.Popen[str]) -> str:
    said, _ = started.communicate(timeout=300)
    assert started.returncode == 0, said[-4000:]
    return said


def by_core(sizes: Mapping[str, int]) -> tuple[list[str], int]:
    """The options of a run in Megatron-Core on as many ranks as these sizes make, and the ranks."""
    keys = [word for name, size in sizes.items() for word in ("--set", f"parallel.{name}={size}")]
    ranks = sizes.get("tensor", 1) * sizes.get("pipeline", 1) * sizes.get("expert", 1)
    return ["--engine", "megatron-core", *keys], ranks


def losses(place: Path, out: str) -> dict[int, float]:
    rows = [json.loads(line) for line in (place / out / "metrics.jsonl").read_text().splitlines()]
    assert len({row["step"] for row in rows}) == len(rows)
    return {row["step"]: row["loss"] for row in rows}
