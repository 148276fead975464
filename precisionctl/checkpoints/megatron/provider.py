"""Megatron-Bridge's and NeMo 2's description of a model in YAML, converted to and from Megatron-LM's arguments.

Bridge reads `run_config.yaml` in an iteration's directory (`load_model_config`, training/model_load_save.py): `model`
names a provider class and its fields, which are those of megatron-core's TransformerConfig and some of
`GPTModelProvider`, and `checkpoint` says what was saved. NeMo 2 has the same fields in `context/model.yaml`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from precisionctl.architectures.megatron.expert_args import BALANCING, CAPACITY
from precisionctl.architectures.megatron.heterogeneous_args import ENCODED, HETEROGENEOUS
from precisionctl.architectures.megatron.megatron_args import GRANULARITY, HEAD_WISE_GATE, WITHOUT
from precisionctl.architectures.megatron.recurrent_args import HYBRID_PATTERN, KIMI_K3, KIMI_K3_BLOCK_SIZE
from precisionctl.errors import DamagedCheckpoint, damage
from precisionctl.megatron_flags import FIRST_LAST, FLAGS
from precisionctl.model.model_shape import ModelShape
from precisionctl.paths import above, own_name
from precisionctl.untrusted.safe_files import has_file, read_file

BRIDGE = "run_config.yaml"
NEMO = Path("context/model.yaml")

_PROVIDERS = "megatron.bridge.models."
_MAX_BYTES = 4_000_000
"""Largest file that is parsed: more than any real one, and parsed in seconds."""

_SAME = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
    *("normalization", "layernorm_epsilon", "layernorm_zero_centered_gamma", "qk_layernorm", "add_bias_linear"),
    *("add_qkv_bias", "attention_dropout", "hidden_dropout", "position_embedding_type", "rotary_base"),
    *("rotary_percent", "rotary_interleaved", "window_size", "window_attn_skip_freq", "softmax_type"),
    "softmax_scale",
    *("mtp_num_layers", "vocab_size", "seq_length", "make_vocab_size_divisible_by", "bf16", "fp16"),
    *("glu_linear_offset", "activation_func_clamp_value", "multi_latent_attention"),
    *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rope_type"),
    *("rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale"),
    *("mscale_all_dim", "moe_router_topk", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
    *("moe_shared_expert_gate", "moe_apply_probs_on_input", "moe_latent_size", "no_rope_freq", "qk_l2_norm"),
    *("hybrid_override_pattern", "mamba_num_heads", "mamba_head_dim", "mamba_num_groups", "mamba_state_dim"),
    *("moe_router_score_function", "moe_router_pre_softmax", "moe_router_enable_expert_bias"),
    *("moe_router_num_groups", "moe_router_group_topk", "moe_router_topk_scaling_factor", "moe_layer_freq"),
    *("moe_grouped_gemm", "moe_token_dispatcher_type", "tensor_model_parallel_size"),
    *("pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size", "expert_model_parallel_size"),
    "expert_tensor_parallel_size",
    *("attention_output_gate", "linear_attention_freq", "linear_conv_kernel_dim"),
    *("linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads"),
    *("yarn_rotary_scaling_factor", "yarn_original_max_position_embeddings", "yarn_beta_fast", "yarn_beta_slow"),
    *("yarn_mscale", "yarn_mscale_all_dim", "yarn_correction_range_round_to_int"),
)
RENAMED = {
    "num_experts": "num_moe_experts",
    "use_rope_scaling": "rope_scaling",
    "rope_scaling_factor": "rope_scaling_factor",
    "rotary_seq_len_interpolation_factor": "seq_len_interpolation_factor",
    "decoder_first_pipeline_num_layers": "num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "num_layers_in_last_pipeline_stage",
}
"""Arguments of Megatron-LM that TransformerConfig, and so a provider, has under another name."""
_OF_GPT = ("transformer_layer_spec", "rope_scaling", "rope_scaling_factor", "mtp_num_layers")
"""Fields that the provider of hybrid models does not have, or only since 0.4: those are written where they say more."""
_HYBRID_MTP = ("mtp_num_layers", "mtp_hybrid_override_pattern", "mtp_use_repeated_layer")
_LLAMA3 = {"low_freq_factor": 1, "high_freq_factor": 4, "old_context_len": 8192}
"""Llama 3's rope scaling in NeMo 2 and the first versions of Bridge (llama.py, Llama31Config), beside `scale_factor`.
Megatron has these numbers as constants."""
_BLOCK = "megatron.core.models.gpt.gpt_layer_specs.get_gpt_decoder_block_spec"
_VARIANT = "experimental_attention_variant"
_ONLY_READ = (
    *(_VARIANT, BALANCING, CAPACITY, HYBRID_PATTERN, *_HYBRID_MTP, *WITHOUT, *HETEROGENEOUS),
    *("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk"),
    *("dsa_indexer_rope_interleaved", "dsa_indexer_topk_freq", "dsa_indexer_skip_topk_offset"),
    "dsa_indexer_scoring_relu",
    *("kda_f_lora_rank", "kda_gate_lora_rank", "kda_safe_gate", "kda_lower_bound", GRANULARITY, HEAD_WISE_GATE),
    *KIMI_K3,
    *(flag.argument for flag in FLAGS),
    FIRST_LAST.argument,
)
"""Fields that only some of Bridge's providers have, the indexer's since 0.4, or that are of a run: its FP8 recipe,
which Bridge and NeMo set in the model's config. They are read, and not written alike."""
_DELTA_NET_BLOCK = (
    "megatron.core.models.gpt.experimental_attention_variant_module_specs."
    "get_transformer_block_with_experimental_attention_variant_spec"
)
_OVER_HEADS = "megatron.bridge.models.olmoe.olmoe_provider.olmoe_layer_spec"
"""Layers with norms of queries and keys over all heads, beside experts."""
_HETEROGENEOUS_LAYERS = f"{_PROVIDERS}llama_nemotron.llama_nemotron_provider.heterogeneous_layer_spec"
_KIMI_K3_LAYERS = "megatron.bridge.models.kimi.kimi_k3_spec.build_kimi_k3_spec"
SILU, GELU = "torch.nn.functional.silu", "torch.nn.functional.gelu"
_QUICK_GELU = "megatron.core.fusions.fused_bias_geglu.quick_gelu"
SQUARED_RELU = "megatron.core.activations.squared_relu"


def describes(model: ModelShape) -> bool:
    """Whether Bridge's generic providers, or that of Kimi K3, have fields for all of a model: none has for all of an
    indexer, nor xIELU, nor for several residual streams, nor for another model's Kimi delta attention, nor gates of
    heads."""
    kda = model.gdn is not None and model.gdn.kda and model.attn_res_block_size is None
    return model.dsa is None and model.mhc is None and not model.xielu and not kda and not model.head_wise_attn_gate


def write_run_config(directory: Path, args: Mapping[str, Any], model: ModelShape) -> None:
    """Write Bridge's `run_config.yaml` for a model, of which these arguments say most."""
    saved = {"save_optim": not args["no_save_optim"], "save_rng": not args["no_save_rng"], "fully_parallel_save": True}
    provider = to_provider(args)
    if model.moe and model.qk_layernorm_over_heads and model.num_query_groups == model.num_attention_heads:
        provider["transformer_layer_spec"] = _call(_OVER_HEADS)
    config = {"model": provider, "checkpoint": {**saved, "ckpt_format": "torch_dist"}}
    (directory / BRIDGE).write_text(yaml.safe_dump(config, sort_keys=True))


def to_provider(args: Mapping[str, Any]) -> dict[str, Any]:
    """The `model` section of a run_config.yaml. It names one of Bridge's generic providers, which pad the vocabulary
    only as the arguments say, or that of Kimi K3 or of Llama-Nemotron."""
    latent = bool(args.get("multi_latent_attention"))
    same = {name: args[name] for name in _SAME if name in args}
    fields: dict[str, Any] = {name: [*value] if isinstance(value, tuple) else value for name, value in same.items()}
    fields |= {field: args[name] for name, field in RENAMED.items() if name in args}
    fields["seq_length"] = args["max_position_embeddings"]  # the rows of its table of learned positions
    if args.get("linear_attention_freq") and (variant := args.get(_VARIANT)):
        fields |= {_VARIANT: variant, "transformer_layer_spec": _call(_DELTA_NET_BLOCK)}
        fields["hetereogenous_dist_checkpoint"] = True
    elif args.get("num_experts"):  # a generic provider makes all layers alike, whatever moe_layer_freq says
        fields["transformer_layer_spec"] = {"_target_": _BLOCK, "_partial_": True, "use_transformer_engine": True}
    provider = "mla_provider.MLAModelProvider" if latent else "gpt_provider.GPTModelProvider"
    if args.get("is_hybrid_model"):
        provider = "mamba.mamba_provider.MambaModelProvider"
        fields = {name: value for name, value in fields.items() if name not in _OF_GPT} | {"is_hybrid_model": True}
        if args.get("mtp_num_layers"):
            fields |= {name: args[name] for name in _HYBRID_MTP if name in args}
    if KIMI_K3_BLOCK_SIZE in args:
        provider = "kimi.kimi_k3_provider.KimiK3ModelProvider"
        fields |= {name: args[name] for name in KIMI_K3} | {"use_te_activation_func": True, "moe_router_dtype": "fp32"}
        fields["hetereogenous_dist_checkpoint"] = True
        fields["transformer_layer_spec"] = _call(_KIMI_K3_LAYERS)
    if ENCODED in args:
        provider = "llama_nemotron.llama_nemotron_provider.LlamaNemotronHeterogeneousProvider"
        fields |= {ENCODED: args[ENCODED], "transformer_layer_spec": _call(_HETEROGENEOUS_LAYERS)}
    return {
        **fields,
        "_target_": _PROVIDERS + provider,
        "activation_func": _call(_activation(args)),
        "gated_linear_unit": bool(args.get("swiglu") or args.get("gated_linear_unit")),
        "bias_activation_fusion": bool(args.get("bias_gelu_fusion", False)),
        "share_embeddings_and_output_weights": not args["untie_embeddings_and_output_weights"],
        "should_pad_vocab": True,
        "params_dtype": _call(f"torch.{args['params_dtype']}"),
        "pipeline_dtype": _call(f"torch.{args['params_dtype']}"),
    }


def _call(target: str) -> dict[str, Any]:
    """A reference to a Python object in these files: its name, and that it is not to be called."""
    return {"_target_": target, "_call_": False}


def _activation(args: Mapping[str, Any]) -> str:
    if args.get("squared_relu"):
        return SQUARED_RELU
    if args.get("quick_geglu"):
        return _QUICK_GELU
    return SILU if args.get("swiglu") or KIMI_K3_BLOCK_SIZE in args else GELU  # of Kimi K3, whose layers have their own


def described_args(directory: Path, bridge: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Megatron-LM's arguments from the description beside a checkpoint: the `model` section of Bridge's, or NeMo's;
    empty if there is none.

    Raises DamagedCheckpoint for a description that cannot be read.
    """
    if bridge is not None:
        return from_provider(bridge)
    top = above(directory)
    nemo = top / NEMO
    if own_name(directory) == "weights" and has_file(nemo, top):
        return from_nemo(_part(read_yaml(nemo, top), "config", nemo))
    return {}


def described_towers(bridge: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """What Bridge's description says of a wrapper's towers, as the parts of config.json, by dotted names: it holds the
    config objects of transformers (or one, `hf_config` or `thinker_config`, that holds these), by their class and their
    dicts, or a dict alone."""
    whole, thinker = (_config_dict(bridge.get(name)) for name in ("hf_config", "thinker_config"))
    names = ("vision_config", "audio_config")
    parts = {name: _config_dict(bridge.get(name)) or whole.get(name) for name in names}
    parts |= {f"thinker_config.{name}": thinker.get(name) for name in names}
    parts |= {"sound_config": bridge.get("sound_config")}
    return {name: part for name, part in parts.items() if isinstance(part, dict)}


def described_sharing(bridge: Mapping[str, Any]) -> dict[str, object]:
    """What Bridge's description says of keys and values that a Gemma 4 does not compute with, by keys of config.json:
    its provider of models with experts knows of no layers that share them."""
    if not _provider(bridge).startswith("Gemma4"):
        return {}
    usual = {} if _provider(bridge).startswith("Gemma4Dense") else {"num_kv_shared_layers": 0}
    return usual | {key: bridge[key] for key in ("attention_k_eq_v", "num_kv_shared_layers") if key in bridge}


def _config_dict(value: object) -> dict[str, Any]:
    """The dict of a config object of transformers; empty for anything else."""
    found = value.get("config_dict") if isinstance(value, dict) else None
    return found if isinstance(found, dict) else {}


def from_nemo(fields: Mapping[str, Any]) -> dict[str, Any]:
    """As `from_provider`, of NeMo's fields."""
    if isinstance(window := fields.get("window_size"), list) and window[:1] and type(window[0]) is int:
        # NeMo's number is config.json's (nemo/collections/llm/gpt/model/mistral.py), one more than Megatron's
        fields = {**fields, "window_size": [window[0] - 1, *window[1:]]}
    return from_provider(fields)


def bridge_section(directory: Path, name: str) -> Mapping[str, Any]:
    """A section of Bridge's `run_config.yaml`. Raises DamagedCheckpoint without it."""
    bridge = directory / BRIDGE
    return _part(read_yaml(bridge, directory), name, bridge)


_MOST_PARTS, _DEEPEST = 100_000, 100
_LONGEST_NUMBERS = {"tag:yaml.org,2002:int": 20, "tag:yaml.org,2002:float": 100}


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Loads plain values only. Python tags, of which NeMo writes some, become None. Aliases and merged mappings are
    refused, because a few bytes of them can expand without end."""

    _parts = _depth = 0

    def flatten_mapping(self, node: Any) -> None:
        if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value):
            raise yaml.YAMLError("mappings are not merged")

    def compose_node(self, parent: Any, index: Any) -> Any:
        self._parts, self._depth = self._parts + 1, self._depth + 1
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases, which Bridge and NeMo do not write")
        if self._parts > _MOST_PARTS or self._depth > _DEEPEST:
            raise yaml.YAMLError("more entries, or more deeply nested, than a description has")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_scalar(self, node: Any) -> Any:
        """Refuse long numbers: parsing base-60 numbers (YAML 1.1) takes time quadratic in their length, and as keys
        integers of more than 64 bits can be chosen to have one hash."""
        if node.tag in _LONGEST_NUMBERS and len(node.value) > _LONGEST_NUMBERS[node.tag]:
            raise yaml.YAMLError(f"a number of {len(node.value)} characters")
        return super().construct_scalar(node)


_Loader.add_multi_constructor("", lambda loader, suffix, node: None)


def parse_yaml(content: bytes, where: object) -> Any:
    """Plain values in YAML. Raises DamagedCheckpoint for anything that is none."""
    with damage("not YAML of plain values", where):
        return yaml.load(content, _Loader)


def read_yaml(path: Path, directory: Path) -> Any:
    """The same in a file that belongs to a directory. Raises as `read_file`, of at most `_MAX_BYTES`, and
    `parse_yaml`."""
    return parse_yaml(read_file(path, directory, _MAX_BYTES), path)


def _part(content: Any, name: str, where: Path) -> Mapping[str, Any]:
    part = content.get(name) if isinstance(content, dict) else None
    if not isinstance(part, dict):
        raise DamagedCheckpoint(f"no `{name}` in it", where=where)
    return part


def from_provider(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron-LM's arguments from a provider's fields: the inverse of `to_provider`."""
    provider, otherwise = _provider(fields), dict[str, Any]()
    if fields.get("position_embedding_type") == "mrope":  # of wrappers: in several dimensions, all the same in text
        otherwise["position_embedding_type"] = "rope"
    if provider.startswith(("Gemma3", "Gemma4")):
        otherwise |= _of_gemma_3(fields)
    if provider.startswith("Gemma4"):  # whose router divides by the sum, whatever is said (gemma4_provider.py)
        otherwise |= {"softmax_scale": 1.0, "moe_router_pre_softmax": False}
        if (base := fields.get("full_attention_rope_base")) is not None:  # the dense provider's word
            otherwise["rotary_base"] = base
    fields = {**fields, **otherwise}

    args = {name: fields[name] for name in (*_SAME, *_ONLY_READ) if name in fields}
    args |= {argument: fields[name] for argument, name in RENAMED.items() if name in fields}
    if provider.startswith("Gemma2"):  # by its own attention, not by a field
        args["window_attn_skip_freq"] = 2
    if all(fields.get(name) == value for name, value in _LLAMA3.items()):
        args |= {"use_rope_scaling": True, "rope_scaling_factor": fields.get("scale_factor")}
    if positions := fields.get("max_position_embeddings") or fields.get("seq_length"):
        args["max_position_embeddings"] = positions

    groups, window = fields.get("num_query_groups"), fields.get("window_size")
    target = fields.get("activation_func")
    activation = str(target.get("_target_", "") if isinstance(target, dict) else target or "").rpartition(".")[2]
    gated = bool(fields.get("gated_linear_unit"))
    return {
        **args,
        "window_size": tuple(window) if isinstance(window, list) else window,
        "group_query_attention": groups not in (None, fields.get("num_attention_heads")),
        "untie_embeddings_and_output_weights": not fields.get("share_embeddings_and_output_weights", True),
        "swiglu": gated and activation == "silu",
        "gated_linear_unit": gated,
        "quick_geglu": gated and activation == "quick_gelu",
        "squared_relu": activation == "squared_relu",
        "bias_gelu_fusion": bool(fields.get("bias_activation_fusion", False)) or activation == "fast_gelu",
    }


def _provider(fields: Mapping[str, Any]) -> str:
    """The class of a provider."""
    return str(fields.get("_target_", "")).rpartition(".")[2]


def _of_gemma_3(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Gemma 3 and 4 (models/gemma/gemma3_provider.py) have rotary bases of layers with a window and without, of which
    Megatron has the latter, a window that counts the token itself, a number of layers that have it before one that has
    none, and norms of queries and keys of which they say nothing."""
    found: dict[str, Any] = {"qk_layernorm": True}
    base, window, pattern = (fields.get(name) for name in ("rotary_base", "window_size", "interleaved_attn_pattern"))
    if isinstance(base, list) and len(base) == 2:
        found["rotary_base"] = base[1]
    if fields.get("rope_scaling_factor") not in (None, 1):
        found["seq_len_interpolation_factor"] = fields["rope_scaling_factor"]
    if type(window) is int:
        found["window_size"] = [window - 1, 0]
    if isinstance(pattern, list) and [type(each) for each in pattern] == [int, int]:
        found["window_attn_skip_freq"] = sum(pattern)
    elif isinstance(pattern, list):
        found["window_attn_skip_freq"] = [int(each == "sliding_attention") for each in pattern]
    return found
