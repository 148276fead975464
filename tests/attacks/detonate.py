"""Read hostile files, one after the other, in a process that may hang or run out of memory: detonate.py SAID HOW
PATH... What is said of each goes to the file SAID.

Each must be refused with one short error, in no more time and memory than a model's description takes.
"""

import json
import resource
import signal
import sys
import time
from pathlib import Path

from click.testing import CliRunner

from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.checkpoints.torch_files import dcp_metadata, torch_zip
from precisionctl.checkpoints.torch_legacy.reader import LegacyReader
from precisionctl.cli import main as program
from precisionctl.errors import PrecisionctlError
from precisionctl.fp8.extra_state import decode_payload
from precisionctl.planning.make_plan import make_plan


def read_ranks(path: Path) -> None:
    reader = LegacyReader(path)
    _ = reader.optimizer_specs, reader.fp8, reader.common
    make_plan(reader, "hf")


def command(path: Path) -> None:
    """`convert` to the other layout: one error, exit code 1, and nothing at the destination that looks whole."""
    layout = "hf" if any((path / name).exists() for name in (".metadata", "mp_rank_00")) else "megatron"
    destination = path.with_name(f"{path.name}-destination")
    done = CliRunner().invoke(program, ["convert", str(path), str(destination), "--to", layout])
    errors = sum(line.startswith("error[") for line in done.stderr.splitlines())
    assert "UnexpectedError" not in done.stderr, done.stderr
    if isinstance(done.exception, SystemExit) and done.exit_code == 1 and errors == 1:
        assert not destination.exists()
        partial = destination.with_name(f"{destination.name}.partial")
        assert not partial.is_dir() or not list(partial.rglob("metadata.json")), "it looks whole"
        raise PrecisionctlError(done.stderr)
    assert done.exception is None or done.exit_code == 1, done.exception
    raise AssertionError(f"exit code {done.exit_code}, {errors} errors: {done.output[-500:]} {done.exception!r}")


READERS = {
    "metadata": dcp_metadata.read_index,
    "directory": TorchDistReader,
    "extra state": lambda path: decode_payload(path.read_bytes(), path),
    "object": lambda path: torch_zip.load(path.read_bytes(), path),
    "tensor": lambda path: torch_zip.one_tensor(torch_zip.Span(path, 0, path.stat().st_size), "a"),
    "skeleton": torch_zip.skeleton,
    "ranks": read_ranks,
    "config": lambda path: make_plan(HuggingFaceReader(path), "megatron"),
    "command": command,
}
MEGABYTES = 300
SECONDS = 10
"""Of the CPU, for one."""


def peak() -> int:
    """The most memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


class TooLong(BaseException):
    """Nothing that reads may catch it."""


def too_long(*_: object) -> None:
    raise TooLong("it hangs")


def refused(how: str, path: str) -> str:
    """What the error says. Raises unless the file is refused within the bounds."""
    before, began = peak(), time.process_time()
    signal.alarm(30)  # what waits for a pipe takes no time of the CPU
    try:
        READERS[how](Path(path))
    except PrecisionctlError as error:
        said = str(error)
    else:
        raise AssertionError("it was not refused")
    finally:
        signal.alarm(0)
    assert len(said) < 5000, "a long error"
    assert peak() - before < MEGABYTES, f"it took {peak() - before} MB"
    assert time.process_time() - began < SECONDS, f"it took {time.process_time() - began} s"
    return said


def main() -> None:
    file, how, *paths = sys.argv[1:]
    signal.signal(signal.SIGALRM, too_long)
    said, failed = {}, []
    for path in paths:
        try:
            said[path] = refused(how, path)
        except (Exception, TooLong) as error:
            failed.append(f"{path}: {type(error).__name__}: {error}")
    Path(file).write_text(json.dumps(said))
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
