"""What our recipes of FP8 are to Transformer Engine: the quantizers that it makes of them, and where it runs them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from precisionctl.errors import EnvironmentProblem
from precisionctl.precision import PRESETS, BlockScaling, Precision
from precisionctl.trainer.backends.choose import choose_backend, make_backend

BLOCK, MXFP8, NVFP4 = PRESETS["fp8-block"], PRESETS["mxfp8"], PRESETS["nvfp4"]
FP32_SCALES = replace(BLOCK, block=BlockScaling(use_f32_scales=True))
HYBRID = BlockScaling(fp8_format="HYBRID")


def quantizers(precision: Precision) -> dict[str, Any]:
    """Those of a linear, by role."""
    from transformer_engine.pytorch.quantization import RecipeState

    recipe = make_backend("te", precision, torch.bfloat16, torch.device("cuda")).recipe  # type: ignore[attr-defined]
    forward = RecipeState.create(recipe, mode="forward", num_quantizers=3).make_quantizers()
    backward = RecipeState.create(recipe, mode="backward", num_quantizers=2).make_quantizers()
    return {"input": forward[0], "weight": forward[1], "grad_output": backward[0]}


@pytest.mark.parametrize(
    ("precision", "kind", "grad_output"),
    [
        (BLOCK, "Float8BlockQuantizer", "E4M3"),
        (FP32_SCALES, "Float8BlockQuantizer", "E4M3"),
        (replace(BLOCK, block=HYBRID), "Float8BlockQuantizer", "E5M2"),
        (MXFP8, "MXFP8Quantizer", "E4M3"),
        (replace(MXFP8, block=HYBRID), "MXFP8Quantizer", "E5M2"),
        (PRESETS["fp8-current"], "Float8CurrentScalingQuantizer", "E5M2"),
    ],
)
def test_quantizers_are_what_the_emulation_computes(precision: Precision, kind: str, grad_output: str) -> None:
    made = quantizers(precision)
    assert {type(each).__name__ for each in made.values()} == {kind}
    formats = {role: each.dtype.name.removeprefix("kFloat8") for role, each in made.items()}
    assert formats == {"input": "E4M3", "weight": "E4M3", "grad_output": grad_output}
    assert all(each.rowwise_usage and each.columnwise_usage for each in made.values())
    if kind == "Float8CurrentScalingQuantizer":
        assert not any(each.force_pow_2_scales or each.amax_epsilon for each in made.values())
    elif kind == "Float8BlockQuantizer":
        assert {role: each.block_scaling_dim for role, each in made.items()} == {
            "input": 1,
            "weight": 2,
            "grad_output": 1,
        }
        assert all(each.force_pow_2_scales != precision.block.use_f32_scales for each in made.values())
        assert all((each.block_len, each.amax_epsilon) == (128, 0) for each in made.values())
    else:
        assert not any(each.with_2d_quantization for each in made.values())


def test_nvfp4_s_quantizers_are_what_the_emulation_computes() -> None:
    made = quantizers(NVFP4)
    assert {type(each).__name__ for each in made.values()} == {"NVFP4Quantizer"}
    assert all(each.rowwise_usage and each.columnwise_usage for each in made.values())
    kinds = ("with_rht", "with_post_rht_amax", "with_2d_quantization", "stochastic_rounding")
    assert {role: tuple(getattr(each, kind) for kind in kinds) for role, each in made.items()} == {
        "input": (True, True, False, False),
        "weight": (False, False, True, False),
        "grad_output": (True, True, False, True),
    }
    for each in made.values():
        assert not getattr(each, "row_scaled_nvfp4", False) and not getattr(each, "nvfp4_use_4over6", False)
        assert each.rht_matrix_random_sign_mask_t == sum(1 << i for i in (3, 5, 6, 7, 8, 9, 10, 12, 14, 15))


@pytest.mark.parametrize("preset", [name for name, precision in PRESETS.items() if precision.fp8])
def test_the_backward_takes_codes(preset: str) -> None:
    backend = make_backend("te", PRESETS[preset], torch.bfloat16, torch.device("cuda"))
    assert getattr(backend.recipe, "backward_override", None) is None  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("precision", "available", "capability", "reason"),
    [
        (BLOCK, ("is_fp8_block_scaling_available", (False, "CUDA >= 12.9.")), (9, 0), "CUDA >= 12.9"),
        (MXFP8, ("is_mxfp8_available", (False, "capability 10.0 or higher")), (9, 0), "capability 10.0"),
        (NVFP4, ("is_nvfp4_available", (False, "capability 10.0 or higher")), (9, 0), "capability 10.0"),
        (FP32_SCALES, ("is_fp8_block_scaling_available", (True, "")), (10, 0), "Blackwell .* use_f32_scales = false"),
    ],
)
def test_what_this_machine_cannot_run_is_refused_with_the_reason(
    precision: Precision,
    available: tuple[str, tuple[bool, str]],
    capability: tuple[int, int],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import transformer_engine.pytorch as te

    asked, answer = available
    answers: Callable[..., tuple[bool, str]] = lambda return_reason: answer  # noqa: E731
    monkeypatch.setattr(te, asked, answers)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    for backend in ("te", "auto"):
        with pytest.raises(EnvironmentProblem, match=f"precision.scaling = {precision.scaling} here: .*{reason}"):
            choose_backend(backend, precision)
    assert choose_backend("emulated", precision) == "emulated"


def test_on_blackwell_scales_that_are_powers_of_two_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformer_engine.pytorch as te

    monkeypatch.setattr(te, "is_fp8_block_scaling_available", lambda return_reason: (True, ""))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    assert choose_backend("te", BLOCK) == "te"


@pytest.mark.parametrize("precision", [MXFP8, NVFP4], ids=["mxfp8", "nvfp4"])
def test_hopper_refuses_what_wants_blackwell(precision: Precision) -> None:
    """As Transformer Engine itself answers."""
    if torch.cuda.get_device_capability() >= (10, 0):
        pytest.skip("Blackwell has both")
    for backend in ("te", "auto"):
        with pytest.raises(EnvironmentProblem, match=f"precision.scaling = {precision.scaling} here: .*10.0 or higher"):
            choose_backend(backend, precision)
