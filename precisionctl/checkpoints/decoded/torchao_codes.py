"""torchao's tensors, read as values: what its flattened subclasses in safetensors stand for.

A weight `X.weight` is stored as `X._weight_qdata`, `X._weight_scale` and, of integers, `X._weight_zero_point`; the
metadata of the file says in JSON which class it was, how many rows and columns share a scale, and its dtype. A value
is `(code - zero point) * scale` in FP32, rounded to that dtype and then to BF16. Of an Int4Tensor, whose scales stand
in columns, it is `code * scale + zero point`, rounded once. Source: torchao 0.18.0
(prototype/safetensors/safetensors_support.py; quantization/quant_primitives.py, _dequantize_affine_float8,
_dequantize_affine_no_dtype_check; quantization/quantize_/workflows/, Float8Tensor, Int8Tensor,
IntxUnpackedToInt8Tensor, Int4Tensor), MSLK 1.1.0 (quantize/shuffle.py, int4_row_quantize_zp, pack_int4).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from precisionctl.checkpoints.chunks import Box, read_box, read_rows
from precisionctl.checkpoints.decoded.base import DecodedWeights
from precisionctl.checkpoints.hf_directory.fused_experts import stored_name
from precisionctl.checkpoints.hf_directory.safetensors_file import read_described
from precisionctl.checkpoints.hf_directory.wrapped_names import names_inside
from precisionctl.codes import nibbles
from precisionctl.dtypes import DType
from precisionctl.errors import DamagedCheckpoint, damage, shown
from precisionctl.quant_methods.base import FLOATS
from precisionctl.torch_when_used import torch
from precisionctl.untrusted.safe_json import parse_json
from precisionctl.untrusted.safe_pickle import sizes

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class _TensorClass:
    """One of torchao's: the dtypes of its codes, the tensors that it has or may have, and what it is in words.
    `packed`: a byte has two codes of four bits, the first in its low half."""

    codes: tuple[DType, ...]
    tensors: tuple[frozenset[str], ...]
    words: str
    packed: bool = False


_SCALES, _ZEROS = frozenset({"qdata", "scale"}), frozenset({"qdata", "scale", "zero_point"})
_TENSOR_CLASSES: Mapping[str, _TensorClass] = {
    "Float8Tensor": _TensorClass((DType.float8_e4m3fn, DType.float8_e5m2), (_SCALES,), "FP8 codes"),
    "Int8Tensor": _TensorClass((DType.int8,), (_SCALES, _ZEROS), "INT8 codes"),
    "IntxUnpackedToInt8Tensor": _TensorClass((DType.int8,), (_ZEROS,), "integers in INT8"),
    "Int4Tensor": _TensorClass((DType.int8,), (_ZEROS,), "INT4 codes", packed=True),
}


@dataclass(frozen=True)
class _Said:
    """A weight's metadata: its class, its tensors, how many values of each dimension share a scale (`block`; empty: all
    of them), and the dtype of its values. Packed codes have the dtype of their scales instead, and a `shape`."""

    of: _TensorClass
    tensors: frozenset[str]
    block: tuple[int, ...]
    dtype: DType | None
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _FlatTensor:
    """A weight's shape, its stored tensors, how many rows and columns share a scale, and the dtype of its values."""

    of: _TensorClass
    shape: tuple[int, int]
    codes: str
    scale: str
    zeros: str | None
    block: tuple[int, int]
    dtype: DType


class TorchaoCodes(DecodedWeights):
    """The weights of a directory that transformers saved with torchao."""

    def _find(self, quantization: Mapping[str, Any]) -> None:
        self._weights: dict[str, _FlatTensor] = {}
        for name, said in self._described().items():
            self._weights |= self._coded(name, said)
        found = self._weights.values()
        self.read = {each for weight in found for each in (weight.codes, weight.scale, weight.zeros) if each}
        codes = (name for name in self._stored.specs if stored_name(name)[0].endswith("_qdata"))
        if stray := next((name for name in codes if name not in self.read), None):
            what = f"{stray} is there, and no metadata of its file says what it is"
            raise self._damaged(stray, what, "Copy the files again, or let torchao decode them.")
        self.shapes = {name: weight.shape for name, weight in self._weights.items()}
        self.kinds = {weight.of.words for weight in found}

    def _values(self, name: str, row: int, rows: int) -> tuple[Tensor, str]:
        coded = self._weights[name]
        values = (self._of_bytes if coded.of.packed else self._of_elements)(coded, row, rows)
        return values.to(coded.dtype.torch), coded.scale

    def _of_elements(self, coded: _FlatTensor, row: int, rows: int) -> Tensor:
        """Values of rows in FP32, `[rows, blocks, columns of a block]`."""
        shared = coded.block[0]
        first, stop = row // shared, (row + rows - 1) // shared + 1
        of_row = torch.arange(row, row + rows) // shared - first

        def every(name: str) -> Tensor:
            return read_rows(self._stored, name, first, stop - first).float()[of_row].unsqueeze(-1)

        values = read_rows(self._stored, coded.codes, row, rows).float().view(rows, -1, coded.block[1])
        if coded.zeros:
            values -= every(coded.zeros)
        return values.mul_(every(coded.scale))

    def _of_bytes(self, coded: _FlatTensor, row: int, rows: int) -> Tensor:
        """The same, of codes of four bits, -8 to 7."""

        def every(name: str) -> Tensor:
            here = Box(0, self._stored.specs[name].rows, row, rows)
            return read_box(self._stored, name, here).float().t().unsqueeze(-1)

        codes = nibbles.unpack(read_rows(self._stored, coded.codes, row, rows).view(torch.uint8))
        values = (codes ^ 8).float().sub_(8).view(rows, -1, coded.block[1])
        assert coded.zeros, "as the class has"
        return values.mul_(every(coded.scale)).add_(every(coded.zeros))

    def _described(self) -> Mapping[str, Mapping[str, Any]]:
        """What the files' metadata say of each weight that is a subclass's."""
        texts: dict[str, str] = {}
        for file in sorted({place for place, _ in self._stored.places.values()}):
            objects = {name: text for name, text in read_described(file)[1].items() if text[:1] == "{"}
            for name, text in objects.items():
                if texts.setdefault(name, text) != text:
                    raise DamagedCheckpoint(f"two files say different things of {shown(name)}", where=file)
        parsed = {name: parse_json(text.encode(), self._where) for name, text in texts.items()}
        coded = {name: said for name, said in parsed.items() if said.get("_type") not in (None, "Tensor")}
        inside = names_inside(coded, self._where)
        return {inside[name]: said for name, said in coded.items()}

    def _coded(self, name: str, said: Mapping[str, Any]) -> dict[str, _FlatTensor]:
        """The weight of this name, or its slices if it is of experts. Raises PrecisionError for a class, or tensors of
        it, that are not read."""
        kind = said["_type"]
        if not isinstance(kind, str) or kind not in _TENSOR_CLASSES:
            raise self._unread(f"{shown(name)} is torchao's {shown(kind)}, which is not read")
        with damage(f"what is said of {shown(name)} makes no sense", self._where):
            tensors, data, of = frozenset(said["_tensor_data_names"]), said["_data"], _TENSOR_CLASSES[kind]
            dtype = None if of.packed else DType(data["dtype"]["_data"])
            shape = sizes(data["shape"]) if of.packed else ()
            described = _Said(of, tensors, sizes(data["block_size"] or []), dtype, shape)
            if dtype not in (None, *FLOATS) or not all(described.block):
                raise ValueError(f"dtype {dtype}, block_size {shown(described.block)}")
        if tensors not in of.tensors:
            what = f"{shown(name)} is torchao's {kind} with {', '.join(sorted(map(shown, tensors)))}, which is not read"
            raise self._unread(what)
        module, _, parameter = name.rpartition(".")
        prefix = f"{module}._{parameter}_"
        slices = [""]
        if f"{prefix}qdata[0]" in self._stored.specs:  # a tensor of experts, which is read as its slices
            slices = ["[0]"]
            while f"{prefix}qdata[{len(slices)}]" in self._stored.specs:
                slices.append(f"[{len(slices)}]")
        return {f"{name}{index}": self._checked(f"{name}{index}", prefix, index, described) for index in slices}

    def _checked(self, name: str, prefix: str, index: str, said: _Said) -> _FlatTensor:
        """Raises DamagedCheckpoint for tensors that do not fit one another."""
        self._check_alone(name, f"{prefix}qdata{index}")
        specs = {kind: self._present(f"{prefix}{kind}{index}") for kind in said.tensors}
        codes, scale, packed = specs["qdata"], specs["scale"], said.of.packed
        shape = (codes.rows, codes.columns * (2 if packed else 1))
        block = said.block or shape
        if index and said.block:  # of a block of experts, this is one
            block = block[1:] if block[0] == 1 else ()
        fits = len(codes.shape) == len(block) == 2 and 0 not in shape and codes.dtype in said.of.codes
        fits = fits and scale.dtype in FLOATS and said.shape[-2:] in ((), shape)
        fits = fits and specs.get("zero_point", scale).dtype in (FLOATS if packed else (*FLOATS, *said.of.codes))
        if fits:
            grid = (shape[0] // block[0], shape[1] // block[1])
            fits = shape == (grid[0] * block[0], grid[1] * block[1]) and (block[0] == 1 or not packed)
            shapes = (grid[::-1] if packed else grid, *(((), (1,)) if grid == (1, 1) else ()))
            fits = fits and all(specs[kind].shape in shapes for kind in said.tensors - {"qdata"})
        if not fits:
            there = ", ".join(f"{kind} {spec.stored_dtype} {list(spec.shape)}" for kind, spec in sorted(specs.items()))
            what = f"{name} has {there}, which are no {said.of.words} with a scale for each block of {shown(block)}"
            raise self._damaged(f"{prefix}qdata{index}", what)
        if not packed and specs.get("zero_point", codes).dtype not in said.of.codes:
            raise self._unread(f"{name} has zero points in {specs['zero_point'].stored_dtype}, which are not read")
        codes_at, scale_at = f"{prefix}qdata{index}", f"{prefix}scale{index}"
        zeros_at = f"{prefix}zero_point{index}" if "zero_point" in said.tensors else None
        return _FlatTensor(
            said.of, shape, codes_at, scale_at, zeros_at, (block[0], block[1]), said.dtype or scale.dtype
        )
