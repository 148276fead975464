"""The commands: each parses its options, calls one function and prints what comes back.

Nothing heavy is imported until a command runs, so that `precisionctl --help` answers at once.
"""

import json
from pathlib import Path
from typing import Any

import click

from precisionctl import __version__
from precisionctl.errors import PrecisionctlError

CHECKPOINT = click.Path(exists=True, path_type=Path)
NEW_PATH = click.Path(path_type=Path)
TEXT_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


class Commands(click.Group):
    """A group in which every error is one panel and exit code 1; `--debug` shows where it came from."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (PrecisionctlError, OSError) as error:
            if ctx.params["debug"]:
                raise
            from precisionctl import console

            console.show_error(error)
            ctx.exit(1)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # in the order of a first day, not of the alphabet


class Percent(click.ParamType[float]):
    """`1%` or `0.01`: the same ratio."""

    name = "percent"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        text = str(value)
        try:
            return float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
        except ValueError:
            self.fail(f"{value!r} is not a percentage such as 1%", param, ctx)


def as_json(result: Any) -> None:
    """A command's result as JSON on stdout."""
    click.echo(json.dumps(result, indent=2, default=str))


json_option = click.option("--json", "json_wanted", is_flag=True, help="Print JSON on stdout instead of tables.")


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__)
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(debug: bool) -> None:
    """Carry Megatron and Hugging Face checkpoints, with their FP8 state, between BF16 and FP8.

    Exit codes: 0 done, 1 failed or differs, 2 wrong usage.
    """


@main.command()
@click.argument("checkpoint", type=CHECKPOINT)
@click.option("--fp8", "by_layer", is_flag=True, help="Show amax and scale of every module.")
@click.option("--iteration", type=int, help="Which iteration of a Megatron checkpoint; else the newest.")
@json_option
def inspect(checkpoint: Path, by_layer: bool, iteration: int | None, json_wanted: bool) -> None:
    """Say what a checkpoint is, and how healthy its FP8 state is."""
    from precisionctl import console
    from precisionctl.checkpoints.open import open_checkpoint
    from precisionctl.reports import inspect as report

    description = report.describe(open_checkpoint(checkpoint, iteration))
    if json_wanted:
        as_json(description)
    else:
        console.show_tables(report.tables(description, by_layer=by_layer))


@main.command()
@click.argument("runs", metavar="RUN RUN...", type=CHECKPOINT, nargs=-1, required=True)
@click.option("--max-gap", type=Percent(), help="Fail when a mean gap over the last 100 steps is larger, e.g. 1%.")
@click.option("--png", type=NEW_PATH, help="Draw the curves into this file.")
@click.option("--html", type=NEW_PATH, help="Write a page with table and curves, whole in itself.")
@json_option
def compare(
    runs: tuple[Path, ...], max_gap: float | None, png: Path | None, html: Path | None, json_wanted: bool
) -> None:
    """Set the loss curves of runs against the first of them.

    A RUN is a folder that resume wrote, or its metrics.jsonl.
    """
    if len(runs) < 2:
        raise click.UsageError("compare needs two runs or more.")
    from precisionctl import console
    from precisionctl.reports import compare as report

    comparison = report.compare(runs)
    if png or html:
        report.draw(comparison, png=png, html=html)
    if json_wanted:
        as_json(comparison.as_json())
    else:
        console.show_tables([comparison.table()])
    if max_gap is not None and not comparison.within(max_gap):
        click.echo(f"A mean gap is larger than {max_gap:.2%}.", err=True)
        raise click.exceptions.Exit(1)
