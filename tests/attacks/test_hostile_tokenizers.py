"""Tokenizers and chat templates of strangers: what they may take is bounded, they read their own files alone, and what
goes wrong is one clear error."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from conversations import WORDS, tokenizer as sound
from soaking import few
from training import make_source, make_text

from precisionctl.checkpoints.base import Companions
from precisionctl.cli import main
from precisionctl.errors import DataError, EnvironmentProblem
from precisionctl.tokens import limits, process, tokenizer as asking
from precisionctl.tokens.limits import Limits, to_tokenize
from precisionctl.tokens.process import Ended, Process
from precisionctl.tokens.tokenizer import TextPiece, Tokenizer, open_tokenizer

Files = Mapping[str, bytes]
MB = 1 << 20


def conversation(*contents: str) -> TextPiece:
    said = [{"role": "user", "content": content} for content in contents]
    return TextPiece("chats.jsonl, line 1", json.dumps({"messages": said}).encode(), len(said))


CHAT = conversation("a")


@pytest.fixture
def started_as_for_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not forked, as in other tests."""
    monkeypatch.setattr(process, "subprocess", subprocess)


@pytest.fixture
def bounded(started_as_for_users: None) -> Iterator[None]:
    """Neither this process nor one that it starts takes much, whatever it is given. A process has at its start what
    this one has."""
    begun, own = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.monotonic() - begun < 120
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < own + (200 << 10)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < own + (1500 << 10)


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Less memory than there is, and less time where that is what runs out: else a busy machine would run out of it."""

    def limit(message: str) -> None:
        monkeypatch.setattr(limits, "WORKING", Limits(1.0 if LATE in message else 60.0, 256 * MB))

    return limit


def changed(name: str = "tokenizer.json", **keys: Any) -> Files:
    """A sound tokenizer's files with other keys in one of them."""
    files = sound()._files
    return {**files, name: json.dumps({**json.loads(files.get(name, b"{}")), **keys}).encode()}


def with_template(template: str) -> Files:
    return {**sound()._files, "chat_template.jinja": template.encode()}


def replacing(word: str, by: str, times: int = 1) -> dict[str, Any]:
    """As a normalizer."""
    return {
        "type": "Sequence",
        "normalizers": [{"type": "Replace", "pattern": {"String": word}, "content": by}] * times,
    }


def known_as(**ids: int) -> dict[str, Any]:
    """A vocabulary in which some words have other ids."""
    return {"type": "WordLevel", "vocab": {**{word: i for i, word in enumerate(WORDS)}, **ids}, "unk_token": "?"}


DEEP = "{% for i in range(40) %}{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] %}{% endfor %}"
DOUBLED = "{% for i in range(40) %}{% set n.a = n.a ~ n.a %}{% endfor %}"
LATE, LARGE = "longer than 1 s", "refuses .*MemoryError"
TEMPLATES = {
    "lists that compare for ever": ("{% set n = namespace(a=[], b=[]) %}" + DEEP + "{{ n.a == n.b }}", LATE),
    "loops in loops": ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", LATE),
    "a number that takes for ever": ("{{ 7 ** (7 ** 9) }}", LATE),
    "ten gigabytes": ("{% set a = 'a' * 10000000000 %}{{ a }}", LARGE),
    "gigabytes by doubling": ("{% set n = namespace(a='ab') %}" + DOUBLED, LARGE),
    "a format of gigabytes": ("{{ '%.999999999f' | format(1) }}", LARGE),
}


@pytest.mark.parametrize("name", few(TEMPLATES, "lists that compare for ever"))
def test_a_chat_template_has_to_end(hurry: Callable[[str], None], bounded: None, name: str) -> None:
    template, message = TEMPLATES[name]
    hurry(message)
    with pytest.raises(DataError, match=f"{message}.*chats.jsonl, line 1.*Compare"):
        Tokenizer(with_template(template)).samples([CHAT])


ENDLESS = {"type": "Split", "pattern": {"Regex": "^(?:(?>a*)*)+$"}, "behavior": "Isolated", "invert": False}
TOKENIZERS = {
    "a word that doubles": (changed(normalizer=replacing("a", "aa", 40)), "a", "GB of memory|longer than 1 s"),
    "a word that is a million": (
        changed(normalizer=replacing("a", "a " * MB)),
        "a",
        "answers with|longer than 1 s|of memory",
    ),
    "a pattern that tries everything": (
        changed(pre_tokenizer={**ENDLESS, "pattern": {"Regex": "^(a+)+$"}}),
        "a" * 40 + "!",
        "fails|longer than 1 s",
    ),
    "a token that no model has": (changed(model=known_as(a=(1 << 32) - 1)), "a", "makes token 4294967295|fails"),
    "a token beyond all": (changed(model=known_as(a=1 << 32)), "a", "does not load"),
    "an end that no model has": (
        changed(model=known_as(**{"<eos>": (1 << 32) - 1}), added_tokens=[]),
        "a",
        "begins or ends texts with 4294967295",
    ),
    "an end that is a list": (changed("tokenizer_config.json", eos_token=["a", "b"]), "a", "does not load"),
    "a length that is none": (changed("tokenizer_config.json", model_max_length="x"), "a", "TypeError"),
}


@pytest.mark.parametrize("name", few(TOKENIZERS, "a pattern that tries everything"))
def test_what_a_tokenizer_may_take_and_answer_is_bounded(
    hurry: Callable[[str], None], bounded: None, name: str
) -> None:
    files, text, message = TOKENIZERS[name]
    hurry(message)
    with pytest.raises(DataError, match=message), open_tokenizer(Companions(files), None) as tokenizer:
        tokenizer.texts([TextPiece("text.txt", text.encode())])


@pytest.mark.soak
def test_files_without_end_are_not_loaded(monkeypatch: pytest.MonkeyPatch, bounded: None) -> None:
    monkeypatch.setattr(asking, "to_load", lambda nbytes: Limits(0.5, 256 * MB))
    added = [
        {"id": i, "content": f"x{i}", **dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)}
        | {"special": True}
        for i in range(100_000)
    ]
    with pytest.raises(DataError, match="takes longer|GB of memory|does not load: MemoryError"):
        assert Tokenizer(changed(added_tokens=added)).end
    many = {f"vocab.{number}": bytes(100 * MB) for number in range(3)}
    with pytest.raises(DataError, match="have 314.6 MB, more than any known tokenizer"):
        assert Tokenizer({**sound()._files, **many}).end


ELSEWHERE = (
    *("gguf_file", "vocab_file", "merges_file", "tokenizer_file", "spm_file", "vocab", "merges", "name_or_path"),
    *("cache_dir", "subfolder", "tokenizer_path", "special_tokens_map_file"),
)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_no_key_leads_to_another_file(tmp_path: Path, name: str) -> None:
    """Opening the pipe would wait for ever."""
    os.mkfifo(tmp_path / "pipe")
    keys = dict.fromkeys(ELSEWHERE, str(tmp_path / "pipe")) | {
        "sp_model_kwargs": {"model_file": str(tmp_path / "pipe")}
    }
    keys |= {"init_inputs": [str(tmp_path / "pipe")], "fast_tokenizer_files": [str(tmp_path / "tokenizer.1.json")]}
    with open_tokenizer(Companions(changed(name, **keys)), None) as tokenizer:
        assert tokenizer.encode("a e") == [4, 8]


def test_code_and_names_that_lead_elsewhere_do_not_reach_transformers() -> None:
    more = dict.fromkeys(("tokenizer.py", "../../tokenizer.json", "/tokenizer.json", "model.safetensors"), b"")
    assert Tokenizer({**sound()._files, **more})._files == sound()._files


@pytest.mark.soak
def test_two_billion_labels_are_not_counted(tmp_path: Path, bounded: None) -> None:
    source = make_source(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "num_labels": 2_000_000_000}))
    text = make_text(tmp_path / "text.txt", words=300)
    for arguments in (
        ("eval", source, "--data", text, "--sequence-length", "32"),
        (
            "calibrate",
            source,
            "--data",
            text,
            "--out",
            tmp_path / "state.safetensors",
            "--passes",
            "1",
            "--sequence-length",
            "32",
        ),
    ):
        done = CliRunner().invoke(main, [str(argument) for argument in arguments])
        assert done.exit_code == 0, done.output


def test_more_tokens_than_a_text_can_have_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "_FEW", 100)
    with pytest.raises(DataError, match="answers with 50000 bytes"):
        Tokenizer(with_template("{{ 'a ' * 10000 }}")).samples([CHAT])


def test_a_long_conversation_and_a_large_text_have_their_time() -> None:
    long = conversation(*["a b c"] * 3000)
    assert len(sound("{% for m in messages %}{{ m.content }} {% endfor %}").samples([long])[0].tokens) == 9000
    gigabyte, typical = to_tokenize(1 << 30), 2e6
    assert gigabyte.seconds > 10 * (1 << 30) / typical and gigabyte.nbytes > 600 << 30


@pytest.mark.usefixtures("started_as_for_users")
@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGRTMIN + 1], ids=["named", "real-time"])
def test_a_process_that_a_signal_ends_says_which(number: int) -> None:
    """Real-time signals have no names but the first and the last."""
    made = Process()
    os.kill(made._popen.pid, number)
    with pytest.raises(Ended, match=rf"^ended by signal {int(number)} \("):
        made.ask({}, [bytes(MB)], [Limits(10.0, 0)])


@pytest.mark.usefixtures("started_as_for_users")
def test_a_process_that_is_killed_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the system does where memory runs out."""
    made = Process()
    os.kill(made._popen.pid, signal.SIGKILL)
    with pytest.raises(Ended, match="was killed"):
        made.ask({}, [bytes(MB)], [Limits(10.0, 0)])
    assert not made.runs
    monkeypatch.setattr(process, "_BEGIN", "raise SystemExit('no module named transformers')")
    with pytest.raises(EnvironmentProblem, match="does not start: no module named transformers"):
        Process()


PROGRAM = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = {paths}
from precisionctl.tokens.limits import WORKING
from precisionctl.tokens.tokenizer import Tokenizer
print("main")
folder = Path(sys.argv[1])
tokenizer = Tokenizer({{file.name: file.read_bytes() for file in folder.iterdir()}})
print(tokenizer.encode("a e"), tokenizer._process._popen.pid, flush=True)
tokenizer._process.ask({{"do": "samples", "where": [""]}}, [Path(sys.argv[2]).read_bytes()], [WORKING])
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("started", [["program.py"], pytest.param(["-m", "program"], marks=pytest.mark.soak)])
def test_it_does_not_run_the_main_program_again_and_ends_with_it(tmp_path: Path, started: list[str]) -> None:
    """In the middle of what would take it a minute."""
    (tmp_path / "files").mkdir()
    for name, content in with_template(TEMPLATES["loops in loops"][0]).items():
        (tmp_path / "files" / name).write_bytes(content)
    (tmp_path / "chat.json").write_bytes(CHAT.content)
    (tmp_path / "program.py").write_text(PROGRAM.format(paths=sys.path))
    done = subprocess.run(
        [sys.executable, *started, "files", "chat.json"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "main" and second.startswith("[4, 8] ")
    until = time.monotonic() + 10
    while (there := Path(f"/proc/{second.split()[-1]}/cmdline")).exists() and there.read_bytes():
        assert time.monotonic() < until
        time.sleep(0.05)
