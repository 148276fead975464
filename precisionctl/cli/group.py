"""Shared by all commands: every error in one form, and results as JSON on stdout."""

import json
import math
import os
import sys
from collections.abc import Mapping
from typing import Any

import click

from precisionctl.errors import (
    DamagedCheckpoint,
    EnvironmentProblem,
    PrecisionctlError,
    RecipeError,
    SystemProblem,
    UnexpectedError,
)


class Commands(click.Group):
    """A click group that shows every error in one way and exits with 1, or with 2 where what was asked for makes no
    sense; `--debug` shows the traceback. With `--json`
    the error is on stdout, too, as an object."""

    def main(self, *arguments: Any, **options: Any) -> Any:
        _replace_closed_streams()
        return super().main(*arguments, **options)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise  # click handles these itself; a closed pipe (`| head`) ends the program silently
        except Exception as error:
            if ctx.params["debug"]:
                raise
            from precisionctl import console

            told = in_our_words(error)
            console.show_error(told)
            if ctx.meta.get(JSON_WANTED):
                kind = type(told).__name__
                print_json({"error": {"kind": kind, "what": told.what, "where": told.where, "do": told.do}})
            ctx.exit(2 if isinstance(told, RecipeError) else 1)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # in the order of their registration, not of the alphabet


JSON_WANTED = "precisionctl.json"
"""Whether the command was asked for JSON, in click's `ctx.meta`."""


def in_our_words(error: Exception) -> PrecisionctlError:
    """Any error as one of ours."""
    if isinstance(error, PrecisionctlError):
        return error
    if isinstance(error, OSError):
        return SystemProblem(error.strerror or str(error), where=error.filename or "")
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
        return DamagedCheckpoint(
            "something is nested deeper in itself than can be read", do="`precisionctl --debug ...` shows where."
        )
    return UnexpectedError(
        what,
        do="This is a bug of this program. Please report it as an issue, with the command and the traceback that "
        "`precisionctl --debug ...` shows.",
    )


def _replace_closed_streams() -> None:
    """Replace standard streams that the shell closed (`>&-`) by /dev/null. Their file descriptors are free, so the next
    file that is opened would get one of them, and with it all that is printed."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))


def print_json(result: Any) -> None:
    """Print a command's result as JSON on stdout; infinity and NaN become strings."""
    click.echo(json.dumps(_numbers(result), indent=2))


def _numbers(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _numbers(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_numbers(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
