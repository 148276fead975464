"""config.json of a GGUF file: which keys its metadata say, by family.

What a key means is what llama.cpp's model of that architecture takes it for (src/models/*.cpp, load_arch_hparams), and
what none says is what it computes all the same: that Qwen3 normalises the weights of chosen experts, say.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from precisionctl.checkpoints.gguf.gguf_metadata import Described, shortest
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture, shown

MadeKeys = dict[str, Any]
"""Keys of config.json."""

_YARN = ("beta_fast", "beta_slow")
_SOFTMAX, _SIGMOID = 1, 2
"""llama.cpp's numbers of the functions that score experts (expert_gating_func)."""


def _common(file: Described) -> MadeKeys:
    heads, hidden = file.count("attention.head_count"), file.count("embedding_length")
    if not heads:
        raise DamagedCheckpoint(f"{file.architecture}.attention.head_count is 0", where=file.where)
    return {
        "vocab_size": file.rows("token_embd.weight"),
        "hidden_size": hidden,
        "num_hidden_layers": file.count("block_count"),
        "intermediate_size": file.count("feed_forward_length", 0),
        "num_attention_heads": heads,
        "num_key_value_heads": file.count("attention.head_count_kv", heads),
        "head_dim": file.count("attention.key_length", hidden // heads),
        "max_position_embeddings": file.count("context_length"),
        "rms_norm_eps": file.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": not file.has("output.weight"),
        "rope_parameters": _rope(file),
    }


def _rope(file: Described) -> MadeKeys:
    rope: MadeKeys = {"rope_type": "default", "rope_theta": file.number("rope.freq_base", 10000.0)}
    kind = file.said("rope.scaling.type")
    if kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": file.number("rope.scaling.factor")}
    elif kind not in (None, "none", "longrope"):
        what = f"rotary scaling of type {shown(kind)}, which is not read of GGUF"
        raise UnknownArchitecture(what, where=file.where)
    if kind == "yarn":
        rope["original_max_position_embeddings"] = file.count("rope.scaling.original_context_length")
        rope |= {
            key: file.number(f"rope.scaling.yarn_{key}")
            for key in _YARN
            if file.said(f"rope.scaling.yarn_{key}") is not None
        }
        if file.said("rope.scaling.yarn_attn_factor") is not None:
            rope["attention_factor"] = file.number("rope.scaling.yarn_attn_factor")
    return rope


def _biases(file: Described) -> MadeKeys:
    return {"attention_bias": file.has("blk.0.attn_q.bias"), "mlp_bias": file.has("blk.0.ffn_up.bias")}


def _whole_heads(file: Described, made: MadeKeys) -> None:
    """Raise UnknownArchitecture for rotary embeddings of a part of each head."""
    turned = file.count("rope.dimension_count", made["head_dim"])
    if turned != made["head_dim"]:
        what = f"rotary embeddings of {turned} of {made['head_dim']} channels of a head"
        raise UnknownArchitecture(what, where=file.where)


def _part_of_heads(file: Described, made: MadeKeys) -> MadeKeys:
    if not made["head_dim"]:
        raise DamagedCheckpoint(f"{file.architecture}.attention.key_length is 0", where=file.where)
    turned = file.count("rope.dimension_count", made["head_dim"])
    return {"rope_parameters": made["rope_parameters"] | {"partial_rotary_factor": turned / made["head_dim"]}}


def _experts(file: Described, count: str) -> MadeKeys:
    return {count: file.count("expert_count"), "num_experts_per_tok": file.count("expert_used_count")}


def _softcap(file: Described, key: str) -> float | None:
    return file.number(key) if file.said(key) is not None else None


def _llama(file: Described, made: MadeKeys) -> MadeKeys:
    _whole_heads(file, made)
    return _biases(file)


def _mixtral(file: Described, made: MadeKeys) -> MadeKeys:
    _whole_heads(file, made)
    return _experts(file, "num_local_experts")


def _granite(file: Described, made: MadeKeys) -> MadeKeys:
    _whole_heads(file, made)
    factors = {
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
    scale = 1 / math.sqrt(made["hidden_size"] / made["num_attention_heads"])
    absent = {"attention_multiplier": scale, "logits_scaling": None}
    return _biases(file) | {key: file.number(said, absent.get(key, 1.0)) for key, said in factors.items()}


def _granite_moe(file: Described, made: MadeKeys) -> MadeKeys:
    found = _granite(file, made) | _experts(file, "num_local_experts")
    del found["mlp_bias"]
    return found


def _qwen(file: Described, made: MadeKeys) -> MadeKeys:
    _whole_heads(file, made)
    return {}


def _with_biases_of_attention(file: Described, made: MadeKeys) -> MadeKeys:
    _whole_heads(file, made)
    return {"attention_bias": file.has("blk.0.attn_q.bias")}


def _qwen2_moe(file: Described, made: MadeKeys) -> MadeKeys:
    return _qwen(file, made) | {
        **_experts(file, "num_experts"),
        "moe_intermediate_size": file.count("expert_feed_forward_length"),
        "shared_expert_intermediate_size": file.count("expert_shared_feed_forward_length"),
    }


def _qwen3_moe(file: Described, made: MadeKeys) -> MadeKeys:
    return _with_biases_of_attention(file, made) | {
        **_experts(file, "num_experts"),
        "moe_intermediate_size": file.count("expert_feed_forward_length"),
    }


def _qwen3_next(file: Described, made: MadeKeys) -> MadeKeys:
    layers = made["num_hidden_layers"] - file.count("nextn_predict_layers", 0)
    every = file.count("full_attention_interval", 4)
    recurrent = file.flags("attention.recurrent_layers") or [(layer + 1) % every != 0 for layer in range(layers)]
    values, heads = file.count("ssm.inner_size"), file.count("ssm.time_step_rank")
    return _part_of_heads(file, made) | {
        **_experts(file, "num_experts"),
        "num_hidden_layers": layers,
        "moe_intermediate_size": file.count("expert_feed_forward_length"),
        "shared_expert_intermediate_size": file.count("expert_shared_feed_forward_length"),
        "layer_types": ["linear_attention" if each else "full_attention" for each in recurrent[:layers]],
        "linear_conv_kernel_dim": file.count("ssm.conv_kernel"),
        "linear_key_head_dim": file.count("ssm.state_size"),
        "linear_num_key_heads": file.count("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": values // heads if heads else 0,
    }


def _gemma(file: Described, made: MadeKeys) -> MadeKeys:
    return {}


def _gemma2(file: Described, made: MadeKeys) -> MadeKeys:
    return {
        "attn_logit_softcapping": file.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.number("final_logit_softcapping", 30.0),
        "sliding_window": file.count("attention.sliding_window", 4096),
    }


def _gemma3(file: Described, made: MadeKeys) -> MadeKeys:
    if not file.count("attention.sliding_window", 0):
        raise UnknownArchitecture("a Gemma 3 without a window", where=file.where)
    return {
        **_windows(file),
        "final_logit_softcapping": _softcap(file, "final_logit_softcapping"),
        "rope_local_base_freq": file.number("rope.freq_base_swa", 10000.0),
    }


def _windows(file: Described) -> MadeKeys:
    """The window, and the layers that have it, if the file lists them, or says that it is all but every so many. If
    not, the class's default is llama.cpp's."""
    key = "attention.sliding_window_pattern"
    if type(every := file.said(key)) is int and every > 0:
        windows = [(layer + 1) % every != 0 for layer in range(file.count("block_count"))]
    else:
        windows = file.flags(key) or []
    types = ["sliding_attention" if window else "full_attention" for window in windows]
    return {"sliding_window": file.count("attention.sliding_window")} | ({"layer_types": types} if types else {})


def _phi3(file: Described, made: MadeKeys) -> MadeKeys:
    most = made["max_position_embeddings"]
    original = file.count("rope.scaling.original_context_length", most)
    scaled = 1 < original < most and file.has("rope_factors_long.weight")
    usual = math.sqrt(1 + math.log(most / original) / math.log(original)) if scaled else 1.0
    if not math.isclose(file.number("rope.scaling.attn_factor", usual), usual, rel_tol=1e-5):
        what = f"phi3.rope.scaling.attn_factor is {shown(file.said('rope.scaling.attn_factor'))}, and {usual} as usual"
        raise UnknownArchitecture(what, where=file.where)
    return _part_of_heads(file, made) | {
        "original_max_position_embeddings": original,
        "sliding_window": file.count("attention.sliding_window", 0) or None,
    }


def _olmo3(file: Described, made: MadeKeys) -> MadeKeys:
    local = file.number("rope.freq_base_swa", made["rope_parameters"]["rope_theta"])
    return _with_biases_of_attention(file, made) | _windows(file) | {"rope_local_base_freq": local}


def _gpt_oss(file: Described, made: MadeKeys) -> MadeKeys:
    return {
        **_experts(file, "num_local_experts"),
        **_windows(file),
        "intermediate_size": file.count("expert_feed_forward_length"),
        "attention_bias": True,
    }


def _dense_and_experts(file: Described) -> MadeKeys:
    return {
        **_experts(file, "n_routed_experts"),
        "moe_intermediate_size": file.count("expert_feed_forward_length"),
        "n_shared_experts": file.count("expert_shared_count"),
        "first_k_dense_replace": file.count("leading_dense_block_count", 0),
        "routed_scaling_factor": file.number("expert_weights_scale", 1.0),
        "norm_topk_prob": file.said("expert_weights_norm") is True,
        "n_group": file.count("expert_group_count", 1),
        "topk_group": file.count("expert_group_used_count", 1),
        "num_nextn_predict_layers": file.count("nextn_predict_layers", 0),
    }


def _glm4_moe(file: Described, made: MadeKeys) -> MadeKeys:
    found = _part_of_heads(file, made) | _dense_and_experts(file)
    return found | {
        "num_hidden_layers": made["num_hidden_layers"] - found["num_nextn_predict_layers"],
        "attention_bias": file.has("blk.0.attn_q.bias"),
        "use_qk_norm": file.has("blk.0.attn_q_norm.weight"),
    }


def _deepseek(file: Described, made: MadeKeys) -> MadeKeys:
    rope, turned = made["rope_parameters"], file.count("rope.dimension_count")
    if (log_multiplier := file.number("rope.scaling.yarn_log_multiplier", 0.0)) != 0:
        rope = {**rope, "mscale_all_dim": shortest(10.0 * log_multiplier)}
    found = _dense_and_experts(file)
    return found | {
        "rope_parameters": rope,
        "head_dim": turned,
        "num_hidden_layers": made["num_hidden_layers"] - found["num_nextn_predict_layers"],
        "num_key_value_heads": made["num_attention_heads"],
        "q_lora_rank": file.count("attention.q_lora_rank") if file.has("blk.0.attn_q_a.weight") else None,
        "kv_lora_rank": file.count("attention.kv_lora_rank"),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": file.count("attention.key_length_mla") - turned,
        "v_head_dim": file.count("attention.value_length_mla"),
    }


def _deepseek_v2(file: Described, made: MadeKeys) -> MadeKeys:
    found = _deepseek(file, made)
    grouped = found["n_group"] > 1
    return found | {"topk_method": "group_limited_greedy" if grouped else "greedy", "scoring_func": "softmax"}


def _deepseek_v3(file: Described, made: MadeKeys) -> MadeKeys:
    return _deepseek(file, made) | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}


def supposed_config(model_type: str, made: MadeKeys) -> MadeKeys:
    """Keys that no metadata say, of models of this family: what llama.cpp takes for granted, and all releases have."""
    return _SUPPOSED[model_type](made) if model_type in _SUPPOSED else {}


def _query_scalar(made: MadeKeys, layers_of_27b: int) -> MadeKeys:
    """What queries are divided by the root of: in the model of 27B, known by its number of layers, another one."""
    other = made["num_hidden_layers"] == layers_of_27b
    return {"query_pre_attn_scalar": made["hidden_size"] // made["num_attention_heads"] if other else made["head_dim"]}


def _untruncated(made: MadeKeys) -> MadeKeys:
    rope = made["rope_parameters"]
    return {"rope_parameters": rope | {"truncate": False}} if rope["rope_type"] == "yarn" else {}


def _one_mscale(made: MadeKeys) -> MadeKeys:
    rope = made["rope_parameters"]
    return {"rope_parameters": rope | {"mscale": rope["mscale_all_dim"]}} if "mscale_all_dim" in rope else {}


_SUPPOSED: Mapping[str, Callable[[MadeKeys], MadeKeys]] = {
    "deepseek_v2": _one_mscale,
    "deepseek_v3": _one_mscale,
    "gemma2": lambda made: _query_scalar(made, layers_of_27b=46),
    "gemma3_text": lambda made: _query_scalar(made, layers_of_27b=62),
    "gpt_oss": _untruncated,
    "qwen2_moe": lambda made: {"norm_topk_prob": False},
    "qwen3_moe": lambda made: {"norm_topk_prob": True},
    "qwen3_next": lambda made: {"norm_topk_prob": True},
}

_KEYS: Mapping[str, Callable[[Described, MadeKeys], MadeKeys]] = {
    "llama": _llama,
    "mistral": _llama,
    "mixtral": _mixtral,
    "granite": _granite,
    "granitemoe": _granite_moe,
    "smollm3": _llama,
    "qwen2": _qwen,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _with_biases_of_attention,
    "qwen3_moe": _qwen3_moe,
    "qwen3_next": _qwen3_next,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
    "olmo2": _with_biases_of_attention,
    "olmo3": _olmo3,
    "gpt_oss": _gpt_oss,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "glm4_moe": _glm4_moe,
}


def model_type_of(file: Described, of_architecture: Sequence[str]) -> str:
    """Which of the families with its `general.architecture` a file is of, as far as that changes what it computes."""
    if "mixtral" in of_architecture:
        return "mixtral" if file.count("expert_count", 0) else "llama"
    if "olmo3" in of_architecture:
        return "olmo3" if file.count("attention.sliding_window", 0) else "olmo2"
    if "deepseek_v3" in of_architecture:
        chosen_with_bias = any(name.endswith(".exp_probs_b.bias") for name in file.tensors)
        sigmoid = file.count("expert_gating_func", 0) == _SIGMOID
        return "deepseek_v3" if chosen_with_bias or sigmoid else "deepseek_v2"
    (only,) = of_architecture
    return only


def made_config(file: Described, model_type: str) -> MadeKeys:
    """The keys of config.json that a file says, as one of this family. Raises DamagedCheckpoint for keys that are not
    there or contradict one another, UnknownArchitecture for a setting that is not read."""
    common = _common(file)
    made = {"model_type": model_type} | common | _KEYS[model_type](file, common)
    expected = {
        "vocab_size": made["vocab_size"],
        "attention.causal": True,
        "attention.value_length": made.get("kv_lora_rank", made["head_dim"]),
    }
    if "n_routed_experts" in made:
        expected["expert_gating_func"] = _SOFTMAX if made.get("scoring_func") == "softmax" else _SIGMOID
    if model_type.startswith("granite"):  # of which llama.cpp takes it for a switch of rotary embeddings
        expected["rope.scaling.finetuned"] = True
    if "rope_local_base_freq" not in made:
        expected["rope.freq_base_swa"] = file.said("rope.freq_base")
    for key, value in expected.items():
        if file.said(key) not in (None, value):
            what = f"{file.architecture}.{key} is {shown(file.said(key))}, and {value} in a {model_type} like this"
            raise UnknownArchitecture(what, where=file.where)
    file.check_all_asked()
    return made
