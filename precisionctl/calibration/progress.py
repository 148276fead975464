"""How far a calibration has come, on the disk: after a kill, the same command goes on from there.

`OUT.partial` says which calibration it is of, and holds the states that the passes made so far have left. The result
gets its name when it is whole.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from precisionctl.checkpoints.output import Output, lock, open_kept, replace_file, sync
from precisionctl.errors import DamagedCheckpoint, OutputError
from precisionctl.fp8 import sidecar
from precisionctl.fp8.state import Fp8States
from precisionctl.trainer.backends.recorder import Recorder
from precisionctl.trainer.parallel.world import World
from precisionctl.trainer.saved import run_folder

_IDENTITY = "calibration.json"


class Progress:
    """What is done of the calibration that `identity` names; the first rank writes it, the others wait."""

    def __init__(self, output: Output, identity: Mapping[str, Any], world: World) -> None:
        self._output, self._identity, self._world = output, identity, world

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the place, say whose it is, and keep others out. Raises OutputError where another process is at it, or
        something else is there."""
        if not self._world.first:
            self._world.barrier()
            yield
            return
        self._output.check_links()
        self._output.partial.mkdir(parents=True, exist_ok=True)
        with open_kept(self._output.partial / "lock") as file:
            lock(file, OutputError("another process is calibrating to this file", where=self._output.path))
            self._sign()
            self._world.barrier()
            yield

    def _sign(self) -> None:
        """Say which calibration this is, where none is begun."""
        partial = self._output.partial
        identity, ours = partial / _IDENTITY, ("lock", f"{_IDENTITY}.new")
        if identity.is_file():
            return
        if others := [path.name for path in partial.iterdir() if path.name not in ours]:
            raise OutputError(f"{others[0]} is there, and no calibration left it", where=partial)
        self._output.check_free()
        replace_file(identity, json.dumps(self._identity, indent=1))

    def load(self, recorder: Recorder) -> int:
        """Give a recorder what earlier calls left. Returns how many passes that is.

        Raises OutputError where they were of another calibration, DamagedCheckpoint for what none wrote.
        """
        self._check_ours()
        saved = self._saved()
        if not saved:
            return 0
        states = sidecar.read(saved[max(saved)])
        recorder.load(states.modules)
        if self._world.first:  # they are of all ranks already
            recorder.statistics = {module: dict(roles) for module, roles in states.statistics.items()}
        return max(saved)

    def _check_ours(self) -> None:
        """Raise OutputError where what is kept is of another calibration, DamagedCheckpoint for what none wrote."""
        identity = self._output.partial / _IDENTITY
        try:
            found = json.loads(identity.read_bytes())
        except (ValueError, RecursionError) as error:
            raise DamagedCheckpoint(f"not what a calibration writes: {error}", where=identity) from None
        if not isinstance(found, dict):
            raise DamagedCheckpoint("not what a calibration writes: no table", where=identity)
        run_folder.check_same(run_folder.Saved(0, 0, found), self._identity, self._output.partial)

    def _saved(self) -> dict[int, Path]:
        """Files of states, by how many passes had been made."""
        files = self._output.partial.glob("*.safetensors")
        return {int(path.stem): path for path in files if path.stem.isdecimal()}

    def save(self, passes: int, states: Fp8States) -> None:
        """Keep the states that so many passes have left, in place of earlier ones."""
        if not self._world.first:
            return
        older = self._saved().values()
        _write(self._output.partial / f"{passes:08}.safetensors", lambda path: sidecar.write(path, states))
        for path in older:
            path.unlink()

    def finish(self, states: Fp8States) -> None:
        """Write the result, and clear what was kept on the way."""
        if self._world.first:
            _write(self._output.path, lambda path: sidecar.write(path, states), beside=self._output.partial)
        self.clear()

    def clear(self) -> None:
        """Remove what was kept on the way; last what says which calibration it was of, so that a kill on the way can be
        told from a file of another's."""
        self._world.barrier()  # some may still be reading it
        if self._world.first:
            for path in self._output.partial.iterdir():
                if path.name != _IDENTITY:
                    path.unlink()
            shutil.rmtree(self._output.partial)
        self._world.barrier()

    def finished(self) -> Fp8States | None:
        """What this calibration wrote before it was killed, where it had come that far. Raises DestinationExists where
        something else is at its place."""
        if not os.path.lexists(self._output.path):
            return None
        try:
            self._check_ours()
        except OutputError:
            self._output.check_free()
        return sidecar.read(self._output.path)


def _write(path: Path, write: Callable[[Path], object], beside: Path | None = None) -> None:
    """Whole or not at all."""
    new = (beside or path.parent) / f"{path.name}.new"
    write(new)
    sync(new)
    os.rename(new, path)
    sync(path.parent)
