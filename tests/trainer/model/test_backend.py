"""Which backend a machine gets."""

import sys
import tomllib
from importlib import metadata
from types import ModuleType, SimpleNamespace

import pytest
import repository
import torch

from precisionctl import doctor
from precisionctl.errors import EnvironmentProblem
from precisionctl.precision import PRESETS, Precision
from precisionctl.trainer.backends import choose, te_version
from precisionctl.trainer.backends.choose import choose_backend

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@no_gpu
def test_without_a_gpu_auto_is_the_emulation() -> None:
    assert choose_backend("auto") == "emulated"


@no_gpu
def test_asking_for_te_without_a_gpu_says_why_not_and_what_to_do() -> None:
    for precision, codes in ((PRESETS["fp8-delayed"], "FP8"), (PRESETS["nvfp4"], "NVFP4")):
        said = f"cannot run {codes} here: no CUDA device.*--backend emulated.* a GPU that computes in {codes} and"
        with pytest.raises(EnvironmentProblem, match=said):
            choose_backend("te", precision)


def test_asking_for_the_emulation_gives_it_anywhere() -> None:
    assert choose_backend("emulated") == "emulated"


def test_a_transformer_engine_that_is_too_old_is_named_and_the_emulation_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """2.8 on a GPU: it has all that the modules are made of, and no `is_fp8_available`."""
    old = ModuleType("te")
    monkeypatch.setitem(sys.modules, "precisionctl.trainer.backends.te_backend", old)  # has no `fp8_problem` either
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(metadata, "version", lambda name: "2.8.0")
    for precision in (PRESETS["bf16"], PRESETS["fp8-delayed"]):
        assert choose_backend("auto", precision) == "emulated"
    with pytest.raises(EnvironmentProblem, match=r"version 2\.8\.0 is too old, 2\.9 or newer is needed"):
        choose_backend("te", PRESETS["bf16"])
    assert doctor.examine().transformer_engine == "version 2.8.0 is too old, 2.9 or newer is needed"


@pytest.mark.parametrize(
    ("installed", "enough"),
    [("2.8.0", False), ("2.9.0", True), ("2.9.0+70f53666", True), ("2.20.2", True), ("1.13.0", False), ("3.0", True)]
    + [("2.9rc1", True), ("2.8+abc", False), ("2.10.dev3", True), ("", False)],
)
def test_versions_are_compared_by_their_numbers(installed: str, enough: bool) -> None:
    assert (te_version.version_parts(installed) >= te_version.TE_FLOOR) == enough


def test_pyproject_asks_for_the_same_transformer_engine() -> None:
    project = tomllib.loads((repository.ROOT / "pyproject.toml").read_text())["project"]
    asked = project["optional-dependencies"]["te"]
    assert asked[-1] == f"transformer_engine[pytorch]>={'.'.join(map(str, te_version.TE_FLOOR))}"


def test_a_recipe_that_the_gpu_cannot_run_is_refused_and_not_emulated_in_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """tests/gpu/test_te_recipes.py has Transformer Engine's own reasons."""
    monkeypatch.setattr(choose, "_te_problem", lambda: None)
    of_old_gpu = SimpleNamespace(recipe_problem=lambda precision: "an old GPU")
    monkeypatch.setattr("precisionctl.trainer.backends.te_backend", of_old_gpu, raising=False)
    mxfp8 = PRESETS["mxfp8"]
    for asked in ("te", "auto"):
        with pytest.raises(EnvironmentProblem, match="scaling = mxfp8 here: an old GPU.*--backend emulated"):
            choose_backend(asked, mxfp8)
    assert choose_backend("emulated", mxfp8) == "emulated"
    assert choose_backend("auto", PRESETS["bf16"]) == "te"


def test_keep_bf16_takes_shell_patterns_of_whole_names() -> None:
    precision = Precision(fp8=True, keep_bf16=("decoder.layers.0.*", "*.linear_fc2"))
    assert not precision.in_fp8("decoder.layers.0.mlp.linear_fc1")
    assert not precision.in_fp8("decoder.layers.7.mlp.linear_fc2")
    assert precision.in_fp8("decoder.layers.7.mlp.linear_fc1")
    assert not Precision(fp8=False).in_fp8("decoder.layers.7.mlp.linear_fc1")
