"""Other versions of megatron-core than the one that is installed go through tests/test_megatron_core.py too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

JUDGE = Path(__file__).parents[1] / "test_megatron_core.py"

# Before 0.16 the layers without Transformer Engine have no sliding window, and no fewer groups than ranks: of what
# we write they load most, so these versions save and we read. Since 0.17 a newer Python is needed.
VERSIONS = {"0.14.0": "saved", "0.15.3": "saved"} if sys.version_info < (3, 12) else {"0.19.2": ""}


@pytest.mark.parametrize("version", VERSIONS)
def test_this_version_of_megatron_core_is_a_judge_as_well(tmp_path_factory, version):
    site = str(tmp_path_factory.mktemp("megatron"))
    wanted = [f"megatron-core=={version}", *(["triton"] if VERSIONS[version] == "" else [])]
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site, *wanted], check=True)
    environment = os.environ | {"PYTHONPATH": site}
    asked = [sys.executable, "-c", "import megatron.core; print(megatron.core.__version__)"]
    found = subprocess.run(asked, env=environment, check=True, capture_output=True, text=True).stdout
    assert found.split()[-1] == version
    command = [sys.executable, "-m", "pytest", "-q", "-k", VERSIONS[version], JUDGE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
