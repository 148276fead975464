"""Wrappers: models of images or sound whose text model belongs to a family that has a table.

A wrapper is a line of `WRAPPERS`: what stands before the text model's names. Its table (`wrapped_architecture.py`) is
its text family's under these names, and a row for each tensor that is not the text model's, a **tower**: tensors of
what sees and hears, which no program here computes. They travel as they are.

Traps: the same wrapper has older names in published files than in memory, where transformers has all text models at
`model.language_model.`, and some programs save those. Whether the head is the embedding is said by the wrapper's
config.json, in older ones by its `text_config`, and in some by neither.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from precisionctl.architectures.config_keys import Config, is_on
from precisionctl.architectures.param_map import Architecture, Either
from precisionctl.architectures.rearrangements import Transposed
from precisionctl.architectures.shared.moe_rows import FUSED, NUMBERED
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture, shown
from precisionctl.model.model_parts import Wrapper
from precisionctl.model.text_config import config_parts, text_part
from precisionctl.param import EMBEDDING

TOWERS = "towers."
"""What Megatron's names of towers begin with here, before the Hugging Face name. No parameter of Megatron's does."""

IN_MEMORY = "model.language_model.", "lm_head."
"""Where transformers 5 has body and head of most wrappers' text models in memory; some programs save these names."""


@dataclass(frozen=True)
class WrapperNames:
    """How a wrapper names the tensors of its text model, and reads its config.

    - `body`, `head`: prefixes in published files; `mtp`: that in place of the text model's `mtp.`
    - `text`: the text model's `model_type`, if its config may lack one; TEXT_MODELS has its class's defaults
    - `calls_text`: what config.json calls it, if that is the `model_type` of another family
    - `flat`: whether config.json may have the text model's keys at its top, without a `text_config`
    - `in_memory`: the prefixes that the wrapper's class has in memory; `towers_in_memory`: one that names of its towers
      have there, and not in published files
    - `experts`: the rows of experts, if they are not the family's
    - `as_for_engines`: whether published files have the spelling that the text model alone has for engines
    - `other`: what names of the text model's other spelling have in the wrapper in the place of parts of theirs
    - `apart`: prefixes of names in the body that are not its text model's
    - `mark`: a part of the towers' names that no other wrapper's have; empty if none needs it
    - `marks_of_others`: those that its towers' names have, too
    - `absent`: the class's defaults for keys that `text_config` lacks, if the text model's class has others
    """

    body: str = "language_model.model."
    head: str = "language_model.lm_head."
    text: str = ""
    calls_text: str = ""
    flat: bool = False
    in_memory: tuple[str, str] = IN_MEMORY
    experts: Either | None = None
    as_for_engines: bool = False
    other: Mapping[str, str] = field(default_factory=dict)
    mtp: str | None = None
    apart: tuple[str, ...] = ()
    towers_in_memory: str = "model."
    mark: str = ""
    marks_of_others: tuple[str, ...] = ()
    absent: Mapping[str, Any] = field(default_factory=dict)


EXPERTS_AS_IN_OUT = Either(
    tuple(replace(row, rearrangement=Transposed(row.rearrangement)) for row in FUSED),
    in_memory=FUSED,
    alone=NUMBERED,
)
"""Experts in one tensor, which published files and engines have as `[experts, in, out]`, and transformers 5, which
reads both, as it has them in memory. The text model alone has them one by one."""

_TEXT_MODEL = "model.text_model.", "lm_head."
_GATED_WITH_BIAS = "visual.blocks.0.mlp.gate_proj.bias"
_HEARS = "audio_tower.conv1."
_QWEN_2_5_OMNI = WrapperNames(
    "thinker.model.",
    "thinker.lm_head.",
    text="qwen2_5_omni_text",
    in_memory=("thinker.model.language_model.", "thinker.lm_head."),
    towers_in_memory="thinker.model.",
    mark="audio_tower.audio_bos_eos_token.",
    marks_of_others=(_HEARS, _GATED_WITH_BIAS),
)
_HEARS_AS_QWEN_3 = "audio_tower.conv2d1."
_QWEN_3_OMNI = replace(
    _QWEN_2_5_OMNI,
    text="qwen3_omni_moe_text",
    mark="visual.merger_list.",
    marks_of_others=(_HEARS_AS_QWEN_3,),
)
_THINKER: Mapping[str, Any] = {
    "body": "model.",
    "head": "lm_head.",
    "in_memory": IN_MEMORY,
    "towers_in_memory": "model.",
}
_PREDICTION_OF_GLM_OCR = ("model.language_model.layers.16.",)
_BESIDE_DEEPSEEK_OCR = tuple(
    f"model.{name}"
    for name in ("sam_model.", "vision_model.", "qwen2_model.", "projector.", "image_newline", "view_seperator")
)
_DEEPSEEK_OCR = WrapperNames(
    "model.",
    "lm_head.",
    text="deepseek",
    apart=_BESIDE_DEEPSEEK_OCR,
    mark="view_sep",
    marks_of_others=("image_newline",),
    towers_in_memory="model.vision_tower.",
)
_BESIDE_MISTRAL_LARGE_4 = (
    *("vision_encoder.", "pre_mm_projector_norm.", "patch_merger.", "vision_language_adapter."),
    "mtp_dspark.",  # what drafts tokens, which transformers passes over
)
_WITHIN_MODEL = "model.language_model.model.", "model.language_model.lm_head."
_HYPERCLOVA = WrapperNames(
    *_WITHIN_MODEL,
    text="hyperclovax",
    mark="vision_model.patch_embed.",
    towers_in_memory="model.projector.",
)
_NEMOTRON = WrapperNames(
    "language_model.backbone.",
    text="nemotron_h",
    in_memory=("language_model.model.", "language_model.lm_head."),
    mtp="mtp.",
    mark="vision_model.radio_model.",
)

_WITHOUT_MARKS = {
    "lfm2_vl": "lfm2",
    "lfm3_vl": "lfm3",
    "fast_vlm": "qwen2",
    "cohere2_vision": "cohere2",
    "perception_lm": "llama",
}
"""The text models of wrappers that need no `mark`."""


def _sizes(
    vocabulary: int, hidden: int, intermediate: int, layers: int, heads: int, groups: int, positions: int
) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "max_position_embeddings": positions,
    }


_VOXTRAL = _sizes(131072, 3072, 8192, 30, 32, 8, 131072) | {"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e8}
_TEN_THOUSAND = {"rope_type": "default", "rope_theta": 1e4}
_GLM_ASR = _sizes(59264, 2048, 6144, 28, 16, 4, 8192) | {"rms_norm_eps": 1e-5, "rope_parameters": _TEN_THOUSAND}

WRAPPERS: Mapping[str, WrapperNames] = {
    "llava": WrapperNames(text="llama"),
    "vipllava": WrapperNames(text="llama", mark="multi_modal_projector.projector_layernorm."),
    "video_llava": WrapperNames(text="llama", mark="video_tower."),
    **dict.fromkeys(("llava_next", "llava_next_video"), WrapperNames(text="llama", mark="image_newline")),
    "llava_onevision": WrapperNames(text="qwen2", mark="image_newline"),
    "internvl": WrapperNames(text="qwen2", mark="vision_tower.embeddings.cls_token"),
    "mistral3": WrapperNames(text="mistral", mark="multi_modal_projector.patch_merger."),
    "mistral_large4": WrapperNames(
        body="",
        head="output.",
        text="mistral_large4_text",
        apart=_BESIDE_MISTRAL_LARGE_4,
        mark="vision_language_adapter.",
    ),
    "gemma3": WrapperNames(text="gemma3_text", mark="multi_modal_projector.mm_soft_emb_norm."),
    "shieldgemma2": WrapperNames(
        *_WITHIN_MODEL,
        text="gemma3_text",
        in_memory=("model.model.language_model.", "model.lm_head."),
        towers_in_memory="model.model.",
        mark="multi_modal_projector.mm_soft_emb_norm.",
    ),
    "gemma3n": WrapperNames(*IN_MEMORY, text="gemma3n_text", mark="embed_vision.hard_embedding_norm."),
    "gemma4": WrapperNames(*IN_MEMORY, text="gemma4_text", mark="vision_tower.patch_embedder.input_proj."),
    "gemma4_unified": WrapperNames(*IN_MEMORY, text="gemma4_unified_text", mark="vision_embedder.patch_dense."),
    "llama4": WrapperNames(text="llama4_text", mark="vision_model.vision_adapter."),
    "kimi_k25": WrapperNames(text="deepseek_v3", mark="mm_projector.pre_norm."),
    "kimi_k3": WrapperNames(
        text="kimi_k3_text",
        calls_text="kimi_linear",
        in_memory=("language_model.model.", "language_model.lm_head."),
        mark="mm_projector.post_norm.",
    ),
    "minimax_m3_vl": WrapperNames(text="minimax_m3_vl_text", as_for_engines=True, mark="merge_"),
    "qwen2_vl": WrapperNames("model.", "lm_head.", text="qwen2_vl_text", flat=True, mark="visual.blocks.0.mlp.fc1."),
    "qwen2_5_vl": WrapperNames("model.", "lm_head.", text="qwen2_5_vl_text", flat=True, mark=_GATED_WITH_BIAS),
    "qwen3_vl": WrapperNames(*IN_MEMORY, text="qwen3_vl_text"),
    "qwen3_vl_moe": WrapperNames(*IN_MEMORY, text="qwen3_vl_moe_text", experts=EXPERTS_AS_IN_OUT),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), WrapperNames(*IN_MEMORY, mtp="mtp.")),
    "qwen4_exp": WrapperNames(*IN_MEMORY),
    "cohere_compass": WrapperNames(*IN_MEMORY, text="cohere_compass_text"),
    **dict.fromkeys(
        ("glm4v", "glm46v", "glmga"), WrapperNames(*IN_MEMORY, text="glm4v_text", mark="visual.post_conv_layernorm.")
    ),
    "glm4v_moe": WrapperNames(*IN_MEMORY, text="glm4v_moe_text", mark="visual.post_conv_layernorm."),
    **dict.fromkeys(
        ("smolvlm", "idefics3"),
        WrapperNames(*_TEXT_MODEL, text="llama", in_memory=_TEXT_MODEL, mark="connector.modality_projection.proj."),
    ),
    "idefics2": WrapperNames(*_TEXT_MODEL, text="mistral", in_memory=_TEXT_MODEL, mark="perceiver_resampler."),
    "granite_docling": WrapperNames(
        *_TEXT_MODEL, text="granite_docling_text", in_memory=_TEXT_MODEL, mark="vision_model.connector."
    ),
    "exaone4_5": WrapperNames(*IN_MEMORY, text="exaone4", mark=_GATED_WITH_BIAS),
    **dict.fromkeys(
        ("got_ocr2", "pp_chart2table"), WrapperNames(text="qwen2", mark="multi_modal_projector.conv_upsampler1.")
    ),
    **dict.fromkeys(("deepseek_vl_v2", "deepseek_ocr2"), _DEEPSEEK_OCR),
    **{kind: WrapperNames(*IN_MEMORY, text=text) for kind, text in _WITHOUT_MARKS.items()},
    "aya_vision": WrapperNames(text="cohere2", mark="multi_modal_projector.layernorm."),
    "paddleocr_vl": WrapperNames(
        "model.", "lm_head.", text="paddleocr_vl_text", flat=True, mark="visual.vision_model."
    ),
    "ovis2": WrapperNames(*IN_MEMORY, text="qwen2", mark="visual_embeddings_table."),
    "video_llama_3": WrapperNames(*IN_MEMORY, text="qwen2", mark="projector.readout."),
    "lighton_ocr": WrapperNames(*IN_MEMORY, text="qwen3", mark="vision_projection.patch_merger."),
    "deepseek_vl": WrapperNames(*IN_MEMORY, text="llama", mark="aligner.linear1."),
    "deepseek_vl_hybrid": WrapperNames(*IN_MEMORY, text="llama", mark="high_res_vision_model."),
    "janus": WrapperNames(*IN_MEMORY, text="llama", mark="vqmodel."),
    **dict.fromkeys(
        ("minicpmv4_6", "minicpmv4_7", "minicpm_ocr"),
        WrapperNames(*IN_MEMORY, text="qwen3_5_text", mtp="mtp.", mark="vision_tower.vit_merger."),
    ),
    **dict.fromkeys(("qwen2_audio", "audioflamingo3", "musicflamingo"), WrapperNames(text="qwen2", mark=_HEARS)),
    "qwen2_5_omni": _QWEN_2_5_OMNI,
    "qwen2_5_omni_thinker": replace(_QWEN_2_5_OMNI, **_THINKER),
    "qwen3_omni_moe": _QWEN_3_OMNI,
    "qwen3_omni_moe_thinker": replace(_QWEN_3_OMNI, **_THINKER),
    "qwen3_asr": WrapperNames("thinker.model.", "thinker.lm_head.", text="qwen3_asr_text", mark=_HEARS_AS_QWEN_3),
    "voxtral": WrapperNames(text="llama", mark=_HEARS, absent=_VOXTRAL),
    "glmasr": WrapperNames(text="llama", mark=_HEARS, absent=_GLM_ASR),
    "vibevoice_asr": WrapperNames(text="qwen2", mark="acoustic_tokenizer_encoder."),
    "moss_transcribe_diarize": WrapperNames(*IN_MEMORY, text="qwen3", mark=_HEARS),
    "fun_asr_nano": WrapperNames(*IN_MEMORY, text="qwen3", mark="self_attn.fsmn."),
    "omniasr": WrapperNames(*IN_MEMORY, text="llama", mark="audio_tower.encode_positions."),
    **dict.fromkeys(("granite_speech", "granite_speech_plus"), WrapperNames(text="granite", mark="projector.qformer.")),
    **dict.fromkeys(("hyperclovax_vision_v2", "vlm"), _HYPERCLOVA),
    "granite4_vision": WrapperNames(*IN_MEMORY, text="granite4_vision_text", mark="image_newline"),
    "glm5_next": WrapperNames(*IN_MEMORY, text="glm5_next_text", mark=_GATED_WITH_BIAS),
    "hunyuan_vl": WrapperNames(
        "model.",
        "lm_head.",
        text="hunyuan_vl_text",
        flat=True,
        mark="image_begin",
        marks_of_others=("image_newline",),
    ),
    "hy_v4_vl": WrapperNames(
        "model.",
        "lm_head.",
        text="hy_v4_vl_text",
        mark="image_newline",
        other={".hc_pre.hc_head.": ".hc_head.hc_pre."},
    ),
    "muse_glimmer": WrapperNames(*IN_MEMORY, text="muse_glimmer_text", mark="vision_adapter.fc1."),
    "muse_spark": WrapperNames(*IN_MEMORY, text="muse_spark_text", mark="vision_adapter.fc1."),
    "step3p7": WrapperNames("model.", "lm_head.", text="step3p5", mark="downsampler1."),
    "glm_ocr": WrapperNames(*IN_MEMORY, text="glm_ocr_text", apart=_PREDICTION_OF_GLM_OCR, mark=_GATED_WITH_BIAS),
    "qianfan_ocr": WrapperNames(text="qwen3", mark="encoder.layers.0.ls1"),
    "nemotron_h_omni": replace(_NEMOTRON, mtp="language_model.mtp."),
    **dict.fromkeys(
        ("NemotronH_Nano_VL_V2", "NemotronH_Nano_Omni_Reasoning_V3", "NemotronH_Super_Omni_Reasoning_V3"), _NEMOTRON
    ),
}
"""Wrappers by `model_type`. For text alone each computes what its text model does: positions in several dimensions
(`mrope`) are all the same there, and nothing is added to the hidden states of a layer."""

NO_WRAPPERS: Mapping[str, str] = {
    "apertus1p5": "its output layer has fewer rows than its embedding (`output_vocab_size`)",
    **dict.fromkeys(
        ("ernie4_5_vl_moe", "ernie4_5_moe_vl"), "its layers have two sets of experts, one of them for images"
    ),
    "mllama": "among the layers of its text model there are some that attend to images",
    "paligemma": "it attends to later tokens in a prompt, also in one of text alone",
    "unlimited_ocr": "it attends to the whole prompt from within a window",
}
"""Models around a text model that has a table, or nearly, which are no wrappers; and why. With a table, they would be
trained as another model than engines compute. ERNIE 4.5 VL has a name in transformers, and one in its own code."""


@dataclass(frozen=True)
class TextModel:
    """A kind of text model: its family, and its class's defaults for absent keys, if the family has others. `fixed` are
    keys that its class does not heed."""

    family: str
    absent: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)


_NO_WINDOW = {"sliding_window": None, "use_sliding_window": False}
TEXT_MODELS: Mapping[str, TextModel] = {
    "llama": TextModel("llama", _sizes(32000, 4096, 11008, 32, 32, 32, 2048)),
    "mistral": TextModel("mistral", _sizes(32000, 4096, 14336, 32, 32, 8, 131072), {"layer_types": None}),
    "qwen2": TextModel("qwen2", _sizes(151936, 4096, 22016, 32, 32, 32, 32768)),
    "gemma3_text": TextModel(
        "gemma3_text",
        _sizes(262208, 2304, 9216, 26, 8, 4, 131072) | {"head_dim": 256},
        {"final_logit_softcapping": None},
    ),
    "gemma3n_text": TextModel("gemma3n_text", _sizes(262400, 2048, 16384, 35, 8, 2, 32768)),
    "gemma4_text": TextModel("gemma4_text", _sizes(262144, 2304, 9216, 30, 8, 4, 131072)),
    "gemma4_unified_text": TextModel(
        "gemma4_text",
        _sizes(262144, 2304, 9216, 30, 8, 4, 262144) | {"sliding_window": 1024},
        {"hidden_size_per_layer_input": 0, "enable_moe_block": False},
    ),
    **dict.fromkeys(
        ("qwen2_vl_text", "qwen2_5_vl_text"),
        TextModel(
            "qwen2",
            _sizes(152064, 8192, 29568, 80, 64, 8, 32768)
            | {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_window_layers": 80},
        ),
    ),
    "qwen3_vl_text": TextModel(
        "qwen3", _sizes(151936, 4096, 22016, 32, 32, 32, 128000) | {"head_dim": 128, "rope_theta": 5e5}, _NO_WINDOW
    ),
    "qwen3_vl_moe_text": TextModel(
        "qwen3_moe",
        _sizes(151936, 2048, 5632, 24, 16, 16, 128000)
        | {"num_experts_per_tok": 4, "moe_intermediate_size": 1408, "rope_theta": 5e5},
        _NO_WINDOW | {"norm_topk_prob": True},
    ),
    "qwen2_5_omni_text": TextModel(
        "qwen2",
        _sizes(152064, 3584, 18944, 28, 28, 4, 32768) | {"rope_theta": 1e6, "max_window_layers": 28},
    ),
    "qwen3_omni_moe_text": TextModel(
        "qwen3_moe",
        _sizes(3584, 2048, 18944, 28, 28, 4, 32768)
        | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
        | {"head_dim": None, "rope_theta": 1e6},
        _NO_WINDOW,
    ),
    "qwen3_asr_text": TextModel(
        "qwen3", _sizes(151936, 4096, 22016, 32, 32, 32, 128000) | {"head_dim": 128, "rope_theta": 5e6}
    ),
    "exaone4_5_text": TextModel("exaone4"),
    "deepseek_ocr2_text": TextModel(
        "deepseek",
        {
            key: size
            for key, size in _sizes(102400, 4096, 11008, 32, 32, 32, 2048).items()
            if key != "num_key_value_heads"  # absent, as many as there are heads
        }
        | {"n_routed_experts": 64},
    ),
    "paddleocr_vl_text": TextModel(
        "llama",
        _sizes(103424, 1024, 3072, 18, 16, 2, 131072) | {"head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 5e5},
    ),
    "granite_docling_text": TextModel(
        "granite",
        _sizes(133800, 1024, 2048, 28, 16, 4, 32768)
        | {"rms_norm_eps": 1e-5, "embedding_multiplier": 12.0, "logits_scaling": 4.0}
        | {"residual_multiplier": 0.263, "attention_multiplier": 0.015625},
    ),
    "mistral_large4_text": TextModel(
        "mistral_large4_text",
        _sizes(204800, 6144, 24576, 72, 64, 64, 1048576)
        | {"n_routed_experts": 128, "num_experts_per_tok": 4, "moe_intermediate_size": 6144, "kv_lora_rank": 512}
        | {"qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128},
    ),
    "minimax_m3_vl_text": TextModel("minimax_m3_vl_text", _sizes(200064, 6144, 3072, 60, 64, 4, 524288)),
    "glm4v_text": TextModel(
        "glm4",
        _sizes(151552, 4096, 13696, 40, 32, 2, 32768) | {"rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0},
        {"attention_bias": True},
    ),
    "glm5_next_text": TextModel(
        "glm5_next_text",
        _sizes(154880, 4096, 12288, 45, 64, 64, 1048576)
        | {"n_routed_experts": 288, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "kv_lora_rank": 512}
        | {"qk_nope_head_dim": 256, "qk_rope_head_dim": 0, "v_head_dim": 256},
    ),
    "hunyuan_vl_text": TextModel("hunyuan_v1_dense", _sizes(290943, 4096, 11008, 32, 32, 32, 2048)),
    "hy_v4_vl_text": TextModel(
        "hy_v4",
        _sizes(120832, 6144, 18432, 78, 64, 64, 262144)
        | {"n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "q_lora_rank": 2048}
        | {"kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256}
        | {"index_n_heads": 32},
    ),
    "muse_glimmer_text": TextModel("muse_glimmer_text", _sizes(202048, 6656, 19968, 52, 32, 2, 131072)),
    "muse_spark_text": TextModel("muse_spark_text", _sizes(202048, 8192, 16384, 62, 128, 16, 1048576)),
    "glm_ocr_text": TextModel(
        "glm4",
        _sizes(59392, 1024, 4096, 16, 16, 8, 131072) | {"rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0},
        {"attention_bias": False},
    ),
    "granite4_vision_text": TextModel("granite", _sizes(32000, 4096, 11008, 32, 32, 32, 2048)),
    "glm4v_moe_text": TextModel(
        "glm4_moe",
        _sizes(151424, 4096, 10944, 46, 96, 8, 65536)
        | {"n_routed_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "n_shared_experts": 1}
        | {"first_k_dense_replace": 1, "attention_bias": True},
        {"use_qk_norm": False},
    ),
}
"""Text models of wrappers whose config may lack keys that the family's own always has, or that have a `model_type` of
their own."""


_OF_IMAGES = {"mrope": "default", "xdrope": "dynamic"}
"""By the `rope_type` of rotary embeddings that also have positions of images, that of text alone. The second is
Hunyuan's."""


def is_wrapper(config: Config) -> bool:
    """Whether a config.json is a wrapper's."""
    return isinstance(config.get("model_type"), str) and config["model_type"] in WRAPPERS


def text_config(config: Config) -> dict[str, Any]:
    """The text model's part of a wrapper's config.json, as its family's own config.json would say it. Raises
    UnknownArchitecture where there is none, and DamagedCheckpoint for anything but an object."""
    kind = WRAPPERS[config["model_type"]]
    text = text_part(config)
    if text is None and kind.flat:
        text = {key: value for key, value in config.items() if key != "model_type"}
    if text is None:
        raise UnknownArchitecture(f"a `{config['model_type']}` without a `text_config`")
    if not isinstance(text, Mapping):
        raise DamagedCheckpoint(f"`text_config` is {shown(text)}, not an object", do="Is the file whole?")
    model_type = text.get("model_type", kind.text)
    if not isinstance(model_type, str):
        raise DamagedCheckpoint(f"model_type of `text_config` is {shown(model_type)}, not a name")
    if kind.calls_text and model_type == kind.calls_text:
        model_type = kind.text
    text, model = {**kind.absent, **text}, TEXT_MODELS.get(model_type)
    if model is None:
        return {**text, "model_type": model_type}
    text = {key: value for key, value in text.items() if (key, value) != ("partial_rotary_factor", None)}  # as absent
    found = {**model.absent, **text, **model.fixed, "model_type": model.family}
    for key in ("rope_parameters", "rope_scaling"):
        rope = found.get(key)
        for name, of_text in _OF_IMAGES.items():
            if isinstance(rope, Mapping) and name in (rope.get("rope_type"), rope.get("type")):
                found[key] = {**rope, "rope_type": of_text}
    return found


def wrapper_of(config: Config, family: Architecture) -> Wrapper:
    """The wrapper that a config.json describes around a text model of this family; with names of published files."""
    kind = WRAPPERS[config["model_type"]]
    body_alone = family.names_of(EMBEDDING)[0].partition(".")[0] + "."
    return Wrapper(config["model_type"], kind.body, kind.head, kind.mtp, kind.apart, body_alone)


def may_be_tied(config: Config) -> bool:
    """Whether the head may be the embedding and so not be stored. If neither a wrapper's config.json nor its text
    model's part says so, the tensors decide."""
    parts = config_parts(config)
    on = [is_on(part, "tie_word_embeddings") for part in parts]
    return any(on) or all(part.get("tie_word_embeddings") is None for part in parts)
