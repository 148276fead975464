"""What a plan will take, before it runs: memory from the plan, time from a short probe of this disk."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.chunks import shard_boxes
from precisionctl.checkpoints.megatron.keys import expert_of
from precisionctl.checkpoints.output import directory_above
from precisionctl.codes.elements import Element
from precisionctl.conversion.buffers import BUFFER, WIDEST, Buffers, worker_memory
from precisionctl.conversion.encoder import Encoder
from precisionctl.errors import DiskProblem
from precisionctl.planning.plan import Job, JobCodes, Plan, ScaleGroup
from precisionctl.torch_when_used import one_torch_thread, torch

PLANNED = 2100
"""Bytes that a plan takes for each tensor that is read or written, at most: in DeepSeek-V3 and Kimi-K2, BF16 or FP8,
900 to 1,600, and 1,900 from a `torch_dist` whose index PyTorch has pickled (benchmarks/planning.py)."""

PLACED = 600
"""Bytes for each box that a tensor of a Megatron target is cut into: of Kimi-K2 for 8 x 8 x 8 ranks, 560 in
`torch_dist` and 180 in `torch`."""

PROBE = 256 << 20
"""Bytes copied to measure the disk; fewer if the source is smaller, or the disk nearly full."""

_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Estimate:
    """`memory` is the bytes that the plan takes and the workers of a rank allocate, without the program itself;
    `seconds` the time that it will take, None if the disk cannot be measured: the source has no file, or the disk no
    room."""

    memory: int
    seconds: float | None


def estimate(
    plan: Plan, reader: Reader, destination: Path, workers: int, *, ranks: int = 1, verify: bool = False
) -> Estimate:
    """Estimate memory from the plan, and time from a short measurement of copying from the source to the destination's
    disk, and of encoding; with `verify` everything is done twice. Each of several `ranks` does an equal part, and
    counts as a machine of its own that copies and encodes as fast as this one. Raises DiskProblem where that disk takes
    no file."""
    memory = PLANNED * (len(reader.specs) + len(plan.targets)) + workers * worker_memory(plan)
    if plan.to_layout == "megatron":
        sizes, targets = plan.parallelism, plan.targets.items()
        cuts = Counter((spec, sizes.tensor_of(experts=expert_of(name) is not None)) for name, spec in targets)
        boxes = sum(count * sum(map(len, shard_boxes(spec, size))) for (spec, size), count in cuts.items())
        memory += PLACED * boxes

    rate = _copy_rate(reader, directory_above(destination))
    if rate is None:
        return Estimate(memory, None)
    return Estimate(memory, (2 if verify else 1) / ranks * (plan.nbytes / rate + _encode_seconds(plan) / workers))


def _copy_rate(reader: Reader, directory: Path) -> float | None:
    """Bytes per second that can be read from the source, written to `directory` and synced; None without files, or
    room. Raises DiskProblem where no file can be made."""
    disk = shutil.disk_usage(directory)
    most = min(PROBE, max(0, disk.free) // 2) if disk.total else PROBE  # others may need the room meanwhile
    block, copied, start = bytearray(BUFFER), 0, time.perf_counter()
    try:
        scratch = tempfile.TemporaryFile(dir=directory)
    except OSError as error:
        if error.errno in _FULL:
            return None
        what = f"nothing can be written there: {error.strerror}"
        raise DiskProblem(what, where=directory, do="Choose a destination that can be written to.") from error
    try:
        with scratch as target:
            for count in islice((count for file in reader.files for count in _read(file, block)), most // BUFFER):
                copied += target.write(memoryview(block)[:count])
            target.flush()
            os.fsync(target.fileno())
    except OSError as error:
        if error.errno not in _FULL:
            raise
        return None
    return copied / (time.perf_counter() - start) if copied else None


def _read(file: Path, block: bytearray) -> Iterator[int]:
    with open(file, "rb", buffering=0) as source:
        while count := source.readinto(block):
            yield count


def _encode_seconds(plan: Plan) -> float:
    """CPU seconds of one core for all that a plan encodes: for each element, with a global scale or without, some rows
    of the largest weight are encoded as the plan says."""
    elements: Counter[tuple[Element, bool]] = Counter()
    largest: dict[tuple[Element, bool], tuple[int, str, Job]] = {}
    for job in plan.jobs:
        for name, scales in job.codes.weights.items() if job.codes else ():
            spec = plan.targets[name]
            kind, count = (spec.element, scales.global_scale is not None), spec.rows * spec.columns
            elements[kind] += count
            if count > largest.get(kind, (0,))[0]:
                largest[kind] = (count, name, job)
    return sum(elements[kind] / _encode_rate(plan, name, job) for kind, (_, name, job) in largest.items())


def _encode_rate(plan: Plan, name: str, job: Job) -> float:
    """Values per second that one core encodes of a weight of a plan, from BF16."""
    assert job.codes is not None
    spec, scales = plan.targets[name], job.codes.weights[name]
    buffers = Buffers()
    _, rows = next(buffers.pieces(0, spec.rows, WIDEST * spec.columns))
    values = torch.randn(rows, spec.columns, generator=torch.Generator().manual_seed(0)).bfloat16()
    high = rows if scales.block[0] == spec.rows else scales.block[0]
    weights = {name: replace(scales, block=(high, scales.block[1]))}
    alone = ScaleGroup(weights, (job,), always=True) if job.codes.group else None
    here = replace(job, codes=JobCodes(weights, {}, alone, job.codes.scale_rounding))
    specs = {**plan.targets, name: replace(spec, shape=(rows, *spec.shape[1:]))}
    encoder = Encoder(specs, {}, buffers, lambda name, row, codes: None, lambda job: [(name, 0, values)])
    seconds = []
    with one_torch_thread():
        for _ in range(3):  # the first fills caches and takes memory
            start = time.perf_counter()
            encoder.encode(here)
            seconds.append(time.perf_counter() - start)
    return values.numel() / min(seconds)
