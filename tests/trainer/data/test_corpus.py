"""`tokenize`: Megatron's .bin and .idx by several processes, the same bytes however it is stopped and by how many."""

import json
import os
import signal
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from command_line import run
from conversations import CONVERSATION, MARKING_TEMPLATE, tokenizer, write_rows
from transformers import AutoTokenizer

from precisionctl.errors import NOT_BEGUN, DataError, OutputError, UnknownFormat
from precisionctl.tokens.tokenizer import Tokenizer
from precisionctl.trainer.data import corpus, load_rows, tokenize
from precisionctl.trainer.data.corpus import Corpus, make_corpus
from precisionctl.trainer.data.find import source_of
from precisionctl.trainer.data.store import cache_key

TEXTS = [" ".join("abcde"[(i * j) % 5] for j in range(i % 7)) for i in range(40)]
DOCUMENTS = [text for text in TEXTS if text]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tokenizer and texts, of which a few are tokenized at a time."""
    (tmp_path / "words").mkdir()
    for name, content in tokenizer(MARKING_TEMPLATE)._files.items():
        (tmp_path / "words" / name).write_bytes(content)
    write_rows(tmp_path / "texts.jsonl", [{"text": text} for text in TEXTS])
    monkeypatch.setattr(tokenize, "PIECES_AT_ONCE", 3)
    return tmp_path


def of_megatron(prefix: Path) -> Any:
    """The corpus as Megatron's own class reads it. Importing it takes five seconds, which the others need not wait."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of what megatron-core imports from it
        from megatron.core.datasets.indexed_dataset import IndexedDataset
    return IndexedDataset(str(prefix))


def made(place: Path, name: str, workers: int = 1, data: str = "texts.jsonl", *, restart: bool = False) -> Corpus:
    source = source_of(place / data)
    return make_corpus(source, place / name, place / "words", workers, lambda size: None, restart=restart)


def bytes_of(place: Path, name: str) -> dict[str, bytes]:
    return {
        file.name.removeprefix(name): file.read_bytes()
        for file in place.iterdir()
        if file.is_file() and file.stem == name
    }


def test_megatron_reads_each_document_s_tokens_and_any_number_of_workers_makes_the_same_bytes(place: Path) -> None:
    told: list[int] = []
    one = make_corpus(source_of(place / "texts.jsonl"), place / "one", place / "words", 1, told.append, restart=False)
    assert (one, sum(told)) == (made(place, "three", 3), sum(map(len, TEXTS)))
    assert bytes_of(place, "one") == bytes_of(place, "three") and bytes_of(place, "one").keys() == {".bin", ".idx"}
    theirs = of_megatron(place / "one")
    with_end = [[*tokenizer().encode(text), 0] for text in DOCUMENTS]
    assert [theirs[i].tolist() for i in range(len(theirs))] == with_end
    assert theirs.document_indices.tolist() == list(range(len(DOCUMENTS) + 1)) and theirs[0].dtype == np.uint16
    assert (one.documents, one.tokens, one.learned) == (len(DOCUMENTS), sum(map(len, with_end)), None)


def test_resume_trains_on_the_same_rows_as_on_the_text_itself(place: Path) -> None:
    made(place, "corpus", 2)
    ours, plain = (load_rows(place / name, tokenizer(), 8) for name in ("corpus", "texts.jsonl"))
    assert ours.tokens.tolist() == plain.tokens.tolist() and len(ours) == len(plain) and ours.notes == ()


def test_conversations_keep_what_is_to_be_learned(place: Path) -> None:
    rows = [{"messages": CONVERSATION[:2]}, {"messages": [CONVERSATION[0]]}, {"messages": CONVERSATION}]
    write_rows(place / "chats.jsonl", rows)
    chats = made(place, "chats", 2, "chats.jsonl")
    ours, plain = (load_rows(place / name, tokenizer(MARKING_TEMPLATE), 12) for name in ("chats", "chats.jsonl"))
    assert len(ours) == len(plain) == 2  # nothing of the second is to be learned
    for row in range(2):
        (one,), (other,) = ours.pieces(row), plain.pieces(row)
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.learned is not None and other.learned is not None
        assert one.learned.tolist() == other.learned.tolist()
    learned = np.frombuffer((place / "chats.learned").read_bytes(), np.bool_)
    assert chats.learned == learned.sum() == 3 + 3 + 2 and chats.tokens == len(learned)
    before = ours.fingerprint
    (place / "chats.learned").write_bytes((~learned).tobytes())
    assert load_rows(place / "chats", tokenizer(MARKING_TEMPLATE), 12).fingerprint != before
    (place / "chats.learned").write_bytes(b"\1")
    with pytest.raises(DataError, match=r"1 bytes, and its .bin has"):
        load_rows(place / "chats", tokenizer(MARKING_TEMPLATE), 12)


@dataclass
class Dies:
    """The tokenizer's method, until it has been called so many times."""

    calls: int
    texts: Any = Tokenizer.texts

    def __call__(self, each: Tokenizer, pieces: Any) -> Any:
        self.calls -= 1
        if self.calls < 0:
            raise KeyboardInterrupt
        return self.texts(each, pieces)


@pytest.mark.parametrize("after", [0, 9])
def test_a_killed_command_goes_on_and_makes_the_same_bytes(
    after: int, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "TOKENS_AT_ONCE", 10)
    made(place, "whole")
    with monkeypatch.context() as dying:
        dies = Dies(after)
        dying.setattr(Tokenizer, "texts", lambda each, pieces: dies(each, pieces))
        with pytest.raises(KeyboardInterrupt):
            made(place, "parts")
    assert not bytes_of(place, "parts").keys() & {".bin", ".idx"}
    journal = place / "parts.partial" / "journal.json"
    assert journal.exists() == (after > 0)
    with open(place / "parts.partial" / ".bin", "ab") as file:
        file.write(b"what was written after the journal")
    left = Dies(99)
    monkeypatch.setattr(Tokenizer, "texts", lambda each, pieces: left(each, pieces))
    made(place, "parts")
    assert bytes_of(place, "parts") == bytes_of(place, "whole") and not (place / "parts.partial").exists()
    assert after < 9 or 99 - left.calls < 7  # of 14 batches


def test_a_folder_without_a_tokenizer_is_answered_with_what_has_one(place: Path) -> None:
    (place / "nothing").mkdir()
    with pytest.raises(UnknownFormat, match="--tokenizer takes a checkpoint, or a directory with"):
        make_corpus(
            source_of(place / "texts.jsonl"), place / "never", place / "nothing", 1, lambda size: None, restart=False
        )


def test_a_tokenizer_alone_may_be_gpt_2s_two_files(place: Path) -> None:
    for file in (place / "words").iterdir():
        file.unlink()
    (place / "words" / "config.json").write_text('{"model_type": "gpt2"}')
    letters = {"a": 0, "b": 1, "c": 2, "d": 3, "e": 4, "Ġ": 5, "<|endoftext|>": 6}
    (place / "words" / "vocab.json").write_text(json.dumps(letters))
    (place / "words" / "merges.txt").write_text("#version: 0.2\n")
    theirs = AutoTokenizer.from_pretrained(place / "words")
    assert made(place, "x").tokens == sum(len(theirs.encode(text)) + 1 for text in DOCUMENTS)  # each with its end


def test_a_signal_stops_it_and_the_same_command_goes_on(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def texts(each: Tokenizer, pieces: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return Dies.texts(each, pieces)

    words = ("tokenize", place / "texts.jsonl", place / "x", "--tokenizer", place / "words", "--workers", "1")
    with monkeypatch.context() as stopping:
        stopping.setattr(Tokenizer, "texts", texts)
        stopped = run(*words)
    assert stopped.exit_code == 75 and "Stopped by SIGTERM." in stopped.stdout
    assert not (place / "x.bin").exists()
    done = run(*words)
    assert done.exit_code == 0 and f"{len(DOCUMENTS)} documents" in done.stdout
    assert made(place, "y").documents == len(DOCUMENTS) and bytes_of(place, "x") == bytes_of(place, "y")


def test_a_kill_between_the_last_two_names_is_mended(place: Path) -> None:
    made(place, "whole")
    made(place, "x")
    partial = place / "x.partial"
    partial.mkdir()
    (partial / "lock").touch()
    known = Corpus(
        cache_key(source_of(place / "texts.jsonl").identity, tokenizer(MARKING_TEMPLATE)), 8, 40, 157, written=True
    )
    (partial / "journal.json").write_text(json.dumps(vars(known)))
    (place / "x.idx").rename(partial / ".idx")
    made(place, "x")
    assert bytes_of(place, "x") == bytes_of(place, "whole") and not partial.exists()


def test_a_kill_after_the_last_name_is_mended_and_is_no_leave_to_write_over(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(_: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as dying:
        dying.setattr(corpus, "shutil", SimpleNamespace(rmtree=die))
        with pytest.raises(KeyboardInterrupt):
            made(place, "x")
    whole = bytes_of(place, "x")
    assert whole.keys() == {".bin", ".idx"} and (place / "x.partial").exists()
    write_rows(place / "others.jsonl", [{"text": "e d c"}])
    with pytest.raises(OutputError, match="already exists"):
        made(place, "x", data="others.jsonl")
    assert made(place, "x").documents == len(DOCUMENTS)
    assert bytes_of(place, "x") == whole and not (place / "x.partial").exists()


def test_other_data_discards_what_is_left_only_when_told(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "TOKENS_AT_ONCE", 10)
    with monkeypatch.context() as dying:
        dies = Dies(5)
        dying.setattr(Tokenizer, "texts", lambda each, pieces: dies(each, pieces))
        with pytest.raises(KeyboardInterrupt):
            made(place, "x")
    left = (place / "x.partial" / ".bin").read_bytes()
    write_rows(place / "texts.jsonl", [{"text": "e d c"}])
    with pytest.raises(OutputError, match="unfinished output of other data is there.*Run with --restart"):
        made(place, "x")
    assert left and (place / "x.partial" / ".bin").read_bytes() == left
    assert made(place, "x", restart=True).documents == 1
    theirs = of_megatron(place / "x")
    assert theirs[0].tolist() == [8, 7, 6, 0]


def test_what_is_tokenized_is_not_tokenized_as_text(place: Path) -> None:
    """Ids of two bytes below 128 are valid UTF-8."""
    made(place, "corpus")
    for name in ("corpus", "corpus.bin", "corpus.idx", "corpus.bin#text"):
        said = run("tokenize", place / name, place / "again", "--tokenizer", place / "words")
        assert "it is tokenized already" in said.output and "`resume`, `calibrate` or `eval`" in said.output, name
    assert not [*place.glob("again*")]


@pytest.mark.parametrize("there", ["x.bin", "x.idx", "x.learned"])
def test_nothing_is_written_over(place: Path, there: str) -> None:
    (place / there).write_text("mine")
    with pytest.raises(OutputError, match="already exists"):
        made(place, "x")
    assert (place / there).read_text() == "mine" and not (place / "x.partial").exists()


def test_a_folder_of_another_program_is_left_alone(place: Path) -> None:
    (place / "x.partial").mkdir()
    (place / "x.partial" / ".bin").write_text("mine")
    with pytest.raises(OutputError, match="something else is in the place of this command's unfinished output"):
        made(place, "x")
    assert (place / "x.partial" / ".bin").read_text() == "mine"


def test_data_without_a_token_and_data_that_is_not_there_are_refused(place: Path) -> None:
    (place / "none.jsonl").write_text("")
    (place / "broken.jsonl").write_text('{"text": "a"}\n{')
    (place / "nothing.json").write_text("[ ]")
    write_rows(place / "empty.jsonl", [{"text": ""}])
    for name in ("none.jsonl", "nothing.json", "empty.jsonl"):
        with pytest.raises(DataError, match="no text in it, and no row") as refused:
            made(place, "x", data=name)
        assert refused.value.where == str(place / name)
    with pytest.raises(DataError, match="JSON"):
        made(place, "x", data="broken.jsonl")
    with pytest.raises(DataError, match="no such file or directory"):
        made(place, "y", data="nowhere.jsonl")
    assert not list(place.glob("*.partial"))


def test_conversations_without_a_word_to_learn_are_refused_and_leave_nothing(place: Path) -> None:
    write_rows(place / "chats.jsonl", [{"messages": [{"role": "user", "content": "a b"}]}] * 3)
    with pytest.raises(DataError, match="no conversation has text of the assistant to learn"):
        made(place, "chats", data="chats.jsonl")
    assert not [*place.glob("chats.bin"), *place.glob("chats.partial")]


def test_conversations_of_which_nothing_is_learned_are_counted_also_after_a_kill(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"messages": CONVERSATION}, {"messages": CONVERSATION[:1]}, {"messages": []}]
    write_rows(place / "chats.jsonl", rows * 3)
    monkeypatch.setattr(corpus, "TOKENS_AT_ONCE", 1)
    monkeypatch.setattr(tokenize, "PIECES_AT_ONCE", 2)
    dies = Dies(3, Tokenizer.samples)
    with monkeypatch.context() as dying:
        dying.setattr(Tokenizer, "samples", lambda each, pieces: dies(each, pieces))
        with pytest.raises(KeyboardInterrupt):
            made(place, "chats", data="chats.jsonl")
    assert json.loads((place / "chats.partial" / "journal.json").read_text())["silent"] in range(1, 6)
    note = "6 conversations have nothing to learn, and no place in `resume`"
    assert made(place, "chats", data="chats.jsonl").told()[-1] == note


def test_an_empty_text_is_no_document(place: Path) -> None:
    """Nor is it in Megatron's preprocess_data.py (`if len(doc_ids) > 0`)."""
    write_rows(place / "some.jsonl", [{"text": text} for text in ("", "a b", "", "c")])
    write_rows(place / "same.jsonl", [{"text": text} for text in ("a b", "c")])
    assert made(place, "some", data="some.jsonl").documents == made(place, "same", data="same.jsonl").documents == 2
    assert all((place / f"some{end}").read_bytes() == (place / f"same{end}").read_bytes() for end in (".bin", ".idx"))


@pytest.mark.parametrize("listed", [True, False])
def test_two_chat_templates_of_one_name_are_refused_unless_they_are_the_same(place: Path, listed: bool) -> None:
    """transformers takes the last one, of a list in the config, and of files."""
    write_rows(place / "chats.jsonl", [{"messages": CONVERSATION}])
    words = place / "words"
    config = json.loads((words / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (words / "chat_template.jinja").unlink(missing_ok=True)
    for name, second in (("same", MARKING_TEMPLATE), ("other", MARKING_TEMPLATE.replace("<bot>", "<user>"))):
        if listed:
            config["chat_template"] = [{"name": "default", "template": each} for each in (MARKING_TEMPLATE, second)]
        else:
            (words / "additional_chat_templates").mkdir(exist_ok=True)
            (words / "chat_template.jinja").write_text(MARKING_TEMPLATE)
            (words / "additional_chat_templates/default.jinja").write_text(second)
        (words / "tokenizer_config.json").write_text(json.dumps(config))
        if name == "same":
            assert made(place, name, data="chats.jsonl").learned
            continue
        with pytest.raises(DataError, match="two chat templates with the name 'default', which differ"):
            made(place, name, data="chats.jsonl")


def test_a_pipe_is_no_data(place: Path) -> None:
    """It would wait forever, or give what it has only once; nor is it missing."""
    os.mkfifo(place / "pipe")
    said = run("tokenize", place / "pipe", place / "out", "--tokenizer", place / "words")
    assert said.exit_code == 2 and "neither a file nor a folder. Write what a pipe gives into a file" in said.output
    (place / "x.idx").write_bytes(b"")
    os.mkfifo(place / "x.bin")
    assert (
        "the .bin beside Megatron's .idx is not a file"
        in run(
            "resume", place / "words", "--precision", "bf16", "--data", place / "x.idx", "--out", place / "run"
        ).output
    )


PLANNING = {
    "tokenize": "precisionctl.trainer.data.corpus.open_tokenizer",
    "resume": "precisionctl.trainer.resume.plan_run",
    "calibrate": "precisionctl.calibration.calibrate.open_hinted",
}


@pytest.mark.parametrize("command", PLANNING)
def test_what_is_stopped_before_it_begins_does_not_say_that_something_is_kept(
    place: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PLANNING[command], stop)
    words = {
        "tokenize": (place / "texts.jsonl", place / "out", "--tokenizer", place / "words"),
        "resume": (place / "words", "--precision=bf16", "--data", place / "texts.jsonl", "--out", place / "out"),
        "calibrate": (place / "words", "--data", place / "texts.jsonl", "--out", place / "out"),
    }
    said = run(command, *words[command])
    assert (said.exit_code, NOT_BEGUN in said.output, "kept" in said.output) == (75, True, False)
