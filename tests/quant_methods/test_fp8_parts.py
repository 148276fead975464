"""FP8 with scales of groups and of blocks of any size, as compressed-tensors itself writes them: transformers loads
them, with the values that we read."""

from pathlib import Path

import pico
import pytest
import torch
from installed import judge
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.engines.base import engine_named
from precisionctl.verify.engine_rules import check

FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
PARTS = {
    "groups": ({"strategy": "group", "group_size": 16}, (1, 16)),
    "groups as large as MXFP8's": ({"strategy": "group", "group_size": 32}, (1, 32)),
    "blocks": ({"strategy": "block", "block_structure": [16, 32]}, (16, 32)),
    "blocks that end outside of the weights": ({"strategy": "block", "block_structure": [40, 24]}, (40, 24)),
}


def written(directory: Path, arguments: dict, part: tuple[int, int]) -> None:
    """A Llama whose linears compressed-tensors has made FP8 codes of; of scales, BF16."""
    compressors, quantization = map(judge, ("compressed_tensors.compressors", "compressed_tensors.quantization"))
    model = pico.make("llama-3", dtype=torch.bfloat16)
    group = {"targets": ["Linear"], "weights": FP8 | arguments}
    config = quantization.QuantizationConfig(
        config_groups={"group_0": group}, ignore=["lm_head"], format="float-quantized"
    )
    quantization.apply_quantization_config(model, config)
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) and hasattr(module, "weight"):
            (rows, columns), (high, wide) = module.weight.shape, part
            whole = torch.nn.functional.pad(module.weight.data.float(), (0, -columns % wide, 0, -rows % high))
            parts = whole.unflatten(0, (-1, high)).unflatten(2, (-1, wide))
            scale, _ = quantization.utils.calculate_qparams(
                parts.amin((1, 3)), parts.amax((1, 3)), module.quantization_scheme.weights
            )
            module.weight_scale.data = scale.bfloat16()
    compressor = compressors.ModelCompressor.from_pretrained_model(model, quantization_format="float-quantized")
    compressor.compress_model(model)
    model.save_pretrained(directory)
    compressor.update_config(directory)


@pytest.mark.parametrize("arguments, part", PARTS.values(), ids=PARTS)
@pytest.mark.filterwarnings("ignore")
def test_what_verify_lets_pass_transformers_loads_with_the_values_that_we_read(tmp_path, arguments, part):
    written(tmp_path, arguments, part)
    reader = HuggingFaceReader(tmp_path)
    assert not [finding for finding in check(reader, engine_named("transformers")) if finding.rule.fatal]
    as_values = CompressedTensorsConfig(dequantize=True)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=as_values, dtype=torch.bfloat16)
    codes = [name for name, weight in loaded.state_dict().items() if name in reader.encodings]
    assert codes
    for name in codes:
        ours = reader.encodings[name].decode_rows(read_tensor(reader, name), 0)
        assert torch.equal(loaded.state_dict()[name], ours.bfloat16()), name
