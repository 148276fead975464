"""Which rows come when: blends in exact proportion, packing that loses nothing, and ranks that share every update."""

import warnings
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conversations import CONVERSATION, MARKING_TEMPLATE, read, tokenizer, write_rows
from hypothesis import given, settings, strategies as st
from installed import judge

from precisionctl.errors import DataError
from precisionctl.recipe import Data, Share, Train
from precisionctl.trainer.data import Blend, Feed, Order, Rows, load_data, load_rows, share_of
from precisionctl.trainer.data.order import LONGEST_PERIOD, BlendedOrder, one_period, turns_of
from precisionctl.trainer.data.rows import pack_texts
from precisionctl.trainer.parallel.world import ALONE

WEIGHTS = st.lists(st.integers(1, 40), min_size=1, max_size=5)


@pytest.mark.parametrize(
    ("weights", "turns"),
    [
        ([0.7, 0.3], [7, 3]),
        ([0.1, 0.2, 0.7], [1, 2, 7]),
        ([3, 6], [1, 2]),
        ([1.0], [1]),
        ([0.25, 1e-3], [250, 1]),
        ([1e20, 3e20], [1, 3]),
        ([1, 1e-9], [LONGEST_PERIOD, 1]),
        ([123456789.0, 876543210.0], [123457, 876543]),
    ],
)
def test_weights_are_taken_as_they_are_written(weights: list[float], turns: list[int]) -> None:
    assert turns_of(weights) == turns


@settings(deadline=None)
@given(WEIGHTS)
def test_a_period_has_each_data_set_as_often_as_its_weight_says_and_evenly_spread(weights: list[int]) -> None:
    turns = turns_of(weights)
    parts, places = one_period(turns)
    total, sets = sum(turns), len(turns)
    assert Counter(parts.tolist()) == dict(enumerate(turns))
    for part, count in enumerate(turns):
        assert places[parts == part].tolist() == list(range(count))
        taken, share = np.cumsum(parts == part), count / total
        off = np.abs(taken - share * np.arange(1, total + 1))
        assert off.max() <= 1 / 2 + share * sets / 2 + 1e-9


@settings(deadline=None)
@pytest.fixture(scope="module")
def helpers() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of what megatron-core imports from it
        return judge("megatron.core.datasets.helpers_cpp", "there are no wheels of megatron-core for every Python")


@given(weights=WEIGHTS.filter(lambda weights: len(weights) > 1), rows=st.integers(1, 500))
def test_after_any_number_of_rows_a_blend_is_within_a_row_or_two_of_megatrons(
    helpers: Any, weights: list[int], rows: int
) -> None:
    theirs, places = np.zeros(rows, np.int16), np.zeros(rows, np.int64)
    helpers.build_blending_indices(theirs, places, np.asarray(weights) / sum(weights), len(weights), rows, False)
    order = BlendedOrder([1000] * len(weights), weights, seed=0)
    ours = np.asarray(order.take(0, rows)) // 1000
    for part, weight in enumerate(weights):
        bound = 1 / 2 + weight / sum(weights) * len(weights) / 2
        apart = np.abs(np.cumsum(ours == part) - np.cumsum(theirs == part))
        assert apart.max() <= bound + len(weights)


@settings(deadline=None)
@given(WEIGHTS, st.integers(0, 3), st.integers(0, 200), st.integers(1, 30))
def test_the_position_in_a_blend_alone_says_what_comes_next(
    weights: list[int], seed: int, position: int, count: int
) -> None:
    rows = [3 + 2 * number for number in range(len(weights))]
    whole = BlendedOrder(rows, weights, seed).take(0, position + count)
    assert BlendedOrder(rows, weights, seed).take(position, count) == whole[position:]


@settings(deadline=None)
@given(WEIGHTS, st.integers(0, 3))
def test_each_data_set_of_a_blend_has_epochs_of_its_own(weights: list[int], seed: int) -> None:
    rows = [2 + number for number in range(len(weights))]
    first = [sum(rows[:number]) for number in range(len(rows))]
    taken = BlendedOrder(rows, weights, seed).take(0, 300)
    for part, count in enumerate(rows):
        mine = [number - first[part] for number in taken if first[part] <= number < first[part] + count]
        assert mine == Order(count, seed + part).take(0, len(mine))
        for start in range(0, len(mine) - count + 1, count):
            assert sorted(mine[start : start + count]) == list(range(count))


def blend_of(folder: Path, *weights: float) -> Blend:
    paths = [
        write_rows(folder / "a.jsonl", [{"text": "a " * 20}]),
        write_rows(folder / "b.jsonl", [{"text": "b " * 12}]),
        write_rows(folder / "chats.jsonl", [{"messages": CONVERSATION}]),
    ]
    shares = tuple(Share(str(path), weight) for path, weight in zip(paths, weights, strict=False))
    made = load_data(
        Data(blend=shares, sequence_length=8), tokenizer(MARKING_TEMPLATE), folder / "cache", lambda count: None
    )
    assert isinstance(made, Blend)
    return made


def test_rows_of_a_blend_are_those_of_its_data_sets(tmp_path: Path) -> None:
    blend = blend_of(tmp_path, 0.5, 0.25, 0.25)
    assert [len(part) for part in blend.parts] == [2, 1, 1] and len(blend) == 4
    batch = blend.batch(range(len(blend)))
    separate = [ids for part in blend.parts for i in range(len(part)) for ids in part.batch([i]).tokens.tolist()]
    assert batch.tokens.tolist() == separate
    words = [read(blend.batch([n]).tokens[0, :2].tolist()).split()[0] for n in blend.order(0).take(0, 8)]
    assert Counter(word if word in "ab" else "chat" for word in words) == {"a": 4, "b": 2, "chat": 2}


def test_a_blends_fingerprint_follows_tokens_and_proportions(tmp_path: Path) -> None:
    prints = [blend_of(tmp_path, *weights).fingerprint for weights in ((1, 1), (2.0, 2.0), (1, 2))]
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_share_each_update_and_together_take_what_one_process_takes(ranks: int) -> None:
    order = Order(10, seed=5)
    for position in range(0, 80, 8):
        numbers = order.take(position, 8)
        shares = [share_of(numbers, rank, ranks) for rank in range(ranks)]
        assert [number for share in shares for number in share] == numbers
        assert {len(share) for share in shares} == {8 // ranks}
        # the micro-batches of all ranks are those of one process: no row meets another neighbour
        whole = [tuple(pair) for pair in zip(numbers[::2], numbers[1::2], strict=True)]
        assert [pair for share in shares for pair in zip(share[::2], share[1::2], strict=True)] == whole


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_are_fed_the_micro_batches_of_one_process_from_any_position(tmp_path: Path, ranks: int) -> None:
    train, cpu = Train(batch_size=8, micro_batch_size=2, seed=3), torch.device("cpu")
    blend = blend_of(tmp_path, 0.5, 0.25, 0.25)
    for position in (0, 8, 40):
        whole = Feed(blend, train, cpu, ALONE).batches(position)
        worlds: list[Any] = [SimpleNamespace(data_rank=rank, data_count=ranks) for rank in range(ranks)]
        shares = [Feed(blend, train, cpu, world).batches(position) for world in worlds]
        together = [batch for share in shares for batch in share]
        assert [batch.tokens.tolist() for batch in together] == [batch.tokens.tolist() for batch in whole]
        assert [batch.labels.tolist() for batch in together] == [batch.labels.tolist() for batch in whole]


def test_rows_that_ranks_cannot_share_evenly_are_refused() -> None:
    with pytest.raises(DataError, match="8 rows of an update cannot be divided evenly among 3 ranks"):
        share_of(range(8), 0, 3)


@settings(deadline=None)
@given(st.integers(1, 50).flatmap(lambda room: st.tuples(st.just(room), st.lists(st.integers(1, room), max_size=60))))
def test_packing_loses_no_text_and_fills_no_row_beyond_its_room(made: tuple[int, list[int]]) -> None:
    room, sizes = made
    rows = pack_texts(sizes, room)
    assert sorted(text for row in rows for text in row) == list(range(len(sizes)))
    filled = sorted(sum(sizes[text] for text in row) for row in rows)
    assert not filled or filled[-1] <= room
    assert all(one + other > room for one, other in pairwise(filled))  # no two rows would fit into one


def test_conversations_share_rows_and_every_token_keeps_its_label(tmp_path: Path) -> None:
    path = write_rows(
        tmp_path / "chats.jsonl",
        [{"messages": CONVERSATION}, {"messages": CONVERSATION[:2]}, {"messages": CONVERSATION}],
    )
    single = load_rows(path, tokenizer(MARKING_TEMPLATE), 22)
    packed = load_rows(path, tokenizer(MARKING_TEMPLATE), 22, packing=True)
    assert (len(single), len(packed)) == (3, 2)
    assert "3 conversations are packed into 2 rows, 82% full" in packed.notes
    assert single.fingerprint != packed.fingerprint
    batch = packed.batch([0, 1])
    assert batch.packed is not None and batch.packed.lengths == (14, 14, 4, 14, 8, 10)
    assert targets(packed) == targets(single)
    assert batch.packed.positions(batch.tokens.device)[30:56].tolist() == [2, 3, *range(14), *range(8), 0, 1]
    assert batch.packed.cu_seqlens(batch.tokens.device).tolist() == [0, 14, 28, 32, 46, 54, 64]
    assert single.batch([0, 1]).packed is None and packed.batch([0]).packed is None


def targets(rows: Rows) -> Counter[tuple[int, int]]:
    """How often each label follows each token."""
    batch = rows.batch(range(len(rows)))
    return Counter(
        zip(batch.tokens[batch.padding_mask].tolist(), batch.labels[batch.padding_mask].tolist(), strict=True)
    )
