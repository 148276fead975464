"""SGLang: what it asks of a directory of codes. Read in SGLang 0.5.23; its config parsers were run, not its kernels."""

import re
from dataclasses import replace
from functools import partial

from precisionctl.engines.base import Engine, NoClass, ServeCommand
from precisionctl.engines.rules.cache_rules import (
    cache_by,
    cache_scales_of_values_alone,
    cache_scales_several,
    cache_scales_unfound,
    cache_unsaid,
    cache_without_scales,
)
from precisionctl.engines.rules.config_groups import (
    TAKES_WHAT_MEMORY_HOLDS,
    in_another_group,
    without_scale_of_inputs,
    without_target,
)
from precisionctl.engines.rules.demands import (
    format_of_weights_alone,
    named,
    stored_as_one,
    unsaid_activations,
    unsaid_size,
)
from precisionctl.engines.rules.fixed_settings import (
    BY_LEADING_DENSE,
    BY_NUMBER,
    NUMBER_BY_LIST,
    FixedSettings,
    dense_layers_first,
)
from precisionctl.engines.rules.fused_rules import FusedLinears
from precisionctl.engines.rules.ignore_lists import BY_END_OR_REGEX, BY_PART_OR_GLOB, BY_PATH
from precisionctl.engines.rules.ignored_modules import (
    BY_MODULE,
    FIRST_EXPERT,
    ROUTERS_AND_GATES,
    IgnoreList,
    Unquantized,
)
from precisionctl.engines.rules.integer_rules import (
    int8_experts,
    int8_inputs_fixed,
    int8_inputs_shifted,
    int8_of_a_tensor,
    int8_of_no_scheme,
    scales_of_words_beyond_bf16,
    zero_points_of,
)
from precisionctl.engines.rules.method_rules import BESIDE_THEIR_ROUTERS, MethodRules
from precisionctl.engines.rules.model_rules import CodesAlone
from precisionctl.engines.rules.required_keys import (
    ADDED,
    GLM5_NEXT,
    IN_SGLANG,
    MUSE_GLIMMER,
    OF_DEEPSEEK_V4,
    number_of_dense_layers,
    of_hy_v4,
    of_models,
    of_published_classes,
    published_by,
)
from precisionctl.engines.rules.rule import EngineRule
from precisionctl.engines.rules.serving_rules import Division, ShapeRules
from precisionctl.engines.serving import FUSED, INDEXED, LATENT

_INDEXERS = ("index_q_proj", "index_k_proj")
"""MiniMax-M3's, one linear beside that of attention: models/minimax_m3.py packed_modules_mapping."""
_UNQUANTIZED = Unquantized(ROUTERS_AND_GATES)
_list = partial(IgnoreList, unquantized=_UNQUANTIZED)
_IN_STACKS = ("step3p5",)
"""models/step3p5.py, load_weights, which takes experts out of three tensors for a layer alone."""
_rules = partial(MethodRules, in_one=dict.fromkeys(_IN_STACKS, re.compile(r".+\.moe\.experts\.\d+\..+")))
_IGNORED_LAYERS = _list(("ignored_layers", "modules_to_not_convert"), BY_PATH, heads_apart=True, experts=BY_MODULE)

ENGINE = Engine(
    name="sglang",
    title="SGLang",
    serve=ServeCommand(
        "python -m sglang.launch_server --model-path {path}",
        on_ranks=" --tp {ranks}",
        on_experts=" --ep-size {ranks}",
        on_cache=" --kv-cache-dtype fp8_e4m3",
    ),
    spells={
        "static": "compressed-tensors",
        "dynamic": "compressed-tensors",
        "block": "fp8",
        "mxfp8": "mxfp8",
        "nvfp4": "compressed-tensors",
        "nvfp4a16": "compressed-tensors",
        "w4a16": "compressed-tensors",
    },
    methods={
        "compressed-tensors": _rules(
            formats=("NVFP4", "INT4", "INT8", "static", "dynamic", "block"),
            experts=("NVFP4", "INT4", "INT8", "static", "dynamic"),
            of_models={"kimi_k3": ("MXFP4",)},  # models/kimi_k3.py KimiK3MoE
            ignored=_list(("ignore",), BY_END_OR_REGEX, heads_apart=True, experts=FIRST_EXPERT),
            cache="casts keys and values with them",
        ),
        "modelopt": _rules(
            formats=("NVFP4", "static", "mxfp8"),
            ignored=_list(("ignore", "exclude_modules"), BY_PART_OR_GLOB, experts=BY_MODULE),
            ignored_in={"mxfp8": replace(_IGNORED_LAYERS, keys=("exclude_modules", "ignore"))},  # read as its own mxfp8
            cache="casts keys and values with them",
        ),
        "mxfp8": _rules(
            formats=("mxfp8",),
            ignored=_IGNORED_LAYERS,
            as_values=BESIDE_THEIR_ROUTERS,
            cache="casts keys and values with them",
        ),
        "fp8": _rules(
            formats=("block", "static", "per-tensor weights and dynamic"),
            ignored=_IGNORED_LAYERS,
            as_values=BESIDE_THEIR_ROUTERS,
            cache="casts keys and values with them",
        ),
    },
    config_rule=EngineRule(
        "quantization_config must say of each linear what it is",
        "SGLang 0.5.23 layers/quantization/fp8.py, modelopt_quant.py, configs/model_config.py, compressed_tensors.py",
    ),
    scales=EngineRule(
        "scales are loaded into FP32 parameters of fixed shapes",
        "SGLang 0.5.23 layers/quantization/fp8.py, compressed_tensors_w8a8_fp8.py create_weights",
    ),
    shapes=ShapeRules(
        aligned=EngineRule("both dimensions of an FP8 weight must be multiples of 16", "CUTLASS and torch._scaled_mm"),
        blocks=EngineRule(
            "blocks of 128 must not be cut by a GPU's share or by the next linear of a fused one",
            "SGLang 0.5.23 layers/quantization/fp8.py create_weights, fp8_kernel.py per_token_group_quant_fp8",
        ),
        ragged="alone",
    ),
    fused=FusedLinears(
        groups=tuple(_INDEXERS if group == INDEXED else group for group in (*FUSED, LATENT)),
        all_or_none=EngineRule(
            "linears that it fuses must all have one scheme",
            "SGLang 0.5.23 layers/quantization/utils.py is_layer_skipped, compressed_tensors/utils.py",
        ),
        scales=EngineRule(
            "it requantizes the group with the largest, which rounds the weights twice",
            "SGLang 0.5.23 layers/quantization/utils.py requantize_with_max_scale",
            fatal=False,
        ),
        global_scales=EngineRule(
            "it takes the largest for all of a group and leaves codes as they are, or refuses them",
            "SGLang 0.5.23 compressed_tensors_w4a4_nvfp4.py, compressed_tensors_w4a16_nvfp4.py, modelopt_quant.py",
        ),
        input_scales=EngineRule(
            "it takes the largest input scale of a layer's experts for all of them",
            "SGLang 0.5.23 layers/quantization/fp8.py, modelopt_quant.py process_weights_after_loading",
            fatal=False,
        ),
    ),
    division=Division(
        experts=EngineRule(
            "every GPU gets the same number of experts", "SGLang layers/moe/fused_moe_triton/layer.py FusedMoE"
        ),
        evenly=True,
        whole_groups=EngineRule(
            "beside codes, each GPU gets groups of a mixer whole",
            "SGLang 0.5.23 layers/attention/mamba/mamba.py MambaMixer2",
        ),
    ),
    latents=EngineRule(
        "it casts latents under a scale of 1, and multiplies what it reads of them by a scale that is stored",
        "SGLang 0.5.23 mem_cache/memory_pool.py MLATokenToKVPool, layers/attention/flashmla_backend.py forward_decode",
    ),
    codes_alone={
        "deepseek_v4": CodesAlone(
            ("wo_a",),
            EngineRule(
                "the grouped output projection is multiplied in blocks of FP8 under powers of two, by no other kernel",
                "SGLang models/deepseek_v4.py MQALayer (format_ue8m0), _setup_fp8_wo_a_scales",
            ),
            blocks=True,
        ),
    },
    mxfp4_experts={"deepseek_v4": None},  # configs/deepseek_v4.py try_detect_fp4_experts
    no_codes={
        "qwen3_omni_moe": EngineRule(
            "it asks for the linears of towers by none of their names, or by a part, so no list keeps them in BF16",
            "SGLang 0.5.23 models/qwen3_omni_moe.py Qwen3OmniMoeAudioEncoder, Qwen3OmniMoeVisionEncoder",
        ),
        "muse_spark": EngineRule(
            "of this model it loads values, and of codes ModelOpt's NVFP4 of experts alone",
            "SGLang 0.5.23 models/muse_spark.py MuseSparkTextForCausalLM",
        ),
    },
    fixed=(
        FixedSettings(
            BY_LEADING_DENSE,
            {"mlp_layer_types": dense_layers_first},
            EngineRule(
                BY_NUMBER,
                "SGLang 0.5.23 models/deepseek.py, deepseek_v2.py, glm4_moe_lite.py, hunyuan_v3.py, kimi_linear.py",
            ),
        ),
    ),
    no_class={
        **dict.fromkeys(
            ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"),
            NoClass(
                EngineRule(
                    "it loads what thinks from the whole model alone",
                    "SGLang 0.5.23 models/qwen3_omni_moe.py EntryClass",
                )
            ),
        ),
        "ernie4_5_vl_moe": NoClass(
            EngineRule(
                "it reads the tower's sizes in the words of the published config.json, ernie4_5_moe_vl",
                "SGLang 0.5.23 models/ernie45_vl.py Ernie4_5_VisionTransformer",
            )
        ),
        "shieldgemma2": NoClass(
            EngineRule("it has no class for this model_type", "SGLang 0.5.23 models/*.py EntryClass")
        ),
    },
    demands={
        without_scale_of_inputs(fuses=True, class_first=True): EngineRule(
            TAKES_WHAT_MEMORY_HOLDS,
            "SGLang 0.5.23 compressed_tensors_w8a8_fp8.py, compressed_tensors_w4a4_nvfp4.py create_weights",
        ),
        in_another_group(fuses=True, class_first=True): EngineRule(
            "of several config groups it takes that of a linear as it is fused, else of the class, else of its parts",
            "SGLang 0.5.23 compressed_tensors/utils.py find_matched_target",
        ),
        without_target(_UNQUANTIZED): EngineRule(
            "it raises an error for a linear that is neither a target nor ignored",
            "SGLang 0.5.23 compressed_tensors/utils.py find_matched_target",
        ),
        unsaid_activations("fp8", "mxfp8"): EngineRule(
            "activation_scheme must be given", "SGLang 0.5.23 layers/quantization/fp8.py Fp8Config.from_config"
        ),
        unsaid_size(per_tensor=False): EngineRule(
            "without weight_block_size it takes the scales for one of each tensor",
            "SGLang 0.5.23 layers/quantization/fp8.py Fp8Config.from_config",
        ),
        named("weight_scale", "input_scale"): EngineRule(
            "it looks for scales under this name",
            "SGLang 0.5.23 layers/quantization/fp8.py Fp8LinearMethod.create_weights",
        ),
        stored_as_one(but=_IN_STACKS): EngineRule(
            "codes of experts are looked for expert by expert", "SGLang 0.5.23 layers/moe/fused_moe_triton/layer.py"
        ),
        format_of_weights_alone: EngineRule(
            "of a format that it does not know for activations, only the weights are FP8",
            "SGLang 0.5.23 compressed_tensors/utils.py is_activation_quantization_format",
            fatal=False,
        ),
        int8_of_no_scheme(inputs_of_words=False): EngineRule(
            "of INT8 it has schemes for bytes with inputs in INT8, and for words of `pack-quantized` without",
            "SGLang 0.5.23 compressed_tensors.py _get_scheme_from_parts",
        ),
        int8_of_a_tensor: EngineRule(
            "it requantizes the parts of a fused linear to FP8, and its kernel wants a scale for each channel",
            "SGLang 0.5.23 compressed_tensors_w8a8_int8.py process_weights_after_loading, apply_weights",
        ),
        int8_experts(by_token=False): EngineRule(
            "experts in bytes are implemented for NPUs alone", "SGLang 0.5.23 compressed_tensors.py get_moe_scheme"
        ),
        zero_points_of(8): EngineRule(
            "its one kernel, Marlin, is built for those of four bits",
            "SGLang 0.5.23 compressed_tensors_wNa16.py, marlin_utils.py query_marlin_supported_quant_types",
        ),
        int8_inputs_fixed: EngineRule(
            "it makes a scale for each token in its place",
            "SGLang 0.5.23 compressed_tensors_w8a8_int8.py apply_weights",
            fatal=False,
        ),
        int8_inputs_shifted: EngineRule(
            "it rounds inputs without zero points",
            "SGLang 0.5.23 compressed_tensors_w8a8_int8.py apply_weights",
            fatal=False,
        ),
        scales_of_words_beyond_bf16: EngineRule(
            "scales of packed integers are rounded to the model's dtype",
            "SGLang 0.5.23 compressed_tensors_wNa16.py create_weights",
            fatal=False,
        ),
        cache_by("tensor"): EngineRule(
            "it ignores any cache scheme but one fixed scale for a layer, with a warning",
            "SGLang 0.5.23 compressed_tensors.py kv_cache_quant_algo",
            fatal=False,
        ),
        cache_without_scales: EngineRule(
            "it casts into an FP8 cache with scale 1", "SGLang 0.5.23 layers/quantization/kv_cache.py", fatal=False
        ),
        cache_unsaid: EngineRule(
            "its cache stays as it is unless it is told", "SGLang 0.5.23 layers/quantization/kv_cache.py", fatal=False
        ),
        cache_scales_unfound: EngineRule(
            "it looks under self_attn; what it does not find is 1",
            "SGLang 0.5.23 model_loader/weight_utils.py maybe_remap_kv_scale_name",
            fatal=False,
        ),
        cache_scales_of_values_alone: EngineRule(
            "one scale for both would be one of keys", "SGLang 0.5.23 layers/quantization/kv_cache.py"
        ),
        cache_scales_several: EngineRule(
            "keys and values are divided by one positive number each", "SGLang 0.5.23 layers/quantization/kv_cache.py"
        ),
    },
    keys={
        published_by(IN_SGLANG): EngineRule(
            f"its model fails without this key, or takes another model's value. {ADDED}",
            "SGLang 0.5.23 models/afmoe.py, deepseek_v2.py, exaone_moe.py, hunyuan_v3.py, "
            "mimo_v2.py, minimax_m2.py, muse_spark.py",
        ),
        number_of_dense_layers(BY_LEADING_DENSE): EngineRule(
            NUMBER_BY_LIST,
            "SGLang 0.5.23 models/deepseek.py, deepseek_v2.py, glm4_moe_lite.py, hunyuan_v3.py, kimi_linear.py",
        ),
        of_models(("deepseek_v4",), *OF_DEEPSEEK_V4): EngineRule(
            "its model asks the config for these keys, whose defaults are of another model",
            "SGLang models/deepseek_v4.py MQALayer, configs/deepseek_v4.py",
        ),
        of_models(GLM5_NEXT, "mhc", "first_k_dense_replace", "index_kpool_compress"): EngineRule(
            "without them its model has one stream, and dense MLPs in three layers",
            "SGLang configs/glm5_next.py Glm5NextTextConfig, models/glm5_next.py",
        ),
        of_models(("muse_glimmer", "muse_glimmer_text"), *MUSE_GLIMMER): EngineRule(
            "its config asks for these keys, which have no defaults",
            "SGLang configs/muse_glimmer.py muse_glimmer_config_kwargs_from_hf",
        ),
        of_published_classes: EngineRule(
            f"its class of this model reads the release's config.json. {ADDED}",
            "SGLang models/exaone.py, models/bailing_moe.py, models/phimoe.py, models/sarvam_moe.py",
        ),
        of_hy_v4: EngineRule(
            "its config refuses layers of another kind", "SGLang configs/hy_v4.py HYV4Config._validate_hy_v4"
        ),
    },
)
