"""A Megatron checkpoint's optimizer, to be compared parameter by parameter."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from precisionctl.checkpoints.base import Chunk, Reader, in_pieces, read_rows
from precisionctl.errors import DamagedCheckpoint
from precisionctl.param import TensorSpec
from precisionctl.planning.make_plan import OptimizerSource
from precisionctl.verify.hf_tensors import PIECE, StoredRows

_OF_VOCABULARY = (".embedding.word_embeddings.weight", ".output_layer.weight", ".output_layer.bias")


class OptimizerTensors:
    """`optimizer.state.<kind>.<parameter>` of a checkpoint, without the rows that pad a vocabulary. Raises
    DamagedCheckpoint where they are not of the model's parameters."""

    def __init__(self, reader: Reader) -> None:
        self._stored = _Stored(reader)
        self.specs = {name: _without_padding(name, spec, reader) for name, spec in self._stored.specs.items()}

    def dtype(self, name: str) -> str:
        return str(self.specs[name].dtype).removeprefix("torch.")

    def nbytes(self, name: str) -> int:
        return self._stored.specs[name].nbytes if name in self.specs else 0

    def pieces(self, name: str) -> Iterator[tuple[int, int]]:
        spec = self.specs[name]
        return in_pieces(0, spec.rows, spec.columns, PIECE)

    def read(self, name: str, row: int, rows: int) -> StoredRows:
        return StoredRows(read_rows(self._stored, name, row, rows), None)


class _Stored:
    """An optimizer's tensors as something that chunks are read of."""

    def __init__(self, reader: Reader) -> None:
        self.specs: Mapping[str, TensorSpec] = reader.optimizer_specs if isinstance(reader, OptimizerSource) else {}
        self._reader = reader

    def chunks(self, name: str) -> Sequence[Chunk]:
        return self._reader.chunks(name)


def _without_padding(name: str, spec: TensorSpec, reader: Reader) -> TensorSpec:
    model = reader.model
    if name.endswith(_OF_VOCABULARY) and spec.shape[:1] == (model.padded_vocab_size,):
        return replace(spec, shape=(model.vocab_size, *spec.shape[1:]))
    return spec


def both_optimizers(a: Reader, b: Reader) -> tuple[OptimizerTensors, OptimizerTensors] | str:
    """The optimizers of two checkpoints, or why they cannot be compared; "" where neither has one."""
    try:
        left, right = OptimizerTensors(a), OptimizerTensors(b)
    except DamagedCheckpoint as damage:
        return damage.what
    if left.specs and right.specs:
        return left, right
    return f"only {'A' if left.specs else 'B'} has one" if left.specs or right.specs else ""
