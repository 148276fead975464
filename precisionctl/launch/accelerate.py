"""accelerate: options of `accelerate launch`, for a script that trains a Hugging Face model (commands/launch.py)."""

from precisionctl.errors import CheckpointError
from precisionctl.launch.base import Launch, LaunchSource
from precisionctl.param import gemm_misfit


def launch(source: LaunchSource) -> Launch:
    """The options of `accelerate launch`. Raises CheckpointError for a checkpoint that is not a Hugging Face
    directory."""
    if not source.is_hugging_face:
        raise CheckpointError(
            "accelerate trains Hugging Face directories, and this is not one",
            where=source.path,
            do=f"Write one: {source.conversion('hf')}",
        )
    options: list[tuple[str, ...]] = [("--mixed_precision", "fp8" if source.state else "bf16")]
    notes = []
    if source.state:
        options += [
            ("--fp8_backend", "te"),
            ("--fp8_format", source.state.fp8_format),
            ("--fp8_margin", str(source.state.margin)),
            ("--fp8_amax_history_len", str(source.state.amax_history_len)),
            ("--fp8_amax_compute_algo", source.state.amax_compute_algo),
        ]
        # linears whose sizes FP8 takes, and no stacks of experts (utils/transformer_engine.py, convert_model)
        specs, linears = source.reader.specs, (job for job in source.plan.jobs if job.row.gemm)
        of_te = [
            job.module
            for job in linears
            if not (job.row.of_experts or any(gemm_misfit(specs[name].shape) for name in job.reads))
        ]
        notes.append("scales start at 1: amax histories stay in the sidecar; `convert` and `resume` can restore them")
        notes += source.fp8_notes(of_te)
    return Launch(
        "accelerate",
        ("accelerate", "launch"),
        tuple(options),
        yours=(f"your script, with {source.directory} as its model",),
        notes=tuple(notes),
    )
