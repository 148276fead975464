"""The progress of a calibration on the disk, from which the same command continues after a kill.

`OUT.partial` has the identity of the calibration and the states after the passes so far. The result gets its name when
it is complete.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from precisionctl.checkpoints.output import Output, lock, open_kept, replace_file, write_then_rename
from precisionctl.errors import OutputError
from precisionctl.fp8 import sidecar
from precisionctl.fp8.state import Fp8States
from precisionctl.trainer.backends.recorder import Recorder
from precisionctl.trainer.parallel.world import World
from precisionctl.trainer.saved import run_folder
from precisionctl.untrusted.safe_files import read_json

_IDENTITY = "calibration.json"


class Progress:
    """The progress of the calibration with this `identity`. The first rank writes it, the others wait."""

    def __init__(self, output: Output, identity: Mapping[str, Any], world: World) -> None:
        self._output, self._identity, self._world = output, identity, world

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Create and lock `OUT.partial`, and write the identity into it. Raises OutputError if another process has the
        lock, or something else is there."""
        if not self._world.first:
            self._world.barrier()
            yield
            return
        partial = self._output.partial
        identity, ours = partial / _IDENTITY, ("lock", f"{_IDENTITY}.new")
        self._output.check_links()
        partial.mkdir(parents=True, exist_ok=True)
        with open_kept(partial / "lock") as file:
            lock(file, OutputError("another process is calibrating to this file", where=self._output.path))
            if not identity.is_file():  # else a calibration has begun there already
                if others := [path.name for path in partial.iterdir() if path.name not in ours]:
                    raise OutputError(f"{others[0]} is there, and no calibration left it", where=partial)
                self._output.check_free()
                replace_file(identity, json.dumps(self._identity, indent=1))
            self._world.barrier()
            yield

    def load(self, recorder: Recorder) -> int:
        """Load the states of earlier calls into a recorder. Returns the number of their passes.

        Raises OutputError if they are of another calibration, DamagedCheckpoint for files that no calibration wrote.
        """
        self._check_ours()
        saved = self._saved()
        if not saved:
            return 0
        states = sidecar.read(saved[max(saved)])
        recorder.load(states.modules)
        recorder.go_on_from(states.statistics)
        return max(saved)

    def _check_ours(self) -> None:
        """Raise OutputError if `OUT.partial` is of another calibration, DamagedCheckpoint if its identity cannot be
        read."""
        identity = self._output.partial / _IDENTITY
        found = read_json(identity, self._output.partial)
        run_folder.check_same(run_folder.Saved(0, 0, found), self._identity, self._output.partial)

    def _saved(self) -> dict[int, Path]:
        """The files of states, by number of passes."""
        files = self._output.partial.glob("*.safetensors")
        return {int(path.stem): path for path in files if path.stem.isdecimal()}

    def save(self, passes: int, states: Fp8States) -> None:
        """Save the states after this many passes, and remove earlier ones."""
        if not self._world.first:
            return
        older = self._saved().values()
        write_then_rename(self._output.partial / f"{passes:08}.safetensors", lambda path: sidecar.write(path, states))
        for path in older:
            path.unlink()

    def finish(self, states: Fp8States) -> None:
        """Write the result and remove `OUT.partial`."""
        if self._world.first:
            write_then_rename(self._output.path, lambda path: sidecar.write(path, states), beside=self._output.partial)
        self.clear()

    def clear(self) -> None:
        """Remove `OUT.partial`, the identity last: after a kill in between, it shows that the result is this
        calibration's."""
        self._world.barrier()  # other ranks may still be reading it
        if self._world.first:
            for path in self._output.partial.iterdir():
                if path.name != _IDENTITY:
                    path.unlink()
            shutil.rmtree(self._output.partial)
        self._world.barrier()

    def finished(self) -> Fp8States | None:
        """The result, if this calibration wrote it before it was killed; else None. Raises DestinationExists if
        something else is there."""
        if not os.path.lexists(self._output.path):
            return None
        try:
            self._check_ours()
        except OutputError:
            self._output.check_free()
        return sidecar.read(self._output.path)
