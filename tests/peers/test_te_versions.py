"""Extra state against the code of old and new Transformer Engines: theirs read here, ours read by them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from te_states import same, trained

from precisionctl.fp8.extra_state import decode_payload
from precisionctl.fp8.extra_state_writer import encode_payload
from precisionctl.fp8.state import BACKWARD, FORWARD, ROLES, DelayedScaling, Fp8State, RoleState

SCRIPT = Path(__file__).parents[1] / "golden" / "te_versions.py"
VERSIONS = ["1.13.0", "2.1.0", "2.2.0", "2.3.0", "2.4.0", "2.15.0", "2.20.2"]
RECIPE = DelayedScaling(amax_history_len=4)


@pytest.fixture(scope="module", params=VERSIONS)
def te(request, tmp_path_factory):
    """Runs golden/te_versions.py beside a version's wheel without compiled code, and gives what it prints."""
    site = str(tmp_path_factory.mktemp("te"))
    install = [sys.executable, "-m", "pip", "install", "-q", "--target", site]
    subprocess.run([*install, "--no-deps", f"transformer_engine=={request.param}"], check=True)
    subprocess.run([*install, "pydantic"], check=True)

    def run(*arguments):
        command = [sys.executable, SCRIPT, *map(str, arguments)]
        environment = os.environ | {"PYTHONPATH": site}
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout

    run.form = int(request.param[0])
    run.version = request.param
    return run


def test_what_that_version_saves_is_read_number_for_number(te, tmp_path):
    te("write", tmp_path / "payload")
    recipe, state = decode_payload((tmp_path / "payload").read_bytes(), te.version)
    assert recipe == RECIPE
    assert same(state, trained(4))


def test_that_version_loads_what_is_written_for_it_number_for_number(te, tmp_path):
    state = trained(4)
    (tmp_path / "payload").write_bytes(encode_payload(state, RECIPE, te.form))
    loaded = json.loads(te("read", tmp_path / "payload"))
    assert loaded["history"] == 4
    assert loaded["extra"]["num_gemms"] == 1
    for key, roles in (("scaling_fwd", FORWARD), ("scaling_bwd", BACKWARD)):
        scale = [state.roles[role].scale.item() for role in roles]
        assert loaded[key]["scale"] == scale
        assert torch.tensor(loaded[key]["amax_history"]).T.tolist() == [
            state.roles[role].amax_history.tolist() for role in roles
        ]
        if te.form == 1:
            assert loaded[key]["scale_inv"] == (1 / torch.tensor(scale)).tolist()


def test_its_grouped_linear_finds_each_gemm_s_scales_where_they_were_written(te, tmp_path):
    if te.version in ("2.1.0", "2.2.0"):
        pytest.skip("of 2.x, what is written is in the order of 2.3 and after")
    parts = {role: RoleState(torch.tensor([i + 1.0, i + 11.0]), torch.zeros(2, 4)) for i, role in enumerate(ROLES)}
    (tmp_path / "payload").write_bytes(encode_payload(Fp8State(parts), RECIPE, te.form))
    found = json.loads(te("columns", tmp_path / "payload"))
    assert found == {role: parts[role].scale.tolist() for role in found}
