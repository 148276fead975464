"""Training, and what prepares it: resume, calibrate, tokenize and demo."""

import os
import sys
from pathlib import Path
from typing import Any

import click

from precisionctl.cli.group import Command, is_left, kept_when_stopped, print_json
from precisionctl.cli.options import (
    CHECKPOINT,
    DATA,
    NEW_PATH,
    POSITIVE,
    TOKENIZER,
    Choice,
    Duration,
    RecipeName,
    fp8_state_option,
    iteration_option,
    json_option,
    megatron_fp8_options,
    reference_option,
    restart_option,
    set_option,
)
from precisionctl.errors import GO_ON, one_line

backend_option = click.option(
    "--backend",
    type=Choice(["auto", "te", "emulated"]),
    default="auto",
    show_default=True,
    help="te: Transformer Engine; emulated: FP8 and NVFP4 emulated in PyTorch; auto: te if it can run.",
)


@click.command(
    cls=Command,
    short_help="Continue training, in BF16, FP8 or NVFP4, pretraining or SFT.",
    examples=[
        "resume llama --precision fp8 --data text/ --out llama-fp8",
        "resume llama --precision fp8 --recipe llama-3-8b-cpt --set train.steps=2000 --dry-run",
        "resume llama-fp8 --precision bf16 --recipe sft-bf16 --data chats.jsonl --out sft --load weights",
    ],
    sections={
        "The run": [
            "--precision",
            "--data",
            "--out",
            "--recipe",
            "--set",
            "--engine",
            "--backend",
            "--time-limit",
            "--dry-run",
        ],
        "What is loaded": ["--load", "--skip", "--reference"],
        "FP8 and its state": ["--fp8-state", "--cold-start", "--collect-amax", "--shadow-every"],
    },
)
@click.argument("checkpoint", type=CHECKPOINT)
@click.option("--precision", type=Choice(["bf16", "fp8", "nvfp4"]), required=True, help="Precision of the GEMMs.")
@click.option(
    "--data",
    type=DATA,
    help="Text, JSONL, JSON, parquet, a folder, Megatron's .bin, DIRECTORY:SPLIT, or hf://datasets/ORG/NAME:SPLIT. "
    "Rows with `messages` mean SFT; PATH#KEY names the key of their text.",
)
@click.option(
    "--out",
    type=NEW_PATH,
    help="Folder of the run. A run that is already there continues. "
    "Default: CHECKPOINT's name with -bf16, -fp8 or -nvfp4.",
)
@click.option(
    "--recipe",
    type=RecipeName(),
    help="A bundled name or a TOML file. Default: bf16; fp8-delayed or nvfp4 with the settings of the run before.",
)
@set_option
@click.option(
    "--load",
    type=Choice(["full", "weights"]),
    help="full: a whole training state; weights: a new run. Default: full, if CHECKPOINT has an optimizer.",
)
@click.option(
    "--skip",
    type=Choice(["optimizer", "schedule", "data", "rng", "fp8"]),
    multiple=True,
    help="Do not load this part of CHECKPOINT. Can be repeated.",
)
@reference_option
@backend_option
@click.option(
    "--cold-start", is_flag=True, help="Start FP8 with scale 1 and empty histories, even if CHECKPOINT has FP8 state."
)
@fp8_state_option
@click.option("--collect-amax", is_flag=True, help="With bf16: record the FP8 state for a later FP8 run.")
@click.option("--time-limit", type=Duration(), help="Save and stop after this time, with exit code 75, as on SIGTERM.")
@click.option("--shadow-every", type=POSITIVE, help="The guard: compute every Nth step in BF16 too, and compare.")
@click.option(
    "--engine",
    type=Choice(["bundled", "megatron-core"]),
    default="bundled",
    show_default=True,
    help="The bundled trainer, or Megatron-Core for more than one node.",
)
@click.option(
    "--dry-run", is_flag=True, help="Show what the run would do and how much memory it needs, and start nothing."
)
@megatron_fp8_options
@json_option
def resume(
    overrides: tuple[str, ...],
    megatron: tuple[str, ...],
    dry_run: bool,
    json_wanted: bool,
    engine: str,
    **what: Any,
) -> None:
    """Continue training CHECKPOINT, in BF16, FP8 or NVFP4, pretraining or SFT.

    The same command continues a run that was stopped. FP8 starts from --fp8-state, else from the state in CHECKPOINT,
    else from warm-up passes. Megatron's own FP8 flags, such as --fp8-recipe blockwise, are accepted too.
    """
    from precisionctl import console
    from precisionctl.mcore import train_in_core
    from precisionctl.reports import run as report
    from precisionctl.trainer import resume as trainer
    from precisionctl.trainer.measure.metrics import StepMetrics
    from precisionctl.trainer.run_plan import BUNDLED, dry_run as dry_run_of
    from precisionctl.trainer.saved.run_folder import steps_of
    from precisionctl.trainer.settings import Settings

    settings = Settings(overrides=(*megatron, *overrides), **what)
    in_core = engine == "megatron-core"
    if dry_run:
        dry = dry_run_of(settings, train_in_core.CORE if in_core else BUNDLED)
        if json_wanted and dry.on_first_rank:
            print_json(report.dry_run_json(dry))
        elif dry.on_first_rank:
            console.show_lines(report.dry_run(dry))
        return
    begun: trainer.Started | None = None  # the last one, if the guard rolled the run back
    last: StepMetrics | None = None
    with kept_when_stopped(lambda: begun is not None or bool(steps_of(settings.folder))), console.RunView() as view:

        def on_start(started: trainer.Started) -> None:
            nonlocal begun
            begun = started
            if not json_wanted:
                console.show_lines(report.beginning(started))
            view.start(report.precision(started.plan), started.step, started.plan.recipe.train.steps)

        def on_step(step: StepMetrics) -> None:
            nonlocal last
            last = step
            view.step(step)
            for line in report.warnings(step):
                view.say(line)

        train = train_in_core.resume if in_core else trainer.resume
        finished = train(settings, on_start, on_step, view.tokenized)
    if begun and json_wanted:
        print_json(report.result_json(begun, finished, last))
    elif finished.on_first_rank:
        console.show_lines(report.ending(finished))
    raise click.exceptions.Exit(GO_ON if finished.stopped else 0)


@click.command(
    cls=Command,
    short_help="Record the FP8 state that a checkpoint lacks.",
    examples=["calibrate Qwen3-0.6B --data text.txt --out qwen3.fp8 --passes 8 --sequence-length 256"],
    sections={
        "Passes": ["--data", "--out", "--passes", "--sequence-length", "--batch-size", "--backend"],
        "The coming run": ["--recipe", "--set"],
        "CHECKPOINT": ["--reference", "--iteration"],
    },
)
@click.argument("checkpoint", type=CHECKPOINT)
@click.option(
    "--data",
    type=DATA,
    help="Text, JSONL, parquet, a folder or a data set on the Hub, as for resume. Default: the recipe's.",
)
@click.option(
    "--out",
    type=NEW_PATH,
    required=True,
    help="A new file, for the --fp8-state of resume, convert and export-inference.",
)
@click.option(
    "--recipe",
    type=RecipeName(),
    help="The recipe of the coming run: a bundled name or a TOML file. Default: fp8-delayed.",
)
@set_option
@click.option(
    "--passes",
    type=POSITIVE,
    default=64,
    show_default=True,
    help="Number of passes. Each fills one row of the histories.",
)
@click.option("--sequence-length", type=POSITIVE, help="Tokens per row. Default: the recipe's data.sequence_length.")
@click.option("--batch-size", type=POSITIVE, help="Rows per pass. Default: the recipe's train.micro_batch_size.")
@backend_option
@reference_option
@iteration_option
@megatron_fp8_options
@json_option
def calibrate(
    overrides: tuple[str, ...],
    megatron: tuple[str, ...],
    sequence_length: int | None,
    batch_size: int | None,
    json_wanted: bool,
    **what: Any,
) -> None:
    """Record the FP8 state that CHECKPOINT lacks, by BF16 passes over data, into a file.

    Nothing is trained, and CHECKPOINT is not changed. After a kill, the same command continues. Megatron's own FP8
    flags, such as --fp8-amax-history-len, are accepted too.
    """
    from precisionctl import console
    from precisionctl.calibration.calibrate import Calibration, calibrate as record
    from precisionctl.checkpoints.output import Output
    from precisionctl.reports import calibration as report

    sizes = {"data.sequence_length": sequence_length, "train.micro_batch_size": batch_size}
    given = tuple(f"{key}={size}" for key, size in sizes.items() if size is not None)
    partial = Output(what["out"]).partial
    with kept_when_stopped(lambda: is_left(partial)), console.rows_progress("calibrating") as on_pass:
        made = record(Calibration(overrides=(*megatron, *overrides, *given), **what), on_pass)
    if made.on_first_rank and json_wanted:
        print_json(report.calibrated_json(made))
    elif made.on_first_rank:
        console.show_lines(report.calibrated(made))
    raise click.exceptions.Exit(GO_ON if made.signal else 0)


@click.command(
    cls=Command,
    short_help="Tokenize data into Megatron's .bin and .idx, on all cores.",
    examples=["tokenize text/ corpus --tokenizer CKPT"],
)
@click.argument("data", type=DATA)
@click.argument("out", type=NEW_PATH)
@click.option("--tokenizer", type=TOKENIZER, required=True, help="A checkpoint, or a directory with a tokenizer.")
@click.option("--workers", type=POSITIVE, help="Number of processes. Default: one per core.")
@restart_option
@json_option
def tokenize(data: str, out: Path, tokenizer: Path, workers: int | None, restart: bool, json_wanted: bool) -> None:
    """Tokenize DATA into OUT.bin and OUT.idx, for Megatron and for resume.

    DATA is text, JSONL, JSON, parquet, a folder or a data set on the Hub, as for resume. For conversations,
    OUT.learned marks the tokens to learn. After a kill, the same command continues.
    """
    from precisionctl import console
    from precisionctl.checkpoints.output import Output
    from precisionctl.reports import tokenized as report
    from precisionctl.trainer.data.corpus import make_corpus
    from precisionctl.trainer.data.find import source_of

    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    source = source_of(data)
    partial = Output(out).partial
    with kept_when_stopped(lambda: is_left(partial)), console.bytes_progress("tokenizing", source.nbytes) as on_text:
        made = make_corpus(source, out, tokenizer, workers or cores, on_text, restart=restart)
        on_text.stopped = bool(made.signal)
    if json_wanted:
        print_json(made.as_json(out))
    else:
        console.show_lines(report.corpus(made, out))
    raise click.exceptions.Exit(GO_ON if made.signal else 0)


@click.command(
    cls=Command,
    short_help="Show everything on two CPU cores, in five to nine minutes.",
    examples=["demo --out demo-run"],
)
@click.option(
    "--out", type=NEW_PATH, default="demo-run", show_default=True, help="A new folder for everything it makes."
)
def demo(out: Path) -> None:
    """Train, convert, compare and export a small model on two CPU cores, in five to nine minutes.

    Ends with a table of what was measured, and a page with the curves.
    """
    from precisionctl import console
    from precisionctl.errors import require_package

    require_package("transformers", "train", "the demo")
    from precisionctl.demo import report, story

    def say(line: str) -> None:
        console.show_lines([line])

    try:
        story.prepare(out, say)
        results = story.run(out, say)
    except KeyboardInterrupt:
        click.echo(f"Stopped. Remove {one_line(str(out))} to start again.", err=True)
        raise click.exceptions.Exit(1) from None
    measured = report.table(results, out)
    report.write(results, out, measured)
    console.show_tables([measured])
    say(f"The curves: {out / report.PICTURE}. The page: {out / report.PAGE}")
