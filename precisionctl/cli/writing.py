"""Commands that write a checkpoint: convert and export-inference."""

import shlex
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

from precisionctl.cli.group import Command, kept_when_stopped, print_json, repository_of_source
from precisionctl.cli.options import (
    CHECKPOINT,
    NEW_PATH,
    POSITIVE,
    Choice,
    EngineName,
    RecipeName,
    Writing,
    architecture_option,
    exclude_option,
    fp8_state_option,
    grouped_columns_option,
    include_option,
    iteration_option,
    max_shard_size_option,
    megatron_fp8_options,
    parallelism_options,
    reference_option,
    writing_options,
)
from precisionctl.sizes import size

if TYPE_CHECKING:
    from precisionctl.commands.request import Request
    from precisionctl.conversion.command import PlannedCommand
    from precisionctl.conversion.outcome import Outcome
    from precisionctl.precision import Precision


_ASKED_OTHERWISE = {
    word: f"Did you mean `{options}`?"
    for word, options in {
        "gguf": "export-inference --target llama.cpp",
        **{name: f"export-inference --target {name}" for name in ("mlx", "vllm", "sglang", "tensorrt-llm")},
        **{name: f"--to megatron --container {name}" for name in ("torch_dist", "torch")},
        "megatron-bridge": "--to megatron",
        **{name: "--to hf" for name in ("huggingface", "safetensors", "nemo")},  # which NeMo 2 imports
        "bin": "--to hf --container bin",
        "fsdp": "--to dcp",
        **{name: f"--to hf --precision {name}" for name in ("bf16", "fp32", "fp8")},
    }.items()
}
"""Words for a result that are no value of `convert --to`, and what asks for it."""

_CARRYING_OUT = ["--workers", "--verify", "--dry-run", "--restart", "--max-shard-size"]


@click.command(
    cls=Command,
    short_help="Convert between formats, parallel sizes and precisions.",
    examples=[
        "convert Llama-3.2-1B llama --to megatron",
        "convert llama llama-hf --to hf --precision bf16 --verify",
        "convert Llama-3.1-70B cut --to megatron --tp 8 --pp 4 --dry-run",
    ],
    sections={
        "Result": ["--to", "--precision", "--container"],
        "FP8 and its state": [
            *("--recipe", "--fp8-state", "--drop-fp8-state", "--drop-encodings", "--include", "--exclude"),
            *("--te-version", "--grouped-columns"),
        ],
        "Optimizer": ["--drop-optimizer"],
        "Parallel sizes": [
            *("--tp", "--pp", "--vpp", "--first-stage-layers", "--last-stage-layers", "--ep", "--etp"),
        ],
        "Input": ["--architecture", "--reference", "--trust-reference", "--iteration"],
        "Execution": _CARRYING_OUT,
    },
)
@click.argument("source", type=CHECKPOINT)
@click.argument("destination", type=NEW_PATH)
@click.option(
    "--to",
    type=Choice(["hf", "megatron", "dcp", "torchtitan", "deepspeed"], elsewhere=_ASKED_OTHERWISE),
    required=True,
    help="Format of the result. dcp: PyTorch's distributed checkpoint, with Hugging Face's names. "
    "torchtitan: the same with torchtitan's names. deepspeed: a universal checkpoint.",
)
@click.option(
    "--precision",
    type=Choice(["keep", "bf16", "fp32", "fp8"]),
    default="keep",
    show_default=True,
    help="Precision of the result. FP8 state is kept in every case.",
)
@click.option("--container", help="For hf: safetensors (default) or bin. For megatron: torch_dist (default) or torch.")
@click.option(
    "--recipe",
    type=RecipeName(),
    help="FP8 recipe of the result: a bundled name or a TOML file. Default: the checkpoint's, or TE's.",
)
@parallelism_options
@click.option(
    "--te-version",
    type=Choice(["2", "1"]),
    default="2",
    show_default=True,
    callback=lambda _context, _option, value: int(value),
    help="Version of Transformer Engine that will load the FP8 state: 2 for 2.x, 1 for 0.6 to 1.14.",
)
@grouped_columns_option
@click.option("--drop-fp8-state", is_flag=True, help="Leave out the FP8 state.")
@click.option("--drop-encodings", is_flag=True, help="Leave out how weights were encoded: no way back to their codes.")
@fp8_state_option
@include_option
@exclude_option
@click.option("--drop-optimizer", is_flag=True, help="Leave out the optimizer and its schedule.")
@architecture_option
@reference_option
@click.option(
    "--trust-reference",
    is_flag=True,
    help="Take what --reference says where Megatron's arguments in SOURCE say otherwise. Shapes must fit it.",
)
@max_shard_size_option
@iteration_option
@megatron_fp8_options
@writing_options
def convert(recipe: str | None, megatron: tuple[str, ...], how: Writing, **what: Any) -> None:
    """Convert SOURCE from any format to any other, with its FP8 state.

    DESTINATION appears only when it is complete. If the command was stopped, the same command continues.

    `--to hf --precision fp8` gives weights that were codes before (FP8, INT8 or four bits) the same codes again, in
    the format that they had. Others are encoded as by `export-inference --target vllm`, with the scheme that fits
    --recipe. Megatron's own FP8 flags, such as --fp8-amax-history-len, are accepted beside --recipe.
    """
    from precisionctl.commands.request import Request
    from precisionctl.commands.storage import layout_and_container

    what["to"], what["container"] = layout_and_container(what["to"], what["container"])
    do(Request(recipe=precision_of(recipe, megatron), **what), how)


@click.command(
    "export-inference",
    cls=Command,
    short_help="Write FP8 or four-bit weights and scales for an inference engine.",
    examples=[
        "export-inference Qwen3-0.6B qwen3-fp8 --target vllm --scheme dynamic",
        "export-inference fp8-run served --target sglang --kv-cache fp8 --tp 2",
        "export-inference Qwen3-0.6B qwen3-fp4 --target vllm --scheme nvfp4a16",
    ],
    sections={
        "Engine": ["--target", "--scheme", "--tp", "--expert-parallel", "--kv-cache", "--fp8-state"],
        "What is encoded": ["--include", "--exclude", "--recipe", "--keep-misfits"],
        "Input": ["--architecture", "--reference", "--iteration"],
        "Execution": [*_CARRYING_OUT, "--base-model"],
    },
)
@click.argument("source", metavar="CHECKPOINT", type=CHECKPOINT)
@click.argument("destination", type=NEW_PATH)
@click.option(
    "--target", type=EngineName(), required=True, help="vllm, sglang, tensorrt-llm, transformers, te, llama.cpp or mlx."
)
@click.option(
    "--scheme",
    type=Choice(
        [
            *("static", "dynamic", "block", "mxfp8", "nvfp4", "nvfp4a16", "mxfp4", "w4a16"),
            *("bf16", "f16", "q8_0", "q6_k", "q5_k_m", "q5_k_s", "q4_k_m", "q4_k_s", "q4_0", "4bit", "8bit"),
        ]
    ),
    help="FP8: static (recorded input scales), dynamic (per token), block (per 128 values), mxfp8 (per 32). Four bits: "
    "nvfp4 (recorded input scales), mxfp4 (per 32), nvfp4a16 and w4a16 (weights only). Default: the best of FP8, or "
    "what the run was in. "
    "For llama.cpp: bf16 (the default), f16, q8_0, q4_0, and the K-quants between these; mxfp4 and nvfp4 keep such "
    "codes of the source. "
    "For mlx: bf16 (the default), f16, 4bit, 8bit, mxfp4, mxfp8, nvfp4.",
)
@click.option(
    "--tp",
    "ranks",
    type=POSITIVE,
    default=1,
    show_default=True,
    help="Number of GPUs that the engine will split the model over.",
)
@click.option("--expert-parallel", is_flag=True, help="The engine will give each GPU whole experts, not parts of all.")
@click.option("--kv-cache", type=Choice(["fp8"]), help="Store scales of keys and values for an FP8 KV cache.")
@click.option("--keep-misfits", is_flag=True, help="Keep weights in BF16 if the engine refuses their shapes.")
@fp8_state_option
@architecture_option
@reference_option
@include_option
@exclude_option
@click.option("--base-model", metavar="ORG/NAME", help="The source's name on the Hub, for the model card.")
@click.option(
    "--recipe",
    type=RecipeName(),
    help="Recipe that counts instead of the run: which modules stay in BF16 and, if it is one of 128-blocks, MXFP8 or "
    "NVFP4, the scheme.",
)
@max_shard_size_option
@iteration_option
@writing_options
@click.pass_context
def export_inference(ctx: click.Context, /, recipe: str | None, how: Writing, **what: Any) -> None:
    """Write CHECKPOINT in FP8 or four bits for an inference engine, with the scales that training recorded.

    It needs no calibration data. Linears of attention and MLP are encoded, the rest stays in BF16. Weights that are
    encoded already keep their codes if these fit the scheme.
    """
    from precisionctl.commands.request import Request

    what["base_model"] = what["base_model"] or repository_of_source(ctx)
    do(Request.export(recipe=precision_of(recipe), **what), how)


def precision_of(recipe: str | None, overrides: tuple[str, ...] = ()) -> "Precision | None":
    """The FP8 precision of a recipe with overrides (without a name: of `fp8-delayed`), FP8 even in a BF16 recipe since
    the command asks for it; None if neither is given."""
    from precisionctl.recipe import load_recipe

    if not (recipe or overrides):
        return None
    return replace(load_recipe(recipe or "fp8-delayed", overrides).precision, fp8=True)


def do(request: "Request", how: Writing) -> None:
    """Show the plan of a request, or carry it out and say what was done. With several ranks only the first prints."""
    from precisionctl import console

    if how.dry_run:
        show_plan(request, how)
        return
    command, outcome = carry_out(request, how)
    if command is None:
        return
    notes = [*command.notes, *(outcome.notes if outcome else ())]
    if how.json_wanted:
        print_json(_in_short(command) | {"done_before": outcome is None, "notes": notes})
        return
    path = command.output.path
    done = f"Wrote {path}" if outcome else f"Already done: this command wrote {path}"
    lines = [f"{done}, {size(command.plan.nbytes)}.", *notes]
    if how.verify and outcome:
        lines.insert(1, "Read back and compared with the source: the same.")
    console.show_lines([*lines, next_step(request, command, compared=how.verify)])


def show_plan(request: "Request", how: Writing) -> None:
    """Show the plan of a request, and what carrying it out would take; on the first rank alone."""
    from precisionctl import console
    from precisionctl.commands.plan_command import plan_command
    from precisionctl.conversion.command import check_room
    from precisionctl.conversion.estimate import estimate
    from precisionctl.conversion.ranks import place_among_ranks
    from precisionctl.reports import plan as report

    rank, ranks = place_among_ranks() or (0, 1)
    if rank > 0:
        return
    command = plan_command(request)
    path = command.output.path
    expected = estimate(command.plan, command.reader, path, how.workers, ranks=ranks, verify=how.verify)
    if how.json_wanted:
        check_room(command)  # first, as there is one document on stdout
        print_json(
            command.plan.describe() | _in_short(command) | {"notes": command.notes, "estimate": asdict(expected)}
        )
    else:
        console.show_tables(report.tables(command.plan, expected, ranks))
        console.show_lines(command.notes)
        check_room(command)  # last, as the plan may be meant for another machine


def carry_out(request: "Request", how: Writing) -> "tuple[PlannedCommand | None, Outcome | None]":
    """Plan and execute a request. Returns the command (None on all ranks but the first), and its outcome (None if the
    checkpoint was complete already)."""
    from precisionctl import console
    from precisionctl.commands.plan_command import plan_command
    from precisionctl.conversion import ranks
    from precisionctl.conversion.command import execute

    here = ranks.from_environment()
    with here.together():  # planning too: an error on one rank is raised on all
        command = plan_command(request)
        total = (2 if how.verify else 1) * command.plan.nbytes // here.count
        doing = "writing and reading back" if how.verify else "writing"
        with kept_when_stopped(), console.bytes_progress(doing, total, quiet=not here.first) as on_bytes:
            outcome = execute(
                command, workers=how.workers, restart=how.restart, verify=how.verify, ranks=here, on_bytes=on_bytes
            )
    return command if here.first else None, outcome


def _in_short(command: "PlannedCommand") -> dict[str, Any]:
    """What a result is and how much, as JSON; a plan's jobs and tensors are for `--dry-run`."""
    plan = command.plan
    return {
        "model": plan.model.described(),
        "source": plan.from_layout,
        "target": plan.to_layout,
        "parallelism": asdict(plan.parallelism),
        "destination": str(command.output.path),
        "tensors": len(plan.targets),
        "coded_weights": plan.coded_weight_count,
        "bytes": plan.nbytes,
    }


def next_step(request: "Request", command: "PlannedCommand", *, compared: bool) -> str:
    """What to do with a result, as a command: the last line that is printed. `compared` says that it has been compared
    with its source already."""
    from precisionctl.checkpoints.gguf.writer import GgufWriter
    from precisionctl.checkpoints.huggingface import HuggingFaceWriter
    from precisionctl.checkpoints.open import open_checkpoint
    from precisionctl.errors import PrecisionctlError
    from precisionctl.launch.megatron_lm import has_flags

    path = shlex.quote(str(command.output.path))
    if isinstance(command.writer, HuggingFaceWriter):
        return f"To the Hub: hf upload ORG/NAME {path}"
    if request.to == "megatron" and has_flags(command.plan.model):  # else it would be refused
        return f"To continue in Megatron-LM: precisionctl launch-args {path} --framework megatron-lm"
    # `verify` cannot be told how to read what these are given for, and finds rounded values and masters different
    read_by = request.iteration, request.architecture, request.grouped_columns, request.trust_reference or None
    other_values = request.precision != "keep" or (request.storage.is_state_dict and command.run_reader)
    if compared or other_values or any(hint is not None for hint in read_by):
        inspect = f"precisionctl inspect {path}"
        if isinstance(command.writer, GgufWriter):  # factors in one do not say the settings that they are of
            try:
                open_checkpoint(command.output.path)
            except (PrecisionctlError, OSError):  # the result is there: no error of a hint may fail the command
                # first, as a source that needs one has no config of its own: an adapter, DeepSpeed's, DCP
                inspect += f" --reference {shlex.quote(str(request.reference or request.source))}"
        return f"To see what it holds: {inspect}"
    reference = f" --reference {shlex.quote(str(request.reference))}" if request.reference else ""
    return f"To compare both: precisionctl verify {shlex.quote(str(request.source))} {path}{reference}"
