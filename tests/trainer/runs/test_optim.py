"""AdamW over FP32 masters, and learning rates worked out by hand."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from precisionctl.recipe import Optimizer, Recipe, Schedule, Train
from precisionctl.trainer.optimizer.adamw import MasterAdamW
from precisionctl.trainer.optimizer.learning_rate import learning_rate, misfit, rates_in_words

SETTINGS = Optimizer(lr=0.01, beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1, clip_norm=0.0)


def model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)).to(dtype)


def backward(module: nn.Module, seed: int) -> None:
    inputs = torch.randn(6, 5, generator=torch.Generator().manual_seed(seed)).to(next(module.parameters()).dtype)
    module(inputs).square().sum().backward()


def adamw_by_hand(weights: list[torch.Tensor], gradients: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """Loshchilov and Hutter (2019), algorithm 2, in FP64; vectors are not decayed."""
    result = []
    for i, weight in enumerate(weights):
        w = weight.double()
        m = v = torch.zeros_like(w)
        for t, step in enumerate(gradients, start=1):
            g = step[i].double()
            m = 0.9 * m + 0.1 * g
            v = 0.95 * v + 0.05 * g * g
            decay = 0.1 if w.dim() > 1 else 0.0
            w = w - 0.01 * (m / (1 - 0.9**t) / ((v / (1 - 0.95**t)).sqrt() + 1e-8) + decay * w)
        result.append(w)
    return result


def test_updates_are_the_papers_arithmetic_and_neither_biases_nor_norms_are_decayed() -> None:
    module = model(torch.float32)
    start = [p.detach().clone() for p in module.parameters()]
    optimizer = MasterAdamW(module, SETTINGS)
    gradients = []
    for seed in range(5):
        backward(module, seed)
        gradients.append([p.grad.clone() for p in module.parameters() if p.grad is not None])
        optimizer.collect()
        optimizer.step(0.01)
    for found, expected in zip(module.parameters(), adamw_by_hand(start, gradients), strict=True):
        torch.testing.assert_close(found.detach().double(), expected, rtol=1e-6, atol=1e-7)


def test_the_masters_of_a_bf16_model_move_where_bf16_alone_would_stand_still() -> None:
    module = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    nn.init.constant_(module.weight, 1.0)
    optimizer = MasterAdamW(module, Optimizer(weight_decay=0.0))
    for _ in range(50):
        module.weight.grad = torch.ones_like(module.weight)
        optimizer.collect()
        optimizer.step(1e-4)  # a BF16 number next to 1 is 2**-8 = 0.0039 away
    assert optimizer.masters["weight"].item() == pytest.approx(1 - 50e-4, abs=1e-6)
    assert module.weight.item() == optimizer.masters["weight"].bfloat16().item() != 1.0


class Calls(TorchDispatchMode):
    """Counts what would be a kernel or more."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        name = function.__name__.partition(".")[0]
        self.counted[name] += name not in ("detach", "empty_like", "view", "alias", "unbind")
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize("skip", [None, torch.tensor(False), torch.tensor(True)], ids=str)
def test_an_update_of_many_parameters_is_as_many_calls_as_one_of_few(skip: torch.Tensor | None) -> None:
    """But that gradients of the first pass are widened one by one, which takes less memory."""
    counted = []
    for layers in (2, 20):
        module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers))).to(torch.bfloat16)
        optimizer = MasterAdamW(module, Optimizer(clip_norm=0.1))
        with Calls() as calls:
            for _ in range(2):
                for parameter in module.parameters():
                    parameter.grad = parameter.detach()
                optimizer.collect()
            optimizer.clip()
            optimizer.step(0.01, skip)
        assert calls.counted.pop("_to_copy") == 2 * layers + (skip is not None)
        counted.append(calls.counted)
    assert counted[0] == counted[1]
    assert counted[0]["_fused_adamw_"] == 2  # matrices, and vectors, which are not decayed


def test_an_update_that_is_skipped_changes_nothing_and_is_not_counted() -> None:
    plain, skipping = model(torch.bfloat16), model(torch.bfloat16)
    optimizers = MasterAdamW(plain, SETTINGS), MasterAdamW(skipping, SETTINGS)
    for seed in range(4):
        for module, optimizer in zip((plain, skipping), optimizers, strict=True):
            backward(module, seed)
            optimizer.collect()
            optimizer.step(0.01, torch.tensor(False))
        backward(skipping, 99)
        for parameter in skipping.parameters():
            assert parameter.grad is not None
            parameter.grad.fill_(torch.nan)
        optimizers[1].collect()
        optimizers[1].step(0.01, torch.tensor(True))
        assert not optimizers[1].gradients
    assert optimizers[0].steps == optimizers[1].steps == 4
    for kind, tensors in optimizers[0].tensors.items():
        assert all(torch.equal(tensor, optimizers[1].tensors[kind][name]) for name, tensor in tensors.items())
    assert all(map(torch.equal, plain.parameters(), skipping.parameters()))


def test_gradients_of_micro_batches_are_summed_in_fp32() -> None:
    module = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    optimizer = MasterAdamW(module, SETTINGS)
    for gradient in (256.0, 1.0, 1.0):  # in BF16, 256 + 1 is 256
        module.weight.grad = torch.full_like(module.weight, gradient)
        optimizer.collect()
    assert optimizer.clip() == 258.0


def test_clipping_bounds_the_norm_over_all_parameters_and_reports_it_from_before() -> None:
    module = model(torch.float32)
    optimizer = MasterAdamW(module, Optimizer(clip_norm=0.5))
    backward(module, 0)
    expected = sum(p.grad.double().square().sum() for p in module.parameters() if p.grad is not None) ** 0.5
    optimizer.collect()
    assert optimizer.clip() == pytest.approx(float(expected))
    assert optimizer.clip() == pytest.approx(0.5, rel=1e-4)


def test_an_optimizer_rebuilt_from_its_tensors_goes_on_to_the_last_bit() -> None:
    whole, halves = model(torch.bfloat16), model(torch.bfloat16)
    train(whole, MasterAdamW(whole, SETTINGS), range(6))
    first = MasterAdamW(halves, SETTINGS)
    train(halves, first, range(3))
    second = MasterAdamW(halves, SETTINGS)
    for kind, tensors in second.tensors.items():
        for name, tensor in tensors.items():
            tensor.copy_(first.tensors[kind][name])
    second.steps = first.steps
    second.publish()
    train(halves, second, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), halves.parameters(), strict=True))


def train(module: nn.Module, optimizer: MasterAdamW, seeds: range) -> None:
    for seed in seeds:
        backward(module, seed)
        optimizer.collect()
        optimizer.step(0.01)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        # warm-up over 2 of 10 steps, then the kind; cos(pi k / 8) by hand: 1 at k = 0, 0 at 4, -1 at 8
        (Schedule("cosine", warmup_steps=2, min_ratio=0.2), {1: 0.5, 2: 1.0, 6: 0.6, 10: 0.2, 12: 0.2}),
        (Schedule("wsd", 2, decay_steps=4, min_ratio=0.2), {1: 0.5, 2: 1.0, 6: 1.0, 7: 0.8, 8: 0.6, 10: 0.2, 12: 0.2}),
        (Schedule("constant", warmup_steps=4), {1: 0.25, 3: 0.75, 4: 1.0, 10: 1.0, 12: 1.0}),
        (Schedule("wsd", 0, decay_steps=0), {1: 1.0, 9: 1.0}),
        (Schedule("cosine", 0, min_ratio=0.0), {5: 0.5, 10: 0.0}),
    ],
)
def test_learning_rates_are_those_worked_out_by_hand(schedule: Schedule, expected: dict[int, float]) -> None:
    for step, share in expected.items():
        assert learning_rate(step, 10, 3.0, schedule) == pytest.approx(3.0 * share)


@pytest.mark.parametrize(
    ("schedule", "begun", "words"),
    [
        (Schedule("cosine", 2, min_ratio=0.2), 0, "1.50e+00 in step 1, 3.00e+00 in step 2, 6.00e-01 in step 10"),
        (Schedule("cosine", 2, min_ratio=0.2), 5, "1.80e+00 in step 6, 6.00e-01 in step 10"),
        (Schedule("cosine", 2, min_ratio=0.2), 9, "6.00e-01 in step 10"),
        (Schedule("wsd", 2, 4, 0.2), 2, "3.00e+00 in step 3, 3.00e+00 in step 6, 6.00e-01 in step 10"),
        (Schedule("cosine", 40), 0, "7.50e-02 in step 1, 7.50e-01 in step 10"),
    ],
)
def test_a_run_s_rates_are_told_at_its_ends_and_turns(schedule: Schedule, begun: int, words: str) -> None:
    recipe = Recipe(train=Train(steps=10), optimizer=Optimizer(lr=3.0), schedule=schedule)
    assert rates_in_words(begun, recipe, None) == words


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (
            Schedule("cosine", 40),
            "warmup_steps 40 is not below train.steps 10: the rate only rises, to 7.50e-01",
        ),
        (
            Schedule("constant", 10),
            "warmup_steps 10 is not below train.steps 10: the rate only rises, to 3.00e+00",
        ),
        (
            Schedule("wsd", 4, 7),
            "warmup_steps 4 and schedule.decay_steps 7 are together more than train.steps",
        ),
        (Schedule("cosine", 9), ""),
        (Schedule("wsd", 4, 6), ""),
    ],
)
def test_a_schedule_that_does_not_fit_its_run_is_told(schedule: Schedule, words: str) -> None:
    told = misfit(Recipe(train=Train(steps=10), optimizer=Optimizer(lr=3.0), schedule=schedule))
    assert words in told and bool(told) == bool(words)
