"""A GPT on Transformer Engine against the emulated one, on a GPU that has FP8."""

from dataclasses import replace

import pytest
import torch
from te_pairs import EVERY_PRESET, RECIPES, SHAPE, SHAPES, USED, assert_same, gpts, sqnr, train_step

from precisionctl.model.model_shape import ModelShape
from precisionctl.precision import PRESETS, Precision
from precisionctl.trainer.backends.base import fp8_linears
from precisionctl.trainer.backends.recorder import Recorder
from precisionctl.trainer.model.gpt import GPT
from precisionctl.trainer.model.loss import loss
from precisionctl.trainer.sequences import PackedSequences


def test_both_gpts_have_the_same_names_and_no_extra_state() -> None:
    theirs, ours = gpts(PRESETS["fp8-delayed"])
    assert theirs.state_dict().keys() == ours.state_dict().keys()
    assert not any("_extra_state" in name for name in theirs.state_dict())
    assert fp8_linears(theirs).keys() == fp8_linears(ours).keys()


@pytest.mark.parametrize("preset", EVERY_PRESET)
def test_both_gpts_compute_the_same_loss_and_gradients(preset: str) -> None:
    theirs, ours = gpts(PRESETS[preset])
    for _ in range(2):
        tokens = torch.randint(500, (2, 128), device="cuda")
        torch.testing.assert_close(train_step(theirs, tokens), train_step(ours, tokens), rtol=2e-3, atol=0)
    for name, one in theirs.named_parameters():
        other = ours.get_parameter(name)
        assert one.grad is not None
        assert other.grad is not None
        # A code that rounds the other way goes through every later layer, and NVFP4's gradients do so at random
        assert sqnr(one.grad, other.grad) > (3 if preset == "nvfp4" else 15), name


@pytest.mark.parametrize("preset", ["bf16", "fp8-delayed"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_both_gpts_of_other_families_compute_the_same_loss(shape: ModelShape, preset: str) -> None:
    """Gradients are not compared: a score that is rounded the other way sends a token to another expert."""
    theirs, ours = gpts(PRESETS[preset], shape)
    assert theirs.state_dict().keys() == ours.state_dict().keys()
    tokens = torch.randint(500, (2, 128), device="cuda")
    torch.testing.assert_close(train_step(theirs, tokens), train_step(ours, tokens), rtol=5e-3, atol=0)


@pytest.mark.parametrize("window", [None, 24])
def test_both_gpts_attend_alike_to_texts_that_share_rows(window: int | None) -> None:
    theirs, ours = gpts(PRESETS["bf16"], replace(SHAPE, sliding_window=window))
    tokens = torch.randint(500, (2, 128), device="cuda")
    packed = PackedSequences((50, 70, 8, 128))
    together, one_by_one = (model(tokens, packed=packed) for model in (theirs, ours))
    assert sqnr(together, one_by_one) > 35
    assert sqnr(theirs(tokens), together) < 25, "texts would see one another"


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_both_gpts_show_a_recorder_the_same(shape: ModelShape) -> None:
    """Amaxes of BF16 passes, keys and values too; a token that is sent to another expert may be the largest there."""
    made = []
    real = torch.ones(2, 128, dtype=torch.bool, device="cuda")
    real[1, 96:] = False
    tokens = torch.randint(500, (2, 128), device="cuda")
    for model in gpts(PRESETS["fp8-delayed"], shape):
        recorder = Recorder(PRESETS["fp8-delayed"], torch.device("cuda"))
        with model.recorded_by(recorder):
            total = loss(model(tokens, real), tokens, real, SHAPE.vocab_size)
            (total / real.sum()).backward()
        made.append(recorder.states())
    theirs, ours = made
    assert theirs.keys() == ours.keys()
    for name in ours:
        assert theirs[name].roles.keys() == ours[name].roles.keys()
        for role, part in ours[name].roles.items():
            other = theirs[name].roles[role].amax_history
            if part.recorded and part.scale.dim() == 0:
                torch.testing.assert_close(other, part.amax_history, rtol=0.15, atol=0, msg=f"{name} {role}")


def test_every_linear_of_a_gpt_records_one_row_per_step_and_role() -> None:
    kept = Precision(fp8=True, delayed=RECIPES["max"], keep_bf16=("*.layers.0.mlp.linear_fc2",))
    for model in gpts(kept):
        for _ in range(3):
            train_step(model, torch.randint(500, (2, 128), device="cuda"))
        linears = fp8_linears(model)
        assert len(linears) == 7
        for linear in linears.values():
            state = linear.fp8_state()
            assert state is not None
            assert [state.roles[role].amax_history.count_nonzero().item() for role in USED] == [3, 3, 3]


@pytest.mark.parametrize("preset", EVERY_PRESET)
def test_layers_that_are_computed_again_give_the_same_gradients_and_record_once(preset: str) -> None:
    kept, again = (GPT(SHAPE, PRESETS[preset], "te", device="cuda", recompute=recompute) for recompute in (False, True))
    again.load_state_dict(kept.state_dict())
    for _ in range(2):
        tokens = torch.randint(500, (2, 128), device="cuda")
        made = []
        for model in (kept, again):
            model.zero_grad()
            torch.manual_seed(2)  # NVFP4 draws random numbers
            made.append(train_step(model, tokens))
        assert made[0] == made[1]
    for name, parameter in kept.named_parameters():
        assert torch.equal(parameter.grad, again.get_parameter(name).grad), name
    for name, linear in fp8_linears(kept).items():
        assert_same(linear.fp8_state(), fp8_linears(again)[name].fp8_state())
