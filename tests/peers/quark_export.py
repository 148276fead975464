"""Run with Quark's Python: SOURCE TARGET SCHEME quantizes a model (`fp8`, `fp8-kv`, `fp8-channel`, `mxfp4`, `mixed`),
saves it, and writes beside it, to TARGET-expected.safetensors, what Quark's own layers make of each weight, and, as
`inputs` and `rounded`, what one of them makes of inputs."""

import sys

import torch
from quark.torch import ModelQuantizer, export_safetensors, import_model_from_safetensors
from quark.torch.export.nn.modules.qparamslinear import QParamsLinear
from quark.torch.quantization.config.config import (
    FP8E4M3PerChannelSpec,
    FP8E4M3PerTensorSpec,
    OCP_MXFP4Spec,
    QConfig,
    QLayerConfig,
)
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

source, target, scheme = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
tensor = FP8E4M3PerTensorSpec(observer_method="min_max", scale_type="float", is_dynamic=False).to_quantization_spec()
channel = FP8E4M3PerChannelSpec(is_dynamic=False, ch_axis=0).to_quantization_spec()
token = FP8E4M3PerChannelSpec(is_dynamic=True, ch_axis=1).to_quantization_spec()
groups, of_inputs = (OCP_MXFP4Spec(ch_axis=-1, is_dynamic=each).to_quantization_spec() for each in (False, True))
how = {
    "fp8": QLayerConfig(weight=tensor, input_tensors=tensor),
    "fp8-kv": QLayerConfig(weight=tensor, input_tensors=tensor),
    "fp8-channel": QLayerConfig(weight=channel, input_tensors=token),
    "mxfp4": QLayerConfig(weight=groups, input_tensors=of_inputs),
    "mixed": QLayerConfig(weight=groups, input_tensors=of_inputs),
}[scheme]
layers, caches = {}, {}
if scheme == "mixed":
    layers = {"*self_attn*": QLayerConfig(weight=tensor, input_tensors=tensor)}
if scheme == "fp8-kv":
    caches = {
        f"*{each}_proj": QLayerConfig(weight=tensor, input_tensors=tensor, output_tensors=tensor) for each in "kv"
    }
config = QConfig(
    global_quant_config=how,
    layer_quant_config=layers | caches,
    kv_cache_quant_config=caches,
    kv_cache_group=[*caches],
    exclude=["lm_head", "*mlp.gate"],
)
rows = [torch.arange(start, start + 32).unsqueeze(0) for start in range(8)]
quantizer = ModelQuantizer(config)
model = quantizer.freeze(quantizer.quantize_model(model, rows))
with torch.no_grad():
    export_safetensors(model, target, custom_mode="quark", weight_format="real_quantized", pack_method="reorder")

fresh = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
read = import_model_from_safetensors(fresh, target)
layers = {name: layer for name, layer in read.named_modules() if isinstance(layer, QParamsLinear)}
expected = {f"{name}.weight": layer._get_qweight(layer.weight).contiguous() for name, layer in layers.items()}
inputs = torch.randn(16, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
inputs[2, :32], inputs[3] = 0, inputs[3] * 100
rounded = layers["model.layers.0.mlp.up_proj"]._get_qinput(inputs).float()
save_file(expected | {"inputs": inputs, "rounded": rounded}, f"{target}-expected.safetensors")
