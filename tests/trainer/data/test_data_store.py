"""Tokens on a disk: made once, found again, made anew when anything that decides them changes, never half there."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conversations import CONVERSATION, MARKING_TEMPLATE, PLAIN_TEMPLATE, tokenizer, write_rows

from precisionctl.errors import DataError, DiskProblem
from precisionctl.tokens.tokenizer import Tokenizer
from precisionctl.trainer.data import load_rows, store
from precisionctl.trainer.data.store import About


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", [{"text": "a b c"}, {"text": "d e a"}])


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Grows by each folder that is made."""
    folders: list[Path] = []
    before = store._make
    monkeypatch.setattr(store, "_make", lambda folder, build: (folders.append(folder), before(folder, build)))
    return folders


def test_the_second_run_finds_what_the_first_one_made(tmp_path: Path, text: Path, made: list[Path]) -> None:
    loads = [load_rows(text, tokenizer(), 3, cache=tmp_path / "cache") for _ in range(2)]
    assert len(made) == 1
    assert loads[0].fingerprint == loads[1].fingerprint == load_rows(text, tokenizer(), 3).fingerprint
    assert loads[0].tokens.tolist() == loads[1].tokens.tolist()
    # another length, and packing or not, are other cuts of the same tokens
    load_rows(text, tokenizer(), 2, cache=tmp_path / "cache")
    assert len({folder for folder in made if folder.parent == tmp_path / "cache"}) == 1


def test_conversations_are_the_same_from_the_disk(tmp_path: Path, made: list[Path]) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": CONVERSATION}, {"messages": CONVERSATION[:2]}] * 5)
    loads = [load_rows(path, tokenizer(PLAIN_TEMPLATE), 64, cache=tmp_path / "cache") for _ in range(2)]
    assert len(made) == 1 and loads[0].notes == loads[1].notes != ()
    one, other = loads
    assert one.batch(range(10)).labels.tolist() == other.batch(range(10)).labels.tolist()
    assert one.fingerprint == other.fingerprint


def test_other_files_or_another_tokenizer_make_other_tokens(tmp_path: Path, text: Path, made: list[Path]) -> None:
    def load(**settings: str) -> None:
        load_rows(text, tokenizer(settings.get("template")), 2, cache=tmp_path / "cache")

    load()
    load(template=MARKING_TEMPLATE)
    os.utime(text, ns=(1, 1))
    load()
    text.write_text(text.read_text() + '\n{"text": "a"}')
    load()
    assert len(set(made)) == 4


def test_two_processes_make_it_once_and_a_killed_one_leaves_nothing_that_looks_whole(
    tmp_path: Path, text: Path
) -> None:
    """The child dies in the middle of writing; the next one makes all of it."""
    program = """
import os, signal, sys
from pathlib import Path
from conversations import tokenizer
from precisionctl.trainer.data import load_rows, store
write = store._write
def die(*arguments):
    write(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)
store._write = die
load_rows(Path(sys.argv[1]), tokenizer(), 3, cache=Path(sys.argv[2]))
"""
    cache = tmp_path / "cache"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", program, text, cache], env=environment)
    assert done.returncode == -signal.SIGKILL
    left = [path.name for path in cache.iterdir() if path.is_dir()]
    assert len(left) == 1 and left[0].endswith(".partial")
    assert (
        load_rows(text, tokenizer(), 3, cache=cache).tokens.tolist() == load_rows(text, tokenizer(), 3).tokens.tolist()
    )
    assert not [path for path in cache.iterdir() if path.name.endswith(".partial")]


def test_tokens_that_are_there_need_no_tokenizer(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several ranks the one that makes them starts a process, and a run that goes on starts none."""
    made = load_rows(text, tokenizer(), 3, cache=tmp_path / "cache")
    monkeypatch.setattr(Tokenizer, "_loaded", lambda self: pytest.fail("it is started"))
    found = load_rows(text, tokenizer(), 3, cache=tmp_path / "cache")
    assert found.tokens.tolist() == made.tokens.tolist() and found.padding == made.padding


@pytest.mark.parametrize("content", ["{", "[]", '{"tokens": 8}'])
def test_a_damaged_note_is_one_clear_error(tmp_path: Path, text: Path, content: str) -> None:
    load_rows(text, tokenizer(), 3, cache=tmp_path / "cache")
    (about,) = (tmp_path / "cache").rglob("about.json")
    about.write_text(content)
    with pytest.raises(DataError, match=r"damaged: .*Remove the folder"):
        load_rows(text, tokenizer(), 3, cache=tmp_path / "cache")
    shutil.rmtree(about.parent)
    load_rows(text, tokenizer(), 3, cache=tmp_path / "cache")


def test_a_truncated_file_is_one_clear_error(tmp_path: Path, text: Path) -> None:
    load_rows(text, tokenizer(), 3, cache=tmp_path / "cache")
    (tokens,) = (tmp_path / "cache").rglob("tokens.bin")
    tokens.write_bytes(tokens.read_bytes()[:-4])
    with pytest.raises(DataError, match="damaged: not 8 of int32"):
        load_rows(text, tokenizer(), 3, cache=tmp_path / "cache")


def test_a_long_tokenization_is_heard_of(tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "CALL_EVERY", 3)
    heard: list[int] = []
    for _ in range(2):  # the second one finds them
        load_rows(text, tokenizer(), 3, cache=tmp_path / "cache", on_tokens=heard.append)
    assert heard == [4, 8]


def test_a_place_that_cannot_be_written_to_is_one_clear_error(tmp_path: Path, text: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(DiskProblem, match="the tokens cannot be kept"):
        load_rows(text, tokenizer(), 3, cache=tmp_path / "cache")


def test_what_is_known_of_tokens_is_what_they_are(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": CONVERSATION}])
    rows = load_rows(path, tokenizer(MARKING_TEMPLATE), 64, cache=tmp_path / "cache")
    (about,) = (tmp_path / "cache").rglob("about.json")
    known = About(**json.loads(about.read_text()))
    assert (known.tokens, known.samples, known.largest) == (15, 1, 9)
    assert isinstance(rows.tokens, np.memmap) and rows.largest == int(rows.tokens.max())
