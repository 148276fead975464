"""Rows of tokens: packing, chat masks counted by hand, and an order that a seed decides."""

import json
import re
from datetime import datetime
from pathlib import Path

import pytest
from conversations import (
    CONVERSATION,
    MARKING_TEMPLATE,
    PLAIN_TEMPLATE,
    _files,
    read,
    tokenizer,
    with_templates,
    write_rows,
)

from precisionctl.checkpoints.base import Companions
from precisionctl.checkpoints.hf_directory.companions import read_companions
from precisionctl.errors import DataError
from precisionctl.tokens.chat import ChatTemplate, chat_row
from precisionctl.tokens.samples import Conversation
from precisionctl.tokens.tokenizer import open_tokenizer
from precisionctl.trainer.data import Order, Rows, load_rows


def order_of(rows: Rows) -> list[str]:
    return [read(rows.batch([i]).tokens[0].tolist()) for i in range(len(rows))]


def test_documents_are_laid_end_to_end_and_every_token_but_the_first_is_a_target_once(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"text": "a b c"}, {"text": "d"}, {"text": "e e a b"}])
    rows = load_rows(path, tokenizer(), sequence_length=5)  # a b c <eos> d <eos> | e e a b <eos>
    assert len(rows) == 2
    batch = rows.batch([0, 1])
    pad = " <eos>" * 27
    assert [read(ids) for ids in batch.tokens.tolist()] == ["a b c <eos> d" + pad, "<eos> e e a b" + pad]
    nothing = " ." * 27
    assert [read(ids) for ids in batch.labels.tolist()] == ["b c <eos> d <eos>" + nothing, "e e a b <eos>" + nothing]
    assert batch.targets == 10


def test_a_directory_is_its_visible_files_in_order_and_a_source_file_is_text(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.py").write_text("c d")
    (tmp_path / "a.txt").write_text("a b")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "index").write_bytes(b"\xff")
    rows = load_rows(tmp_path, tokenizer(), sequence_length=5)
    assert read(rows.tokens.tolist()) == "a b <eos> c d <eos>"


@pytest.mark.parametrize("template", [PLAIN_TEMPLATE, MARKING_TEMPLATE])
def test_only_the_assistants_words_and_the_end_of_its_turn_are_targets(tmp_path: Path, template: str) -> None:
    path = write_rows(tmp_path / "chat.jsonl", [{"messages": CONVERSATION}])
    rows = load_rows(path, tokenizer(template), sequence_length=64)
    batch = rows.batch([0])
    assert read(batch.tokens[0].tolist()) == "<user> a b ? <end> <bot> c d <end> <user> e <end> <bot> a" + " <eos>" * 18
    assert read(batch.labels[0].tolist()) == ". . . . . c d <end> . . . . a <end>" + " ." * 18
    assert batch.targets == 5


def test_finding_the_assistants_words_from_the_text_is_said(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "chat.jsonl", [{"messages": CONVERSATION}])
    assert load_rows(path, tokenizer(MARKING_TEMPLATE), 64).notes == ()
    assert "marks no assistant words" in load_rows(path, tokenizer(PLAIN_TEMPLATE), 64).notes[0]
    both = write_rows(tmp_path / "both.jsonl", [{"messages": CONVERSATION}, {"prompt": "a", "completion": "b"}])
    assert "marks no assistant words" in load_rows(both, tokenizer(PLAIN_TEMPLATE), 64).notes[0]  # of the first alone


def test_a_conversation_is_cut_to_length_and_left_out_when_nothing_to_learn_is_left(tmp_path: Path) -> None:
    only_user = [{"role": "user", "content": "a"}]
    path = write_rows(tmp_path / "chat.jsonl", [{"messages": CONVERSATION}, {"messages": only_user}])
    rows = load_rows(path, tokenizer(MARKING_TEMPLATE), sequence_length=7)
    assert len(rows) == 1 and rows.batch([0]).targets == 2  # c d; <end> is the eighth target
    assert rows.notes[0].startswith("1 conversation was cut") and rows.notes[1].startswith("1 conversation was left")


def test_a_template_that_prints_the_date_makes_the_same_tokens_on_any_day(tmp_path: Path) -> None:
    dated = "{% if strftime_now('%d %b %Y') == '26 Jul 2024' %}a {% else %}b {% endif %}" + MARKING_TEMPLATE
    path = write_rows(tmp_path / "chat.jsonl", [{"messages": CONVERSATION}])
    assert read(load_rows(path, tokenizer(dated), 64).tokens.tolist()).startswith("a <user>")


DATES = ["%-d %B %Y", "%d/%m/%y, %I:%M %p", "%A, the %e.", "day %j of %G, %F %T", "100%% on %a", "%%d"]


@pytest.mark.parametrize("form", DATES)
def test_a_template_may_print_the_date_in_any_form(tmp_path: Path, form: str) -> None:
    on_that_day = datetime(2024, 7, 26).strftime(form)
    dated = f"{{% if strftime_now('{form}') == '{on_that_day}' %}}a {{% else %}}b {{% endif %}}" + MARKING_TEMPLATE
    path = write_rows(tmp_path / "chat.jsonl", [{"messages": CONVERSATION}])
    assert read(load_rows(path, tokenizer(dated), 64).tokens.tolist()).startswith("a <user>")


def test_a_form_of_dates_that_nothing_knows_is_refused_and_not_printed(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "chat.jsonl", [{"messages": CONVERSATION}])
    with pytest.raises(DataError, match="a date of an unknown format: %Q"):
        load_rows(path, tokenizer("{{ strftime_now('%Q') }}" + MARKING_TEMPLATE), 64)


def test_what_is_wrong_with_the_data_is_not_blamed_on_the_tokenizer(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "chat.jsonl", [{"prompt": "a", "completion": "\ud800"}])
    with pytest.raises(DataError, match="not UTF-8 text") as error:
        load_rows(path, tokenizer(), 64)
    assert "mend the text" in error.value.do and "tokenizer" not in error.value.do


def test_a_template_that_rewrites_earlier_messages_is_refused(tmp_path: Path) -> None:
    forgetful = "{% for m in messages[-2:] %}{{ m.content }} {% endfor %}"
    path = write_rows(tmp_path / "chat.jsonl", [{"messages": CONVERSATION}])
    with pytest.raises(DataError, match="rewrites earlier messages"):
        load_rows(path, tokenizer(forgetful), 64)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n\n{', r"not JSON: [^:]*, in column 2 \(.*rows.jsonl, line 3\)"),
        ("[1]", r"a row must be a JSON object, not '\[1\]' \(.*line 1\)"),
        ('{"txt": "a"}', r"a row with none of the known keys: it has `txt` \(.*line 1\).*PATH#KEY"),
        ('{"text": "a b c d e a b c"}\n{"messages": []}', r"text and conversations in one data set.*line 2\)"),
        ('{"messages": [{"content": "a"}]}', r"a message without a role.*line 1\)"),
        ('{"messages": "a"}', "not a list of messages"),
        ('{"text": "a"}\n{"text": "a \\ud800"}', r"not UTF-8 text.*line 2\)"),
        ('{"prompt": "a", "completion": "\\ud800"}', r"not UTF-8 text.*line 1\)"),
        ('{"messages": [{"role": "assistant", "content": "\\ud800"}]}', r"not UTF-8 text.*line 1\)"),
        ('{"text": 3}', "`text` is not a string"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "no conversation has text"),
        ('{"text": "a"}', "2 tokens are fewer than the 5 of one row"),
        ("", "no text in it, and no row"),
    ],
)
def test_unusable_rows_are_one_clear_error(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "rows.jsonl").write_text(content)
    with pytest.raises(DataError, match=message):
        load_rows(tmp_path / "rows.jsonl", tokenizer(MARKING_TEMPLATE), sequence_length=4)


def test_conversations_that_are_all_cut_before_the_assistant_speaks_are_told_how_long_rows_have_to_be(
    tmp_path: Path,
) -> None:
    path = write_rows(tmp_path / "chat.jsonl", [{"messages": CONVERSATION}])
    with pytest.raises(DataError, match=r"cut to 1 token before the assistant.*Raise data\.sequence_length") as refused:
        load_rows(path, tokenizer(MARKING_TEMPLATE), 1)
    needed = int(re.findall(r"to (\d+) for", refused.value.do)[0])
    assert load_rows(path, tokenizer(MARKING_TEMPLATE), needed).learned is not None
    with pytest.raises(DataError, match="before the assistant"):
        load_rows(path, tokenizer(MARKING_TEMPLATE), needed - 1)


TOOLS = [{"type": "function", "function": {"name": "a", "parameters": {"type": "object", "properties": {}}}}]


@pytest.mark.parametrize("in_files", [True, False])
def test_a_conversation_with_tools_has_the_text_that_transformers_makes_of_it(tmp_path: Path, in_files: bool) -> None:
    """Templates are files of a folder, or, as transformers 4 wrote them, a list in tokenizer_config.json."""
    templates = {"default": MARKING_TEMPLATE, "tool_use": "{% if tools %}e e {% endif %}" + MARKING_TEMPLATE}
    theirs = with_templates(templates)
    theirs.save_pretrained(tmp_path, save_jinja_files=in_files)
    assert (tmp_path / "additional_chat_templates").is_dir() == in_files
    files = read_companions(tmp_path).files
    conversations = [{"messages": CONVERSATION, **more} for more in ({}, {"tools": TOOLS}, {"tools": None})]
    path = write_rows(tmp_path / "chat.jsonl", conversations)
    with open_tokenizer(Companions(files), None) as ours:
        rows = load_rows(path, ours, 64)
    texts = [theirs.apply_chat_template(CONVERSATION, each.get("tools"), tokenize=False) for each in conversations]
    assert read(rows.tokens.tolist()).split() == " ".join(texts).split()
    assert texts[1].startswith("e e") and texts[0] == texts[2] != texts[1]


def test_what_a_template_does_not_print_of_a_conversation_is_told_once(tmp_path: Path) -> None:
    calls = [{"type": "function", "function": {"name": "a", "arguments": {}}}]
    called = [CONVERSATION[0], {"role": "assistant", "content": "", "tool_calls": calls, "reasoning_content": "b"}]
    rows = [{"messages": CONVERSATION, "tools": TOOLS}, *[{"messages": [*called, *CONVERSATION[2:]]}] * 2]
    path = write_rows(tmp_path / "chat.jsonl", rows)
    silent = [f"the chat template prints no `{key}`" for key in ("tools", "tool_calls", "reasoning_content")]
    notes = load_rows(path, tokenizer(MARKING_TEMPLATE), 64).notes
    assert [note.partition(" of conversations")[0] for note in notes] == silent
    thinking = "{% for m in messages if m.reasoning_content %}<bot> {% endfor %}" + MARKING_TEMPLATE
    assert [note.split("`")[1] for note in load_rows(path, tokenizer(thinking), 64).notes] == ["tools", "tool_calls"]


def test_what_has_been_told_takes_no_more_renderings(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"role": "assistant", "content": "a", "reasoning_content": "b"}
    renders: list[str] = []
    render = ChatTemplate.render
    monkeypatch.setattr(ChatTemplate, "render", lambda self, *args: renders.append("") or render(self, *args))
    template, words = ChatTemplate(MARKING_TEMPLATE, {}), with_templates(MARKING_TEMPLATE)
    counts = []
    for told, unprinted in (((), ("reasoning_content",)), ({"reasoning_content"}, ())):
        renders.clear()
        assert chat_row(Conversation([CONVERSATION[0], said]), template, words, "", told).unprinted == unprinted
        counts.append(len(renders))
    assert counts[0] == counts[1] + 1


def test_templates_without_a_default_are_named(tmp_path: Path) -> None:
    with_templates({"tool_use": MARKING_TEMPLATE, "rag": MARKING_TEMPLATE}).save_pretrained(tmp_path)
    path = write_rows(tmp_path / "chat.jsonl", [{"messages": CONVERSATION}])
    files = read_companions(tmp_path).files
    with (
        open_tokenizer(Companions(files), None) as ours,
        pytest.raises(DataError, match="is the default: rag, tool_use"),
    ):
        load_rows(path, ours, 64)


def test_a_file_that_is_no_text_or_not_there_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="not UTF-8"):
        load_rows(tmp_path / "x.txt", tokenizer(), 4)
    with pytest.raises(DataError, match="no such file or directory"):
        load_rows(tmp_path / "none.txt", tokenizer(), 4)
    with pytest.raises(DataError, match="given as hf://datasets/allenai/c4"):
        load_rows("allenai/c4", tokenizer(), 4)


@pytest.mark.parametrize(
    ("template", "what", "do"),
    [
        (None, "no chat template, which says how", "Copy chat_template.jinja"),
        ("{% for %}", "the chat template is no Jinja: .* line 1", "Mend chat_template.jinja"),
        ("{{ raise_exception('roles alternate') }}", "refuses .*: roles alternate", "change the conversation, or the"),
    ],
)
def test_conversations_that_a_template_does_not_take_are_refused_with_the_next_step(
    tmp_path: Path, template: str | None, what: str, do: str
) -> None:
    path = write_rows(tmp_path / "chat.jsonl", [{"messages": CONVERSATION}])
    with pytest.raises(DataError, match=what) as refused:
        load_rows(path, tokenizer(template), 64)
    assert do in refused.value.do and refused.value.where == f"{path}, line 1"


@pytest.mark.parametrize(
    ("changes", "what", "do"),
    [
        ({"tokenizer.json": None}, "the checkpoint has no tokenizer", "Copy its files"),
        ({"tokenizer.json": b'{"a": 1'}, "tokenizer.json is no JSON", "Copy that file again"),
        ({"tokenizer.json": None, "tokenizer.model": b"abc"}, "a package that is not installed", "save_pretrained"),
        ({"tokenizer.json": b'{"a": 1}'}, "transformers says: 'added_tokens'", "Copy its files"),
    ],
)
def test_a_tokenizer_that_does_not_load_is_refused_in_our_words_with_the_next_step(
    changes: dict[str, bytes | None], what: str, do: str
) -> None:
    changed = _files(None) | changes
    files = {name: content for name, content in changed.items() if content is not None}
    with pytest.raises(DataError, match=what) as refused, open_tokenizer(Companions(files), Path("llama")) as loaded:
        loaded.check()
    assert refused.value.where
    assert "no tokenizer" not in what or refused.value.where == "llama"
    assert do in refused.value.do and "\n" not in refused.value.what


def test_the_fingerprint_follows_the_tokens_and_not_the_path(tmp_path: Path) -> None:
    one = write_rows(tmp_path / "one.jsonl", [{"text": "a b c d"}])
    same = write_rows(tmp_path / "same.jsonl", [{"text": "a b c d"}])
    other = write_rows(tmp_path / "other.jsonl", [{"text": "a b c e"}])
    prints = [load_rows(path, tokenizer(), 2).fingerprint for path in (one, same, other)]
    assert prints[0] == prints[1] != prints[2]
    assert load_rows(one, tokenizer(), 1).fingerprint != prints[0]


def test_each_epoch_takes_every_row_once_in_an_order_of_its_own() -> None:
    order = Order(10, seed=3)
    epochs = [order.take(start, 10) for start in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_position_alone_says_what_comes_next() -> None:
    whole = Order(7, seed=1).take(0, 40)
    for position in range(0, 36, 3):
        assert Order(7, seed=1).take(position, 3) == whole[position : position + 3]
    assert Order(7, seed=2).take(0, 40) != whole


def test_a_tokenizer_comes_from_the_checkpoints_files_alone(tmp_path: Path) -> None:
    loaded = tokenizer(PLAIN_TEMPLATE)
    assert loaded.encode("a e") == [4, 8] and loaded.decode([4, 8]) == "a e" and loaded.end == 0
    assert loaded.render(CONVERSATION[:1], add_generation_prompt=True) == "<user> a b ? <end> <bot> "
    with pytest.raises(DataError, match="has no tokenizer"), open_tokenizer(Companions({}), None) as none:
        assert none.end


def test_a_tokenizer_that_wants_to_run_code_is_refused() -> None:
    files = _files(None)
    config = json.loads(files["tokenizer_config.json"])
    config["auto_map"] = {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}
    config["tokenizer_class"] = "Evil"
    files = files | {"tokenizer_config.json": json.dumps(config).encode(), "evil.py": b"raise SystemExit('ran')"}
    with pytest.raises(DataError, match="does not load"), open_tokenizer(Companions(files), None) as loaded:
        assert loaded.end
