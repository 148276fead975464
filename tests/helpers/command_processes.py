"""Commands in processes of their own, forked from one that has imported what they need: that takes five seconds."""

import multiprocessing
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["precisionctl.cli", "precisionctl.commands.plan_command", "torch.distributed"])


class CommandProcess:
    """`precisionctl` with these arguments in this environment, after some lines of Python."""

    def __init__(self, arguments: list[str], environment: Mapping[str, str], before: str = "") -> None:
        self.written = TemporaryDirectory()
        self.process = SERVER.Process(target=run, args=(self.written.name, arguments, dict(environment), before))
        self.process.start()
        self.kill = self.process.kill

    def ended(self) -> tuple[int | None, str, str]:
        """The exit code, and what was written to both streams."""
        self.process.join(100)
        out, err = ((Path(self.written.name) / name).read_text() for name in ("out", "err"))
        self.written.cleanup()
        return self.process.exitcode, out, err


def run(folder: str, arguments: list[str], environment: dict[str, str], before: str) -> None:
    for stream, name in ((sys.stdout, "out"), (sys.stderr, "err")):
        with open(Path(folder) / name, "wb") as file:
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["precisionctl", *arguments]
    exec(before, {})
    from precisionctl.cli import main

    main()
