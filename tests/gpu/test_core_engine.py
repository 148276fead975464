"""`resume --engine megatron-core` on Transformer Engine, beside the bundled trainer on Transformer Engine."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrating import asked
from judges import LLAMA_3_1
from te_pairs import refused
from training import make_source, make_text, settings

from precisionctl import api
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.mcore import train_in_core
from precisionctl.precision import PRESETS
from precisionctl.trainer.resume import resume

SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
KEYS = {"train__steps": 12, "train__save_every": 12, "train__batch_size": 4, "train__micro_batch_size": 2}
KEYS |= {"data__sequence_length": 128, "optimizer__lr": 0.001}
CASES: dict[str, dict[str, Any]] = {
    "BF16": {"precision": "bf16"},
    "delayed": {"precision": "fp8"},
    "current": {"precision": "fp8", "precision__scaling": "current"},
    "block": {"precision": "fp8", "precision__scaling": "block"},
    "MXFP8": {"precision": "fp8", "precision__scaling": "mxfp8"},
    "NVFP4": {"precision": "nvfp4", "precision__scaling": "nvfp4"},
    "BF16, Muon": {"precision": "bf16", "optimizer__preset": "muon", "optimizer__muon_extra_scale_factor": 0.2},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source with FP8 state, as Megatron-Core has no warm-up."""
    folder = tmp_path_factory.mktemp("core")
    make_source(folder / "plain", dtype=torch.bfloat16, rope_parameters=LLAMA_3_1, **SIZES)
    make_text(folder / "text.txt", words=20_000)
    api.calibrate(replace(asked(folder, folder / "state"), checkpoint=folder / "plain"))
    made = api.Request(folder / "plain", folder / "source", "hf", "bf16", fp8_state=folder / "state")
    api.convert(made, workers=1)
    return folder


@pytest.mark.parametrize(
    "case",
    [pytest.param(name, marks=refused(PRESETS[name.lower()]) if name in ("MXFP8", "NVFP4") else ()) for name in CASES],
)
def test_megatron_core_on_te_trains_as_the_bundled_trainer_on_te(case: str, place: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed: its wheel is to be carried")
    if "Muon" in case and importlib.util.find_spec("emerging_optimizers") is None:
        pytest.skip("emerging_optimizers is not installed: it is to be carried")
    if torch.cuda.get_device_name() == "a CPU that stands in":
        pytest.skip("it needs Megatron-Core's stand-ins too: te_core.py has them")
    losses: dict[str, list[float]] = {"bundled": [], "core": []}
    for engine, train in (("bundled", resume), ("core", train_in_core.resume)):
        out, made = tmp_path / engine, losses[engine]
        asked_for = settings(place / "source", place / "text.txt", out, **KEYS | CASES[case])
        train(replace(asked_for, backend="te"), lambda started: None, lambda step, made=made: made.append(step.loss))
    assert losses["core"] == pytest.approx(losses["bundled"], rel=0.003 if "BF16" in case else 0.01)
    assert losses["core"][-1] < losses["core"][0]
    before, after = (open_checkpoint(of).fp8 for of in (place / "source", tmp_path / "core" / "iter_0000012"))
    assert before is not None and after is not None
    for name, state in before.modules.items():
        if "linear" in name:  # what delayed scaling trains with, and what others carry along
            held = after.modules[name].roles["grad_output"].amax_history
            assert torch.equal(held, state.roles["grad_output"].amax_history) == (case != "delayed"), name
