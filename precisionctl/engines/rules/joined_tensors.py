"""Tensors that transformers joins with others, or divides, as it loads them, in a directory of compressed-tensors.

It decodes them first, all by one config group, and drops what it does not find in that group's format: experts of
Qwen3-MoE in BF16 beside linears in INT4 as well as convolutions of OLMo Hybrid. Beside FP8 alone it keeps values.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

from precisionctl.engines.rules.names_in_memory import joined_weights
from precisionctl.engines.rules.rule import Breaches
from precisionctl.param import TensorSpec
from precisionctl.quant_methods.compressed_tensors import config_groups, read_group


def wrongly_joined(
    config: Mapping[str, Any], quantization: Mapping[str, Any], specs: Mapping[str, TensorSpec]
) -> Breaches:
    """The weights among these tensors that are joined or divided, and not in the format of the group by which they are
    decoded. Of those whose names differ in numbers alone the first. transformers 5.24, quantizers/base.py
    update_weight_conversions, integrations/compressed_tensors.py CompressedTensorsDequantize."""
    groups = [*config_groups(quantization).values()]
    if not groups:  # the KV cache alone is in FP8
        return
    # the first with an expression that says `experts`, else the first that targets a class or a name, else the first
    # (CompressedTensorsDequantize: get_experts_scheme)
    of_experts = (each for each in groups if any(to.startswith("re:") and "experts" in to for to in each.targets))
    of_names = (each for each in groups if any(not to.startswith("re:") for to in each.targets))
    forms = read_group(next(chain(of_experts, of_names), groups[0])).formats
    packings = {form.packing for form in forms}
    found = {packing for packing in packings if packing is None or packing.suffix}  # INT8 in bytes it does not find
    wrong = [name for name, spec in specs.items() if name.endswith(".weight") and spec.packing not in found]
    codes = (name for name, spec in specs.items() if spec.is_codes)
    beside = " or ".join(dict.fromkeys(form.name for form in forms))
    for name in joined_weights(config, wrong, codes) if wrong else ():  # it imports transformers, which takes seconds
        spec = specs[name]
        stored = f"{spec.codes_name} codes" if spec.is_codes else f"{spec.dtype} values"
        yield name, f"{stored}, beside {beside}"
