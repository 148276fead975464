"""What a step's metrics say of FP8, from the state that Transformer Engine keeps: the module whose scale is wrong."""

import pytest
import torch
from te_pairs import RECIPES, SHAPE, SHAPES, gpts, train_step

from precisionctl.fp8.state import Fp8State, Role, RoleState
from precisionctl.model.model_shape import ModelShape
from precisionctl.precision import Precision
from precisionctl.trainer.backends.base import fp8_linears
from precisionctl.trainer.measure.meter import Fp8Health
from precisionctl.trainer.model.gpt import GPT


def set_scales(model: GPT, module: str, role: Role, coded: float) -> None:
    """Have `role` of `module` meet its last amax at `coded`, in the units of codes; all else has room."""
    for name, linear in fp8_linears(model).items():
        state = linear.fp8_state()
        assert state is not None
        roles = {each: RoleState(part.scale / 4, part.amax_history) for each, part in state.roles.items()}
        if name == module:
            exact, largest = state.roles[role], torch.finfo(model.precision.delayed.dtype(role)).max
            roles[role] = RoleState(coded / largest * exact.scale, exact.amax_history)
        linear.set_fp8_state(Fp8State(roles))


@pytest.mark.parametrize("recipe", ["max", "no history"])
@pytest.mark.parametrize(
    ("role", "coded", "seen"), [("weight", 440, (0, 0)), ("weight", 900, (1, 0)), ("weight", 0.01, (0, 1))]
)
@pytest.mark.parametrize("shape", [SHAPE, SHAPES["like gpt-oss"]], ids=["dense", "experts"])
def test_the_module_is_seen_whose_scale_is_wrong(
    shape: ModelShape, role: Role, coded: float, seen: tuple[int, int], recipe: str
) -> None:
    model, _ = gpts(Precision(fp8=True, delayed=RECIPES[recipe]), shape)
    tokens = torch.arange(256, device="cuda").view(2, 128)
    for _ in range(3):
        train_step(model, tokens)
    module = next(name for name in fp8_linears(model) if name.endswith("linear_fc2"))
    set_scales(model, module, role, coded)
    health = Fp8Health(model)
    with health.watch():
        train_step(model, tokens)
    count = len(fp8_linears(model))
    assert health.fractions is not None
    assert health.fractions.tolist() == pytest.approx([each / count for each in seen])
