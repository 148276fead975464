"""config.json and specs of a small Llama as each engine takes them."""

from precisionctl.dtypes import DType
from precisionctl.engines.base import engines
from precisionctl.param import TensorSpec
from precisionctl.quant_methods.base import CODES, quant_methods

ENGINES = engines()
METHODS = quant_methods()
LAYER = "model.layers.0"
LINEARS = {
    f"{LAYER}.self_attn.q_proj": (256, 256),
    f"{LAYER}.self_attn.k_proj": (128, 256),
    f"{LAYER}.self_attn.v_proj": (128, 256),
    f"{LAYER}.self_attn.o_proj": (256, 256),
    f"{LAYER}.mlp.gate_proj": (384, 256),
    f"{LAYER}.mlp.up_proj": (384, 256),
    f"{LAYER}.mlp.down_proj": (256, 384),
}
BF16 = {
    "model.embed_tokens.weight": TensorSpec((512, 256), DType.bfloat16),
    f"{LAYER}.input_layernorm.weight": TensorSpec((256,), DType.bfloat16),
    "lm_head.weight": TensorSpec((512, 256), DType.bfloat16),
}


def exported(engine, scheme):
    """config.json and specs of an export to `engine`, as its own quant method spells it."""
    method = METHODS[engine.spells[scheme]]
    specs = dict(BF16)
    for module, shape in LINEARS.items():
        weight = TensorSpec(shape, CODES)
        specs[f"{module}.weight"] = weight
        form = method.spelling.form(scheme)
        specs |= method.spelling.specs(method.scales(f"{module}.weight", weight, scheme), weight, form)
    return {"quantization_config": method.spelling.config(scheme, ["lm_head", "model.embed_tokens"])}, specs
