"""What every engine asks of codes and their scales, and the names by which weights and experts are told."""

from __future__ import annotations

import re
from collections.abc import Mapping

from precisionctl.dtypes import DType
from precisionctl.engines.rules.rule import Breaches, QuantizedDirectory
from precisionctl.param import TensorSpec
from precisionctl.quant_methods.base import CODES, EXPONENTS, FLOATS

EXPERT = re.compile(r"(.+\.experts)\.\d+\.(.+)\.weight")
_STACKED = re.compile(r"(.+\.experts)(?:\.[a-z_]+)?|(.+\.block_sparse_moe)\.(?:input|output)_linear(?:\.weight)?")


def experts_module(name: str) -> str | None:
    """What engines call the module of a layer's experts, of a tensor or module in which all of them are: Granite calls
    the tensors by other names. None for any other name."""
    match = _STACKED.fullmatch(name)
    return match and (match[1] or f"{match[2]}.experts")


def linears(specs: Mapping[str, TensorSpec]) -> list[str]:
    """Weights of two dimensions that are not embeddings: what `targets: [Linear]` means."""
    weights = [name for name, spec in specs.items() if name.endswith(".weight") and len(spec.shape) == 2]
    return [name for name in weights if "embed" not in name]


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
