"""Megatron's .bin and .idx: what megatron-core's own builder writes is read as its own reader reads it."""

import struct
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conversations import read, tokenizer
from hypothesis import given, settings, strategies as st

from precisionctl.checkpoints.base import Companions
from precisionctl.errors import DataError
from precisionctl.tokens.tokenizer import open_tokenizer
from precisionctl.trainer.data import load_rows, megatron
from precisionctl.trainer.data.megatron import HEADER, prefix_of
from precisionctl.trainer.data.rows import check_there

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own, of what megatron-core imports from it
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

Document = Sequence[Sequence[int]]
"""Its sequences."""


def write(prefix: Path, documents: Sequence[Document], dtype: type = np.uint16, **settings: Any) -> Path:
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype, **settings)
    for document in documents:
        for sequence in document:
            builder.add_item(torch.tensor(sequence))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return prefix


SMALL: Sequence[Document] = [[[4, 5, 0]], [[6, 7], [8, 0]]]


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16, np.int32, np.int64])
@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_the_ids_are_those_of_megatrons_reader_by_any_of_three_names(tmp_path: Path, dtype: type, suffix: str) -> None:
    prefix = write(tmp_path / "web_text_document", SMALL, dtype)
    rows = load_rows(Path(f"{prefix}{suffix}"), tokenizer(), 3)
    theirs = IndexedDataset(str(prefix))
    assert rows.tokens.tolist() == np.concatenate([theirs[i] for i in range(len(theirs))]).tolist()
    batch = rows.batch([0, 1])
    assert [read(ids[:3]) for ids in batch.tokens.tolist()] == ["a b <eos>", "c d e"]
    assert [read(ids[:3]) for ids in batch.labels.tolist()] == ["b <eos> c", "d e <eos>"]
    assert rows.notes == ()


@settings(deadline=None)
@given(
    documents=st.lists(
        st.lists(st.lists(st.integers(0, 60_000), min_size=1, max_size=6), min_size=1, max_size=3),
        min_size=1,
        max_size=6,
    ).filter(lambda documents: sum(len(s) for document in documents for s in document) > 2)
)
def test_any_documents_are_read_and_largest_token_and_unended_documents_are_known(
    tmp_path_factory: pytest.TempPathFactory, documents: Sequence[Document]
) -> None:
    prefix = write(tmp_path_factory.mktemp("mmap") / "x", documents)
    rows = load_rows(prefix, tokenizer(), 1)
    flat = [token for document in documents for sequence in document for token in sequence]
    assert rows.tokens.tolist() == flat and rows.largest == max(flat)
    unended = sum(document[-1][-1] != 0 for document in documents)
    which = "1 document does" if unended == 1 else f"{unended} documents do"
    said = f"{which} not end in the tokenizer's end-of-text token; nothing else divides them"
    assert rows.notes[:1] == ((said,) if unended else ())


def test_a_token_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    rows = load_rows(write(tmp_path / "x", SMALL), tokenizer(), 3)
    rows.require_vocabulary(9)
    with pytest.raises(DataError, match="token 8, but the model's last token is 7"):
        rows.require_vocabulary(8)


def test_nothing_is_copied_and_the_look_through_is_kept(tmp_path: Path) -> None:
    prefix = write(tmp_path / "x", SMALL)
    first = load_rows(prefix, tokenizer(), 3, cache=tmp_path / "cache")
    (kept,) = (file for file in (tmp_path / "cache").rglob("*") if file.name == "about.json")
    assert [file.name for file in kept.parent.iterdir()] == ["about.json"]
    kept.write_text(kept.read_text().replace('"largest": 8', '"largest": 77'))
    assert load_rows(prefix, tokenizer(), 3, cache=tmp_path / "cache").largest == 77
    assert isinstance(first.tokens.base, np.memmap) or isinstance(first.tokens, np.memmap)


def test_where_learning_begins_in_each_document_is_kept_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = write(tmp_path / "x", SMALL)
    Path(f"{prefix}.learned").write_bytes(bytes([0, 1, 0, 1, 0, 0, 0]))  # nothing predicts a document's first token
    for _ in range(2):
        samples = megatron.load(prefix, tokenizer(), tmp_path / "cache").samples
        assert samples and samples.first_target.tolist() == [1, 4]
        monkeypatch.setattr(megatron, "_look_through", lambda *_, **__: pytest.fail("they are looked for again"))


def edited(file: str, edit: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def apply(prefix: Path) -> None:
        path = Path(f"{prefix}{file}")
        path.write_bytes(edit(path.read_bytes()))

    return apply


def put(offset: int, kind: str, value: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:offset] + struct.pack(kind, value) + data[offset + struct.calcsize(kind) :]


LENGTHS, POINTERS = HEADER.size, HEADER.size + 3 * 4
DOCUMENTS = POINTERS + 3 * 8


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (edited(".idx", lambda data: data[:20]), "not one of Megatron's .idx files"),
        (edited(".idx", lambda data: b"TNTIDX" + data[6:]), "not one of Megatron's .idx files"),
        (edited(".idx", put(9, "<Q", 2)), "version 2"),
        (edited(".idx", put(17, "<B", 7)), "values of type 7"),
        (edited(".idx", put(17, "<B", 99)), "values of type 99"),
        (edited(".idx", put(18, "<Q", 2**63)), "cannot hold 9223372036854775808 sequences"),
        (edited(".idx", put(18, "<Q", 0)), "cannot hold 0 sequences"),
        (edited(".idx", lambda data: data + b"\0"), "cannot hold 3 sequences"),
        (edited(".idx", lambda data: data + b"\0\0\0"), "text and images"),
        (edited(".idx", put(LENGTHS, "<i", -3)), "do not follow one another"),
        (edited(".idx", put(LENGTHS, "<i", 2)), "do not follow one another"),
        (edited(".idx", put(POINTERS, "<q", 2)), "do not follow one another"),
        (edited(".idx", put(POINTERS + 8, "<q", 0)), "do not follow one another"),
        (edited(".idx", put(DOCUMENTS, "<q", 1)), "not in order"),
        (edited(".idx", put(DOCUMENTS + 8, "<q", 9)), "not in order"),
        (edited(".idx", put(DOCUMENTS + 16, "<q", 2)), "not in order"),
        (edited(".bin", lambda data: data[:-2]), "12 bytes, and its .idx says 14"),
        (edited(".bin", lambda data: data + b"\0"), "15 bytes, and its .idx says 14"),
        (lambda prefix: Path(f"{prefix}.bin").unlink(), "is missing"),
    ],
)
def test_a_damaged_data_set_is_one_clear_error(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    prefix = write(tmp_path / "x", SMALL)
    damage(prefix)
    with pytest.raises(DataError, match=message):
        load_rows(prefix, tokenizer(), 3)


def test_negative_ids_are_no_tokens(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a token -2"):
        load_rows(write(tmp_path / "x", [[[1, -2, 3]]], np.int32), tokenizer(), 1)


def test_images_among_the_text_are_refused(tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(str(tmp_path / "x.bin"), dtype=np.uint16, multimodal=True)
    builder.add_item(torch.tensor([1, 2]), 1)
    builder.end_document()
    builder.finalize(str(tmp_path / "x.idx"))
    with pytest.raises(DataError, match="text and images"):
        load_rows(tmp_path / "x", tokenizer(), 1)


def test_bin_without_idx_says_so_and_other_paths_are_not_megatrons(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"\0")
    with pytest.raises(DataError, match="the .idx beside Megatron's .bin is missing"):
        prefix_of(tmp_path / "x.bin")
    assert prefix_of(tmp_path / "x.jsonl") is None and prefix_of(tmp_path) is None
    assert prefix_of(tmp_path / "not there.bin") is None


def test_a_checkpoint_without_a_tokenizer_reads_the_same_ids_and_says_what_it_does_not_know(tmp_path: Path) -> None:
    prefix = write(tmp_path / "x", SMALL)
    (tmp_path / "text.txt").write_text("a b")
    with open_tokenizer(Companions({}), None) as none:
        check_there(prefix, none)
        rows = load_rows(prefix, none, 3)
        with pytest.raises(DataError, match="has no tokenizer"):
            check_there(tmp_path / "text.txt", none)
    known = load_rows(prefix, tokenizer(), 3)
    assert rows.fingerprint == known.fingerprint and torch.equal(rows.batch([0, 1]).tokens, known.batch([0, 1]).tokens)
    assert "not known whether documents end" in rows.notes[0]


@pytest.mark.parametrize("size", [0, 6, 8])
def test_what_is_to_be_learned_of_another_number_of_tokens_is_one_clear_error(tmp_path: Path, size: int) -> None:
    prefix = write(tmp_path / "x", SMALL)
    Path(f"{prefix}.learned").write_bytes(bytes(size))
    with pytest.raises(DataError, match=rf"{size} bytes, and its .bin has 7 tokens.*x\.learned"):
        megatron.load(prefix, tokenizer(), None)
