"""Weights that are cast once for all passes of an update: the same bits where scales have no history, and under delayed
scaling a history of updates."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from soaking import in_soak
from torch import nn
from training import contents, losses, run, run_with_kills, scales, settings

from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.errors import RecipeError
from precisionctl.recipe import load_recipe
from precisionctl.trainer.backends import fp8_gemm
from precisionctl.trainer.parallel import world

SCALINGS = {"current": fp8_gemm.CurrentQuantizer, "block": fp8_gemm.SquareQuantizer, "mxfp8": fp8_gemm.GroupQuantizer}


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Of weights and of other tensors."""
    counted: Counter[str] = Counter()
    for kind in (*SCALINGS.values(), fp8_gemm.DelayedQuantizer):

        def quantize(self: Any, values: Any, before: Any = kind.quantize) -> Any:
            counted["weights" if isinstance(values, nn.Parameter) else "others"] += 1
            return before(self, values)

        monkeypatch.setattr(kind, "quantize", quantize)
    return counted


def trained(place: Path, out: Path, casts: Counter[str], **changes: Any) -> Counter[str]:
    casts.clear()
    run(settings(place / "source", place / "text.txt", out, "fp8", train__save_every=6, **changes))
    return Counter(casts)


def same(a: Path, b: Path, step: int = 6) -> bool:
    run_json = "run.json"  # which says what was asked
    one, other = (contents(each / f"iter_{step:07}", run_json) for each in (a, b))
    return losses(a) == losses(b) and one == other


@pytest.mark.parametrize("scaling", ["block", *in_soak("current", "mxfp8")])
def test_of_scales_without_a_history_every_bit_is_the_same_for_half_the_casts(
    place: Path, tmp_path: Path, casts: Counter[str], scaling: str
) -> None:
    """Two passes make an update of three; eight linears. The backward casts gradients, the forward two tensors."""
    changes = {"precision__scaling": scaling, "train__steps": 3}
    once = trained(place, tmp_path / "auto", casts, **changes)
    each = trained(place, tmp_path / "each", casts, train__weight_casts="per-pass", **changes)
    assert (once["weights"], each["weights"]) == (3 * 8, 3 * 8 * 2)
    assert once["others"] == each["others"] == 3 * 8 * 2 * 2
    assert same(tmp_path / "auto", tmp_path / "each", step=3)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"precision__scaling": "current", "train__recompute": "layer"}, 2 * 2),
        ({"precision__scaling": "current", "train__recompute": "layer", "train__weight_casts": "per-update"}, 1),
        ({"precision__scaling": "current", "train__micro_batch_size": 4}, 1),
        ({"train__warmup_passes": 0}, 2),
        ({"train__weight_casts": "per-update", "train__recompute": "layer"}, 1),
    ],
    ids=str,
)
def test_a_weight_is_cast_so_often_in_an_update(
    place: Path, tmp_path: Path, casts: Counter[str], changes: dict[str, Any], expected: int
) -> None:
    """What is kept for later passes takes memory that recomputation is to save, so it must be asked for."""
    found = trained(place, tmp_path / "run", casts, train__steps=1, **changes)
    assert found["weights"] == 8 * expected


@pytest.mark.soak
def test_delayed_scaling_has_a_row_of_an_update_and_recomputation_and_kills_change_nothing(
    place: Path, tmp_path: Path, casts: Counter[str]
) -> None:
    once = {"train__weight_casts": "per-update", "precision__delayed__amax_history_len": 16, "train__warmup_passes": 0}
    trained(place, tmp_path / "run", casts, **once)
    trained(place, tmp_path / "again", casts, train__recompute="layer", **once)
    killed = settings(
        place / "source", place / "text.txt", tmp_path / "killed", "fp8", **once, train__save_every=2, train__keep=1
    )
    run_with_kills(killed, {1, 3, 5})
    assert same(tmp_path / "run", tmp_path / "again") and same(tmp_path / "run", tmp_path / "killed")
    for (_, role), (_, history) in scales(TorchDistReader(tmp_path / "run/iter_0000006").fp8).items():
        rows = sum(amax > 0 for amax in history)
        assert rows == {"input": 12, "weight": 6 + 1, "grad_output": 12}.get(role, 0), role


def test_ranks_that_have_parts_of_weights_keep_none() -> None:
    recipe = load_recipe("fp8-delayed", ("train.weight_casts=per-update",))
    world.check(1, recipe)
    with pytest.raises(RecipeError, match="per-update keeps FP8 weights"):
        world.check(2, recipe)
