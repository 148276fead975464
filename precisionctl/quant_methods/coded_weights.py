"""Weights that a Hugging Face directory stores as codes: which they are, where their scales are, how they decode.

Which weights are codes is read from the dtypes of the stored tensors, and not from a config's lists of modules:
tools match those by whole names, by parts of names, by globs and by regular expressions, each in its own way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from precisionctl.codes import zero_points
from precisionctl.codes.elements import E4M3, FP8
from precisionctl.codes.encoding import Encoding, GlobalScale, grid_shape
from precisionctl.dtypes import DType
from precisionctl.errors import DamagedCheckpoint, PrecisionError, shown
from precisionctl.param import TensorSpec
from precisionctl.quant_methods.base import FLOATS, TENSOR, CodeFormat, Quantization, QuantMethod, quant_methods, sized
from precisionctl.quant_methods.compressed_tensors import OLDER_KEY
from precisionctl.quant_methods.scales import Scales, sibling
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor

AS_VALUES = (
    *("gptq", "awq", "auto-round", "bitsandbytes", "torchao", "inkling2_loop"),
    *("bitnet", "gemma", "hqq", "metal", "quanto", "mlx", "fp_quant", "aqlm", "vptq", "sinq", "eetq"),
)
"""Methods whose codes are only read as values (`checkpoints/decoded/`)."""

MLX_KEY = "quantization"
KEYS_OF_CODES = ("quantization_config", OLDER_KEY, MLX_KEY)
"""Keys of config.json that say how weights are coded: the usual one, compressed-tensors' of 2024, and MLX's."""


def quant_method_of(config: Mapping[str, Any]) -> object:
    """What a config.json names as its `quant_method`; None if nothing."""
    quantization = config.get("quantization_config")
    return quantization.get("quant_method") if isinstance(quantization, Mapping) else None


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
        known = ", ".join((*methods, *AS_VALUES))
        do = f"Let the tool that made them decode them, or start from the release in BF16. Known: {known}."
        raise PrecisionError(f"quant_method {name!r} is not one that can be read", where=where, do=do)
    return methods[name]


def scheme_of(quantization: Mapping[str, Any], scales: Mapping[str, Scales], weights: Mapping[str, TensorSpec]) -> str:
    """The scheme that a `quantization_config` names, as far as its weights show; empty for codes of no directory."""
    method = recognise({"quantization_config": quantization})
    return method.read(quantization).narrowed(scales, weights).scheme if method else ""


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """A weight that is stored as codes: the name of the tensor that holds them (`codes`), its `spec` as a logical
    tensor, its format, and the tensors of the rest of the encoding (`scales`)."""

    codes: str
    spec: TensorSpec
    form: CodeFormat
    scales: Scales


_OF_STACK = re.compile(r"\.experts\.[a-z_]+_weight_scale(\[\d+\])?$")
"""Names of scales as the NVFP4 release of Muse Spark has them."""


def coded_weights(
    config: Mapping[str, Any], specs: Mapping[str, TensorSpec], where: object = "config.json"
) -> dict[str, CodedWeight]:
    """Every weight that is codes, by its name.

    `config` is all of config.json, `specs` every stored tensor, scales among them. Raises PrecisionError for a
    method or scheme that cannot be read, DamagedCheckpoint for codes whose scales are missing or misshapen.
    """
    method = recognise(config, where)
    quantization = method.read(config["quantization_config"]) if method else None
    if method and (of_stack := next(filter(_OF_STACK.search, specs), None)):
        what = (
            f"{of_stack.partition('[')[0]} is of codes of all experts of a layer in one tensor, as ModelOpt stores them"
        )
        raise PrecisionError(what, where=where, do="They are not read here: start from the unquantized model.")
    packed = _packed(quantization, specs, where) if quantization else {}
    known = (*packed, *(name for name, spec in specs.items() if spec.packing))
    beside = {sibling(name, kind) for name in known for kind in (method.weight_scales if method else ())}
    others = {name: name for name, spec in specs.items() if spec.packing or spec.dtype in FP8}
    codes = packed | {name: stored for name, stored in others.items() if name not in {*beside, *packed}}
    if not codes:
        return {}
    if method is None or quantization is None:
        raise DamagedCheckpoint(f"{next(iter(codes))} is FP8 codes but there is no `quantization_config`", where=where)
    return {name: _coded(name, stored, method, quantization, specs, where) for name, stored in codes.items()}


def _packed(quantization: Quantization, specs: Mapping[str, TensorSpec], where: object) -> dict[str, str]:
    """The stored tensors that are words of packed codes, by the names of the weights. Raises DamagedCheckpoint for a
    tensor with their name that cannot be codes, PrecisionError for one whose groups of inputs are reordered."""
    found: dict[str, str] = {}
    packings = [form.packing for form in quantization.formats if form.packing and form.packing.block is None]
    for suffix in dict.fromkeys(packing.suffix for packing in packings):
        words = {packing.word for packing in packings if packing.suffix == suffix}
        for name, spec in specs.items():
            if not name.endswith(f".weight{suffix}") or len(spec.shape) != 2:
                continue
            weight = name.removesuffix(suffix)
            if spec.dtype in words:
                found[weight] = name
            elif suffix:
                kinds = " or ".join(dict.fromkeys(form.in_words for form in quantization.formats))
                raise DamagedCheckpoint(f"{name} is {spec.stored_dtype}; the config says: {kinds}", where=where)
            if suffix and weight in specs:
                raise DamagedCheckpoint(f"{weight} is there as values, and as codes: {name}", where=where)
            if (order := sibling(weight, "weight_g_idx")) in specs:
                what = f"{order} puts inputs into groups in another order than theirs (actorder)"
                raise PrecisionError(what, where=where, do="Start from the unquantized model.")
    return found


def _coded(
    weight: str,
    codes: str,
    method: QuantMethod,
    quantization: Quantization,
    specs: Mapping[str, TensorSpec],
    where: object,
) -> CodedWeight:
    """The weight with the format that its tensors have. If its scales fit several formats, the one whose other tensors
    are there. A part of a table of n-grams has the table's scale. Raises DamagedCheckpoint if no format fits."""
    if (table := ngram_table(weight)) and (of_table := f"{table}.weight_scale") in specs:
        spec = specs[codes]
        if spec.packing is not None or not _fits(specs[of_table], _TABLE, spec):
            stored = specs[of_table]
            what = f"{of_table} has shape {list(stored.shape)} ({stored.stored_dtype}), not one scale of FP8 codes"
            raise DamagedCheckpoint(what, where=where)
        return CodedWeight(codes, spec, _TABLE, Scales(of_table, None, sized(TENSOR, spec)))

    scale, spec = _present(weight, method.weight_scales, specs, where), specs[codes]
    suffix = codes.removeprefix(weight)
    possible = [(form, found) for form in quantization.formats if (found := _as_weight(spec, suffix, form))]
    fitting = [(form, found) for form, found in possible if _fits(specs[scale], form, found)]
    if not fitting:
        spec = possible[0][1] if possible else spec
        forms = [form for form, _ in possible] or quantization.formats
        said = " or ".join(dict.fromkeys(form.in_words for form in forms))
        raise DamagedCheckpoint(
            f"{scale} has shape {list(specs[scale].shape)} ({specs[scale].stored_dtype}) for a weight of "
            f"{list(spec.shape)}; the config says: {said}",
            where=where,
        )
    beside = _BESIDE if fitting[0][1].packing else ()
    there = {kind for kind in beside if sibling(weight, kind) in specs}
    form, spec = min(fitting, key=lambda each: len(there ^ set(filter(None, each[0].other_tensors))))
    if strange := sorted(there.difference(form.other_tensors)):
        what = f"{sibling(weight, strange[0])} is beside codes that have none; the config says: {form.in_words}"
        raise DamagedCheckpoint(what, where=where, do="Start from the unquantized model.")
    global_scale, zeros, shape = (sibling(weight, kind) if kind else None for kind in form.other_tensors)
    given = _input(weight, method, form, quantization, specs, where)
    size = sized(form.block, spec)
    of_input = sibling(weight, form.input_zero_point) if given and form.input_zero_point else None
    largest = input_largest(spec)
    scales = Scales(scale, given, size, global_scale, form.divides, zeros, shape, of_input, largest)
    check_other_tensors(scales, spec, specs, where)
    return CodedWeight(codes, spec, form, scales)


_TABLE = CodeFormat(TENSOR)
"""That of a table: no linear's, so the config says nothing of its scale."""

_PART_OF_TABLE = re.compile(r"(.+\.ngram_embedding)\.shard_\d+\.weight")


def ngram_table(weight: str) -> str | None:
    """The table that a weight is a part of, whose parts have one scale: of n-grams, as Qwen3.8-Flash-Next-FP8 has one.
    None for other weights. transformers 5.24 integrations/finegrained_fp8.py, FP8Embedding."""
    found = _PART_OF_TABLE.fullmatch(weight)
    return found[1] if found else None


def input_largest(weight: TensorSpec) -> float:
    """As `Scales.input_largest`, of the input of codes: integers meet integers, all others FP8."""
    return (weight.element if weight.element.is_integer else E4M3).of_amax


_BESIDE = ("weight_global_scale", "weight_scale_2", "weight_zero_point", "weight_shape", "pre_quant_scale")
"""Tensors that tools store beside packed codes and that are needed to decode them. The last, of ModelOpt's AWQ, is not
read."""


def _fits(scale: TensorSpec, form: CodeFormat, weight: TensorSpec) -> bool:
    """Whether a tensor can be the scales of a weight in a format. Groups of packed codes are whole ones."""
    size = sized(form.block, weight)
    grid = grid_shape(weight.rows, weight.columns, size)
    if form.packing and weight.columns % size[1]:
        return False
    numbers = scale.dtype.is_floating_point or scale.dtype == DType.uint8  # the latter are exponents (`encoding`)
    known = scale.dtype in form.scales if form.scales else numbers
    # tools store `[]`, `[1]` and `[1, 1]`; `[rows]` and `[rows, 1]`; ModelOpt `[rows / 128, 1, columns / 128, 1]`
    stored = scale.shape if len(scale.shape) > 1 else (*scale.shape, 1, 1)[:2]
    if len(stored) == 4 and stored[1] == stored[3] == 1:
        stored = stored[0], stored[2]
    return known and stored == grid


def _as_weight(stored: TensorSpec, suffix: str, form: CodeFormat) -> TensorSpec | None:
    """The logical weight if a stored tensor, whose name has this suffix, holds codes in this format; None if it does
    not."""
    packing = form.packing
    if packing is None or stored.packing is not None:
        fits = stored.packing == packing and (packing is not None or stored.dtype in FP8)
        return stored if fits else None
    if (stored.dtype, suffix) != (packing.word, packing.suffix):
        return None
    return TensorSpec((stored.rows, stored.columns * packing.codes_in_word), packing.element.dtype, packing=packing)


def check_other_tensors(scales: Scales, weight: TensorSpec, specs: Mapping[str, TensorSpec], where: object) -> None:
    """Raise DamagedCheckpoint where a tensor beside the scales of packed codes is not there, or of another shape or
    dtype than it has."""
    rows, groups = grid_shape(weight.rows, weight.columns, scales.block)
    one, in_word = ((), (1,)), 32 // weight.element.bits
    for name, shapes, dtypes in (
        (scales.global_scale, one, (DType.float32,)),
        (scales.input if weight.packing else None, one, FLOATS if scales.global_scale is None else (DType.float32,)),
        (scales.input_zero_point, one, (DType.int8,)),
        (scales.zero_points, ((-(-rows // in_word), groups),), (DType.int32,)),
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


def _input(
    weight: str,
    method: QuantMethod,
    form: CodeFormat,
    quantization: Quantization,
    specs: Mapping[str, TensorSpec],
    where: object,
) -> str | None:
    """The fixed scale of a weight's input; None if it has none."""
    kinds = method.input_scales if form.packing is None else (form.input,) if form.input else ()
    fixed = quantization.static
    if fixed is None:
        fixed = any(sibling(weight, kind) in specs for kind in kinds)
    given = _present(weight, kinds, specs, where) if fixed and kinds else None
    if given is not None and specs[given].rows * specs[given].columns != 1:
        raise DamagedCheckpoint(f"{given} has shape {list(specs[given].shape)}, not one scale", where=where)
    return given


def _present(weight: str, kinds: Sequence[str], specs: Mapping[str, TensorSpec], where: object) -> str:
    names = [sibling(weight, kind) for kind in kinds]
    for name in names:
        if name in specs:
            return name
    raise DamagedCheckpoint(f"no {' or '.join(names)} for its codes", where=where, do="Is every shard there?")


def encoding(scale: Tensor, scales: Scales, weight: TensorSpec, where: object = "") -> Encoding:
    """The Encoding of a weight from its stored scales, of any dtype and method. It lacks a global scale and zero
    points, which `complete_encoding` also reads.

    Raises DamagedCheckpoint for a scale that is negative, infinite or NaN.
    """
    if scale.dtype == torch.uint8:  # exponents, as MXFP8 has been stored before there was a dtype for them
        scale = scale.view(torch.float8_e8m0fnu)
    grid = scale.reshape(grid_shape(weight.rows, weight.columns, scales.block))
    values = grid.float()
    if not bool((values.isfinite() & (values >= 0)).all()):
        raise DamagedCheckpoint(f"{scales.weight} holds a scale that is negative, infinite or NaN", where=where)
    return Encoding(weight.element, grid, scales.block)


def complete_encoding(
    read: Callable[[str], Tensor], scales: Scales, weight: TensorSpec, where: object = ""
) -> Encoding:
    """The Encoding of a weight from all its tensors, which `read` reads by name.

    Raises DamagedCheckpoint as `encoding` does, and if the stored shape is not the weight's.
    """
    found = encoding(read(scales.weight), scales, weight, where)
    if scales.shape is not None and (shape := read(scales.shape).reshape(-1).tolist()) != list(weight.shape):
        what = f"{scales.shape} holds {shown(shape)} for codes of {list(weight.shape)}"
        raise DamagedCheckpoint(what, where=where)
    if scales.zero_points is not None:
        words = read(scales.zero_points)
        found = replace(found, zeros=zero_points.unpacked(words, len(found.scale_inv), found.element.bits))
    if scales.global_scale is None:
        return found
    value = read(scales.global_scale).float().reshape(())
    made = replace(found, global_scale=GlobalScale(value, scales.divides))
    if not (bool(value.isfinite()) and value > 0 and bool(made.multipliers.isfinite().all())):
        what = f"{scales.global_scale} holds {float(value):.6g}, which is no global scale of these scales"
        raise DamagedCheckpoint(what, where=where)
    return made
