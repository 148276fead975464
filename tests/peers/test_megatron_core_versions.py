"""Other versions of megatron-core than the one that is installed go through `test_megatron_core.py` too."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import conversions
import core_models
import pytest
import torch
from core_models import SAVED_ARGS, of_stages, peer
from repository import TESTS

from precisionctl.checkpoints.base import WithOptimizer
from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.checkpoints.torch_dist.masters import differing_masters
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader

JUDGE = TESTS / "megatron_checkpoints" / "test_megatron_core.py"

# Before 0.16 the layers without Transformer Engine have no sliding window, and no fewer groups than ranks: of what
# we write they load most, so these versions save and we read. Since 0.17 a newer Python is needed.
VERSIONS = {"0.14.0": "saved", "0.15.3": "saved"} if sys.version_info < (3, 12) else {"0.19.2": ""}


def installed(site: Path, version: str) -> str:
    wanted = [f"megatron-core=={version}", *(["triton"] if VERSIONS[version] == "" else [])]
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site, *wanted], check=True)
    return str(site)


@pytest.mark.parametrize("version", VERSIONS)
def test_this_version_of_megatron_core_is_a_judge_as_well(tmp_path_factory, version):
    site = installed(tmp_path_factory.mktemp("megatron"), version)
    environment = os.environ | {"PYTHONPATH": site}
    asked = [sys.executable, "-c", "import megatron.core; print(megatron.core.__version__)"]
    found = subprocess.run(asked, env=environment, check=True, capture_output=True, text=True).stdout
    assert found.split()[-1] == version
    command = [sys.executable, "-m", "pytest", "-q", "-k", VERSIONS[version], JUDGE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.skipif("0.14.0" not in VERSIONS, reason="megatron-core 0.14 is tried with Python 3.11")
def test_the_distributed_optimizer_of_0_14_is_read_bit_for_bit_and_loaded_by_the_newer_one(tmp_path, monkeypatch):
    def run_apart(program: Path, *arguments: object, imports: tuple[str, ...]) -> None:
        """By itself: what programs are forked from has imported the newer one."""
        subprocess.run([sys.executable, program, *map(str, arguments)], check=True)

    saved = {tensor: tmp_path / f"tp{tensor}" / "iter_0000007" for tensor in (1, 2)}
    with monkeypatch.context() as older:
        older.setattr(core_models, "run_program", run_apart)
        older.setenv("PYTHONPATH", installed(tmp_path / "megatron", "0.14.0"))
        for tensor, directory in saved.items():
            directory.parent.mkdir()
            job = {"do": "save", "directory": str(directory), "args": SAVED_ARGS, "dtype": "bfloat16"}
            job["optimizer"] = "fully_sharded_model_space"
            peer(tmp_path, [job], tensor_parallel=tensor, data_parallel=tensor)
    for tensor, directory in saved.items():
        reader: Any = open_checkpoint(directory)
        assert differing_masters(reader) == []
        found = {name: read_tensor(WithOptimizer(reader), name) for name in reader.optimizer_specs}
        conversions.run(directory, tmp_path / f"out{tensor}", "megatron", verify=True)
        out = str(TorchDistReader(tmp_path / f"out{tensor}").path)
        load = {"do": "load", "directory": out, "optimizer": "fully_reshardable", "out": f"{out}.held"}
        peer(tmp_path, [load])
        for kind in ("param", "exp_avg", "exp_avg_sq"):
            for where in [f"{out}.held", *([str(directory)] if tensor == 1 else [])]:  # two ranks have pieces of it
                held = of_stages(f"{where}.optimizer.{kind}", 1, 1, layers=4)
                assert len(held) * 3 == len(found)
                assert all(torch.equal(one, found[f"optimizer.state.{kind}.{name}"]) for name, one in held.items())
