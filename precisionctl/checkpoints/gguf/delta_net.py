"""Where the rows of a gated delta net stand in GGUF, and in Hugging Face (Qwen3-Next, Qwen3.5).

Source: llama.cpp's converter, conversion/qwen.py of llama-cpp-python 0.3.36 (modify_tensors).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from precisionctl.architectures.rearrangements import Movable, concatenated, cut_into, rows_of_groups
from precisionctl.checkpoints.tensor_changes import OfColumns, RowMove
from precisionctl.errors import DamagedCheckpoint
from precisionctl.model.model_shape import ModelShape


class DeltaNetInGguf(RowMove):
    """The input projection of a gated delta net: in GGUF all queries, then all keys, then all values, and a tensor of
    output gates; in Hugging Face one that goes by key head (Qwen3-Next)."""

    def to_parts(self, values: Movable, model: ModelShape) -> tuple[Movable, ...]:
        heads, sizes = self._by_head(model)
        if len(values) != heads * sum(sizes):
            raise DamagedCheckpoint(f"{len(values)} rows are no {heads} heads of {sum(sizes)}")
        by_head = values.reshape(heads, sum(sizes), *values.shape[1:])
        query, key, value, gate = map(rows_of_groups, cut_into(by_head, sizes, 1))
        return concatenated([query, key, value]), gate

    def to_hf(self, parts: Sequence[Movable], model: ModelShape) -> Movable:
        heads, sizes = self._by_head(model)
        kinds = cut_into(concatenated(parts), [heads * size for size in sizes])
        by_head = [kind.reshape(heads, -1, *kind.shape[1:]) for kind in kinds]
        return rows_of_groups(concatenated(by_head, 1))

    def _by_head(self, model: ModelShape) -> tuple[int, list[int]]:
        """The number of key heads, and for each the rows of queries, keys, values and gates."""
        assert model.gdn
        heads = model.gdn.num_key_heads
        return heads, [size // heads for size in model.gdn.in_proj_parts[:4]]


@dataclass(frozen=True)
class ValueHeadsInTurns(RowMove):
    """Heads of values of a gated delta net, and what belongs to one: in GGUF the first of each key head, then the
    second of each; in Hugging Face all of a key head, then those of the next (Qwen3.5). With `behind_keys` the rows of
    queries and keys stand before."""

    behind_keys: bool = False

    def to_parts(self, values: Movable, model: ModelShape) -> tuple[Movable, ...]:
        assert model.gdn
        heads = model.gdn.num_key_heads
        return (self._exchanged(values, (heads, model.gdn.num_value_heads // heads), model),)

    def to_hf(self, parts: Sequence[Movable], model: ModelShape) -> Movable:
        assert model.gdn
        heads = model.gdn.num_key_heads
        return self._exchanged(parts[0], (model.gdn.num_value_heads // heads, heads), model)

    def _exchanged(self, rows: Movable, order: tuple[int, int], model: ModelShape) -> Movable:
        assert model.gdn
        keys = 2 * model.gdn.key_size if self.behind_keys else 0
        if len(rows) <= keys or (len(rows) - keys) % model.gdn.num_value_heads:
            raise DamagedCheckpoint(f"{len(rows) - keys} rows are no {model.gdn.num_value_heads} heads of values")
        before, values = cut_into(rows, [keys, len(rows) - keys])
        moved = values.reshape(*order, -1, *values.shape[1:]).swapaxes(0, 1).reshape(values.shape)
        return concatenated([before, moved])


DELTA_NET = DeltaNetInGguf()
VALUE_HEADS = ValueHeadsInTurns()
DELTA_NET_INPUT = ValueHeadsInTurns(behind_keys=True)
DELTA_NET_OUTPUT = OfColumns(VALUE_HEADS)
