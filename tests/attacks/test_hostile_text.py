"""What a user brings beside weights: chat templates, tokenizers, data, recipes. They are read, never obeyed."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from conversations import tokenizer

from precisionctl.errors import DataError, PrecisionctlError, RecipeError
from precisionctl.recipe import load_recipe
from precisionctl.tokens.chat import ChatTemplate
from precisionctl.tokens.safe_tokenizer import load
from precisionctl.tokens.samples import Conversation
from precisionctl.trainer.data.rows import load_rows

MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.fixture(autouse=True)
def nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.chdir(tmp_path)
    yield
    assert not (tmp_path / "executed").exists()


TEMPLATES = {
    "a way to os": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a way to builtins": "{{ cycler.__init__.__globals__.os.system('touch executed') }}",
    "a way by attr": "{{ (''|attr('__class__')).__mro__ }}",
    "a way by format": "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}{{ 1 / 0 }}",
    "a change of the messages": "{{ messages.append(1) }}",
    "a file": "{% include '/etc/passwd' %}",
    "an import": "{% import 'os' as os %}{{ os.system('touch executed') }}",
    "a loop of 10**9": "{% for a in range(10 ** 9) %}{% endfor %}",
    "itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "no template": "{% for %}",
    "a type it does not expect": "{{ messages + 1 }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_template_cannot_reach_out(name: str) -> None:
    with pytest.raises(DataError, match="chat template"):
        ChatTemplate(TEMPLATES[name], {}).render(MESSAGES, Conversation(MESSAGES), "chats.jsonl, line 1")


CODE = "open('executed', 'w')\nclass Evil:\n    pass\n"
TOKENIZERS: Mapping[str, Mapping[str, bytes]] = {
    "remote code": {
        "tokenizer_config.json": json.dumps(
            {"auto_map": {"AutoTokenizer": ["tokenizer_evil.Evil", None]}, "tokenizer_class": "Evil"}
        ).encode(),
        "tokenizer_evil.py": CODE.encode(),
        "config.json": json.dumps({"model_type": "evil", "auto_map": {"AutoConfig": "tokenizer_evil.Evil"}}).encode(),
    },
    "code of another's": {
        "tokenizer_config.json": json.dumps({"auto_map": {"AutoTokenizer": "someone/evil--evil.Evil"}}).encode(),
    },
    "a deep config": {"tokenizer_config.json": b'{"a":' + b"[" * 100_000},
    "a tokenizer that is a list": {"tokenizer.json": b"[]", "tokenizer_config.json": b"{}"},
    "a tokenizer that is deep": {"tokenizer.json": b'{"model":' + b"[" * 100_000, "tokenizer_config.json": b"{}"},
    "a config that is a list": {"tokenizer_config.json": b"[]", "tokenizer.json": b"{}"},
    "no UTF-8": {"tokenizer_config.json": b"\xff\xfe", "tokenizer.json": b"\xff"},
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_brings_no_code(tmp_path: Path, name: str) -> None:
    for file, content in TOKENIZERS[name].items():
        (tmp_path / file).write_bytes(content)
    with pytest.raises(DataError, match="tokenizer"):
        load(tmp_path)


ROWS = {
    "deep": b"[" * 100_000,
    "deep within": b'{"text":' + b"[" * 100_000,
    "a number without end": b'{"text": ' + b"9" * 5000 + b"}",
    "no UTF-8": b'{"text": "\xff"}',
    "UTF-16": '{"text": "a"}'.encode("utf-16"),
    "no text": b'{"text": null}',
    "a message that is none": b'{"messages": [1]}',
    "a role that is none": json.dumps({"messages": [{"role": []}]}).encode(),
    "no row": b"",
    "no object": b"7",
}


@pytest.mark.parametrize("name", ROWS)
def test_data_that_is_none_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "rows.jsonl").write_bytes(ROWS[name])
    with pytest.raises(DataError):
        load_rows(tmp_path / "rows.jsonl", tokenizer("{{ messages[0].role + 'x' }}"), 16)


RECIPES = {
    "deep": b"a = " + b"[" * 100_000,
    "tables in tables": b"a = " + b"{a=" * 50_000,
    "a number without end": b"[train]\nsteps = " + b"9" * 5000,
    "a float without end": b"[optimizer]\nlr = " + b"9" * 400,
    "a float that is none": b"[optimizer]\nlr = nan",
    "infinite": b"[optimizer]\nlr = inf",
    "negative": b"[train]\nsteps = -1",
    "no UTF-8": b"\xff",
    "a list": b"[train]\nsteps = [1]",
    "an unknown key": b"[train]\n__class__ = 1",
    "control characters": b"a = '\x1b[2J'",
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_that_is_none_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "recipe.toml").write_bytes(RECIPES[name])
    with pytest.raises(RecipeError) as error:
        load_recipe(tmp_path / "recipe.toml")
    assert isinstance(error.value, PrecisionctlError) and len(str(error.value)) < 5000


@pytest.mark.parametrize("value", ["[" * 100_000, "9" * 5000])
def test_an_override_that_is_no_value_is_refused(value: str) -> None:
    with pytest.raises(RecipeError):
        load_recipe("bf16", [f"optimizer.lr={value}"])
