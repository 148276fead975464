"""FP8-LM's optimizer: its arithmetic against a slow one after TE's FusedAdam, its memory, its checkpoints."""

import gc
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from soaking import in_soak
from torch import nn
from training import contents, make_source, make_text, run, settings

from precisionctl.checkpoints.base import WithOptimizer
from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.megatron.keys import RUN_FILE
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import execute
from precisionctl.errors import DamagedCheckpoint, damage
from precisionctl.recipe import Optimizer
from precisionctl.trainer.optimizer.adamw import MasterAdamW
from precisionctl.trainer.optimizer.fp8_lm import Fp8LmAdamW
from precisionctl.trainer.parallel.world import ALONE
from precisionctl.trainer.saved.loading import OPTIMIZER

SETTINGS = Optimizer(preset="fp8-lm", lr=0.01, beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1, clip_norm=0.0)
F = np.float32


def model(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)).to(dtype)


def backward(module: nn.Module, seed: int) -> None:
    inputs = torch.randn(6, 5, generator=torch.Generator().manual_seed(seed)).to(next(module.parameters()).dtype)
    module(inputs).square().sum().backward()


def numbers(tensor: torch.Tensor) -> list[Any]:
    return list(tensor.detach().float().flatten().numpy())


E4M3 = sorted(
    {sign * (m / 8 + (e > 0)) * 2.0 ** (max(e, 1) - 7) for e in range(16) for m in range(8) for sign in (-1, 1)}
    - {480.0, -480.0}  # that code is NaN
)


def to_e4m3(x: np.float32) -> float:
    """The nearest value; of two, the one whose code is even, and in each half those alternate, zero being even."""
    x = max(-448.0, min(448.0, float(x)))
    near = sorted(E4M3, key=lambda value: abs(value - x))[:2]
    if abs(near[0] - x) != abs(near[1] - x):
        return near[0]
    zero = E4M3.index(0.0)
    return next(value for value in near if (E4M3.index(value) - zero) % 2 == 0)


class SlowTensor:
    """Numbers as FusedAdam keeps them: `_apply_scale` and `get_unscaled_state` of its fused_adam.py, one by one."""

    def __init__(self, values: list[Any], kind: str) -> None:
        self.kind, self.codes, self.scale = kind, [F(0)] * len(values), F(1)
        if any(values):
            self.write(values)

    def write(self, values: list[Any]) -> None:
        largest = F(max(abs(value) for value in values))
        if self.kind == "fp8":
            quantizer_scale = F(1) / (largest / F(448))
            self.codes = [F(to_e4m3(value * quantizer_scale)) for value in values]
            self.scale = F(1) / quantizer_scale  # what the cast kernel leaves beside the codes
        else:
            self.scale = largest / F(32752)
            reciprocal = F(1) / self.scale
            self.codes = [F(np.float16(value * reciprocal)) for value in values]

    def read(self) -> list[Any]:
        return [code * self.scale for code in self.codes]


class SlowAdam:
    """`adam_update` of TE's adam.cu in its mode for AdamW, and what its host computes before: FP32, nothing fused."""

    def __init__(self, weights: list[Any], decay: float) -> None:
        self.master = SlowTensor(weights, "fp16")
        self.m, self.v = SlowTensor([F(0)] * len(weights), "fp8"), SlowTensor([F(0)] * len(weights), "fp16")
        self.decay, self.step = F(decay), 0

    def update(self, gradient: list[Any], lr: float) -> None:
        self.step += 1
        beta1, beta2 = F(0.9), F(0.95)
        bias1, bias2 = (F(1 - math.pow(float(beta), self.step)) for beta in (beta1, beta2))
        ps, ms, vs = self.master.read(), self.m.read(), self.v.read()
        for i, g in enumerate(gradient):
            ms[i] = beta1 * ms[i] + (F(1) - beta1) * g
            vs[i] = beta2 * vs[i] + (F(1) - beta2) * g * g
            denominator = np.sqrt(vs[i] / bias2) + F(1e-8)
            update = (ms[i] / bias1) / denominator + self.decay * ps[i]
            ps[i] = ps[i] - F(lr) * update
        for kept, values in ((self.master, ps), (self.m, ms), (self.v, vs)):
            kept.write(values)


def test_state_is_that_of_te_s_fused_adam_to_the_last_bit() -> None:
    module = model()
    optimizer = Fp8LmAdamW(module, SETTINGS)
    with optimizer.loading("param") as tensors:
        for name, tensor in tensors.items():
            tensor.copy_(module.get_parameter(name).detach())
    slow = {name: SlowAdam(numbers(p), 0.1 if p.dim() > 1 else 0.0) for name, p in module.named_parameters()}
    for seed in range(12):
        backward(module, seed)
        optimizer.reduce(ALONE)
        for name, gradient in optimizer.gradients.items():
            slow[name].update(numbers(gradient), 0.01)
        optimizer.step(0.01)
        for name, expected in slow.items():
            for kind, kept in (("param", expected.master), ("exp_avg", expected.m), ("exp_avg_sq", expected.v)):
                assert numbers(optimizer.tensors[kind][name]) == kept.read(), (seed, name, kind)
                assert optimizer.extra_state["scale_inv"][kind][name] == kept.scale
            rounded = optimizer.tensors["param"][name].bfloat16()
            assert torch.equal(module.get_parameter(name), rounded)


def test_gradients_are_e4m3_under_a_power_of_two() -> None:
    module, optimizer = nn.Linear(7, 9, bias=False).bfloat16(), None
    optimizer = Fp8LmAdamW(module, SETTINGS)
    gradient = torch.randn(9, 7, generator=torch.Generator().manual_seed(0)).bfloat16()
    module.weight.grad = gradient.clone()
    optimizer.reduce(ALONE)
    scale = F(2.0 ** math.floor(math.log2(448 / float(gradient.abs().max()))))
    expected = [F(to_e4m3(value * scale)) / scale for value in numbers(gradient)]
    assert numbers(optimizer.gradients["weight"]) == expected


def test_updates_are_those_of_adamw_within_what_fp8_and_fp16_round() -> None:
    """From the same gradients, of a first moment that is rounded by up to 2^-4 of itself; where gradients have one sign
    that share of an update is what they are apart, and no more."""
    ours, theirs = nn.Linear(64, 32, bias=False), nn.Linear(64, 32, bias=False)
    theirs.load_state_dict(ours.state_dict())
    start = ours.weight.detach().clone()
    optimizer, adamw = Fp8LmAdamW(ours.bfloat16(), SETTINGS), MasterAdamW(theirs, SETTINGS)
    with optimizer.loading("param") as tensors:
        tensors["weight"].copy_(start)
    pick = torch.Generator().manual_seed(0)
    mean = torch.randn(32, 64, generator=pick)
    for _ in range(30):
        gradient = mean + 0.5 * torch.randn(32, 64, generator=pick)
        ours.weight.grad, theirs.weight.grad = gradient.bfloat16(), gradient
        for each in (optimizer, adamw):
            each.collect()
            each.reduce(ALONE)
            each.step(1e-3)
    moved = adamw.masters["weight"] - start
    apart = optimizer.tensors["param"]["weight"] - adamw.masters["weight"]
    assert apart.norm() < 2**-4 * moved.norm()


def test_a_gradient_of_zeros_makes_no_nan_and_moves_nothing() -> None:
    """FusedAdam's own scale of a first moment of zeros is 1/0."""
    module = nn.Linear(4, 4, bias=False).bfloat16()
    optimizer = Fp8LmAdamW(module, Optimizer(preset="fp8-lm", weight_decay=0.0))
    with optimizer.loading("param") as tensors:
        tensors["weight"].copy_(module.weight.detach())
    before = module.weight.detach().clone()
    for gradient in (0.0, 1e-30, 0.0):
        module.weight.grad = torch.full_like(module.weight, gradient)
        optimizer.reduce(ALONE)
        assert optimizer.clip() == pytest.approx(4 * gradient)
        optimizer.step(1e-3)
        assert all(each["weight"].isfinite().all() for each in optimizer.tensors.values())
    assert torch.allclose(module.weight, before, atol=2**-9)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_no_number_is_none_in_fp8_either(bad: float) -> None:
    """A cast to FP8 makes the largest code of infinity."""
    module = nn.Linear(4, 4, bias=False).bfloat16()
    optimizer = Fp8LmAdamW(module, SETTINGS)
    module.weight.grad = torch.ones_like(module.weight)
    module.weight.grad[1, 2] = bad
    optimizer.reduce(ALONE)
    assert not math.isfinite(optimizer.clip())


def tensor_bytes() -> int:
    """Of all tensors that are alive."""
    alive = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter)]
    alive += [each.grad for each in alive if each.is_leaf and each.grad is not None]
    stored = [each.untyped_storage() for each in alive]
    return sum({storage.data_ptr(): storage.nbytes() for storage in stored}.values())


@pytest.fixture
def nothing_older() -> Iterator[None]:
    """`gc` names only what a test makes: looking through the million objects of those before it takes seconds. The
    table of FP8 casts, made once a process, is there already."""
    small = model()
    train(small, Fp8LmAdamW(small, SETTINGS), range(1))
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("nothing_older")
@pytest.mark.parametrize(("kind", "passing", "expected"), [(MasterAdamW, 16, 16), (Fp8LmAdamW, 7, 6)])
def test_bytes_of_each_parameter_are_those_published(kind: Any, passing: int, expected: int) -> None:
    """With gradients, after a pass and after the last one of an update; the parameters themselves aside."""
    module = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)).bfloat16()
    parameters = sum(p.numel() for p in module.parameters())
    before = tensor_bytes()
    optimizer = kind(module, SETTINGS)
    for _ in range(2):
        module(torch.randn(2, 512).bfloat16()).sum().backward()
        optimizer.collect()
        assert (tensor_bytes() - before) / parameters == pytest.approx(passing, rel=1e-3)
        optimizer.reduce(ALONE)
        assert (tensor_bytes() - before) / parameters == pytest.approx(expected, rel=1e-3)
        optimizer.step(0.01)
    assert (tensor_bytes() - before) / parameters <= expected


def test_an_optimizer_rebuilt_from_what_is_kept_goes_on_to_the_last_bit() -> None:
    whole, halves = model(), model()
    train(whole, Fp8LmAdamW(whole, SETTINGS), range(6))
    first = Fp8LmAdamW(halves, SETTINGS)
    train(halves, first, range(3))
    second = Fp8LmAdamW(halves, SETTINGS)
    second.load_extra_state(first.extra_state)
    for kind, tensors in first.tensors.items():
        with second.loading(kind) as empty:
            for name, tensor in empty.items():
                tensor.copy_(tensors[name])
    second.steps = first.steps
    assert second.extra_state == first.extra_state
    second.publish()
    train(halves, second, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), halves.parameters(), strict=True))


def train(module: nn.Module, optimizer: Fp8LmAdamW, seeds: range) -> None:
    if optimizer.steps == 0:
        with optimizer.loading("param") as tensors:
            for name, tensor in tensors.items():
                tensor.copy_(module.get_parameter(name).detach())
    for seed in seeds:
        backward(module, seed)
        optimizer.reduce(ALONE)
        optimizer.step(0.01)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, text, and a run of each optimizer to step 4."""
    folder = tmp_path_factory.mktemp("fp8-lm")
    make_source(folder / "source")
    make_text(folder / "text.txt")
    make_text(folder / "more.txt", seed=1)
    for preset in ("fp8-lm", "adamw"):
        run(train_on(folder / "source", folder, folder / preset, preset, 4))
    return folder


def train_on(source: Path, place: Path, out: Path, preset: str, steps: int, text: str = "text.txt") -> Any:
    return settings(source, place / text, out, train__steps=steps, optimizer__preset=preset)


def test_a_checkpoint_holds_what_the_codes_are_worth_and_their_scales(place: Path) -> None:
    saved = TorchDistReader(place / "fp8-lm")
    tensors, scales = WithOptimizer(saved), saved.read_object(OPTIMIZER)["scale_inv"]
    assert tensors.specs.keys() == WithOptimizer(TorchDistReader(place / "adamw")).specs.keys()
    for kind, codes in (("param", torch.float16), ("exp_avg", torch.float8_e4m3fn), ("exp_avg_sq", torch.float16)):
        for name, scale in scales[kind].items():
            values = read_tensor(tensors, f"optimizer.state.{kind}.{name}")
            worth = values.double() / scale
            assert values.any() and torch.allclose(worth.to(torch.float32).to(codes).double(), worth, rtol=2**-22)
            if kind == "param":
                assert torch.equal(values.bfloat16(), read_tensor(saved, name))


@pytest.mark.parametrize(
    ("first", "second"), [("fp8-lm", "adamw"), *in_soak(("adamw", "fp8-lm"), ("fp8-lm", "fp8-lm"))]
)
def test_either_optimizer_goes_on_from_what_the_other_left_also_when_converted(
    place: Path, tmp_path: Path, first: str, second: str
) -> None:
    """Converted and not: the values are the same, so are the losses; near those of a run that did not change."""
    execute(plan_command(Request(place / first, tmp_path / "cut", "megatron", container="torch")))
    execute(plan_command(Request(tmp_path / "cut", tmp_path / "back", "megatron")))
    on = [
        run(train_on(source, place, tmp_path / f"on {number}", second, 8, "more.txt"))
        for number, source in enumerate((place / first, tmp_path / "back"))
    ]
    stayed = run(train_on(place / first, place, tmp_path / "stayed", first, 8, "more.txt"))
    assert [started.plan.load for started, _, _ in on] == ["full", "full"]
    assert on[0][2] == on[1][2] and len(on[0][2]) == 4
    assert on[0][2] == pytest.approx(stayed[2], rel=2e-3)
    moved, kept = (TorchDistReader(tmp_path / name) for name in ("on 0", "stayed"))
    assert (OPTIMIZER in moved.objects, OPTIMIZER in kept.objects) == (second == "fp8-lm", first == "fp8-lm")


@pytest.mark.soak
def test_a_save_while_the_run_goes_on_is_that_of_one_that_waits(place: Path, tmp_path: Path) -> None:
    """Decoded tensors are there only while they are copied, and the next one may be in their place."""
    made = train_on(place / "source", place, tmp_path / "later", "fp8-lm", 4)
    run(replace(made, overrides=(*made.overrides, "train.async_save=true")))
    now, later = (contents(folder / "iter_0000004", RUN_FILE.name) for folder in (place / "fp8-lm", tmp_path / "later"))
    assert now == later


@pytest.mark.parametrize("kept", [{}, {"mu": "much"}, {"mu": math.nan}, {"mu": 0.0}, {"mu": 1.0, "scale_inv": [1]}, []])
def test_what_no_such_optimizer_keeps_is_damage(kept: Any) -> None:
    optimizer = Fp8LmAdamW(model(), SETTINGS)
    with pytest.raises(DamagedCheckpoint), damage("what no optimizer of ours keeps", None):
        optimizer.load_extra_state(kept)


def test_scales_that_do_not_give_the_values_back_are_not_believed() -> None:
    first, second = (Fp8LmAdamW(model(), SETTINGS) for _ in range(2))
    train(model(), first, range(2))
    wrong = {kind: dict.fromkeys(scales, 3.0) for kind, scales in first.extra_state["scale_inv"].items()}
    wrong["param"] = dict.fromkeys(wrong["param"], math.nan)
    wrong["exp_avg"] = dict.fromkeys(wrong["exp_avg"], 0.0)
    second.load_extra_state({"mu": 1.0, "scale_inv": wrong})
    for kind, tensors in first.tensors.items():
        with second.loading(kind) as empty:
            for name, tensor in empty.items():
                tensor.copy_(tensors[name])
        for name, tensor in tensors.items():
            assert torch.allclose(second.tensors[kind][name], tensor, rtol=2**-20)


def test_what_is_frozen_and_fp32_stays_as_it_is() -> None:
    """The bias of a router that no gradient reaches: in FP16 it would be another."""
    module = nn.Linear(3, 3).bfloat16()
    module.bias = nn.Parameter(torch.tensor([1.0000001, 2.0, 3.0]), requires_grad=False)
    optimizer = Fp8LmAdamW(module, SETTINGS)
    with optimizer.loading("param") as tensors:
        tensors["bias"].copy_(torch.tensor([1.0000001, 5.0, 3.0]))
    optimizer.publish()
    assert torch.equal(module.bias, torch.tensor([1.0000001, 5.0, 3.0]))
    assert optimizer.tensors["param"]["bias"].tolist() == module.bias.tolist()


@pytest.mark.parametrize("optimizer", [MasterAdamW, Fp8LmAdamW])
def test_integers_are_no_optimizer_s(optimizer: type[MasterAdamW | Fp8LmAdamW]) -> None:
    """Neither in FP16 under a scale nor in FP32 is this one there."""
    module = nn.Linear(3, 3).bfloat16()
    table = module.table = nn.Parameter(torch.tensor([2**55 + 1]), requires_grad=False)
    made = optimizer(module, SETTINGS)
    module(torch.ones(3).bfloat16()).sum().backward()
    made.collect()
    made.reduce(ALONE)
    made.step(0.1)
    assert table.tolist() == [2**55 + 1]
    assert all(list(tensors) == ["weight", "bias"] for tensors in made.tensors.values())


def test_a_rate_that_fp16_masters_round_away_is_told_before_the_run() -> None:
    """Between 2^-6 and 2^-5 FP16 keeps steps of 2^-16, whose half a smaller update does not reach; the scale is one."""
    module = nn.Linear(10, 10, bias=False).bfloat16()
    optimizer = Fp8LmAdamW(module, SETTINGS)
    weights = torch.full((10, 10), 1.5 * 2**-6)
    weights[0, 0] = 32752 * 2**-20  # its scale is a power of two
    weights[1] = 2**-10
    with optimizer.loading("param") as tensors:
        tensors["weight"].copy_(weights)
    assert not [*optimizer.notes(2**-15)]
    (note,) = optimizer.notes(2**-17 - 2**-22)
    assert "in 90% of the weights" in note
    module.weight.grad = torch.ones_like(module.weight)
    optimizer.reduce(ALONE)
    codes = optimizer._moments["weight"].kinds["param"].codes
    before = codes.clone()
    optimizer.step(0.99 * 2**-17)
    assert (codes != before).sum() == 10 and (codes[1] != before[1]).all()


@pytest.mark.parametrize("optimizer", [MasterAdamW, Fp8LmAdamW])
def test_rates_of_a_mixer_are_not_decayed_though_they_are_a_matrix(
    optimizer: type[MasterAdamW | Fp8LmAdamW],
) -> None:
    """mamba_ssm marks them so."""
    module = nn.Module()
    module.A_log, module.weight = (nn.Parameter(torch.ones(4, 2).bfloat16()) for _ in range(2))
    made = optimizer(module, replace(SETTINGS, weight_decay=0.5))
    with made.loading("param") as masters:
        for master in masters.values():
            master.fill_(1)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    made.collect()
    made.reduce(ALONE)
    made.step(0.5)
    assert module.A_log.unique().tolist() == [1] and module.weight.unique().tolist() == [0.75]
