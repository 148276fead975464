"""One process at a time: a lock on a file, which ends with the process."""

import fcntl
import time
from typing import IO

from precisionctl.errors import OutputError


def lock(file: IO[str], taken: OutputError, patience: float = 0.0) -> None:
    """Lock an open file until it is closed. Raises `taken` where another process still has it after `patience` seconds,
    and OutputError where the file system has no locks."""
    give_up = time.monotonic() + patience
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= give_up:
                raise taken from None
            time.sleep(0.05)
        except OSError as error:
            raise OutputError(
                f"the file system has no locks: {error.strerror}",
                where=file.name,
                do="Choose another one, or have it mounted with locks (Lustre: -o flock).",
            ) from error
