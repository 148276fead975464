"""Exports for Transformer Engine, and what they are made of."""

from pathlib import Path

import in_memory
import torch
from scoring import save

from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import execute
from precisionctl.fp8 import sidecar


def make_source(directory: Path, family: str = "llama-3", **sizes: object) -> Path:
    save(directory, family, dtype=torch.bfloat16, **sizes)
    sidecar.write(directory / sidecar.RELATIVE, in_memory.recorded(HuggingFaceReader(directory)))
    return directory


def export(source: Path, out: Path, **settings: object) -> Path:
    execute(plan_command(Request.export(source, out, "te", **settings)))  # type: ignore[arg-type]
    return out
