"""Commands that look at checkpoints, runs and machines: inspect, compare, eval, launch-args and doctor."""

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from precisionctl.cli.group import Command, print_json
from precisionctl.cli.options import (
    CHECKPOINT,
    DATA,
    NEW_FILE,
    POSITIVE,
    RUN,
    STATE,
    TOO_FAR,
    Choice,
    Percent,
    grouped_columns_option,
    is_given,
    iteration_option,
    json_option,
    reference_option,
)
from precisionctl.errors import printable

if TYPE_CHECKING:
    from precisionctl.fp8.grouped import ColumnOrder


def _written(*files: Path | None) -> list[str]:
    """What a command says of the files that it wrote beside its report; None is one that was not asked for."""
    return [f"Wrote {file}." for file in files if file]


@click.command(
    cls=Command,
    short_help="Show what a checkpoint contains, and whether FP8 is safe.",
    examples=["inspect Qwen3-0.6B", "inspect Qwen3-0.6B --fp8 --fp8-state qwen3.fp8 --html readiness.html"],
    sections={
        "Is FP8 safe": ["--fp8", "--fp8-state", "--html", "--workers"],
        "Input": ["--reference", "--grouped-columns", "--iteration"],
    },
    headers_do=lambda given: not given["fp8"],
)
@click.argument("checkpoint", type=CHECKPOINT)
@click.option(
    "--fp8", is_flag=True, help="Judge whether FP8 training is safe from here, for each layer, role and scaling."
)
@click.option("--fp8-state", type=STATE, help="With --fp8: read activations and gradients from this file of calibrate.")
@click.option("--html", type=NEW_FILE, help="With --fp8: write a report to this file, as one self-contained page.")
@click.option(
    "--workers", type=POSITIVE, default=2, show_default=True, help="With --fp8: number of processes that measure."
)
@reference_option
@grouped_columns_option
@iteration_option
@json_option
def inspect(
    checkpoint: Path,
    fp8: bool,
    fp8_state: Path | None,
    html: Path | None,
    workers: int,
    reference: Path | None,
    grouped_columns: "ColumnOrder | None",
    iteration: int | None,
    json_wanted: bool,
) -> None:
    """Show what a checkpoint contains, and its FP8 state; or what a file of calibrate contains.

    --fp8 measures every weight, reads what was recorded of activations and gradients, and compares both with published
    limits. You see what would underflow or saturate, and what to keep in BF16 (docs/switching.md).
    """
    if not fp8 and (fp8_state or html or is_given("workers")):
        raise click.UsageError("--fp8-state, --html and --workers are for --fp8.")
    from precisionctl import console
    from precisionctl.commands.hints import open_hinted
    from precisionctl.commands.source_notes import newer_notes
    from precisionctl.fp8 import sidecar
    from precisionctl.reports import inspect as report

    notes: list[str] = []
    if not fp8 and sidecar.is_sidecar(checkpoint):
        if iteration is not None or grouped_columns or reference:
            what = (
                "CHECKPOINT is a file of FP8 state: --reference, --iteration and --grouped-columns are for checkpoints."
            )
            raise click.UsageError(what)
        description = report.describe_state(sidecar.read(checkpoint), checkpoint)
    else:
        reader = open_hinted(checkpoint, iteration, reference=reference, grouped_columns=grouped_columns)
        description, notes = report.describe(reader), [*newer_notes(checkpoint, reader)]
    if fp8:
        from precisionctl.readiness.assess import assess
        from precisionctl.reports import readiness as judged
        from precisionctl.reports.readiness_page import whole_page

        read_as = {"--reference": reference, "--iteration": iteration}
        named = shlex.join(
            [
                str(checkpoint),
                *(word for option, value in read_as.items() if value is not None for word in (option, str(value))),
            ]
        )
        readiness = assess(reader, fp8_state, lambda total: console.bytes_progress("measuring weights", total), workers)
        if html:
            html.write_text(whole_page(description, readiness, named), encoding="utf-8")
        if json_wanted:
            print_json({**description, "readiness": judged.as_json(readiness)})
            return
        console.show_tables([*report.tables(description), *judged.tables(readiness)])
        console.show_lines([*notes, *judged.advice(readiness, named), *_written(html)])
    elif json_wanted:
        print_json(description)
    else:
        console.show_tables(report.tables(description))
        console.show_lines(notes)


@click.command(
    cls=Command,
    short_help="Compare the loss curves of runs; with --max-gap, as a gate for CI.",
    examples=["compare bf16-run fp8-run", "compare bf16-run fp8-run --max-gap 1% --last 200 --html curves.html"],
    sections={"As a gate": ["--max-gap", "--last"], "Pictures": ["--png", "--html"]},
)
@click.argument("runs", metavar="RUN RUN...", type=RUN, nargs=-1, required=True)
@click.option("--max-gap", type=Percent(), help="Exit with 3 if a mean gap is larger than this, e.g. 1%.")
@click.option("--last", type=POSITIVE, default=100, show_default=True, help="Number of last steps to average.")
@click.option("--png", type=NEW_FILE, help="Write a picture of the curves to this file.")
@click.option("--html", type=NEW_FILE, help="Write table and curves to this file, as one self-contained page.")
@json_option
def compare(
    runs: tuple[Path, ...],
    max_gap: float | None,
    last: int,
    png: Path | None,
    html: Path | None,
    json_wanted: bool,
) -> None:
    """Compare the loss curves of runs with that of the first RUN.

    A RUN is a folder that resume wrote, or its metrics.jsonl.
    """
    if len(runs) < 2:
        raise click.UsageError("compare needs two runs or more.")
    from precisionctl import console
    from precisionctl.reports import compare_runs as report

    comparison = report.compare(runs, last)
    verdict = "" if max_gap is None else comparison.verdict(max_gap)
    if png or html:
        report.draw(comparison, png=png, html=html, verdict=verdict)
    if json_wanted:
        print_json(comparison.as_json(max_gap))
    else:
        console.show_tables(comparison.tables())
        console.show_lines(_written(png, html))
    if max_gap is not None and comparison.beyond(max_gap):
        click.echo(printable(verdict), err=True)
        raise click.exceptions.Exit(TOO_FAR)


@click.command(
    "eval",
    cls=Command,
    short_help="Measure perplexity, or run lm-eval's tasks.",
    examples=[
        "eval qwen3-fp8 --data held-out.txt --against Qwen3-0.6B",
        "eval qwen3-fp8 --tasks hellaswag --limit 100",
    ],
    sections={
        "Perplexity": ["--data", "--against", "--sequence-length"],
        "lm-eval's tasks": ["--tasks", "--limit", "--chat-template"],
        "CHECKPOINT": ["--card", "--reference", "--iteration"],
    },
)
@click.argument("checkpoint", type=CHECKPOINT)
@click.option("--data", type=DATA, help="Text, JSONL, parquet, a folder or a data set on the Hub, as for resume.")
@click.option(
    "--against",
    type=CHECKPOINT,
    help="The BF16 source; of a run also one iteration, as run/iter_0000100. Adds its perplexity, KL divergence and "
    "top-1 agreement.",
)
@click.option(
    "--sequence-length",
    type=POSITIVE,
    default=1024,
    show_default=True,
    help="Tokens per row; at most what the model can take.",
)
@click.option("--tasks", help="Instead of --data: lm-eval tasks (names or YAML files), comma-separated.")
@click.option("--limit", type=POSITIVE, help="With --tasks: maximum number of examples per task.")
@click.option(
    "--chat-template", is_flag=True, help="With --tasks: put questions as conversations, for an instruct model."
)
@click.option("--card", is_flag=True, help="Add the result to the model card of an exported CHECKPOINT.")
@reference_option
@iteration_option
@json_option
def evaluate(
    checkpoint: Path,
    data: str | None,
    against: Path | None,
    sequence_length: int,
    tasks: str | None,
    limit: int | None,
    chat_template: bool,
    card: bool,
    reference: Path | None,
    iteration: int | None,
    json_wanted: bool,
) -> None:
    """Measure the perplexity of CHECKPOINT in the precision that it is stored in, or run lm-eval's tasks."""
    of_data = against or is_given("sequence_length")
    of_tasks = limit or chat_template
    if (data is None) == (tasks is None) or (of_data if tasks is not None else of_tasks):
        raise click.UsageError(
            "eval needs either --data (--against and --sequence-length are for it) or --tasks (--limit and "
            "--chat-template are for it)."
        )
    names = [] if tasks is None else [name.strip() for name in tasks.split(",")]
    if not all(names):
        raise click.UsageError("--tasks has a name that is empty.")
    from precisionctl import console
    from precisionctl.checkpoints.open import open_checkpoint
    from precisionctl.commands.hints import open_hinted
    from precisionctl.commands.source_notes import opened_notes
    from precisionctl.export.model_card import NAME as CARD, around_quality, write_quality
    from precisionctl.paths import own_name
    from precisionctl.reports import evaluation as report

    if card:
        around_quality(checkpoint)  # what cannot be written is found before hours of measuring
    reader = open_hinted(checkpoint, iteration, reference=reference)
    source = open_checkpoint(against) if against else None
    if names:
        from precisionctl.evaluate.harness import run_tasks

        result = run_tasks(reader, names, limit=limit, chat_template=chat_template)
        lines = report.task_lines(result)
    else:
        from precisionctl.evaluate import evaluate as measure

        assert data is not None
        with console.rows_progress("evaluating") as on_rows:
            found = measure(reader, data, against=source, sequence_length=sequence_length, on_rows=on_rows)
        lines, result = report.lines(found, sequence_length), found.as_json()
    if card:
        write_quality(checkpoint, [f"{own_name(Path(data))}: {line}" for line in lines] if data else lines)
    if json_wanted:
        print_json(result)
    else:
        opened = opened_notes(checkpoint, reader)
        console.show_lines([*opened, *lines, *_written(checkpoint / CARD if card else None)])


@click.command(
    cls=Command,
    short_help="Show which recipes of FP8 and NVFP4 this machine can run.",
    examples=["doctor", "doctor megatron-run --iteration 1000"],
)
@click.argument("checkpoint", type=CHECKPOINT, required=False)
@iteration_option
@json_option
def doctor(checkpoint: Path | None, iteration: int | None, json_wanted: bool) -> None:
    """Show which recipes of FP8 and NVFP4 this machine can run, and whether Transformer Engine will load CHECKPOINT's
    FP8 state."""
    from precisionctl import console, doctor as look
    from precisionctl.checkpoints.open import open_checkpoint
    from precisionctl.reports import doctor as report

    machine = look.examine()
    te_version = machine.packages["transformer-engine"]
    found = look.examine_payloads(open_checkpoint(checkpoint, iteration), te_version) if checkpoint else None
    if json_wanted:
        print_json({"machine": asdict(machine), "payloads": asdict(found) if found else None})
    else:
        console.show_tables(report.machine_tables(machine) + (report.payload_tables(found) if found else []))


@click.command(
    "launch-args",
    cls=Command,
    short_help="Print the flags to continue in another framework.",
    examples=["launch-args qwen3 --framework megatron-lm"],
)
@click.argument("checkpoint", type=CHECKPOINT)
@click.option(
    "--framework",
    type=Choice(
        ["megatron-lm", "megatron-bridge", "nemo", "accelerate"],
        elsewhere={name: f"`convert --to {name}` writes what it loads." for name in ("torchtitan", "deepspeed")},
    ),
    required=True,
    help="The framework that will continue from CHECKPOINT.",
)
@iteration_option
@json_option
def launch_args(checkpoint: Path, framework: str, iteration: int | None, json_wanted: bool) -> None:
    """Print how to start another framework from CHECKPOINT.

    The output has the model's sizes, the paths of weights and tokenizer, parallel sizes, the FP8 recipe, and what not
    to load. Options that it cannot know, such as the data, are listed for you to add.
    """
    from precisionctl import console
    from precisionctl.launch.frameworks import launch

    found = launch(checkpoint, framework, iteration)
    if json_wanted:
        print_json(found.as_json())
    else:
        console.show_lines(found.lines())
