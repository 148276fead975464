"""The commands as a shell sees them: help, exit codes, one panel for an error, a traceback on request."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from precisionctl.cli import main


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.mark.parametrize("name", main.commands)
def test_every_command_has_help_for_itself_and_each_option(name):
    assert run(name, "--help").exit_code == 0
    command = main.commands[name]
    assert command.help
    silent = [p.name for p in command.params if p.param_type_name == "option" and not p.help]
    assert not silent


def test_help_imports_neither_torch_nor_transformers_nor_rich():
    code = (
        "import sys\n"
        "from precisionctl.cli import main\n"
        "main(['--help'], standalone_mode=False)\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'rich', 'matplotlib'} & set(sys.modules)))\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.splitlines()[-1] == "[]"


def test_an_unrecognised_directory_is_one_panel_that_names_what_was_looked_for(tmp_path):
    (tmp_path / "notes.txt").write_text("no checkpoint")
    result = run("inspect", tmp_path)
    assert result.exit_code == 1
    assert "UnknownFormat" in result.stderr
    assert "safetensors" in result.stderr and "torch_dist" in result.stderr
    assert "Traceback" not in result.stderr
    assert not result.stdout


def test_debug_shows_where_an_error_came_from(tmp_path):
    result = run("--debug", "inspect", tmp_path)
    assert result.exit_code == 1
    assert type(result.exception).__name__ == "UnknownFormat"


@pytest.mark.parametrize(
    "arguments",
    [["inspect"], ["inspect", "/no/such/path"], ["nonsense"], ["compare", "."], ["inspect", ".", "--nonsense"]],
)
def test_wrong_usage_exits_with_2(arguments):
    assert run(*arguments).exit_code == 2


def write_run(folder, losses, first_step=1):
    folder.mkdir()
    lines = [json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(losses, first_step)]
    (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    return folder


def test_compare_is_a_gate_on_the_mean_of_the_last_steps(tmp_path):
    first = write_run(tmp_path / "bf16", [2.0] * 150)
    near = write_run(tmp_path / "fp8", [4.0] * 50 + [2.01] * 100)
    assert run("compare", first, near, "--max-gap", "1%").exit_code == 0
    assert run("compare", first, near, "--max-gap", "0.4%").exit_code == 1
    assert run("compare", first, near, "--max-gap", "0.006").exit_code == 0
    assert run("compare", first, near, "--max-gap", "much").exit_code == 2


def test_compare_prints_json_for_scripts(tmp_path):
    first, other = write_run(tmp_path / "a", [2.0, 1.0]), write_run(tmp_path / "b", [2.0, 1.5])
    shown = json.loads(run("compare", first, other, "--json").stdout)
    assert shown["against"] == "a"
    assert shown["runs"][0]["now"] == 0.5


def test_compare_draws_a_picture_and_a_page_that_needs_nothing_else(tmp_path):
    first, other = write_run(tmp_path / "a", [2.0, 1.0]), write_run(tmp_path / "<b>", [2.0, 1.5])
    png, html = tmp_path / "curves.png", tmp_path / "curves.html"
    assert run("compare", first, other, "--png", png, "--html", html).exit_code == 0
    assert png.read_bytes().startswith(b"\x89PNG")
    page = html.read_text()
    assert "&lt;b&gt;" in page and "<b>" not in page
    assert "<svg" in page and "<script" not in page and "src=" not in page
