"""vLLM: what it asks of an FP8 directory. Read in vLLM 0.33.0; config parser and weight loader were run on a CPU."""

from precisionctl.engines.base import Engine, Rule

ENGINE = Engine(
    name="vllm",
    title="vLLM",
    spells={"static": "compressed-tensors", "dynamic": "compressed-tensors", "block": "fp8", "mxfp8": "modelopt"},
    reads=frozenset(
        {
            ("compressed-tensors", "static"),
            ("compressed-tensors", "dynamic"),
            ("compressed-tensors", "block"),
            ("modelopt", "static"),
            ("modelopt", "dynamic"),
            ("modelopt", "block"),
            ("modelopt", "mxfp8"),
            ("compressed-tensors", "mxfp8"),
            ("fp8", "block"),
        }
    ),
    reads_experts=frozenset(
        {
            ("compressed-tensors", "static"),
            ("compressed-tensors", "dynamic"),
            ("compressed-tensors", "block"),
            ("modelopt", "static"),
            ("fp8", "block"),
        }
    ),
    command="vllm serve {path}",
    on_ranks=" --tensor-parallel-size {ranks}",
    quantisation=Rule(
        "quantization_config must say of each linear what it is",
        "vLLM 0.33 compressed_tensors.py get_scheme, modelopt.py",
    ),
    scales=Rule(
        "scales are loaded into FP32 parameters of fixed shapes",
        "vLLM 0.33 compressed_tensors_w8a8_fp8.py create_weights, modelopt.py",
    ),
    aligned=Rule("both dimensions of an FP8 weight must be multiples of 16", "CUTLASS and torch._scaled_mm"),
    blocks=Rule(
        "blocks of 128 must not be cut by a GPU's share or by the next linear of a fused one; the last may be, uncut",
        "vLLM 0.33 fp8_utils.py validate_fp8_block_shape, validate_fp8_block_shape_moe, per_token_group_quant_fp8",
    ),
    ragged="last",
    fused=Rule(
        "it requantises the group with the largest, in FP16, which rounds the weights twice",
        "vLLM 0.33 w8a8_utils.py requantize_with_max_scale",
        fatal=False,
    ),
    experts=Rule(
        "it takes the largest input scale of a layer's experts for all of them",
        "vLLM 0.33 fp8_utils.py process_fp8_input_tensor_strategy_moe",
        fatal=False,
    ),
    all_or_none=Rule(
        "linears that it fuses must all have one scheme", "vLLM 0.33 compressed_tensors/utils.py should_ignore_layer"
    ),
)
