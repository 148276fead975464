"""Tokenizers of tests, at work as those of checkpoints are."""

import os
import tempfile
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from transformers import PreTrainedTokenizerBase

from precisionctl.tokens.process import Process
from precisionctl.tokens.tokenizer import Tokenizer


def files_of(tokenizer: PreTrainedTokenizerBase) -> dict[str, bytes]:
    """What it is saved as."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


@contextmanager
def shared_processes(most: int = 4) -> Iterator[None]:
    """A process takes a second to start. Here equal tokenizers share one, and the last few stay."""
    known: OrderedDict[object, tuple[Process, int]] = OrderedDict()
    load = Tokenizer._loaded

    def loaded(self: Tokenizer) -> int:
        key = os.getpid(), self.key  # a fork must not speak into its parent's pipe
        if key not in known or not known[key][0].runs:
            end = load(self)
            assert self._process
            known[key] = self._process, end
        known.move_to_end(key)
        while len(known) > most:
            (pid, _), (process, _) = known.popitem(last=False)
            if pid == os.getpid():
                process.close()
        self._process, end = known[key]
        return end

    def close(self: Tokenizer) -> None:
        self._process = None

    with patch.object(Tokenizer, "_loaded", loaded), patch.object(Tokenizer, "close", close):
        yield
    for (pid, _), (process, _) in known.items():
        if pid == os.getpid():
            process.close()
