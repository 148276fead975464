"""Rearrangements that go by heads of attention: queries, keys and values in groups, and the rows that turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from precisionctl.architectures.rearrangements import (
    Movable,
    MovesRows,
    MovesSingleRows,
    Rearrangement,
    check_pairs,
    concatenated,
    cut_into,
    pairs_exchanged,
    rows_of_groups,
)
from precisionctl.model.model_shape import ModelShape


@dataclass(frozen=True)
class Grouped(MovesRows):
    """Query, key and value, interleaved per query group: `[q_0 .. q_{r-1}, k, v]`, each of `kv_channels` rows, or a
    value of `v_head_dim`.

    With an output gate, Hugging Face's queries are `q_0, gate_0, q_1, gate_1, ...`, and Megatron's groups
    `[q_0 .. q_{r-1}, gate_0 .. gate_{r-1}, k, v]`. No rotary permutation: both sides rotate halves. Where keys are
    values, there is no value.
    """

    def merge(self, parts: Sequence[Movable], model: ModelShape) -> Movable:
        query, *others = (part.reshape(model.num_query_groups, -1, *part.shape[1:]) for part in parts)
        if model.attention_output_gate:
            query = self._with_gates(query, (-1, 2), model)
        return rows_of_groups(concatenated([query, *others], 1))

    def split(self, whole: Movable, model: ModelShape) -> tuple[Movable, ...]:
        grouped = whole.reshape(model.num_query_groups, -1, *whole.shape[1:])
        sizes: list[int] = [model.kv_channels, *([] if model.keys_are_values else [model.value_channels])]
        query, *others = cut_into(grouped, [grouped.shape[1] - sum(sizes), *sizes], 1)
        if model.attention_output_gate:
            query = self._with_gates(query, (2, -1), model)
        return tuple(rows_of_groups(part) for part in (query, *others))

    def _with_gates(self, query: Movable, order: tuple[int, int], model: ModelShape) -> Movable:
        """Queries and gates of groups, `[groups, rows, ...]`, in the other order than (of heads, of both) this one."""
        heads = query.reshape(query.shape[0], *order, model.kv_channels, *query.shape[2:])
        return heads.swapaxes(1, 2).reshape(query.shape)


@dataclass(frozen=True)
class GroupedTurnedBack(Grouped):
    """The same of a model whose rotary pairs turn the other way (nanochat): the halves of each head of queries and keys
    change places, and turn as Megatron's do. Raises DamagedCheckpoint for heads of an odd number of channels."""

    def merge(self, parts: Sequence[Movable], model: ModelShape) -> Movable:
        query, key, value = parts
        return super().merge((self._swapped(query, model), self._swapped(key, model), value), model)

    def split(self, whole: Movable, model: ModelShape) -> tuple[Movable, ...]:
        query, key, value = super().split(whole, model)
        return self._swapped(query, model), self._swapped(key, model), value

    def _swapped(self, rows: Movable, model: ModelShape) -> Movable:
        check_pairs(model.kv_channels)
        halves = rows.reshape(-1, 2, model.kv_channels // 2, *rows.shape[1:])
        return halves[:, [1, 0]].reshape(rows.shape)


@dataclass(frozen=True)
class GroupedWithGate(MovesRows):
    """The same with an output gate that is a tensor of its own in Hugging Face: query, gate, key and value, each of all
    heads (AFMoE)."""

    def merge(self, parts: Sequence[Movable], model: ModelShape) -> Movable:
        return rows_of_groups(
            concatenated([part.reshape(model.num_query_groups, -1, *part.shape[1:]) for part in parts], 1)
        )

    def split(self, whole: Movable, model: ModelShape) -> tuple[Movable, ...]:
        grouped = whole.reshape(model.num_query_groups, -1, *whole.shape[1:])
        queries = model.num_attention_heads // model.num_query_groups * model.kv_channels
        sizes = [queries, queries, model.kv_channels, model.kv_channels]
        return tuple(rows_of_groups(part) for part in cut_into(grouped, sizes, 1))


@dataclass(frozen=True)
class GroupedThenGates(MovesRows):
    """Query, key and value as above, and behind those of all groups a row for the gate of each head, which is a tensor
    of its own in Hugging Face (Step 3.5)."""

    def merge(self, parts: Sequence[Movable], model: ModelShape) -> Movable:
        grouped: Movable = QKV.merge(parts[:-1], model)
        return concatenated([grouped, parts[-1]])

    def split(self, whole: Movable, model: ModelShape) -> tuple[Movable, ...]:
        parts: list[Movable] = cut_into(whole, model.qkv_parts)
        query, key, value = QKV.split(parts[0], model)
        return query, key, value, parts[1]


@dataclass(frozen=True)
class RotaryPairs(MovesSingleRows):
    """Query, key and value of another rearrangement, in which the two numbers of a rotary pair are neighbouring rows of
    queries and keys, as in torchtitan. Hugging Face and Megatron have all first numbers of a head, then all second
    ones."""

    inner: Rearrangement

    def merge(self, parts: Sequence[Movable], model: ModelShape) -> Movable:
        whole: Movable = self.inner.merge(parts, model)
        return self._exchanged(whole, as_neighbours=False, model=model)

    def split(self, whole: Movable, model: ModelShape) -> tuple[Movable, ...]:
        return self.inner.split(self._exchanged(whole, as_neighbours=True, model=model), model)

    def _exchanged(self, whole: Movable, *, as_neighbours: bool, model: ModelShape) -> Movable:
        """Megatron's tensor, with the pairs of queries and keys of each group."""
        groups = whole.reshape(model.num_query_groups, -1, *whole.shape[1:])
        turning, values = cut_into(groups, [groups.shape[1] - model.value_channels, model.value_channels], 1)
        heads = turning.reshape(-1, model.kv_channels, *whole.shape[1:])
        moved = pairs_exchanged(heads, as_neighbours=as_neighbours).reshape(turning.shape)
        return rows_of_groups(concatenated([moved, values], 1))


@dataclass(frozen=True)
class LatentPairs(MovesSingleRows):
    """The rows of latent attention that rotary embeddings turn, the last of each head, or of the one key that all heads
    share. Hugging Face has all first numbers of the pairs, then all second ones (MiniCPM3); Megatron's latent attention
    takes neighbouring rows for a pair."""

    by_head: bool

    def merge(self, parts: Sequence[Movable], model: ModelShape) -> Movable:
        return self._exchanged(parts[0], as_neighbours=True, model=model)

    def split(self, whole: Movable, model: ModelShape) -> tuple[Movable, ...]:
        return (self._exchanged(whole, as_neighbours=False, model=model),)

    def _exchanged(self, rows: Movable, *, as_neighbours: bool, model: ModelShape) -> Movable:
        assert model.mla
        heads = rows.reshape(model.num_attention_heads if self.by_head else 1, -1, *rows.shape[1:])
        turned = model.mla.qk_pos_emb_head_dim
        plain, pairs = cut_into(heads, [heads.shape[1] - turned, turned], 1)
        return rows_of_groups(concatenated([plain, pairs_exchanged(pairs, as_neighbours=as_neighbours)], 1))


@dataclass(frozen=True)
class TurnedFirst(MovesRows):
    """The rows of an indexer that rotary embeddings turn, of each head, or of the one key that all share. They are the
    last in Hugging Face (Hunyuan 4), and the first in Megatron's."""

    by_head: bool

    def merge(self, parts: Sequence[Movable], model: ModelShape) -> Movable:
        return self._exchanged(parts[0], -self._turned(model), model)

    def split(self, whole: Movable, model: ModelShape) -> tuple[Movable, ...]:
        return (self._exchanged(whole, self._turned(model), model),)

    def _turned(self, model: ModelShape) -> int:
        assert model.mla
        return model.mla.qk_pos_emb_head_dim

    def _exchanged(self, rows: Movable, at: int, model: ModelShape) -> Movable:
        """Each head's rows from this one on, then those before it."""
        assert model.dsa
        heads = rows.reshape(model.dsa.n_heads if self.by_head else 1, -1, *rows.shape[1:])
        return rows_of_groups(concatenated([heads[:, at:], heads[:, :at]], 1))


QKV = Grouped()
QKV_TURNED_BACK = GroupedTurnedBack()
QGKV = GroupedWithGate()
QKV_GATES = GroupedThenGates()
QUERY_PAIRS = LatentPairs(by_head=True)
KEY_PAIRS = LatentPairs(by_head=False)
INDEX_QUERIES = TurnedFirst(by_head=True)
INDEX_KEYS = TurnedFirst(by_head=False)
