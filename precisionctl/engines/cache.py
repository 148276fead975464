"""What engines make of the scales of an FP8 KV cache: scale_inv, as stored, of keys and values of a layer."""

import re
from collections.abc import Callable, Iterator, Mapping

import torch

from precisionctl.engines.rule import Directory

Broken = Iterator[tuple[str, str]]

_SCALE = re.compile(r"(.+\.self_attn)\.(?:[kv]_proj\.)?([kv])_scale")
_LAYER = re.compile(r"(.+\.self_attn)\..+")


def cache_without_scales(directory: Directory) -> Broken:
    """A cache that is to be FP8, of which nothing says how to cast into it."""
    if not _is_fp8(directory):
        return
    scaled = {(match[1], match[2]) for match in map(_SCALE.fullmatch, directory.specs) if match}
    layers = dict.fromkeys(match[1] for match in map(_LAYER.fullmatch, directory.specs) if match)
    missing = [layer for layer in layers if not {(layer, "k"), (layer, "v")} <= scaled]
    if missing:
        yield missing[0], f"no k_scale and v_scale, in {len(missing)} of {len(layers)} layers"


def cache_scales(directory: Directory) -> Broken:
    """Any scales of a cache."""
    for name in _scales(directory)[:1]:
        yield name, "a scale of the KV cache"


def cache_scales_of_projections(directory: Directory) -> Broken:
    """ModelOpt's names."""
    for name in _scales(directory):
        if not name.endswith((".self_attn.k_scale", ".self_attn.v_scale")):
            yield name, "not named self_attn.k_scale or self_attn.v_scale"
            return


def cache_scales_beyond_bf16(directory: Directory) -> Broken:
    """Values that BF16 does not hold."""
    for name in _scales(directory) if directory.method in ("fp8", "modelopt") else ():
        value = directory.read(name).float()
        if not torch.equal(value.bfloat16().float(), value):
            yield name, f"{float(value.reshape(-1)[0]):.8g} is no number of BF16"
            return


def cache_by(*strategies: str) -> Callable[[Directory], Broken]:
    """A `kv_cache_scheme` of compressed-tensors that is none of these, or not symmetric, or made while running."""

    def broken(directory: Directory) -> Broken:
        scheme = directory.quantization.get("kv_cache_scheme")
        if directory.method == "compressed-tensors" and isinstance(scheme, Mapping):
            strategy = scheme.get("strategy", "tensor")
            if strategy not in strategies or scheme.get("dynamic") or scheme.get("symmetric") is not True:
                yield "config.json", f"kv_cache_scheme with strategy {strategy!r}, or not static and symmetric"

    return broken


def _is_fp8(directory: Directory) -> bool:
    scheme = directory.quantization.get("kv_cache_scheme")
    if isinstance(scheme, Mapping):
        return scheme.get("num_bits") == 8 and scheme.get("type") == "float"
    return directory.quantization.get("kv_cache_quant_algo") == "FP8"


def _scales(directory: Directory) -> list[str]:
    return [name for name in directory.specs if _SCALE.fullmatch(name)]
