"""GPTQ's and AWQ's integers, read as values: codes of a weight's transpose, decoded as its rows are read. AutoRound
packs as these do (`auto_round.py`).

A module has `qweight`, `qzeros`, `scales` and, of GPTQ's, `g_idx`; its weight `[out, in]` is `(code - zero) * scale` in
FP32, rounded once to BF16. int32 words hold the first code in their lowest bits. Sources: GPTQModel 7.7
(nn_modules/qlinear/__init__.py, pack_original, dequantize_weight), AutoAWQ 0.2.9 (utils/packing_utils.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from precisionctl.checkpoints.chunks import Box, read_box, read_tensor
from precisionctl.checkpoints.decoded.base import FROM_THE_RELEASE, DecodedWeights
from precisionctl.codes import nibbles
from precisionctl.codes.elements import INT4
from precisionctl.dtypes import DType
from precisionctl.errors import DamagedCheckpoint, PrecisionError, shown
from precisionctl.quant_methods.base import FLOATS
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor

FILES_BESIDE: Mapping[str, str] = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files in which AutoGPTQ and AutoAWQ have said how weights are coded, some of their directories only there, and the
method if it names none (vLLM 0.33, auto_gptq.py and auto_awq.py get_config_filenames)."""

_ROOM = 4 << 20
"""Bytes of a weight's codes that are cached. Without, reading rows would read a few bytes of each stored row at a
time."""

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word of AWQ each of eight outputs is."""


@dataclass(frozen=True)
class _Module:
    """The stored tensors of a weight `[out, in]`. `group` inputs share a scale; `order` names the tensor with the group
    of each input, None if there is none."""

    name: str
    out: int
    inputs: int
    groups: int
    bits: int
    group: int
    order: str | None

    @property
    def in_word(self) -> int:
        return 32 // self.bits

    def tensor(self, kind: str) -> str:
        return f"{self.name}.{kind}"


@dataclass(frozen=True)
class _Slab:
    """Rows of a weight from `first` on: codes as bytes `[n, in * bits / 8]`, scales and zero points, FP32 `[n,
    groups]`. `order` is the group of each input, None where groups of equal size follow one another."""

    weight: str
    first: int
    codes: Tensor
    scales: Tensor
    zeros: Tensor
    order: Tensor | None


@dataclass(frozen=True)
class WordLayout:
    """How words hold codes: as AWQ has them, else as GPTQ, which may store zero points `one_less` than they are. A
    weight has one of the `group_sizes` (-1: a group is a whole row), and one of these `bits`, or any if there are
    none."""

    awq: bool
    one_less: bool
    group_sizes: Collection[int]
    bits: Collection[object]


class TransposedCodes(DecodedWeights):
    """The weights of a GPTQ or AWQ directory. The stored codes are those of the transposed weight."""

    def _layout(self, quantization: Mapping[str, Any]) -> WordLayout:
        """What the config says. Raises PrecisionError for what is not read."""
        awq, one_less = self.method == "awq", False
        if awq:
            if quantization.get("zero_point") not in (None, True):
                what = f"codes of AWQ with `zero_point` {shown(quantization['zero_point'])}, which are not read"
                raise self._unread(what)
            version = _value_of(quantization, "version", "gemm")
            if version != "gemm" or quantization.get("backend") == "llm-awq":
                kind = quantization.get("backend") or version
                raise self._unread(f"codes of AWQ for {shown(kind)}, which are not read; `gemm` is")
        else:
            said_format = _value_of(quantization, "checkpoint_format", "gptq")
            form = "marlin" if quantization.get("is_marlin_format") else said_format
            if form not in ("gptq", "gptq_v2"):
                raise self._unread(f"codes of GPTQ in the format {shown(form)}, which is not read")
            one_less = form == "gptq"
        self._check_alike(quantization)
        said = {"group_size": 128, **quantization}  # as transformers' GPTQConfig and AwqConfig
        if awq:  # AutoAWQ's own words, which vLLM looks for first
            said |= {key: said[own] for key, own in (("bits", "w_bit"), ("group_size", "q_group_size")) if own in said}
        bits, groups = said.get("bits"), self._group_size(said)
        return WordLayout(awq, one_less, [groups], [] if bits is None else [bits])

    def _check_alike(self, quantization: Mapping[str, Any]) -> None:
        """Raise PrecisionError if modules have different formats of codes, or words are not int32. In GPTQModel's
        `dynamic`, a rule that begins with `-:` only names modules without codes."""
        own = quantization.get("dynamic") or {}
        if not isinstance(own, Mapping) or not all(rule.startswith("-:") for rule in own):
            raise self._unread("`dynamic`, with codes of modules' own, is not read")
        if quantization.get("pack_dtype") not in (None, "int32"):
            what = f"codes in words of `pack_dtype` {shown(quantization['pack_dtype'])}, which are not read"
            raise self._unread(what)
        if quantization.get("desc_act") not in (None, True, False):
            raise self._unread(f"`desc_act` {shown(quantization['desc_act'])}, which is neither true nor false")

    def _group_size(self, settings: Mapping[str, Any]) -> int:
        size = settings.get("group_size")
        if type(size) is not int or size < -1 or size == 0:
            raise self._unread(f"{shown(size)} as the size of a group")
        return size

    def _find(self, quantization: Mapping[str, Any]) -> None:
        self._words = self._layout(quantization)
        ordered = any(name.endswith(".g_idx") for name in self._stored.specs)
        self._ordered = bool(quantization.get("desc_act")) or ordered
        self._modules = {f"{name}.weight": self._module(name) for name in self._modules_with("qweight")}
        self.shapes = {name: (module.out, module.inputs) for name, module in self._modules.items()}
        self.kinds = {f"{module.bits}-bit integers" for module in self._modules.values()}
        kinds = ("qweight", "qzeros", "scales", "g_idx")
        self.read = {module.tensor(kind) for module in self._modules.values() for kind in kinds}
        self._last: _Slab | None = None

    def _values(self, name: str, row: int, rows: int) -> tuple[Tensor, str]:
        module, made = self._modules[name], []
        step = max(1, _ROOM * 8 // (module.inputs * module.bits)) // 32 * 32 or 32  # whole words of zero points
        for first in range(row // step * step, row + rows, step):
            if self._last is None or (self._last.weight, self._last.first) != (name, first):
                self._last = self._slab(name, module, first, min(step, module.out - first))
            here = slice(max(row - first, 0), row + rows - first)
            made.append(_decoded(module, self._last, here))
        return made[0] if len(made) == 1 else torch.cat(made), module.tensor("scales")

    def _slab(self, name: str, module: _Module, first: int, rows: int) -> _Slab:
        columns = slice(first, first + rows)
        scales = self._columns(module, "scales", columns, 1).t().float().contiguous()
        zeros = self._zeros(module, columns).t().float().contiguous()
        known = self._last if self._last and self._last.weight == name else None
        order = known.order if known else self._order(module)
        if self._words.awq:
            by_input = _in_awq_order(self._columns(module, "qweight", columns, module.in_word))
            codes = nibbles.pack(by_input.t().contiguous())
        else:
            codes = nibbles.laid_out(self._columns(module, "qweight", columns, 1).t()).view(torch.uint8)
        return _Slab(name, first, codes, scales, zeros, order)

    def _order(self, module: _Module) -> Tensor | None:
        """The group of each input, None where groups of equal size follow one another."""
        usual = torch.arange(module.inputs) // module.group
        order = usual if module.order is None else read_tensor(self._stored, module.order).long()
        if module.order and not bool(((order >= 0) & (order < module.groups)).all()):
            raise self._damaged(module.order, f"{module.order} names groups that are none of {module.groups}")
        return None if module.inputs == module.group * module.groups and torch.equal(order, usual) else order

    def _zeros(self, module: _Module, columns: slice) -> Tensor:
        """Zero points `[groups, n]`, of the codes' range."""
        words = self._columns(module, "qzeros", columns, module.in_word)
        if self._words.awq:
            return _in_awq_order(words)
        zeros = nibbles.unpack_bits(words.view(torch.uint8), module.bits)[:, : columns.stop - columns.start].int()
        if self._words.one_less and bool((zeros == (1 << module.bits) - 1).any()):
            what = f"{module.tensor('qzeros')} holds {(1 << module.bits) - 1}, for which readers take 0 or one more"
            raise PrecisionError(
                what, where=self._where, do="Save it as gptq_v2, which stores zero points as they are."
            )
        return zeros + 1 if self._words.one_less else zeros

    def _columns(self, module: _Module, kind: str, columns: slice, in_word: int) -> Tensor:
        """Columns of a stored matrix, of which each word has so many."""
        name = module.tensor(kind)
        first, stop = columns.start // in_word, -(-columns.stop // in_word)
        return read_box(self._stored, name, Box(0, self._stored.specs[name].rows, first, stop - first))

    def _module(self, name: str) -> _Module:
        specs = self._stored.specs
        there = {kind: self._present(f"{name}.{kind}") for kind in ("qweight", "qzeros", "scales")}
        for kind, spec in there.items():
            if (
                len(spec.shape) != 2
                or not all(spec.shape)
                or spec.dtype not in (FLOATS if kind == "scales" else (DType.int32,))
            ):
                what = f"{name}.{kind} is {spec.stored_dtype} of shape {list(spec.shape)}"
                raise self._damaged(f"{name}.{kind}", what)
        self._check_alone(f"{name}.weight", f"{name}.qweight")
        (rows, columns), zeros, (groups, out) = (spec.shape for spec in there.values())
        possible = [bits for bits in (2, 4, 8) if zeros == (groups, -(-out * bits // 32))]  # several for few outputs
        bits = next(iter([bits for bits in possible if bits in self._words.bits] or possible), 0)
        order = specs.get(f"{name}.g_idx")
        if self._ordered and not self._words.awq and order is None:
            what = f"no {name}.g_idx for its codes, as other codes have or config.json's `desc_act` asks for"
            raise self._damaged(f"{name}.g_idx", what, "Is every shard there?")
        if self._words.awq:
            inputs, fits = rows, bits == 4 and columns * 8 == out and rows % 2 == 0
        else:
            inputs = order.rows if order else rows * 32 // max(bits, 1)
            fits = bits > 0 and columns == out and rows == -(-inputs * bits // 32)
        sizes = {inputs if size == -1 else size for size in self._words.group_sizes}
        sizes = {size for size in sizes if 0 < size <= inputs and groups == -(-inputs // size)}
        fits = fits and len(sizes) == 1 and (not order or (order.dtype, order.shape) == (DType.int32, (inputs,)))
        if not fits:
            shapes = ", ".join(f"{kind} {list(spec.shape)}" for kind, spec in there.items())
            groups_of = " or ".join(map(shown, self._words.group_sizes))
            what = f"{name} has {shapes} and groups of {groups_of}, which are no codes of 2, 4 or 8 bits"
            raise DamagedCheckpoint(what, where=self._where, do=FROM_THE_RELEASE)
        if self._words.bits and bits not in self._words.bits:
            said = " or ".join(map(shown, self._words.bits))
            what = f"{name} has codes of {bits} bits, and config.json says `bits` {said}"
            raise DamagedCheckpoint(what, where=self._where, do=FROM_THE_RELEASE)
        return _Module(name, out, inputs, groups, bits, sizes.pop(), f"{name}.g_idx" if order else None)


def _decoded(module: _Module, slab: _Slab, here: slice) -> Tensor:
    """Values of rows of a slab, FP32 `[n, in]`."""
    codes, scales, zeros = slab.codes[here], slab.scales[here], slab.zeros[here]
    if slab.order is not None:
        scales, zeros = scales[:, slab.order], zeros[:, slab.order]
    if module.bits == 4:
        values = torch.empty(len(codes), module.inputs)
        nibbles.decode(codes, INT4, scales, values, torch.empty(nibbles.SCRATCH), zeros - 8)
        return values
    groups = nibbles.unpack_bits(codes, module.bits)[:, : module.inputs].float().view(*scales.shape, -1)
    return groups.sub_(zeros.unsqueeze(-1)).mul_(scales.unsqueeze(-1)).view(len(codes), -1)


def _in_awq_order(words: Tensor) -> Tensor:
    """Codes `[rows, columns]`, uint8, of AWQ's words `[rows, columns / 8]`."""
    codes = nibbles.unpack(words.view(torch.uint8)).view(*words.shape, 8)
    return codes[..., _AWQ_ORDER].flatten(-2)


def _value_of(quantization: Mapping[str, Any], key: str, usual: str) -> object:
    """The value of a key of the config, or of `format`, its name in other versions of the tools, in small letters; else
    the `usual` one."""
    found = next((quantization[each] for each in (key, "format") if quantization.get(each) is not None), usual)
    return found.lower() if isinstance(found, str) else found
