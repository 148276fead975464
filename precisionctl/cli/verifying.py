"""The command verify: two checkpoints held against each other, or one against an engine's rules."""

import shlex
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path

import click

from precisionctl.cli.group import Command, print_json
from precisionctl.cli.options import CHECKPOINT, POSITIVE, STATE, EngineName, is_given, json_option, reference_option
from precisionctl.errors import PrecisionctlError


@click.command(
    cls=Command,
    short_help="Compare two checkpoints, or check one against an engine's rules.",
    examples=["verify Qwen3-0.6B qwen3", "verify qwen3-fp8 --target vllm --tp 2", "verify run run-back --fp8 --json"],
    sections={
        "With a second checkpoint": ["--fp8", "--fp8-state", "--reference", "--workers"],
        "With an engine": ["--target", "--tp", "--expert-parallel"],
    },
)
@click.argument("a", metavar="A", type=CHECKPOINT)
@click.argument("b", metavar="[B]", type=CHECKPOINT, required=False)
@click.option(
    "--fp8", is_flag=True, help="Compare FP8 weights code by code. FP8 state on only one side is a difference."
)
@click.option(
    "--target",
    type=EngineName(),
    metavar="ENGINE",
    help="Check A against the rules of vllm, sglang, tensorrt-llm, transformers, llama.cpp, mlx or te.",
)
@click.option(
    "--tp",
    "ranks",
    type=POSITIVE,
    default=1,
    help="With --target: number of GPUs that the engine will split the model over.",
)
@click.option(
    "--expert-parallel",
    is_flag=True,
    help="With --target: the engine will give each GPU whole experts, not parts of all.",
)
@click.option(
    "--fp8-state",
    type=STATE,
    help="Compare fixed scales and FP8 state with this file of calibrate, instead of A's state, or B's if A alone is "
    "codes.",
)
@reference_option
@click.option(
    "--workers", type=POSITIVE, default=2, show_default=True, help="Number of processes that compare tensors."
)
@json_option
def verify(
    a: Path,
    b: Path | None,
    fp8: bool,
    target: str | None,
    ranks: int,
    expert_parallel: bool,
    fp8_state: Path | None,
    reference: Path | None,
    workers: int,
    json_wanted: bool,
) -> None:
    """Compare checkpoint A with B, tensor by tensor, whatever their formats; or check A against an engine's rules.

    FP8 codes equal BF16 values if they are exactly the encoding of these values with the stored scale. `verify A --fp8`
    checks whether A's weights keep their codes when converted to BF16 and back. The exit code is 1 if A and B
    differ, if the engine would refuse or misread A, or if no weight of A is stored as codes; 2 if A's codes are not
    read here, or there are no rules of the engine for them.
    """
    if (b is not None) + (target is not None) != 1 and not (fp8 and b is None and target is None):
        raise click.UsageError("verify needs either a second checkpoint or --target ENGINE; or --fp8, for A alone.")
    if fp8_state and b is None:
        raise click.UsageError("--fp8-state needs a second checkpoint.")
    if reference and b is None and target is None:
        raise click.UsageError("--reference needs a second checkpoint or --target.")
    if fp8 and target is not None:
        raise click.UsageError("--fp8 compares codes with a second checkpoint, or checks A alone: --target does not.")
    if (ranks > 1 or expert_parallel) and target is None:
        raise click.UsageError("--tp and --expert-parallel are for --target.")
    if target is not None and is_given("workers"):
        raise click.UsageError("--workers is for comparing, not for --target.")
    if b is not None:
        same = compare_checkpoints(a, b, fp8, fp8_state, reference, workers, json_wanted)
    elif target is None:
        same = check_codes(a, workers, json_wanted)
    else:
        same = check_rules(a, str(target), ranks, expert_parallel, reference, json_wanted)
    raise click.exceptions.Exit(0 if same else 1)


def compare_checkpoints(
    a: Path, b: Path, fp8: bool, fp8_state: Path | None, reference: Path | None, workers: int, json_wanted: bool
) -> bool:
    """Print the differences of two checkpoints, opened with what a reference says of either. Returns whether they are
    equal."""
    from precisionctl import console
    from precisionctl.checkpoints.base import WITH_REFERENCE
    from precisionctl.commands.hints import open_hinted
    from precisionctl.commands.source_notes import opened_notes, vocabulary_notes
    from precisionctl.reports import verify as report
    from precisionctl.verify.compare import compare

    command = ["precisionctl", "verify", str(a), str(b), *(["--fp8"] if fp8 else [])]
    command += ["--fp8-state", str(fp8_state)] if fp8_state else []
    progress = partial(console.bytes_progress, "comparing")
    try:
        left, right = (open_hinted(path, reference=reference) for path in (a, b))
        comparison = compare(left, right, fp8=fp8, state_file=fp8_state, workers=workers, progress=progress)
    except PrecisionctlError as error:
        if reference or WITH_REFERENCE not in error.do:
            raise
        # not done unasked: settings that a side gets from the other one are compared no more
        other = next((path for path in (a, b) if (path / "config.json").is_file()), None)
        told = f"Give the other's config.json: `{shlex.join([*command, '--reference', str(other)])}`."
        if other is None:
            told = f"Give a Hugging Face directory of the same model: `{shlex.join(command)} --reference HF_DIR`."
        raise type(error)(error.what, where=error.where, do=error.do.replace(WITH_REFERENCE, told)) from error
    if json_wanted:
        print_json(comparison.as_json())
    else:
        console.show_tables(report.tables(comparison))
        other_rows = any(tensor.status == "shape" for tensor in comparison.tensors)
        advice = [*chain.from_iterable(map(vocabulary_notes, (left, right)))] if other_rows else []
        if advice:
            known = (path for path, reader in ((b, right), (a, left)) if "config.json" in reader.companions.files)
            advice.append(f"Compare again: {shlex.join([*command, '--reference', str(next(known, 'HF_DIR'))])}")
        opened = [*opened_notes(a, left), *opened_notes(b, right)]
        console.show_lines([*opened, *report.left_out(comparison), report.verdict(comparison), *advice])
    return comparison.equal


def check_codes(path: Path, workers: int, json_wanted: bool) -> bool:
    """Print for each weight that is codes whether decoding to BF16 and encoding again gives the same ones. Returns
    whether all do. Raises PrecisionError for a checkpoint without such weights."""
    from precisionctl import console
    from precisionctl.checkpoints.open import open_checkpoint
    from precisionctl.errors import PrecisionError
    from precisionctl.reports import verify as report
    from precisionctl.verify.code_comparison import compare_with_bf16

    weights = compare_with_bf16(open_checkpoint(path), workers)
    if not weights:
        raise PrecisionError(
            "no weight is read as codes with their scales",
            where=path,
            do="Give a second checkpoint to compare it with.",
        )
    same = all(weight.idempotent for weight in weights)
    if json_wanted:
        print_json({"equal": same, "weights": [asdict(weight) for weight in weights]})
    else:
        console.show_tables([report.codes(weights)])
    return same


def check_rules(
    path: Path, target: str, ranks: int, expert_parallel: bool, reference: Path | None, json_wanted: bool
) -> bool:
    """Print the rules of a target that a directory breaks. Returns whether it would load the directory."""
    from precisionctl import console
    from precisionctl.commands.target_rules import check_directory
    from precisionctl.reports import verify as report

    found = check_directory(path, target, ranks, expert_parallel=expert_parallel, reference=reference)
    if json_wanted:
        print_json({"passes": found.passes, "findings": [asdict(finding) for finding in found.findings]})
    else:
        console.show_tables(report.rules(found.findings, found.title))
    return found.passes
