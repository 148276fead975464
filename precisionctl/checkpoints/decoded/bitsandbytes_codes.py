"""bitsandbytes' codes, read as values: NF4 and FP4 in blocks of the flattened weight, and the rows of LLM.int8.

Four bits: `weight` has two codes in a byte, the first in its high half; a value is a number of the table times the
`absmax` of its block, in FP32, rounded to the dtype that `weight.quant_state.bitsandbytes__nf4` names, and then to
BF16. Doubly quantized, `absmax` is codes too: `nested_quant_map[absmax] * nested_absmax + nested_offset`. Eight bits:
`weight` I8 times `SCB` of its row times 1/127. Source: bitsandbytes 0.50.2 (functional.py, QuantState, dequantize_4bit;
backends/default/ops.py; _ops.py, int8_vectorwise_dequant).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any

from precisionctl.checkpoints.chunks import read_bytes, read_rows, read_tensor
from precisionctl.checkpoints.decoded.base import DecodedWeights
from precisionctl.dtypes import DType
from precisionctl.errors import damage, shown
from precisionctl.quant_methods.base import FLOATS
from precisionctl.torch_when_used import torch
from precisionctl.untrusted.safe_json import parse_json
from precisionctl.untrusted.safe_pickle import sizes

if TYPE_CHECKING:
    from torch import Tensor

_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_FP4 = tuple(sign * twelfths / 12 or 0.0 for sign in (1, -1) for twelfths in (0, 0.0625, 8, 12, 4, 6, 2, 3))
_TABLES: Mapping[str, tuple[float, ...]] = {"nf4": _NF4, "fp4": _FP4}
"""The numbers of all codes (functional.py, get_4bit_type). bitsandbytes goes by the name of the table, and not by the
numbers that it stores as `quant_map`. FP4 has two zeros there, and so here, of the same sign."""
_AS_GOOD_AS = 1e-6
"""How far a stored number may be off (QuantState.__eq__)."""

_STATE = ".quant_state.bitsandbytes__"
_LONGEST_STATE = 4096
"""Bytes of a `quant_state`, which has up to 200."""
_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_SAID = {"quant_type": (), "shape": (), "blocksize": _BLOCK_SIZES, "dtype": tuple(map(str, FLOATS))}
_SAID_NESTED = {"nested_blocksize": _BLOCK_SIZES, "nested_dtype": ("float32",), "nested_offset": ()}
"""The keys of a `quant_state`, those for double quantization apart, and the values that bitsandbytes knows of some."""
_PER_INT8 = 7.874015718698502e-3


@dataclass(frozen=True)
class _State:
    """What a `quant_state` says of a weight. Blocks are of so many values, and `nested_block` is the number of
    absmaxes of a block of theirs, 0 if they are FP32 numbers themselves."""

    table: str
    shape: tuple[int, ...]
    block: int
    dtype: DType
    nested_block: int
    offset: float

    @property
    def codes(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def blocks(self) -> int:
        return -(-self.codes // self.block)

    @property
    def parts(self) -> dict[str, tuple[int, DType]]:
        """How many elements the tensors beside the codes have, and of which dtype."""
        table = {"quant_map": (len(_TABLES[self.table]), DType.float32)}
        if not self.nested_block:
            return {"absmax": (self.blocks, DType.float32)} | table
        return table | {
            "absmax": (self.blocks, DType.uint8),
            "nested_absmax": (-(-self.blocks // self.nested_block), DType.float32),
            "nested_quant_map": (256, DType.float32),
        }


class BitsAndBytesCodes(DecodedWeights):
    """The weights of a directory that transformers saved with bitsandbytes, of four bits or of eight."""

    def _find(self, quantization: Mapping[str, Any]) -> None:
        specs = self._stored.specs
        self._states: dict[str, _State] = {}

        self.read = set[str]()
        for name in specs:
            weight, found, table = name.rpartition(_STATE)
            if not found:
                continue
            if weight in self._states:
                raise self._damaged(name, f"{weight} has two quant_states")
            self._states[weight] = state = self._state(name, weight, table)
            self.read |= {name, *(f"{weight}.{part}" for part in state.parts)}
        scales = [name for name in specs if name.endswith(".SCB")]
        self._rows_of_int8 = {f"{name.removesuffix('SCB')}weight": name for name in scales}
        for weight, name in self._rows_of_int8.items():
            codes, order = self._present(weight), f"{weight}_format"
            if len(codes.shape) != 2 or not codes.rows * codes.columns or codes.dtype != DType.int8:
                what = f"{weight} is {codes.stored_dtype} of shape {shown(codes.shape)}, beside {name}"
                raise self._damaged(weight, what)
            self._check(name, (codes.rows,), DType.float32)
            if order in specs:
                self._check(order, (), DType.uint8)
                if self._text(order) != b"\0":
                    raise self._unread(f"{order} says that codes are in another order than rows")
            self.read |= {name, order}
        strays = (name for name in specs if name.rpartition(".")[2] in _PARTS and name not in self.read)
        if stray := next(strays, None):
            what = f"{stray} is there, and no quant_state says what of"
            raise self._damaged(stray, what, "Is every shard there?")
        for name, spec in specs.items():
            if name.endswith(".weight") and spec.dtype == DType.int8 and name not in self._rows_of_int8:
                self._present(f"{name.removesuffix('weight')}SCB")
        self.shapes = {name: state.shape for name, state in self._states.items()}
        self.shapes |= {name: specs[name].shape for name in self._rows_of_int8}
        self.kinds = {f"{state.table.upper()} codes" for state in self._states.values()}
        self.kinds |= {"INT8 codes"} if self._rows_of_int8 else set()

    def _values(self, name: str, row: int, rows: int) -> tuple[Tensor, str]:
        scales = self._rows_of_int8.get(name)
        if scales is None:
            return self._four_bits(name, row, rows), f"{name}.absmax"
        values = read_rows(self._stored, name, row, rows).float()
        values *= read_rows(self._stored, scales, row, rows)
        values *= _PER_INT8
        return values, scales

    def _four_bits(self, name: str, row: int, rows: int) -> Tensor:
        """Rows in the dtype of the weight's quant_state."""
        state, columns = self._states[name], self.specs[name].columns
        pairs, nested = self._once(name, self._tables)
        begin, end = row * columns, (row + rows) * columns
        first, stop = begin // state.block, -(-end // state.block)  # blocks, which begin with a byte

        # bytes of codes are in elements of any dtype (`bnb_4bit_quant_storage`)
        size = self._stored.specs[name].dtype.itemsize
        first_byte, stop_byte = first * state.block // 2, -(-min(stop * state.block, state.codes) // 2)
        element = first_byte // size
        held = read_bytes(self._stored, name, element, -(-stop_byte // size) - element).reshape(-1)
        codes = torch.from_numpy(held[first_byte - element * size : stop_byte - element * size])

        absmax = read_rows(self._stored, f"{name}.absmax", first, stop - first).view(-1)
        if nested is not None:
            outer_first, outer_stop = first // state.nested_block, (stop - 1) // state.nested_block + 1
            outer = read_rows(self._stored, f"{name}.nested_absmax", outer_first, outer_stop - outer_first)
            above = outer.view(-1)[torch.arange(first, stop) // state.nested_block - outer_first]
            absmax = nested[absmax.int()] * above + torch.tensor(state.offset)

        blocks = torch.zeros(stop - first, state.block)
        blocks.view(-1)[: 2 * len(codes)] = pairs.index_select(0, codes.int()).view(-1)
        values = blocks.mul_(absmax.unsqueeze(1)).view(-1)[begin - first * state.block : end - first * state.block]
        return values.view(rows, columns).to(state.dtype.torch)

    def _tables(self, name: str) -> tuple[Tensor, Tensor | None]:
        """The two numbers of each byte of a weight's codes, FP32 `[256, 2]`, and those of codes of its absmaxes, if
        they are codes."""
        state = self._states[name]
        nested = read_tensor(self._stored, f"{name}.nested_quant_map") if state.nested_block else None
        table = torch.tensor(_TABLES[state.table])
        stored = read_tensor(self._stored, f"{name}.quant_map")
        if not torch.allclose(stored, table, rtol=0, atol=_AS_GOOD_AS):
            what = f"{name}.quant_map is not {state.table.upper()}'s, by which bitsandbytes decodes it all the same"
            raise self._unread(what)
        return torch.stack([table.repeat_interleave(16), table.repeat(16)], 1), nested

    def _state(self, name: str, weight: str, table: str) -> _State:
        """What a `quant_state` says of a weight, checked. Raises DamagedCheckpoint for what makes no sense, and for
        tensors that do not fit it."""
        spec = self._stored.specs[name]
        if spec.dtype != DType.uint8 or len(spec.shape) != 1 or spec.rows > _LONGEST_STATE:
            what = (
                f"{name} is {spec.stored_dtype} of shape {shown(spec.shape)}, not JSON in up to {_LONGEST_STATE} bytes"
            )
            raise self._damaged(name, what)
        with damage(f"{name} makes no sense", self._where):
            said = parse_json(self._text(name), name)
            nested = "nested_blocksize" in said
            if said.keys() != {*_SAID, *(_SAID_NESTED if nested else ())}:
                raise ValueError(f"keys {shown(sorted(said))}")
            for key, known in (_SAID | _SAID_NESTED | {"quant_type": (table,)}).items():
                if key in said and known and not (type(said[key]) in (str, int) and said[key] in known):
                    raise ValueError(f"{key} {shown(said[key])}")
            shape, block, offset = sizes(said["shape"]), said.get("nested_blocksize", 0), said.get("nested_offset", 0)
            if len(shape) != 2 or 0 in shape:
                raise ValueError(f"a weight of shape {shown(shape)}")
            if type(offset) not in (float, int) or not isfinite(offset):
                raise ValueError(f"nested_offset {shown(offset)}")
            if table not in _TABLES:
                raise ValueError(f"a table {shown(table)}")
            state = _State(table, shape, said["blocksize"], DType(said["dtype"]), block, float(offset))

        codes = self._present(weight)
        if len(codes.shape) != 2 or codes.columns != 1 or codes.nbytes != -(-state.codes // 2):
            what = f"{weight} is {codes.stored_dtype} of shape {shown(codes.shape)}, for codes of {shown(state.shape)}"
            raise self._damaged(weight, what)
        for part, (count, dtype) in state.parts.items():
            self._check(f"{weight}.{part}", (count,), dtype)
        if not nested and f"{weight}.nested_absmax" in self._stored.specs:
            what = f"{weight}.nested_absmax is beside absmaxes that are no codes"
            raise self._damaged(f"{weight}.nested_absmax", what)
        return state

    def _text(self, name: str) -> bytes:
        """The bytes of a tensor of text."""
        return read_bytes(self._stored, name, 0, self._stored.specs[name].rows).tobytes()
