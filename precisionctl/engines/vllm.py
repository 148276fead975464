"""vLLM: what it asks of a directory of codes. Read in 0.33.0; its config parser and weight loader were run on a CPU."""

import re
from functools import partial

from precisionctl.engines.base import Engine, NoClass, ServeCommand
from precisionctl.engines.rules.cache_rules import (
    cache_by,
    cache_scales_beyond_bf16,
    cache_scales_of_values_alone,
    cache_scales_several,
    cache_scales_unfound,
    cache_unsaid,
    cache_without_scales,
)
from precisionctl.engines.rules.config_groups import TAKES_WHAT_MEMORY_HOLDS, in_another_group, without_scale_of_inputs
from precisionctl.engines.rules.demands import (
    exponents_named,
    format_of_weights_alone,
    lost_by_renaming,
    named,
    quark_channels_in_columns,
    quark_keys_unsaid,
    stored_as_one,
    unsaid_activations,
    unsaid_size,
)
from precisionctl.engines.rules.fixed_settings import NUMBER_BY_LIST
from precisionctl.engines.rules.fused_rules import FusedLinears
from precisionctl.engines.rules.ignore_lists import BY_NAME, BY_NAME_OR_REGEX, BY_PART_OR_GLOB
from precisionctl.engines.rules.ignored_modules import (
    BY_MODULE,
    FIRST_EXPERT,
    ROUTERS_AND_GATES,
    IgnoreList,
    Unquantized,
)
from precisionctl.engines.rules.integer_rules import (
    int8_experts,
    int8_inputs_of_group_unequal,
    int8_of_no_scheme,
    scales_of_words_beyond_bf16,
    zero_points_of,
)
from precisionctl.engines.rules.method_rules import BESIDE_THEIR_ROUTERS, MethodRules
from precisionctl.engines.rules.model_rules import CodesAlone, ExpertDtype, InEveryLayer
from precisionctl.engines.rules.required_keys import (
    ADDED,
    GLM5_NEXT,
    IN_VLLM,
    OF_DEEPSEEK_V4,
    number_of_dense_layers,
    of_growing_queries,
    of_hy_v4,
    of_minimax_m3,
    of_models,
    of_published_classes,
    of_shared_indexers,
    published_by,
)
from precisionctl.engines.rules.rule import EngineRule
from precisionctl.engines.rules.serving_rules import Division, RowsMoved, ShapeRules
from precisionctl.engines.rules.vllm_settings import BY_NUMBER_IN_VLLM, FIXED, WRAPPERS
from precisionctl.engines.serving import FUSED, LATENT

_UNQUANTIZED = Unquantized(ROUTERS_AND_GATES, ("qwen3_moe", "qwen3_vl_moe_text", "lfm2_moe", "k2_horizon"))
"""models/: GateLinear, by its quant_config."""
_NO_NAME = "it makes this linear without a name, so no list keeps it in BF16"
_list = partial(
    IgnoreList,
    unquantized=_UNQUANTIZED,
    looks_up_missing_parts=True,
    # models/gemma3n.py Gemma3nSelfDecoder
    moved={"gemma3n_text": (re.compile(r"(altup_projections\.\d+|per_layer_model_projection)$"), "self_decoder.")},
)

ENGINE = Engine(
    name="vllm",
    title="vLLM",
    serve=ServeCommand(
        "vllm serve {path}",
        on_ranks=" --tensor-parallel-size {ranks}",
        on_experts=" --enable-expert-parallel",
        on_cache=" --kv-cache-dtype fp8",
    ),
    spells={
        "static": "compressed-tensors",
        "dynamic": "compressed-tensors",
        "block": "fp8",
        "mxfp8": "modelopt",
        "nvfp4": "compressed-tensors",
        "nvfp4a16": "compressed-tensors",
        "mxfp4": "compressed-tensors",
        "w4a16": "compressed-tensors",
    },
    methods={
        "compressed-tensors": MethodRules(
            formats=(
                *("NVFP4", "MXFP4", "INT4", "INT8", "static", "dynamic", "block", "mxfp8"),
                *("per-channel weights and static", "per-tensor weights and dynamic"),
            ),
            experts=("NVFP4", "MXFP4", "INT4", "INT8", "static", "dynamic", "block", "mxfp8"),
            ignored=_list(("ignore",), BY_NAME_OR_REGEX, heads_apart=True, experts=FIRST_EXPERT),
            cache="casts keys and values with them, and switches its cache to FP8 by itself",
        ),
        "modelopt": MethodRules(
            formats=("NVFP4", "static", "dynamic", "block", "mxfp8"),
            experts=("NVFP4", "static", "mxfp8"),
            ignored=_list(("ignore", "exclude_modules"), BY_PART_OR_GLOB, experts=BY_MODULE),
            as_values=BESIDE_THEIR_ROUTERS,
            cache="casts keys and values with them, and switches its cache to FP8 by itself",
        ),
        "mxfp8": MethodRules(
            formats=("mxfp8",),
            ignored=_list(("ignored_layers",), BY_PART_OR_GLOB, experts=BY_MODULE),
            as_values=BESIDE_THEIR_ROUTERS,
        ),
        "fp8": MethodRules(
            formats=("block", "static", "per-tensor weights and dynamic"),
            ignored=_list(("ignored_layers", "modules_to_not_convert"), BY_NAME, heads_apart=True, experts=BY_MODULE),
            as_values=BESIDE_THEIR_ROUTERS,
            cache="casts keys and values with them if it is started with an FP8 cache",
        ),
        "quark": MethodRules(
            formats=(
                *("MXFP4", "static", "dynamic"),
                *("per-channel weights and static", "per-tensor weights and dynamic"),
            ),
            experts=("MXFP4", "static", "dynamic"),
            ignored=_list(("exclude",), BY_NAME_OR_REGEX, heads_apart=True),
        ),
    },
    config_rule=EngineRule(
        "quantization_config must say of each linear what it is",
        "vLLM 0.33 compressed_tensors.py get_scheme, modelopt.py, quark.py _get_scheme_cls_from_config",
    ),
    scales=EngineRule(
        "scales are loaded into FP32 parameters of fixed shapes",
        "vLLM 0.33 compressed_tensors_w8a8_fp8.py create_weights, modelopt.py",
    ),
    shapes=ShapeRules(
        aligned=EngineRule("both dimensions of an FP8 weight must be multiples of 16", "CUTLASS and torch._scaled_mm"),
        blocks=EngineRule(
            "blocks of 128 must not be cut by a GPU's share or by the next linear of a fused one; the last may be, "
            "uncut",
            "vLLM 0.33 fp8_utils.py validate_fp8_block_shape, validate_fp8_block_shape_moe, per_token_group_quant_fp8",
        ),
        ragged="last",
        moved={
            "bloom": RowsMoved(
                "query_key_value",
                True,
                EngineRule(
                    "it divides all that is stored of the linear by heads, and puts those of queries first",
                    "vLLM 0.33 models/bloom.py BloomModel._repack_qkv",
                ),
            ),
            "falcon": RowsMoved(
                "query_key_value",
                False,
                EngineRule(
                    "it divides the linear and its scales by heads, and puts those of queries first",
                    "vLLM 0.33 models/falcon.py FalconModel.load_weights",
                ),
            ),
        },
    ),
    no_class={
        **dict.fromkeys(
            ("bamba", "gpt_neo", "mpt", "shieldgemma2"),
            NoClass(EngineRule("it has no class for this model_type", "vLLM 0.33 models/registry.py")),
        ),
        **dict.fromkeys(
            ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"),
            NoClass(EngineRule("it loads what thinks from the whole model alone", "vLLM 0.33 models/registry.py")),
        ),
        "gemma3n_text": NoClass(
            EngineRule(
                "of the text model alone it leaves out what tokens have for each layer; of the wrapper it does not",
                "vLLM 0.33 models/gemma3n.py Gemma3nForCausalLM.forward; run",
            )
        ),
        "mllama": NoClass(
            EngineRule(
                "its own class left after 0.10.2, and by transformers' it does not start: no tokens are for images",
                "vLLM 0.33 models/registry.py, transformers/multimodal.py; run",
            )
        ),
        "ernie4_5_vl_moe": NoClass(
            EngineRule(
                "it reads the tower's sizes in the words of the published config.json, ernie4_5_moe_vl",
                "vLLM 0.33 models/ernie45_vl.py Ernie4_5_VisionTransformer; run",
            )
        ),
        **dict.fromkeys(
            ("deepseek", "nemotron-nas"),
            NoClass(
                EngineRule(
                    "it reads config.json by the class that auto_map names",
                    "vLLM 0.33 transformers_utils/config.py _CONFIG_REGISTRY, models/nemotron_nas.py; run",
                )
            ),
        ),
    },
    fixed=FIXED,
    wrappers=WRAPPERS,
    in_every_layer={
        "axk1": InEveryLayer(
            "post_mlp_layernorm.weight",
            EngineRule(
                "it asks for this norm behind dense MLPs, too, where published files have it and nothing computes it: "
                "one of ones will do",
                "vLLM 0.33 models/AXK1.py, default_loader.py track_weights_loading; run",
            ),
        ),
    },
    fused=FusedLinears(
        groups=(*FUSED, LATENT),
        all_or_none=EngineRule(
            "linears that it fuses must all have one scheme",
            "vLLM 0.33 compressed_tensors/utils.py should_ignore_layer",
        ),
        scales=EngineRule(
            "it requantizes the group with the largest, in FP16, which rounds the weights twice",
            "vLLM 0.33 w8a8_utils.py requantize_with_max_scale",
            fatal=False,
        ),
        global_scales=EngineRule(
            "it takes the largest for all of a group and leaves codes as they are, which decode to other values",
            "vLLM 0.33 compressed_tensors_w4a4_nvfp4.py, modelopt.py process_weights_after_loading",
        ),
        input_scales=EngineRule(
            "it takes the largest input scale of a layer's experts for all of them",
            "vLLM 0.33 fp8_utils.py process_fp8_input_tensor_strategy_moe",
            fatal=False,
        ),
    ),
    division=Division(
        experts=EngineRule(
            "expert parallelism is for models with experts",
            "vLLM config/model.py ModelConfig._verify_with_expert_parallelism",
        ),
    ),
    latents=EngineRule(
        "it casts latents under a scale of 1: its loader brings the scale to `self_attn.attn`, which is not there",
        "vLLM 0.33 quantization/base_config.py get_cache_scale_mapper, weight_utils.py maybe_remap_kv_scale_name",
        fatal=False,
    ),
    codes_alone={
        "deepseek_v4": CodesAlone(
            ("wo_a",),
            EngineRule(
                "the grouped output projection is multiplied in blocks of FP8 under powers of two, by no other kernel",
                "vLLM models/deepseek_v4/nvidia/ops/o_proj.py deep_gemm_fp8_o_proj",
            ),
            blocks=True,
        ),
        "minicpm3": CodesAlone(
            ("q_a_proj",),
            EngineRule(_NO_NAME, "vLLM 0.33 models/minicpm3.py MiniCPM3Attention; run"),
        ),
        "deepseek": CodesAlone(
            ("q_proj", "k_proj", "v_proj", "o_proj"),
            EngineRule(_NO_NAME, "vLLM 0.33 models/deepseek_v2.py DeepseekAttention; run"),
        ),
    },
    mxfp4_experts={
        "deepseek_v4": ExpertDtype(
            lambda config: config.get("expert_dtype", "fp4"),
            EngineRule(
                "expert_dtype says what experts are; a missing one means fp4",
                "vLLM models/deepseek_v4/quant_config.py DeepseekV4FP8Config.expert_dtype",
            ),
        ),
    },
    no_codes={
        "muse_spark": EngineRule(
            "of this model it loads values, and of codes ModelOpt's NVFP4 alone",
            "vLLM 0.33 models/muse_spark/nvidia/model.py supported_quantization_configs",
        ),
        **dict.fromkeys(
            ("falcon_mamba", "mamba"),
            EngineRule("it makes all linears of mixers without quantization", "vLLM 0.33 layers/mamba/mamba_mixer.py"),
        ),
    },
    demands={
        without_scale_of_inputs(fuses=True): EngineRule(
            TAKES_WHAT_MEMORY_HOLDS,
            "vLLM 0.33 compressed_tensors_w8a8_fp8.py, compressed_tensors_w4a4_nvfp4.py create_weights",
        ),
        in_another_group(fuses=True): EngineRule(
            "of several config groups it takes that of a linear as it is fused, else of its parts, else of the class",
            "vLLM 0.33 compressed_tensors/utils.py find_matched_target",
        ),
        unsaid_activations("fp8"): EngineRule(
            "activation_scheme must be given", "vLLM 0.33 quantization/fp8.py Fp8Config.from_config"
        ),
        unsaid_size(per_tensor=False): EngineRule(
            "without weight_block_size it takes the scales for one of each tensor",
            "vLLM 0.33 quantization/fp8.py Fp8Config.from_config",
        ),
        named("weight_scale", "input_scale"): EngineRule(
            "it looks for scales under this name", "vLLM 0.33 quantization/fp8.py Fp8LinearMethod.create_weights"
        ),
        exponents_named("weight_scale"): EngineRule(
            "it looks for scales under this name", "vLLM 0.33 modelopt.py ModelOptMxFp8Config.from_config"
        ),
        stored_as_one(but=("step3p5",)): EngineRule(
            "codes of experts are looked for expert by expert",
            "vLLM 0.33 fused_moe/routed_experts.py make_expert_params_mapping; models/step3p5.py",
        ),
        lost_by_renaming: EngineRule(
            "of gpt-oss it renames what ends in `.down_proj`, in the list of linears to ignore, too",
            "vLLM 0.33 models/gpt_oss.py hf_to_vllm_mapper, compressed_tensors_moe.py get_moe_method",
        ),
        format_of_weights_alone: EngineRule(
            "of a format that it does not know for activations, only the weights are FP8",
            "vLLM 0.33 compressed_tensors/utils.py is_activation_quantization_format",
            fatal=False,
        ),
        int8_of_no_scheme(inputs_of_words=True): EngineRule(
            "of INT8 it has schemes for bytes with inputs in INT8, and for words of `pack-quantized`",
            "vLLM 0.33 compressed_tensors.py _get_scheme_from_parts, _is_static_tensor_w8a8, _is_dynamic_token_w8a8",
        ),
        int8_inputs_of_group_unequal: EngineRule(
            "it keeps the one that it loads last, for all that it fuses",
            "vLLM 0.33 compressed_tensors_w8a8_int8.py create_weights, parameter.py BasevLLMParameter",
            fatal=False,
        ),
        int8_experts(by_token=True): EngineRule(
            "experts in bytes have a scale for each channel, and their inputs one for each token",
            "vLLM 0.33 compressed_tensors_moe_w8a8_int8.py",
        ),
        zero_points_of(8): EngineRule(
            "of its kernels only Machete (Hopper), and Conch and Humming where they are installed, take them",
            "vLLM 0.33 kernels/linear/mixed_precision, marlin_utils.py query_marlin_supported_quant_types",
            fatal=False,
        ),
        scales_of_words_beyond_bf16: EngineRule(
            "scales of packed integers are rounded to the model's dtype",
            "vLLM 0.33 compressed_tensors_wNa16.py create_weights",
            fatal=False,
        ),
        quark_keys_unsaid: EngineRule(
            "it asks Quark's config for these keys, which have no defaults",
            "vLLM 0.33 quark/quark.py from_config, _find_matched_config, utils.py should_ignore_layer",
        ),
        quark_channels_in_columns: EngineRule(
            "scales of channels are loaded into a parameter of one dimension",
            "vLLM 0.33 quark/schemes/quark_w8a8_fp8.py create_weights",
        ),
        cache_by("tensor", "attn_head"): EngineRule(
            "a cache has one fixed scale for a layer or a head",
            "vLLM 0.33 compressed_tensors.py CompressedTensorsKVCacheMethod.validate_kv_cache_scheme",
        ),
        cache_without_scales: EngineRule(
            "it casts into an FP8 cache with scale 1", "vLLM 0.33 quantization/kv_cache.py", fatal=False
        ),
        cache_scales_beyond_bf16: EngineRule(
            "it rounds the cache's scales to the model's dtype, except those of compressed-tensors",
            "vLLM 0.33 quantization/kv_cache.py BaseKVCacheMethod.create_weights",
            fatal=False,
        ),
        cache_unsaid: EngineRule(
            "its cache stays as it is unless it is told", "vLLM 0.33 quantization/kv_cache.py", fatal=False
        ),
        cache_scales_unfound: EngineRule(
            "it looks under self_attn; what it does not find is 1",
            "vLLM 0.33 quantization/base_config.py get_cache_scale_mapper",
            fatal=False,
        ),
        cache_scales_of_values_alone: EngineRule(
            "one scale for both would be one of keys", "vLLM 0.33 quantization/kv_cache.py"
        ),
        cache_scales_several: EngineRule(
            "keys and values are divided by one positive number each", "vLLM 0.33 quantization/kv_cache.py"
        ),
    },
    keys={
        published_by(IN_VLLM): EngineRule(
            f"its model fails without this key, or takes another model's value. {ADDED}",
            "vLLM 0.33 models/afmoe.py, deepseek_v2.py, hy_v3.py, lfm2.py, mimo_v2.py, "
            "minimax_m2.py, step3p5.py, transformers_utils/configs/muse_spark.py",
        ),
        number_of_dense_layers(BY_NUMBER_IN_VLLM): EngineRule(
            NUMBER_BY_LIST,
            "vLLM 0.33 models/deepseek_v2.py, AXK1.py, bailing_moe_linear.py, glm4_moe_lite.py, hy_v3.py, "
            "models/deepseek_v32, models/kimi_k3",
        ),
        of_growing_queries: EngineRule(
            "without it queries do not grow, and the model is another one beyond the context that it had before YaRN: "
            "`export-inference` writes it",
            "vLLM 0.33 models/mistral.py MistralAttention; run",
        ),
        of_shared_indexers: EngineRule(
            "without it every layer has an indexer", "vLLM 0.33 models/deepseek_v32/attention.py"
        ),
        of_models(("deepseek_v4",), *OF_DEEPSEEK_V4): EngineRule(
            "its model asks the config for these keys, which have no defaults",
            "vLLM models/deepseek_v4/nvidia/model.py, transformers_utils/configs/deepseek_v4.py",
        ),
        of_published_classes: EngineRule(
            f"its class of this model reads the release's config.json. {ADDED}",
            "vLLM models/exaone.py, models/bailing_moe.py, models/phimoe.py, models/sarvam.py SarvamMLAAttention",
        ),
        of_hy_v4: EngineRule(
            "without the switches its model has no gates, no sinks and one stream, and layers of other kinds see all "
            "keys",
            "vLLM models/hy_v4/nvidia/attention.py HYV4MLAAttention, models/hy_v4/nvidia/model.py",
        ),
        of_models(
            GLM5_NEXT,
            *("linear_attn_config", "mhc", "mla_use_nope", "topk_method", "scoring_func", "indexer_rope_interleave"),
        ): EngineRule(
            "its model asks the config for these keys, which have no defaults",
            "vLLM models/glm5next/common/model.py, models/glm5next/common/attention.py",
        ),
        of_minimax_m3: EngineRule(
            "its config takes the released model's layers, indexers and rotation where the published words do not say "
            "others, and its MLPs know one activation",
            "vLLM transformers_utils/configs/minimax_m3.py MiniMaxM3TextConfig, models/minimax_m3/nvidia/model.py",
        ),
    },
)
