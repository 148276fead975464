"""The model card of an exported directory, README.md: what it is, how it is served, where it is from, how good it is.

It names no path and no time, so equal exports of one name have equal cards.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from precisionctl import __version__
from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.output import replace_file
from precisionctl.conversion.manifest import fingerprint, torch_version
from precisionctl.errors import OutputError, RecipeError
from precisionctl.model.untabled_model import UntabledModel
from precisionctl.sizes import counted, size
from precisionctl.untrusted.safe_files import has_file, read_file

NAME = "README.md"

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_START, _END = "<!-- quality -->\n", "<!-- end of quality -->\n"
_UNMEASURED = (
    "None was measured. `precisionctl eval . --data TEXT --against SOURCE --card`, in this directory, writes it here."
)
INPUTS_BY_ENGINE = "Input scales are made by the engine."
INPUTS_IN_BF16 = "Inputs are not quantized."
"""What the row `input scales` of a card says where none are stored."""


@dataclass(frozen=True)
class Card:
    """The contents of the model card of an export called `name`.

    `title` is the engine's name in a sentence, `tag` its tag on the Hub, and `command` the command that serves the
    model, empty where none does. `facts` are rows of a table. `quantized` are the names of weights in FP8, or what
    `codes` says, and `kept` of modules that are not. `base_model` is the source's name on the Hub. Raises RecipeError
    for a `base_model` that the Hub would not accept.
    """

    name: str
    title: str
    tag: str
    command: str
    facts: Mapping[str, str]
    quantized: Sequence[str]
    kept: Sequence[str]
    base_model: str | None = None
    codes: str = "FP8"

    def __post_init__(self) -> None:
        if self.base_model is not None and not _HUB_NAME.fullmatch(self.base_model):
            raise RecipeError(f"{self.base_model!r:.80} is not a name on the Hub", do="Give one such as org/model.")

    def text(self, reader: Reader) -> bytes:
        """The bytes of the file, for an export of `reader`."""
        return "\n".join(self._lines(reader)).encode(errors="backslashreplace")  # of a name that is not UTF-8

    def _lines(self, reader: Reader) -> Iterator[str]:
        model = reader.model

        # what the Hub reads
        yield "---"
        if self.base_model:
            yield from (f"base_model: {self.base_model}", "base_model_relation: quantized")
        if not (model.wrapper or isinstance(model, UntabledModel)):  # the Hub tells others by the class in config.json
            yield "pipeline_tag: text-generation"
        codes = self.codes.lower().split(" and ")
        yield from ("tags:", *(f"- {tag}" for tag in dict.fromkeys([*codes, self.tag, "precisionctl"])))
        yield from ("quantized_by: precisionctl", "quantization:")
        for name, value in self.facts.items():
            text = _plain(value).replace("\\", " ").replace('"', "'")
            yield f'  {name.lower().replace(" ", "_")}: "{text}"'
        yield from ("---", "", f"# {_plain(self.name)}", "")

        what = f"A `{_plain(model.model_type)}` in {self.codes}, for {self.title}."
        if self.command:
            yield from (f"{what} In the directory above this one:", "", "```", self.command, "```")
        else:
            yield f"{what} {self.title} does not load it."
        yield from ("", "| | |", "|---|---|")
        yield from (f"| {name} | {_plain(value)} |" for name, value in self.facts.items())
        nbytes = sum(file.stat().st_size for file in reader.files)
        when = "" if reader.iteration is None else f", iteration {reader.iteration}"
        yield f"| source | {reader.container}{when}, {size(nbytes)} in {counted(len(reader.files), 'file')} |"
        yield f"| its fingerprint (SHA-256 of names, sizes and config.json) | `{fingerprint(reader)}` |"
        yield f"| made by | precisionctl {__version__}, torch {torch_version()}; see `precisionctl/manifest.json` |"

        yield from ("", f"## What is {self.codes}", "")
        patterns = Counter(re.sub(r"\d+(?=[.\]])", "*", name) for name in self.quantized)
        yield from (f"- `{_plain(pattern)}` ({count})" for pattern, count in patterns.items())
        yield from ("", "In higher precision, besides norms and biases:", "")
        yield from (f"- `{_plain(name)}`" for name in self.kept)
        yield from ("", "## Quality", "", _START + _UNMEASURED + "\n" + _END)


_MAX_BYTES = 4_000_000
"""Largest card that is read."""


def write_quality(directory: Path, lines: Iterable[str]) -> None:
    """Write measurements into the card of an exported directory. Raises OutputError as `around_quality`."""
    before, after = around_quality(directory)
    measured = "".join(f"- {_plain(line)}\n" for line in lines)
    replace_file(directory / NAME, before + measured + after)


def around_quality(directory: Path) -> tuple[str, str]:
    """What the card of an exported directory has before its measurements, and after them. Raises OutputError if it has
    no card of ours."""
    path = directory / NAME
    text = read_file(path, directory, _MAX_BYTES).decode(errors="replace") if has_file(path, directory) else ""
    before, start, rest = text.partition(_START)
    _, end, after = rest.partition(_END)
    if not start or not end:
        raise OutputError("there is no model card that an export wrote", where=path, do="Leave --card out.")
    return before + start, end + after


def path_in_command(name: str) -> str:
    """How a command should name the exported directory: `./name`, to be run in the directory above it, or `.`, to be
    run inside it, if the name would need quotes."""
    return f"./{name}" if re.fullmatch(r"[\w.+-]+", name) else "."


def _plain(text: str) -> str:
    """Text on one line, without characters that have a meaning in Markdown or HTML."""
    return re.sub(r"[`<>|\x00-\x1f\x7f]", " ", text)
