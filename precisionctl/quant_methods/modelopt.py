"""NVIDIA ModelOpt's unified export (`weight_scale`, `input_scale`): scale_inv, `[]` per tensor, `[rows]` per channel.

TensorRT-LLM's PyTorch backend, vLLM and SGLang read it. transformers does not: it skips the method with a warning
and takes the codes for weights. The JSON is that of ModelOpt 0.47, twice: flat in config.json, nested in
hf_quant_config.json.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from precisionctl.errors import PrecisionError
from precisionctl.quant_methods.base import QuantMethod, Scheme

_ALGORITHMS: Mapping[Scheme, str] = {"static": "FP8", "dynamic": "FP8_PER_CHANNEL_PER_TOKEN"}
_FP8 = {"dynamic": False, "num_bits": 8, "type": "float"}

# It names the format, not who wrote the files: readers look for this name before they read on.
_PRODUCER = {"name": "modelopt", "version": "0.47.0"}


def config(scheme: Scheme, ignored: Sequence[str]) -> dict[str, Any]:
    """Only the static scheme has config groups, as ModelOpt writes it."""
    group = {"input_activations": _FP8, "weights": _FP8, "targets": ["Linear"]}
    groups = {"config_groups": {"group_0": group}} if scheme == "static" else {}
    return groups | {
        "ignore": sorted(ignored),
        "quant_algo": _ALGORITHMS[scheme],
        "producer": _PRODUCER,
        "quant_method": "modelopt",
    }


def files(scheme: Scheme, ignored: Sequence[str]) -> dict[str, bytes]:
    quantization = {
        "quant_algo": _ALGORITHMS[scheme],
        "kv_cache_quant_algo": None,
        "exclude_modules": sorted(ignored),
    }
    text = json.dumps({"producer": _PRODUCER, "quantization": quantization}, indent=4)
    return {"hf_quant_config.json": text.encode()}


def scheme(config: Mapping[str, Any]) -> Scheme:
    algorithm = config.get("quant_algo")
    for name, known in _ALGORITHMS.items():
        if algorithm == known:
            return name
    known = ", ".join(_ALGORITHMS.values())
    raise PrecisionError(f"quant_algo {algorithm!r} cannot be read", where="config.json", do=f"Known: {known}.")


QUANT_METHOD = QuantMethod(
    name="modelopt",
    tensor_scale=(),
    channel_scale=lambda rows: (rows,),
    config=config,
    files=files,
    scheme=scheme,
)
