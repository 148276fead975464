"""accelerate: options of `accelerate launch`, for a script that trains a Hugging Face model (commands/launch.py)."""

from precisionctl.errors import CheckpointError
from precisionctl.launch.base import Launch, LaunchSource


def launch(subject: LaunchSource) -> Launch:
    """Raises CheckpointError for a checkpoint that is not Hugging Face's."""
    if subject.reader.layout != "hf":
        raise CheckpointError(
            "accelerate trains Hugging Face's models, and this is a checkpoint of Megatron's",
            where=subject.path,
            do="Write one: `precisionctl convert CKPT NEW --to hf`.",
        )
    options: list[tuple[str, ...]] = [("--mixed_precision", "fp8" if subject.state else "bf16")]
    if subject.state:
        options += [
            ("--fp8_backend", "te"),
            ("--fp8_format", subject.state.fp8_format),
            ("--fp8_margin", str(subject.state.margin)),
            ("--fp8_amax_history_len", str(subject.state.amax_history_len)),
            ("--fp8_amax_compute_algo", subject.state.amax_compute_algo),
        ]
    note = "scales start anew: amax histories stay in the sidecar, and come back with `convert` or `resume`"
    return Launch(
        "accelerate",
        ("accelerate", "launch"),
        tuple(options),
        yours=(f"your script, with {subject.directory} as its model",),
        notes=(note,) if subject.state else (),
    )
