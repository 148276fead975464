"""Optimizers of two checkpoints, to be compared parameter by parameter: under Megatron's names where both have them,
else under Hugging Face's."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from precisionctl.architectures.families import table_of
from precisionctl.checkpoints.base import OfOptimizer, Reader, WithOptimizer
from precisionctl.checkpoints.chunks import in_pieces, read_bytes
from precisionctl.errors import CheckpointError, MappingError
from precisionctl.param import STATE, TensorSpec, kind_and_parameter
from precisionctl.planning.make_plan import make_plan
from precisionctl.verify.hf_tensors import PIECE, HfTensors, StoredRows
from precisionctl.verify.not_compared import NotCompared


class OptimizerTensors:
    """`optimizer.state.<kind>.<parameter>` of a checkpoint, without the rows that pad a vocabulary. Raises
    DamagedCheckpoint where they are not of the model's parameters."""

    def __init__(self, reader: Reader) -> None:
        assert isinstance(reader, OfOptimizer)
        self._stored = WithOptimizer(reader)
        self.specs = dict(reader.optimizer_specs)
        model = reader.model
        rows = table_of(model).spelled({}, model)
        padded = {row.megatron for row in rows if row.sizes[:1] == ("padded_vocab_size",)}
        for name, spec in reader.optimizer_specs.items():
            if kind_and_parameter(name)[1] in padded and spec.shape[:1] == (model.padded_vocab_size,):
                self.specs[name] = replace(spec, shape=(model.vocab_size, *spec.shape[1:]))

    def dtype(self, name: str) -> str:
        return self.specs[name].dtype.value

    def nbytes(self, name: str) -> int:
        return self._stored.specs[name].nbytes if name in self.specs else 0

    def rows_together(self, name: str) -> int:
        return 1

    def pieces(self, name: str, together: int = 1) -> Iterator[tuple[int, int]]:
        spec = self.specs[name]
        return in_pieces(0, spec.rows, spec.columns, PIECE)

    def read(self, name: str, row: int, rows: int) -> StoredRows:
        return StoredRows(read_bytes(self._stored, name, row, rows), self.specs[name].dtype, None)


def _optimizer_specs(reader: Reader) -> Mapping[str, TensorSpec]:
    return reader.optimizer_specs if isinstance(reader, OfOptimizer) else {}


def _by_hf_names(reader: Reader) -> HfTensors:
    """An optimizer by Hugging Face's names, with a weight that has no master as its own."""
    plan = make_plan(reader, "hf", naming="as saved", optimizer=True)
    jobs = tuple(job for job in plan.jobs if job.name.startswith(STATE))
    targets = {name: plan.targets[name] for job in jobs for name in job.writes}
    assert isinstance(reader, OfOptimizer)
    return HfTensors(WithOptimizer(reader), replace(plan, jobs=jobs, targets=targets))


Tensors = HfTensors | OptimizerTensors


def both_optimizers(a: Reader, b: Reader) -> tuple[list[tuple[Tensors, Tensors]], list[NotCompared]]:
    """The optimizers of two checkpoints as a pair, or none, and why if one has any."""
    why = "one optimizer"
    try:
        left, right = (bool(_optimizer_specs(reader)) for reader in (a, b))
        if left != right:
            return [], [NotCompared(why, f"only {'A' if left else 'B'} has one")]
        if not left:
            return [], []
        if a.layout == b.layout == "megatron":
            return [(OptimizerTensors(a), OptimizerTensors(b))], []
        return [(_by_hf_names(a), _by_hf_names(b))], []
    except (CheckpointError, MappingError) as error:
        return [], [NotCompared(why, error.what)]
