"""QuantMethod: one way of spelling FP8 in a Hugging Face directory, to write it and to read it.

A new one is a file in this folder with a `QUANT_METHOD` in it. Every scale tensor of every method here holds
scale_inv, whatever its name: the dequantize multiplier `x = code * scale_inv`, which is amax / 448.

Which weights are codes is read from the dtypes of the stored tensors, and not from a config's lists of modules:
tools match those by whole names, by parts of names, by globs and by regular expressions, each in its own way.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

import precisionctl.quant_methods
from precisionctl.discover import discover
from precisionctl.errors import DamagedCheckpoint, PrecisionError, shown
from precisionctl.fp8 import encoding as fp8
from precisionctl.fp8.encoding import Encoding, grid_shape
from precisionctl.param import TensorSpec

Scheme = Literal["static", "dynamic", "block", "mxfp8"]
"""`static`: a scale for each weight and one, fixed, for its input. `dynamic`: a scale for each output channel,
and one for each token that the engine makes while it runs. `block`: a scale for 128 x 128 values of a weight, and one
for 128 of a token that the engine makes. `mxfp8`: a power of two for 32 values of a row, of either."""

CODES = torch.float8_e4m3fn
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

BLOCKS: Mapping[Scheme, Block] = {"static": TENSOR, "dynamic": CHANNEL, "block": SQUARE, "mxfp8": (1, 32)}
"""How many rows and columns of a weight share a scale, by scheme."""


@dataclass(frozen=True)
class Quantization:
    """What a `quantization_config` says of its tensors.

    `blocks` are those that weights may have; where there are several, the shape of a weight's scales decides. `static`:
    whether inputs have fixed scales; None where some have and some have not.
    """

    blocks: tuple[Block, ...]
    static: bool | None

    @property
    def scheme(self) -> str:
        """The Scheme that this is, or a description of what is none of them."""
        for scheme, block in BLOCKS.items():
            if (self.blocks, self.static) == ((block,), scheme == "static"):
                return scheme
        weights = " or ".join(_KINDS.get(block, "block") for block in self.blocks)
        return f"{weights} weights and {'static' if self.static else 'dynamic'}"

    def narrowed(self, scales: "Mapping[str, Scales]", specs: Mapping[str, TensorSpec]) -> "Quantization":
        """The same with the one of several `blocks` that all weights have; unchanged where they have not one."""
        for block in self.blocks:
            if all(found.block == sized(block, specs[name]) for name, found in scales.items()):
                return Quantization((block,), self.static)
        return self


def together(parts: Iterable[Quantization]) -> Quantization:
    """What a config says as a whole whose groups of modules, or layers, say `parts`."""
    listed = list(parts)
    static = {part.static for part in listed}
    blocks = dict.fromkeys(block for part in listed for block in part.blocks)
    return Quantization(tuple(blocks), static.pop() if len(static) == 1 else None)


@dataclass(frozen=True)
class Scales:
    """The tensors that hold a quantised weight's scale_inv and its input's (`input` is None where that is dynamic),
    and how many rows and columns of the weight share a scale."""

    weight: str
    input: str | None
    block: tuple[int, int]

    @property
    def names(self) -> tuple[str, ...]:
        return (self.weight,) if self.input is None else (self.weight, self.input)


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
    one of `never` are known not to be quantised, named or not."""

    shapes: Mapping[str, Callable[[int, int], tuple[int, ...]]]
    config: Callable[[Scheme, Sequence[str]], dict[str, Any]]
    cache: CacheSpelling
    files: Callable[[Mapping[str, Any]], dict[str, bytes]] = lambda config: {}
    ignored: str = "ignore"
    never: tuple[str, ...] = ()

    def specs(self, scales: Scales, weight: TensorSpec, scheme: str) -> dict[str, TensorSpec]:
        """The scale tensors to store beside a weight: FP32, or exponents as bytes."""
        shape = self.shapes[scheme]
        found = {scales.weight: shape(*grid_shape(weight.rows, weight.columns, scales.block))}
        if scales.input is not None:
            found[scales.input] = shape(1, 1)
        dtype = torch.uint8 if scheme == "mxfp8" else torch.float32
        return {name: TensorSpec(size, dtype) for name, size in found.items()}


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
        name, given = sibling(weight, self.weight_scales[0]), sibling(weight, self.input_scales[0])
        return Scales(name, given if scheme == "static" else None, sized(BLOCKS[scheme], spec))


_SLICE = re.compile(r"(.+)(\[\d+\])")


def sibling(weight: str, kind: str) -> str:
    """The name of a scale beside a weight: `<module>.weight_scale` of `<module>.weight`, and of experts that are
    stored as one tensor `experts.gate_up_proj_scale[3]` of `experts.gate_up_proj[3]`, and of its `_blocks[3]`."""
    if match := _SLICE.fullmatch(weight):
        return f"{match[1].removesuffix('_blocks')}_{kind.removeprefix('weight_')}{match[2]}"
    return f"{weight.removesuffix('.weight')}.{kind}"


def quant_methods() -> dict[str, QuantMethod]:
    """Every method in this folder, by its name in config.json."""
    methods: list[QuantMethod] = discover(precisionctl.quant_methods, "QUANT_METHOD")
    return {method.name: method for method in methods}


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
    if not isinstance(name, str) or name not in methods:
        known = ", ".join(methods)
        raise PrecisionError(f"quant_method {name!r} is not one that can be read", where=where, do=f"Known: {known}.")
    return methods[name]


def stored_scales(
    config: Mapping[str, Any], specs: Mapping[str, TensorSpec], where: object = "config.json"
) -> dict[str, Scales]:
    """Where the scales of every weight that is FP8 codes are, by the weight's name.

    `config` is all of config.json, `specs` every stored tensor, scales among them. Raises PrecisionError for a
    method or scheme that cannot be read, DamagedCheckpoint for codes whose scales are missing or misshapen.
    """
    method = recognise(config, where)
    codes = [name for name, spec in specs.items() if spec.dtype in fp8.CODES]
    if method is None:
        if codes:
            raise DamagedCheckpoint(f"{codes[0]} is FP8 codes but there is no `quantization_config`", where=where)
        return {}
    said = method.read(config["quantization_config"])
    return {name: _found(name, method, said, specs, where) for name in codes}


def _found(
    weight: str, method: QuantMethod, said: Quantization, specs: Mapping[str, TensorSpec], where: object
) -> Scales:
    scale = _present(weight, method.weight_scales, specs, where)
    wanted = said.static if said.static is not None else any(sibling(weight, k) in specs for k in method.input_scales)
    given = _present(weight, method.input_scales, specs, where) if wanted else None
    if given is not None and specs[given].rows * specs[given].columns != 1:
        raise DamagedCheckpoint(f"{given} has shape {list(specs[given].shape)}, not one scale", where=where)
    for block in said.blocks:
        size = sized(block, specs[weight])
        grid = grid_shape(specs[weight].rows, specs[weight].columns, size)
        if _without_ones(specs[scale].shape) == _without_ones(grid):
            return Scales(scale, given, size)
    kinds = " or ".join(_KINDS.get(block, f"one per block of {shown(block)}") for block in said.blocks)
    raise DamagedCheckpoint(
        f"{scale} has shape {list(specs[scale].shape)} for a weight of {list(specs[weight].shape)}; "
        f"the config says: {kinds}",
        where=where,
    )


def _present(weight: str, kinds: Sequence[str], specs: Mapping[str, TensorSpec], where: object) -> str:
    names = [sibling(weight, kind) for kind in kinds]
    for name in names:
        if name in specs:
            return name
    raise DamagedCheckpoint(f"no {' or '.join(names)} for its FP8 codes", where=where, do="Is every shard there?")


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
    """How the codes of `weight` decode with this stored scale tensor, of any dtype and method.

    Raises DamagedCheckpoint for a scale that is negative, infinite or NaN.
    """
    if scale.dtype == torch.uint8:  # exponents, as MXFP8 has been stored before there was a dtype for them
        scale = scale.view(torch.float8_e8m0fnu)
    grid = scale.reshape(grid_shape(weight.rows, weight.columns, scales.block))
    values = grid.float()
    if not bool((values.isfinite() & (values >= 0)).all()):
        raise DamagedCheckpoint(f"{scales.weight} holds a scale that is negative, infinite or NaN", where=where)
    return Encoding(weight.dtype, grid, scales.block)


def block_of(value: object) -> tuple[int, int]:
    """The size of a block as a config gives it. Raises PrecisionError for what is no pair of sizes."""
    if isinstance(value, list | tuple) and len(value) == 2 and all(type(n) is int and 0 < n < 1 << 31 for n in value):
        return value[0], value[1]
    raise PrecisionError(f"{shown(value)} as the size of a block", where="config.json")
