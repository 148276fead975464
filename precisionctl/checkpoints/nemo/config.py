"""NeMo 1's `model_config.yaml` as Megatron-LM's arguments.

The fields are megatron-core's TransformerConfig's, except for those here (nemo/collections/nlp/models/
language_modeling/megatron_gpt_model.py and megatron_base_model.py, build_transformer_config and model_provider_func).
The tokenizer's vocabulary is not among them.
"""

from collections.abc import Mapping
from typing import Any

from precisionctl.checkpoints.megatron.provider import GELU, SILU, SQUARED_RELU, from_nemo, parse_yaml
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture, damage, shown

_ACTIVATIONS = {
    "gelu": GELU,
    "geglu": GELU,
    "fast-geglu": GELU,
    "swiglu": SILU,
    "fast-swiglu": SILU,
    "squared-relu": SQUARED_RELU,
}
_NORMS = {"layernorm": "LayerNorm", "layernorm1p": "LayerNorm", "rmsnorm": "RMSNorm"}
_ONLY = {
    "headscale": False,
    "megatron_legacy": False,
    "normalize_attention_scores": True,
    "openai_gelu": False,
    "transformer_block_type": "pre_ln",
}
"""Switches of NeMo's own layers, and the values for which they compute what Megatron-Core's do."""
BEYOND = ("apply_embedding_scaling", "mcore_customization_config")
"""Fields for which Megatron has no arguments: where one is set, a config.json has to say the model."""


def parse(content: bytes, where: object) -> Mapping[str, Any]:
    """The fields in a model_config.yaml. Raises DamagedCheckpoint for what is none."""
    fields = parse_yaml(content, where)
    if not isinstance(fields, dict):
        raise DamagedCheckpoint("no table of settings", where=where)
    return fields


def to_megatron_args(fields: Mapping[str, Any], where: object) -> Mapping[str, Any]:
    """Megatron-LM's arguments. Raises UnknownArchitecture for a model that Megatron-Core does not compute."""
    with damage("settings that describe no model", where):
        activation, norm = fields.get("activation", "gelu"), fields.get("normalization", "layernorm")
        others = [f"{name}={shown(fields[name])}" for name, only in _ONLY.items() if fields.get(name, only) != only]
        if activation not in _ACTIVATIONS or norm not in _NORMS:
            others.append(f"activation={shown(activation)}, normalization={shown(norm)}")
        if others:
            raise UnknownArchitecture(f"no family known here has NeMo's {others[0]}", where=where)
        scaled = bool(fields.get("scale_positional_embedding"))  # as Llama 3.1, whose factor NeMo has as a constant
        return from_nemo(
            {
                **fields,
                "activation_func": _ACTIVATIONS[activation],
                "add_bias_linear": fields.get("bias", True),
                "add_qkv_bias": fields.get("qkv_bias", False),
                "bias_activation_fusion": fields.get("bias_activation_fusion", True),
                "gated_linear_unit": activation.endswith("glu"),
                "layernorm_zero_centered_gamma": norm == "layernorm1p"
                or fields.get("layernorm_zero_centered_gamma", False),
                "normalization": _NORMS[norm],
                "rope_scaling": scaled,
                "rope_scaling_factor": 8.0,
                "rotary_percent": fields.get("rotary_percentage", 1.0),
                # the converter of Llama 3.1 sets this, too
                "seq_len_interpolation_factor": None if scaled else fields.get("seq_len_interpolation_factor"),
                "seq_length": fields.get("encoder_seq_length"),
                "vocab_size": fields.get("override_vocab_size"),
            }
        )
