"""Shared by all commands: help with examples and groups of options, every error in one form, how much is told, and
results as JSON on stdout."""

import errno
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import click

from precisionctl.checkpoints.hf_directory.hub import HubName
from precisionctl.errors import (
    GO_ON,
    NOT_BEGUN,
    UNREAD,
    DamagedCheckpoint,
    EnvironmentProblem,
    PrecisionctlError,
    RecipeError,
    SystemProblem,
    UnexpectedError,
    meant,
    on_stdout,
    one_line,
)
from precisionctl.signals import name_of
from precisionctl.sizes import listed
from precisionctl.trainer.measure.json_numbers import finite

SCHEMA_VERSION = 1
"""Of what `--json` prints (docs/json.md). It grows when a key goes or means something else; keys may be added."""

_JSON, _DEBUG, _QUIET, _VERBOSE, _NAMES = (
    f"precisionctl.{word}" for word in ("json", "debug", "quiet", "verbose", "names")
)
"""Keys of click's `ctx.meta`, which the group shares with its commands: which of these options are given, and the
HubName of each parameter that has one."""

_GENERAL = ("--json", "--quiet", "--verbose", "--debug", "--help")
"""Options of all commands, last in the help."""

_PATH_ERRORS = {
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.EISDIR,
    errno.EEXIST,
}
"""Errors of the system for which a wrong path, or a lack of rights, is to blame."""

_SHOWS_WHERE = "`precisionctl --debug ...` shows where."


def general_options() -> list[click.Parameter]:
    """Options of the group and of every command: people write them before the command, or after it."""

    def remember(key: str) -> Callable[[click.Context, click.Parameter, bool], None]:
        def callback(ctx: click.Context, _option: click.Parameter, wanted: bool) -> None:
            ctx.meta[key] = wanted or ctx.meta.get(key, False)

        return callback

    def switch(names: list[str], key: str, text: str) -> click.Option:
        return click.Option(names, is_flag=True, expose_value=False, callback=remember(key), help=text)

    return [
        switch(["-q", "--quiet"], _QUIET, "Print only errors, and JSON if you ask for it."),
        switch(["-v", "--verbose"], _VERBOSE, "Print details of each step on stderr."),
        switch(["--debug"], _DEBUG, "Show the traceback of an error."),
    ]


class Command(click.Command):
    """A command whose help has its options in `sections`, by title, and ends with `examples` (what follows
    `precisionctl` in a shell). Options in no section come last. Given the command's parameters, `headers_do` says
    whether it reads no more than the headers of weights, so that only those are downloaded from the Hub."""

    def __init__(
        self,
        *arguments: Any,
        examples: Sequence[str],
        sections: Mapping[str, Sequence[str]] | None = None,
        headers_do: Callable[[Mapping[str, Any]], bool] = lambda given: False,
        **named: Any,
    ) -> None:
        super().__init__(*arguments, **named)
        self.examples, self.sections, self.headers_do = examples, sections or {}, headers_do
        self.params += general_options()

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        rows = {option.opts[-1]: row for option in options if (row := option.get_help_record(ctx))}
        placed = {*_GENERAL, *(flag for flags in self.sections.values() for flag in flags)}
        rest = {"Options": [flag for flag in rows if flag not in placed]}
        for title, flags in {**self.sections, **rest, "General": _GENERAL}.items():
            if shown := [rows[flag] for flag in flags if flag in rows]:
                with formatter.section(title):
                    formatter.write_dl(shown)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Examples"):
            for example in self.examples:
                formatter.write(f"{'':{formatter.current_indent}}precisionctl {example}\n")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with on_stdout():  # where `--help` is printed
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        with _verbosity(quiet=ctx.meta[_QUIET], verbose=ctx.meta[_VERBOSE]):
            _download(ctx, headers=self.headers_do(ctx.params))
            return super().invoke(ctx)


def _download(ctx: click.Context, *, headers: bool) -> None:
    """Download the checkpoints that parameters name on the Hub; with `headers`, only the headers of their weights. This
    is done last, when all options have been checked."""
    names = ctx.meta[_NAMES] = {key: value for key, value in ctx.params.items() if isinstance(value, HubName)}
    if not names:
        return
    from precisionctl import console
    from precisionctl.conversion.ranks import place_among_ranks
    from precisionctl.sizes import size

    for key, name in names.items():
        ctx.params[key] = name.download(
            headers=headers,
            progress=not ctx.meta[_QUIET],
            several=place_among_ranks() is not None,
            on_size=lambda nbytes, name=name: console.note(f"Downloading {name}, {size(nbytes)}"),
        )


def repository_of_source(ctx: click.Context) -> str | None:
    """The repository that a command's `source` names; None if it is a path."""
    name: HubName | None = ctx.meta[_NAMES].get("source")
    return name.repo if name else None


@contextmanager
def _verbosity(*, quiet: bool, verbose: bool) -> Iterator[None]:
    """A context that prints less if `quiet`, and shows the package's log if `verbose`."""
    with ExitStack() as until:
        if quiet:
            from precisionctl import console

            until.enter_context(console.quietly())  # an error is shown after it
        if verbose:
            log, handler = logging.getLogger("precisionctl"), logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s", "%H:%M:%S"))
            log.addHandler(handler)
            log.setLevel(logging.INFO)
            until.callback(log.removeHandler, handler)
            until.callback(log.setLevel, logging.NOTSET)
        yield


@contextmanager
def kept_when_stopped(begun: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Inside, what is done is kept, and the same command continues: so say that if Ctrl-C or SIGTERM stops it, and exit
    with GO_ON; unless it has not `begun`, and is only planning."""
    try:
        yield
    except KeyboardInterrupt as stop:
        if not begun():
            raise
        say_stopped("Stopped. What is done is kept; the same command continues.", kept=True, by=stop)
        raise click.exceptions.Exit(GO_ON) from None


def is_left(partial: Path) -> bool:
    """Whether an unfinished command has left anything in its partial directory, beside a lock."""
    return any(file.stat().st_size for file in partial.rglob("*") if file.is_file())


def say_stopped(line: str, *, kept: bool, by: KeyboardInterrupt) -> None:
    """Say that a signal has stopped the command; with `--json`, on stdout too, as an object that says whether a part is
    `kept`."""
    click.echo(line, err=True)
    context = click.get_current_context(silent=True)
    if context.meta[_JSON] if context else "--json" in sys.argv:  # no context: while modules were imported
        print_json({"stopped": name_of(by), "kept": kept})


class Commands(click.Group):
    """A click group that shows every error in one way and exits with 1, or with 2 where what was asked for makes no
    sense; `--debug` shows the traceback. With `--json` the error is on stdout, too, as an object."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.params += general_options()

    def main(self, *arguments: Any, **options: Any) -> Any:
        # in place of standard streams that the shell closed (`>&-`): their file descriptors are free, so the next file
        # that is opened would get one of them, and with it all that is printed
        for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
            if getattr(sys, name) is None:
                setattr(sys, name, open(os.devnull, mode))
        return super().main(*arguments, **options)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_JSON] = "--json" in args  # known before any option is found to be wrong
        with _errors_shown(ctx), on_stdout():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        with _errors_shown(ctx):
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # in the order of their registration, not of the alphabet


@contextmanager
def _errors_shown(ctx: click.Context) -> Iterator[None]:
    """Inside, every error ends the program as `Commands` says."""
    try:
        with _wrong_usage(ctx):
            yield
    except (click.ClickException, click.exceptions.Exit, click.Abort):
        raise  # click handles these itself
    except BrokenPipeError:  # `| head` has read enough
        # what is still to be printed goes to /dev/null: at the end Python would try once more, and complain
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # one that is no file, as in tests
                os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        ctx.exit(UNREAD)
    except KeyboardInterrupt as stop:
        say_stopped(NOT_BEGUN, kept=False, by=stop)
        ctx.exit(GO_ON)
    except Exception as error:
        if ctx.meta.get(_DEBUG):
            raise
        from precisionctl import console

        ours = as_our_error(error)
        console.show_error(ours)
        if ctx.meta[_JSON]:
            kind = type(ours).__name__
            with suppress(OSError, SystemProblem):  # a full device behind stdout may be the error
                print_json({"error": {"kind": kind, "what": ours.what, "where": ours.where, "do": ours.do}})
        ctx.exit(2 if isinstance(ours, RecipeError) else 1)


@contextmanager
def _wrong_usage(ctx: click.Context) -> Iterator[None]:
    """Make click's errors fit for a terminal, as they quote paths; with `--json`, print them on stdout as an object,
    before click prints them on stderr."""
    try:
        yield
    except click.UsageError as error:
        if isinstance(error, click.NoSuchOption) and error.ctx:
            error = _with_the_nearest(error, error.ctx)
        if isinstance(error, click.NoSuchCommand) and (instead := _COMMANDS.get(error.command_name)):
            error = click.NoSuchCommand(error.command_name, f"No such command '{error.command_name}'. {instead}")
        if not isinstance(error, click.exceptions.NoArgsIsHelpError):  # whose lines are our own
            error.message = one_line(error.message)  # type: ignore[misc]  # final for type checkers alone
        if ctx.meta[_JSON]:
            do = f"`{error.ctx.command_path} --help` has all options." if error.ctx else ""
            print_json({"error": {"kind": "UsageError", "what": error.format_message(), "where": "", "do": do}})
        raise error from None


_ALIKE = 0.7
"""`--output` and `--out` are 0.77 alike; `--tp`, `--pp` and `--ep` 0.75, and exist wherever one of them does."""


_OPTIONS = {
    "--dtype": "--precision",
    "--steps": "--set train.steps=N",
    "--lr": "--set optimizer.lr=RATE",
    "--outtype": "--scheme",
    "--tensor-model-parallel-size": "--tp",
    "--tensor-parallel-size": "--tp",
    "--pipeline-model-parallel-size": "--pp",
    "--expert-model-parallel-size": "--ep",
    "--target": "it to `export-inference`",
}
"""What stands here for options that other programs, or other commands, have."""

_DRY_RUN = "`convert`, `export-inference` and `resume` show it with --dry-run."
_COMMANDS = {
    "plan": _DRY_RUN,
    "estimate": _DRY_RUN,
    "train": "Did you mean 'resume'?",
    "export": "Did you mean 'export-inference'?",
    "quantize": "Did you mean 'export-inference'?",
}
"""The same for commands."""


def _with_the_nearest(error: click.NoSuchOption, ctx: click.Context) -> click.NoSuchOption:
    """An unknown option's error, with the most similar option that the help shows. click's own guesses are in
    alphabetical order, and include hidden options."""
    known = [*_options_of(ctx.command), *ctx.help_option_names]
    name, other = error.option_name, _OPTIONS.get(error.option_name, "")
    if other.split(" ")[0] in (*known, "it"):
        advice = f"Give {other}."
    else:
        advice = meant(name, known, _ALIKE) or _commands_with(name, ctx)
    return click.NoSuchOption(name, f"No such option '{name}'. {advice}".rstrip(), ctx=ctx)


def _commands_with(option: str, ctx: click.Context) -> str:
    """Which other commands have an option, in words; empty if none has."""
    group = ctx.parent.command if ctx.parent else None
    commands = group.commands if isinstance(group, click.Group) else {}
    having = [name for name, each in commands.items() if option in _options_of(each)]
    return f"{listed(f'`{name}`' for name in having)} {'has' if len(having) == 1 else 'have'} it." if having else ""


def _options_of(command: click.Command) -> list[str]:
    """The options that a command's help shows."""
    options = (each for each in command.params if isinstance(each, click.Option) and not each.hidden)
    return [name for option in options for name in option.opts]


def as_our_error(error: Exception) -> PrecisionctlError:
    """An error of any kind as one of our own errors."""
    if isinstance(error, PrecisionctlError):
        return error
    if isinstance(error, OSError):
        is_of_path = error.filename and error.errno in _PATH_ERRORS
        do = "Is the path right, and may you read and write there?" if is_of_path else _SHOWS_WHERE
        return SystemProblem(error.strerror or str(error), where=error.filename or "", do=do)
    return unexpected(error)


def unexpected(error: Exception) -> PrecisionctlError:
    """An unforeseen error as one that has advice: a lack of memory, too deep recursion, or a bug."""
    what = f"{type(error).__name__}: {error}"
    if isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__ or "can't allocate memory" in what:
        return EnvironmentProblem(
            f"not enough memory: {what}",
            do="Make the work smaller (fewer --workers, shorter rows, another recipe), or take a larger machine.",
        )
    if isinstance(error, RecursionError):
        return DamagedCheckpoint("something is nested deeper in itself than can be read", do=_SHOWS_WHERE)
    return UnexpectedError(
        what,
        do="This is a bug of this program. Please report it as an issue, with the command and the traceback that "
        "`precisionctl --debug ...` shows.",
    )


def print_json(result: Mapping[str, Any]) -> None:
    """Print a command's result as JSON on stdout; infinity and NaN become strings."""
    with on_stdout():
        click.echo(json.dumps({"schema_version": SCHEMA_VERSION, **finite(result, str)}, indent=2))
