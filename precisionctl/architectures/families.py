"""Find a model's family: by the `model_type` of a config.json, or by what Megatron's arguments describe."""

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any

from precisionctl.architectures import tables
from precisionctl.architectures.config_keys import CAUSAL, Config, Key, Reworded, Rule, named
from precisionctl.architectures.megatron.expert_args import chooses_groups_by_nothing
from precisionctl.architectures.megatron.megatron_args import MEGATRON_ONLY, read_megatron_args
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.read_off import READ_OFF
from precisionctl.architectures.wrapped_architecture import can_be_wrapped, in_directory, wrapped
from precisionctl.architectures.wrappers import NO_WRAPPERS, is_wrapper, may_be_tied, text_config, wrapper_of
from precisionctl.discover import discover_names
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture, at, most_alike, shown
from precisionctl.model.model_fields import PARTS
from precisionctl.model.model_shape import ModelShape
from precisionctl.model.same_model import TENSORS, differences
from precisionctl.model.text_config import text_part
from precisionctl.model.untabled_model import UntabledModel
from precisionctl.param import EMBEDDING
from precisionctl.untrusted.safe_json import mapping_or_empty

_VERSION = re.compile(r"[\d._]+")

_FIRST = ("llama", "mistral", "qwen2", "youtu")
"""Families to take first where the same arguments describe several, as they do a Llama, a Yi and a Mistral without a
window, or a Youtu and a MiniCPM3 that multiplies nothing."""
_LAST = "bailing_moe", "bailing_moe_v2"
"""Behind the families that most checkpoints of the same arguments are of: dots1, GLM-4.5, Solar Open."""

_NO_TABLE = (
    "Without a table of its family a safetensors directory goes to Hugging Face's layout alone: `convert --to hf`, "
    "`export-inference` (docs/any_model.md). A table is one file (docs/families.md, Adding one)."
)


_FOR_NUMBERS = re.compile(r"For(?!CausalLM|ConditionalGeneration)[A-Z]|Reward")
"""Classes for another task than text: `LlamaForSequenceClassification`, `Qwen2ForRewardModel`."""

_OF_NUMBERS = (
    "`convert --to hf` and `export-inference` take it without a table (docs/any_model.md). For all else give the "
    "language model that it was trained from."
)

_OF_BARE = (
    "`convert --to hf`, and `export-inference` for one GPU of vLLM, SGLang, TensorRT-LLM or transformers, take it "
    "without a table, by its own names (docs/any_model.md). For all else, save it with AutoModelForCausalLM if its "
    "embeddings are tied; the output layer would be random otherwise."
)


@cache
def supported() -> dict[str, Architecture]:
    """Every table, those of plug-ins too, by `model_type`."""
    return discover_names(tables, "ARCHITECTURE", Architecture, lambda table: table.model_types)


def architecture_of(model_type: str) -> Architecture:
    """The table for `model_type`. Raises UnknownArchitecture."""
    if model_type not in supported():
        near = most_alike(model_type, supported(), 0.8)
        if near and _VERSION.sub("", near) == _VERSION.sub("", model_type):
            near = None  # another generation is another model, and no slip of the pen
        do = f"The nearest that is known is {near}. {_NO_TABLE}" if near else _NO_TABLE
        raise UnknownArchitecture(f"unsupported architecture `{model_type:.60}`", do=do)
    return supported()[model_type]


def table_of(model: ModelShape) -> Architecture:
    """The table of a model: its family's, in a wrapper with towers; or, of an UntabledModel, the one that is read off
    its directory."""
    if isinstance(model, UntabledModel):
        return READ_OFF
    family = architecture_of(model.architecture)
    return wrapped(family, model.wrapper) if model.wrapper else family


def read_model(config: Config, where: object = "config.json", stored: Collection[str] = ()) -> ModelShape:
    """The model that a config.json describes, in a directory with tensors of these names; where no table here has it,
    an UntabledModel. Raises DamagedCheckpoint as `from_hf_config` does."""
    try:
        model = from_hf_config(config, where)
        if model.wrapper:
            return in_directory(architecture_of(model.architecture), model, config, stored)
        if not stored:
            return model
        said = config.get("architectures")
        classes = [each for each in said if isinstance(each, str)] if isinstance(said, list) else []
        if head := next(filter(_FOR_NUMBERS.search, classes), None):
            what = f"a model with a head for rewards or classes ({head:.60}), which gives numbers and no tokens"
            raise UnknownArchitecture(what, where=where, do=_OF_NUMBERS)
        embeddings = architecture_of(model.architecture).names_of(EMBEDDING)
        if not any(name in stored for name in embeddings):
            # what a language model has before the names that a bare model has, such as `model.`
            parts = (name.partition(".") for name in embeddings)
            if within := next((f"{first}." for first, _, rest in parts if rest in stored), None):
                what = f"a bare model, as AutoModel saves it: its names lack `{within}`"
                why = UnknownArchitecture(what, where=where, do=_OF_BARE)
                return UntabledModel(model.architecture, config, why, within)
        return model
    except UnknownArchitecture as why:
        text = mapping_or_empty(text_part(config))
        kind = text.get("model_type")
        alone = config["model_type"] not in NO_WRAPPERS and not (is_wrapper(config) and _is_refused(text))
        if isinstance(kind, str) and kind in supported() and alone:
            do = f"Its text model is a {kind}, which has a table: docs/foreign.md saves it alone."
            why = UnknownArchitecture(why.what, where=where, do=f"{do} {why.do}")
        return UntabledModel(str(config["model_type"]), config, why)


def _is_refused(config: Config) -> bool:
    """Whether a family's table does not have the model of a config.json for a setting in it."""
    try:
        from_hf_config(config)
    except UnknownArchitecture:
        return True
    except DamagedCheckpoint:  # keys that a wrapper's text model need not say
        pass
    return False


def from_hf_config(config: Config, where: object = "config.json") -> ModelShape:
    """Read a config.json of transformers 4 or 5.

    Of a wrapper it is the text model. Raises DamagedCheckpoint where a key is missing or not of its kind, and
    UnknownArchitecture for a family or a setting that no table here has.
    """
    try:
        with at(where):
            return _described(config)
    except (TypeError, ValueError, ArithmeticError) as error:  # a value that cannot be looked at as what it should be
        raise DamagedCheckpoint(f"it describes no model: {shown(str(error))}", where=where) from error


def _described(config: Config) -> ModelShape:
    if "model_type" not in config:
        raise DamagedCheckpoint("no `model_type`", do="Is the file whole?")
    model_type = config["model_type"]
    if not isinstance(model_type, str):
        raise DamagedCheckpoint(f"model_type is {shown(model_type)}, not a name")
    if is_wrapper(config):
        text = text_config(config)
        CAUSAL.read(config)
        family = supported().get(text["model_type"])
        # one whose family has other names than wrappers change has no table either
        if family is None or not can_be_wrapped(family, wrapper := wrapper_of(config, family)):
            what = f"no table for a `{model_type}` around a `{text['model_type']:.60}`"
            raise UnknownArchitecture(what, do=_NO_TABLE)
        return dataclasses.replace(_described(text), wrapper=wrapper, tied_embeddings=may_be_tied(config))
    if why := NO_WRAPPERS.get(model_type):
        raise UnknownArchitecture(f"no table for a `{model_type}`: {why}", do=_NO_TABLE)
    fields: dict[str, Any] = {"architecture": model_type}
    for entry in (CAUSAL, *architecture_of(model_type).config):
        fields.update(entry.read(config))
    with named(lambda field: key_in(config, field)):
        return model_of_fields(fields)


def key_in(config: Config, field: str) -> str:
    """The key of a config.json that holds a field of ModelShape, one of a part with a dot (`moe.topk`); the field's own
    name if no single key does."""
    text = text_config(config) if is_wrapper(config) else config
    table = supported().get(str(text.get("model_type")))
    for entry in table.config if table else ():
        said = entry.entry if isinstance(entry, Reworded) else entry
        if isinstance(said, Key) and said.field == field:
            return next((key for key in entry.keys if key in text), field)
        if isinstance(said, Rule) and said.keys_of.get(field) in text:
            return said.keys_of[field]
    return field


def model_of_fields(given: Mapping[str, Any]) -> ModelShape:
    """The model with these values, those of its parts by names with a dot. Raises DamagedCheckpoint for what is no
    size, which begins with the name of the field."""
    fields = dict(given)
    biased = any(fields.get(bias) for bias in ("proj_bias", "mlp_bias"))
    fields.setdefault("add_bias_linear", biased)
    fields.setdefault("add_qkv_bias", bool(fields.get("qkv_bias")))
    fields |= {name: None for name in ("window_layers", "rope_layers") if all(fields.get(name) or ())}
    plain = {name: value for name, value in fields.items() if "." not in name}
    parts: dict[str, Any] = {}
    for part, kind in PARTS.items():
        prefix = f"{part}."
        values = {name.removeprefix(prefix): value for name, value in fields.items() if name.startswith(prefix)}
        parts[part] = kind(**values) if values else None
    return ModelShape(**plain, **parts)


def fields_of(model: ModelShape) -> dict[str, Any]:
    """What `model_of_fields` makes the model of."""
    parts = {part: here for part in PARTS if (here := getattr(model, part)) is not None}
    inner = {f"{part}.{name}": value for part, here in parts.items() for name, value in vars(here).items()}
    return {name: value for name, value in vars(model).items() if name not in PARTS} | inner


TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Of a config.json: the tokens that are named by their numbers."""


def to_hf_config(model: ModelShape, dtype: str) -> dict[str, Any]:
    """A config.json for a model that never had one. `dtype` is transformers' word, e.g. `bfloat16`.

    No token is named, as no tokenizer is known: a class's own may lie beyond the vocabulary, where transformers cannot
    build an embedding that is padded with one. Raises UnknownArchitecture for a model without a part that all of its
    family have.
    """
    table = architecture_of(model.architecture)
    config: dict[str, Any] = {
        "architectures": [table.model_types[model.architecture]],
        "model_type": model.architecture,
        "torch_dtype": dtype,
        **dict.fromkeys(TOKEN_KEYS),
    }
    for entry in table.config:
        config.update(entry.write(model))
    return config


def from_megatron_args(
    args: Mapping[str, Any], padded_vocab_size: int, where: object, architecture: str | None = None
) -> ModelShape:
    """The model that Megatron's arguments alone describe: one of `architecture`, else of the first family whose
    config.json can express it.

    Raises UnknownArchitecture where there is none, and DamagedCheckpoint where an argument is missing.
    """
    fitting = []
    for model in models_of_megatron_args(args, padded_vocab_size, where):
        if architecture in (None, model.architecture):
            return model
        fitting.append(model.architecture)
    if fitting:
        raise UnknownArchitecture(
            f"Megatron's arguments do not describe {architecture}: they fit {', '.join(fitting)}",
            where=where,
            do="Choose one of these.",
        )
    raise UnknownArchitecture("Megatron's arguments describe no family known here", where=where, do=_NO_TABLE)


def models_of_megatron_args(args: Mapping[str, Any], padded_vocab_size: int, where: object) -> Iterator[ModelShape]:
    """The model as one of each family that it fits: a Llama, a Yi, a Mistral without a window are the same. It fits if
    writing and reading the family's config.json gives it back."""
    model = read_megatron_args(args, padded_vocab_size, where)
    if model.moe and chooses_groups_by_nothing(model.moe):
        what = f"moe_router_group_topk={model.moe.group_topk} beside moe_router_topk={model.moe.topk}"
        do = "Megatron-Core chooses among groups by topk // group_topk of their scores, here by none."
        raise UnknownArchitecture(what, where=where, do=do)
    for model_type in (*_FIRST, *sorted(supported().keys() - {*_FIRST, *_LAST}), *_LAST):
        try:
            told = from_hf_config(to_hf_config(dataclasses.replace(model, architecture=model_type), ""))
            told = dataclasses.replace(told, **{field: getattr(model, field) for field in MEGATRON_ONLY})
        except (DamagedCheckpoint, UnknownArchitecture):  # a setting or a part that the family does not have
            continue
        mine = model
        if told.moe and model.moe:  # Megatron has no argument for how a group of experts is scored; families differ
            mine = dataclasses.replace(model, moe=dataclasses.replace(model.moe, group_scores=told.moe.group_scores))
        if all(getattr(told, field) == getattr(mine, field) for field in TENSORS) and not differences(told, mine):
            yield told
