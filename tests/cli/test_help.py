"""The help of commands: examples that hold, options in groups; how much is told; completion; the environment's page."""

import re
import runpy
import shlex
from pathlib import Path

import click
import pico
import pytest
from click.testing import CliRunner
from command_line import run
from repository import ROOT

from precisionctl.cli import main
from precisionctl.cli.options import Choice


@pytest.mark.parametrize("name", main.commands)
def test_examples_of_a_command_are_in_its_help_and_hold(name: str) -> None:
    command = main.commands[name]
    shown = run(name, "--help").stdout
    assert command.examples
    for example in command.examples:
        assert f"  precisionctl {example}\n" in shown
        called, *words = shlex.split(example.partition(" >")[0])
        assert called == name
        context = click.Context(command)
        options, _, order = command.make_parser(context).parse_args(words)
        for parameter in order:
            given = options[parameter.name]
            if isinstance(parameter.type, click.Choice) and not parameter.multiple:
                parameter.type.convert(given, parameter, context)
        missing = [each.name for each in command.params if each.required and options.get(each.name) is None]
        assert missing == []


@pytest.mark.parametrize("name", main.commands)
def test_every_option_of_a_long_help_stands_in_one_group(name: str) -> None:
    command = main.commands[name]
    options = [each for each in command.params if isinstance(each, click.Option) and not each.hidden]
    flags = [flag for those in command.sections.values() for flag in those]
    assert len(flags) == len(set(flags)) and set(flags) <= {each.opts[-1] for each in options}
    shown = run(name, "--help").stdout
    for option in [*options, *command.sections]:
        words = option if isinstance(option, str) else option.opts[-1]
        assert re.search(rf"^  (-\w, )?{re.escape(words)}\b|^{re.escape(words)}:$", shown, re.MULTILINE), words
    if len(options) > 10:
        assert "\nOptions:" not in shown  # there every one has its group


def test_every_option_of_words_answers_with_the_one_that_was_meant() -> None:
    kinds = [each.type for command in main.commands.values() for each in command.params]
    assert all(isinstance(kind, Choice) for kind in kinds if isinstance(kind, click.Choice))


def test_quiet_prints_errors_and_json_alone_before_a_command_or_after_it(tmp_path: Path) -> None:
    pico.save(tmp_path, "qwen3")
    for line in (["--quiet", "inspect", tmp_path], ["inspect", tmp_path, "-q"]):
        done = run(*line)
        assert (done.exit_code, done.stdout, done.stderr) == (0, "", "")
    assert run("-q", "inspect", tmp_path, "--json").stdout.startswith("{")
    assert "error[UnknownFormat]" in run("-q", "inspect", tmp_path / "config.json").stderr
    assert "qwen3" in run("inspect", tmp_path).stdout  # and the next command is not quiet


def test_verbose_says_what_is_found_and_done(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    pico.save(tmp_path / "hf", "qwen3")
    line = ("convert", tmp_path / "hf", tmp_path / "out", "--to", "megatron", "--workers", 1)
    told = run(*line, "--verbose").stderr
    for words in ("hf: safetensors, 25 tensors", "planned 19 jobs", "decoder.final_layernorm.weight: 256 bytes"):
        assert words in told
    assert "planned" not in run(*line, "--restart").stderr


def test_the_page_of_commands_has_what_help_prints_of_each() -> None:
    pytest.importorskip("mkdocs")
    page = "".join("".join(runpy.run_path(str(ROOT / "docs" / "site.py"))["commands"]()).split())
    for name in ("", *main.commands):
        parts = run(*filter(None, [name]), "--help").stdout.split("\n\n")
        shown = [part for part in parts if re.match(r"\S.*:\n", part)]  # options in groups, and examples
        assert len(shown) >= 2 and [part for part in shown if "".join(part.split()) not in page] == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_what_the_shell_asks_the_program_for(shell: str) -> None:
    printed = run("completion", shell).stdout
    assert f"_PRECISIONCTL_COMPLETE={shell}_complete" in printed and "precisionctl" in printed
    asked = {"_PRECISIONCTL_COMPLETE": f"{shell}_complete", "COMP_WORDS": "precisionctl expo", "COMP_CWORD": "1"}
    asked |= {"COMP_CWORD": "expo"} if shell == "fish" else {}
    found = CliRunner().invoke(main, [], prog_name="precisionctl", env=asked)
    assert "export-inference" in found.stdout


@pytest.mark.parametrize(
    ("line", "some"),
    [
        ("export-inference llama out --target ", {"vllm", "te"}),
        ("verify llama --target v", {"vllm"}),
        ("resume llama --recipe fp8-", {"fp8-block", "fp8-delayed"}),
        ("convert megatron out --architecture qwen3", {"qwen3", "qwen3_moe"}),
    ],
)
def test_completion_knows_engines_recipes_and_families(line: str, some: set[str]) -> None:
    asked = {"_PRECISIONCTL_COMPLETE": "bash_complete", "COMP_WORDS": f"precisionctl {line}"}
    found = CliRunner().invoke(
        main, [], prog_name="precisionctl", env=asked | {"COMP_CWORD": str(len(line.split(" ")))}
    )
    names = {row.removeprefix("plain,") for row in found.stdout.splitlines() if row.startswith("plain,")}
    assert some <= names and all(name.startswith(line.rpartition(" ")[2]) for name in names)


def test_the_page_of_environment_variables_has_every_one_that_is_read() -> None:
    pattern = re.compile(r"(RANK|WORLD_SIZE|(LOCAL|MASTER|SLURM|TORCHELASTIC|PRECISIONCTL)_[A-Z_]+)")
    code = [file.read_text(encoding="utf-8") for file in (ROOT / "precisionctl").rglob("*.py")]
    read = {name for text in code for name in re.findall(r'"(\w+)"', text) if pattern.fullmatch(name)}
    page, *_ = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8").partition("Of other programs")
    assert read == {name for name in re.findall(r"`(\w+)`", page) if pattern.fullmatch(name)}
