"""ModelShape: the sizes and switches of a model; Hugging Face config keys <-> Megatron arguments, as a table."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture, shown


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

    def __post_init__(self) -> None:
        """Sizes come from files of strangers, and loops run over them."""
        for field in _SIZES if self.sliding_window is None else (*_SIZES, "sliding_window"):
            size = getattr(self, field)
            if type(size) is not int or not 1 <= size <= _LARGEST:
                raise DamagedCheckpoint(f"{field} is {shown(size)}, not a size", do="Is config.json this model's?")
        for field in ("norm_epsilon", "rotary_base"):
            _real(getattr(self, field), field)
        if not isinstance(self.architecture, str):
            raise DamagedCheckpoint(f"model_type is {shown(self.architecture)}, not a name")
        if self.num_attention_heads % self.num_query_groups:
            raise DamagedCheckpoint(f"{self.num_attention_heads} heads in {self.num_query_groups} query groups")

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


_LARGEST = 1 << 30
"""Of any size of a model: beyond every real one, and products of two fit 64 bits."""

_SIZES = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "vocab_size",
    "padded_vocab_size",
    "max_position_embeddings",
)

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


# what the families above have in common and config.json could say otherwise
_FIXED_CONFIG: Mapping[str, Any] = {"hidden_act": "silu", "partial_rotary_factor": 1.0}
# rotary scalings that can be computed or said in Megatron's words, and the numbers of each
_ROPE_NUMBERS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def from_hf_config(config: Mapping[str, Any], where: object = "config.json") -> ModelShape:
    """Read a config.json of transformers 4 or 5.

    Raises DamagedCheckpoint where a size is missing or something is not of its kind, and UnknownArchitecture for
    an activation or a rotary embedding that the families here do not have.
    """
    sizes = {field: _need(config, key, where) for field, key, _ in _COMMON_FIELDS}
    heads = sizes["num_attention_heads"]
    rope = _hf_rope(config, where)
    _check_fixed({**config, **rope}, where)
    biased = bool(config.get("attention_bias")) or bool(config.get("mlp_bias"))
    return ModelShape(
        architecture=_need(config, "model_type", where),
        num_query_groups=config.get("num_key_value_heads") or heads,
        kv_channels=config.get("head_dim") or _head_dim(sizes["hidden_size"], heads, where),
        vocab_size=_need(config, "vocab_size", where),
        padded_vocab_size=_need(config, "vocab_size", where),
        rotary_base=_real(rope.pop("rope_theta", 10000.0), "rope_theta", where),
        rope_scaling=rope if rope.get("rope_type", "default") != "default" else None,
        sliding_window=config.get("sliding_window"),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias")),
        mlp_bias=bool(config.get("mlp_bias")),
        add_bias_linear=biased,
        add_qkv_bias=bool(config.get("attention_bias")),
        **sizes,
    )


def _head_dim(hidden_size: Any, heads: Any, where: object) -> int:
    if type(hidden_size) is not int or type(heads) is not int or heads < 1:
        raise DamagedCheckpoint(f"hidden_size {shown(hidden_size)} for {shown(heads)} heads", where=where)
    return hidden_size // heads


def _real(value: Any, name: str, where: object = "") -> float:
    if type(value) not in (int, float) or not 0 < value < 1e30:
        raise DamagedCheckpoint(f"{name} is {shown(value)}, not a positive number", where=where)
    return float(value)


def _check_fixed(config: Mapping[str, Any], where: object) -> None:
    for key, value in _FIXED_CONFIG.items():
        if config.get(key) not in (None, value):
            raise UnknownArchitecture(
                f"no family known here has {key}={shown(config[key])}", where=where, do="Known: llama, mistral."
            )


def _hf_rope(config: Mapping[str, Any], where: object) -> dict[str, Any]:
    """transformers 5 has `rope_parameters`; transformers 4 `rope_theta` beside `rope_scaling`."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(found, Mapping):
        raise DamagedCheckpoint(f"rotary parameters are {shown(found)}, no object", where=where)
    rope = dict(found)
    if "type" in rope:  # the spelling before transformers 4.43
        rope.setdefault("rope_type", rope.pop("type"))
    if "rope_theta" in config:
        rope.setdefault("rope_theta", config["rope_theta"])
    _check_rope(rope, where)
    return rope


def _check_rope(rope: Mapping[str, Any], where: object) -> None:
    kind = rope.get("rope_type", "default")
    if not isinstance(kind, str) or kind not in _ROPE_NUMBERS:
        known = ", ".join(_ROPE_NUMBERS)
        raise UnknownArchitecture(f"rotary scaling of type {shown(kind)}", where=where, do=f"Known: {known}.")
    for name in _ROPE_NUMBERS[kind]:
        _real(_need(rope, name, where), name, where)


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


# what the families above have in common and Megatron has arguments for: written, and on the way back required
_FIXED_ARGS: Mapping[str, Any] = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "squared_relu": False,
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
    "apply_layernorm_1p": False,  # until megatron-core 0.15
    "layernorm_zero_centered_gamma": False,  # since 0.16
    "qk_layernorm": False,
    "multi_latent_attention": False,
    "num_experts": None,
    "mtp_num_layers": None,
    "window_attn_skip_freq": None,
}
# Megatron's own defaults differ from these, or older versions ask for them
_USUAL_ARGS: Mapping[str, Any] = {
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "add_position_embedding": True,
    "use_rotary_position_embeddings": False,  # the older word for position_embedding_type
    "apply_query_key_layer_scaling": False,
    "make_vocab_size_divisible_by": MAKE_VOCAB_SIZE_DIVISIBLE_BY,
}
# megatron/core/models/common/embeddings/rotary_pos_embedding.py, _apply_scaling: only the factor is an argument
_MEGATRON_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def to_megatron_args(model: ModelShape) -> dict[str, Any]:
    """The arguments that describe the model to Megatron-LM, of any version: what `--use-checkpoint-args` reads.

    Megatron has no argument for other rotary scaling than `linear` and Llama 3.1's; config.json keeps those.
    """
    args = {argument: getattr(model, field) for field, _, argument in _COMMON_FIELDS}
    window = None if model.sliding_window is None else (model.sliding_window - 1, 0)
    return {
        **args,
        **_FIXED_ARGS,
        **_USUAL_ARGS,
        **_rope_args(model.rope_scaling or {}),
        "layernorm_epsilon": model.norm_epsilon,  # norm_epsilon until megatron-core 0.15
        "seq_length": model.max_position_embeddings,
        "group_query_attention": model.num_query_groups != model.num_attention_heads,
        "num_query_groups": model.num_query_groups,
        "kv_channels": model.kv_channels,
        "rotary_base": int(model.rotary_base) if model.rotary_base.is_integer() else model.rotary_base,
        "window_size": window,  # distances to the left and right; Hugging Face counts the token itself
        "vocab_size": model.vocab_size,
        "padded_vocab_size": model.padded_vocab_size,
        "untie_embeddings_and_output_weights": model.untied_embeddings,
        "add_bias_linear": model.add_bias_linear,
        "add_qkv_bias": model.add_qkv_bias,
    }


def _rope_args(rope: Mapping[str, Any]) -> dict[str, Any]:
    llama3 = rope.get("rope_type") == "llama3" and all(rope.get(key) == value for key, value in _MEGATRON_ROPE.items())
    return {
        "use_rope_scaling": llama3,
        "rope_scaling_factor": float(rope["factor"]) if llama3 else 8.0,
        "rotary_seq_len_interpolation_factor": rope["factor"] if rope.get("rope_type") == "linear" else None,
    }


def from_megatron_args(args: Mapping[str, Any], padded_vocab_size: int, where: object) -> ModelShape:
    """The inverse of `to_megatron_args`, for a model of which only Megatron's arguments are known.

    They name no family: Mistral where there is a window, else Llama. Raises UnknownArchitecture where they
    describe neither and DamagedCheckpoint where one is missing.
    """
    for name, value in _FIXED_ARGS.items():
        if (args.get(name, value) or None) != (value or None):  # None, 0 and False all mean "without"
            raise UnknownArchitecture(
                f"no family known here has Megatron's {name}={shown(args[name])}",
                where=where,
                do="Known: llama, mistral.",
            )
    renamed = {"norm_epsilon": args["layernorm_epsilon"], **args} if "layernorm_epsilon" in args else args
    sizes = {field: _need(renamed, argument, where) for field, _, argument in _COMMON_FIELDS}
    try:
        return _from_args(args, sizes, padded_vocab_size, where)
    except (TypeError, ValueError, IndexError) as error:
        raise DamagedCheckpoint(f"arguments that describe no model: {error}", where=where) from error


def _from_args(args: Mapping[str, Any], sizes: dict[str, Any], padded_vocab_size: int, where: object) -> ModelShape:
    heads = sizes["num_attention_heads"]
    window = args.get("window_size")
    biased = bool(args.get("add_bias_linear", True))  # Megatron's default
    return ModelShape(
        architecture="mistral" if window else "llama",
        num_query_groups=_need(args, "num_query_groups", where) if args.get("group_query_attention") else heads,
        kv_channels=args.get("kv_channels") or _head_dim(sizes["hidden_size"], heads, where),
        vocab_size=args.get("vocab_size") or padded_vocab_size,
        padded_vocab_size=padded_vocab_size,
        rotary_base=float(args.get("rotary_base", 10000)),
        rope_scaling=_megatron_rope(args),
        sliding_window=int(window[0]) + 1 if window else None,
        tied_embeddings=not args.get("untie_embeddings_and_output_weights", False),
        attention_bias=biased or bool(args.get("add_qkv_bias")),
        mlp_bias=biased,
        add_bias_linear=biased,
        add_qkv_bias=bool(args.get("add_qkv_bias")),
        **sizes,
    )


def _megatron_rope(args: Mapping[str, Any]) -> dict[str, Any] | None:
    if args.get("use_rope_scaling"):
        return {"rope_type": "llama3", "factor": args.get("rope_scaling_factor", 8.0), **_MEGATRON_ROPE}
    if args.get("rotary_seq_len_interpolation_factor"):
        return {"rope_type": "linear", "factor": args["rotary_seq_len_interpolation_factor"]}
    return None


def _need(config: Mapping[str, Any], key: str, where: object) -> Any:
    try:
        return config[key]
    except KeyError:
        raise DamagedCheckpoint(f"no `{key}`", where=where, do="Is the file whole?") from None
