"""Demands on codes, their scales and what config.json says of them. Each function yields where a directory breaks a
demand, and how; an engine pairs it with its own text and source. The first three are made by every engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from precisionctl.codes.numerics import LARGEST_SCALE, SMALLEST_SCALE
from precisionctl.dtypes import DType
from precisionctl.engines.rules.ignore_lists import BY_NAME_OR_REGEX, is_of_a_class, words
from precisionctl.engines.rules.ignored_modules import IgnoreList
from precisionctl.engines.rules.rule import Breaches, Demand, QuantizedDirectory
from precisionctl.errors import shown
from precisionctl.param import is_slice
from precisionctl.quant_methods.base import CODES, EXPONENTS, FLOATS, POWERS_OF_2, SCHEMES, TENSOR, sized
from precisionctl.quant_methods.caches import cache_scales
from precisionctl.quant_methods.coded_weights import ngram_table
from precisionctl.quant_methods.compressed_tensors import config_groups
from precisionctl.quant_methods.scales import sibling
from precisionctl.torch_when_used import torch

CONFIG = "config.json"


def other_codes(directory: QuantizedDirectory) -> Breaches:
    """Weights whose FP8 codes are not E4M3, which no engine takes."""
    for name in directory.scales:
        spec = directory.specs[name]
        if spec.packing is None and spec.dtype != CODES:
            yield name, f"{spec.dtype} codes"


def wrong_scales(directory: QuantizedDirectory) -> Breaches:
    """Scales of a shape or dtype that the scheme does not have."""
    specs, exponents = directory.specs, {"block": (*FLOATS, DType.float8_e8m0fnu), "mxfp8": EXPONENTS}
    for weight, scales in directory.scales.items():
        if specs[weight].packing or directory.spelling is None:
            continue  # such codes are not recognised with others
        scheme = directory.kinds[weight]
        dtypes = exponents.get(scheme, FLOATS)
        for name, spec in directory.spelling.specs(scales, specs[weight], directory.coded[weight].form).items():
            stored = specs[name]
            one = stored.rows * stored.columns == 1  # [] and [1] are loaded alike
            if stored.shape != spec.shape and not one:
                yield name, f"shape {list(stored.shape)}, not {list(spec.shape)}"
            if stored.dtype not in dtypes:
                yield name, f"{stored.dtype}, not {dtypes[0]}"


def scales_of_no_use(directory: QuantizedDirectory) -> Breaches:
    """Scales of weights, inputs and caches that are not between SMALLEST_SCALE and LARGEST_SCALE: the first of each
    tensor. MXFP8's exponents have no lower limit, since GEMMs add them."""
    divides_by: dict[str, bool] = {}
    for scales in directory.scales.values():
        divides_by[scales.weight] = False
        divides_by |= {name: scales.divides for name in (scales.global_scale, scales.input) if name}
    divides_by |= dict.fromkeys(cache_scales(directory.quantization, directory.specs), False)
    for name, divides in divides_by.items():
        stored = directory.read(name)
        stored = stored.reciprocal() if divides else stored
        exponents = stored.dtype in (torch.uint8, torch.float8_e8m0fnu)
        values = (stored.view(torch.float8_e8m0fnu) if exponents else stored).reshape(-1).float()
        smallest = 0 if exponents else SMALLEST_SCALE
        wrong = values[~((values >= smallest) & (values <= LARGEST_SCALE))]  # NaN is in no range
        if len(wrong):
            yield name, f"a scale of {float(wrong[0]):.6g}"


def unsaid_activations(*methods: str) -> Demand:
    """A config of one of these quant methods without `activation_scheme`."""

    def broken(directory: QuantizedDirectory) -> Breaches:
        if directory.method in methods and "activation_scheme" not in directory.quantization:
            yield CONFIG, "no activation_scheme"

    return broken


def unsaid_size(*, per_tensor: bool) -> Demand:
    """Block scales without a `weight_block_size` in the config, or a scale `per_tensor` without, which would have to be
    null."""

    def broken(directory: QuantizedDirectory) -> Breaches:
        if directory.method == "fp8" and "weight_block_size" not in directory.quantization:
            for name, scales in directory.scales.items():
                if (scales.block == sized(TENSOR, directory.specs[name])) == per_tensor:
                    yield CONFIG, f"no weight_block_size, and {name} has {'one scale' if per_tensor else 'blocks'}"
                    return

    return broken


def heads_beside(ignored: IgnoreList, *methods: str) -> Demand:
    """A head of values that the list of one of these quant methods, where there is one, does not name."""

    def broken(directory: QuantizedDirectory) -> Breaches:
        if directory.method in methods and ignored.entries(directory.quantization) is not None:
            is_ignored = ignored.of(directory.quantization)
            for name in ("lm_head.weight", "language_model.lm_head.weight"):
                of_values = name in directory.specs.keys() - directory.scales.keys()
                if of_values and not is_ignored(name.removesuffix(".weight")):
                    yield name, f"{directory.specs[name].dtype} values, but its module is not ignored"

    return broken


def scales_beyond_bf16(directory: QuantizedDirectory) -> Breaches:
    """Scales of weights or inputs, in compressed-tensors, that are not exact in BF16: the first. Global ones of
    four-bit codes are loaded as they are."""
    scales = directory.scales.values() if directory.method == "compressed-tensors" else ()
    yield from beyond_bf16(directory, [name for each in scales if each.global_scale is None for name in each.names])


def beyond_bf16(directory: QuantizedDirectory, scales: Iterable[str]) -> Breaches:
    """The first of these scales that is not exact in BF16."""
    for name in (name for name in scales if directory.specs[name].dtype in (DType.float32, DType.float16)):
        value = directory.read(name).reshape(-1)
        beyond = value[value.bfloat16() != value]
        if len(beyond):
            yield name, f"{float(beyond[0]):.8g} is no number of BF16"
            return


def lost_by_renaming(directory: QuantizedDirectory) -> Breaches:
    """Experts of gpt-oss (they alone have biases), as values beside compressed-tensors' codes, that the list names
    without an expression: the engine renames entries that end in `.down_proj`, and finds that expert quantized."""
    biases = (name.partition("[")[0] for name in directory.specs if ".experts.down_proj_bias" in name)
    ignored = BY_NAME_OR_REGEX.of(e for e in words(directory.quantization.get("ignore")) if e.startswith("re:"))
    for bias in dict.fromkeys(biases):
        linear = bias.replace(".down_proj_bias", ".0.down_proj")
        if directory.method == "compressed-tensors" and not ignored(linear):
            yield bias.removesuffix("_bias"), f"no expression ignores `{linear}`"


def named(weight: str, activation: str) -> Demand:
    """Scales of `quant_method: fp8` under other names than these: of a weight and its input where each has one; of a
    weight with blocks `weight_scale_inv`, or, as DeepSeek-V4 is released, `scale`."""

    def broken(directory: QuantizedDirectory) -> Breaches:
        for name, scales in directory.scales.items() if directory.method == "fp8" else ():
            one = directory.scheme != "block" and scales.block == sized(TENSOR, directory.specs[name])
            if directory.model_type == "deepseek_v4" and scales.weight == sibling(name, "scale"):
                continue
            for found, wanted in ((scales.weight, weight if one else "weight_scale_inv"), (scales.input, activation)):
                if found and found != sibling(name, wanted):
                    yield found, f"not named {wanted}"

    return broken


def exponents_named(wanted: str, renamed: Mapping[str, str] | None = None) -> Demand:
    """Scales of `quant_method: mxfp8` under another name. `renamed` has the names that the engine looks for in models
    that it has a table for, by `model_type`."""

    def broken(directory: QuantizedDirectory) -> Breaches:
        for name, scales in directory.scales.items() if directory.method == "mxfp8" else ():
            of_model = renamed.get(directory.model_type) if renamed and is_slice(name) else None
            if scales.weight != sibling(name, of_model or wanted):
                yield scales.weight, f"not named {of_model or wanted}"

    return broken


def stored_as_one(*, but: Sequence[str] = ()) -> Demand:
    """Codes of all experts of a layer, stored in one tensor. `but` are text models, by their `model_type`, of which the
    engine is known to load such codes."""

    def broken(directory: QuantizedDirectory) -> Breaches:
        name = next(filter(is_slice, directory.scales), None)
        if name and directory.text_type not in but:
            yield name.partition("[")[0], "FP8 codes of all experts in one tensor"

    return broken


def unsaid_exponents(directory: QuantizedDirectory) -> Breaches:
    """What a config of `quant_method: mxfp8` does not say of its scales: that each is of 32 values, and of bytes that
    they are exponents."""
    if directory.method != "mxfp8" or not directory.scales:
        return
    said = directory.quantization
    if (block := said.get("weight_block_size")) != list(SCHEMES["mxfp8"].block):
        yield CONFIG, f"weight_block_size {shown(block)}" if block else "no weight_block_size"
    in_bytes = any(directory.specs[scales.weight].dtype == DType.uint8 for scales in directory.scales.values())
    unsaid = [f"{key} {value}" for key, value in POWERS_OF_2.items() if said.get(key) != value]
    if in_bytes and unsaid:
        yield CONFIG, f"no {' and no '.join(unsaid)}, and scales are bytes"


def taken_for_weights(directory: QuantizedDirectory) -> Breaches:
    """As `stored_as_one`, of methods that transformers reads as `fp8`."""
    if directory.method in ("fp8", "mxfp8"):
        yield from stored_as_one()(directory)


def without_dimension(directory: QuantizedDirectory) -> Breaches:
    """Scales of compressed-tensors of shape []."""
    for scales in directory.scales.values() if directory.method == "compressed-tensors" else ():
        for name in scales.names:
            if directory.specs[name].shape == ():
                yield name, "shape [], not [1]"


ACTIVATION_FORMATS = ("naive-quantized", "int-quantized", "float-quantized", "nvfp4-pack-quantized", "mxfp8-quantized")


def format_of_weights_alone(directory: QuantizedDirectory) -> Breaches:
    """A format of compressed-tensors for codes of eight bits that is not among ACTIVATION_FORMATS: that of a config
    group, or else that of all."""
    if directory.method != "compressed-tensors" or all(
        not spec.is_codes or spec.packing is not None for spec in directory.specs.values()
    ):
        return
    groups = config_groups(directory.quantization).values()
    of_eight = [group.layout for group in groups if group.weights and group.weights.bits == 8]
    for written in of_eight or [directory.quantization.get("format")]:
        if written not in ACTIVATION_FORMATS:
            yield CONFIG, f"format {written!r}"
            return


def classes_in_several_groups(directory: QuantizedDirectory) -> Breaches:
    """One of several config groups that targets a class of modules, such as `Linear`."""
    groups = config_groups(directory.quantization)
    if directory.method == "compressed-tensors" and len(groups) > 1:
        for name, group in groups.items():
            if any(map(is_of_a_class, group.targets)):
                yield CONFIG, f"config group {name} of several targets a class of modules"


def quark_keys_unsaid(directory: QuantizedDirectory) -> Breaches:
    """Keys of Quark's config that an engine takes for granted, and that are missing or of another type."""
    if directory.method != "quark":
        return
    said, export = directory.quantization, directory.quantization.get("export")
    of_cache = export.get("kv_cache_group") if isinstance(export, Mapping) else None
    for key, value, kind in (
        ("export.kv_cache_group", of_cache, list),
        ("exclude", said.get("exclude"), list),
        ("layer_type_quant_config", said.get("layer_type_quant_config"), Mapping),
    ):
        if not isinstance(value, kind):
            yield CONFIG, f"no {key}"


def quark_channels_in_columns(directory: QuantizedDirectory) -> Breaches:
    """Scales of channels that are a column, and no row, as Quark writes them: the first."""
    for name, scales in directory.scales.items() if directory.method == "quark" else ():
        spec, stored = directory.specs[name], directory.specs[scales.weight]
        if spec.packing is None and scales.block[0] == 1 and len(stored.shape) > 1:
            yield scales.weight, f"shape {list(stored.shape)}, not {[spec.rows]}"
            return


def unnamed_tables(directory: QuantizedDirectory) -> Breaches:
    """Tables of n-grams that are codes and that `modules_to_convert` does not name."""
    codes = (name for name, spec in directory.specs.items() if spec.is_codes)
    named = tuple(words(directory.quantization.get("modules_to_convert")))
    for table in dict.fromkeys(filter(None, map(ngram_table, codes))):
        if directory.method != "fp8" or not table.endswith(named):
            yield table, "a table of codes that modules_to_convert does not name"


def said_twice_differently(directory: QuantizedDirectory) -> Breaches:
    """ModelOpt's hf_quant_config.json that contradicts config.json."""
    nested_config = directory.hf_quant_config.get("quantization") if directory.hf_quant_config else None
    if directory.method != "modelopt" or not isinstance(nested_config, Mapping):
        return
    flat, nested = _modelopt(directory.quantization), _modelopt(nested_config)
    for key in flat:
        if flat[key] != nested[key]:
            yield "hf_quant_config.json", f"another {key} than config.json"


def _modelopt(quantization: Mapping[str, Any]) -> dict[str, object]:
    ignored = sorted(words(quantization.get("ignore"))) or sorted(words(quantization.get("exclude_modules")))
    return {"quant_algo": str(quantization.get("quant_algo")).upper(), "list of ignored modules": ignored}
