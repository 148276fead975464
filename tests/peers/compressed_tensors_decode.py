"""Run with a Python that has compressed-tensors: DIRECTORY FILE writes to a file what its own decompression makes of
each weight of a directory in four bits."""

import json
import sys
from pathlib import Path

from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from safetensors.torch import load_file, save_file

directory, out = map(Path, sys.argv[1:])
config = json.loads((directory / "config.json").read_text())["quantization_config"]
QuantizationConfig.model_validate(config)
(group,) = config["config_groups"].values()
compressor = BaseCompressor.get_value_from_registry(config["format"])
scheme = QuantizationScheme.model_validate(group)
stored = load_file(directory / "model.safetensors")
found = {}
for name in stored:
    if name.endswith(".weight_packed"):
        module = name.removesuffix("weight_packed")
        parts = {key.removeprefix(module): values for key, values in stored.items() if key.startswith(module)}
        found[f"{module}weight"] = compressor.decompress(parts, scheme)["weight"].contiguous()
save_file(found, out)
