"""A directory held against what an inference engine loads."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from precisionctl.checkpoints.base import Chunked, Reader, read_tensor
from precisionctl.engines.base import Engine
from precisionctl.engines.rule import EngineRule, Finding
from precisionctl.errors import UnknownFormat

NO_CODES = EngineRule(
    "nothing but config.json was checked; export-inference writes FP8 weights", "precisionctl verify", fatal=False
)
"""What a directory without codes breaks: the engine serves it as it is, and `verify` was asked of an export."""


@runtime_checkable
class CheckableDirectory(Protocol):
    """A Reader that shows all that an engine sees: config.json, hf_quant_config.json `beside` it if there is one, and
    every tensor as it is stored, scales too."""

    @property
    def config(self) -> Mapping[str, Any]: ...
    @property
    def input_scales(self) -> Mapping[str, float]: ...
    @property
    def stored(self) -> Chunked: ...
    @property
    def beside(self) -> Mapping[str, Any] | None: ...


def check(reader: Reader, engine: Engine, ranks: int = 1) -> list[Finding]:
    """The rules of an engine that a Hugging Face directory breaks, served on `ranks` GPUs. Raises UnknownFormat for
    what is no such directory."""
    if not isinstance(reader, CheckableDirectory):
        raise UnknownFormat(
            f"{engine.title} loads Hugging Face directories, this is {reader.container}",
            where=reader.path,
            do=f"Make one: precisionctl export-inference {reader.path} DST --target {engine.name}",
        )
    stored = reader.stored
    found = engine.check(reader.config, stored.specs, lambda name: read_tensor(stored, name), ranks, reader.beside)
    if not reader.encodings:
        found.append(Finding("the directory", "no weight is codes", NO_CODES))
    return found
