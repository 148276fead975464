"""FP8-LM by two ranks (gloo), against one process. The runs are made by fp8_lm_ranks.py, once."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import repository
from programs import run_program
from training import SMALL, contents

from precisionctl.checkpoints.megatron.keys import RUN_FILE
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.errors import RecipeError
from precisionctl.recipe import load_recipe
from precisionctl.trainer.parallel import world
from precisionctl.trainer.saved.loading import OPTIMIZER

STEPS = SMALL["train.steps"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    run_program(repository.HELPERS / "fp8_lm_ranks.py", folder)
    return folder


@pytest.fixture(scope="module")
def told(place: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((place / "told.json").read_text())
    return found


@pytest.mark.soak
def test_both_ranks_have_the_same_model_whatever_is_rounded(told: dict[str, Any]) -> None:
    for name in ("source two", "moe two", "gone on", "fp8", "guarded"):
        first, second = told[name]["said"]
        assert told[name]["codes"] == [0, 0] and first["model"] == second["model"], name


@pytest.mark.soak
@pytest.mark.parametrize("model", ["source", "moe"])
def test_two_ranks_lose_no_more_than_what_fp8_rounds(told: dict[str, Any], model: str) -> None:
    """Each half of a gradient is rounded by up to 2^-4 of itself, and then their sum; at this learning rate a loss
    moves by a tenth in a step."""
    (alone,), (two, _) = told[f"{model} alone"]["said"], told[f"{model} two"]["said"]
    assert len(two["losses"]) == STEPS
    assert two["losses"][0] == pytest.approx(alone["losses"][0], rel=1e-6)
    assert two["losses"] == pytest.approx(alone["losses"], rel=2e-2)
    assert two["losses"] != alone["losses"]


def wire(moved: dict[str, int]) -> int:
    """Bytes that a rank of two sends for what it hands over: half of an exchange goes to the other; of an all-reduce
    too, twice; what is gathered goes to it whole."""
    return sum(handed // 2 if kind.startswith("all_to_all") else handed for kind, handed in moved.items())


@pytest.mark.soak
def test_half_the_bytes_of_bf16_and_a_quarter_of_fp32_go_between_ranks(told: dict[str, Any]) -> None:
    ours, theirs = told["source two"]["said"][0], told["adamw"]["said"][0]
    numbers = ours["numbers"]
    codes = sum(handed for kind, handed in ours["moved"].items() if kind.endswith("uint8"))
    assert codes == pytest.approx(1.5 * numbers * STEPS, rel=1e-3)
    gradients = theirs["moved"]["all_reduce float32"]
    assert gradients == pytest.approx(4 * numbers * STEPS, rel=1e-2)
    in_bf16 = wire({"all_reduce": 2 * numbers * STEPS})
    in_fp8 = wire({kind: handed for kind, handed in ours["moved"].items() if kind.endswith("uint8")})
    assert in_fp8 == pytest.approx(in_bf16 / 2, rel=1e-3)
    beside = sum(handed for kind, handed in ours["moved"].items() if kind == "all_reduce float32")
    assert beside < 0.02 * in_bf16


@pytest.mark.soak
def test_killed_and_gone_on_with_every_bit_is_that_of_a_run_that_was_not(place: Path, told: dict[str, Any]) -> None:
    assert told["killed"]["codes"][1] == -signal.SIGKILL
    assert told["gone on"]["said"][0]["losses"] == told["source two"]["said"][0]["losses"][2:]
    whole, gone_on = (contents(place / name / f"iter_{STEPS:07}") for name in ("source two", "gone on"))
    assert whole == gone_on
    kept = TorchDistReader(place / "gone on").read_object(OPTIMIZER)
    assert kept["mu"] != 1.0


@pytest.mark.soak
def test_a_guard_s_looks_change_nothing(place: Path, told: dict[str, Any]) -> None:
    assert told["guarded"]["said"][0]["losses"] == told["fp8"]["said"][0]["losses"]
    plain, guarded = (contents(place / name / f"iter_{STEPS:07}", RUN_FILE.name) for name in ("fp8", "guarded"))
    assert plain == guarded


def test_a_model_that_ranks_share_is_refused() -> None:
    world.check(4, load_recipe("bf16", ["optimizer.preset=fp8-lm", "parallel.replicate=4"]))
    for copies in (1, 2):
        with pytest.raises(RecipeError, match=r"parallel\.replicate=4"):
            world.check(4, load_recipe("bf16", ["optimizer.preset=fp8-lm", f"parallel.replicate={copies}"]))
