"""transformers: what it asks of a directory of codes. Run in 5.24, on a CPU.

Of compressed-tensors it computes with inputs that it rounds to FP8 and back, or, told `dequantize=True`, without; of
`quant_method: fp8` it decodes the weights wherever there is no GPU with FP8. ModelOpt's directories it takes for BF16.
"""

import re

from precisionctl.engines.base import Engine, NoClass, ServeCommand
from precisionctl.engines.rules.cache_rules import (
    cache_scales_of_projections,
    cache_scales_several,
    cache_without_notice,
)
from precisionctl.engines.rules.config_groups import TAKES_WHAT_MEMORY_HOLDS, in_another_group, without_scale_of_inputs
from precisionctl.engines.rules.demands import (
    exponents_named,
    heads_beside,
    named,
    scales_beyond_bf16,
    taken_for_weights,
    unnamed_tables,
    unsaid_exponents,
    unsaid_size,
    without_dimension,
)
from precisionctl.engines.rules.fused_rules import FusedLinears
from precisionctl.engines.rules.ignore_lists import BY_NAME_OR_REGEX, BY_START_REGEX_OR_END
from precisionctl.engines.rules.ignored_modules import BY_MODULE, ROUTERS, IgnoreList, Unquantized
from precisionctl.engines.rules.integer_rules import zero_points_of
from precisionctl.engines.rules.method_rules import ExpertsAsValues, MethodRules, ScalesInFP32
from precisionctl.engines.rules.model_rules import ExpertDtype
from precisionctl.engines.rules.required_keys import quantization_config_under_this_name
from precisionctl.engines.rules.rule import EngineRule
from precisionctl.engines.rules.serving_rules import RowsMoved, ShapeRules

_LLAMA4_EXPERTS = re.compile(r".+\.feed_forward\.experts\.(gate_up_proj|down_proj)\[\d+\]")
"""Of these it makes linears (5.24 quantizers/base.py MODULES_TO_PATCH_FOR_QUANTIZATION)."""
_GATEWAYS = ("d_fine", "deimv2")
"""Models in which `gate` is a linear, as in `afmoe`; routers of others are classes of their own, two of which are made
from nn.Linear, which is enough for compressed-tensors alone."""
_NUMBERED_EXPERTS = re.compile(r".+\.layers\.\d+\.(mlp\.)?experts\.\d+\..+")
_IN_ONE = dict.fromkeys(("gemma4_text", "mistral4", "hy_v4", "hy_v4_vl_text", "lara_mini"), _NUMBERED_EXPERTS)
"""For these it has no converter of numbered ones (5.24 conversion_mapping.py)."""

_RENAMED = dict.fromkeys(("inkling2", "inkling2_text"), "weight_scale")
"""What scales of experts in one tensor are called in models for which it has a table (5.24 conversion_mapping.py)."""

_AS_VALUES = ExpertsAsValues(
    ("lfm2_moe", "nemotron_h"),
    "which ask this model's config for hidden_act",
    EngineRule(
        "on a GPU with FP8, experts of codes ask the config for hidden_act, which this model's does not have",
        "transformers 5.24 integrations/finegrained_fp8.py FP8Experts",
    ),
)
_QUANTIZATION = EngineRule(
    "other methods are skipped with a warning, and codes taken for weights",
    "transformers 5.24 quantizers/auto.py, integrations/compressed_tensors.py",
)
_FINE_GRAINED = IgnoreList(
    ("modules_to_not_convert", "ignored_layers"),
    BY_START_REGEX_OR_END,
    empty_counts=True,  # 5.24 utils/quantization_config.py FineGrainedFP8Config
    unquantized=Unquantized(ROUTERS, ("afmoe", *_GATEWAYS)),
    experts=BY_MODULE,
    experts_as_one=True,
    in_memory=True,
)
"""How it reads the list of `quant_method: fp8` and `mxfp8`."""

_GROUPS_AND_BLOCKS = tuple(
    f"{part} weights and {inputs}" for part in ("group", "block") for inputs in ("static", "dynamic")
)
"""Schemes of groups other than MXFP8's and of blocks other than 128 x 128, or of these with fixed scales of inputs."""

ENGINE = Engine(
    name="transformers",
    title="transformers",
    serve=ServeCommand("transformers serve {path}"),
    spells={
        "static": "compressed-tensors",
        "dynamic": "compressed-tensors",
        "block": "fp8",
        "mxfp8": "compressed-tensors",
        "nvfp4": "compressed-tensors",
        "nvfp4a16": "compressed-tensors",
        "mxfp4": "compressed-tensors",
        "w4a16": "compressed-tensors",
    },
    methods={
        "compressed-tensors": MethodRules(
            formats=(
                *("NVFP4", "MXFP4", "INT4", "INT8", "static", "dynamic", "block", "mxfp8"),
                *("per-channel weights and static", "per-tensor weights and dynamic", *_GROUPS_AND_BLOCKS),
            ),
            experts=("MXFP4", "INT4", "INT8", "static", "dynamic"),
            ignored=IgnoreList(
                ("ignore",),
                BY_NAME_OR_REGEX,
                unquantized=Unquantized(ROUTERS, ("afmoe", "llama4_text", "phimoe", *_GATEWAYS)),
                in_memory=True,
            ),
            bf16_scales=True,
            cache="up to 5.23 rounds keys and values to FP8 by them and back, in a cache that is not smaller for it; "
            "in 5.24 compressed-tensors 0.20 does not find the cache, which is passed under another name",
            joined=EngineRule(
                "what it joins as it loads it, it decodes by one config group, and loses what is not codes of that; "
                "values stay beside FP8 alone: export a scheme of FP8, or use another engine",
                "transformers 5.24 quantizers/base.py update_weight_conversions, integrations/compressed_tensors.py",
            ),
            in_fp32=ScalesInFP32(
                ("hy_v4", "hy_v4_vl_text"),
                ("mxfp8", "NVFP4", "MXFP4"),
                EngineRule(
                    "of this model it keeps in FP32 whatever has `scale` in its name; codes become values of their "
                    "scales' dtype, which it cannot multiply with inputs in BF16, unless it is told `dequantize=True`",
                    "transformers 5.24 models/hy_v4/modeling_hy_v4.py _keep_in_fp32_modules_strict, "
                    "core_model_loading.py; compressed-tensors 0.20 quantization/lifecycle/forward.py; run",
                ),
            ),
            one_by_one=_LLAMA4_EXPERTS,
            in_one=_IN_ONE,
        ),
        "mxfp8": MethodRules(formats=("mxfp8",), ignored=_FINE_GRAINED, as_values=_AS_VALUES, in_one=_IN_ONE),
        "fp8": MethodRules(
            formats=("block", "static", "per-tensor weights and dynamic"),
            experts=("block",),
            ignored=_FINE_GRAINED,
            as_values=_AS_VALUES,
            in_one=_IN_ONE,
        ),
    },
    config_rule=_QUANTIZATION,
    scales=EngineRule(
        "scales are loaded into parameters of fixed shapes",
        "transformers 5.24 integrations/finegrained_fp8.py FP8Linear; compressed-tensors 0.20",
    ),
    shapes=ShapeRules(
        aligned=EngineRule("both dimensions of an FP8 weight must be multiples of 16", "torch._scaled_mm"),
        blocks=EngineRule(
            "the size of a block is the weight's by the number of scales, so all must be whole",
            "transformers 5.24 integrations/finegrained_fp8.py Fp8Dequantize",
        ),
        ragged="never",
        decoded={
            "compressed-tensors": EngineRule(
                "it decodes codes before it multiplies; only with `use_optimized_inference=True` it multiplies codes "
                "of FP8, in multiples of 16",
                "transformers 5.24 integrations/compressed_tensors.py CompressedTensorsFP8Linear, torch scaled_mm",
                fatal=False,
            ),
        },
        conv1d=_QUANTIZATION,
        moved={
            "sarvam_moe": RowsMoved(
                "query_key_value",
                True,
                EngineRule(
                    "it deals the linear's rows out to three, and everything beside it as if it had as many rows",
                    "transformers 5.24 conversion_mapping.py, core_model_loading.py Split",
                ),
                blocks=False,
            ),
        },
    ),
    fused=FusedLinears(
        groups=(),
        all_or_none=EngineRule(
            "experts are one tensor in memory, and have one dtype",
            "transformers 5.24 core_model_loading.py MergeModulelist",
        ),
        scales=EngineRule(
            "linears are computed apart, each with its own scales; other engines fuse them",
            "compressed-tensors 0.20 quantization/lifecycle/forward.py",
            fatal=False,
        ),
        global_scales=EngineRule(
            "linears are computed apart, each with its own; other engines fuse them",
            "compressed-tensors 0.20 quantization/lifecycle/forward.py",
            fatal=False,
        ),
        input_scales=EngineRule(
            "experts are computed apart, each with its own scale; other engines take the largest",
            "transformers 5.24 integrations/compressed_tensors.py",
            fatal=False,
        ),
    ),
    latents=EngineRule(
        "it caches the keys and values that latents become, and none of its cache is smaller for a scale",
        "transformers 5.24 models/deepseek_v3/modeling_deepseek_v3.py DeepseekV3Attention",
        fatal=False,
    ),
    mxfp4_experts={
        "deepseek_v4": ExpertDtype(
            lambda config: {**config, **config["quantization_config"]}.get("expert_dtype", "fp8"),
            EngineRule(
                "expert_dtype says what experts are, that of quantization_config first; a missing one means fp8",
                "transformers 5.24 models/deepseek_v4/configuration_deepseek_v4.py, utils/quantization_config.py",
            ),
        ),
    },
    no_codes=dict.fromkeys(
        ("qwen2_5_omni", "qwen3_omni_moe"),
        EngineRule(
            "the class around what thinks and what speaks computes nothing itself, so what decodes before it does is "
            "not called; nor does it find the towers that a list names: export what thinks alone",
            "transformers 5.24 models/qwen3_omni_moe/modeling_qwen3_omni_moe.py; compressed-tensors 0.20; run",
        ),
    )
    | {
        "ernie4_5_vl_moe": EngineRule(
            "it joins and divides the experts of both kinds without their scales, and stops",
            "transformers 5.24 core_model_loading.py ErnieFuseAndSplitTextVisionExperts; run",
        ),
    },
    no_class={
        "qwen3_asr": NoClass(
            EngineRule(
                "its class has the text model in text_config, and other names of tensors",
                "transformers 5.24 models/qwen3_asr/configuration_qwen3_asr.py",
            ),
            where="thinker_config",
        )
    }
    | dict.fromkeys(
        (
            "bailing_moe",
            "bailing_moe_v2",
            "deepseek",
            "deepseek_vl_v2",
            "glm5_next_text",
            "kimi_k2",
            "kimi_k3",
            "kimi_k3_text",
            "mimo",
            "mistral_large4_text",
            "muse_glimmer_text",
            "muse_spark_text",
            "nemotron-nas",
            "step3p5",
            "vlm",
            "NemotronH_Nano_VL_V2",
            "NemotronH_Nano_Omni_Reasoning_V3",
            "NemotronH_Super_Omni_Reasoning_V3",
        ),
        NoClass(
            EngineRule(
                "it has no class for this model_type that gives logits",
                "transformers 5.24 models/auto/modeling_auto.py",
            )
        ),
    ),
    loads_own_classes=True,
    demands={
        without_scale_of_inputs(fuses=False): EngineRule(
            TAKES_WHAT_MEMORY_HOLDS,
            "compressed-tensors 0.20 quantization/lifecycle/initialize.py",
        ),
        in_another_group(fuses=False): EngineRule(
            "of several config groups it takes that of a linear's name, else of an expression, else of the class",
            "compressed-tensors 0.20 utils/match.py match_targets",
        ),
        heads_beside(_FINE_GRAINED, "fp8", "mxfp8"): EngineRule(
            "where there is a list, even an empty one, it also quantizes a head that is not in it",
            "transformers 5.24 quantizers/base.py get_modules_to_not_convert, integrations/finegrained_fp8.py",
        ),
        unsaid_size(per_tensor=True): EngineRule(
            "without weight_block_size it expects blocks of 128",
            "transformers 5.24 utils/quantization_config.py FineGrainedFP8Config",
        ),
        named("weight_scale_inv", "activation_scale"): EngineRule(
            "it looks for scales under this name", "transformers 5.24 integrations/finegrained_fp8.py FP8Linear"
        ),
        exponents_named("weight_scale_inv", _RENAMED): EngineRule(
            "it looks for scales under this name",
            "transformers 5.24 quantizers/quantizer_finegrained_fp8.py serialized_names",
        ),
        unsaid_exponents: EngineRule(
            "on a GPU with FP8 it goes by these keys, refuses scales of another shape, and takes bytes for numbers; "
            "elsewhere it decodes by what is stored",
            "transformers 5.24 integrations/finegrained_fp8.py FP8Linear, quantizers/quantizer_finegrained_fp8.py",
            fatal=False,
        ),
        taken_for_weights: EngineRule(
            "a GPU with FP8 computes with them; where there is none, or told `dequantize=True`, it finds no scales for "
            "them and takes codes for weights",
            "transformers 5.24 quantizers/base.py update_weight_conversions; run",
            fatal=False,
        ),
        without_dimension: EngineRule(
            "scales of a tensor have one dimension", "transformers 5.24 with compressed-tensors 0.20"
        ),
        zero_points_of(4, 8): EngineRule(
            "it makes place for zero points that are not packed, and those of the directory do not fit",
            "compressed-tensors 0.20 quantization/lifecycle/initialize.py; transformers 5.24 core_model_loading.py",
        ),
        scales_beyond_bf16: EngineRule(
            "scales are rounded to the model's dtype, and codes decode by other numbers than they were made with",
            "compressed-tensors 0.20 quantization/lifecycle/initialize.py; transformers 5.24 core_model_loading.py",
            fatal=False,
        ),
        cache_scales_of_projections: EngineRule(
            "it reads scales of a cache where compressed-tensors writes them",
            "compressed-tensors 0.20 quantization/lifecycle/initialize.py",
            fatal=False,
        ),
        cache_without_notice: EngineRule(
            "it knows none but that of compressed-tensors", "transformers 5.24 quantizers", fatal=False
        ),
        unnamed_tables: EngineRule(
            "an embedding in FP8 is one for it if modules_to_convert names it, else its codes are taken for weights",
            "transformers 5.24 integrations/finegrained_fp8.py replace_with_fp8_embedding",
        ),
        cache_scales_several: EngineRule(
            "keys and values are divided by one positive number each", "compressed-tensors 0.20 modeling/kvcache.py"
        ),
    },
    keys={
        quantization_config_under_this_name: EngineRule(
            "it does not know it as `compression_config`, and takes codes for weights",
            "transformers 5.24 quantizers/auto.py, configuration_utils.py",
        ),
    },
)
