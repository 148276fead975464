"""Runs killed (SIGKILL) at ten random steps, or in the saves after them, and resumed: losses and weights of undisturbed
runs, bit for bit, in BF16 and FP8, by one process and by two."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from training import contents, losses

KILLS, STEPS = 10, 40
RUNS = """
import random, signal, sys
from pathlib import Path
from forked import die, fork
from training import settings
from precisionctl.trainer.saved import saving
from precisionctl.trainer.resume import resume

place, precision, ranks, meanwhile, seed, kills, steps = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])
out, pick = Path.cwd() / "killed", random.Random(seed)

def run(out, meanwhile, kill=None, how=""):
    def job(rank):
        made = settings(
            place / "source", place / "text.txt", out, precision,
            train__steps=steps, train__save_every=2, train__async_save=bool(meanwhile), optimizer__lr=1e-3,
        )
        step, take, sync = [0], saving.Run.batches, saving.LocalRows.sync
        def batches(run, position):
            step[0] = run.step + 1
            return die() if how == "step" and step[0] == kill else take(run, position)
        if rank == ranks - 1:
            saving.Run.batches = batches
            saving.LocalRows.sync = lambda rows: die() if how == "save" and step[0] >= kill else sync(rows)
        resume(made, lambda started: None, lambda step: None)
    return [code for code, _ in fork(ranks, job)]

def newest():
    return max((int(path.name[5:]) for path in out.glob("iter_*") if not path.suffix), default=0)

assert run(Path.cwd() / "whole", False) == [0] * ranks
for number in range(kills):
    left = steps - newest() - 2  # so that it is killed, not done
    kill, how = newest() + pick.randint(1, max(1, 2 * left // (kills - number))), pick.choice(["step", "step", "save"])
    codes = run(out, meanwhile, min(kill, steps - 1), how)
    assert -signal.SIGKILL in codes and 0 not in codes, (number, kill, how, codes)
assert newest() < steps
assert run(out, meanwhile) == [0] * ranks
"""


@pytest.mark.parametrize("meanwhile", [False, True], ids=["waiting", "meanwhile"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_killed_at_ten_random_steps_a_run_ends_as_an_undisturbed_one(
    place: Path, tmp_path: Path, precision: str, ranks: int, meanwhile: bool
) -> None:
    seed = int(os.environ.get("SOAK_SEED", random.randrange(1000)))
    print(f"SOAK_SEED={seed}")
    words = [place, precision, ranks, int(meanwhile), seed, KILLS, STEPS]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", RUNS, *map(str, words)], env=environment, cwd=tmp_path, check=True)
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    for step in (STEPS - 2, STEPS):
        name = f"iter_{step:07}"
        assert contents(tmp_path / "killed" / name) == contents(tmp_path / "whole" / name)
