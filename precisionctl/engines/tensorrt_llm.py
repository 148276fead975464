"""TensorRT-LLM's PyTorch backend: what it asks of a directory of codes. Read in the source of its main branch in mid
2026, never run here. 1.3.0rc19 goes by the config group that is called `group_0` alone; what is here of several groups
is a later commit's (`models/quant_config_utils.py`), and of no release up to 1.2.1.

Of compressed-tensors, its parser of configs takes NVFP4, too; most of its models do not look for the names that such
codes have, by its issue 17723.

Its older checkpoints (`rankN.safetensors`, `trtllm-build`) were removed in July 2026 and are not written.
"""

from precisionctl.engines.base import Engine, ServeCommand
from precisionctl.engines.rules.cache_rules import cache_scales
from precisionctl.engines.rules.demands import classes_in_several_groups, said_twice_differently, stored_as_one
from precisionctl.engines.rules.fused_rules import FusedLinears
from precisionctl.engines.rules.ignore_lists import BY_GLOB, BY_NAME_OR_REGEX
from precisionctl.engines.rules.ignored_modules import IgnoreList
from precisionctl.engines.rules.method_rules import MethodRules
from precisionctl.engines.rules.required_keys import of_models, rotary_of_transformers_4
from precisionctl.engines.rules.rule import EngineRule
from precisionctl.engines.rules.serving_rules import Division, ShapeRules
from precisionctl.engines.serving import FUSED, LATENT

_TOLD = "switches its cache to FP8 if told to, with scale 1: it reads the scales only for an NVFP4 cache"

ENGINE = Engine(
    name="tensorrt-llm",
    title="TensorRT-LLM",
    serve=ServeCommand(
        "trtllm-serve {path}",
        on_ranks=" --tp_size {ranks}",
        on_experts=" --ep_size {ranks}",
        on_cache=" --kv_cache_dtype fp8",
    ),
    spells={"static": "modelopt", "dynamic": "modelopt", "block": "fp8", "mxfp8": "mxfp8", "nvfp4": "modelopt"},
    methods={
        "modelopt": MethodRules(
            formats=("NVFP4", "static", "dynamic", "block", "mxfp8"),
            experts=("NVFP4", "static"),
            ignored=IgnoreList(("ignore", "exclude_modules"), BY_GLOB),
            cache="switches its cache to FP8 by itself, with scale 1: it reads the scales only for an NVFP4 cache",
        ),
        "compressed-tensors": MethodRules(
            formats=("dynamic", "block"), experts=(), ignored=IgnoreList(("ignore",), BY_NAME_OR_REGEX)
        ),
        "fp8": MethodRules(formats=("block",), ignored=IgnoreList(("modules_to_not_convert",), BY_GLOB), cache=_TOLD),
        "mxfp8": MethodRules(
            formats=("mxfp8",),
            ignored=IgnoreList(("ignored_layers", "modules_to_not_convert"), BY_GLOB),
            cache=_TOLD,
        ),
    },
    config_rule=EngineRule(
        "quantization_config must say of each linear what it is, and name every module that is left out",
        "TensorRT-LLM tensorrt_llm/quantization/modelopt_config.py, models/quant_config_utils.py",
    ),
    scales=EngineRule(
        "scales are copied into FP32 tensors of fixed shapes",
        "TensorRT-LLM _torch/modules/linear.py FP8QDQLinearMethod, FP8RowwiseLinearMethod",
    ),
    shapes=ShapeRules(
        aligned=EngineRule("both dimensions of an FP8 weight must be multiples of 16", "cuBLASLt FP8 GEMM"),
        blocks=EngineRule(
            "blocks of 128 must not be cut by a GPU's share or by the next linear of a fused one",
            "TensorRT-LLM _torch/modules/linear.py FP8BlockScalesLinearMethod",
        ),
        ragged="alone",
    ),
    fused=FusedLinears(
        groups=(*FUSED, LATENT),
        all_or_none=EngineRule(
            "linears that it fuses are one linear with one method", "TensorRT-LLM _torch/modules/linear.py"
        ),
        scales=EngineRule(
            "it rescales the group to the largest in BF16, which rounds the weights twice",
            "TensorRT-LLM _torch/modules/linear.py rescale_fused_weights",
            fatal=False,
        ),
        global_scales=EngineRule(
            "it asserts that they are equal",
            "TensorRT-LLM _torch/modules/linear.py NVFP4LinearMethod",
        ),
        input_scales=EngineRule(
            "it takes the largest input scale of a layer's experts for all of them",
            "TensorRT-LLM _torch/modules/fused_moe/quantization.py load_activation_scales_fp8_qdq",
            fatal=False,
        ),
    ),
    division=Division(
        experts=EngineRule(
            "every GPU gets the same number of experts", "TensorRT-LLM _torch/modules/fused_moe/interface.py MoE"
        ),
        evenly=True,
    ),
    latents=EngineRule(
        "its FP8 cache has scale 1, whatever is stored", "TensorRT-LLM _torch/modules/attention.py", fatal=False
    ),
    demands={
        said_twice_differently: EngineRule(
            "of the two files hf_quant_config.json counts, with a warning",
            "TensorRT-LLM tensorrt_llm/quantization/modelopt_config.py",
        ),
        classes_in_several_groups: EngineRule(
            "several config groups must target modules by name",
            "TensorRT-LLM tensorrt_llm/models/quant_config_utils.py",
        ),
        stored_as_one(but=("step3p5",)): EngineRule(
            "codes of experts are looked for expert by expert",
            "TensorRT-LLM _torch/modules/fused_moe/quantization.py, models/modeling_step3p7.py",
        ),
        cache_scales: EngineRule(
            "its FP8 cache has scale 1, whatever is stored", "TensorRT-LLM _torch/modules/attention.py", fatal=False
        ),
    },
    keys={
        rotary_of_transformers_4: EngineRule(
            "up to 1.2, whose transformers is 4.57, it knows these keys alone, and takes a rope_theta of 10000",
            "TensorRT-LLM requirements.txt, _torch/attention_backend/interface.py RopeParams.from_config",
            fatal=False,
        ),
        of_models(("qwen3_moe", "qwen3_vl_moe_text"), "num_experts"): EngineRule(
            "up to 1.2, whose transformers is 4.57, it knows this key alone, and takes 128 experts",
            "TensorRT-LLM requirements.txt, transformers 4.57 configuration_qwen3_moe.py",
        ),
    },
)
