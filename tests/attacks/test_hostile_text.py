"""What a user brings beside weights: chat templates, tokenizers, data, recipes. They are read, never obeyed."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from precisionctl.checkpoints.base import Companions
from precisionctl.errors import DataError, PrecisionctlError, RecipeError
from precisionctl.recipe import load_recipe
from precisionctl.trainer.data import chat
from precisionctl.trainer.data.bounded import bounded
from precisionctl.trainer.data.rows import load_rows
from precisionctl.trainer.data.tokenizer import load_tokenizer

MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.fixture(autouse=True)
def nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.chdir(tmp_path)
    yield
    assert not (tmp_path / "executed").exists()


def tokenizer(template: str) -> PreTrainedTokenizerBase:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<eos>": 2}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", chat_template=template)


TEMPLATES = {
    "a way to os": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a way to builtins": "{{ cycler.__init__.__globals__.os.system('touch executed') }}",
    "a way by attr": "{{ (''|attr('__class__')).__mro__ }}",
    "a way by format": "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}{{ 1 / 0 }}",
    "a change of the messages": "{{ messages.append(1) }}",
    "a file": "{% include '/etc/passwd' %}",
    "an import": "{% import 'os' as os %}{{ os.system('touch executed') }}",
    "no end": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a loop of 10**9": "{% for a in range(10 ** 9) %}{% endfor %}",
    "ten gigabytes": "{% set a = 'a' * 10000000000 %}{{ a }}",
    "gigabytes by doubling": (
        "{% set n = namespace(a='ab') %}{% for i in range(40) %}{% set n.a = n.a ~ n.a %}{% endfor %}"
    ),
    "a number of gigabytes": "{{ 10 ** (10 ** 10) }}",
    "a fraction of gigabytes": "{{ 1.5 | round(10 ** 10, 'ceil') }}",
    "a format of gigabytes": "{{ '%.999999999f' | format(1) }}",
    "itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "no template": "{% for %}",
    "a type it does not expect": "{{ messages + 1 }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_template_cannot_reach_out_and_has_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(chat, "SECONDS", 0.5)
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": MESSAGES}))
    with pytest.raises(DataError, match="chat template"):
        load_rows(tmp_path / "chat.jsonl", tokenizer(TEMPLATES[name]), 16)


def test_bounds_are_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MemoryError), bounded(1.0, 1 << 20):
        bytearray(1 << 30)
    assert len(bytearray(1 << 28))
    with pytest.raises(TimeoutError), bounded(0.1, 1 << 30):
        while True:
            pass
    with bounded(60.0, 1 << 30):
        pass


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
    "a name that leads elsewhere": {"../../tokenizer.json": b"{}"},
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_brings_no_code(name: str) -> None:
    with pytest.raises(DataError, match="tokenizer"):
        load_tokenizer(Companions(TOKENIZERS[name]))


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
