"""How the metadata of a GGUF file say a ModelShape: entries that read and write the same keys.

A family lists its entries (`families/`); those that are common to several stand here. Fields of a part of
ModelShape are written with a dot. Reading raises DamagedCheckpoint where a key is missing or not of its kind, and
UnknownArchitecture for a setting that is not known here.

Sources: llama.cpp's src/llama-model.cpp (load_hparams), src/models/*.cpp, and conversion/*.py (set_gguf_parameters).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from precisionctl.architectures.config_keys import NEEDED, Fields
from precisionctl.checkpoints.gguf.metadata import Described
from precisionctl.errors import UnknownArchitecture, shown
from precisionctl.model.model_shape import ModelShape

Said = Mapping[str, int | float | bool | str | list[bool] | list[int] | list[float]]
"""Values by key, without the architecture's name; an `int` is 32 bits without a sign, a `float` FP32."""


@dataclass(frozen=True)
class GgufEntry:
    """Some keys of the metadata, or tensors that are there or not, and the fields of ModelShape that they say.

    `fields` are those that llama.cpp computes with as the file says them. `keys` are those that `read` looks at, beside
    others' that it only counts by; a key of a file that is no entry's is refused. `write` raises UnknownArchitecture
    for a model of which llama.cpp would compute something else.
    """

    fields: tuple[str, ...]
    keys: tuple[str, ...]
    read: Callable[[Described], Fields]
    write: Callable[[ModelShape], Said] = lambda model: {}


def integer(field: str, key: str, absent: int | None = NEEDED) -> GgufEntry:
    """A field under one key. `absent` is what llama.cpp takes where the key is not there; None is not written."""
    return _one(field, key, absent, int, Described.count)


def number(field: str, key: str, absent: float | None = NEEDED) -> GgufEntry:
    """The same of a field in FP32."""
    return _one(field, key, absent, float, Described.number)


def integer_or_none(field: str, key: str, absent: int = 0) -> GgufEntry:
    """An integer field under one key, of which 0 means none."""

    def read(file: Described) -> Fields:
        return {field: file.count(key, absent) or None}

    return GgufEntry((field,), (key,), read, lambda model: {key: value_of(model, field) or 0})


def _one(
    field: str,
    key: str,
    absent: float | None,
    kind: type[int] | type[float],
    read: Callable[[Described, str, float | None], Any],
) -> GgufEntry:
    def write(model: ModelShape) -> Said:
        value = value_of(model, field)
        if value is None and absent not in (None, NEEDED):
            raise refused(model, f"with {field} None, but with {absent}")
        return {} if value is None else {key: kind(value)}

    return GgufEntry((field,), (key,), lambda file: {field: read(file, key, absent)}, write)


def value_of(model: ModelShape, field: str) -> Any:
    """The value of a field, or of one of a part. Raises UnknownArchitecture for a model without that part."""
    part, _, name = field.rpartition(".")
    here = getattr(model, part) if part else model
    if here is None:
        raise refused(model, f"without `{part}`")
    return getattr(here, name)


def write_only(write: Callable[[ModelShape], Said]) -> GgufEntry:
    """Keys that the converter's order puts elsewhere than the entry that reads them, which a docstring names."""
    return ignored_keys(write=write)


def ignored_keys(*keys: str, write: Callable[[ModelShape], Said] = lambda model: {}) -> GgufEntry:
    """Keys that a file may have, whatever they say: llama.cpp computes nothing by them, or what other keys say too."""
    return GgufEntry((), keys, lambda file: {}, write)


def expected(key: str, value: float | bool) -> GgufEntry:
    """A key that a file of the family may have, with one value. Reading another one raises UnknownArchitecture."""

    def read(file: Described) -> Fields:
        file.expect(key, value)
        return {}

    return GgufEntry((), (key,), read)


def always(key: str, value: float | bool) -> GgufEntry:
    """The same of a key that is also written."""
    return replace(expected(key, value), write=lambda model: {key: value})


def read_each(entries: Iterable[GgufEntry], file: Described) -> dict[str, Any]:
    """What several entries read."""
    return {field: value for entry in entries for field, value in entry.read(file).items()}


def write_each(entries: Iterable[GgufEntry], model: ModelShape) -> dict[str, Any]:
    """What several entries write."""
    return {key: value for entry in entries for key, value in entry.write(model).items()}


def refused(model: ModelShape, what: str) -> UnknownArchitecture:
    """The error about what llama.cpp does not compute of a model."""
    what = f"llama.cpp computes no `{model.architecture}` {what}"
    return UnknownArchitecture(what, do="Serve it with an engine that does: see --target.")


@dataclass(frozen=True)
class SameAs:
    """How a field of `GgufFamily.computed` follows: it is the same as another one, whose key errors about it name."""

    field: str

    def __call__(self, fields: Fields) -> Any:
        return fields[self.field]


# Sizes


def _read_layers_and_prediction(file: Described) -> Fields:
    return {"num_layers": file.decoder_layers(), "mtp_num_layers": file.prediction_layers()}


LAYERS = GgufEntry(
    ("num_layers",),
    ("block_count",),
    lambda file: {"num_layers": file.layers()},
    lambda model: {"block_count": model.num_layers},
)
LAYERS_AND_PREDICTION = GgufEntry(
    ("num_layers", "mtp_num_layers"),
    ("block_count", "nextn_predict_layers"),
    _read_layers_and_prediction,
    lambda model: {"block_count": model.num_layers + model.mtp_num_layers},
)
DECODER_LAYERS = replace(LAYERS, keys=LAYERS_AND_PREDICTION.keys, read=_read_layers_and_prediction)
"""Of a family whose layers of multi-token prediction are not written."""
PREDICTION_LAYERS = write_only(
    lambda model: {"nextn_predict_layers": model.mtp_num_layers} if model.mtp_num_layers else {}
)
"""What LAYERS_AND_PREDICTION reads too."""
NO_PREDICTION: Fields = {"mtp_num_layers": 0}

CONTEXT = integer("max_position_embeddings", "context_length")
WIDTH = integer("hidden_size", "embedding_length")
MLP_SIZE = integer("ffn_hidden_size", "feed_forward_length")
EPSILON = number("norm_epsilon", "attention.layer_norm_rms_epsilon")
LAYER_NORM_EPSILON = number("norm_epsilon", "attention.layer_norm_epsilon")
QKV_CLAMP = number("clip_qkv", "attention.clamp_kqv", None)


def _read_vocabulary(file: Described) -> Fields:
    rows = file.rows("token_embd.weight")
    file.expect("vocab_size", rows)
    return {"vocab_size": rows, "padded_vocab_size": rows}


VOCABULARY = GgufEntry(
    ("vocab_size", "padded_vocab_size"),
    ("vocab_size",),
    _read_vocabulary,
    lambda model: {"vocab_size": model.vocab_size},
)
TIED = GgufEntry(("tied_embeddings",), (), lambda file: {"tied_embeddings": not file.has("output.weight")})


CAUSAL = expected("attention.causal", True)
NO_EXPERTS = expected("expert_count", 0)
"""Of a family that is told from another one by it."""

ATTENTION_BIAS = GgufEntry(
    ("qkv_bias", "proj_bias"),
    (),
    lambda file: dict.fromkeys(("qkv_bias", "proj_bias"), file.has("blk.0.attn_q.bias")),
)
QKV_BIAS = GgufEntry(("qkv_bias",), (), lambda file: {"qkv_bias": file.has("blk.0.attn_q.bias")})
HAS_QK_NORMS = GgufEntry(("qk_layernorm",), (), lambda file: {"qk_layernorm": file.has("blk.0.attn_q_norm.weight")})
MLP_BIAS = GgufEntry(("mlp_bias",), (), lambda file: {"mlp_bias": file.has("blk.0.ffn_up.bias")})


# Attention

HEADS_KV = "attention.head_count_kv"


def _read_heads(file: Described) -> Fields:
    heads = file.count("attention.head_count", least=1)
    return {"num_attention_heads": heads, "num_query_groups": file.count(HEADS_KV, heads)}


HEADS = GgufEntry(
    ("num_attention_heads", "num_query_groups"),
    ("attention.head_count", HEADS_KV),
    _read_heads,
    lambda model: {"attention.head_count": model.num_attention_heads, HEADS_KV: model.num_query_groups},
)

EQUAL_HEADS = replace(HEADS, write=lambda model: {"attention.head_count": model.num_attention_heads})
"""Of families that have as many keys as queries."""


def head_size(file: Described) -> int:
    """Channels of a head."""
    usual = None
    if file.said("attention.key_length") is None:
        heads = file.count("attention.head_count", least=1)
        usual = file.count("embedding_length", least=heads) // heads
    return int(file.count("attention.key_length", usual, least=1))


def _read_head_size(file: Described) -> Fields:
    size = head_size(file)
    file.expect("attention.value_length", size)
    return {"kv_channels": size}


def _write_head_size(model: ModelShape) -> Said:
    return dict.fromkeys(("attention.key_length", "attention.value_length"), model.kv_channels)


HEAD_SIZE = GgufEntry(
    ("kv_channels",), ("attention.key_length", "attention.value_length"), _read_head_size, _write_head_size
)
UNUSUAL_HEAD_SIZE = replace(
    HEAD_SIZE,
    write=lambda model: (
        {} if model.kv_channels * model.num_attention_heads == model.hidden_size else _write_head_size(model)
    ),
)
"""Which is written only where it does not follow from others."""


def hidden_by_heads(fields: Fields) -> int:
    """The size of a head, where llama.cpp takes queries of all heads for as large as hidden states."""
    size: int = fields["hidden_size"] // fields["num_attention_heads"]
    return size


def every(number: int) -> Callable[[Fields], tuple[bool, ...]]:
    """Which layers have a window, or rotary embeddings: all but every fourth, if the number is 4."""
    return lambda fields: tuple((layer + 1) % number != 0 for layer in range(fields["num_layers"]))


def in_all_layers(value: bool) -> Callable[[Fields], tuple[bool, ...]]:
    """The same for each layer."""
    return lambda fields: (value,) * fields["num_layers"]


PATTERN = "attention.sliding_window_pattern"


def _read_windows(file: Described) -> Fields:
    """The layers that have the window, if the file lists them, or says that it is all but every so many."""
    if type(number := file.said(PATTERN)) is int and number > 0:
        return {"window_layers": every(number)({"num_layers": file.decoder_layers()})}
    windows = file.flags(PATTERN)
    return {"window_layers": tuple(windows)} if windows else {}


WINDOW = integer("sliding_window", "attention.sliding_window")
WINDOWS = GgufEntry(
    ("window_layers",),
    (PATTERN,),
    _read_windows,
    lambda model: {PATTERN: list(model.window_layers or (True,) * model.num_layers)},
)
NO_WINDOW: Fields = {"sliding_window": None, "window_layers": None}


# Layers of several kinds


def one_of(file: Described, key: str, numbers: Sequence[int]) -> int:
    """The number that all layers have of which it is not 0. Raises UnknownArchitecture if they have several."""
    several = sorted({number for number in numbers if number})
    if len(several) > 1:
        what = f"{file.architecture}.{key} is {shown(list(numbers))}, of several sizes"
        raise UnknownArchitecture(what, do="Start from the release.")
    return several[0] if several else 0


def read_some_heads(file: Described, groups: Sequence[int]) -> Fields:
    """Heads, and those of keys, which layers without attention have none of."""
    heads = file.count("attention.head_count", least=1)
    return {"num_attention_heads": heads, "num_query_groups": one_of(file, HEADS_KV, groups) or heads}
