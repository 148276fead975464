"""What a run of `resume` says of itself in each of its checkpoints."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.megatron.keys import RUN_FILE
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.errors import DamagedCheckpoint
from precisionctl.untrusted.safe_files import has_file, read_file


def read_run_file(iteration: Path) -> dict[str, Any] | None:
    """The `run.json` in the directory of an iteration, with the settings that make the run by name in `identity`; None
    if another program wrote it. Raises DamagedCheckpoint for one that has none."""
    file = iteration / RUN_FILE
    if not has_file(file, iteration):
        return None
    try:
        said = json.loads(read_file(file, iteration))
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"not what a run writes: {error}", where=file) from None
    if not (isinstance(said, dict) and isinstance(said.get("identity"), dict)):
        raise DamagedCheckpoint("not what a run writes: it does not say which run it is", where=file)
    if not isinstance(said.get("fp8"), bool | None):
        raise DamagedCheckpoint("not what a run writes: `fp8` is no true or false", where=file)
    return said


def identity_of_run(reader: Reader) -> Mapping[str, Any] | None:
    """The settings of the run of ours that wrote a checkpoint, by name; None if another program wrote it, or if it was
    converted since. Raises as `read_run_file`."""
    said = _said(reader)
    return None if said is None else said["identity"]


def ended_in_bf16(reader: Reader) -> bool:
    """Whether a run of ours computed the checkpoint's last step in BF16. Raises as `read_run_file`."""
    said = _said(reader)
    return said is not None and said.get("fp8") is False


def _said(reader: Reader) -> dict[str, Any] | None:
    return read_run_file(reader.path) if isinstance(reader, TorchDistReader) else None
