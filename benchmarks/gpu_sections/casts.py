"""Would casts on the GPU pay in an export? `cp`, exports by this machine's cores, and the same casts by the GPU.

The GPU's way is what a `--device cuda` would do at best: threads read tensors into pinned memory, each with a stream of
its own, and write the codes that come back. It makes the bytes of an export, in one file and with no index. Its codes
are compared with those that the export has made.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from queue import SimpleQueue

import convert
import torch
from safetensors import safe_open
from torch import Tensor

from gpu_sections.common import Place, Report, Row, attempt, wait

E4M3 = torch.float8_e4m3fn
BLOCKS = {"dynamic": (1, 0), "block": (128, 128)}
"""By scheme of an export, the rows and columns that share a scale; no columns are all of them."""

THREADS = (4, 16)


def measure(place: Place, report: Report) -> None:
    workers = os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as folder:
        source, scratch = Path(folder) / "bf16", Path(folder)
        if place.small:
            convert.write_model(source, 512, 512, 2, 1000)
        else:
            convert.make_model(source, 4.0)
        size = convert.total_bytes(source) / 1e9
        attempt(report, {"by": "cp and sync", "gb": size}, partial(_copied, source, scratch / "copy"))
        for scheme in BLOCKS:
            row = {"scheme": scheme, "gb": size}
            made = scratch / scheme
            attempt(report, row | {"by": f"{workers} CPU workers"}, partial(_by_cores, scheme, source, made, workers))
            for threads in THREADS:
                way = partial(_second, partial(by_device, scheme, source, scratch / "codes", threads, place, made))
                attempt(report, row | {"by": f"{place.device.type}, {threads} threads"}, way)


def _copied(source: Path, target: Path) -> Row:
    return {"seconds": sorted(convert.copy_seconds(source, target)[0] for _ in range(3))[1]}


def _second(run: Callable[[], Row]) -> Row:
    """What a second run finds, as of the others (convert.py says why)."""
    run()
    return run()


def _by_cores(scheme: str, source: Path, target: Path, workers: int) -> Row:
    return dict(convert.run_child(f"hf to export {scheme}", source, target, workers))


@dataclass(frozen=True)
class Stored:
    """A tensor in a safetensors file, and where its bytes go."""

    name: str
    file: Path
    shape: tuple[int, ...]
    start: int
    size: int
    target: int

    @property
    def is_cast(self) -> bool:
        return ".layers." in self.name and self.name.endswith("proj.weight")


def stored(source: Path) -> Iterator[Stored]:
    """Of BF16 files; codes are half their size, and scales are few."""
    target = 0
    for file in sorted(source.glob("*.safetensors")):
        with open(file, "rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            header = json.loads(handle.read(length))
        for name, entry in header.items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                one = Stored(name, file, tuple(entry["shape"]), 8 + length + first, last - first, target)
                target += one.size // 2 if one.is_cast else one.size
                yield one


@dataclass(frozen=True)
class Hands:
    """What a thread works with: pinned memory for a tensor as it is read and as it is written, and a stream."""

    read: Tensor
    written: Tensor
    stream: AbstractContextManager[object]
    place: Place

    @classmethod
    def of(cls, size: int, place: Place) -> "Hands":
        read, written = (torch.empty(size, dtype=torch.uint8, pin_memory=not place.small) for _ in range(2))
        return cls(read, written, nullcontext() if place.small else torch.cuda.stream(torch.cuda.Stream()), place)  # type: ignore[no-untyped-call]

    def cast(self, one: Stored, block: tuple[int, int]) -> Tensor:
        """Codes of what was read, in pinned memory; there when this returns."""
        with self.stream:
            values = self.read[: one.size].view(torch.bfloat16).view(one.shape)
            codes, _ = coded(values.to(self.place.device, non_blocking=True), block)
            into = self.written[: codes.numel()]
            into.copy_(codes.view(torch.uint8).flatten(), non_blocking=True)
            if not self.place.small:
                torch.cuda.current_stream().synchronize()
        return into


def coded(values: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Codes of `[rows, columns]` and the multipliers of their blocks, with the arithmetic of an export: amax / 448,
    and values divided by that."""
    high, wide = block[0], block[1] or values.shape[1]
    rows, columns = values.shape
    padded = torch.nn.functional.pad(values, (0, -columns % wide, 0, -rows % high)).float()
    tiles = padded.view(padded.shape[0] // high, high, padded.shape[1] // wide, wide)
    amax = tiles.abs().amax((1, 3), keepdim=True)
    scale_inv = amax / torch.full_like(amax, 448)  # by a number, a GPU multiplies with its reciprocal
    scale_inv = torch.where(scale_inv > 0, scale_inv, 1.0)
    codes = (tiles / scale_inv).clamp_(-448, 448).to(E4M3).view(padded.shape)
    return codes[:rows, :columns].contiguous(), scale_inv[:, 0, :, 0]


def by_device(scheme: str, source: Path, target: Path, threads: int, place: Place, export: Path) -> Row:
    """Seconds of all tensors, synced; and of the codes, how many tensors' are those of the export."""
    tensors, block = list(stored(source)), BLOCKS[scheme]
    hands: SimpleQueue[Hands] = SimpleQueue()
    for _ in range(threads):
        hands.put(Hands.of(max(one.size for one in tensors), place))
    warm = hands.get()
    warm.cast(min((one for one in tensors if one.is_cast), key=lambda one: one.size), block)
    hands.put(warm)
    wait(place)
    start = time.perf_counter()
    files = {file: os.open(file, os.O_RDONLY) for file in {one.file for one in tensors}}
    out = os.open(target, os.O_CREAT | os.O_TRUNC | os.O_RDWR)

    def move(one: Stored) -> None:
        mine = hands.get()
        try:
            _read(files[one.file], mine.read[: one.size], one.start)
            made = mine.cast(one, block) if one.is_cast else mine.read[: one.size]
            _write(out, made, one.target)
        finally:
            hands.put(mine)  # or the other threads would wait for them

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(move, tensors))
    os.fsync(out)
    seconds = time.perf_counter() - start
    for number in (out, *files.values()):
        os.close(number)
    return {"seconds": seconds} | _compared(tensors, target, export)


def _read(file: int, into: Tensor, start: int) -> None:
    view, done = memoryview(into.numpy().data), 0
    while done < len(view):
        done += os.preadv(file, [view[done:]], start + done)


def _write(file: int, values: Tensor, start: int) -> None:
    view, done = memoryview(values.numpy().data), 0
    while done < len(view):
        done += os.pwrite(file, view[done:], start + done)


def _compared(tensors: list[Stored], made: Path, export: Path) -> Row:
    """With the codes of an export of the same scheme, if there is one."""
    equal = different = 0
    for file in sorted(export.glob("*.safetensors")):
        with safe_open(file, "pt") as theirs, open(made, "rb") as ours:
            names = set(theirs.keys())
            for one in tensors:
                if one.is_cast and one.name in names:
                    ours.seek(one.target)
                    codes = theirs.get_tensor(one.name)
                    same = codes.dtype == E4M3 and codes.view(torch.uint8).numpy().tobytes() == ours.read(
                        prod(one.shape)
                    )
                    equal, different = equal + same, different + (not same)
    return {"equal": equal, "different": different}
