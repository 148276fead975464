"""Extra state against Transformer Engine's own code, which needs no GPU for it: ours into it, its into ours."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from precisionctl.doctor import is_refused
from precisionctl.errors import NotUnderstood
from precisionctl.fp8.extra_state import decode_payload, read_payload
from precisionctl.fp8.extra_state_writer import encode_payload
from precisionctl.fp8.state import BACKWARD, FORWARD, ROLES, DelayedScaling, Fp8State, RoleState

GOLDEN = Path(__file__).parents[1] / "golden"
VERSION = "2.20.2"


@pytest.fixture(scope="module")
def te(tmp_path_factory):
    """Asks golden/te_payloads.py, beside TE's wheel without compiled code, and gives its answer."""
    site = str(tmp_path_factory.mktemp("te"))
    wanted = [f"transformer_engine=={VERSION}", "pydantic"]
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--target", site, *wanted], check=True)

    command, environment = [sys.executable, GOLDEN / "te_payloads.py"], os.environ | {"PYTHONPATH": site}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as process:

        def ask(what, path):
            print(what, path, file=process.stdin, flush=True)
            return process.stdout.readline().strip()

        yield ask


def understood(path):
    """A payload in our own spelling, or what it is instead."""
    try:
        decoded = decode_payload(path.read_bytes(), path)
    except NotUnderstood as error:
        return error.what
    return decoded and encode_payload(decoded[1], decoded[0])


def test_te_writes_today_what_the_golden_payloads_hold(te, tmp_path):
    te("write", tmp_path)
    goldens = sorted((GOLDEN / "te").glob("*.bin"))
    assert [path.name for path in goldens] == sorted(path.name for path in tmp_path.iterdir())
    for golden in goldens:
        assert understood(tmp_path / golden.name) == understood(golden)


numbers = st.floats(2.0**-140, 2.0**120, width=32)


@st.composite
def states(draw):
    recipe = DelayedScaling(
        margin=draw(st.integers(-4, 9)),
        fp8_format=draw(st.sampled_from(["HYBRID", "E4M3"])),
        amax_history_len=draw(st.sampled_from([1, 2, 5])),
        amax_compute_algo=draw(st.sampled_from(["max", "most_recent"])),
        reduce_amax=draw(st.booleans()),
        fp8_dpa=draw(st.booleans()),
        fp8_mha=draw(st.booleans()),
    )
    rows = st.lists(numbers, min_size=recipe.amax_history_len, max_size=recipe.amax_history_len)
    return recipe, Fp8State({r: RoleState(torch.tensor(draw(numbers)), torch.tensor(draw(rows))) for r in ROLES})


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(made=states())
def test_te_loads_what_is_written_here_number_for_number(te, tmp_path_factory, made):
    recipe, state = made
    path = tmp_path_factory.mktemp("ours") / "payload.bin"
    path.write_bytes(encode_payload(state, recipe))
    loaded = json.loads(te("read", path))
    assert loaded["class"] == "transformer_engine.common.recipe.DelayedScaling"
    assert loaded["recipe"] | vars(recipe) == loaded["recipe"]
    largest = (448, 448) if recipe.fp8_format == "E4M3" else (448, 57344)
    assert loaded["extra"] == {
        "fp8_checkpoint": True,
        "num_gemms": 1,
        "fp8_max_fwd": largest[0],
        "fp8_max_bwd": largest[1],
    }
    for key, roles in (("scaling_fwd", FORWARD), ("scaling_bwd", BACKWARD)):
        scale, history = loaded[key]
        assert scale == [state.roles[role].scale.item() for role in roles]
        assert torch.tensor(history).T.tolist() == [state.roles[role].amax_history.tolist() for role in roles]


@pytest.mark.parametrize("golden", sorted((GOLDEN / "te").glob("*.bin")), ids=lambda path: path.stem)
def test_te_refuses_what_the_doctor_says_it_refuses(te, golden):
    data = golden.read_bytes()
    try:
        refused = is_refused(data, read_payload(data, golden))
    except NotUnderstood:
        refused = True
    assert te("classify", golden) == ("unsafe_load" if refused else "ignore")


def test_te_takes_what_is_written_here_for_delayed_scaling_and_asks_for_its_switch(te, tmp_path):
    path = tmp_path / "payload.bin"
    path.write_bytes(encode_payload(Fp8State.fresh(2), DelayedScaling(amax_history_len=2)))
    assert te("classify", path) == "unsafe_load"
    path.write_bytes(b"")
    assert te("classify", path) == "ignore"
