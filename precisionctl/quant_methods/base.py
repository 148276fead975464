"""QuantMethod: one way of spelling codes of weights in a Hugging Face directory, to write it and to read it.

A new one is a file in this folder with a `QUANT_METHOD` in it; a new format of codes is a CodeFormat that its `read`
gives. Every scale tensor of a weight holds scale_inv, whatever its name: the dequantize multiplier
`x = code * scale_inv`; only global scales of four-bit formats may be divisors (`CodeFormat.divides`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import precisionctl.quant_methods
from precisionctl.codes.elements import E2M1, E4M3, Element, Packing
from precisionctl.codes.encoding import grid_shape
from precisionctl.codes.group_scales import INT4_GROUP, MXFP4_GROUP, NVFP4_GROUP
from precisionctl.discover import discover_names
from precisionctl.dtypes import DType
from precisionctl.errors import PrecisionError, shown
from precisionctl.param import TensorSpec, shared_spec
from precisionctl.quant_methods.scales import Scales, sibling

CODES = DType.float8_e4m3fn
"""The dtype of FP8 weights in exports. Every engine reads it, and none reads E5M2 weights."""

Block = tuple[int | None, int | None]
"""How many rows and columns share a scale; None: all of them."""

TENSOR: Block = (None, None)
CHANNEL: Block = (1, None)
_KINDS = {TENSOR: "per-tensor", CHANNEL: "per-channel"}
_PARTS = {TENSOR: "tensor", CHANNEL: "channel"}

SQUARE = (128, 128)
"""DeepSeek's blocks, the only ones that every engine here has kernels for."""

KEYS_OF_VALUES = ("ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers")
"""Keys of a `quantization_config` with lists of modules that are not codes."""

POWERS_OF_2: Mapping[str, str] = {"scale_fmt": "ue8m0"}
"""The keys by which `quant_method: fp8` says that its blocks' scales are powers of two, and that inputs' scales must
be."""

Scheme = Literal["static", "dynamic", "block", "mxfp8", "nvfp4", "nvfp4a16", "mxfp4", "w4a16"]
"""A scheme by its name, as `--scheme` has it."""


@dataclass(frozen=True)
class SchemeRow:
    """What an export in a scheme stores: a row of SCHEMES.

    `words` say it in a model card. `block` says how many rows and columns of a weight share a scale. `codes` is the
    name of the weights' format (`CodeFormat.name`). `shared`: all of a weight has one scale, or one global scale.
    `coded_inputs`: the engine quantizes activations too, with scales found at run time, or stored ones
    (`fixed_inputs`).
    """

    words: str
    block: Block
    codes: str = "FP8"
    shared: bool = False
    fixed_inputs: bool = False
    coded_inputs: bool = True


SCHEMES: Mapping[Scheme, SchemeRow] = {
    "static": SchemeRow("one scale for a weight, one for all its inputs", TENSOR, shared=True, fixed_inputs=True),
    "dynamic": SchemeRow("one scale for an output channel of a weight, one for a token of inputs", CHANNEL),
    "block": SchemeRow("one scale for 128 x 128 values of a weight, one for 128 of inputs", SQUARE),
    "mxfp8": SchemeRow("a power of two for 32 values of a weight or of inputs", (1, 32)),
    "nvfp4": SchemeRow(
        "one scale for 16 values of a weight, or of inputs, under a global one",
        (1, NVFP4_GROUP),
        "NVFP4",
        shared=True,
        fixed_inputs=True,
    ),
    "nvfp4a16": SchemeRow(
        "one scale for 16 values of a weight under a global one, inputs as they are",
        (1, NVFP4_GROUP),
        "NVFP4",
        shared=True,
        coded_inputs=False,
    ),
    "mxfp4": SchemeRow("a power of two for 32 values of a weight or of inputs", (1, MXFP4_GROUP), "MXFP4"),
    "w4a16": SchemeRow(
        "4-bit integers, one scale for 128 values of a weight, inputs as they are",
        (1, INT4_GROUP),
        "INT4",
        coded_inputs=False,
    ),
}

FOUR_BITS: Mapping[str, str] = {name: scheme.codes for name, scheme in SCHEMES.items() if scheme.codes != "FP8"}
"""The `codes` of schemes of four bits. What is stored of inputs is no part of such a name, so a directory of such a
format is known by its name alone."""


FLOATS = (DType.float32, DType.bfloat16, DType.float16)
EXPONENTS = (DType.uint8, DType.float8_e8m0fnu)
"""Dtypes that a tensor of scales may have; llm-compressor writes the model's. Bytes are exponents."""


@dataclass(frozen=True)
class InputFormat:
    """The format that engines quantize activations to at run time: an `element`, with a scale for each token, or for
    each group of the size that the weights have. `element` is None for a format that we cannot emulate; `words` names
    it.

    `even`: MXFP4 under the scales of `group_scales.mxfp4_scales`. `zero_point`: integers with one for each token.
    `bound`: a token's amax is cut off there.
    """

    element: Element | None
    words: str = ""
    even: bool = False
    zero_point: bool = False
    bound: float = math.inf


IN_FP8 = InputFormat(E4M3)


@dataclass(frozen=True)
class CodeFormat:
    """What the codes of a weight are, and which tensors hold the rest of its encoding: a row of a method's table.

    `block` says how many rows and columns share a scale. `scales` are the dtypes that scales may have; empty for any.
    Without a `packing`, codes are FP8, and their dtype says which. The next fields are names of tensors beside the
    weight, None if the format lacks one: `global_scale`, FP32, which `divides` or multiplies the scales of blocks;
    `zero_points`, integers packed along rows; the weight's `shape`; `input`, the fixed scale of its input, global where
    there is a global scale; and `input_zero_point`, beside it or, as the scale, found by the engine. `inputs` is None
    where these stay as they are, unless a fixed scale says what they become.
    """

    block: Block
    packing: Packing | None = None
    scales: tuple[DType, ...] = ()
    global_scale: str | None = None
    divides: bool = False
    zero_points: str | None = None
    shape: str | None = None
    input: str | None = None
    input_zero_point: str | None = None
    inputs: InputFormat | None = None

    @property
    def name(self) -> str:
        return self.packing.name if self.packing else "FP8"

    @property
    def other_tensors(self) -> tuple[str | None, str | None, str | None]:
        """The names of the tensors that a weight has besides its scales: global scale, zero points, shape."""
        return self.global_scale, self.zero_points, self.shape

    @property
    def in_words(self) -> str:
        block = _KINDS.get(self.block, f"one per block of {shown(self.block)}")
        return block if self.packing is None else f"{self.name}, {block.replace('per block', 'per whole block')}"


MXFP4 = CodeFormat((1, MXFP4_GROUP), Packing("MXFP4", E2M1, DType.uint8), EXPONENTS)
"""As ModelOpt and Quark store it, but for what becomes of inputs."""


@dataclass(frozen=True)
class Quantization:
    """The content of a `quantization_config`.

    `formats` are the formats that weights may have; if there are several, a weight's tensors decide. `static` says
    whether inputs have fixed scales; None if some have and some have not. `by_target` has the formats of the parts of a
    config that has several, by each module, pattern or class that a part is for, in the config's order; those of all
    others under an empty target.
    """

    formats: tuple[CodeFormat, ...]
    static: bool | None
    by_target: Mapping[str, tuple[CodeFormat, ...]] = field(default_factory=dict)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The block sizes that FP8 weights may have."""
        return tuple(dict.fromkeys(form.block for form in self.formats if form.packing is None))

    @property
    def scheme(self) -> str:
        """The name of the Scheme, or a description if it is none of them."""
        floats = any(form.scales == FLOATS for form in self.formats)
        for name, scheme in SCHEMES.items():
            is_alike = (self.blocks, self.static) == ((scheme.block,), scheme.fixed_inputs)
            if scheme.codes == "FP8" and is_alike and not (name == "mxfp8" and floats):
                return name
        if not self.blocks:
            return " or ".join(dict.fromkeys(form.name for form in self.formats))
        kinds = (_KINDS.get(block, "group" if block[0] == 1 else "block") for block in self.blocks)
        weights = " or ".join(dict.fromkeys(kinds))
        return f"{weights} weights and {'static' if self.static else 'dynamic'}"

    def narrowed(self, scales: Mapping[str, Scales], specs: Mapping[str, TensorSpec]) -> Quantization:
        """The same, with the single one of several `blocks` that all weights have; unchanged if they do not share
        one."""
        for block in self.blocks:
            if all(found.block == sized(block, specs[name]) for name, found in scales.items()):
                return replace(self, formats=tuple(form for form in self.formats if form.block == block))
        return self


OF_CACHE_ALONE = Quantization((), None)
"""Of a config that says of its KV cache alone what it is in: all weights are values."""


def codes_kind(form: CodeFormat, fixed: bool | None) -> str:
    """What codes in a format are: a scheme of FP8, by whether inputs have `fixed` scales, or the name of packed
    codes."""
    return form.packing.name if form.packing else Quantization((form,), fixed).scheme


def form_in_words(form: CodeFormat, fixed: bool | None) -> str:
    """What codes in a format are, for people, by whether inputs have `fixed` scales."""
    if form.packing:
        return f"{form.name} weights"
    high, wide = form.block
    part = f"group of {wide} inputs" if high == 1 else f"block of {high} x {wide}"
    inputs = "in FP8 by fixed scales" if fixed else "in FP8" if form.inputs else "as they are"
    return f"FP8 weights, a scale for each {_PARTS.get(form.block, part)}, inputs {inputs}"


def in_fp8(blocks: Iterable[Block], static: bool | None, *, inputs: InputFormat | None = IN_FP8) -> Quantization:
    """FP8 codes with scales for such blocks, and inputs in FP8, or as they are."""
    return Quantization(tuple(CodeFormat(block, inputs=inputs) for block in blocks), static)


def combined(parts: Iterable[tuple[Sequence[str], Quantization]]) -> Quantization:
    """The Quantization of a config that has several `parts`, each with what it is for: names or patterns of modules, or
    classes."""
    listed = list(parts)
    static = {part.static for _, part in listed}
    formats = dict.fromkeys(form for _, part in listed for form in part.formats)
    by_target: dict[str, tuple[CodeFormat, ...]] = {}
    for targets, part in listed:
        by_target |= dict.fromkeys(targets, part.formats)  # of a target that several parts have, the last counts
    return Quantization(tuple(formats), static.pop() if len(static) == 1 else None, by_target)


@dataclass(frozen=True)
class CacheSpelling:
    """How the scale_inv of an FP8 KV cache are stored: the `names` of the scales of keys and of values, below the
    attention's own name, their `shape`, and the keys of `quantization_config` that announce them. They are FP32; with
    `as_bf16` their values are rounded to BF16, because a reader does so."""

    names: tuple[str, str]
    shape: tuple[int, ...]
    config: Mapping[str, Any]
    as_bf16: bool = True


_FP8_FORMATS: Mapping[Scheme, CodeFormat] = {
    name: CodeFormat(scheme.block, scales=(DType.uint8 if name == "mxfp8" else DType.float32,))
    for name, scheme in SCHEMES.items()
    if scheme.codes == "FP8"
}
"""The formats of FP8 schemes, which all methods write alike: exponents as bytes for MXFP8, else scales in FP32."""


@dataclass(frozen=True)
class Spelling:
    """How an export is written in a method's form.

    `config(scheme, ignored)` is the `quantization_config`; `ignored` are the full names of the linear and embedding
    modules that are not quantized. `cache` says how the scales of a KV cache are stored, and `files(config)`
    are further files, by name. `shape(block, grid)` is the shape in which a grid of scales for such blocks is stored.
    Loaders know that modules whose name ends in one of `never` are not quantized, so these need not be listed.
    `ignored_by_part`: some loaders also skip a module whose name contains a listed name that is not a glob. `four_bits`
    has the formats of four-bit schemes.
    """

    config: Callable[[Scheme, Sequence[str]], dict[str, Any]]
    cache: CacheSpelling
    files: Callable[[Mapping[str, Any]], dict[str, bytes]] = lambda config: {}
    shape: Callable[[Block, tuple[int, int]], tuple[int, ...]] = lambda block, grid: grid
    never: tuple[str, ...] = ()
    ignored_by_part: bool = False
    four_bits: Mapping[Scheme, CodeFormat] = field(default_factory=dict)

    def form(self, scheme: Scheme) -> CodeFormat:
        """The format of a weight's codes in a scheme."""
        return self.four_bits[scheme] if scheme in self.four_bits else _FP8_FORMATS[scheme]

    def codes(self, weight: TensorSpec, scheme: Scheme) -> TensorSpec:
        """A weight's spec once it is codes."""
        packing = self.form(scheme).packing
        return shared_spec(weight.shape, packing.element.dtype if packing else CODES, weight.parallel, packing)

    def specs(self, scales: Scales, weight: TensorSpec, form: CodeFormat) -> dict[str, TensorSpec]:
        """The tensors that are stored beside a weight in a format. A format that is only read may not say the dtype of
        its scales: then they are taken for FP32."""
        grid, dtype = grid_shape(weight.rows, weight.columns, scales.block), (*form.scales, DType.float32)[0]
        one = shared_spec(self.shape(TENSOR, (1, 1)), DType.float32)
        found = {scales.weight: shared_spec(self.shape(form.block, grid), dtype)}
        found |= {name: one for name in (scales.global_scale, scales.input) if name is not None}
        if scales.shape is not None:
            found[scales.shape] = shared_spec((2,), DType.int64)
        return found


@dataclass(frozen=True)
class QuantMethod:
    """`name` is config.json's `quant_method`. `read(config)` reads a `quantization_config`, of whatever tool; it raises
    PrecisionError for what cannot be read. `weight_scales` and `input_scales` are the names that scales have; of
    several, the first is looked for first. `spelling` is for methods that exports are written in. `own_names`: codes
    are stored under names of their own, not their weights', and engines read them only under these.
    """

    name: str
    read: Callable[[Mapping[str, Any]], Quantization]
    weight_scales: tuple[str, ...] = ("weight_scale",)
    input_scales: tuple[str, ...] = ("input_scale",)
    spelling: Spelling | None = None
    own_names: bool = False

    def scales(self, weight: str, spec: TensorSpec, scheme: Scheme) -> Scales:
        """The names of a weight's scale tensors in an export, and the size of its blocks."""
        assert self.spelling is not None, "exports are written in it"
        form, name = self.spelling.form(scheme), sibling(weight, self.weight_scales[0])
        kind = form.input if form.packing else self.input_scales[0]
        given = sibling(weight, kind) if kind and SCHEMES[scheme].fixed_inputs else None
        whole, shape = (sibling(weight, kind) if kind else None for kind in (form.global_scale, form.shape))
        return Scales(name, given, sized(form.block, spec), whole, form.divides, shape=shape)


def quant_methods() -> dict[str, QuantMethod]:
    """Every method in this folder, and of plug-ins, by its name in config.json."""
    return discover_names(precisionctl.quant_methods, "QUANT_METHOD", QuantMethod, lambda method: [method.name])


def sized(block: Block, spec: TensorSpec) -> tuple[int, int]:
    """The size of a block in rows and columns of one tensor, where `None` stands for all of them."""
    return max(1, spec.rows if block[0] is None else block[0]), max(1, spec.columns if block[1] is None else block[1])


def block_of(value: object) -> tuple[int, int]:
    """The size of a block as a config gives it. Raises PrecisionError for what is no pair of sizes."""
    if isinstance(value, list | tuple) and len(value) == 2 and all(type(n) is int and 0 < n < 1 << 31 for n in value):
        return value[0], value[1]
    raise PrecisionError(f"{shown(value)} as the size of a block", where="config.json")
