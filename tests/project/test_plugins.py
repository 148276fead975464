"""Plug-ins by entry points: the page's example as an installed package, and packages that are broken."""

import importlib
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pico
import pytest
import repository
import torch
from command_line import run

from precisionctl import discover
from precisionctl.architectures import families

PAGE = (repository.DOCS / "plugins.md").read_text(encoding="utf-8")
EXAMPLE = tomllib.loads(re.findall(r"```toml\n(.+?)```", PAGE, re.DOTALL)[0])["project"]
Install = Callable[[dict[str, dict[str, str]], str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts a package with such entry points and such a module where Python finds it, as pip does."""
    site = tmp_path / "site"

    def made(entry_points: dict[str, dict[str, str]], code: str) -> None:
        information = site / "house_models-1.0.dist-info"
        information.mkdir(parents=True)
        (information / "METADATA").write_text("Metadata-Version: 2.1\nName: house-models\nVersion: 1.0\n")
        lines = [f"[{group}]\n{name} = {value}\n" for group, own in entry_points.items() for name, value in own.items()]
        (information / "entry_points.txt").write_text("".join(lines))
        (site / "house_models.py").write_text(code)
        monkeypatch.syspath_prepend(site)
        forget()

    def forget() -> None:
        sys.modules.pop("house_models", None)
        for kept in (discover._installed, discover._plugged_in, families.supported):
            kept.cache_clear()

    yield made
    monkeypatch.undo()
    forget()


def test_a_key_in_two_tables_of_a_folder_is_an_error_and_no_silent_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "house_tables").mkdir()
    for name, table in (("__init__", ""), ("one", "TABLE = {1: 2, 3: 4}"), ("other", "TABLE = {5: 6}"), ("none", "")):
        (tmp_path / "house_tables" / f"{name}.py").write_text(table)
    monkeypatch.syspath_prepend(tmp_path)
    package = importlib.import_module("house_tables")
    assert discover.joined_tables(package, "TABLE") == {1: 2, 3: 4, 5: 6}
    discover._own.cache_clear()
    monkeypatch.setattr(importlib.import_module("house_tables.other"), "TABLE", {3: 4})
    with pytest.raises(ValueError, match="3 in two tables TABLE of house_tables"):
        discover.joined_tables(package, "TABLE")


def test_the_page_s_package_is_found_by_every_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, install: Install
) -> None:
    install(EXAMPLE["entry-points"], re.findall(r"```python\n(.+?)```", PAGE, re.DOTALL)[0])
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "registry" / "llama" / "model"
    model.mkdir(parents=True)
    pico.save(model, "llama-2", dtype=torch.bfloat16)
    (model.parent / "house.json").touch()
    config = json.loads((model / "config.json").read_text())
    names = {"model_type": "house_llama", "architectures": ["HouseLlamaForCausalLM"]}
    (model / "config.json").write_text(json.dumps(config | names))

    for line in re.findall(r"^precisionctl .+", PAGE, re.MULTILINE):
        done = run(*line.partition("#")[0].split()[1:])
        assert done.exit_code == 0, done.stderr
    assert "every rule is kept" in done.stdout
    assert run("verify", "registry/llama", "llama").exit_code == 0
    assert json.loads(run("inspect", "llama", "--json").stdout)["architecture"] == "house_llama"

    served = tmp_path / "served" / "config.json"
    config = json.loads(served.read_text())
    config["quantization_config"]["quant_method"] = "house-tensors"
    served.write_text(json.dumps(config))
    assert json.loads(run("inspect", "served", "--json").stdout)["coded"]["quant_method"] == "house-tensors"
    assert run("export-inference", "served", "again", "--target", "house", "--scheme", "dynamic").exit_code == 0


@pytest.mark.parametrize(
    ("code", "what"),
    [
        ("raise ImportError('no libhouse')", "does not load: ImportError: no libhouse"),
        ("ENGINE = 'vllm'", "is a str, no Engine"),
        ("from precisionctl.engines.vllm import ENGINE", "brings `vllm`, which is there already"),
    ],
)
def test_a_broken_plug_in_is_one_error_that_names_it_and_never_in_the_way_of_help(
    tmp_path: Path, install: Install, code: str, what: str
) -> None:
    install({"precisionctl.engines": {"house": "house_models:ENGINE"}}, code)
    (tmp_path / "hf").mkdir()
    pico.save(tmp_path / "hf", "qwen3", dtype=torch.bfloat16)
    failed = run("export-inference", tmp_path / "hf", tmp_path / "out", "--target", "vllm", "--scheme", "dynamic")
    words = (
        f"error[EnvironmentProblem]: the plug-in `house` of house-models 1.0 {what} (precisionctl.engines: house_models"
    )
    assert failed.exit_code == 1 and words in failed.stderr
    assert run("export-inference", "--help").exit_code == run("inspect", tmp_path / "hf").exit_code == 0
