"""Who may import whom: the table of docs/architecture.md, held against the source itself."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "precisionctl"

ANYONE = {"errors", "safe_pickle", "discover"}
"""Leaves that every unit may import."""

LOWER = {"precision", "model_shape", "fp8", "param", "architectures", "quant_methods", "engines", "recipe"}
MIDDLE = LOWER | {"checkpoints", "cast", "lower", "plan", "journal", "convert", "export", "verify"}
EVERYTHING = MIDDLE | {"commands", "trainer", "evaluate", "reports", "demo", "console"}

MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "safe_pickle": set(),
    "discover": set(),
    "fp8": set(),
    "model_shape": set(),
    "precision": {"fp8.state"},
    "param": {"fp8"},
    "architectures": {"model_shape", "param"},
    "quant_methods": {"param", "fp8"},
    "engines": {"model_shape", "param", "quant_methods"},
    "checkpoints": {"param", "model_shape", "fp8", "quant_methods"},
    "recipe": {"precision"},
    "cast": {"param", "precision", "fp8"},
    "lower": {"param", "model_shape", "architectures"},
    "plan": {"param", "model_shape", "precision", "architectures", "quant_methods", "engines", "cast", "lower"},
    "journal": {"plan", "checkpoints.base"},
    "convert": {"plan", "lower", "journal", "cast", "checkpoints.base", "engines", "fp8"},
    "verify": {"plan", "lower", "journal", "cast", "checkpoints.base", "engines", "fp8"},
    "export": LOWER | {"cast", "lower", "plan"},
    "commands": MIDDLE,
    "trainer": MIDDLE,
    "evaluate": MIDDLE | {"trainer"},
    "reports": MIDDLE | {"commands", "trainer", "evaluate"},
    "demo": EVERYTHING - {"console", "demo"},
    "console": MIDDLE | {"trainer", "reports"},
    "options": set(),
    "cli": EVERYTHING | {"options"},
    "__main__": {"cli"},
}
"""A name means that module or anything in that package; units also import themselves."""

ONLY_HERE = {
    "transformer_engine": {"trainer/modules_te.py"},
    "rich": {"console.py"},
    "click": {"cli.py", "options.py"},
    "pickle": {"safe_pickle.py", "fp8/opcodes.py"},
    "matplotlib": {"reports/plot.py"},
}

FILES = sorted(PACKAGE.rglob("*.py"))


def imports(file: Path) -> Iterator[str]:
    """Dotted names that a file imports, wherever in it; `from a import b` gives `a.b`, which may be a module."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are written out"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def unit_of(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def covers(allowed: str, name: str) -> bool:
    return name == allowed or name.startswith(allowed + ".")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_a_unit_imports_only_what_the_table_allows(file):
    unit = unit_of(file)
    if unit == "__init__":
        assert not list(imports(file))
        return
    allowed = MAY_IMPORT[unit] | ANYONE | {unit, "__version__"}
    ours = [name.removeprefix("precisionctl.") for name in imports(file) if name.startswith("precisionctl.")]
    strangers = [name for name in ours if not any(covers(each, name) for each in allowed)]
    assert not strangers, f"{unit} may not import {strangers}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_some_packages_are_met_in_one_place_only(file):
    place = file.relative_to(PACKAGE).as_posix()
    for name in imports(file):
        top = name.partition(".")[0]
        assert place in ONLY_HERE.get(top, {place}), f"{place} may not import {top}"


def test_the_table_names_no_unit_that_does_not_exist():
    assert {unit_of(file) for file in FILES} - {"__init__"} == set(MAY_IMPORT)


def test_the_table_has_no_cycle():
    """Each unit can be placed after all it may import."""
    placed: set[str] = set()
    waiting = {unit: {name.partition(".")[0] for name in names} - {unit} for unit, names in MAY_IMPORT.items()}
    while ready := {unit for unit, names in waiting.items() if names <= placed}:
        placed |= ready
        waiting = {unit: names for unit, names in waiting.items() if unit not in ready}
    assert not waiting


def test_every_other_package_that_is_imported_is_declared_in_pyproject():
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    declared = {re.split(r"[^\w-]", each)[0] for each in project["dependencies"] + extras["te"] + extras["tracking"]}
    known = {"precisionctl", "transformer_engine_torch", *sys.stdlib_module_names, *declared}
    strangers = {(unit_of(file), name) for file in FILES for name in imports(file) if name.split(".")[0] not in known}
    assert not strangers
