"""Parameter types of the command line, and options that several commands share."""

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from decimal import Decimal
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from precisionctl.checkpoints.hf_directory.hub import HubName
from precisionctl.errors import DataError, UnknownFormat, meant, nearest_path
from precisionctl.megatron_flags import FIRST_LAST, FLAGS, PARALLEL_SIZES, as_overrides

TOO_FAR = 3
"""Exit code of `compare` where a run is further from the first than its gate allows."""

NEW_PATH = click.Path(path_type=Path)
POSITIVE = click.IntRange(min=1)
Callback = Callable[..., Any]


class ExistingPath(click.Path):
    """A path that exists. One that does not is answered with an unfinished command that would make it, or the one that
    was perhaps meant."""

    name = "path"

    def __init__(self, **kinds: bool) -> None:
        super().__init__(exists=True, path_type=Path, **kinds)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not Path(value).exists():
            self.check_unfinished(value, param, ctx)
            self.fail(f"'{value}': no such file or directory. {nearest_path(Path(value))}".rstrip(), param, ctx)
        return super().convert(value, param, ctx)

    def check_unfinished(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> None:
        """Fail for the result of a command that has not finished it."""
        from precisionctl.checkpoints.output import GOES_ON, UNFINISHED, is_unfinished

        if is_unfinished(Path(value)):
            self.fail(f"'{value}': {UNFINISHED}. {GOES_ON}", param, ctx)


class StateFile(ExistingPath):
    """A file of FP8 state."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if Path(value).is_dir():
            advice = "Give a file of `calibrate` or a recorder. Without one, a checkpoint's own state is used."
            self.fail(f"'{value}': a directory. {advice}", param, ctx)
        return super().convert(value, param, ctx)


class DataPath(click.Path):
    """A path of data, or a name: of Megatron's data (two files), of a split, or of a data set on the Hub. If nothing is
    there, the command fails before it imports PyTorch and reads a checkpoint."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from precisionctl.trainer.data.rows import check_path

        try:
            check_path(value)
        except DataError as error:
            self.fail(f"'{value}': {error.what}. {error.do}".rstrip(), param, ctx)
        return super().convert(value, param, ctx)


class NewFile(click.Path):
    """A file to write at the end of a command. As the command may take long, it is checked at the start whether the
    file can be written."""

    name = "path"

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        above = Path(value).absolute().parent
        if not above.is_dir():
            self.fail(f"'{value}': there is no directory {Path(value).parent}.", param, ctx)
        if not os.access(above, os.W_OK):
            self.fail(f"'{value}': {Path(value).parent} cannot be written to.", param, ctx)
        return super().convert(value, param, ctx)


class CheckpointPath(ExistingPath):
    """A path that exists, or a HubName, which the command downloads when it begins."""

    def __init__(self, *, weights: bool = True) -> None:
        super().__init__()
        self.weights = weights

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        text = str(value)
        if Path(text).exists():
            return super().convert(value, param, ctx)
        self.check_unfinished(value, param, ctx)
        try:
            return HubName.read(text, weights=self.weights)
        except UnknownFormat as error:
            self.fail(f"'{text}': {error.what}. {error.do}", param, ctx)


CHECKPOINT, TOKENIZER, DATA = CheckpointPath(), CheckpointPath(weights=False), DataPath()
RUN, STATE, NEW_FILE = ExistingPath(), StateFile(), NewFile()


class Choice(click.Choice[str]):
    """One of several words. Another is answered with all of them, and the one that was perhaps meant, or, for words
    that are known `elsewhere`, with the options or the command that stand for them."""

    def __init__(self, choices: Sequence[str], elsewhere: Mapping[str, str] = MappingProxyType({})) -> None:
        super().__init__(choices)
        self.elsewhere = elsewhere

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        advice = self.elsewhere.get(str(value).lower()) or meant(str(value), self.choices)
        return f"{super().get_invalid_choice_message(value, ctx)} {advice}".rstrip()


class EngineName(click.ParamType[str]):
    """The name of an export's target: a bundled engine, or one from another package. Commands look it up."""

    name = "engine"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from precisionctl.commands.request import OTHER_TARGETS
        from precisionctl.engines.base import engines

        return _beginning(incomplete, [*engines(), *OTHER_TARGETS])

    def get_missing_message(self, param: click.Parameter, ctx: click.Context | None) -> str | None:
        help = param.help if isinstance(param, click.Option) else None
        return f"Give {help}" if help else None


class RecipeName(click.ParamType[str]):
    """A bundled recipe by name, or a TOML file. Commands look it up."""

    name = "text"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from precisionctl.recipe import bundled_recipes

        return [*_beginning(incomplete, bundled_recipes()), CompletionItem(incomplete, type="file")]


class Override(click.ParamType[str]):
    """A key of a recipe and its value, which are checked before a command imports PyTorch."""

    name = "override"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        from precisionctl.recipe import read_override

        read_override(str(value))
        return str(value)


class FamilyName(click.ParamType[str]):
    """A family by its model_type. Commands look it up."""

    name = "model_type"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from precisionctl.architectures.families import supported

        return _beginning(incomplete, supported())


def _beginning(letters: str, names: Iterable[str]) -> list[CompletionItem]:
    return [CompletionItem(name) for name in sorted(names) if name.startswith(letters)]


class Percent(click.ParamType[float]):
    """A ratio, written `1%`. A bare number is refused: whoever writes `1` may mean a hundredth or the whole."""

    name = "percent"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+) ?%", str(value))
        if not found:
            self.fail(f"{value!r} is not a percentage such as 1%", param, ctx)
        return float(found[1]) / 100


class Size(click.ParamType[int]):
    """A number of bytes, written `5GB` or without a unit; units are powers of 1000."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?) ?([kMGT]?)B?", str(value))
        size = int(Decimal(found[1]) * 1000 ** " kMGT".index(found[2] or " ")) if found else 0
        if not size:
            self.fail(f"{value!r} is not a size such as 5GB", param, ctx)
        return size


class Duration(click.ParamType[timedelta]):
    """A duration in hours, minutes and seconds, written `3:55:00`."""

    name = "h:mm:ss"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        found = re.fullmatch(r"(\d{1,5}):([0-5]\d):([0-5]\d)", str(value))
        if not found:
            self.fail(f"{value!r} is not hours, minutes and seconds such as 3:55:00", param, ctx)
        hours, minutes, seconds = map(int, found.groups())
        return timedelta(hours=hours, minutes=minutes, seconds=seconds)


json_option = click.option("--json", "json_wanted", is_flag=True, help="Print JSON on stdout instead of tables.")
grouped_columns_option = click.option(
    "--grouped-columns",
    type=Choice(["gemm", "role"]),
    help="Order of the experts' FP8 state, if it cannot be detected: gemm for TE 2.3 or newer, role for 1.9 to 2.2.",
)
architecture_option = click.option(
    "--architecture",
    type=FamilyName(),
    metavar="MODEL_TYPE",
    help="Family (model_type) of a Megatron checkpoint that does not name it.",
)
max_shard_size_option = click.option(
    "--max-shard-size", type=Size(), default="5GB", show_default=True, help="Maximum size of a safetensors file."
)
set_option = click.option(
    "--set",
    "overrides",
    type=Override(),
    metavar="KEY=VALUE",
    multiple=True,
    help="Override a key of the recipe. Can be repeated.",
)
reference_option = click.option(
    "--reference",
    type=CHECKPOINT,
    help="Hugging Face directory of the same model, for config and tokenizer. For a LoRA adapter: its base model.",
)
fp8_state_option = click.option(
    "--fp8-state",
    type=STATE,
    help="FP8 state from this file of calibrate or of a recorder.",
)
include_option = click.option(
    "--include",
    multiple=True,
    metavar="PATTERN",
    help="Also encode linears whose names match, e.g. 'model.visual.*', whatever the run or --recipe keeps in BF16.",
)
exclude_option = click.option(
    "--exclude",
    multiple=True,
    metavar="PATTERN",
    help="Do not encode linears whose names match, e.g. '*.shared_experts.*'.",
)
iteration_option = click.option(
    "--iteration",
    type=int,
    help="Iteration (step) to read of several in a directory. Default: the one that its tracker names, or the newest.",
)


def is_given(parameter: str) -> bool:
    """Whether the user gave an option of the running command, which has a default."""
    return click.get_current_context().get_parameter_source(parameter) is not ParameterSource.DEFAULT


def megatron_fp8_options(command: Callback) -> Callback:
    """Add Megatron's FP8 flags, hidden in the help. The command gets them in `megatron`, as the recipe overrides that
    they stand for."""

    @wraps(command)
    def with_megatron(*arguments: Any, **named: Any) -> Any:
        first_last = named.pop(FIRST_LAST.parameter)
        given = {flag.name: named.pop(flag.parameter) for flag in FLAGS}
        given = {name: value for name, value in given.items() if value is not None}
        overrides = as_overrides(given, first_last, named.get("precision"))
        return command(*arguments, megatron=overrides, **named)

    for flag in FLAGS:
        kind = Choice([*flag.words]) if flag.words else click.INT
        text = f"Megatron's: {' and '.join(flag.keys)}."
        with_megatron = click.option(flag.name, flag.parameter, type=kind, hidden=True, help=text)(with_megatron)
    switch = click.option(
        FIRST_LAST.name,
        FIRST_LAST.parameter,
        is_flag=True,
        hidden=True,
        help="Megatron's: first and last layer in BF16.",
    )
    return switch(with_megatron)


@dataclass(frozen=True)
class Writing:
    """The options of every command that writes a checkpoint."""

    workers: int
    verify: bool
    dry_run: bool
    restart: bool
    json_wanted: bool


restart_option = click.option(
    "--restart", is_flag=True, help="Start again: discard what an unfinished run of this command left."
)


def writing_options(command: Callback) -> Callback:
    """Add the options of every command that writes a checkpoint. The command gets them in `how`, a `Writing`."""
    options = (
        click.option(
            "--workers", type=POSITIVE, default=2, show_default=True, help="Number of processes that copy and cast."
        ),
        click.option(
            "--verify", is_flag=True, help="Read the result back and compare it with the source before it appears."
        ),
        click.option("--dry-run", is_flag=True, help="Show the plan and write nothing."),
        restart_option,
        json_option,
    )

    @wraps(command)
    def with_how(*arguments: Any, **named: Any) -> Any:
        how = Writing(**{field.name: named.pop(field.name) for field in fields(Writing)})
        return command(*arguments, how=how, **named)

    for option in reversed(options):
        with_how = option(with_how)
    return with_how


def parallelism_options(command: Callback) -> Callback:
    """Add the options of Megatron's parallel sizes. The command gets them in `parallelism`, a `Parallelism`."""
    sizes = {
        "tensor": (1, "Tensor-parallel size of the result."),
        "pipeline": (1, "Pipeline-parallel size of the result."),
        "virtual": (1, "Virtual stages per pipeline rank."),
        "first_layers": (None, "Layers on the first pipeline rank. Default: as on the others."),
        "last_layers": (None, "Layers on the last pipeline rank. Default: as on the others, or the rest."),
        "expert": (1, "Expert-parallel size of the result."),
        "expert_tensor": (None, "Tensor-parallel size of the experts. Default: --tp."),
    }

    @wraps(command)
    def with_parallelism(*arguments: Any, **named: Any) -> Any:
        from precisionctl.param import Parallelism

        parallelism = Parallelism(**{field: named.pop(field) for field in sizes})
        return command(*arguments, parallelism=parallelism, **named)

    for field, (default, text) in reversed(sizes.items()):
        flag, _ = PARALLEL_SIZES[field]
        with_parallelism = click.option(flag, field, type=POSITIVE, default=default, help=text)(with_parallelism)
    return with_parallelism
