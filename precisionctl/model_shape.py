"""ModelShape: the sizes and switches of a model; Hugging Face config keys <-> Megatron arguments, as a table."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from precisionctl.errors import DamagedCheckpoint


@dataclass(frozen=True)
class ModelShape:
    """What both layouts agree on about a decoder-only transformer, in Megatron's words.

    `architecture` is the Hugging Face `model_type`. Hugging Face has a switch for the attention's biases
    and one for the MLP's; Megatron has one for all linears and one for QKV alone, so all four are kept.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    padded_vocab_size: int
    max_position_embeddings: int
    norm_epsilon: float = 1e-5
    rotary_base: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    sliding_window: int | None = None
    tied_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    add_bias_linear: bool = False
    add_qkv_bias: bool = False

    @property
    def projection_size(self) -> int:
        """Input width of the attention's output projection."""
        return self.num_attention_heads * self.kv_channels

    @property
    def untied_embeddings(self) -> bool:
        return not self.tied_embeddings

    def padded(self, divisible_by: int) -> "ModelShape":
        """The same model with its vocabulary rounded up to a multiple of `divisible_by`."""
        size = -(-self.vocab_size // divisible_by) * divisible_by
        return dataclasses.replace(self, padded_vocab_size=size)


MAKE_VOCAB_SIZE_DIVISIBLE_BY = 128
"""Megatron's default for `--make-vocab-size-divisible-by` (times the tensor parallel size)."""

# field of ModelShape, key of config.json, argument of Megatron-LM
_COMMON_FIELDS = (
    ("num_layers", "num_hidden_layers", "num_layers"),
    ("hidden_size", "hidden_size", "hidden_size"),
    ("ffn_hidden_size", "intermediate_size", "ffn_hidden_size"),
    ("num_attention_heads", "num_attention_heads", "num_attention_heads"),
    ("max_position_embeddings", "max_position_embeddings", "max_position_embeddings"),
    ("norm_epsilon", "rms_norm_eps", "norm_epsilon"),
)


def from_hf_config(config: Mapping[str, Any], where: object = "config.json") -> ModelShape:
    """Read a config.json of transformers 4 or 5. Raises DamagedCheckpoint where a size is missing."""
    sizes = {field: _need(config, key, where) for field, key, _ in _COMMON_FIELDS}
    heads = sizes["num_attention_heads"]
    rope = _hf_rope(config)
    biased = bool(config.get("attention_bias")) or bool(config.get("mlp_bias"))
    return ModelShape(
        architecture=_need(config, "model_type", where),
        num_query_groups=config.get("num_key_value_heads") or heads,
        kv_channels=config.get("head_dim") or sizes["hidden_size"] // heads,
        vocab_size=_need(config, "vocab_size", where),
        padded_vocab_size=_need(config, "vocab_size", where),
        rotary_base=float(rope.pop("rope_theta", 10000.0)),
        rope_scaling=rope if rope.get("rope_type", "default") != "default" else None,
        sliding_window=config.get("sliding_window"),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias")),
        mlp_bias=bool(config.get("mlp_bias")),
        add_bias_linear=biased,
        add_qkv_bias=bool(config.get("attention_bias")),
        **sizes,
    )


def _hf_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """transformers 5 has `rope_parameters`; transformers 4 `rope_theta` beside `rope_scaling`."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if "type" in rope:  # the spelling before transformers 4.43
        rope.setdefault("rope_type", rope.pop("type"))
    if "rope_theta" in config:
        rope.setdefault("rope_theta", config["rope_theta"])
    return rope


def to_hf_config(model: ModelShape, hf_class: str, dtype: str) -> dict[str, Any]:
    """A config.json for a model that never had one. `dtype` is transformers' word, e.g. `bfloat16`."""
    config: dict[str, Any] = {key: getattr(model, field) for field, key, _ in _COMMON_FIELDS}
    config |= {
        "architectures": [hf_class],
        "model_type": model.architecture,
        "num_key_value_heads": model.num_query_groups,
        "head_dim": model.kv_channels,
        "vocab_size": model.vocab_size,
        "hidden_act": "silu",
        "tie_word_embeddings": model.tied_embeddings,
        "rope_theta": model.rotary_base,
        "torch_dtype": dtype,
    }
    switches = {key: getattr(model, key) for key in ("attention_bias", "mlp_bias", "sliding_window")}
    config |= {key: value for key, value in switches.items() if value}
    if model.rope_scaling:
        config["rope_scaling"] = dict(model.rope_scaling)
    return config


def _need(config: Mapping[str, Any], key: str, where: object) -> Any:
    try:
        return config[key]
    except KeyError:
        raise DamagedCheckpoint(f"no `{key}`", where=where, do="Is the file whole?") from None
