"""Rules on the scales of an FP8 KV cache: one scale_inv for the keys and one for the values of each layer.

Each function yields where a directory breaks a rule, and how; an engine pairs it with its own text and source.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from precisionctl.engines.rules.rule import Breaches, Demand, QuantizedDirectory
from precisionctl.engines.serving import LATENT
from precisionctl.quant_methods.caches import caches_in_fp8
from precisionctl.quant_methods.compressed_tensors import cache_arguments
from precisionctl.torch_when_used import torch

_SCALE = re.compile(
    r"(.+\.self_attn)\.(?:(?:attn\.|k_proj\.(?=k)|v_proj\.(?=v)|qkv_proj\.)?([kv])_scale|([kv])_proj\.output_scale)"
)
"""The names that vLLM's and SGLang's loaders look for (both: maybe_remap_kv_scale_name in weight_utils.py); the last
are llm-compressor's older ones (vLLM: get_cache_scale in compressed_tensors.py)."""

_LAYER = re.compile(r"(.+\.self_attn)\..+")


def cache_without_scales(directory: QuantizedDirectory) -> Breaches:
    """An FP8 cache without scales of keys and values in every layer, of those that a family's table knows: towers of
    wrappers attend too, and cache nothing."""
    if not caches_in_fp8(directory.quantization):
        return
    scaled, known = set(filter(None, map(attention_and_kind, directory.specs))), directory.served.cuts
    names = (name for name in directory.specs if known is None or name in known)
    layers = dict.fromkeys(match[1] for match in map(_LAYER.fullmatch, names) if match)
    missing = [layer for layer in layers if not {(layer, "k"), (layer, "v")} <= scaled]
    if missing:
        yield missing[0], f"no k_scale and v_scale, in {len(missing)} of {len(layers)} layers"


def attention_and_kind(name: str) -> tuple[str, str] | None:
    """The attention that a cache's scale belongs to, and `k` or `v`; None for another tensor."""
    found = _SCALE.fullmatch(name)
    return (found[1], found[2] or found[3]) if found else None


def cache_without_notice(directory: QuantizedDirectory) -> Breaches:
    """An FP8 cache in a directory that is not compressed-tensors."""
    if caches_in_fp8(directory.quantization) and directory.method != "compressed-tensors":
        yield "config.json", "a KV cache in FP8"


def cache_unsaid(directory: QuantizedDirectory) -> Breaches:
    """Scales of a cache that the config does not declare to be FP8."""
    if not caches_in_fp8(directory.quantization) and directory.method != "fp8":
        yield from ((name, "a scale of the KV cache, which nothing says to be FP8") for name in _scales(directory)[:1])


def cache_scales_unfound(directory: QuantizedDirectory) -> Breaches:
    """Scales under names that no loader looks for."""
    for name in directory.specs:
        if name.endswith((".k_scale", ".v_scale")) and not _SCALE.fullmatch(name):
            yield name, "the name of no attention's scale"
            return


def cache_scales_of_values_alone(directory: QuantizedDirectory) -> Breaches:
    """Scales of values without those of keys."""
    kinds: dict[str, set[str]] = {}
    for layer, kind in filter(None, map(attention_and_kind, directory.specs)):
        kinds.setdefault(layer, set()).add(kind)
    for layer, there in kinds.items():
        if there == {"v"}:
            yield layer, "a v_scale without a k_scale"
            return


def cache_scales_several(directory: QuantizedDirectory) -> Breaches:
    """Several scales for keys, or for values, where the config does not say so."""
    cache = cache_arguments(directory.quantization)
    by_head = cache is not None and cache.strategy == "attn_head"
    for name in _scales(directory):
        spec = directory.specs[name]
        if spec.rows * spec.columns != 1 and not by_head:
            yield name, f"shape {list(spec.shape)}, not one scale"
            return


def cache_scales(directory: QuantizedDirectory) -> Breaches:
    """Any scales of a cache."""
    for name in _scales(directory)[:1]:
        yield name, "a scale of the KV cache"


def cache_scales_of_latents(directory: QuantizedDirectory) -> Breaches:
    """Scales of a cache of latents (DeepSeek's), other than 1."""
    for name in _scales(directory):
        layer = name.rpartition(".self_attn.")[0]
        of_latents = f"{layer}.self_attn.{LATENT[-1]}.weight" in directory.specs
        if of_latents and bool((directory.read(name).float() != 1).any()):
            yield name, "a scale of the KV cache, beside latent attention"
            return


def cache_scales_of_projections(directory: QuantizedDirectory) -> Breaches:
    """Scales under ModelOpt's names, which are those of the projections."""
    for name in _scales(directory):
        if not name.endswith((".self_attn.k_scale", ".self_attn.v_scale")):
            yield name, "not named self_attn.k_scale or self_attn.v_scale"
            return


def cache_scales_beyond_bf16(directory: QuantizedDirectory) -> Breaches:
    """Scales, in `fp8`, `modelopt` and `quark`, that are not exact in BF16: the first."""
    for name in _scales(directory) if directory.method in ("fp8", "modelopt", "quark") else ():
        value = directory.read(name).float()
        if not torch.equal(value.bfloat16().float(), value):
            yield name, f"{float(value.reshape(-1)[0]):.8g} is no number of BF16"
            return


def cache_by(*strategies: str) -> Demand:
    """A `kv_cache_scheme` of compressed-tensors that does not say, without the defaults of that, one of these
    strategies, and to be symmetric; or that is dynamic."""

    def broken(directory: QuantizedDirectory) -> Breaches:
        scheme = directory.quantization.get("kv_cache_scheme")
        if directory.method == "compressed-tensors" and isinstance(scheme, Mapping):
            strategy = scheme.get("strategy")
            if strategy not in strategies or scheme.get("dynamic") or scheme.get("symmetric") is not True:
                yield "config.json", f"kv_cache_scheme with strategy {strategy!r}, or not static and symmetric"

    return broken


def _scales(directory: QuantizedDirectory) -> list[str]:
    return [name for name in directory.specs if _SCALE.fullmatch(name)]
