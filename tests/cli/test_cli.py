"""The commands as a shell sees them: help, exit codes, one line for an error, a traceback on request."""

import errno
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from types import SimpleNamespace
from typing import get_args

import click
import deepspeed_files
import gguf_files
import pico
import pytest
import torch
from click.testing import CliRunner
from command_line import run
from safetensors.torch import load_file, save_file
from soaking import in_soak
from training import contents

from precisionctl import errors, signals
from precisionctl.checkpoints import open as opening
from precisionctl.checkpoints.gguf.file_types import FILE_TYPES, GgufType
from precisionctl.cli import main
from precisionctl.cli.options import EngineName, Size
from precisionctl.conversion import estimate, worker
from precisionctl.export.mlx_plan import MlxScheme
from precisionctl.quant_methods.base import SCHEMES, Scheme


@pytest.mark.parametrize("name", main.commands)
def test_every_command_has_help_for_itself_and_each_option(name):
    assert run(name, "--help").exit_code == 0
    command = main.commands[name]
    assert command.help
    silent = [p.name for p in command.params if p.param_type_name == "option" and not p.help]
    assert not silent


def test_the_schemes_of_the_command_line_are_those_of_the_table():
    (scheme,) = (option for option in main.commands["export-inference"].params if option.name == "scheme")
    assert [*scheme.type.choices] == [*dict.fromkeys((*get_args(Scheme), *get_args(GgufType), *get_args(MlxScheme)))]
    assert [*get_args(Scheme)] == [*SCHEMES]
    assert [*get_args(GgufType)] == [*FILE_TYPES]


def test_the_list_of_commands_cuts_none_of_them_short():
    shown = CliRunner().invoke(main, ["--help"], terminal_width=80).output
    assert "..." not in shown.partition("Commands:")[2] and all(f"\n  {name} " in shown for name in main.commands)


def test_a_wrong_key_of_a_recipe_is_told_before_torch_is_imported(tmp_path):
    pico.save(tmp_path)
    line = [*("resume", str(tmp_path), "--precision=fp8"), "--set=lr=1"]
    code = f"import sys\nfrom precisionctl.cli import main\nmain({line}, standalone_mode=False)"
    program = f"try:\n    exec({code!r})\nexcept BaseException: pass\nassert 'torch' not in sys.modules"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.returncode == 0 and "Did you mean optimizer.lr?" in found.stderr


def test_help_imports_neither_torch_nor_transformers_nor_rich():
    code = (
        "import sys\n"
        "from precisionctl.cli import main\n"
        "main(['--help'], standalone_mode=False)\n"
        "heavy = {'torch', 'transformers', 'numpy', 'rich', 'matplotlib', 'huggingface_hub'}\n"
        "heavy |= {'tempfile', 'concurrent'}  # not heavy, and not needed\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.splitlines()[-1] == "[]"


def test_what_only_reads_plans_or_moves_bytes_imports_no_torch(tmp_path):
    """In one process one after the other: descriptions of both layouts, plans, copies between Hugging Face directories,
    Megatron's and PyTorch's, two compared, what other frameworks are started with, and loss curves."""
    hf, megatron = (str(tmp_path / name) for name in ("hf", "megatron"))
    pico.save(tmp_path / "hf", "llama-2", dtype=torch.bfloat16)
    first, second = (write_run(tmp_path / name, [2.0]) for name in ("first", "second"))
    commands = [
        ["convert", hf, megatron, "--to", "megatron", "--verify"],
        ["inspect", hf],
        ["inspect", megatron],
        ["convert", megatron, f"{hf}-0", "--to", "hf", "--dry-run"],
        ["convert", hf, f"{hf}-0", "--to", "megatron", "--dry-run"],
        ["convert", megatron, f"{hf}-0", "--to", "dcp", "--dry-run"],
        ["convert", hf, f"{hf}-0", "--to", "torchtitan", "--dry-run"],
        ["convert", megatron, f"{hf}-1", "--to", "hf", "--verify"],
        ["convert", hf, f"{hf}-2", "--to", "hf", "--max-shard-size", "60kB"],
        ["convert", megatron, f"{hf}-3", "--to", "megatron", "--container", "torch", "--tp", "2"],
        ["convert", megatron, f"{hf}-4", "--to", "dcp"],
        ["convert", f"{hf}-4", f"{hf}-5", "--to", "hf", "--container", "bin"],
        ["verify", hf, megatron],
        ["verify", f"{hf}-1", f"{hf}-2"],
        ["verify", hf, f"{hf}-3"],
        ["verify", hf, "--target", "vllm"],
        *(["launch-args", megatron, "--framework", name] for name in ("megatron-lm", "megatron-bridge")),
        *(["launch-args", hf, "--framework", name] for name in ("nemo", "accelerate")),
        ["launch-args", f"{hf}-3", "--framework", "megatron-lm", "--json"],
        ["compare", str(first), str(second), "--last", "1"],
    ]
    code = (
        "import sys\n"
        "from precisionctl.cli import main\n"
        f"for command in {commands}:\n"
        "    main(command, standalone_mode=False)\n"
        "    assert 'torch' not in sys.modules, command\n"
        "heavy = {'transformers', 'matplotlib', 'huggingface_hub', 'numpy.random', 'safetensors.torch', 'regex'}\n"
        "assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_data_that_is_not_there_is_refused_before_torch_is_imported_and_the_checkpoint_read(tmp_path):
    """Whose config.json cannot be read."""
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "held-out.txt").write_text("text")
    data = str(tmp_path / "held_out.txt")
    commands = [
        ["resume", str(tmp_path), "--precision", "bf16", "--data", data],
        ["resume", str(tmp_path), "--precision", "bf16", "--data", data, "--dry-run"],
        ["calibrate", str(tmp_path), "--data", data, "--out", "out"],
        ["eval", str(tmp_path), "--data", data],
        ["tokenize", data, "out", "--tokenizer", str(tmp_path)],
    ]
    code = (
        "import click, sys\n"
        "from precisionctl.cli import main\n"
        f"for command in {commands}:\n"
        "    try:\n"
        "        main(command, standalone_mode=False)\n"
        "    except click.UsageError as error:\n"
        "        print(error.format_message())\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    told = f"'{data}': no such file or directory. Did you mean {tmp_path / 'held-out.txt'}?"
    assert shown.count(told) == len(commands), shown


def test_convert_verify_and_inspect_import_nothing_large_beside_torch(tmp_path):
    """In one process one after the other, so that what any of them imports is seen."""
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    code = (
        "import sys, torch\n"
        "from precisionctl.cli import main\n"
        "hf, out = sys.argv[1:]\n"
        "before = set(sys.modules)\n"
        "for command in (['inspect', hf], ['convert', hf, out, '--to', 'megatron'], ['verify', hf, out]):\n"
        "    main(command, standalone_mode=False)\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names\n"
        "parts = ('torch.distributed.', 'torch._dynamo', 'torch._inductor', 'numpy.random')\n"
        "parts = {part for part in parts for name in set(sys.modules) - before if name.startswith(part)}\n"
        "print(*sorted({name for name in new if not name.startswith(('_', 'cython'))} | parts))\n"
    )
    command = [sys.executable, "-c", code, tmp_path / "hf", tmp_path / "out"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert {*shown.splitlines()[-1].split()} <= {"click", "precisionctl", "regex", "rich", "safetensors", "yaml"} | {
        "torch"  # its smaller modules
    }


def test_an_unrecognised_directory_is_one_error_that_names_what_was_looked_for(tmp_path):
    (tmp_path / "notes.txt").write_text("no checkpoint")
    result = run("inspect", tmp_path)
    assert result.exit_code == 1
    assert "UnknownFormat" in result.stderr
    assert re.search(r"Looked for:\n- [^\n]+\n- ", result.stderr)
    assert "safetensors" in result.stderr and "torch_dist" in result.stderr
    assert "Traceback" not in result.stderr
    assert not result.stdout


def test_without_arguments_the_help_is_shown_in_lines():
    found = run()
    assert found.exit_code == 2 and "\n  convert " in found.stderr and "\\n" not in found.stderr


def test_a_folder_that_has_a_checkpoint_in_it_is_answered_with_that_one(tmp_path):
    pico.save(tmp_path / "models" / "llama")
    (tmp_path / "empty").mkdir()
    assert f"Did you mean {tmp_path / 'models' / 'llama'}?" in run("inspect", tmp_path / "models").stderr
    assert "The directory is empty." in run("inspect", tmp_path / "empty").stderr


def test_a_folder_of_several_checkpoints_is_answered_with_all_of_them(tmp_path):
    for name in ("b", "a"):
        pico.save(tmp_path / name)
    found = " ".join(run("inspect", tmp_path).stderr.split())
    assert f"There are several in it, give one: {tmp_path / 'a'}, {tmp_path / 'b'}." in found
    for index in range(10):
        (tmp_path / f"c{index}").symlink_to("a")
    assert "c7, and 2 more." in " ".join(run("inspect", tmp_path).stderr.split())


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["resume", "model", "--precision=fp8", "--data=txt.txt"], "Did you mean text.txt?"),
        (["resume", "model", "--precision=fp8", "--recipe=smal.toml"], "Did you mean small.toml?"),
        (["resume", "model", "--precision=fp8", "--set=steps=3"], "Did you mean train.steps?"),
        (["export-inference", "model", "out", "--target=te", "--fp8-state=small.tml"], "Did you mean small.toml?"),
        (
            ["export-inference", "model", "out", "--target=te", "--fp8-state=small.toml"],
            "that `precisionctl calibrate`",
        ),
        (["export-inference", "model", "out"], "Give vllm, sglang, tensorrt-llm"),
        (["compare", "model", "modle"], "Did you mean model?"),
        (["calibrate", "model", "--data=empty", "--out=state", "--sequence-length=8"], "Give text, JSONL"),
        (["convert", "model", "/proc/out", "--to=megatron"], "Is the path right, and may you read and write there?"),
    ],
)
def test_a_mistake_is_answered_with_what_to_do(tmp_path, monkeypatch, words, advice):
    pico.save(tmp_path / "model")
    (tmp_path / "empty").mkdir()
    (tmp_path / "text.txt").touch()
    (tmp_path / "small.toml").write_text("[data]\nsequence_length = 8\n")
    monkeypatch.chdir(tmp_path)
    recipe = ["--recipe=small.toml"] if words[0] == "resume" and not any("recipe" in word for word in words) else []
    assert advice in run(*words, *recipe).stderr


def test_a_missing_engine_is_asked_for_with_the_help_of_its_option_if_it_has_some():
    missing = EngineName().get_missing_message
    assert missing(click.Option(["--target"], help="vllm or te."), None) == "Give vllm or te."
    assert missing(click.Option(["--target"]), None) is missing(click.Argument(["target"]), None) is None


@pytest.mark.parametrize("method", ["spqr", "w4afp8"])
@pytest.mark.parametrize("target", ["vllm", "te"])
def test_that_codes_are_not_read_is_no_verdict_of_verify(tmp_path, method, target):
    pico.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": method}}))
    refused = run("verify", tmp_path, "--target", target, "--json")
    assert (
        refused.exit_code == 2
        and f"{method}' is not one that can be read" in json.loads(refused.stdout)["error"]["what"]
    )
    assert run("inspect", tmp_path).exit_code == 1


def test_debug_shows_where_an_error_came_from(tmp_path):
    result = run("--debug", "inspect", tmp_path)
    assert result.exit_code == 1
    assert type(result.exception).__name__ == "UnknownFormat"


def test_with_json_an_error_is_an_object_on_stdout(tmp_path):
    result = run("inspect", tmp_path, "--json")
    shown = json.loads(result.stdout)["error"]
    assert (result.exit_code, shown["kind"], shown["where"]) == (1, "UnknownFormat", str(tmp_path))
    assert f"error[UnknownFormat]: {shown['what']} ({tmp_path}). {shown['do']}" in result.stderr


def endless(value=None):
    return endless([value])


UNFORESEEN = {
    "a bug": (lambda: {}["key"], "UnexpectedError", "KeyError: 'key'", "report it as an issue"),
    "an assertion": (lambda: (_ for _ in ()).throw(AssertionError()), "UnexpectedError", "AssertionError", "a bug"),
    "memory": (lambda: bytearray(1 << 60), "EnvironmentProblem", "not enough memory", "larger machine"),
    "of a GPU": (lambda: (_ for _ in ()).throw(torch.OutOfMemoryError("CUDA")), "EnvironmentProblem", "memory", "CUDA"),
    "of PyTorch": (lambda: torch.empty(1 << 58), "EnvironmentProblem", "not enough memory", "larger machine"),
    "recursion": (endless, "DamagedCheckpoint", "nested deeper", "--debug"),
    "markup": (lambda: int("[red]\x1b[2J[/bold]"), "UnexpectedError", "[red]\\x1b[2J[/bold]", "a bug"),
}


@pytest.mark.last_resort
@pytest.mark.parametrize("name", UNFORESEEN)
def test_what_no_part_has_foreseen_is_one_error_too(tmp_path, monkeypatch, name):
    fails, *words = UNFORESEEN[name]
    monkeypatch.setattr(opening, "open_checkpoint", lambda *_: fails())
    found = run("doctor", tmp_path)
    assert found.exit_code == 1 and isinstance(found.exception, SystemExit)
    assert found.stderr.count("error[") == 1 and "Traceback" not in found.stderr
    assert [word for word in words if word not in found.stderr] == []

    found = run("--debug", "doctor", tmp_path)
    assert not isinstance(found.exception, SystemExit)


@pytest.mark.last_resort
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, BrokenPipeError])
def test_what_ends_a_program_is_no_bug(tmp_path, monkeypatch, kind):
    def stop(*_):
        raise kind

    monkeypatch.setattr(opening, "open_checkpoint", stop)
    found = run("doctor", tmp_path)
    assert "bug" not in found.stderr and "error[" not in found.stderr


@pytest.mark.parametrize(
    "arguments",
    [["inspect"], ["inspect", "/no/such/path"], ["nonsense"], ["compare", "."], ["inspect", ".", "--nonsense"]],
)
def test_wrong_usage_exits_with_2(arguments):
    assert run(*arguments).exit_code == 2


RESUME = ("resume", "{}", "--precision", "fp8", "--data", "{}", "--out", "{}/out")


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["export-inference", "{}", "{}/out", "--target", "vlm"], "no engine `vlm`. Did you mean vllm?"),
        (["export-inference", "{}", "{}/out", "--target", "SGlang"], "no engine `SGlang`. Did you mean sglang?"),
        (["export-inference", "{}", "{}/out", "--target", "x" * 9], "Known: sglang, tensorrt-llm, "),
        ([*RESUME, "--recipe", "fp8-delayd"], "fp8-delayed?"),
        ([*RESUME, "--set", "optimzer.lr=1"], "optimizer.lr?"),
        (["convert", "{}", "{}/out", "--to", "hf", "--precison", "fp8"], "'--precison'. Did you mean --precision?"),
        ([*RESUME, "--output", "x"], "'--output'. Did you mean --out?"),
        (["--quite", "inspect", "{}"], "'--quite'. Did you mean --quiet?"),
        (["conver", "{}", "{}/out"], "Did you mean 'convert'?"),
        (["plan", "{}"], "show it with --dry-run."),
        ([*RESUME, "--lr", "1"], "Give --set optimizer.lr=RATE."),
        ([*RESUME, "--set", "train.global_batch_size=1"], "Did you mean train.batch_size?"),
        (["convert", "{}", "{}/out", "--to", "hf", "--dtype", "bf16"], "Give --precision."),
        (["convert", "{}", "{}/out", "--to", "megatron", "--tensor-model-parallel-size", "2"], "Give --tp."),
        (["convert", "{}", "{}/out", "--target", "vllm"], "Give it to `export-inference`."),
        (["convert", "{}", "{}/out", "--to", "gguf"], "Did you mean `export-inference --target llama.cpp`?"),
        (["convert", "{}", "{}/out", "--to", "mlx"], "Did you mean `export-inference --target mlx`?"),
        (["convert", "{}", "{}/out", "--to", "torch_dist"], "Did you mean `--to megatron --container torch_dist`?"),
        (["convert", "{}", "{}/out", "--to", "BF16"], "Did you mean `--to hf --precision bf16`?"),
        (["export-inference", "{}", "{}/out", "--target", "trtllm"], "Did you mean tensorrt-llm?"),
        (["convert", "{}", "{}/out", "--to", "megatorn"], "'torchtitan', 'deepspeed'. Did you mean megatron?"),
        (["export-inference", "{}", "{}/out", "--target", "vllm", "--scheme", "w4a1"], "Did you mean w4a16?"),
        (["convert", "{}", "{}/out", "--to", "megatron", "--container", "torch_dis"], "Did you mean torch_dist?"),
    ],
)
def test_wrong_names_are_wrong_usage_and_the_right_one_is_guessed(tmp_path, arguments, advice):
    pico.save(tmp_path, "qwen3")
    found = run(*(argument.format(tmp_path) for argument in arguments))
    assert found.exit_code == 2 and advice in found.stderr


def test_a_destination_in_a_file_is_a_wrong_path(tmp_path):
    pico.save(tmp_path / "hf")
    (tmp_path / "file").touch()
    found = run("convert", tmp_path / "hf", tmp_path / "file" / "out", "--to", "megatron")
    assert found.exit_code == 1 and "Is the path right" in found.stderr and "--debug" not in found.stderr


@pytest.mark.parametrize("destination", [".", "", "sub/.."])
def test_a_destination_without_a_name_of_its_own_is_there_already(tmp_path, monkeypatch, destination):
    (tmp_path / "sub").mkdir()
    pico.save(tmp_path / "hf")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    found = run("convert", tmp_path / "hf", destination, "--to", "megatron")
    assert found.exit_code == 1 and "error[DestinationExists]" in found.stderr
    (tmp_path / "text.txt").write_text("text")
    found = run("tokenize", tmp_path / "text.txt", destination, "--tokenizer", tmp_path / "hf")
    assert found.exit_code == 1 and "error[DestinationExists]" in found.stderr


@pytest.mark.parametrize("command", [("inspect",), ("verify", "{0}/hf"), ("convert", "--to", "megatron", "{0}/out")])
def test_a_pipe_in_place_of_a_checkpoint_is_not_waited_for(tmp_path, monkeypatch, command):
    pico.save(tmp_path / "hf")
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr("precisionctl.fp8.sidecar.safe_open", lambda *_, **__: pytest.fail("it would wait for ever"))
    name, *others = (word.format(tmp_path) for word in command)
    found = run(name, tmp_path / "pipe", *others)
    assert found.exit_code == 1 and "error[UnknownFormat]" in found.stderr


def test_tokenize_without_a_tokenizer_leaves_nothing(tmp_path):
    pico.save(tmp_path / "hf")
    (tmp_path / "text.txt").write_text("text")
    found = run("tokenize", tmp_path / "text.txt", tmp_path / "out", "--tokenizer", tmp_path / "hf")
    assert found.exit_code == 1 and "no tokenizer" in found.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "text.txt"]


def test_a_name_that_no_disk_takes_is_a_wrong_path_and_no_matter_for_a_traceback(tmp_path):
    pico.save(tmp_path, "qwen3")
    found = run("convert", tmp_path, tmp_path / "out", "--to", "megatron", "--reference", "x" * 300)
    if sys.version_info >= (3, 14):  # for which there is none of such a name
        assert found.exit_code == 2 and "no such file or directory" in found.stderr
    else:
        assert found.exit_code == 1 and "File name too long" in found.stderr and "Is the path right" in found.stderr
    assert "--debug" not in found.stderr


@pytest.mark.parametrize("scheme", ["fp8", "int8"])
def test_a_word_that_is_less_alike_is_not_guessed(tmp_path, scheme):
    found = run("export-inference", tmp_path, tmp_path / "out", "--target", "vllm", "--scheme", scheme)
    assert found.exit_code == 2 and f"'{scheme}' is not one of" in found.stderr and "mean" not in found.stderr


def test_an_option_that_is_like_none_is_not_guessed_and_hidden_ones_never_are(tmp_path):
    for wrong in ("--precison", "--colour"):
        found = run("inspect", tmp_path, wrong, "fp8")
        assert found.exit_code == 2 and f"No such option '{wrong}'.\n" in found.stderr
    found = run("convert", tmp_path, tmp_path / "out", "--to", "hf", "--fp8-recip", "x")
    assert found.exit_code == 2 and "--fp8-recipe" not in found.stderr
    told = json.loads(run("convert", tmp_path, tmp_path / "out", "--precison", "bf16", "--json").stdout)["error"]
    assert told["what"] == "No such option '--precison'. Did you mean --precision?"


def write_run(folder, losses, first_step=1):
    folder.mkdir()
    lines = [json.dumps({"step": step, "loss": loss}) for step, loss in enumerate(losses, first_step)]
    (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    return folder


def test_compare_is_a_gate_on_the_mean_of_the_last_steps(tmp_path):
    first = write_run(tmp_path / "bf16", [2.0] * 150)
    near = write_run(tmp_path / "fp8", [4.0] * 50 + [2.01] * 100)
    assert run("compare", first, near, "--max-gap", "1%").exit_code == 0
    assert run("compare", first, near, "--max-gap", "0.4%").exit_code == 3
    assert run("compare", first, near, "--max-gap", "0.4%", "--last", "200").exit_code == 1  # 150 steps
    for unclear in ("much", "1", "0.006", "-1%", "nan%"):
        assert run("compare", first, near, "--max-gap", unclear).exit_code == 2


def test_compare_prints_json_for_scripts(tmp_path):
    first, other = write_run(tmp_path / "a", [2.0, 1.0]), write_run(tmp_path / "b", [2.0, 1.5])
    shown = json.loads(run("compare", first, other, "--json").stdout)
    assert shown["against"] == "a"
    assert shown["runs"][0]["now"] == 0.5


def test_compare_draws_a_picture_and_a_page_that_needs_nothing_else(tmp_path):
    first, other = write_run(tmp_path / "a", [2.0, 1.0]), write_run(tmp_path / "<b>", [2.0, 1.5])
    png, html = tmp_path / "curves.png", tmp_path / "curves.html"
    told = run("compare", first, other, "--png", png, "--html", html).stdout
    assert told.endswith(f"Wrote {png}.\nWrote {html}.\n")
    assert png.read_bytes().startswith(b"\x89PNG")
    page = html.read_text()
    assert "&lt;b&gt;" in page and "<b>" not in page
    assert "<svg" in page and "<script" not in page and "src=" not in page


def test_convert_there_and_back_and_verify_agree(tmp_path):
    source, megatron, back = tmp_path / "hf", tmp_path / "megatron", tmp_path / "back"
    pico.save(source)
    assert "Read back" not in run("convert", source, megatron, "--to", "megatron").stdout
    done = run("convert", megatron, back, "--to", "hf", "--max-shard-size", "50kB", "--verify")
    assert done.exit_code == 0 and "\nRead back and compared with the source: the same.\n" in done.stdout
    assert done.stderr.startswith("writing and reading back ")
    assert len(list(back.glob("*.safetensors"))) > 1
    assert run("verify", source, back).exit_code == 0
    pico.save(tmp_path / "other", seed=1)
    different = run("verify", source, tmp_path / "other", "--json")
    assert different.exit_code == 1
    assert json.loads(different.stdout)["equal"] is False


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_convert_ends_with_the_next_command_and_that_one_works(tmp_path):
    """Llama 3's rotary scaling is nothing that Megatron-LM's flags say, nor is that of gpt-oss, which Megatron-Core
    computes: `launch-args` would refuse both."""
    plain, scaled, computed = (tmp_path / name for name in ("plain model", "llama-3", "gpt-oss"))
    pico.save(plain, "llama-2", dtype=torch.bfloat16)
    pico.save(scaled, "llama-3", dtype=torch.bfloat16)
    pico.save(computed, "gpt-oss", dtype=torch.bfloat16)
    trained = tmp_path / "run"
    deepspeed_files.save(trained, deepspeed_files.states_of(load_file(plain / "model.safetensors")), 1, 2)
    begun = {
        "To continue in Megatron-LM: precisionctl launch-args ": [(plain, "megatron")],
        "To compare both: precisionctl verify ": [
            *((source, "megatron") for source in (scaled, computed)),
            *((plain, to) for to in ("dcp", "torchtitan")),
        ],
        "To see what it holds: precisionctl inspect ": [
            (trained, "deepspeed", "--reference", plain),
            (tmp_path / "launch-args 0", "dcp", "--reference", plain, "--trust-reference"),
            *((scaled, "megatron", *more) for more in (["--precision", "fp32"], ["--verify"])),
        ],
    }
    for start, conversions in begun.items():
        for number, (source, to, *options) in enumerate(conversions):
            out = tmp_path / f"{start.split()[-1]} {number}"
            made = run("convert", source, out, "--to", to, *options)
            first, *_, last = made.stdout.splitlines()
            assert first.startswith(f"Wrote {out}, ") and last.startswith(start), made.output
            assert run(*shlex.split(last.partition("precisionctl ")[2])).exit_code == 0, last
    again = run("convert", out, tmp_path / "back", "--to", "dcp", "--reference", scaled)
    assert shlex.split(again.stdout.splitlines()[-1])[-2:] == ["--reference", str(scaled)]
    assert run(*shlex.split(again.stdout.splitlines()[-1])[4:]).exit_code == 0


def test_a_file_that_says_not_which_rotary_scaling_it_has_is_told_to_be_read_with_its_source(tmp_path):
    for name, rope in {"meta": {}, "other": {"original_max_position_embeddings": 32}}.items():
        gguf_files.source(tmp_path / name, rope_parameters=gguf_files.LLAMA3 | rope)
        made = run("export-inference", tmp_path / name, tmp_path / f"{name} out", "--target", "llama.cpp")
        command = shlex.split(made.stdout.splitlines()[-1].partition("precisionctl ")[2])
        assert command[2:] == ([] if name == "meta" else ["--reference", str(tmp_path / name)])
        assert run(*command).exit_code == 0
    lora, base = tmp_path / "lora", tmp_path / "other"  # an adapter is no reference: its base is
    lora.mkdir()
    (lora / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))
    factors = {"A": torch.ones(4, 64), "B": torch.ones(64, 4)}
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    save_file(
        {f"{module}.lora_{one}.weight": each for one, each in factors.items()}, lora / "adapter_model.safetensors"
    )
    made = run("export-inference", lora, tmp_path / "of lora", "--target", "llama.cpp", "--reference", base)
    command = shlex.split(made.stdout.splitlines()[-1].partition("precisionctl ")[2])
    assert command[2:] == ["--reference", str(base)] and run(*command).exit_code == 0


def test_a_next_command_is_told_neither_with_quiet_nor_with_json(tmp_path):
    pico.save(tmp_path / "hf", "llama-2", dtype=torch.bfloat16)
    assert run("convert", tmp_path / "hf", tmp_path / "quiet", "--to", "megatron", "--quiet").output == ""
    told = run("convert", tmp_path / "hf", tmp_path / "json", "--to", "megatron", "--json").stdout
    assert json.loads(told) and "launch-args" not in told


def test_ctrl_c_while_converting_says_that_the_same_command_goes_on(tmp_path, monkeypatch):
    pico.save(tmp_path / "hf")

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(worker, "write_rows", interrupted)
        stopped = run("convert", tmp_path / "hf", tmp_path / "out", "--to", "megatron", "--workers", 1)
    assert stopped.exit_code == 75 and "the same command continues" in stopped.stderr
    assert not (tmp_path / "out").exists()
    assert run("convert", tmp_path / "hf", tmp_path / "out", "--to", "megatron").exit_code == 0


CONVERT = ["convert", "hf", "out", "--to", "hf"]


@pytest.mark.parametrize("arguments", [["inspect", "hf"], CONVERT, [*CONVERT, "--dry-run"]])
def test_ctrl_c_before_anything_is_written_says_so_and_exits_as_when_stopped(tmp_path, monkeypatch, arguments):
    pico.save(tmp_path / "hf")
    monkeypatch.chdir(tmp_path)

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("precisionctl.commands.hints.open_checkpoint", interrupted)
    monkeypatch.setattr(estimate, "estimate", interrupted)
    stopped = run(*arguments)
    assert (stopped.exit_code, stopped.stderr) == (75, f"{errors.NOT_BEGUN}\n")


@pytest.mark.parametrize("options", [["--json"], *in_soak([])])
@pytest.mark.parametrize(
    "module", ["click", "precisionctl.reports.inspect", *in_soak("rich.console", "precisionctl.cli.looking")]
)
def test_ctrl_c_while_modules_are_imported_is_no_traceback(tmp_path, module, options):
    """At each of these moments the program gets the signal itself, in an `exec`, as of a dataclass that makes its
    methods: CPython would end by the signal, though it is caught."""
    code = (
        "import os, signal, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path, target=None):\n"
        f"        if name == {module!r}:\n"
        "            sys.meta_path.remove(self)\n"
        "            exec('os.kill(os.getpid(), signal.SIGINT); [None for _ in range(9)]')\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from precisionctl.__main__ import main\n"
        "main()\n"
    )
    pico.save(tmp_path / "hf")
    (tmp_path / "program.py").write_text(code)
    line = [sys.executable, "-m", "program", "inspect", "hf", *options]
    stopped = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
    assert (stopped.returncode, stopped.stderr) == (75, f"{errors.NOT_BEGUN}\n")
    told = {"schema_version": 1, "stopped": "SIGINT", "kept": False} if options else None
    assert (json.loads(stopped.stdout) if stopped.stdout else None) == told


@pytest.mark.parametrize(("kind", "name"), [(KeyboardInterrupt, "SIGINT"), (signals.Terminated, "SIGTERM")])
def test_a_stopped_command_says_by_which_signal(tmp_path, monkeypatch, kind, name):
    pico.save(tmp_path / "hf")

    def interrupted(*_, **__):
        raise kind

    monkeypatch.setattr(worker, "write_rows", interrupted)
    stopped = run("convert", tmp_path / "hf", tmp_path / "out", "--to", "megatron", "--workers", 1, "--json")
    assert (stopped.exit_code, json.loads(stopped.stdout)["stopped"]) == (75, name)


def test_json_holds_nothing_that_json_does_not_know(tmp_path):
    pico.save(tmp_path / "hf")
    shown = run("verify", tmp_path / "hf", tmp_path / "hf", "--json").stdout
    tensors = json.loads(shown, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))["tensors"]
    assert {tensor["sqnr_db"] for tensor in tensors} == {"inf"}


def test_a_dry_run_shows_the_plan_and_writes_nothing(tmp_path):
    pico.save(tmp_path / "hf")
    shown = run("convert", tmp_path / "hf", tmp_path / "out", "--to", "megatron", "--dry-run")
    assert "decoder.layers.{layer}.self_attention.linear_qkv.weight" in shown.stdout
    plan = json.loads(
        run("convert", tmp_path / "hf", tmp_path / "out", "--to", "megatron", "--dry-run", "--json").stdout
    )
    assert plan["target"] == "megatron"
    assert plan["estimate"]["seconds"] > 0 and 0 < plan["estimate"]["memory"] < 512e6
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_dry_run_says_that_the_disk_has_no_room(tmp_path, monkeypatch):
    pico.save(tmp_path / "hf")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=10**9, free=1000))
    for command in (["convert", "--to", "megatron"], ["export-inference", "--target", "vllm"]):
        shown = run(*command, tmp_path / "hf", tmp_path / "new" / "out", "--dry-run")
        assert shown.exit_code == 1
        assert re.search(
            r"DiskProblem.*\d\d\d\.\d kB to write, and 1\.0 kB are free.*Make room for \d\d\d\.\d kB more",
            shown.stderr,
            re.DOTALL,
        )
        assert (
            "embed_tokens" in shown.stdout or "word_embeddings" in shown.stdout
        )  # the plan, which may be for elsewhere
        assert list(json.loads(run(*command, tmp_path / "hf", tmp_path / "out", "--dry-run", "--json").stdout)) == [
            "schema_version",
            "error",
        ]
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_dry_run_on_a_disk_too_full_to_be_measured_shows_the_plan_without_a_time(tmp_path, monkeypatch, code):
    pico.save(tmp_path / "hf")

    def full(_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", full)
    convert = ("convert", tmp_path / "hf", tmp_path / "out", "--to", "megatron", "--dry-run", "--json")
    plan = json.loads(run(*convert).stdout)
    assert plan["estimate"]["seconds"] is None and plan["estimate"]["memory"] > 0


def test_a_refusal_for_lack_of_room_leaves_nothing_and_takes_nothing_away(tmp_path, monkeypatch):
    pico.save(tmp_path / "hf")
    convert = ("convert", tmp_path / "hf", tmp_path / "new" / "out", "--to", "megatron")
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=10**9, free=1000))
        refused = run(*convert)
        assert refused.exit_code == 1 and "1.0 kB are free" in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(worker, "write_rows", interrupted)
        assert run(*convert, "--workers", 1).exit_code == 75
    left = contents(tmp_path / "new")
    assert len(left) > 2
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: SimpleNamespace(total=10**9, free=-(10**6))
    )  # less what is there counts
    for more in ((), ("--restart",)):
        assert "to write, and" in run(*convert, *more).stderr
        assert contents(tmp_path / "new") == left


def test_a_dry_run_says_that_the_disk_takes_no_file(tmp_path, monkeypatch):
    pico.save(tmp_path / "hf")

    def read_only(dir):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), f"{dir}/tmpabc")

    monkeypatch.setattr(tempfile, "TemporaryFile", read_only)
    shown = run("convert", tmp_path / "hf", tmp_path / "new" / "out", "--to", "megatron", "--dry-run")
    assert shown.exit_code == 1 and "tmpabc" not in shown.stderr
    words = f"nothing can be written there: Read-only file system ({tmp_path})"
    assert words in shown.stderr and "Choose a destination" in shown.stderr


def test_a_destination_that_exists_is_left_alone(tmp_path):
    pico.save(tmp_path / "hf")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    result = run("convert", tmp_path / "hf", tmp_path / "out", "--to", "megatron")
    assert result.exit_code == 1
    assert "DestinationExists" in result.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_an_export_keeps_the_rules_of_its_engine_and_convert_to_fp8_is_one(tmp_path):
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    exported = run("export-inference", tmp_path / "hf", tmp_path / "fp8", "--target", "vllm", "--scheme", "dynamic")
    assert exported.exit_code == 0
    assert run("verify", tmp_path / "fp8", "--target", "vllm").exit_code == 0
    assert run("verify", tmp_path / "hf", tmp_path / "fp8").exit_code == 0
    refused = run("convert", tmp_path / "hf", tmp_path / "static", "--to", "hf", "--precision", "fp8")
    assert refused.exit_code == 1
    assert "MissingFp8State" in refused.stderr


@pytest.mark.parametrize("name", ["mod\x1b[31mel\nerror: fake", "\x1b]0;t\x07\u202emodel"])
def test_the_name_of_a_path_writes_no_line_of_its_own(tmp_path, name):
    (tmp_path / name).touch()
    beside, wrong = run("inspect", tmp_path / f"{name}s"), tmp_path / f"{name}-not-there" / "x"
    assert "Did you mean" in beside.stderr
    file = run("convert", tmp_path, tmp_path / "out", "--to", "hf", "--fp8-state", tmp_path / f"{name}s")
    assert "Did you mean" in file.stderr
    for shown in (beside, file, run("inspect", wrong), run("compare", wrong, wrong)):
        assert shown.exit_code == 2
        assert not re.search("[\x1b\x07\u202e]|^error: fake", shown.stderr, re.MULTILINE)


def test_of_a_full_folder_some_names_are_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(errors, "_MOST_BESIDE", 3)
    for number in range(9):
        (tmp_path / f"iter_{number}").touch()
    seen = []
    monkeypatch.setattr(errors.difflib, "get_close_matches", lambda name, names, **limits: seen.extend(names) or [])
    assert errors.nearest_path(tmp_path / "iter") == "" and len(seen) == 3


@pytest.mark.parametrize("target", ["not-there", "link"])
def test_a_link_to_nothing_is_said_to_be_one(tmp_path, target):
    (tmp_path / "link").symlink_to(target)
    for command in (["inspect", tmp_path / "link"], ["compare", tmp_path / "link", tmp_path / "link"]):
        assert f"It is a link to {target}, which is not there." in run(*command).stderr


@pytest.mark.parametrize("arguments", [["verify", "."], ["verify", ".", ".", "--target", "vllm"]])
def test_verify_wants_a_second_checkpoint_or_an_engine(arguments):
    result = run(*arguments)
    assert result.exit_code == 2
    assert "either" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["verify", ".", "--target", "vllm", "--fp8"], "--fp8"),
        (["eval", ".", "--tasks", "x", "--sequence-length", "1024"], "--sequence-length"),
        (["eval", ".", "--tasks", ""], "--tasks has a name that is empty"),
        (["eval", ".", "--tasks", "x,"], "--tasks has a name that is empty"),
        (["inspect", ".", "--workers", "2"], "--workers"),
    ],
)
def test_an_option_that_would_change_nothing_is_wrong_usage(arguments, option):
    result = run(*arguments)
    assert result.exit_code == 2 and option in result.stderr


@pytest.mark.parametrize(("text", "size"), [("5GB", 5_000_000_000), ("50 kB", 50_000), ("1.5M", 1_500_000), ("7", 7)])
def test_sizes_are_read_as_people_write_them(text, size):
    assert Size().convert(text, None, None) == size


def test_options_that_contradict_one_another_are_wrong_usage(tmp_path):
    pico.save(tmp_path / "hf")
    for wrong in (
        ["--container", "torch"],
        ["--tp", "2"],
        ["--architecture", "llama", "--reference", str(tmp_path / "hf")],
    ):
        result = run("convert", tmp_path / "hf", tmp_path / "out", "--to", "hf", *wrong)
        assert result.exit_code == 2 and "error[RecipeError]:" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize(
    ("to", "option", "advice"),
    [
        ("torchtitan", "--container=dcp", "--to torchtitan is not written as dcp. Give --to dcp alone."),
        ("hf", "--container=dcp", "--to hf is not written as dcp. Give --to dcp alone."),
        ("megatron", "--container=deepspeed-universal", "Give --to deepspeed alone."),
        ("hf", "--container=torch", "--to hf is not written as torch. Known: safetensors, bin.\n"),
        ("hf", "--container=torchtitn", "--to hf is not written as torchtitn. Known: safetensors, bin.\n"),
        ("dcp", "--container=torch_dist", "--to dcp is not written as torch_dist. Leave --container out."),
        ("deepspeed", "--precision=fp8", "Leave --precision out."),
        ("torchtitan", "--precision=fp8", "Leave --precision out."),
        ("torchtitan", "--tp=2", "--to torchtitan is not split for ranks. Leave --tp and its like out."),
    ],
)
def test_what_contradicts_the_container_is_refused_in_the_options_that_were_given(tmp_path, to, option, advice):
    result = run("convert", tmp_path, tmp_path / "out", "--to", to, option)
    assert result.exit_code == 2 and advice in result.stderr


PRINTING = [["--help"], ["inspect", "{}", "--json"]]
PRINTING += in_soak(["--version"], ["inspect", "--help"], ["completion", "bash"], ["inspect", "{}"])


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has a disk that is always full")
@pytest.mark.parametrize("words", PRINTING, ids=" ".join)
def test_a_full_disk_behind_stdout_is_one_error_that_names_it(tmp_path, words):
    pico.save(tmp_path, dtype=torch.bfloat16)
    command = [sys.executable, "-m", "precisionctl", *(word.format(tmp_path) for word in words)]
    with open("/dev/full", "w") as full:
        ended = subprocess.run(command, check=False, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 1
    assert ended.stderr.startswith("error[SystemProblem]: No space left on device (standard output). ")
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize("words", PRINTING, ids=" ".join)
def test_a_reader_that_has_read_enough_ends_it_in_silence_as_sigpipe_would(tmp_path, words):
    pico.save(tmp_path, dtype=torch.bfloat16)
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "precisionctl", *(word.format(tmp_path) for word in words)]
    ended = subprocess.run(command, check=False, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize("closed", [">&- 2>&- <&-", *in_soak(">&-", "2>&-")])
def test_closed_streams_are_no_files_to_print_into(tmp_path, closed):
    """With one closed, its number would go to the next file that is opened: the journal, or a shard."""
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    command = f"{sys.executable} -m precisionctl convert {tmp_path / 'hf'} {tmp_path / 'out'} --to hf {closed}"
    assert subprocess.run(["sh", "-c", command], check=False).returncode == 0
    assert run("verify", tmp_path / "hf", tmp_path / "out").exit_code == 0
