"""A directory held against what an inference engine loads."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.chunks import Chunked, read_tensor
from precisionctl.engines.base import Engine
from precisionctl.engines.rules.rule import EngineRule, Finding
from precisionctl.errors import RecipeError, UnknownFormat
from precisionctl.planning.served_model import served
from precisionctl.quant_methods.coded_weights import AS_VALUES, quant_method_of, recognise

NO_CODES = EngineRule(
    "an export has codes, which `precisionctl export-inference` makes, in FP8 or four bits. Engines take values as "
    "they are: of the rules only those of config.json were checked",
    "precisionctl verify",
    fatal=False,
)
"""What a directory without codes breaks: the engine serves it as it is, and `verify` was asked of an export."""


@runtime_checkable
class CheckableDirectory(Protocol):
    """A Reader of a Hugging Face directory, which shows all that an engine sees: config.json, hf_quant_config.json if
    there is one, and every tensor as it is stored, scales too."""

    @property
    def path(self) -> Path: ...
    @property
    def config(self) -> Mapping[str, Any]: ...
    @property
    def stored(self) -> Chunked: ...
    @property
    def hf_quant_config(self) -> Mapping[str, Any] | None: ...


def check(reader: Reader, engine: Engine, ranks: int = 1, *, expert_parallel: bool = False) -> list[Finding]:
    """The rules of an engine that a Hugging Face directory breaks, served on `ranks` GPUs, with experts whole if
    `expert_parallel`. Raises UnknownFormat for what is no such directory, RecipeError for codes that there are no rules
    for: that says nothing of whether the engine loads them."""
    if not isinstance(reader, CheckableDirectory):
        raise UnknownFormat(
            f"{engine.title} loads Hugging Face directories, this is {reader.container}",
            where=reader.path,
            do=f"Make one: precisionctl export-inference {shlex.quote(str(reader.path))} DST --target {engine.name}",
        )
    if (name := quant_method_of(reader.config)) in AS_VALUES:
        raise _no_rules(reader, engine, f"codes of {name}")
    method = recognise(reader.config)
    spelling = method.spelling if method else None
    ruled = set(engine.formats(method.name)) if method else set()
    ruled |= {form.name for form in spelling.four_bits.values()} if spelling else set()
    ruled |= {"FP8"} if ruled else set()
    unruled = {each: name for each in reader.encodings if (name := reader.specs[each].codes_name) not in ruled}
    if unruled and not engine.takes_mxfp4(reader.config, unruled):
        raise _no_rules(reader, engine, f"{next(iter(unruled.values()))} as this directory stores it")
    stored = reader.stored
    found = engine.check(
        reader.config,
        stored.specs,
        lambda name: read_tensor(stored, name),
        served(reader.model, reader.specs, ranks, expert_parallel=expert_parallel),
        reader.hf_quant_config,
    )
    if not reader.encodings:
        dtypes = sorted({spec.stored_dtype for spec in reader.specs.values() if len(spec.shape) > 1})
        found.append(Finding("the directory", f"no weight is codes: all are {' or '.join(dtypes)}", NO_CODES))
    return found


def _no_rules(reader: Reader, engine: Engine, codes: str) -> RecipeError:
    return RecipeError(
        f"there are no rules of {engine.title} for {codes}, so nothing was checked",
        where=reader.path,
        do=f"{engine.title} may load it or not. `convert --to hf` makes a directory in BF16 of it, and "
        f"`export-inference --target {engine.name}` codes with rules.",
    )
