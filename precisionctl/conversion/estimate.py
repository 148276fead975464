"""What a plan will take, before it runs: memory from the plan, time from a short probe of this disk."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO

from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.output import directory_above
from precisionctl.conversion.buffers import BUFFER, worker_memory
from precisionctl.errors import DiskProblem
from precisionctl.fp8 import numerics
from precisionctl.planning.plan import Plan
from precisionctl.torch_when_used import torch

PLANNED = 2100
"""Bytes that a plan takes for each tensor that is read or written, at most: in DeepSeek-V3 and Kimi-K2, BF16 or FP8,
900 to 1,600, and 1,900 from a `torch_dist` whose index PyTorch has pickled (benchmarks/planning.py)."""

PROBE = 256 << 20
"""Bytes copied to measure the disk; fewer if the source is smaller, or the disk nearly full."""

_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Estimate:
    """`memory` is the bytes that the plan takes and the workers allocate, without the program itself; `seconds` the
    time that it will take, None if the disk cannot be measured: the source has no file, or the disk no room."""

    memory: int
    seconds: float | None


def estimate(plan: Plan, reader: Reader, destination: Path, workers: int) -> Estimate:
    """Estimate memory from the plan, and time from a short measurement of copying from the source to the destination's
    disk, and of encoding. Raises DiskProblem where that disk takes no file."""
    memory = PLANNED * (len(reader.specs) + len(plan.targets)) + workers * worker_memory(plan)
    rate = _copy_rate(reader, directory_above(destination))
    if rate is None:
        return Estimate(memory, None)
    codes = sum(plan.job_bytes(job) for job in plan.jobs if job.encode)
    return Estimate(memory, plan.nbytes / rate + (codes / (_encode_rate() * workers) if codes else 0.0))


def _copy_rate(reader: Reader, directory: Path) -> float | None:
    """Bytes per second that can be read from the source, written to `directory` and synced; None without files, or
    room."""
    disk = shutil.disk_usage(directory)
    most = min(PROBE, max(0, disk.free) // 2) if disk.total else PROBE  # others may need the room meanwhile
    block, copied, start = bytearray(BUFFER), 0, time.perf_counter()
    try:
        with _scratch_file(directory) as target:
            for count in islice((count for file in reader.files for count in _read(file, block)), most // BUFFER):
                copied += target.write(memoryview(block)[:count])
            target.flush()
            os.fsync(target.fileno())
    except OSError as error:
        if error.errno not in _FULL:
            raise
        return None
    return copied / (time.perf_counter() - start) if copied else None


def _scratch_file(directory: Path) -> IO[bytes]:
    try:
        return tempfile.TemporaryFile(dir=directory)
    except OSError as error:
        if error.errno in _FULL:
            raise
        what = f"nothing can be written there: {error.strerror}"
        raise DiskProblem(what, where=directory, do="Choose a destination that can be written to.") from error


def _read(file: Path, block: bytearray) -> Iterator[int]:
    with open(file, "rb", buffering=0) as source:
        while count := source.readinto(block):
            yield count


def _encode_rate() -> float:
    """Codes per second that one core makes from BF16 values, including the amax."""
    values = torch.zeros(64, 128 * 1024, dtype=torch.bfloat16)
    codes = torch.empty(values.shape, dtype=torch.float8_e4m3fn)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    start = time.perf_counter()
    numerics.amax(values)
    numerics.encode_by_scale_inv(values, torch.ones(()), codes, numerics.scratch_for(values))
    seconds = time.perf_counter() - start
    torch.set_num_threads(threads)
    return values.numel() / seconds
