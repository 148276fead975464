"""Writes the golden files in `four_bit/`: one weight of each directory that tests/peers/test_four_bit.py makes.

    python four_bit.py DIRECTORIES     where `source`, `ct-NVFP4`, ... and `ct-NVFP4-expected.safetensors`, ... are

`source.safetensors` has the weight in BF16; the others what the tool has stored for it, and, as `decoded`, the BF16
that the tool itself makes of that. Their metadata has the `quantization_config`. By llm-compressor 0.14.0.1 with
compressed-tensors 0.19.0, and ModelOpt 0.47.0.
"""

import json
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

WEIGHT = "model.layers.0.self_attn.k_proj.weight"
FOLDER = Path(__file__).parent / "four_bit"

if __name__ == "__main__":
    made = Path(sys.argv[1])
    FOLDER.mkdir(exist_ok=True)
    save_file({"weight": load_file(made / "source/model.safetensors")[WEIGHT]}, FOLDER / "source.safetensors")
    for expected in sorted(made.glob("*-expected.safetensors")):
        directory, module = expected.name.removesuffix("-expected.safetensors"), WEIGHT.removesuffix("weight")
        stored = load_file(made / directory / "model.safetensors")
        cut = {name.removeprefix(module): values for name, values in stored.items() if name.startswith(module)}
        config = json.loads((made / directory / "config.json").read_text())["quantization_config"]
        metadata = {"quantization_config": json.dumps(config, sort_keys=True)}
        save_file(cut | {"decoded": load_file(expected)[WEIGHT]}, FOLDER / f"{directory}.safetensors", metadata)
