"""compressed-tensors (`weight_scale`, `input_scale`): scale_inv, `[1]` per tensor and `[rows, 1]` per channel.

The format of llm-compressor; vLLM, SGLang and transformers read it. Written without every key that has a default:
older readers refuse keys that they do not know.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from precisionctl.errors import PrecisionError
from precisionctl.quant_methods.base import QuantMethod, Scheme

_FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
_WEIGHTS: Mapping[Scheme, dict[str, Any]] = {
    "static": _FP8 | {"strategy": "tensor", "dynamic": False},
    "dynamic": _FP8 | {"strategy": "channel", "dynamic": False},
}
_INPUTS: Mapping[Scheme, dict[str, Any]] = {
    "static": _FP8 | {"strategy": "tensor", "dynamic": False},
    "dynamic": _FP8 | {"strategy": "token", "dynamic": True},
}


def config(scheme: Scheme, ignored: Sequence[str]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": _WEIGHTS[scheme], "input_activations": _INPUTS[scheme]}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignored),
    }


def scheme(config: Mapping[str, Any]) -> Scheme:
    """Reads what llm-compressor and others write too, where it says the same thing in more keys."""
    found = config.get("config_groups")
    groups = list(found.values()) if isinstance(found, Mapping) else []
    for name in _WEIGHTS:
        expected = {"weights": _WEIGHTS[name], "input_activations": _INPUTS[name]}
        if groups and all(_says(group, key, value) for group in groups for key, value in expected.items()):
            return name
    raise PrecisionError(
        "these compressed-tensors config groups are not FP8 of a kind that can be read",
        where="config.json",
        do="Known: per-tensor weights with static inputs, per-channel weights with dynamic per-token inputs.",
    )


def _says(group: object, part: str, expected: Mapping[str, Any]) -> bool:
    arguments = group.get(part) if isinstance(group, Mapping) else None
    return isinstance(arguments, Mapping) and all(arguments.get(key) == value for key, value in expected.items())


QUANT_METHOD = QuantMethod(
    name="compressed-tensors",
    tensor_scale=(1,),
    channel_scale=lambda rows: (rows, 1),
    config=config,
    files=lambda scheme, ignored: {},
    scheme=scheme,
)
