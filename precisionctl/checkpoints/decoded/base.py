"""DecodedWeights: the weights of a directory whose codes are read as BF16 values, decoded as their rows are read.

There is no way back to such codes. A new kind is a subclass in this folder, and a line of `methods.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from precisionctl.architectures.config_keys import is_on
from precisionctl.checkpoints.base import NO_WAY_BACK
from precisionctl.checkpoints.chunks import Chunk, in_pieces, whole
from precisionctl.checkpoints.hf_directory.safetensors_file import StoredTensors
from precisionctl.codes import numerics
from precisionctl.codes.elements import Cast
from precisionctl.dtypes import DType
from precisionctl.errors import DamagedCheckpoint, PrecisionError, at, shown
from precisionctl.param import TensorSpec
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor

FROM_THE_RELEASE = "Let the tool that made them decode them, or start from the release in BF16."
"""What to do about codes that are not read."""

PIECE = 1 << 20
"""Values that are decoded at once, for which several times as much memory is needed."""

_MOST_NUMBERS = 1 << 24
"""Numbers of a module's codebooks, which are in memory while its weight is read. Published ones have up to 2^20."""

_Made = TypeVar("_Made")


class DecodedWeights(ABC):
    """The coded weights among the `stored` tensors of a directory with this config.json.

    A subclass finds them in its constructor, without reading values: the `shapes` of the weights by name, the stored
    tensors that they are `read` from, and the `kinds` of codes in words. Raises PrecisionError for a config or a kind
    of codes that is not read, DamagedCheckpoint for tensors that contradict one another.
    """

    shapes: Mapping[str, tuple[int, ...]]
    read: Set[str]
    kinds: Set[str]
    behind: Set[str] = frozenset()
    """Those among `read` that say nothing of values, such as scales of inputs."""
    way_back: str = NO_WAY_BACK
    """Whether the codes can be made again, as a sentence."""

    def __init__(self, stored: StoredTensors, config: Mapping[str, Any], where: object) -> None:
        self._stored, self._config, self._where = stored, config, where
        self._kept: tuple[str, Any] | None = None
        quantization = config["quantization_config"]
        self.method: str = quantization["quant_method"]
        self._find(quantization)
        self.specs = {name: TensorSpec(shape, DType.bfloat16) for name, shape in self.shapes.items()}

    @abstractmethod
    def _find(self, quantization: Mapping[str, Any]) -> None:
        """Set `shapes`, `read` and `kinds`."""

    @abstractmethod
    def _values(self, name: str, row: int, rows: int) -> tuple[Tensor, str]:
        """The values of a few rows, one after the other, in a dtype of floats; and the tensor of their scales."""

    def rows(self, name: str, row: int, rows: int) -> Tensor:
        """Rows `[row, row + rows)` of a weight, BF16. Raises DamagedCheckpoint for values that are infinite or NaN."""
        return self._decoded(name, row, rows, self.specs[name].columns)

    def _decoded(self, name: str, row: int, rows: int, columns: int) -> Tensor:
        """Rows of codes with so many columns, as `rows`."""
        made = []
        for first, count in in_pieces(row, rows, columns, PIECE):
            values, scales = self._values(name, first, count)
            rounded = values.view(count, columns).bfloat16()
            amax, has_nan = numerics.amax_and_nan(rounded)  # isfinite takes longer than decoding
            if has_nan or bool(amax.isinf()):
                what = f"`{name}` has values that are infinite or NaN, by its codes and {scales}"
                raise self._damaged(scales, what)
            made.append(rounded)
        return torch.cat(made)

    def cast(self, name: str) -> Cast | None:
        """How the codes of a weight are made of values; None where that is not known here."""
        return None

    def _once(self, name: str, make: Callable[[str], _Made]) -> _Made:
        """What is made of a module's or weight's name, kept until another one is asked for: the rows of a weight are
        read one after the other."""
        if self._kept is None or self._kept[0] != name:
            self._kept = name, make(name)
        made: _Made = self._kept[1]
        return made

    def _modules_with(self, *kinds: str) -> list[str]:
        """The modules that have a stored tensor of one of these kinds, `module.kind`."""
        ends = [f".{kind}" for kind in kinds]
        return sorted({name.removesuffix(end) for name in self._stored.specs for end in ends if name.endswith(end)})

    def _present(self, name: str) -> TensorSpec:
        """A stored tensor. Raises DamagedCheckpoint if it is not there."""
        if name not in self._stored.specs:
            raise self._damaged(name, f"no {name} for its codes", "Is every shard there?")
        return self._stored.specs[name]

    def _check(self, name: str, shape: tuple[int, ...], *dtypes: DType) -> None:
        """Raise DamagedCheckpoint for a tensor that is not there, or of another shape or dtype."""
        spec = self._present(name)
        if spec.shape != shape or spec.dtype not in dtypes:
            wanted = f"{' or '.join(map(str, dtypes))} of {shown(shape)}"
            raise self._damaged(name, f"{name} is {spec.stored_dtype} of shape {shown(spec.shape)}, not {wanted}")

    def _check_small(self, name: str) -> None:
        """Raise PrecisionError for codebooks of more numbers than are kept in memory."""
        spec = self._stored.specs[name]
        if spec.rows * spec.columns > _MOST_NUMBERS:
            raise self._unread(f"{name} has {spec.rows * spec.columns:,} numbers, which are not read")

    def _check_alone(self, weight: str, codes: str) -> None:
        """Raise DamagedCheckpoint for a weight that is there as values, beside its codes."""
        if weight in self._stored.specs:
            raise self._damaged(weight, f"{weight} is there as values, and as codes: {codes}")

    def _checked_scales(self, name: str, scales: Tensor, *, over: bool = False) -> Tensor:
        """What is stored as scales that no writer makes negative. Raises DamagedCheckpoint for one that is negative,
        infinite or NaN, or, of those that values are divided by (`over`), 0: not every value shows these."""
        if not bool((scales.isfinite() & (scales > 0 if over else scales >= 0)).all()):
            raise self._damaged(name, f"{name} holds a scale that is {'0, ' if over else ''}negative, infinite or NaN")
        return scales

    def _damaged(self, name: str, what: str, do: str = "") -> DamagedCheckpoint:
        """The error for a stored tensor, which names its file; for one that is not there, the folder of the others."""
        places = self._stored.places
        where = places[name][0] if name in places else next(iter(places.values()))[0].parent
        return DamagedCheckpoint(what, where=where, do=do)

    def _switch(self, said: Mapping[str, Any], key: str, usual: bool) -> bool:
        """A setting as `config_keys.is_on` reads it, except that null leaves it at the `usual` one, which may be on."""
        with at(self._where):
            return is_on({} if said.get(key) is None else said, key, usual)

    def _objects(self, quantization: Mapping[str, Any], key: str) -> Mapping[str, Mapping[str, Any]]:
        """The settings under a key, an object for each module or pattern; none where it is not there. Raises
        DamagedCheckpoint for anything else."""
        found = quantization.get(key) or {}
        if not isinstance(found, Mapping) or not all(isinstance(said, Mapping) for said in found.values()):
            raise DamagedCheckpoint(f"`{key}` is not an object of objects", where=self._where)
        return found

    def _unread(self, what: str) -> PrecisionError:
        """The error for codes, or for a setting by which they would be worth something else, that are not read."""
        return PrecisionError(what, where=self._where, do=FROM_THE_RELEASE)

    @property
    def words(self) -> str:
        """What is stored, and what it is read as, in words."""
        return f"{' and '.join(sorted(self.kinds))} of {self.method}, read as bfloat16"

    def chunks(self, name: str) -> Sequence[Chunk]:
        return [Chunk(whole(self.specs[name]), _Rows(self, name))]


@dataclass(frozen=True)
class _Rows:
    """The rows of one weight."""

    weights: DecodedWeights
    name: str

    def rows(self, row: int, rows: int) -> Tensor:
        return self.weights.rows(self.name, row, rows)
