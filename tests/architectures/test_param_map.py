"""Every kind of row that a family has: `split` is the inverse of `merge`, and lowering moves what the row moves."""

import copy
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from precisionctl.architectures.families import architecture_of, supported
from precisionctl.architectures.head_rearrangements import KEY_PAIRS, QKV, RotaryPairs
from precisionctl.architectures.param_map import Architecture, Either, Row
from precisionctl.architectures.rearrangements import Alternating, Joined, Padded, Rearrangement
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture
from precisionctl.model.model_parts import MLA, AltUp, HyperConnections, MoE, NgramEmbedding
from precisionctl.model.model_shape import ModelShape
from precisionctl.model.recurrent_parts import GatedDeltaNet, Mamba, ShortConv
from precisionctl.model.sparse_parts import CSA, DSA, MSA
from precisionctl.param import Layout
from precisionctl.planning.segments import lower


def kind(row: Row) -> tuple[Any, ...]:
    """What `merge` and `split` depend on."""
    return len(row.hf), row.sizes, repr(row.rearrangement)


KINDS = {kind(row): row for table in supported().values() for row in table.all_rows}


MODEL = ModelShape("llama", 1, 3, 4, 4, 2, 2, 5, 5, 8)


@st.composite
def models(draw: st.DrawFn) -> ModelShape:
    """A model with every part that some row is of, whatever its family."""
    sizes = st.integers(1, 5)
    num_layers = draw(st.integers(1, 3))
    # heads have pairs, which turn
    groups, per_group, head = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.sampled_from([2, 4]))
    vocab = draw(st.integers(1, 9))
    return ModelShape(
        architecture="llama",
        num_layers=num_layers,
        hidden_size=draw(sizes),
        ffn_hidden_size=draw(sizes),
        num_attention_heads=groups * per_group,
        num_query_groups=groups,
        kv_channels=head,
        vocab_size=vocab,
        padded_vocab_size=vocab + draw(st.integers(0, 5)),
        max_position_embeddings=8,
        norm_gate_rank=draw(sizes),
        laurel_rank=draw(sizes),
        zero_centered_gamma=draw(st.booleans()),
        hf_zero_centered_gamma=draw(st.booleans()),
        mla=MLA(draw(sizes), draw(sizes), draw(sizes), 2 * draw(sizes), draw(sizes)),  # what turns are pairs
        dsa=DSA(draw(sizes), draw(sizes), draw(sizes), (True,) * num_layers, kpool=1),
        msa=MSA(groups, draw(sizes), draw(sizes), 5, draw(sizes), (True,) * num_layers),
        moe=MoE(
            *(draw(sizes), 1, draw(sizes), (True,) * num_layers),
            shared_ffn_hidden_size=draw(sizes),
            latent_size=draw(sizes),
        ),
        gdn=GatedDeltaNet(
            *((True,) * num_layers, groups, groups * per_group, head, draw(sizes), draw(sizes)),
            kda_lora_rank=draw(sizes),
        ),
        short_conv=ShortConv((False,) * num_layers, draw(sizes)),
        mamba=Mamba("M" * num_layers, groups * per_group, head, groups, draw(sizes), dt_rank=draw(sizes)),
        csa=CSA("W" * num_layers, draw(sizes), draw(sizes), groups, *(draw(sizes) for _ in range(4))),
        mhc=HyperConnections(draw(sizes), 1, lowrank=draw(sizes)),
        altup=AltUp(draw(sizes)),
        ple=NgramEmbedding((True,) * num_layers, 8, draw(sizes), 3, 2, *(draw(sizes) for _ in range(3)), 0),
        attention_output_gate=draw(st.booleans()),
        per_layer_embed_dim=draw(sizes),
        mtp_num_layers=draw(st.integers(0, 2)),
    )


def hf_parts(row: Row, model: ModelShape) -> list[Tensor]:
    """Multiples of 1/64, so that one more or less is exact in every dtype; zeros where a row fills up with these."""
    parts = [torch.randint(-64, 64, shape) / 64 for shape in row.shapes(model, "hf")]
    if isinstance(row.rearrangement, Padded):
        parts[0][row.shape(model)[0] :] = 0
    return parts


@given(model=models())
@settings(max_examples=25, deadline=None)
def test_split_is_the_inverse_of_merge(model: ModelShape) -> None:
    for row in KINDS.values():
        parts = hf_parts(row, model)
        whole = row.merge(parts, model)
        assert whole.shape == row.shape(model), row
        for part, back in zip(parts, row.split(whole, model), strict=True):
            assert torch.equal(part, back), row


@given(model=models().filter(lambda model: model.hf_zero_centered_gamma == model.zero_centered_gamma))
@settings(max_examples=25, deadline=None)
def test_lowered_segments_move_what_the_row_moves(model: ModelShape) -> None:
    moving = [row for row in KINDS.values() if row.moves_rows(model)]
    assert len(moving) > len(KINDS) / 2
    for row in moving:
        parts = hf_parts(row, model)
        names = [f"part{number}" for number in range(len(parts))]
        whole = row.merge(parts, model)
        merged = apply(row, model, dict(zip(names, parts, strict=True)), {"whole": whole.shape}, to_megatron=True)
        assert torch.equal(merged["whole"], whole), row
        shapes = {name: part.shape for name, part in zip(names, parts, strict=True)}
        split = apply(row, model, {"whole": whole}, shapes, to_megatron=False)
        for name, part in zip(names, parts, strict=True):
            assert torch.equal(split[name], part), row


def apply(
    row: Row, model: ModelShape, sources: dict[str, Tensor], shapes: dict[str, torch.Size], *, to_megatron: bool
) -> dict[str, Tensor]:
    """Do the segments by hand, on targets that start as NaN: a row that no segment covers would show."""
    layouts = ("hf", "megatron") if to_megatron else ("megatron", "hf")
    targets = {name: torch.full(shape, float("nan")) for name, shape in shapes.items()}
    for segment in lower(row, model, *layouts, {name: len(s) for name, s in sources.items()}, list(targets)):
        rows = (
            0.0 if segment.read is None else sources[segment.read][segment.read_row : segment.read_row + segment.rows]
        )
        targets[segment.write][segment.write_row : segment.write_row + segment.rows] = rows
    return targets


class PaddedInFront:
    """Two rows of zeros before each row of the table, as of positions that begin with an offset."""

    moves_single_rows = False

    def merge(self, parts: Sequence[Any], model: ModelShape) -> Any:
        (values,) = parts
        zeros = values[:1] * 0
        joined = np.concatenate if isinstance(values, np.ndarray) else torch.cat
        return joined([each for row in range(len(values)) for each in (zeros, zeros, values[row : row + 1])])

    def split(self, whole: Any, model: ModelShape) -> tuple[Any, ...]:
        return (whole[2::3],)

    def moves_rows(self, model: ModelShape) -> bool:
        return True


@pytest.mark.parametrize(
    "moved", [Alternating(), RotaryPairs(QKV), Joined(KEY_PAIRS)], ids=lambda each: type(each).__name__
)
def test_row_numbers_move_as_values_do_also_one_by_one(moved: Rearrangement) -> None:
    model = replace(MODEL, kv_channels=4, mla=MLA(None, 6, 2, 4, 2))
    count = 8 * model.num_query_groups * 2
    numbers = np.arange(count)[:, None]
    parts = moved.split(numbers, model)
    values = moved.split(torch.from_numpy(numbers), model)
    assert moved.moves_single_rows and moved.moves_rows(model)
    assert [part.tolist() for part in parts] == [part.tolist() for part in values]
    assert sum(part[:-1, 0].tolist() != (part[1:, 0] - 1).tolist() for part in parts)
    assert moved.merge(parts, model).tolist() == moved.merge(values, model).tolist() == numbers.tolist()


def test_rows_of_zeros_may_be_anywhere() -> None:
    row = Row("table", "whole", (9, 2), PaddedInFront())
    values = torch.arange(1.0, 7.0).view(3, 2)
    moved = apply(row, MODEL, {"table": values}, {"whole": torch.Size((9, 2))}, to_megatron=True)["whole"]
    assert moved.tolist() == row.rearrangement.merge([values], MODEL).tolist()
    back = apply(row, MODEL, {"whole": moved}, {"table": values.shape}, to_megatron=False)
    assert torch.equal(back["table"], values)


def test_qkv_interleaves_per_query_group_as_megatron_does() -> None:
    """An independent spelling: megatron/core/transformer/attention.py views the rows as [groups, (r+2)*head]."""
    q, k, v = torch.arange(8.0), torch.arange(100.0, 104.0), torch.arange(200.0, 204.0)
    expected = [0, 1, 2, 3, 100, 101, 200, 201, 4, 5, 6, 7, 102, 103, 202, 203]
    assert QKV.merge([q, k, v], MODEL).tolist() == expected


def test_padded_rows_are_cut_off_whatever_they_hold() -> None:
    model = ModelShape("llama", 1, 2, 4, 1, 1, 2, 3, 5, 8)
    row = next(row for row in architecture_of("llama").all_rows if "word_embeddings" in row.megatron)
    (values,) = row.split(torch.arange(10.0).view(5, 2), model)
    assert values.tolist() == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("to_megatron", [True, False])
def test_rows_of_a_vocabulary_are_not_numbered(to_megatron: bool) -> None:
    """Its size is a stranger's, and its rows stay in order."""
    model = replace(MODEL, vocab_size=(1 << 22) - 3, padded_vocab_size=1 << 22)
    row = next(row for row in architecture_of("llama").all_rows if "word_embeddings" in row.megatron)
    layouts: tuple[Layout, Layout] = ("hf", "megatron") if to_megatron else ("megatron", "hf")
    (read,), (written,) = (row.shapes(model, layout) for layout in layouts)
    tracemalloc.start()
    segments = lower(row, model, *layouts, {"a": read[0]}, ["b", "c"])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * model.vocab_size  # shapes are those of one byte for each row
    rows = {name: sum(each.rows for each in segments if each.write == name) for name in "bc"}
    assert rows == dict.fromkeys("bc", written[0])


def test_more_rows_than_a_tensor_has_are_not_numbered() -> None:
    model = replace(MODEL, num_attention_heads=1 << 22, num_query_groups=1 << 22)
    row = next(row for row in architecture_of("llama").all_rows if row.rearrangement is QKV)
    parts = {name: shape[0] for name, shape in zip("qkv", row.shapes(model, "hf"), strict=True)}
    with pytest.raises(DamagedCheckpoint, match=r"rows of `q`.*No known model has as many"):
        lower(row, model, "hf", "megatron", parts, ["whole"])


def test_an_unknown_family_is_refused_with_what_adding_one_takes() -> None:
    with pytest.raises(UnknownArchitecture, match="unsupported architecture `rwkv`.*A table is one file"):
        architecture_of("rwkv")


def test_all_spellings_of_a_row_are_one_parameter() -> None:
    """What choosing one builds on. Scales go from one to the other where both only move rows."""
    either = [each for table in supported().values() for each in table.rows if isinstance(each, Either)]
    assert either
    for each in either:
        for spelling in each.spellings:
            assert [row.megatron for row in each.first] == [row.megatron for row in spelling]
            for first, row in zip(each.first, spelling, strict=True):
                assert (first.sizes, first.parallel, first.layers) == (row.sizes, row.parallel, row.layers)
                assert (
                    first.rearrangement == row.rearrangement
                    or (first.moves_rows(MODEL) and row.moves_rows(MODEL))
                    or each.only_read
                )


def test_rearrangements_of_the_same_kind_are_equal() -> None:
    """By that it is decided whether a row's tensors keep their values under other names."""
    for row in KINDS.values():
        assert copy.deepcopy(row.rearrangement) == row.rearrangement
        assert hash(copy.deepcopy(row)) == hash(row)
    kinds = {repr(row.rearrangement): row.rearrangement for row in KINDS.values()}
    assert len(set(kinds.values())) == len(kinds) > 20


def test_every_table_names_each_tensor_once() -> None:
    for table in supported().values():
        assert isinstance(table, Architecture)
        rows = table.spelled({}, MODEL)
        where = {row: (row.layers, row.shares_kv, row.present) for row in rows}
        megatron = [(row.megatron, where[row]) for row in rows]
        hf = [(name, where[row]) for row in rows for name in row.hf]
        assert len(set(megatron)) == len(megatron)
        assert len(set(hf)) == len(hf)
