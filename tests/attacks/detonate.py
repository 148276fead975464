"""Read hostile files, one after the other, in a process that may hang or run out of memory: detonate.py HOW PATH...

Each must be refused with one short error, in no more memory than a model's description takes.
"""

import resource
import sys
from pathlib import Path

from precisionctl.checkpoints import dcp, torch_zip
from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.checkpoints.megatron_legacy import LegacyReader
from precisionctl.errors import PrecisionctlError
from precisionctl.fp8.extra_state import decode_payload
from precisionctl.plan import make_plan


def read_ranks(path: Path) -> None:
    reader = LegacyReader(path)
    _ = reader.optimizer_specs, reader.fp8, reader.common
    make_plan(reader, "hf")


READERS = {
    "metadata": dcp.read_index,
    "extra state": lambda path: decode_payload(path.read_bytes(), path),
    "object": lambda path: torch_zip.load(path.read_bytes(), path),
    "tensor": lambda path: torch_zip.locate(torch_zip.Span(path, 0, path.stat().st_size)),
    "skeleton": torch_zip.skeleton,
    "ranks": read_ranks,
    "config": lambda path: make_plan(HuggingFaceReader(path), "megatron"),
}
MEGABYTES = 300


def peak() -> int:
    """The most memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main() -> None:
    how, *paths = sys.argv[1:]
    before = peak()
    for path in paths:
        print(path, flush=True)
        try:
            READERS[how](Path(path))
        except PrecisionctlError as error:
            assert len(str(error)) < 500
        else:
            raise AssertionError("it was not refused")
        assert peak() - before < MEGABYTES


if __name__ == "__main__":
    main()
