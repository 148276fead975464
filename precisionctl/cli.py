"""The commands: each parses its options, calls one function and prints what comes back.

Nothing heavy is imported until a command runs, so that `precisionctl --help` answers at once.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from precisionctl import __version__
from precisionctl.errors import PrecisionctlError, RecipeError
from precisionctl.options import (
    CHECKPOINT,
    NEW_PATH,
    POSITIVE,
    Percent,
    Size,
    Writing,
    iteration_option,
    json_option,
    parallelism_options,
    writing_options,
)
from precisionctl.reports.table import size

if TYPE_CHECKING:
    from precisionctl.commands import Work
    from precisionctl.precision import Precision


class Commands(click.Group):
    """A group in which every error is one panel and exit code 1; `--debug` shows where it came from."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (PrecisionctlError, OSError) as error:
            if ctx.params["debug"] or isinstance(error, BrokenPipeError):  # click ends quietly when `head` has enough
                raise
            from precisionctl import console

            console.show_error(error)
            ctx.exit(1)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # in the order of a first day, not of the alphabet


def print_json(result: Any) -> None:
    """A command's result as JSON on stdout; what JSON has no number for is a string."""
    click.echo(json.dumps(_numbers(result), indent=2))


def _numbers(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _numbers(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_numbers(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


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
@iteration_option
@json_option
def inspect(checkpoint: Path, by_layer: bool, iteration: int | None, json_wanted: bool) -> None:
    """Say what a checkpoint is, and how healthy its FP8 state is."""
    from precisionctl import console
    from precisionctl.checkpoints.open import open_checkpoint
    from precisionctl.reports import inspect as report

    description = report.describe(open_checkpoint(checkpoint, iteration))
    if json_wanted:
        print_json(description)
    else:
        console.show_tables(report.tables(description, by_layer=by_layer))


@main.command()
@click.argument("source", type=CHECKPOINT)
@click.argument("destination", type=NEW_PATH)
@click.option("--to", type=click.Choice(["hf", "megatron"]), required=True, help="Layout of the result.")
@click.option(
    "--precision",
    type=click.Choice(["keep", "bf16", "fp8"]),
    default="keep",
    show_default=True,
    help="What the result is made of; FP8 state is carried by all three.",
)
@click.option("--container", help="safetensors or bin; torch_dist or torch. Else the first of its layout.")
@click.option("--recipe", help="Recipe of the FP8 state: a bundled name or a TOML file; else the carried one, or TE's.")
@parallelism_options
@click.option("--drop-fp8-state", is_flag=True, help="Leave the FP8 state behind.")
@click.option("--drop-optimizer", is_flag=True, help="Leave a Megatron checkpoint's optimizer and schedule behind.")
@click.option("--architecture", metavar="MODEL_TYPE", help="Family of a Megatron checkpoint that does not say it.")
@click.option("--reference", type=CHECKPOINT, help="Hugging Face directory of the same model, for what Megatron lacks.")
@click.option("--max-shard-size", type=Size(), default="5GB", show_default=True, help="Size of a safetensors file.")
@iteration_option
@writing_options
def convert(recipe: str | None, how: Writing, **what: Any) -> None:
    """Convert SOURCE between Hugging Face and Megatron, any container to any, FP8 state included.

    DESTINATION appears only when it is complete; the same command run again goes on where one was stopped.
    `--to hf --precision fp8` is `export-inference --target vllm`, and rounds the weights.
    """
    from precisionctl.commands import Conversion, plan_conversion

    try:
        conversion = Conversion(recipe=precision_of(recipe), **what)
    except RecipeError as error:  # options that contradict one another
        raise click.UsageError(str(error)) from error
    do_work(lambda: plan_conversion(conversion), how)


@main.command()
@click.argument("checkpoint", type=CHECKPOINT)
@click.option("--precision", type=click.Choice(["bf16", "fp8"]), required=True, help="What the GEMMs compute in.")
@click.option("--data", type=CHECKPOINT, help="Text, a folder of text, or JSONL; rows with `messages` mean SFT.")
@click.option("--out", type=NEW_PATH, help="Folder of the run; a run that is there already goes on.")
@click.option("--recipe", help="A bundled name or a TOML file; else the plain recipe of the precision.")
@click.option("--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Override one key of the recipe.")
@click.option("--load", type=click.Choice(["full", "weights"]), help="Else full where there is an optimizer.")
@click.option(
    "--backend",
    type=click.Choice(["auto", "te", "emulated"]),
    default="auto",
    show_default=True,
    help="Transformer Engine, or FP8 emulated in PyTorch.",
)
@click.option("--cold-start", is_flag=True, help="Begin FP8 at scale 1 with empty histories, whatever is carried.")
def resume(**what: Any) -> None:
    """Go on training CHECKPOINT, in BF16 or FP8, pretraining or SFT.

    A run that was stopped goes on with the same command. An FP8 start without recorded state takes weight scales from
    the weights and the others from warm-up passes.
    """
    from precisionctl import console
    from precisionctl.reports import run as report
    from precisionctl.trainer import resume as trainer

    with console.RunView() as view:

        def on_start(started: trainer.Started) -> None:
            console.show_lines(report.beginning(started))
            view.start(report.precision(started), started.recipe.train.steps)

        finished = trainer.resume(trainer.Settings(**what), on_start, view.step)
    console.show_lines(report.ending(finished))
    raise click.exceptions.Exit(1 if finished.signal else 0)


@main.command("export-inference")
@click.argument("source", metavar="CHECKPOINT", type=CHECKPOINT)
@click.argument("destination", type=NEW_PATH)
@click.option("--target", required=True, metavar="ENGINE", help="Which engine will load it: vllm or tensorrt-llm.")
@click.option(
    "--scheme",
    type=click.Choice(["static", "dynamic"]),
    default="static",
    show_default=True,
    help="Input scales from the FP8 state, or made by the engine token by token.",
)
@click.option("--recipe", help="Recipe whose keep_bf16 names modules to leave in BF16: a bundled name or a TOML file.")
@click.option("--max-shard-size", type=Size(), default="5GB", show_default=True, help="Size of a safetensors file.")
@iteration_option
@writing_options
def export_inference(recipe: str | None, how: Writing, **what: Any) -> None:
    """Write CHECKPOINT as FP8 for an inference engine, with the scales that training recorded.

    No calibration data is needed. The weights of FP8 GEMMs are rounded to E4M3; the rest is BF16.
    """
    from precisionctl.commands import InferenceExport, plan_export

    export = InferenceExport(recipe=precision_of(recipe), **what)
    do_work(lambda: plan_export(export), how)


def precision_of(recipe: str | None) -> "Precision | None":
    """How a recipe computes FP8 GEMMs, where one is named; the command says by itself that it wants FP8."""
    from precisionctl.recipe import load_recipe

    return replace(load_recipe(recipe).precision, fp8=True) if recipe else None


def do_work(plan: Callable[[], "Work"], how: Writing) -> None:
    """Show a plan, or carry it out; of several ranks, each makes it and the first one speaks."""
    from precisionctl import console
    from precisionctl.estimate import estimate
    from precisionctl.reports import plan as report

    if not how.dry_run:
        work = carry_out(plan, how)
        if work and how.json_wanted:
            print_json(work.plan.describe() | {"notes": work.notes})
        elif work:
            console.show_lines([f"Wrote {work.output.path}, {size(work.plan.nbytes)}.", *work.notes])
        return
    work = plan()
    expected = estimate(work.plan, work.reader, work.output.path, how.workers)
    if how.json_wanted:
        print_json(work.plan.describe() | {"notes": work.notes, "estimate": asdict(expected)})
    else:
        console.show_tables(report.tables(work.plan, expected))


def carry_out(plan: Callable[[], "Work"], how: Writing) -> "Work | None":
    """What was done; None at other ranks than the first."""
    from precisionctl import console, ranks
    from precisionctl.commands import execute

    here = ranks.from_environment()
    with here.together():  # planning too: what stops one rank there is told to the others
        work = plan()
        total = (2 if how.verify else 1) * work.plan.nbytes // here.count
        with console.bytes_progress("writing", total, quiet=not here.first) as on_bytes:
            execute(work, workers=how.workers, restart=how.restart, verify=how.verify, ranks=here, on_bytes=on_bytes)
    return work if here.first else None


@main.command()
@click.argument("a", metavar="A", type=CHECKPOINT)
@click.argument("b", metavar="[B]", type=CHECKPOINT, required=False)
@click.option("--fp8", is_flag=True, help="Count it as a difference when only one side has FP8 state.")
@click.option("--target", metavar="ENGINE", help="Hold A against an engine's rules: vllm or tensorrt-llm.")
@json_option
def verify(a: Path, b: Path | None, fp8: bool, target: str | None, json_wanted: bool) -> None:
    """Compare checkpoint A with B, tensor by tensor, whatever their formats; or A with an engine's rules.

    FP8 codes are equal to BF16 values when they are their encoding under the scale stored with them.
    Exits with 1 where the two differ, or a rule that an engine insists on is broken.
    """
    if (b is None) == (target is None):
        raise click.UsageError("verify needs either a second checkpoint or --target ENGINE.")
    if b is not None:
        same = compare_checkpoints(a, b, fp8, json_wanted)
    else:
        same = check_rules(a, str(target), json_wanted)
    raise click.exceptions.Exit(0 if same else 1)


def compare_checkpoints(a: Path, b: Path, fp8: bool, json_wanted: bool) -> bool:
    from precisionctl import console
    from precisionctl.checkpoints.open import open_checkpoint
    from precisionctl.reports import verify as report
    from precisionctl.verify import compare

    left, right = open_checkpoint(a), open_checkpoint(b)
    with console.bytes_progress("comparing", sum(spec.nbytes for spec in left.specs.values())) as on_bytes:
        comparison = compare(left, right, fp8=fp8, on_bytes=on_bytes)
    if json_wanted:
        print_json(comparison.as_json())
    else:
        console.show_tables(report.tables(comparison))
    return comparison.equal


def check_rules(path: Path, target: str, json_wanted: bool) -> bool:
    from precisionctl import console
    from precisionctl.checkpoints.open import open_checkpoint
    from precisionctl.commands import engine_named
    from precisionctl.reports import verify as report
    from precisionctl.verify import check

    engine = engine_named(target)
    findings = check(open_checkpoint(path), engine)
    if json_wanted:
        print_json([asdict(finding) for finding in findings])
    else:
        console.show_tables(report.rules(findings, engine))
    return not any(finding.rule.fatal for finding in findings)


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
        print_json(comparison.as_json())
    else:
        console.show_tables([comparison.table()])
    if max_gap is not None and not comparison.within(max_gap):
        click.echo(f"A mean gap is larger than {max_gap:.2%}.", err=True)
        raise click.exceptions.Exit(1)


@main.command("eval")
@click.argument("checkpoint", type=CHECKPOINT)
@click.option("--data", type=CHECKPOINT, required=True, help="Text, a folder of text, or JSONL, as resume takes it.")
@click.option("--sequence-length", type=POSITIVE, default=1024, show_default=True, help="At most the model's own.")
@iteration_option
@json_option
def evaluate(checkpoint: Path, data: Path, sequence_length: int, iteration: int | None, json_wanted: bool) -> None:
    """Perplexity of CHECKPOINT on text, in the precision it is stored in."""
    from precisionctl import console
    from precisionctl.checkpoints.open import open_checkpoint
    from precisionctl.evaluate import evaluate as measure

    with console.rows_progress("evaluating") as on_rows:
        found = measure(open_checkpoint(checkpoint, iteration), data, sequence_length=sequence_length, on_rows=on_rows)
    if json_wanted:
        print_json(found.as_json())
    else:
        console.show_lines([f"perplexity {found.perplexity:.4f} over {found.tokens:,} tokens, {found.precision}"])


@main.command()
@click.option("--out", type=NEW_PATH, default="demo-run", show_default=True, help="A new folder for all it makes.")
def demo(out: Path) -> None:
    """The whole story on one CPU, on real text, in a few minutes; ends with a table and a page."""
    from precisionctl import console
    from precisionctl.demo import report, story

    def say(line: str) -> None:
        console.show_lines([line])

    story.prepare(out, say)
    told = story.tell(out, say)
    measured = report.table(told, out)
    report.write(told, out, measured)
    console.show_tables([measured])
    say(f"The curves: {out / report.PICTURE}. The page: {out / report.PAGE}")
