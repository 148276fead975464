"""Gradients in FP8, and their sum over ranks: against slow sums, with ranks that are threads of this process."""

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from precisionctl.trainer.optimizer import fp8_gradients
from precisionctl.trainer.optimizer.fp8_gradients import Fp8Gradients

SHAPES = {"a": (7, 5), "bias": (3,), "b": (16, 9), "norm": (1,), "unused": (4, 4)}


class Threads:
    """The part of a World that an exchange needs."""

    def __init__(self, count: int) -> None:
        self.count, self._meeting, self._said = count, threading.Barrier(count), {}
        self.moved: list[Tensor] = []
        """What the first rank handed over."""

    def rank(self, number: int) -> Any:
        said = self._said

        def all_say(value: Tensor) -> list[Tensor]:
            if number == 0:
                self.moved.append(value)
            said[number] = value.clone()
            self._meeting.wait()
            everything = [said[each] for each in range(self.count)]
            self._meeting.wait()
            return everything

        class Rank:
            rank, count = number, self.count

            def all_reduce_sum(self, values: Tensor) -> Tensor:
                return torch.stack(all_say(values)).sum(0)

            def all_reduce_max(self, values: Tensor) -> Tensor:
                return torch.stack(all_say(values)).amax(0)

            def all_to_all(self, parts: Tensor) -> Tensor:
                return torch.stack([each[number] for each in all_say(parts)])

            def all_gather(self, part: Tensor) -> Tensor:
                return torch.stack(all_say(part))

        return Rank()


def on_all(count: int, what: Callable[[Any], Any]) -> tuple[list[Any], Threads]:
    ranks, results = Threads(count), [None] * count

    def work(number: int) -> None:
        results[number] = what(ranks.rank(number))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results, ranks


def gradients(rank: int, names: Sequence[str] = ("a", "bias", "b", "norm")) -> dict[str, Tensor]:
    pick = torch.Generator().manual_seed(rank)
    return {name: torch.randn(SHAPES[name], generator=pick) * 10.0 ** (rank - 3) for name in names}


def reduced(rank: Any, mine: dict[str, Tensor], mu: float = 1.0) -> Fp8Gradients:
    made = Fp8Gradients({name: torch.zeros(shape) for name, shape in SHAPES.items()})
    made.mu = mu
    given = dict(mine)
    made.all_reduce(given, rank)
    assert not given  # let go of
    return made


def in_fp8(value: float, scale: float) -> float:
    """What E4M3 makes of one number: three bits after the first, down to 2^-9, no more than 448. Worked out in Python's
    own numbers, whose rounding is to even."""
    scaled = abs(value) * scale
    step = 2.0 ** (max(math.floor(math.log2(scaled)), -6) - 3) if scaled else 1.0
    return math.copysign(min(448.0, round(scaled / step) * step), value) / scale


def scale(values: Sequence[float]) -> float:
    largest = max(map(abs, values))
    return 2.0 ** math.floor(math.log2(448 / largest)) if largest else 1.0


def slow_sum(parts: Sequence[Sequence[float]], mu: float) -> list[float]:
    shared = min(mu * scale(part) for part in parts)  # the smallest of the ranks' is that of their largest magnitude
    sums = [sum(in_fp8(value, shared) for value in values) for values in zip(*parts, strict=True)]
    return [in_fp8(value, scale(sums)) for value in sums]


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("bucket", [1, 40, 1 << 24])
def test_every_rank_has_the_sum_that_slow_arithmetic_gives(
    count: int, bucket: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes that no number of ranks divides; tensors alone, a few together, all together."""
    monkeypatch.setattr(fp8_gradients, "BUCKET", bucket)
    mu = 0.5 if bucket == 40 else 1.0
    found, _ = on_all(count, lambda rank: reduced(rank, gradients(rank.rank), mu))
    for name in ("a", "bias", "b", "norm"):
        expected = slow_sum([gradients(rank)[name].flatten().tolist() for rank in range(count)], mu)
        for each in found:
            assert each.held[name].read().flatten().tolist() == expected
    assert all(each.held.keys() == found[0].held.keys() == {"a", "bias", "b", "norm"} for each in found)


def test_a_gradient_that_one_rank_lacks_is_that_of_the_other() -> None:
    """An expert whose tokens are all on one rank; and one that nobody used has none, which is not a zero."""
    names = [("a", "b"), ("b", "bias")]
    found, _ = on_all(2, lambda rank: reduced(rank, gradients(rank.rank, names[rank.rank])))
    for each in found:
        assert {*each.held} == {"a", "b", "bias"}
        assert torch.equal(each.held["a"].read(), alone(gradients(0, names[0])["a"]))
        assert torch.equal(each.held["bias"].read(), alone(gradients(1, names[1])["bias"]))


def alone(gradient: Tensor) -> Tensor:
    return reduced(Threads(1).rank(0), {"a": gradient}).held["a"].read()


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_no_number_on_one_rank_is_none_on_all(bad: float) -> None:
    def work(rank: Any) -> float:
        mine = gradients(rank.rank)
        mine["b"][3, 4] = bad if rank.rank else 1.0
        return reduced(rank, mine).norm()

    norms, _ = on_all(2, work)
    assert not any(map(math.isfinite, norms))


def test_a_byte_for_each_number_goes_out_and_comes_back() -> None:
    """Beside it, for each tensor, two largest magnitudes."""
    _, ranks = on_all(2, lambda rank: reduced(rank, gradients(rank.rank)))
    codes = [each for each in ranks.moved if each.dtype == torch.uint8]
    total = sum(math.prod(SHAPES[name]) for name in ("a", "bias", "b", "norm"))
    assert [each.numel() for each in codes] == [total + total % 2, (total + 1) // 2]
    assert sum(each.numel() for each in ranks.moved if each.dtype == torch.float32) == len(SHAPES) + 4


def test_mu_is_halved_when_too_many_codes_are_the_largest_and_doubles_in_a_thousand_quiet_updates() -> None:
    """Of numbers that are all the same, every code is the largest one or none is: 440 is the nearest to 448, and
    half of it to 224."""

    def work(rank: Any, value: float, mu: float = 1.0) -> tuple[float, bool]:
        made = reduced(rank, {"a": torch.full(SHAPES["a"], value)}, mu)
        saturated = bool((made.held["a"].codes.float() == 448).any())
        made.end_update()
        assert not made.held
        return made.mu, saturated

    halved, _ = on_all(2, lambda rank: work(rank, 440.0))
    assert [mu for mu, _ in halved] == [0.5, 0.5]
    quiet, _ = on_all(2, lambda rank: work(rank, 400.0))
    assert [mu**1000 for mu, _ in quiet] == pytest.approx([2.0, 2.0])
    clipped, _ = on_all(2, lambda rank: work(rank, 400.0, mu=1.5))
    assert [mu for mu, _ in clipped] == [0.75, 0.75]


def test_gradients_that_were_only_looked_at_leave_mu_as_it_is() -> None:
    def work(rank: Any) -> float:
        made = reduced(rank, {"a": torch.full(SHAPES["a"], 440.0)})
        made.clear()
        made.end_update()
        return made.mu

    assert on_all(2, work)[0] == [1.0, 1.0]


def test_one_process_exchanges_nothing() -> None:
    found, ranks = on_all(1, lambda rank: reduced(rank, {"a": torch.full(SHAPES["a"], 440.0)}))
    found[0].end_update()
    assert not ranks.moved and found[0].mu == 1.0


def test_gradients_shrink_by_their_scale() -> None:
    made = reduced(Threads(1).rank(0), {"a": torch.tensor([448.0, 2.0])})
    assert made.held["a"].read().tolist() == [448.0, 2.0]
    codes = made.held["a"].codes.view(torch.uint8).clone()
    made.scale_by(1 / 3)
    assert made.norm() == pytest.approx(math.hypot(448, 2) / 3)
    assert torch.equal(made.held["a"].codes.view(torch.uint8), codes)
