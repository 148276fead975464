"""SGLang: what it asks of an FP8 directory. Read in SGLang 0.5.23; its config parsers were run, without its kernels."""

from precisionctl.engines.base import Engine, Rule

ENGINE = Engine(
    name="sglang",
    title="SGLang",
    spells={"static": "compressed-tensors", "dynamic": "compressed-tensors", "block": "fp8"},
    reads=frozenset(
        {
            ("compressed-tensors", "static"),
            ("compressed-tensors", "dynamic"),
            ("compressed-tensors", "block"),
            ("modelopt", "static"),
            ("fp8", "block"),
        }
    ),
    reads_experts=frozenset(
        {
            ("compressed-tensors", "static"),
            ("compressed-tensors", "dynamic"),
            ("modelopt", "static"),
            ("fp8", "block"),
        }
    ),
    command="python -m sglang.launch_server --model-path {path}",
    on_ranks=" --tp {ranks}",
    quantisation=Rule(
        "quantization_config must say of each linear what it is, and of ModelOpt's algorithms only FP8 is taken",
        "SGLang 0.5.23 layers/quantization/fp8.py, modelopt_quant.py, compressed_tensors/compressed_tensors.py",
    ),
    scales=Rule(
        "scales are loaded into FP32 parameters of fixed shapes",
        "SGLang 0.5.23 layers/quantization/fp8.py, compressed_tensors_w8a8_fp8.py create_weights",
    ),
    aligned=Rule("both dimensions of an FP8 weight must be multiples of 16", "CUTLASS and torch._scaled_mm"),
    blocks=Rule(
        "blocks of 128 must not be cut by a GPU's share or by the next linear of a fused one",
        "SGLang 0.5.23 layers/quantization/fp8.py create_weights, fp8_kernel.py per_token_group_quant_fp8",
    ),
    ragged="alone",
    fused=Rule(
        "it requantises the group with the largest, which rounds the weights twice",
        "SGLang 0.5.23 layers/quantization/utils.py requantize_with_max_scale",
        fatal=False,
    ),
    experts=Rule(
        "it takes the largest input scale of a layer's experts for all of them",
        "SGLang 0.5.23 layers/quantization/fp8.py, modelopt_quant.py process_weights_after_loading",
        fatal=False,
    ),
    all_or_none=Rule(
        "linears that it fuses must all have one scheme",
        "SGLang 0.5.23 layers/quantization/utils.py is_layer_skipped, compressed_tensors/utils.py",
    ),
)
