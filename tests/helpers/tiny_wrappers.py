"""Tiny random models of images or sound, of real architectures, by transformers itself."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pico
import torch
from any_models import SMALL, shrunk
from safetensors.torch import load_file, save_file
from torch import nn
from training import add_tokenizer
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    Gemma3nVisionConfig,
    PreTrainedModel,
)


class TowerOfTimm(PreTrainedModel):
    """In place of Gemma 3n's tower of images, which timm has, another program."""

    config_class = Gemma3nVisionConfig

    def __init__(self, config: Gemma3nVisionConfig) -> None:
        super().__init__(config)
        self.timm_model = nn.ModuleDict({"conv_stem": nn.Conv2d(3, 8, 3, bias=False), "blocks": nn.Linear(8, 16)})
        self.post_init()


AutoModel.register(Gemma3nVisionConfig, TowerOfTimm, exist_ok=True)

TEXT: dict[str, Any] = {
    "vocab_size": 80,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "initializer_range": 0.12,
}

MROPE = {"rope_type": "default", "rope_theta": 20000.0, "mrope_section": [4, 6, 6]}

DELTA_NET = pico.DELTA_NET | {"rope_parameters": MROPE | {"mrope_interleaved": True, "partial_rotary_factor": 0.25}}

WRAPPERS: dict[str, dict[str, Any]] = {
    "mistral3": {"model_type": "mistral", "sliding_window": 8},
    "gemma3": {
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 24,
        "num_hidden_layers": 4,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "shieldgemma2": {
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 24,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gemma3n": {
        "model_type": "gemma3n_text",
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 72,
        "num_hidden_layers": 4,
        "intermediate_size": [96] * 4,
        "num_kv_shared_layers": 2,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.8, 0.0, 0.0, 0.0],
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma4": {
        "model_type": "gemma4_text",
        "pad_token_id": 0,  # which it reads in the place of an image
        "attention_k_eq_v": True,
        "global_head_dim": 64,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gemma4_unified": {
        "model_type": "gemma4_unified_text",
        "pad_token_id": 0,
        "attention_k_eq_v": True,
        "global_head_dim": 64,
        "num_global_key_value_heads": 1,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen2_vl": {"model_type": "qwen2_vl_text", "rope_parameters": MROPE},
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl_text",
        "rope_parameters": MROPE,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 1,
    },
    "qwen3_vl": {"model_type": "qwen3_vl_text", "rope_parameters": MROPE | {"mrope_interleaved": True}},
    "qwen3_vl_moe": {
        "model_type": "qwen3_vl_moe_text",
        "rope_parameters": MROPE | {"mrope_interleaved": True},
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "mlp_only_layers": [0],
    },
    "kimi_k25": {
        "model_type": "deepseek_v3",
        **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"), 1),
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "num_nextn_predict_layers": 0,
        "head_dim": 16,
    },
    "llama4": {
        "model_type": "llama4_text",
        "num_hidden_layers": 4,
        "intermediate_size_mlp": 64,
        "interleave_moe_layer_step": 2,
        "num_local_experts": 4,
        "attention_chunk_size": 8,
        "floor_scale": 4,
    },
    "qwen3_5": {"model_type": "qwen3_5_text", **DELTA_NET},
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe_text",
        **DELTA_NET,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 64,
    },
    "qwen4_exp": {
        **{name: its for name, its in pico.FAMILIES.get("qwen4", {}).items() if name not in TEXT},
        "num_hidden_layers": 3,
        "rope_parameters": DELTA_NET["rope_parameters"],
    },
    "glm4v": {
        "model_type": "glm4v_text",
        "rope_parameters": MROPE | {"mrope_section": [2, 3, 3], "partial_rotary_factor": 0.5},
    },
    "glm46v": {"model_type": "glm4v_text", "rope_parameters": MROPE},
    "glmga": {"model_type": "glm4v_text", "rope_parameters": MROPE},
    "glm4v_moe": {
        "model_type": "glm4v_moe_text",
        "rope_parameters": MROPE | {"mrope_section": [2, 3, 3], "partial_rotary_factor": 0.5},
        **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"), 1),
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
    },
    "minimax_m3_vl": {
        "model_type": "minimax_m3_vl_text",
        "num_hidden_layers": 3,
        "dense_intermediate_size": 64,
        "shared_intermediate_size": 64,
        "rotary_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000000.0, "partial_rotary_factor": 0.5},
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "layer_types": ["full_attention", "full_attention", "minimax_m3_sparse"],
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "mistral_large4": {
        "model_type": "mistral_large4_text",
        **{
            name: its
            for name, its in pico.FAMILIES.get("mistral-large-4", {}).items()
            if name not in {"model_type", *TEXT}
        },
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "qk_rope_head_dim": 16,
    },
    "glm5_next": {
        "model_type": "glm5_next_text",
        **{name: its for name, its in pico.FAMILIES.get("glm-5.3", {}).items() if name not in {"model_type", *TEXT}},
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
    },
    "hy_v4_vl": {
        "model_type": "hy_v4_vl_text",
        **{name: its for name, its in pico.FAMILIES.get("hy4", {}).items() if name not in {"model_type", *TEXT}},
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "rope_parameters": MROPE | {"mrope_section": [2, 3, 3]},
    },
    "step3p7": {
        **{name: its for name, its in pico.FAMILIES.get("step3p5", {}).items() if name not in TEXT},
        "num_hidden_layers": 4,
        "num_attention_heads": 16,  # with gates, rows that FP8 GEMMs take
    },
    "muse_glimmer": {"model_type": "muse_glimmer_text", "sliding_window": 8, "qk_scale_factor": 1.5},
    "muse_spark": {
        **{name: its for name, its in pico.FAMILIES.get("muse-spark", {}).items() if name not in TEXT},
        "num_hidden_layers": 4,
    },
    "llava_onevision": {"model_type": "qwen2"},
    "llava": {"model_type": "llama", "rms_norm_eps": 1e-5},
    **dict.fromkeys(("vipllava", "video_llava", "perception_lm"), {"model_type": "llama", "rms_norm_eps": 1e-5}),
    "fast_vlm": {"model_type": "qwen2"},
    **dict.fromkeys(
        ("aya_vision", "cohere2_vision"),
        {
            "model_type": "cohere2",
            "logit_scale": 0.5,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "paddleocr_vl": {"model_type": "paddleocr_vl_text", "rope_parameters": MROPE},
    "llava_next": {"model_type": "mistral"},
    "internvl": {"model_type": "qwen3"},
    "lfm2_vl": {"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "lfm3_vl": {
        "model_type": "lfm3",
        "num_hidden_layers": 3,
        "sliding_window": 8,
        "layer_types": ["conv", "full_attention", "sliding_attention"],
    },
    "smolvlm": {"model_type": "llama", "rms_norm_eps": 1e-5},
    "idefics3": {"model_type": "llama", "rms_norm_eps": 1e-5},
    "idefics2": {"model_type": "mistral", "sliding_window": 8},
    "granite_docling": {
        "model_type": "granite_docling_text",
        "attention_multiplier": 0.25,
        "embedding_multiplier": 3.0,
        "logits_scaling": 0.5,
        "residual_multiplier": 0.4,
    },
    "exaone4_5": {
        "model_type": "exaone4",
        "num_hidden_layers": 4,
        "sliding_window": 8,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"],
    },
    "llava_next_video": {"model_type": "llama", "rms_norm_eps": 1e-5},
    **dict.fromkeys(("got_ocr2", "pp_chart2table"), {"model_type": "qwen2"}),
    "cohere_compass": {
        **{name: its for name, its in pico.FAMILIES.get("cohere-compass", {}).items() if name not in TEXT},
        "num_hidden_layers": 4,
        "rope_parameters": {
            "sliding_attention": MROPE | {"mrope_interleaved": True},
            "full_attention": None,
        },
    },
    "deepseek_ocr2": {
        **{name: its for name, its in pico.FAMILIES.get("deepseek", {}).items() if name not in TEXT},
        "model_type": "deepseek_ocr2_text",
        "mlp_layer_types": ["dense", "sparse"],
    },
    "hunyuan_vl": {
        "model_type": "hunyuan_vl_text",
        "rope_parameters": {
            "rope_type": "dynamic",
            "rope_theta": 1e4,
            "alpha": 1e3,
            "factor": 1.0,
            "mrope_section": [4] * 4,
        },
    },
    "ovis2": {"model_type": "qwen2"},
    "video_llama_3": {"model_type": "qwen2"},
    "lighton_ocr": {"model_type": "qwen3"},
    **dict.fromkeys(("deepseek_vl", "deepseek_vl_hybrid", "janus"), {"model_type": "llama", "rms_norm_eps": 1e-6}),
    **dict.fromkeys(("minicpmv4_6", "minicpmv4_7", "minicpm_ocr"), {"model_type": "qwen3_5_text", **DELTA_NET}),
    **dict.fromkeys(("qwen2_audio", "audioflamingo3", "musicflamingo"), {"model_type": "qwen2"}),
    **dict.fromkeys(("voxtral", "glmasr", "omniasr"), {"model_type": "llama", "rms_norm_eps": 1e-5}),
    "vibevoice_asr": {"model_type": "qwen2"},
    **dict.fromkeys(("moss_transcribe_diarize", "fun_asr_nano"), {"model_type": "qwen3"}),
    "qwen3_asr": {"model_type": "qwen3"},
    "qwen2_5_omni_thinker": {"model_type": "qwen2_5_omni_text", "rope_parameters": MROPE},
    "qwen3_omni_moe_thinker": {
        "model_type": "qwen3_omni_moe_text",
        "rope_parameters": MROPE | {"mrope_interleaved": True},
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "mlp_only_layers": [0],
    },
    "hyperclovax_vision_v2": {
        "model_type": "hyperclovax",
        "attention_multiplier": 0.25,
        "embedding_multiplier": 3.0,
        "logits_scaling": 0.5,
        "residual_multiplier": 0.4,
    },
    **{
        kind: {
            "model_type": text,
            "attention_multiplier": 0.25,
            "embedding_multiplier": 3.0,
            "logits_scaling": 0.5,
            "residual_multiplier": 0.4,
        }
        for kind, text in {
            "granite4_vision": "granite4_vision_text",
            **dict.fromkeys(("granite_speech", "granite_speech_plus"), "granite"),
        }.items()
    },
    "glm_ocr": {"model_type": "glm_ocr_text", "rope_parameters": MROPE},
    "qianfan_ocr": {"model_type": "qwen3"},
    "nemotron_h_omni": {**pico.settings("nemotron-h"), **TEXT, "head_dim": 16},
}
WRAPPERS = {kind: its for kind, its in WRAPPERS.items() if kind in CONFIG_MAPPING}
"""What each wrapper's `text_config` is made of, beside TEXT; of those that the installed transformers has."""


MISTRAL_4: dict[str, Any] = {
    "model_type": "mistral4",
    "head_dim": 24,  # of what its class takes for the share that has positions
    **{name: value for name, value in pico.settings("mistral4").items() if name not in {"model_type", *TEXT}},
}
"""Another text model of a `mistral3`: Mistral Small 4's."""

TIED = {
    "gemma3",
    "gemma3n",
    "gemma4",
    "gemma4_unified",
    "lfm2_vl",
    "lfm3_vl",
    "got_ocr2",
    "granite_docling",
    "minicpm_ocr",
    "qwen3_asr",
    "moss_transcribe_diarize",
    "fun_asr_nano",
    "hunyuan_vl",
    "shieldgemma2",
    "aya_vision",
    "cohere2_vision",
    "cohere_compass",
    "paddleocr_vl",
}

_SOUND = {"num_filters": 4, "downsampling_ratios": [2, 2], "depths": [1, 1, 1]}
_CONFORMER = {
    "encoder_config": {"hidden_dim": 32, "dim_head": 8, "max_pos_emb": 16, "context_size": 8},
    "projector_config": {"encoder_hidden_size": 32, "pad_token_id": None},
    "has_lora_adapter": False,
}
OPTIONAL: dict[str, Any] = {
    "vibevoice_asr": dict.fromkeys(("acoustic_tokenizer_encoder_config", "semantic_tokenizer_encoder_config"), _SOUND),
    **dict.fromkeys(("granite_speech", "granite_speech_plus"), _CONFORMER),
    "gemma3n": {"audio_config": {"conf_num_hidden_layers": 1}},
    "gemma4": {"vision_config": {}, "audio_config": {}},
    "gemma4_unified": {
        "vision_config": {"mm_embed_dim": 64, "mm_posemb_size": 20, "patch_size": 2},
        "audio_config": {"audio_embed_dim": 64},
    },
    "janus": {
        "vq_config": {
            **dict.fromkeys(("base_channels", "latent_channels"), 32),
            **dict.fromkeys(("projection_dim", "image_token_embed_dim", "num_embeddings"), 16),
            "channel_multiplier": [1, 1],
            "num_res_blocks": 1,
        },
    },
    "kimi_k25": {"projection_hidden_size": 128},
    "qwen3_asr": {"pad_token_id": 0, "eos_token_id": 1},  # which its class does not let be absent
    "minimax_m3_vl": {"projector_hidden_size": 64},
    "shieldgemma2": {"yes_token_index": 7, "no_token_index": 11},
    "fast_vlm": {"vision_config": {"model_type": "clip_vision_model"}},  # in place of timm's, which is another program
    "perception_lm": {"vision_config": {"model_type": "clip_vision_model", "model_args": {"embed_dim": 128}}},
    "muse_spark": {
        "audio_config": {
            **dict.fromkeys(("patch_sizes", "depths"), [2, 2]),
            "hidden_sizes": [8, 16],
            "num_hidden_layers": 2,
            "out_hidden_size": TEXT["hidden_size"],
        },
        "text_config": {"hidden_size": TEXT["hidden_size"]},
    },
    "granite4_vision": {"deepstack_layer_map": [[-1, 0]], "spatial_target_layers": [1], "downsample_rate": "1/2"},
    "nemotron_h_omni": {
        **dict.fromkeys(("vision_hidden_size", "projector_hidden_size"), 128),
        "audio_config": {"projection_hidden_size": 64, "projection_bias": False},
    },
}
"""Towers that a wrapper has only where its config says so, and sizes that are not the text model's."""

ADAPTORS: dict[str, Any] = {"fun_asr_nano": {"adaptor_config": {"hidden_size": 128, "intermediate_size": 32}}}
"""Of which sizes follow from the text model's."""


def make(
    kind: str, *, dtype: torch.dtype = torch.float32, vision: dict[str, Any] | None = None, **text: Any
) -> PreTrainedModel:
    """A wrapper whose biases and norms are random too, so that a mix-up shows. `vision` are settings of its tower."""
    torch.manual_seed(0)
    optional = OPTIONAL.get(kind, {})
    tokens = {key: token for key, token in optional.items() if key.endswith("token_id")}
    sizes = SMALL | {"vocab_size": TEXT["vocab_size"]} | tokens
    config = shrunk(AutoConfig.for_model(kind, **optional).to_dict(), sizes) | ADAPTORS.get(kind, {})
    config["text_config"] = TEXT | dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")) | WRAPPERS[kind]
    config["text_config"] |= text
    if config["text_config"]["head_dim"] is None:  # that of hidden_size / heads; some configs have no such key
        del config["text_config"]["head_dim"]
    config["vision_config"] = config.get("vision_config") or {} if vision is None else config["vision_config"] | vision
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = kind in TIED
    whole = AutoConfig.for_model(**{"model_type": kind} | config)
    classes = (AutoModelForImageTextToText, AutoModelForSeq2SeqLM, AutoModelForMultimodalLM)
    model: PreTrainedModel = next(each for each in classes if type(whole) in each._model_mapping).from_config(whole)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" in name or "ln_" in name or name.endswith("bias"):
                tensor.add_(torch.randn_like(tensor) * 0.1)
            tensor.data = tensor.data.to(dtype)  # and no buffers: Llama 4's tower has complex ones
    return model.eval()


def save(directory: Path, kind: str, *, in_memory: bool = False, **settings: Any) -> PreTrainedModel:
    """Save one as it is published, or with the names that it has in memory; with a tokenizer."""
    return save_made(directory, kind, make(kind, **settings), in_memory=in_memory)


def save_made(directory: Path, kind: str, model: PreTrainedModel, *, in_memory: bool = False) -> PreTrainedModel:
    model.save_pretrained(directory)
    if in_memory:
        tensors = {name: tensor for name, tensor in model.state_dict().items()}
        if kind in TIED:
            del tensors["lm_head.weight"]
    else:
        tensors = dict(as_published(kind, name, tensor) for name, tensor in stored(directory).items())
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    add_tokenizer(directory, kind)
    return model


def as_published(kind: str, name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    """What transformers saves otherwise: the text model of Kimi K2.5 takes names of its tower, and the tower some of
    its own; experts of Qwen3-VL stay as in memory; before 5.23 MiniMax-M3's dense MLPs have the name of its experts'
    blocks, and models of sound have a `model.` too many. The text model of Qianfan-OCR takes names of its tower, too,
    and that of HyperCLOVA X Vision has a `model.` too few. Hunyuan 4's is as `pico` has it."""
    if name.startswith("language_model.model.blocks."):
        name = name.replace("blocks", "layers")
    if kind == "qwen3_vl_moe" and name.endswith((".mlp.experts.gate_up_proj", ".mlp.experts.down_proj")):
        tensor = tensor.transpose(1, 2)
    if kind == "minimax_m3_vl":
        name = re.sub(r"block_sparse_moe\.(gate|up|down)_proj\.", r"mlp.\1_proj.", name)
    name = name.replace("language_model.model.model.", "language_model.model.")
    name = name.replace("language_model.model.encoder.layers.", "language_model.model.layers.")
    if kind == "hyperclovax_vision_v2":
        name = re.sub(r"language_model\.(?!lm_head\.)", "language_model.model.", name)
    if kind == "hy_v4_vl":
        name = pico.PUBLISHED["hy_v4"](name).replace(".hc_head.hc_pre.", ".hc_head.")
    name = name.replace("vision_tower.encoder.patch_embed.", "vision_tower.patch_embed.")
    return name.replace("model.mm_projector.", "mm_projector."), tensor


_PUBLISHED_ASR = {
    r"^model\.language_model\.": "thinker.model.",
    r"^model\.multi_modal_projector\.linear_": "thinker.audio_tower.proj",
    r"^model\.audio_tower\.": "thinker.audio_tower.",
    r"^lm_head\.": "thinker.lm_head.",
}


def publish_qwen3_asr(theirs: Path, directory: Path, **top: Any) -> None:
    """Save a `qwen3_asr` that transformers saved in the form of Qwen's own code, which has other names, a
    `thinker_config`, and rotary embeddings of positions in several dimensions; with `top` in its config.json."""
    shutil.copytree(theirs, directory)
    tensors = stored(theirs)
    for here, there in _PUBLISHED_ASR.items():
        tensors = {re.sub(here, there, name): tensor for name, tensor in tensors.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((theirs / "config.json").read_text())
    text = config["text_config"]
    base = text.pop("rope_parameters")["rope_theta"]
    rope = {"interleaved": True, "mrope_interleaved": True, "mrope_section": [4, 6, 6]}
    rope |= dict.fromkeys(("rope_type", "type"), "default")
    thinker = {"model_type": "qwen3_asr", "audio_config": config["audio_config"]}
    thinker["text_config"] = text | {"rope_theta": base, "rope_scaling": rope}
    published = {"model_type": "qwen3_asr", "architectures": config["architectures"], "thinker_config": thinker}
    (directory / "config.json").write_text(json.dumps(published | {"dtype": "bfloat16"} | top))


def stored(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor in the files of a directory."""
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def towers(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those of what sees and hears."""
    text, without = {"language_model", "text_model", "lm_head"}, ("model.embed_tokens.", "model.layers.", "model.norm.")
    without += ("model.hc_head.", "tok_embeddings.", "layers.", "norm.", "output.", "lerope.")  # of Mistral Large 4
    return {name: t for name, t in tensors.items() if not (text & {*name.split(".")} or name.startswith(without))}
