"""Run by llama.cpp's peer: its converter on directories without a tokenizer, its quantization, and gguf-py's values.

python gguf_convert.py FOLDER CASES     JSON: [directory, file, type of values, {file: type of codes}]
"""

import json
import sys
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from conversion import get_model_architecture, get_model_class
from conversion.base import ModelBase, ModelType, gguf
from gguf.quants import dequantize
from safetensors.numpy import save_file

KINDS = {"linear_attention": "mamba", "full_attention": "attention"}


def as_published(settings: dict[str, Any]) -> dict[str, Any]:
    """With the words that releases of Granite, MiMo-V2 and Kimi Linear have: by those of transformers 5 the converter
    finds no layers with attention, or knows of none."""
    if settings["model_type"] == "granitemoehybrid":
        return settings | {"layer_types": [KINDS[kind] for kind in settings["layer_types"]]}
    if settings["model_type"] == "kimi_linear":
        dense = settings["mlp_layer_types"].count("dense")
        head = settings["hidden_size"] // settings["num_attention_heads"]
        said = {"moe_router_activation_func": "sigmoid", "rope_theta": 10000.0, "head_dim": head}
        return settings | said | {"first_k_dense_replace": dense}
    if settings["model_type"] == "bailing_hybrid":
        return settings | {
            "architectures": ["BailingMoeV3ForCausalLM"],
            "no_kda_lora": True,
            "gated_attention_proj_granularity_type": "head_wise",
            "head_dim": settings["linear_head_dim"],
            "moe_shared_expert_intermediate_size": settings["moe_intermediate_size"],
            "norm_topk_prob": True,
            "n_group": settings["num_expert_group"],
            "num_experts_per_tok": settings["num_experts_per_token"],
            "score_function": "sigmoid",
        }
    if settings["model_type"] == "exaone":
        return settings | {"architectures": ["ExaoneForCausalLM"], "activation_function": "silu"}
    if settings["model_type"] == "solar_open":
        dense = {"intermediate_size": settings["moe_intermediate_size"], "first_k_dense_replace": 0}
        return settings | dense | {"partial_rotary_factor": 1.0}
    if settings["model_type"] in ("granite_swa", "granitemoe_swa"):  # it passes over the bases of layers
        return settings | {"no_rope_layers": [int(base != 0) for base in settings["layer_rope_theta"]]}
    if settings["model_type"] == "laguna" and "sliding_attention" not in settings["layer_types"]:
        return settings | {"sliding_window": None}
    if settings["model_type"] == "mamba2":
        return {key: value for key, value in settings.items() if key != "intermediate_size"}
    if settings["model_type"] == "minicpm3":
        return settings | {"architectures": ["MiniCPM3ForCausalLM"]}
    if settings["model_type"] == "mistral4":
        return settings | {"architectures": ["Mistral3ForConditionalGeneration"]}
    if settings["model_type"] == "gpt2":
        return settings | {"n_ctx": settings["n_positions"]}
    if settings["model_type"] == "gpt_neox":
        return settings | {"rotary_pct": settings["rope_parameters"]["partial_rotary_factor"]}
    if settings["model_type"] == "falcon" and not settings["new_decoder_architecture"]:
        return {key: value for key, value in settings.items() if key != "num_kv_heads"}
    if settings["model_type"] == "bloom":
        return settings | {"seq_length": 2048}
    if settings["model_type"] == "mpt":
        return settings | {"architectures": ["MPTForCausalLM"]}
    if settings["model_type"] == "step3p5":
        return step_as_published(settings)
    if settings["model_type"] == "bailing_moe_v2":
        return settings | {"norm_topk_prob": True, "score_function": "sigmoid"}
    if settings["model_type"] != "mimo_v2_flash":
        return settings
    whole, window = (settings["rope_parameters"][f"{kind}_attention"] for kind in ("full", "sliding"))
    same = {f"swa_{key}": settings[key] for key in ("num_attention_heads", "head_dim", "v_head_dim")}
    return {key: value for key, value in settings.items() if key != "rope_parameters"} | {
        **same,
        "topk_method": "noaux_tc",
        "hybrid_layer_pattern": [int(kind == "sliding_attention") for kind in settings["layer_types"]],
        "swa_num_key_value_heads": 2 * settings["num_key_value_heads"],
        "rope_theta": whole["rope_theta"],
        "swa_rope_theta": window["rope_theta"],
        "partial_rotary_factor": whole["partial_rotary_factor"],
    }


def step_as_published(settings: dict[str, Any]) -> dict[str, Any]:
    """Step 3.5's words, which list by layer what transformers has by kind of layer, with layers of prediction."""
    kinds = settings["layer_types"] + ["sliding_attention"] * settings["num_nextn_predict_layers"]
    rope = settings["rope_parameters"]
    scaling = {key: value for key, value in rope["full_attention"].items() if key not in ("rope_theta", _SHARE)}
    numbers = [str(layer) for layer, kind in enumerate(settings["mlp_layer_types"]) if kind == "sparse"]
    others = {"rope_parameters", "num_key_value_heads", "n_routed_experts", "num_experts_per_tok", "mlp_layer_types"}
    return {key: value for key, value in settings.items() if key not in others} | {
        "num_attention_groups": settings["num_key_value_heads"],
        "attention_other_setting": {"num_attention_heads": settings["num_sliding_attention_heads"]},
        "layer_types": kinds,
        "rope_theta": [rope[kind]["rope_theta"] for kind in kinds],
        "partial_rotary_factors": [rope[kind][_SHARE] for kind in kinds],
        "rope_scaling": scaling,
        "moe_num_experts": settings["n_routed_experts"],
        "moe_top_k": settings["num_experts_per_tok"],
        "moe_layers_enum": ",".join(numbers),
        "moe_router_activation": "sigmoid",
        "norm_expert_weight": True,
    }


_SHARE = "partial_rotary_factor"


def converter(settings: dict[str, Any]) -> Any:
    """The class that converts such a model; those of Ministral 3 and Mistral 4 are within another one."""
    found = get_model_class(get_model_architecture(settings, ModelType.TEXT))
    return getattr(found, "Mistral4Model" if settings["model_type"] == "mistral4" else "Ministral3Model", found)


def convert(directory: Path, file: Path, values: str) -> None:
    settings = as_published(ModelBase.load_hparams(directory, False))
    made = converter(settings)
    made.set_vocab = lambda self: None
    made.no_mtp = not settings.get("num_nextn_predict_layers")
    made(directory, gguf.LlamaFileType[values], file, eager=True, hparams=settings).write()


def quantize(file: Path, target: Path, codes: str) -> None:
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{codes}")
    failed = llama_cpp.llama_model_quantize(bytes(file), bytes(target), params)
    assert not failed, (file, codes)


def save_values(file: Path) -> None:
    """The values of each tensor, as gguf-py decodes them."""
    tensors = gguf.GGUFReader(file).tensors
    values = {each.name: np.array(dequantize(each.data, each.tensor_type)) for each in tensors}
    save_file(values, file.with_suffix(".safetensors"))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for directory, file, values, codes in json.loads(sys.argv[2]):
        convert(folder / directory, folder / file, values)
        for target, kind in codes.items():
            quantize(folder / file, folder / target, kind)
            save_values(folder / target)
