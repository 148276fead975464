"""How a family's config.json says a ModelShape: entries that read and write the same keys.

A family lists its entries; several are common to many and stand here. Fields of a part of ModelShape (`PARTS` in
`model/model_fields.py`) are written with a dot. Reading raises DamagedCheckpoint where a key is missing or not of its
kind, and UnknownArchitecture for a setting that the family's table does not cover.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture, shown
from precisionctl.model.model_fields import Activation
from precisionctl.model.model_parts import LARGEST, MOST_LAYERS, check_size
from precisionctl.model.model_shape import ModelShape

Config = Mapping[str, Any]
Fields = Mapping[str, Any]
"""Values of ModelShape by field."""

NEEDED: Any = object()
"""Default of a key that must be there."""


@dataclass(frozen=True)
class Key:
    """One field under one key, or under an `older` one; `default` if both are absent or null. With a bool as its
    default the key is a switch. `absent` is the class's default for an absent key, if null means something else.
    `synonym` is another name that the class accepts for the key (`attribute_map`)."""

    field: str
    key: str
    default: Any = NEEDED
    older: str = ""
    absent: Any = None
    synonym: str = ""

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key, *(word for word in (self.older, self.synonym) if word))

    def read(self, config: Config) -> Fields:
        if self.synonym and self.synonym in config:
            config = {self.key: config[self.synonym], **config}
            synonyms({self.synonym: self.key}).read(config)
        value = config.get(self.key, self.absent)
        if value is None and self.older:
            value = config.get(self.older)
        if value is None:
            if self.default is NEEDED:
                raise DamagedCheckpoint(f"no `{self.key}`", do="Is the file whole?")
            value = self.default
        return {self.field: is_on({self.key: value}, self.key) if isinstance(self.default, bool) else value}

    def write(self, model: ModelShape) -> Config:
        part, _, field = self.field.rpartition(".")
        value = getattr(part_of(model, part) if part else model, field)
        return {} if value is None and self.absent is None else {self.key: value}


def part_of(model: ModelShape, part: str) -> Any:
    """A part of a model, such as `moe`, for keys that describe it. Raises UnknownArchitecture for a model without."""
    found = getattr(model, part)
    if found is None:
        what = f"a model without `{part}` is none that a config.json of {model.architecture} describes"
        raise UnknownArchitecture(what, do="Choose another family.")
    return found


@dataclass(frozen=True)
class Rule:
    """Fields and `keys` that functions make of one another; without them keys say nothing, or nothing is written.
    `keys_of` has the key for fields that `read` takes from one as they are."""

    keys: tuple[str, ...]
    read: Callable[[Config], Fields] = lambda config: {}
    write: Callable[[ModelShape], Config] = lambda model: {}
    keys_of: Mapping[str, str] = field(default_factory=dict)


def always(field: str, value: Any) -> Rule:
    """A field that every model of the family has, and no key says."""
    return Rule((), lambda config: {field: value})


def only(key: str, value: Any, field: str = "", means: Any = None, absent: Any = None) -> Rule:
    """A key for which the table covers only one `value`. An absent key stands for it, and so does null, unless the key
    is a switch that must be on.

    `field` of ModelShape then gets `means`. `absent` is the class's default for an absent key, if that is another
    value.
    """

    def read(config: Config) -> Fields:
        found = config.get(key, absent)
        null_is_off = value is True and key in config
        if found != value and (found is not None or null_is_off):
            raise UnknownArchitecture(
                f"no {config.get('model_type')} known here has {key}={shown(found)}",
                do=f"Its table was made for {key}={value!r}.",
            )
        return {field: means} if field else {}

    return Rule((key,), read, lambda model: {key: value})


def synonyms(words: Mapping[str, str]) -> Rule:
    """Other names that transformers' class accepts for keys of the table (`attribute_map`). If a file has both names,
    it is an accident which one the class uses, so both must have the same value. The other name alone is read only by a
    Key (`Key.synonym`) and a Reworded entry."""

    def read(config: Config) -> Fields:
        for word, key in words.items():
            if word in config and config[word] != config.get(key):
                what = f"{word} is {shown(config[word])} and {key}, which is the same, {shown(config.get(key))}"
                raise DamagedCheckpoint(what, do=f"Say {key} alone.")
        return {}

    return Rule(tuple(words), read)


@dataclass(frozen=True)
class Reworded:
    """An entry that also reads other words for its keys, synonyms of them, which `words` has by key. They are written
    in the place of keys only if published files have them (`published`)."""

    entry: "Entry"
    words: Mapping[str, str]
    published: bool

    @property
    def keys(self) -> tuple[str, ...]:
        return (*self.entry.keys, *(self.words[key] for key in self.entry.keys if key in self.words))

    def read(self, config: Config) -> Fields:
        said = {key: config[word] for key, word in self.words.items() if word in config}
        synonyms({word: key for key, word in self.words.items() if key in config}).read(config)
        with named(lambda key: self.words[key] if key in said else key):
            return self.entry.read({**config, **said})

    def write(self, model: ModelShape) -> Config:
        written = self.entry.write(model)
        return {self.words.get(key, key): value for key, value in written.items()} if self.published else written


Entry: TypeAlias = Key | Rule | Reworded
"""Some keys of config.json and the fields of ModelShape that they say, both ways: `read` looks at `keys` beside others'
that it only counts by, and `write` raises UnknownArchitecture for a model that these keys cannot describe."""


def reworded(entries: Iterable[Entry], words: Mapping[str, str], published: bool) -> tuple[Entry, ...]:
    """The entries, those of them Reworded whose keys have other words."""
    found: list[Entry] = []
    for entry in entries:
        own = {key: words[key] for key in entry.keys if key in words}
        found.append(Reworded(entry, own, published) if own else entry)
    return tuple(found)


@contextmanager
def named(word: Callable[[str], str]) -> Iterator[None]:
    """Let an error that begins with a name begin with another word for it."""
    try:
        yield
    except DamagedCheckpoint as error:
        name, _, rest = error.what.partition(" ")
        raise DamagedCheckpoint(f"{word(name)} {rest}", where=error.where, do=error.do) from error


def is_on(config: Config, key: str, absent: bool = False) -> bool:
    """Whether a switch is on; null is off. Raises DamagedCheckpoint for any other value: Python's truth would take
    `"no"` for on."""
    value = config.get(key, absent)
    if value not in (None, False, True):
        raise DamagedCheckpoint(f"{key} is {shown(value)}, not true or false")
    return bool(value)


def as_object(value: object, name: str) -> Config:
    """An object. Raises DamagedCheckpoint for anything else."""
    if not isinstance(value, Mapping):
        raise DamagedCheckpoint(f"{name} is {shown(value)}, not an object")
    return value


def section(config: Config, key: str) -> Config:
    """The object under a key; empty where it is not there or null. Raises as `as_object`."""
    return {} if config.get(key) is None else as_object(config[key], key)


def as_list(
    value: object, name: str, of: str, lengths: Container[int] = range(MOST_LAYERS + 1), kinds: tuple[type, ...] = ()
) -> list[Any]:
    """A list of one of these lengths, and of values of these kinds, if there are any; `of` is what a message calls
    them. Raises DamagedCheckpoint for anything else. It is not for settings of which a table knows one value alone: any
    other, a list or not, is an UnknownArchitecture."""
    if not isinstance(value, list) or len(value) not in lengths or (kinds and {*map(type, value)} - {*kinds}):
        raise DamagedCheckpoint(f"{name} is {shown(value)}, not a list of {of}")
    return value


def check_passed_over(config: Config, taken: Config) -> None:
    """Raise DamagedCheckpoint where keys that transformers' class passes over say something else than it takes."""
    for key, value in taken.items():
        if config.get(key) not in (value, None):
            what = f"{key} is {shown(config[key])}, and transformers, which passes over it, takes {shown(value)}"
            raise DamagedCheckpoint(what, do="Say it in the words of transformers' class, too.")


def size(config: Config, key: str, largest: int = LARGEST, absent: int | None = None) -> int:
    """A size that other fields are computed from. `absent` is the class's default for an absent key; null is no
    size."""
    value = config.get(key, absent)
    if value is None:
        raise DamagedCheckpoint(f"no `{key}`", do="Is the file whole?")
    check_size(value, key, largest)
    return int(value)


def count(config: Config, key: str, absent: int | None = None) -> int:
    """As `size`, but may be 0, or null for 0."""
    return 0 if config.get(key, absent) in (None, 0) else size(config, key, absent=absent)


def whole(config: Config, key: str, absent: int) -> int:
    """A whole number, which may be 0 or below; `absent` where it is not there or null."""
    value = absent if config.get(key) is None else config[key]
    if type(value) is not int:
        raise DamagedCheckpoint(f"{key} is {shown(value)}, not a whole number")
    return value


def one_or_none(config: Config, key: str, absent: int = 0) -> int:
    """How many layers of multi-token prediction a key says; `absent` where it is not there or null. Raises
    UnknownArchitecture for several."""
    number = absent if config.get(key) is None else config[key]
    if number not in (0, 1):
        do = "Known is one layer of multi-token prediction."
        raise UnknownArchitecture(f"{key}={shown(number)}", do=do)
    return int(number)


def layers(config: Config, key: str = "num_hidden_layers", absent: int | None = None) -> int:
    """Number of layers, small enough to list something for each."""
    return size(config, key, MOST_LAYERS, absent)


def heads(**absent: int) -> Rule:
    """Heads, query groups (null: as many as heads) and the size of a head (null: hidden_size / heads). `absent` has the
    class's defaults for absent keys, if these are not null."""

    def read(config: Config) -> Fields:
        config = {**absent, **config}
        number = size(config, "num_attention_heads")
        as_many = config.get("num_key_value_heads") is None
        said = config.get("head_dim") is not None
        return {
            "num_attention_heads": number,
            "num_query_groups": number if as_many else size(config, "num_key_value_heads"),
            "kv_channels": size(config, "head_dim") if said else size(config, "hidden_size") // number,
        }

    def write(model: ModelShape) -> Config:
        return {
            "num_attention_heads": model.num_attention_heads,
            "num_key_value_heads": model.num_query_groups,
            "head_dim": model.kv_channels,
        }

    return Rule(("num_attention_heads", "num_key_value_heads", "head_dim"), read, write)


HEADS = heads()

VOCABULARY = Rule(
    ("vocab_size",),
    lambda config: dict.fromkeys(("vocab_size", "padded_vocab_size"), size(config, "vocab_size")),
    lambda model: {"vocab_size": model.vocab_size},
)

LAYERS = Rule(
    ("num_hidden_layers",),
    lambda config: {"num_layers": layers(config)},
    lambda model: {"num_hidden_layers": model.num_layers},
)
SIZES: tuple[Entry, ...] = (
    LAYERS,
    Key("hidden_size", "hidden_size"),
    Key("ffn_hidden_size", "intermediate_size"),
    Key("max_position_embeddings", "max_position_embeddings", older="max_sequence_length"),  # the first Llama's
    VOCABULARY,
)

SIZES_BESIDE_MLP = tuple(entry for entry in SIZES if "intermediate_size" not in entry.keys)
"""Where `intermediate_size` is not a dense MLP's."""


def attention_bias(default: bool) -> Rule:
    """One switch for the attention's four linears; `default` where the key is absent."""

    def read(config: Config) -> Fields:
        return dict.fromkeys(("qkv_bias", "proj_bias"), is_on(config, "attention_bias", default))

    def write(model: ModelShape) -> Config:
        return {} if model.proj_bias == default else {"attention_bias": model.proj_bias}

    return Rule(("attention_bias",), read, write)


ATTENTION_BIAS = attention_bias(False)


def biases(key: str, default: bool) -> Rule:
    """One switch for the biases of all linears in layers; `default` where the key is absent."""
    return Rule(
        (key,),
        lambda config: dict.fromkeys(("qkv_bias", "proj_bias", "mlp_bias"), is_on(config, key, default)),
        lambda model: {key: model.mlp_bias},
    )


ALL_BIASES: tuple[Entry, ...] = (always("qkv_bias", True), always("proj_bias", True), always("mlp_bias", True))
"""Biases of all linears in layers, which no key says."""


def activation(key: str, names: Mapping[str, Activation], default: str | None = None) -> Rule:
    """An activation by one of the names that it goes by, the one to write first; absent, `default`."""

    def read(config: Config) -> Fields:
        name = default if config.get(key) is None else config[key]
        if not isinstance(name, str) or name not in names:
            raise UnknownArchitecture(
                f"no {config.get('model_type')} known here has {key}={shown(name)}", do=f"Known: {', '.join(names)}."
            )
        return {"activation": names[name]}

    def write(model: ModelShape) -> Config:
        return {key: next((name for name, meant in names.items() if meant == model.activation), None)}

    return Rule((key,), read, write)


GELU_TANH: Mapping[str, Activation] = dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), "gelu_tanh")

SILU = only("hidden_act", "silu", "activation", "silu")


def _read_causal(config: Config) -> Fields:
    if not config.get("is_causal", True):  # null too: any class of transformers takes it for false
        what = f"is_causal is {shown(config['is_causal'])}: attention to what follows, as in models of embeddings"
        raise UnknownArchitecture(what, do="Tables here are of models that see what stands before alone.")
    return {}


CAUSAL = Rule(("is_causal",), _read_causal)
"""What transformers' masks heed in the config.json of every family."""


TWO_CLASSES = Rule(("architectures",))
"""Of a family whose class has one name in published files, and another in transformers: either means the same model."""


def in_all_layers(field: str, value: bool) -> Rule:
    """A field with an entry for each layer, which is the same in all of them, and no key says."""
    return Rule((), lambda config: {field: (value,) * layers(config)})


EVERY_LAYER_SPARSE = in_all_layers("moe.layer_freq", True)
"""Experts in all layers."""


def tied(default: bool) -> Key:
    """Whether the output layer is the embedding; `default` where the key is absent."""
    return Key("tied_embeddings", "tie_word_embeddings", default)
