"""Kinds of files and shapes of rows: each gives the samples that its own documentation says, or one clear error."""

import bz2
import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from conversations import CONVERSATION, MARKING_TEMPLATE, PLAIN_TEMPLATE, read, tokenizer, write_rows
from hypothesis import given, settings, strategies as st

from precisionctl.errors import DataError
from precisionctl.trainer.data import load_rows
from precisionctl.trainer.data.find import files_of, records
from precisionctl.trainer.data.formats import base, json_list
from precisionctl.trainer.data.records import Record
from precisionctl.trainer.data.shapes import KEYS, Completion, Conversation, Text, sample_of


def sample(row: dict[str, Any]) -> Any:
    return sample_of(Record("rows.jsonl, line 7", row))


def says(*words: str) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in zip(words[::2], words[1::2], strict=True)]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"text": "a", "url": "b"}, Text("a")),
        ({"messages": CONVERSATION, "prompt": "x", "prompt_id": 1}, Conversation(CONVERSATION)),
        ({"messages": says("tool", "3"), "tools": [{"name": "f"}]}, Conversation(says("tool", "3"), [{"name": "f"}])),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system": "s"},
            Conversation(says("system", "s", "user", "a", "assistant", "b")),
        ),
        (
            {"conversations": [{"from": "system", "value": "s"}, {"from": "observation", "value": "b"}]},
            Conversation(says("system", "s", "tool", "b")),
        ),
        ({"conversations": says("user", "a", "assistant", "b")}, Conversation(says("user", "a", "assistant", "b"))),
        (
            {"instruction": "a", "input": "b", "output": "c", "text": "all of it"},
            Conversation(says("user", "a\nb", "assistant", "c")),
        ),
        ({"instruction": "a", "input": "", "output": "c"}, Conversation(says("user", "a", "assistant", "c"))),
        (
            {"instruction": "a", "output": "c", "history": [["x", "y"]], "system": "s"},
            Conversation(says("system", "s", "user", "x", "assistant", "y", "user", "a", "assistant", "c")),
        ),
        ({"prompt": "a", "completion": "b"}, Completion("a", "b")),
        (
            {"prompt": says("user", "a"), "completion": says("assistant", "b")},
            Conversation(says("user", "a", "assistant", "b"), prompt=1),
        ),
        ({"text": "a", "messages": None}, Text("a")),
    ],
)
def test_a_rows_keys_say_what_it_is(row: dict[str, Any], expected: object) -> None:
    assert sample(row) == expected


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "folder"])
def test_a_path_names_the_key_of_its_text(tmp_path: Path, name: str) -> None:
    def write(path: Path, key: str) -> Path:
        rows = [{key: text, "text" if key != "text" else "id": "c c c"} for text in ("a b", "b", "d")]
        (path / name).parent.mkdir(exist_ok=True)
        if name == "folder":
            (path / name).mkdir()
            write_rows(path / name / "x.jsonl", rows)
        elif name == "rows.json":
            (path / name).write_text(json.dumps(rows))
        else:
            write_rows(path / name, rows)
        return path / name

    plain, other = write(tmp_path / "plain", "text"), write(tmp_path / "other", "content")
    expected = load_rows(plain, tokenizer(), 4, cache=tmp_path / "tokens")
    found = load_rows(f"{other}#content", tokenizer(), 4, cache=tmp_path / "tokens")
    assert read(found.tokens.tolist()) == "a b <eos> b <eos> d <eos>" and found.fingerprint == expected.fingerprint
    # the same files by another key are not the tokens that were kept
    assert load_rows(other, tokenizer(), 4, cache=tmp_path / "tokens").fingerprint != expected.fingerprint
    with pytest.raises(DataError, match=r"a row without `body`: it has `content`, `text` \(.*(line|entry) 1\)"):
        load_rows(f"{other}#body", tokenizer(), 4)
    with pytest.raises(DataError, match="no such file or directory"):
        load_rows(f"{tmp_path}/none#content", tokenizer(), 4)


def test_a_name_with_a_hash_is_a_path_if_it_is_there(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "c#text", [])
    path.write_text("a b c d")
    assert read(load_rows(path, tokenizer(), 4).tokens.tolist()) == "a b c d <eos>"
    with pytest.raises(DataError, match="`id` is not a string: 3"):
        load_rows(f"{write_rows(tmp_path / 'x.jsonl', [{'id': 3}])}#id", tokenizer(), 4)


def test_a_null_under_the_key_of_the_text_is_said_with_its_row(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "x.jsonl", [{"body": "a"}, {"body": None}])
    with pytest.raises(DataError, match=r"`body` is null \(.*x.jsonl, line 2\)"):
        load_rows(f"{path}#body", tokenizer(), 4)


def test_a_text_file_has_no_keys_but_is_a_document_in_a_folder_of_rows(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", [{"text": "a b"}])
    text = tmp_path / "b.txt"
    text.write_text("c d")
    for key in ("", "#text"):
        assert read(load_rows(f"{tmp_path}{key}", tokenizer(), 4).tokens.tolist()) == "a b <eos> c d <eos>"
    with pytest.raises(DataError, match="a text file, which has no keys, and so no `content`.*Leave `#content` out"):
        load_rows(f"{text}#content", tokenizer(), 4)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "none of the known keys"),
        ({"id": 1, "text": None}, "`text` is null"),
        ({"prompt": "a", "completion": None}, "`completion` is null"),
        ({"conversations": [{"from": "human"}]}, "a turn without `from` and `value`"),
        ({"conversations": [{"from": "cat", "value": "a"}]}, "a turn from 'cat'; known are system, human"),
        ({"conversations": [{"role": None}]}, "a turn without `from` and `value`"),
        ({"conversations": [{"role": 5, "content": "a"}]}, "a message without a role"),
        ({"conversations": {"from": "human"}}, "`conversations` is not a list"),
        ({"instruction": "a", "output": 3}, "`output` is not a string"),
        ({"instruction": "a", "output": "b", "history": ["xy"]}, "pairs of what was asked and answered"),
        ({"instruction": "a", "output": "b", "history": 3}, "`history` is not a list"),
        ({"prompt": "a", "completion": ["b"]}, "`completion` is not a string"),
        ({"prompt": says("user", "a"), "completion": "b"}, "not a list of messages"),
        ({"messages": [3]}, "a message without a role"),
        ({"messages": [], "tools": "f"}, "`tools` is not a list"),
    ],
)
def test_a_row_that_is_not_what_its_keys_say_is_refused_with_its_place(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as error:
        sample(row)
    assert error.value.where == "rows.jsonl, line 7"


def labels(path: Path, template: str | None = None) -> list[str]:
    rows = load_rows(path, tokenizer(template), 64)
    return [read(rows.batch([i]).labels[0].tolist()).rstrip(" .") for i in range(len(rows))]


@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, MARKING_TEMPLATE])
def test_every_shape_of_fine_tuning_learns_the_answer_alone(tmp_path: Path, template: str) -> None:
    rows: list[dict[str, Any]] = [
        {"messages": says("user", "a b", "assistant", "c d")},
        {"conversations": [{"from": "human", "value": "a b"}, {"from": "gpt", "value": "c d"}]},
        {"instruction": "a", "input": "b", "output": "c d"},
        {"prompt": says("user", "a b"), "completion": says("assistant", "c d")},
    ]
    # <user> a b <end> <bot> c d <end>, of which each label is the token that follows
    assert labels(write_rows(tmp_path / "rows.jsonl", rows), template) == [". . . . c d <end>"] * 4


@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, MARKING_TEMPLATE])
def test_what_the_assistant_says_in_a_prompt_is_not_learned(tmp_path: Path, template: str) -> None:
    row = {"prompt": CONVERSATION[:3], "completion": CONVERSATION[3:]}
    (learned,) = labels(write_rows(tmp_path / "rows.jsonl", [row]), template)
    assert learned == " ".join(["."] * 12) + " a <end>"


def test_a_template_that_rewrites_the_prompt_is_refused(tmp_path: Path) -> None:
    last_only = "{% for m in messages[-1:] %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    row = {"prompt": CONVERSATION[:3], "completion": CONVERSATION[3:]}
    with pytest.raises(DataError, match="rewrites the prompt"):
        labels(write_rows(tmp_path / "rows.jsonl", [row]), last_only)


LATER = (
    "{% macro said(m) %}<bot> {% generation %}{{ m.content }} <end> {% endgeneration %}{% endmacro %}"
    "{% for m in messages %}{% set text %}{% if m.role == 'user' %}<user> {{ m.content }} <end> {% else %}"
    "{{ said(m) }}{% endif %}{% endset %}{{ text }}{% endfor %}"
)


def test_what_is_marked_in_text_that_a_template_prints_later_is_learned(tmp_path: Path) -> None:
    """Not by where transformers says that it is: it counts what has been printed when a mark is met."""
    rows = write_rows(tmp_path / "rows.jsonl", [{"messages": CONVERSATION}])
    expected = labels(rows, MARKING_TEMPLATE)
    assert labels(rows, LATER) == expected == [". . . . . c d <end> . . . . a <end>"]
    marks = "".join(map(chr, range(0xFDD0, 0xFDEF)))
    odd = [{"role": "user", "content": marks}, *CONVERSATION[1:]]
    with pytest.raises(DataError, match="noncharacters"):
        labels(write_rows(tmp_path / "odd.jsonl", [{"messages": odd}]), MARKING_TEMPLATE)
    with pytest.raises(DataError, match="changes what it marks"):
        labels(rows, LATER.replace("{{ text }}", "{{ text | replace('c', 'd') | reverse }}"))


def test_a_completion_is_learned_with_its_end_and_needs_no_template(tmp_path: Path) -> None:
    rows = [{"prompt": "a b ", "completion": "c d"}, {"prompt": "a", "completion": " b <eos>"}]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    assert labels(path) == [". c d <eos>", "b <eos>"]
    loaded = load_rows(path, tokenizer(), 64)
    assert read(loaded.tokens.tolist()) == "a b c d <eos> a b <eos>"


@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, MARKING_TEMPLATE])
@pytest.mark.parametrize("content", [None, [{"type": "text", "text": "c"}], {"text": "c"}, True, 5, 1.5])
def test_content_that_a_template_would_print_as_python_does_is_refused(
    tmp_path: Path, template: str, content: object
) -> None:
    """A model would learn to say None."""
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": [{"role": "assistant", "content": content}]}])
    with pytest.raises(DataError, match=r"prints the content (None|True|5|1.5|[\[{]).* as it is \(.*line 1\)"):
        load_rows(path, tokenizer(template), 64)


def test_content_that_a_template_knows_is_no_string_is_taken(tmp_path: Path) -> None:
    knows = MARKING_TEMPLATE.replace("{{ m.content }}", "{{ m.content if m.content is string else m.content[0].text }}")
    assert knows != MARKING_TEMPLATE
    reply = {"role": "assistant", "content": [{"type": "text", "text": "c"}]}
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": [{"role": "user", "content": "a"}, reply]}])
    batch = load_rows(path, tokenizer(knows), 64).batch([0])
    assert "c <end>" in read(batch.labels[0].tolist()) and batch.targets == 2


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.txt"])
def test_a_byte_order_mark_is_no_text(tmp_path: Path, name: str) -> None:
    rows = {"rows.jsonl": '{"text": "a b c"}', "rows.json": '[{"text": "a b c"}]', "rows.txt": "a b c"}
    (tmp_path / name).write_text(rows[name], encoding="utf-8-sig")
    assert read(load_rows(tmp_path / name, tokenizer(), 2).tokens.tolist()) == "a b c <eos>"


def test_tools_reach_the_template(tmp_path: Path) -> None:
    with_tools = "{% for t in tools or [] %}{{ t.name }} {% endfor %}" + MARKING_TEMPLATE
    row = {"messages": says("user", "a", "assistant", "b"), "tools": [{"name": "d"}, {"name": "e"}]}
    rows = load_rows(write_rows(tmp_path / "rows.jsonl", [row]), tokenizer(with_tools), 64)
    assert read(rows.tokens.tolist()).startswith("d e <user> a")


def test_a_directory_holds_files_of_several_kinds(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a b")
    write_rows(tmp_path / "b.jsonl", [{"text": "c"}, {"text": "d"}])
    (tmp_path / "c.json").write_text('[{"text": "e"}]')
    (tmp_path / "d.json").write_text('{"text": "a"}')
    (tmp_path / "e.md").write_text("b")
    rows = load_rows(tmp_path, tokenizer(), 4)
    assert read(rows.tokens.tolist()) == "a b <eos> c <eos> d <eos> e <eos> a <eos> b <eos>"


@pytest.mark.parametrize("column", ["", "#body"])
def test_a_json_file_of_one_object_is_a_row(tmp_path: Path, column: str) -> None:
    """As in a folder of 1.json, 2.json, ..., indented or not."""
    key = column.removeprefix("#") or "text"
    for number, text in enumerate(("a b", "c d")):
        row = json.dumps({key: text, "id": number}, indent=number or None)
        (tmp_path / f"{number}.json").write_text(f"{row}\n")
    assert read(load_rows(f"{tmp_path}{column}", tokenizer(), 4).tokens.tolist()) == "a b <eos> c d <eos>"


NO_ROWS = {
    "infos.json": ('{"default": {"features": {}}}', r"no row of data.*folder of nothing else.*DIRECTORY:SPLIT"),
    "two.json": ('{"text": "a"}\n\n{"text": "b"}', "not JSON: text after its end.*A row on each line is .jsonl"),
    "words.json": ('["a", "b"]', "a row must be a JSON object, not 'a'"),
    "number.json": ("3", "a row must be a JSON object"),
    "empty.json": ("", "not JSON"),
    "columns.json": ('{"text": ["a", "b"]}', "`text` is not a string"),
    "rows.csv": ("text\na b c\n", r"a table, which is no text.*as .*:SPLIT; or write it as parquet"),
    "rows.TSV": ("text\na b c\n", "a table, which is no text"),
    "rows.csv.gz": (gzip.compress(b"text\na b c\n"), "a table, which is no text"),
    "data-0.arrow": (b"ARROW1\0\0", "a table, which is no text"),
}


@pytest.mark.parametrize("name", NO_ROWS)
def test_what_is_neither_rows_nor_text_is_refused_with_what_to_do(tmp_path: Path, name: str) -> None:
    content, message = NO_ROWS[name]
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message):
        load_rows(tmp_path / name, tokenizer(), 2)


@pytest.mark.parametrize("card", ["README.md", "readme.md"])
def test_the_card_of_a_data_set_is_no_document_and_is_said_to_be_left_out(tmp_path: Path, card: str) -> None:
    """As `hf download --repo-type dataset` leaves it."""
    (tmp_path / card).write_text("a a a a a a")
    write = tmp_path / "data" / "train.jsonl"
    write.parent.mkdir()
    write_rows(write, [{"text": "b c"}, {"text": "d"}])
    rows = load_rows(tmp_path, tokenizer(), 2)
    assert read(rows.tokens.tolist()) == "b c <eos> d <eos>"
    assert any(f"{card} describes the data beside it" in note for note in rows.notes)
    (tmp_path / "data" / "train.jsonl").rename(tmp_path / "text.txt")
    alone = load_rows(tmp_path, tokenizer(), 2)
    assert read(alone.tokens.tolist()).startswith("a a a a a a <eos>") and not alone.notes


def test_the_kinds_of_two_rows_that_differ_are_said_with_both_places(tmp_path: Path) -> None:
    rows = [{"text": "a"}, {"prompt": "a", "completion": "b"}]
    with pytest.raises(DataError, match=r"text and conversations.*line 2\).*like the first \(.*line 1\)"):
        load_rows(write_rows(tmp_path / "rows.jsonl", rows), tokenizer(), 2)


def test_two_names_of_one_file_are_read_by_their_names(tmp_path: Path) -> None:
    """As the Hub's cache links names to blobs: what is kept of one is not given for the other."""
    blob = write_rows(tmp_path / "blob", [{"text": "a b"}])
    for name in ("rows.jsonl", "rows.txt"):
        (tmp_path / name).symlink_to(blob)
    kept = tmp_path / "tokens"
    rows, text = (load_rows(tmp_path / name, tokenizer(), 1, cache=kept) for name in ("rows.jsonl", "rows.txt"))
    assert read(rows.tokens.tolist()) == "a b <eos>"
    assert text.tokens.tolist() == load_rows(tmp_path / "rows.txt", tokenizer(), 1).tokens.tolist()
    assert text.fingerprint != rows.fingerprint


def test_a_directory_without_files_or_with_megatrons_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no files"):
        files_of(tmp_path)
    for suffix in (".bin", ".idx"):
        (tmp_path / f"web{suffix}").write_bytes(b"")
    with pytest.raises(DataError, match="web.idx is Megatron's"):
        files_of(tmp_path)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(KEYS)), VALUES | st.just(CONVERSATION), max_size=5))
def test_whatever_a_row_holds_it_is_a_sample_or_one_clear_error(row: dict[str, Any]) -> None:
    try:
        assert isinstance(sample(row), Text | Conversation | Completion)
    except DataError as error:
        assert error.where == "rows.jsonl, line 7"


@settings(deadline=None)
@given(
    rows=st.lists(st.dictionaries(st.text(max_size=4), VALUES, max_size=4), min_size=1, max_size=6),
    indent=st.sampled_from([None, 0, 3]),
    ascii=st.booleans(),
    piece=st.integers(1, 40),
)
def test_a_json_list_gives_its_objects_however_it_is_written_and_read(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], indent: int | None, ascii: bool, piece: int
) -> None:
    path = tmp_path_factory.mktemp("json") / "rows.json"
    path.write_text(json.dumps(rows, indent=indent, ensure_ascii=ascii) + "\n", encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_list, "_PIECE", piece)
        found = list(records([path]))
    assert [record.row for record in found] == rows
    assert [record.where for record in found] == [f"{path}, entry {i + 1}" for i in range(len(rows))]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"a": 1}, {"a"', r"not JSON.*entry 2\)"),
        ('[{"a": 1} {"a": 1}]', r"expected one of ',\]'.*entry 1\)"),
        ('[{"a": 1}, 3]', r"a row must be a JSON object, not '3'.*entry 2\)"),
        ('[{"a": 1}', "expected one of"),
        ('[{"a": 1}] and more', "text after its end"),
        ('[{"a": 1}, ' + "[" * 200_000, "not JSON"),
        ('[{"a": ' + "9" * 5000 + "}]", "not JSON"),
    ],
)
def test_a_damaged_json_list_is_one_clear_error(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "rows.json").write_text(content)
    with pytest.raises(DataError, match=message):
        list(records([tmp_path / "rows.json"]))


def test_reading_rows_needs_no_more_memory_for_more_of_them(tmp_path: Path) -> None:
    row = {"text": "word " * 200}
    lines, listed, packed = (tmp_path / name for name in ("rows.jsonl", "rows.json", "rows.jsonl.gz"))
    write_rows(lines, [row] * 8_000)  # 8 MB
    listed.write_text(json.dumps([row] * 8_000))
    packed.write_bytes(gzip.compress(lines.read_bytes()))
    for path in (lines, listed, packed):
        tracemalloc.start()
        assert sum(1 for _ in records([path])) == 8_000
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 5e6, path


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.ndjson.gz", "c4-train.00000.json.gz"])
def test_what_gzip_packed_gives_the_rows_that_are_in_it(tmp_path: Path, name: str) -> None:
    rows = [{"text": "a\r\nb"}, {"text": "\u2028"}]
    write_rows(tmp_path / "rows.jsonl", rows)
    (tmp_path / name).write_bytes(gzip.compress((tmp_path / "rows.jsonl").read_bytes()))
    found = list(records([tmp_path / name]))
    assert [record.row for record in found] == rows
    assert [record.where for record in found] == [f"{tmp_path / name}, line {number}" for number in (1, 2)]


@pytest.mark.parametrize("indent", [None, 1])
def test_a_packed_list_is_read_as_one_that_is_not_packed(tmp_path: Path, indent: int | None) -> None:
    rows = [{"text": "a"}, {"text": "b"}]
    (tmp_path / "rows.json.gz").write_bytes(gzip.compress(json.dumps(rows, indent=indent).encode()))
    assert [record.row for record in records([tmp_path / "rows.json.gz"])] == rows
    (tmp_path / "cut.json.gz").write_bytes((tmp_path / "rows.json.gz").read_bytes()[:-9])
    with pytest.raises(DataError, match="not a whole gzip file"):
        list(records([tmp_path / "cut.json.gz"]))


def test_a_list_and_a_file_of_nothing_have_no_rows(tmp_path: Path) -> None:
    for name, content in (("list.json", " [\n]\n"), ("lines.jsonl", "\n"), ("text.txt", "")):
        (tmp_path / name).write_text(content)
        with pytest.raises(DataError, match="there is no text in it, and no row"):
            load_rows(tmp_path / name, tokenizer(), 2)


def test_a_json_file_of_lines_is_not_one_document(tmp_path: Path) -> None:
    """As C4's `c4-train.00000.json.gz` unpacked."""
    rows = [{"text": "a"}, {"text": "b"}]
    write_rows(tmp_path / "c4.json", rows)
    (tmp_path / "indented.json").write_text(json.dumps(rows[0], indent=1))
    assert [record.row for record in records([tmp_path / "c4.json"])] == rows
    assert len([*records([tmp_path / "indented.json"])]) == 1


def test_a_packed_text_is_the_document_that_is_in_it(tmp_path: Path) -> None:
    plain, packed = tmp_path / "text.txt", tmp_path / "text.txt.gz"
    plain.write_bytes("\ufeffone\r\ntwo \u00e4".encode())
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert [record.row for record in records([plain, packed])] == [{"text": "one\ntwo \u00e4"}] * 2


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "text.txt.gz"])
def test_a_damaged_gzip_file_is_one_clear_error(tmp_path: Path, name: str) -> None:
    whole = gzip.compress(b"".join(b'{"text": "%d"}\n' % number for number in range(999)))
    for damaged in (
        whole[:-5],
        whole[: len(whole) // 2],
        whole[:99] + b"\xff" * 99 + whole[198:],
        whole[:-8] + bytes(8),
    ):
        (tmp_path / name).write_bytes(damaged)
        with pytest.raises(DataError, match="not a whole gzip file"):
            list(records([tmp_path / name]))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "text.txt", "text.txt.gz"])
def test_a_document_beyond_all_measure_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    content = b'{"text": "a"}\n' + b" " * 20_000_000
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    monkeypatch.setattr(base, "MOST_CHARACTERS", 1_000_000)
    tracemalloc.start()
    with pytest.raises(DataError, match="a document of more than 1,000,000 characters"):
        list(records([tmp_path / name]))
    assert tracemalloc.get_traced_memory()[1] < 8e6
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("begins", "goes_on", "message"),
    [('[{"text": "', "a", "a document of more than 1,000,000 characters"), ('[{"text": "a"}', " ", "expected one of")],
    ids=["a text without an end", "white space without an end"],
)
def test_a_list_without_an_end_is_not_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begins: str, goes_on: str, message: str
) -> None:
    (tmp_path / "rows.json").write_text(begins + goes_on * 20_000_000)
    monkeypatch.setattr(base, "MOST_CHARACTERS", 1_000_000)
    tracemalloc.start()
    with pytest.raises(DataError, match=message):
        list(records([tmp_path / "rows.json"]))
    assert tracemalloc.get_traced_memory()[1] < 12e6
    tracemalloc.stop()


def test_what_is_packed_otherwise_is_said_to_be(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl.bz2").write_bytes(bz2.compress(b"text" * 99))
    with pytest.raises(DataError, match=r"not UTF-8 text.*It is packed by bzip2: unpack it first"):
        list(records([tmp_path / "rows.jsonl.bz2"]))
