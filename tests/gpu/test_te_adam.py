"""FP8-LM's state by Transformer Engine's FusedAdam and by our own arithmetic, which the CPU has."""

import pytest
import torch
from te_pairs import SHAPE, SHAPES, gpts, train_step
from torch import Tensor, nn

from precisionctl.param import KINDS
from precisionctl.precision import Precision
from precisionctl.recipe import Optimizer
from precisionctl.trainer.optimizer.fp8_lm import Fp8LmAdamW
from precisionctl.trainer.parallel.world import ALONE

SETTINGS = Optimizer(preset="fp8-lm", lr=1e-3, clip_norm=0.0)
SIZES = ((96, 64), (33,), (7, 5, 3))


def module() -> nn.Module:
    made = nn.Module()
    pick = torch.Generator().manual_seed(0)
    for number, shape in enumerate(SIZES):
        values = torch.randn(shape, generator=pick).mul_(0.02).bfloat16().cuda()
        made.register_parameter(f"p{number}", nn.Parameter(values))
    made.register_parameter("frozen", nn.Parameter(torch.ones(4, device="cuda"), requires_grad=False))
    return made


def optimizer(of: nn.Module, *, fused: bool) -> Fp8LmAdamW:
    made = Fp8LmAdamW(of, SETTINGS, fused=fused)
    with made.loading("param") as tensors:
        for name, tensor in tensors.items():
            tensor.copy_(of.get_parameter(name).detach())
    return made


def step(of: nn.Module, made: Fp8LmAdamW, seed: int, zeros: bool = False) -> None:
    pick = torch.Generator().manual_seed(seed)
    for parameter in of.parameters():
        if parameter.requires_grad:
            gradient = torch.randn(parameter.shape, generator=pick).cuda() * 0.1
            parameter.grad = (gradient * (not zeros)).to(parameter.dtype)
    made.reduce(ALONE)
    made.step(1e-3)


def state(made: Fp8LmAdamW) -> dict[tuple[str, str], Tensor]:
    return {(kind, name): tensor.cpu() for kind, tensors in made.tensors.items() for name, tensor in tensors.items()}


def test_fused_adam_s_state_is_that_of_our_arithmetic_within_a_code() -> None:
    """A GPU fuses products and sums, so an FP32 number may differ in its last bit, and where it is between two codes it
    becomes the other one: 2^-3 of itself in FP8, 2^-10 in FP16. Where only the kernel is stood in for (`te_on_cpu.py`),
    nothing is fused, and every bit is the same."""
    exact = torch.cuda.get_device_name() == "a CPU that stands in"
    modules = [module(), module()]
    made = [optimizer(each, fused=fused) for each, fused in zip(modules, (True, False), strict=True)]
    for seed in range(5):
        for each, its in zip(modules, made, strict=True):
            step(each, its, seed)
        fused, ours = map(state, made)
        if exact:
            assert (
                all(torch.equal(fused[key], ours[key]) for key in ours) and made[0].extra_state == made[1].extra_state
            )
        for key, expected in ours.items():
            near = 2**-3 if key[0] == "exp_avg" else 2**-9
            assert torch.allclose(fused[key], expected, rtol=near, atol=1e-6 * float(expected.abs().max())), key
            same = (fused[key] == expected).float().mean()
            assert same > 0.5 or (fused[key] - expected).norm() < 2**-20 * expected.norm(), (key, seed, same)


def test_one_update_is_the_same_but_for_a_last_bit() -> None:
    modules = [module(), module()]
    made = [optimizer(each, fused=fused) for each, fused in zip(modules, (True, False), strict=True)]
    for each, its in zip(modules, made, strict=True):
        step(each, its, 0)
    fused, ours = map(state, made)
    for key, expected in ours.items():
        off = (fused[key] - expected).abs() > 2**-20 * expected.abs()
        assert off.float().mean() < 0.01, key


def test_a_moment_of_zeros_is_no_nan() -> None:
    of = module()
    made = optimizer(of, fused=True)
    for seed in range(3):
        step(of, made, seed, zeros=seed < 2)
        assert all(tensor.isfinite().all() for tensor in state(made).values())


def test_five_bytes_for_each_parameter_beside_its_gradient_and_no_second_copy_for_a_gemm() -> None:
    of = module()
    made = optimizer(of, fused=True)
    for seed in range(2):
        step(of, made, seed)
        held = [each for _, moments in made._moments.items() for each in moments.kinds.values()]
        counted = {part.codes.data_ptr(): part.codes.untyped_storage().nbytes() for part in held}
        trained = sum(p.numel() for p in of.parameters() if p.requires_grad)
        frozen = 4 * (4 + 1 + 2)
        assert sum(counted.values()) == 5 * trained + frozen
        first = made._moments["p0"]._adam.state[of.p0]["exp_avg"]
        assert first._transpose is None


@pytest.mark.parametrize("ways", [(True, True), (True, False), (False, True)])
def test_what_is_kept_goes_on_to_the_same_codes(ways: tuple[bool, bool]) -> None:
    of = module()
    first = optimizer(of, fused=ways[0])
    for seed in range(3):
        step(of, first, seed)
    second = Fp8LmAdamW(of, SETTINGS, fused=ways[1])
    second.load_extra_state(first.extra_state)
    second.steps = first.steps
    for kind in KINDS:
        with second.loading(kind) as tensors:
            for name, tensor in tensors.items():
                tensor.copy_(first.tensors[kind][name])
    assert second.extra_state == first.extra_state
    assert all(torch.equal(a, b) for a, b in zip(state(first).values(), state(second).values(), strict=True))
    before = state(first)
    step(of, second, 3)
    assert second.steps == 4 and any(
        not torch.equal(a, b) for a, b in zip(before.values(), state(second).values(), strict=True)
    )


@pytest.mark.parametrize("name", ["llama", "like DeepSeek", "like gpt-oss"])
def test_a_model_on_te_learns_with_it(name: str) -> None:
    """Every parameter that is trained has a FusedAdam, experts' and routers' too; what is frozen stays as it is."""
    model, _ = gpts(Precision(fp8=True), SHAPES.get(name, SHAPE))
    made = optimizer(model, fused=True)
    fused = {name for name, moments in made._moments.items() if type(moments).__name__ == "FusedMoments"}
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert fused == trained
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    tokens = torch.arange(256, device="cuda").view(2, 128) * 7 % 500
    losses = []
    for _ in range(4):
        losses.append(float(train_step(model, tokens)))
        made.reduce(ALONE)
        made.clip()
        made.step(1e-3)
    assert losses[-1] < losses[0]
    for parameter, values in model.named_parameters():
        assert values.isfinite().all() and (parameter in trained or torch.equal(values, before[parameter]))
