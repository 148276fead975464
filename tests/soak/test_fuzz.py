"""The readers of strangers' bytes, fuzzed for a while: FUZZ_SECONDS for each target, 60 unless told.

What libFuzzer finds to be of interest stays under `.fuzz/`, so that each run goes on from the last one. An input that
fails is left there too: make it a test.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from peers.environments import python_with
from repository import HELPERS, ROOT

SECONDS = int(os.environ.get("FUZZ_SECONDS", "60"))
SCRIPT = Path(__file__).with_name("fuzz_readers.py")


@pytest.mark.parametrize(
    "target", "payload archived metadata safetensors adapter deepspeed verl dcp numbered nemo".split()
)
def test_whatever_is_read_is_understood_or_refused(target: str) -> None:
    python = python_with("fuzz", ("--only-binary", ":all:", "atheris==3.0.0"))
    ours = [str(ROOT), str(HELPERS), *(path for path in sys.path if path.endswith("site-packages"))]
    corpus = ROOT / ".fuzz" / target
    options = [f"-max_total_time={SECONDS}", f"-artifact_prefix={corpus}-", "-print_final_stats=1", "-verbosity=0"]
    done = subprocess.run(
        [python, SCRIPT, target, corpus, *options],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(ours), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS + 300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    executed = re.search(r"number_of_executed_units: (\d+)", done.stderr)
    assert executed
    print(f"{target}: {int(executed[1]):,} inputs in {SECONDS} s, {len(list(corpus.iterdir())):,} kept")
