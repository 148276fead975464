"""QuantMethod: one way of spelling codes of weights in a Hugging Face directory, to write it and to read it.

A new one is a file in this folder with a `QUANT_METHOD` in it; a new format of codes is a CodeFormat that its `read`
gives. Every scale tensor of a weight holds scale_inv, whatever its name: the dequantize multiplier
`x = code * scale_inv`; only global scales of four-bit formats may be divisors (`CodeFormat.divides`).

Which weights are codes is read from the dtypes of the stored tensors, and not from a config's lists of modules:
tools match those by whole names, by parts of names, by globs and by regular expressions, each in its own way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

import precisionctl.quant_methods
from precisionctl.discover import discover_names
from precisionctl.dtypes import DType
from precisionctl.errors import DamagedCheckpoint, PrecisionError, shown
from precisionctl.fp8 import encoding as fp8
from precisionctl.fp8.elements import E2M1, E4M3, Packing, element_of
from precisionctl.fp8.encoding import Encoding, GlobalScale, grid_shape
from precisionctl.fp8.group_scales import INT4_GROUP, MXFP4_GROUP, NVFP4_GROUP, zero_points
from precisionctl.param import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

Scheme = Literal["static", "dynamic", "block", "mxfp8", "nvfp4", "nvfp4a16", "mxfp4", "w4a16"]
"""`static`: a scale for each weight and one, fixed, for its input. `dynamic`: a scale for each output channel,
and one for each token that the engine makes while it runs. `block`: a scale for 128 x 128 values of a weight, and one
for 128 of a token that the engine makes. `mxfp8`: a power of two for 32 values of a row, of either.

Four bits: `nvfp4`: a scale for 16 values of a row, of either, under a global one, which is fixed for inputs.
`nvfp4a16`: the same for weights alone. `mxfp4`: as `mxfp8`. `w4a16`: integers, a scale for 128 values of a row."""

FOUR_BITS: Mapping[str, str] = {"nvfp4": "NVFP4", "nvfp4a16": "NVFP4", "mxfp4": "MXFP4", "w4a16": "INT4"}
"""The name of the format (`CodeFormat.name`) that weights have in schemes of four bits. What is stored of inputs or not
is no part of it, so a directory of such a format is known by its name alone."""

FIXED_INPUTS: tuple[Scheme, ...] = ("static", "nvfp4")
"""Schemes with a fixed scale for the inputs of each weight."""

CODES = DType.float8_e4m3fn
"""What every engine reads; none takes E5M2 weights."""

Block = tuple[int | None, int | None]
"""How many rows and columns share a scale; None: all of them."""

TENSOR: Block = (None, None)
CHANNEL: Block = (1, None)
_KINDS = {TENSOR: "per-tensor", CHANNEL: "per-channel"}

SQUARE = (128, 128)
"""DeepSeek's blocks, the only ones that every engine here has kernels for."""

POWERS_OF_2: Mapping[str, str] = {"scale_fmt": "ue8m0"}
"""How `quant_method: fp8` says that the scales of its blocks are powers of two, and that those of inputs are to be."""

BLOCKS: Mapping[Scheme, Block] = {
    "static": TENSOR,
    "dynamic": CHANNEL,
    "block": SQUARE,
    "mxfp8": (1, 32),
    "nvfp4": (1, NVFP4_GROUP),
    "nvfp4a16": (1, NVFP4_GROUP),
    "mxfp4": (1, MXFP4_GROUP),
    "w4a16": (1, INT4_GROUP),
}
"""How many rows and columns of a weight share a scale, by scheme."""


FLOATS = (DType.float32, DType.bfloat16, DType.float16)
EXPONENTS = (DType.uint8, DType.float8_e8m0fnu)
"""Dtypes that a tensor of scales may have; bytes are exponents."""


@dataclass(frozen=True)
class CodeFormat:
    """What the codes of a weight are, and where the rest of its encoding is: a row of a method's table.

    `block` says how many rows and columns share a scale, of one of the dtypes `scales`, or of any. Without a `packing`
    codes are FP8, of the element that their dtype says. The others are names of tensors beside the weight's own scales:
    a global scale, FP32, which `divides` or multiplies those of blocks; zero points, INT4, packed along rows; the
    `shape` of the weight; and the fixed global scale of its `input`. `same_inputs`: engines that can round inputs to
    the same format, without a fixed scale.
    """

    block: Block
    packing: Packing | None = None
    scales: tuple[DType, ...] = ()
    global_scale: str | None = None
    divides: bool = False
    zero_points: str | None = None
    shape: str | None = None
    input: str | None = None
    same_inputs: bool = False

    @property
    def name(self) -> str:
        return self.packing.name if self.packing else "FP8"

    @property
    def beside(self) -> tuple[str | None, str | None, str | None]:
        """The names of what a weight has beside its scales: a global scale, zero points, its shape."""
        return self.global_scale, self.zero_points, self.shape


@dataclass(frozen=True)
class Quantization:
    """What a `quantization_config` says of its tensors.

    `formats` are those that weights may have; where there are several, a weight's tensors decide. `static`: whether
    inputs have fixed scales; None where some have and some have not.
    """

    formats: tuple[CodeFormat, ...]
    static: bool | None

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Those that codes of FP8 may have."""
        return tuple(form.block for form in self.formats if form.packing is None)

    @property
    def scheme(self) -> str:
        """The Scheme that this is, or a description of what is none of them."""
        for scheme, block in BLOCKS.items():
            if scheme not in FOUR_BITS and (self.blocks, self.static) == ((block,), scheme == "static"):
                return scheme
        if not self.blocks:
            return " or ".join(dict.fromkeys(form.name for form in self.formats))
        weights = " or ".join(_KINDS.get(block, "block") for block in self.blocks)
        return f"{weights} weights and {'static' if self.static else 'dynamic'}"

    def narrowed(self, scales: Mapping[str, Scales], specs: Mapping[str, TensorSpec]) -> Quantization:
        """The same with the one of several `blocks` that all weights have; unchanged where they have not one."""
        for block in self.blocks:
            if all(found.block == sized(block, specs[name]) for name, found in scales.items()):
                return in_fp8((block,), self.static)
        return self


def in_fp8(blocks: Iterable[Block], static: bool | None) -> Quantization:
    """FP8 codes with scales for such blocks."""
    return Quantization(tuple(CodeFormat(block) for block in blocks), static)


def together(parts: Iterable[Quantization]) -> Quantization:
    """What a config says as a whole whose groups of modules, or layers, say `parts`."""
    listed = list(parts)
    static = {part.static for part in listed}
    formats = dict.fromkeys(form for part in listed for form in part.formats)
    return Quantization(tuple(formats), static.pop() if len(static) == 1 else None)


@dataclass(frozen=True, slots=True)
class Scales:
    """The tensors that hold a quantised weight's scale_inv and its input's (`input` is None where that is dynamic),
    and how many rows and columns of the weight share a scale. The others, and what they mean, are those of its
    CodeFormat."""

    weight: str
    input: str | None
    block: tuple[int, int]
    global_scale: str | None = None
    divides: bool = False
    zero_points: str | None = None
    shape: str | None = None

    @property
    def of_weight(self) -> tuple[str, ...]:
        """The names of all but the input's."""
        names = (self.weight, self.global_scale, self.zero_points, self.shape)
        return tuple(name for name in names if name is not None)

    @property
    def multiplying(self) -> tuple[str, ...]:
        """The names of those that values are multiplied with, or divided by."""
        return tuple(name for name in (self.weight, self.global_scale, self.input) if name is not None)

    @property
    def names(self) -> tuple[str, ...]:
        return self.of_weight if self.input is None else (*self.of_weight, self.input)

    def input_amax(self, stored: Tensor) -> Tensor:
        """The amax, FP32, that a fixed scale of the input stands for: `scale_inv * 448`; of a global one, which is that
        of the largest block's scale, 448 * 6 times it."""
        if self.global_scale is None:
            return stored * E4M3.largest
        return E4M3.largest * E2M1.largest / stored if self.divides else stored * (E4M3.largest * E2M1.largest)

    def of_input_amax(self, amax: Tensor) -> Tensor:
        """The inverse."""
        if self.global_scale is None:
            return amax / E4M3.largest
        return E4M3.largest * E2M1.largest / amax if self.divides else amax / (E4M3.largest * E2M1.largest)


@dataclass(frozen=True)
class CacheSpelling:
    """How the scale_inv of an FP8 KV cache are stored: the `names` of the scales of keys and of values, below the
    attention's own name, their `shape`, and the keys of `quantization_config` that announce them. They are FP32;
    `as_bf16`: rounded to numbers that BF16 holds, because some reader rounds them."""

    names: tuple[str, str]
    shape: tuple[int, ...]
    config: Mapping[str, Any]
    as_bf16: bool = True


@dataclass(frozen=True)
class Spelling:
    """How an export is spelled. `shapes` gives that of the tensor that holds a grid of so many rows and columns of
    scales, by scheme, and by those that are only read. `config(scheme, ignored)` is the `quantization_config`, with the
    full names of the linear and embedding modules that are not quantised under the key `ignored`, `cache` how scales
    of a KV cache are spelled, and `files(config)` are the files beside it, by name. Modules with a name that ends in
    one of `never` are known not to be quantised, named or not. `four_bits` are the formats of schemes of four bits."""

    shapes: Mapping[str, Callable[[int, int], tuple[int, ...]]]
    config: Callable[[Scheme, Sequence[str]], dict[str, Any]]
    cache: CacheSpelling
    files: Callable[[Mapping[str, Any]], dict[str, bytes]] = lambda config: {}
    ignored: str = "ignore"
    never: tuple[str, ...] = ()
    four_bits: Mapping[str, CodeFormat] = field(default_factory=dict)

    def codes(self, weight: TensorSpec, scheme: Scheme) -> TensorSpec:
        """What a weight is as codes."""
        packing = form.packing if (form := self.four_bits.get(scheme)) else None
        return replace(weight, dtype=packing.element.dtype if packing else CODES, packing=packing)

    def specs(self, scales: Scales, weight: TensorSpec, scheme: str) -> dict[str, TensorSpec]:
        """The tensors to store beside a weight: scales in FP32, or exponents as bytes, and what four bits need."""
        if form := self.four_bits.get(scheme):
            return self._of_four_bits(scales, weight, form)
        shape = self.shapes[scheme]
        found = {scales.weight: shape(*grid_shape(weight.rows, weight.columns, scales.block))}
        if scales.input is not None:
            found[scales.input] = shape(1, 1)
        dtype = DType.uint8 if scheme == "mxfp8" else DType.float32
        return {name: TensorSpec(size, dtype) for name, size in found.items()}

    def _of_four_bits(self, scales: Scales, weight: TensorSpec, form: CodeFormat) -> dict[str, TensorSpec]:
        one = TensorSpec(self.shapes["static"](1, 1), DType.float32)
        found = {scales.weight: TensorSpec(grid_shape(weight.rows, weight.columns, scales.block), form.scales[0])}
        found |= {name: one for name in (scales.global_scale, scales.input) if name is not None}
        if scales.shape is not None:
            found[scales.shape] = TensorSpec((2,), DType.int64)
        return found


@dataclass(frozen=True)
class QuantMethod:
    """`name` is config.json's `quant_method`. `read(config)` reads a `quantization_config`, of whatever tool; it raises
    PrecisionError for what cannot be read. `weight_scales` and `input_scales` are the names that scales have; of
    several, the first is looked for first. `spelling` is for methods that exports are written in.
    """

    name: str
    read: Callable[[Mapping[str, Any]], Quantization]
    weight_scales: tuple[str, ...] = ("weight_scale",)
    input_scales: tuple[str, ...] = ("input_scale",)
    spelling: Spelling | None = None

    def scales(self, weight: str, spec: TensorSpec, scheme: Scheme) -> Scales:
        """The names of a weight's scale tensors in an export, and the size of its blocks."""
        form = self.spelling.four_bits.get(scheme) if self.spelling else None
        name, kind = sibling(weight, self.weight_scales[0]), form.input if form else self.input_scales[0]
        given = sibling(weight, kind) if kind and scheme in FIXED_INPUTS else None
        found = Scales(name, given, sized(BLOCKS[scheme], spec))
        if form is None:
            return found
        whole, shape = (sibling(weight, kind) if kind else None for kind in (form.global_scale, form.shape))
        return replace(found, global_scale=whole, divides=form.divides, shape=shape)


_SLICE = re.compile(r"(.+)(\[\d+\])")


def sibling(weight: str, kind: str) -> str:
    """The name of a scale beside a weight: `<module>.weight_scale` of `<module>.weight`, and of experts that are
    stored as one tensor `experts.gate_up_proj_scale[3]` of `experts.gate_up_proj[3]`, and of its `_blocks[3]`."""
    if weight.endswith("]") and (match := _SLICE.fullmatch(weight)):
        return f"{match[1].removesuffix('_blocks')}_{kind.removeprefix('weight_')}{match[2]}"
    return f"{weight.removesuffix('.weight')}.{kind}"


def quant_methods() -> dict[str, QuantMethod]:
    """Every method in this folder, and of plug-ins, by its name in config.json."""
    return discover_names(precisionctl.quant_methods, "QUANT_METHOD", QuantMethod, lambda method: [method.name])


AS_VALUES = ("gptq", "awq")
"""Methods whose codes are read as values alone (`checkpoints/transposed_codes.py`)."""

_OTHERWISE = {
    "bitsandbytes": "4-bit numbers of a table in the file (NF4), under scales that are codes too",
}
"""What methods that others know store, in words."""


def recognise(config: Mapping[str, Any], where: object = "config.json") -> QuantMethod | None:
    """The method that a config.json names; None where it names none.

    Raises PrecisionError for an unknown one, DamagedCheckpoint for what is none.
    """
    quantization = config.get("quantization_config")
    if not quantization:
        return None
    if not isinstance(quantization, Mapping):
        raise DamagedCheckpoint("`quantization_config` is not an object", where=where)
    methods, name = quant_methods(), quantization.get("quant_method")
    if name in AS_VALUES:
        what = f"codes of {name} are read as values alone"
        raise PrecisionError(what, where=where, do="`convert --to hf` makes a directory in BF16 of them.")
    if not isinstance(name, str) or name not in methods:
        known = ", ".join(methods)
        why = _OTHERWISE.get(name, "") if isinstance(name, str) else ""
        raise PrecisionError(
            f"quant_method {name!r} is not one that can be read{why and f': {why}'}",
            where=where,
            do=f"Known: {known}." + (" Start from the model before quantization." if why else ""),
        )
    return methods[name]


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """A weight that is stored as codes: the tensor that has them, `codes`, what that is as a logical tensor, and where
    the rest of the encoding is."""

    codes: str
    spec: TensorSpec
    scales: Scales


def coded_weights(
    config: Mapping[str, Any], specs: Mapping[str, TensorSpec], where: object = "config.json"
) -> dict[str, CodedWeight]:
    """Every weight that is codes, by its name.

    `config` is all of config.json, `specs` every stored tensor, scales among them. Raises PrecisionError for a
    method or scheme that cannot be read, DamagedCheckpoint for codes whose scales are missing or misshapen.
    """
    method = recognise(config, where)
    said = method.read(config["quantization_config"]) if method else None
    packed = _packed(said, specs, where) if said else {}
    known = (*packed, *(name for name, spec in specs.items() if spec.packing))
    beside = {sibling(name, kind) for name in known for kind in (method.weight_scales if method else ())}
    others = {name: name for name, spec in specs.items() if spec.packing or spec.dtype in fp8.CODES}
    codes = packed | {name: stored for name, stored in others.items() if name not in {*beside, *packed}}
    if codes and (method is None or said is None):
        raise DamagedCheckpoint(f"{next(iter(codes))} is FP8 codes but there is no `quantization_config`", where=where)
    return {name: _coded(name, stored, method, said, specs, where) for name, stored in codes.items() if method and said}


def stored_scales(
    config: Mapping[str, Any], specs: Mapping[str, TensorSpec], where: object = "config.json"
) -> dict[str, Scales]:
    """Where the scales of every weight that is codes are, by the weight's name; as `coded_weights`."""
    return {name: coded.scales for name, coded in coded_weights(config, specs, where).items()}


def _packed(said: Quantization, specs: Mapping[str, TensorSpec], where: object) -> dict[str, str]:
    """The stored tensors that are words of four-bit codes, by the names of the weights. Raises DamagedCheckpoint for
    one that has their name and cannot be, PrecisionError for one whose groups of inputs are in another order."""
    found: dict[str, str] = {}
    packings = [form.packing for form in said.formats if form.packing and form.packing.block is None]
    for suffix in dict.fromkeys(packing.suffix for packing in packings):
        words = {packing.word for packing in packings if packing.suffix == suffix}
        for name, spec in specs.items():
            if not name.endswith(f".weight{suffix}") or len(spec.shape) != 2:
                continue
            weight = name.removesuffix(suffix)
            if spec.dtype in words:
                found[weight] = name
            elif suffix:
                kinds = " or ".join(dict.fromkeys(map(_in_words, said.formats)))
                raise DamagedCheckpoint(f"{name} is {spec.stored_dtype}; the config says: {kinds}", where=where)
            if suffix and weight in specs:
                raise DamagedCheckpoint(f"{weight} is there as values, and as codes: {name}", where=where)
            if (order := sibling(weight, "weight_g_idx")) in specs:
                what = f"{order} puts inputs into groups in another order than theirs (actorder)"
                raise PrecisionError(what, where=where, do="Start from the model before quantization.")
    return found


def _coded(
    weight: str, codes: str, method: QuantMethod, said: Quantization, specs: Mapping[str, TensorSpec], where: object
) -> CodedWeight:
    """The format that a weight's tensors are of; where its scales fit several, that which has the others beside it.
    Raises DamagedCheckpoint where there is none."""
    scale, spec = _present(weight, method.weight_scales, specs, where), specs[codes]
    possible = {form: found for form in said.formats if (found := _as_weight(spec, codes.removeprefix(weight), form))}
    fitting = [form for form, found in possible.items() if _fits(specs[scale], form, found)]
    if not fitting:
        spec = next(iter(possible.values()), spec)
        kinds = " or ".join(dict.fromkeys(map(_in_words, possible or said.formats)))
        raise DamagedCheckpoint(
            f"{scale} has shape {list(specs[scale].shape)} ({specs[scale].stored_dtype}) for a weight of "
            f"{list(spec.shape)}; the config says: {kinds}",
            where=where,
        )
    beside = _BESIDE if possible[fitting[0]].packing else ()
    there = {kind for kind in beside if sibling(weight, kind) in specs}
    form = min(fitting, key=lambda each: len(there ^ set(filter(None, each.beside))))
    if strange := sorted(there.difference(form.beside)):
        what = f"{sibling(weight, strange[0])} is beside codes that have none; the config says: {_in_words(form)}"
        raise DamagedCheckpoint(what, where=where, do="Start from the model before quantization.")
    global_scale, zeros, shape = (sibling(weight, kind) if kind else None for kind in form.beside)
    given = _input(weight, method, form, said, specs, where)
    size = sized(form.block, possible[form])
    scales = Scales(scale, given, size, global_scale, form.divides, zeros, shape)
    check_beside(scales, possible[form], specs, where)
    return CodedWeight(codes, possible[form], scales)


_BESIDE = ("weight_global_scale", "weight_scale_2", "weight_zero_point", "weight_shape", "pre_quant_scale")
"""What tools store beside codes of four bits, without which they are other values; the last, of ModelOpt's AWQ, is not
read."""


def _fits(scale: TensorSpec, form: CodeFormat, weight: TensorSpec) -> bool:
    """Whether a tensor can be the scales of a weight in a format. Groups of four-bit codes are whole ones."""
    size = sized(form.block, weight)
    grid = grid_shape(weight.rows, weight.columns, size)
    if form.packing and weight.columns % size[1]:
        return False
    return (not form.scales or scale.dtype in form.scales) and _without_ones(scale.shape) == _without_ones(grid)


def _as_weight(stored: TensorSpec, suffix: str, form: CodeFormat) -> TensorSpec | None:
    """The weight whose codes a stored tensor of a name with this suffix are in a format; None where they cannot be."""
    packing = form.packing
    if packing is None or stored.packing is not None:
        fits = stored.packing == packing and (packing is not None or stored.dtype in fp8.CODES)
        return stored if fits else None
    if (stored.dtype, suffix) != (packing.word, packing.suffix):
        return None
    return TensorSpec((stored.rows, stored.columns * packing.codes_in_word), packing.element.dtype, packing=packing)


def check_beside(scales: Scales, weight: TensorSpec, specs: Mapping[str, TensorSpec], where: object) -> None:
    """Raise DamagedCheckpoint where a tensor beside the scales of four-bit codes is not there, or of another shape or
    dtype than it has."""
    rows, groups = grid_shape(weight.rows, weight.columns, scales.block)
    one = ((), (1,))
    for name, shapes, dtypes in (
        (scales.global_scale, one, (DType.float32,)),
        (scales.input if weight.packing else None, one, (DType.float32,)),
        (scales.zero_points, ((-(-rows // 8), groups),), (DType.int32,)),
        (scales.shape, ((2,),), (DType.int64, DType.int32)),
    ):
        if name is None:
            continue
        if name not in specs:
            raise DamagedCheckpoint(f"no {name} for its codes", where=where, do="Is every shard there?")
        if specs[name].shape not in shapes:
            what = f"{name} has shape {list(specs[name].shape)}, not {' or '.join(str(list(each)) for each in shapes)}"
            raise DamagedCheckpoint(what, where=where)
        if specs[name].dtype not in dtypes:
            kinds = " or ".join(map(str, dtypes))
            raise DamagedCheckpoint(f"{name} is {specs[name].stored_dtype}, not {kinds}", where=where)


def _in_words(form: CodeFormat) -> str:
    block = _KINDS.get(form.block, f"one per block of {shown(form.block)}")
    return block if form.packing is None else f"{form.name}, {block.replace('per block', 'per whole block')}"


def _input(
    weight: str,
    method: QuantMethod,
    form: CodeFormat,
    said: Quantization,
    specs: Mapping[str, TensorSpec],
    where: object,
) -> str | None:
    """The fixed scale of a weight's input."""
    kinds = method.input_scales if form.packing is None else (form.input,) if form.input else ()
    wanted = said.static if said.static is not None else any(sibling(weight, kind) in specs for kind in kinds)
    given = _present(weight, kinds, specs, where) if wanted and kinds else None
    if given is not None and specs[given].rows * specs[given].columns != 1:
        raise DamagedCheckpoint(f"{given} has shape {list(specs[given].shape)}, not one scale", where=where)
    return given


def _present(weight: str, kinds: Sequence[str], specs: Mapping[str, TensorSpec], where: object) -> str:
    names = [sibling(weight, kind) for kind in kinds]
    for name in names:
        if name in specs:
            return name
    raise DamagedCheckpoint(f"no {' or '.join(names)} for its codes", where=where, do="Is every shard there?")


def sized(block: Block, spec: TensorSpec) -> tuple[int, int]:
    """The size of a block in rows and columns of one tensor, where `None` stands for all of them."""
    return max(1, spec.rows if block[0] is None else block[0]), max(1, spec.columns if block[1] is None else block[1])


CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".prob_scale")


def cache_scales(config: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """The tensors that hold scales for a KV cache (or for attention), which belong to no weight: scale_inv."""
    named = {name: spec for name, spec in specs.items() if name.endswith(CACHE_SCALES)}
    return named if config.get("quantization_config") else {}


def _without_ones(shape: tuple[int, ...]) -> list[int]:
    """A grid's shape as every tool spells it: `[]`, `[1]` and `[1, 1]`; `[rows]` and `[rows, 1]`; ModelOpt's
    `[rows / 128, 1, columns / 128, 1]`."""
    return [size for size in shape if size != 1]


def encoding(scale: Tensor, scales: Scales, weight: TensorSpec, where: object = "") -> Encoding:
    """How the codes of `weight` decode with this stored scale tensor, of any dtype and method; without a global scale
    and zero points, which `complete_encoding` reads too.

    Raises DamagedCheckpoint for a scale that is negative, infinite or NaN.
    """
    if scale.dtype == torch.uint8:  # exponents, as MXFP8 has been stored before there was a dtype for them
        scale = scale.view(torch.float8_e8m0fnu)
    grid = scale.reshape(grid_shape(weight.rows, weight.columns, scales.block))
    values = grid.float()
    if not bool((values.isfinite() & (values >= 0)).all()):
        raise DamagedCheckpoint(f"{scales.weight} holds a scale that is negative, infinite or NaN", where=where)
    element = weight.packing.element if weight.packing else element_of(weight.dtype)
    return Encoding(element, grid, scales.block)


def complete_encoding(
    read: Callable[[str], Tensor], scales: Scales, weight: TensorSpec, where: object = ""
) -> Encoding:
    """How the codes of `weight` decode with the tensors beside it, which `read` reads by name.

    Raises DamagedCheckpoint as `encoding` does, and for a weight's stored shape that is another one.
    """
    found = encoding(read(scales.weight), scales, weight, where)
    if scales.shape is not None and (shape := read(scales.shape).reshape(-1).tolist()) != list(weight.shape):
        what = f"{scales.shape} holds {shown(shape)} for codes of {list(weight.shape)}"
        raise DamagedCheckpoint(what, where=where)
    if scales.zero_points is not None:
        found = replace(found, zeros=zero_points(read(scales.zero_points), len(found.scale_inv)))
    if scales.global_scale is None:
        return found
    value = read(scales.global_scale).float().reshape(())
    made = replace(found, global_scale=GlobalScale(value, scales.divides))
    if not (bool(value.isfinite()) and value > 0 and bool(made.multipliers.isfinite().all())):
        what = f"{scales.global_scale} holds {float(value):.6g}, which is no global scale of these scales"
        raise DamagedCheckpoint(what, where=where)
    return made


def block_of(value: object) -> tuple[int, int]:
    """The size of a block as a config gives it. Raises PrecisionError for what is no pair of sizes."""
    if isinstance(value, list | tuple) and len(value) == 2 and all(type(n) is int and 0 < n < 1 << 31 for n in value):
        return value[0], value[1]
    raise PrecisionError(f"{shown(value)} as the size of a block", where="config.json")
