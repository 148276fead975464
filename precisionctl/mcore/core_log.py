"""The log of megatron-core and PyTorch. Their warnings and logging go to a file in the run's folder, as they would hide
the run's own lines on the terminal. Errors are shown all the same."""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from logging.handlers import MemoryHandler
from pathlib import Path

from precisionctl.errors import PrecisionctlError

FILE = "megatron.log"


@contextmanager
def core_log() -> Iterator[Callable[[Path | None], None]]:
    """A context that keeps warnings until the function it yields is called with the run's folder; from then on they go
    to the file there. Called with None, as on all ranks except the first, it drops them. An unforeseen error before
    that shows them."""
    kept, errors = MemoryHandler(capacity=1, flushLevel=logging.WARNING), logging.StreamHandler()
    kept.setLevel(logging.WARNING)
    # megatron-core sees our `run.json`, which is written first, and warns that it overwrites a broken checkpoint
    of_overwriting = "Overwriting old incomplete / corrupted checkpoint"
    kept.addFilter(lambda record: not record.getMessage().startswith(of_overwriting))
    errors.setLevel(logging.ERROR)
    with ExitStack() as until:

        def goes_to(folder: Path | None) -> None:
            there: logging.Handler = logging.NullHandler()
            if folder:
                there = logging.FileHandler(folder / FILE, delay=True, encoding="utf-8")
                there.setFormatter(logging.Formatter("%(asctime)s %(name)s: %(message)s"))
                until.callback(there.close)
            kept.setTarget(there)
            kept.flush()

        for handler in (kept, errors):
            logging.getLogger().addHandler(handler)
            until.callback(logging.getLogger().removeHandler, handler)
        logging.captureWarnings(True)
        until.callback(logging.captureWarnings, False)
        try:
            yield goes_to
        except PrecisionctlError:
            raise  # says what is wrong without them
        except Exception:
            if kept.target is None:
                shown = logging.StreamHandler()
                shown.addFilter(lambda record: record.levelno < errors.level)  # others are shown already
                kept.setTarget(shown)
                kept.flush()
            raise
