"""doctor: what it says of machines that are not here, and of payloads that Transformer Engine would refuse."""

import json
from pathlib import Path

import pico
import pytest
import torch
from click.testing import CliRunner
from te_pickles import NOTHING, empty_file, of_module
from te_states import EMPTY, OTHER_FORMS, OTHERS, PAYLOADS, RECIPES, trained

from precisionctl import doctor
from precisionctl.checkpoints.megatron.payloads import payload_bytes
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.cli import main
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import execute
from precisionctl.errors import NotUnderstood
from precisionctl.fp8.extra_state import read_payload
from precisionctl.fp8.state import DelayedScaling

GATED = ["2.16.1", "2.17.1", "2.18.0", "2.20.2", "3.0"]
OPEN = ["1.13.0", "2.3.0", "2.15.0", "2.16.0", "2.17.0"]
"""Releases of Transformer Engine: with its pull request 3123, and without."""


@pytest.mark.parametrize(
    ("capability", "cuda", "runs"),
    [
        ((8, 0), (13, 0), []),
        ((8, 9), (12, 0), []),
        ((8, 9), (12, 1), ["DelayedScaling", "Float8CurrentScaling"]),
        ((9, 0), (12, 8), ["DelayedScaling", "Float8CurrentScaling"]),
        ((9, 0), (13, 0), ["DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling"]),
        ((10, 0), (13, 0), [*doctor.RECIPES]),
        ((12, 0), (13, 0), ["DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "NVFP4BlockScaling"]),
        (None, (), []),
    ],
    ids=str,
)
def test_which_recipes_run_is_what_te_s_own_checks_say(capability, cuda, runs):
    assert [recipe.name for recipe in doctor.recipes(capability, cuda) if recipe.problem is None] == runs


def test_this_machine_is_told_with_the_reason_for_what_it_cannot(monkeypatch):
    monkeypatch.setenv("NVTE_UNFUSED_FP8_UPDATE", "1")
    machine = doctor.examine()
    assert torch.__version__.startswith(machine.packages["torch"])  # a CUDA build may add to it
    assert machine.variables["NVTE_UNFUSED_FP8_UPDATE"] == "1"
    if not torch.cuda.is_available():
        assert machine.transformer_engine == "no CUDA device"
        assert all("no CUDA device" in (recipe.problem or "") for recipe in machine.recipes)


@pytest.mark.parametrize("version", [*GATED, None])
def test_versions_with_the_gate(version):
    assert doctor.has_gate(version)


@pytest.mark.parametrize("version", OPEN)
def test_versions_without_the_gate(version):
    assert not doctor.has_gate(version)


def refused(data):
    try:
        return doctor.is_refused(data, read_payload(data, "here"))
    except NotUnderstood:
        return doctor.is_refused(data, None, "not understood")


@pytest.mark.parametrize("name", [*RECIPES, *OTHER_FORMS, *OTHERS])
def test_state_is_refused(name):
    assert refused((PAYLOADS / f"{name}.bin").read_bytes())


@pytest.mark.parametrize("name", EMPTY)
def test_payloads_without_state_are_not(name):
    assert not refused((PAYLOADS / f"{name}.bin").read_bytes())


def test_every_file_is_refused_and_nothing_is_not():
    assert refused(payload_bytes(empty_file(), "here"))
    assert not any(refused(payload_bytes(value, "here")) for value in NOTHING.values())


def megatron(tmp_path: Path, **options) -> Path:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    work = plan_command(Request(tmp_path / "hf", tmp_path / "megatron", "megatron", "fp8", **options))
    execute(work)
    return tmp_path / "megatron"


def test_a_checkpoint_s_payloads_are_counted_by_form_with_what_to_do(tmp_path):
    found = doctor.examine_payloads(open_checkpoint(megatron(tmp_path)), None)
    assert found.forms == {"a pickle with its recipe (TE 2)": 8}
    assert found.refused == 8
    assert "refuses 8 payloads: set NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1" in found.advice[0]
    assert not doctor.examine_payloads(open_checkpoint(tmp_path / "megatron"), "2.15.0").advice


def test_the_switch_that_is_set_is_no_advice(tmp_path, monkeypatch):
    monkeypatch.setenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "1")
    assert not doctor.examine_payloads(open_checkpoint(megatron(tmp_path)), None).advice


def test_payloads_without_a_recipe_say_so(tmp_path):
    found = doctor.examine_payloads(open_checkpoint(megatron(tmp_path, te_version=1, container="torch")), "2.4.0")
    assert found.forms == {"a pickle (TE 0.6 to 0.11, 1.14)": 8}
    assert found.advice[0].startswith("8 payloads have no recipe.")
    assert "here 1024" in found.advice[0]


@pytest.mark.parametrize("version", [(0, 3), (1, 8)], ids=str)
def test_old_files_in_a_rank_s_state_dict_are_counted(tmp_path, version):
    directory = megatron(tmp_path, container="torch")
    file = directory / "release" / "mp_rank_00" / "model_optim_rng.pt"
    saved = torch.load(file, weights_only=False)
    old = of_module(trained(4), DelayedScaling(amax_history_len=4), version)
    for name in [name for name in saved["model"] if "_extra_state" in name]:
        saved["model"][name] = old if "linear" in name else None
    torch.save(saved, file)
    reader = open_checkpoint(directory)
    found = doctor.examine_payloads(reader, "2.20.2")
    assert found.forms == {"a file, or a table (TE 0.1 to 0.5, 0.12 to 1.13)": 8}
    assert found.refused == 8
    states = reader.fp8
    assert states is not None and len(states.modules) == 8 and not states.raw
    assert any("has no recipe" in note for note in states.notes)
    shown = CliRunner().invoke(main, ["inspect", str(directory), "--grouped-columns", "role", "--json"])
    assert json.loads(shown.stdout)["fp8"]["notes"] == list(states.notes)


def test_a_hugging_face_directory_has_none(tmp_path):
    pico.save(tmp_path / "hf")
    result = CliRunner().invoke(main, ["doctor", str(tmp_path / "hf")])
    assert result.exit_code == 0
    assert "no FP8 payloads" in result.stdout + result.stderr


def test_json_has_everything(tmp_path):
    result = CliRunner().invoke(main, ["doctor", str(megatron(tmp_path)), "--json"])
    found = json.loads(result.stdout)
    assert found["payloads"]["refused"] == 8
    assert torch.__version__.startswith(found["machine"]["packages"]["torch"])
    assert json.loads(CliRunner().invoke(main, ["doctor", "--json"]).stdout)["payloads"] is None
