"""Parquet: what pyarrow writes is read row by row; without pyarrow it is refused with the way out."""

import random
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from conversations import CONVERSATION, MARKING_TEMPLATE, read, tokenizer

from precisionctl.errors import DataError, EnvironmentProblem
from precisionctl.trainer.data import load_rows
from precisionctl.trainer.data.find import records

pyarrow = pytest.importorskip("pyarrow")  # of the extra `dev`, so of CI
parquet = pytest.importorskip("pyarrow.parquet")


def write(path: Path, rows: list[dict[str, Any]], **settings: Any) -> Path:
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, **settings)
    return path


def test_text_and_conversations_come_out_of_parquet_as_they_went_in(tmp_path: Path) -> None:
    text = write(tmp_path / "text.parquet", [{"text": "a b", "id": 1}, {"text": "c", "id": 2}])
    assert read(load_rows(text, tokenizer(), 4).tokens.tolist()) == "a b <eos> c <eos>"
    chats = write(tmp_path / "chats.parquet", [{"messages": CONVERSATION, "source": "x"}])
    batch = load_rows(chats, tokenizer(MARKING_TEMPLATE), 64).batch([0])
    assert read(batch.labels[0].tolist()) == ". . . . . c d <end> . . . . a <end>" + " ." * 18


def test_it_is_known_by_its_content_too(tmp_path: Path) -> None:
    path = write(tmp_path / "data", [{"text": "a b c"}])
    assert read(load_rows(path, tokenizer(), 2).tokens.tolist()) == "a b c <eos>"


def test_rows_of_many_row_groups_are_all_there_and_numbered_and_other_columns_are_left(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", [{"text": str(i), "other": i} for i in range(1000)], row_group_size=300)
    found = list(records([path]))
    assert [record.row for record in found] == [{"text": str(i)} for i in range(1000)]
    assert found[999].where == f"{path}, row 1000"


def test_text_in_another_column_is_read_where_the_path_names_it_and_no_other_column(tmp_path: Path) -> None:
    rows = [{"text": "c", "content": "a b", "messages": None, "id": 1}] * 3
    path = write(tmp_path / "x.parquet", rows)
    assert read(load_rows(f"{path}#content", tokenizer(), 4).tokens.tolist()) == " ".join(["a b <eos>"] * 3)
    assert [record.row for record in records([path], "content")] == [{"content": "a b"}] * 3
    with pytest.raises(DataError, match="a row without `body`: it has `text`, `content`, `messages`, `id`"):
        load_rows(f"{path}#body", tokenizer(), 4)
    with pytest.raises(DataError, match=r"`body` is null \(.*row 2\)"):
        load_rows(f"{write(tmp_path / 'z.parquet', [{'body': 'a'}, {'body': None}])}#body", tokenizer(), 4)
    other = write(tmp_path / "y.parquet", [{"prompt": "a", "content": "a b"}])
    with pytest.raises(DataError, match=r"it has `prompt`, `content` .*PATH#KEY"):
        load_rows(other, tokenizer(), 4)


def test_a_key_that_another_message_has_is_not_one_of_this(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "tool", "content": "b", "name": "f"}]
    (found,) = records([write(tmp_path / "x.parquet", [{"messages": messages}])])
    assert found.row == {"messages": messages}


def test_damaged_parquet_is_one_clear_error(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", [{"text": "a" * 100}] * 100)
    whole = path.read_bytes()
    for damaged in (whole[:-20], whole[:4], b"", whole[:40] + b"\xff" * 40 + whole[80:]):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="not a valid parquet file"):
            load_rows(path, tokenizer(), 4)
    pick = random.Random(0)
    for _ in range(300):
        at = pick.randrange(len(whole))
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << pick.randrange(8)]) + whole[at + 1 :])
        with suppress(DataError):
            list(records([path]))


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "x.parquet", [{"text": "a"}])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(EnvironmentProblem, match=r"precisionctl\[parquet\]"):
        load_rows(path, tokenizer(), 4)
