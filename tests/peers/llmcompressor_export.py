"""Run with llm-compressor's Python: SOURCE TARGET SCHEME [ROWS] quantizes a model with one of its presets, or to INT4
in groups of 32 (W4A16_G32, W4A16_G32_ASYM), saves it, and writes beside it, to TARGET-expected.safetensors, what
compressed-tensors' own decompression makes of each weight. It calibrates on the rows of tokens in the JSON file ROWS,
or on a few made up."""

import json
import sys
from pathlib import Path

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import QuantizationModifier
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

source, target, scheme, *given = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
rows = json.loads(Path(given[0]).read_text()) if given else [list(range(start, start + 32)) for start in range(8)]
masks = [[1] * len(row) for row in rows]
calibration = Dataset.from_dict({"input_ids": rows, "attention_mask": masks}) if scheme in ("FP8", "NVFP4") else None
how = {"targets": "Linear", "scheme": scheme}
if scheme.startswith("W4A16_G32"):
    weights = QuantizationArgs(
        num_bits=4, type="int", strategy="group", group_size=32, symmetric=not scheme.endswith("ASYM")
    )
    how = {"config_groups": {"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}}
oneshot(
    model=model,
    dataset=calibration,
    num_calibration_samples=len(rows),
    max_seq_length=len(rows[0]),
    processor=PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel())
    ),  # asked for, and not used: rows are tokens
    recipe=QuantizationModifier(**how, ignore=["lm_head", "re:.*mlp[.]gate$"]),
)
model.save_pretrained(target, save_compressed=True)

config = json.loads((Path(target) / "config.json").read_text())["quantization_config"]
(group,) = config["config_groups"].values()
compressor = BaseCompressor.get_value_from_registry(config["format"])
said = QuantizationScheme.model_validate(group)
stored = load_file(Path(target) / "model.safetensors")
expected = {}
packed = [name for name in stored if name.endswith("weight_packed")]
codes = (torch.float8_e4m3fn, torch.int8)
for name in packed or [name for name, values in stored.items() if values.dtype in codes]:
    module = name.removesuffix("_packed").removesuffix("weight")
    parts = {key.removeprefix(module): values for key, values in stored.items() if key.startswith(module)}
    expected[f"{module}weight"] = compressor.decompress(parts, said)["weight"].contiguous()
save_file(expected, f"{target}-expected.safetensors")
