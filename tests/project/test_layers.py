"""Who may import whom: the table of docs/architecture.md, held against the source itself."""

import ast
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import repository

PACKAGE = repository.ROOT / "precisionctl"

ANYONE = {"errors", "torch_when_used", "dtypes", "untrusted", "discover", "sizes", "paths"}
"""Leaves that every unit may import."""

DOCUMENT = PACKAGE.parent / "docs" / "architecture.md"


def names(cell: str) -> list[str]:
    """What stands in code font."""
    return re.findall(r"`([^`]+)`", cell)


def read_table() -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """By unit, what it may import; by package, the files and folders that may import it."""
    section = DOCUMENT.read_text(encoding="utf-8").partition("## Who may import whom")[2].partition("\n## ")[0]
    may_import: dict[str, set[str]] = {}
    only_here: dict[str, set[str]] = {}
    for row in re.findall(r"^\| (`.*) \|$", section, re.MULTILINE):
        units, _, allowed, only = re.split(r" ?\| ?", row)
        above = set(may_import) if allowed == "everything above" else set(names(allowed))
        may_import |= {unit: above | ANYONE for unit in names(units)}
        if only:
            package, *files = names(only)
            only_here[package] = set(files)
    return may_import, only_here


MAY_IMPORT, ONLY_HERE = read_table()
FILES = sorted(PACKAGE.rglob("*.py"))


def imports(file: Path, *, types: bool = True) -> list[str]:
    """Dotted names that a file imports, wherever in it, and `types` those for type checkers alone; `from a import b`
    gives `a.b`, which may be a module."""
    every, of_runs = imported(file)
    return every if types else of_runs


@cache
def imported(file: Path) -> tuple[list[str], list[str]]:
    """What a file imports, and what of that is not for type checkers alone."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    every = list(names_imported(tree, file))
    tree.body = [node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node))]
    return every, list(names_imported(tree, file))


def names_imported(tree: ast.Module, file: Path) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are written out"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def covers(allowed: str, name: str) -> bool:
    return name == allowed or name.startswith(allowed + ".")


def unit_of(file: Path) -> str:
    """The unit whose row a file is under: its own, or that of a folder around it; without one, the file."""
    module = ".".join(file.relative_to(PACKAGE).with_suffix("").parts)
    return next((unit for unit in MAY_IMPORT if covers(unit, module)), module)


def says_only_what_is_in_it(file: Path) -> bool:
    """The `__init__.py` of the package, or of a folder whose files have rows of their own."""
    return file.name == "__init__.py" and unit_of(file) not in MAY_IMPORT


def test_a_unit_imports_only_what_the_table_allows():
    strangers = []
    for file in FILES:
        if says_only_what_is_in_it(file):
            assert not imports(file)
            continue
        unit = unit_of(file)
        allowed = MAY_IMPORT[unit] | {unit, "__version__"}
        ours = [name.removeprefix("precisionctl.") for name in imports(file) if name.startswith("precisionctl.")]
        strangers += [f"{file} imports {name}" for name in ours if not any(covers(each, name) for each in allowed)]
    assert strangers == []


def test_some_packages_are_met_in_one_place_only():
    strangers = []
    for file in FILES:
        place = file.relative_to(PACKAGE).as_posix()
        tops = {name.partition(".")[0] for name in imports(file)}
        strangers += [
            f"{place} imports {top}" for top in tops if not place.startswith(tuple(ONLY_HERE.get(top, [place])))
        ]
    assert strangers == []


def test_the_table_names_no_unit_that_does_not_exist():
    assert {unit_of(file) for file in FILES if not says_only_what_is_in_it(file)} == set(MAY_IMPORT)


def test_the_document_names_no_file_that_does_not_exist():
    named = re.findall(r"`([\w/]+\.py)`", DOCUMENT.read_text(encoding="utf-8"))
    places = (PACKAGE, PACKAGE.parent, PACKAGE / "trainer")
    assert len(named) > 20 and not [name for name in named if not any((place / name).is_file() for place in places)]


def test_no_unit_may_import_from_a_row_below_its_own():
    above: set[str] = set()
    for unit, allowed in MAY_IMPORT.items():
        assert all(any(covers(each, name) for each in above | ANYONE) for name in allowed)
        above.add(unit)


def test_no_files_import_one_another_in_a_circle():
    """Not by imports inside of functions either."""
    modules = {".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts): file for file in FILES}
    graph = {
        name: {module for found in imports(file, types=False) for module in (found, found.rpartition(".")[0])}
        & (modules.keys() - {name})
        for name, file in modules.items()
    }
    assert len(list(TopologicalSorter(graph).static_order())) == len(FILES)


PACKAGES = sorted(file.parent.relative_to(PACKAGE).as_posix() for file in FILES if file.name == "__init__.py")


@pytest.mark.parametrize("package", [each for each in PACKAGES if each != "."])
def test_files_and_packages_of_a_package_do_not_import_one_another_in_a_circle(package: str):
    """Each package in it taken as one."""
    folder = PACKAGE / package
    name = f"precisionctl.{package.replace('/', '.')}"
    graph: dict[str, set[str]] = defaultdict(set)
    for file in sorted({*folder.rglob("*.py")} - {folder / "__init__.py"}):
        entry = file.relative_to(folder).parts[0].removesuffix(".py")
        inside = [each.removeprefix(f"{name}.") for each in imports(file, types=False) if each.startswith(f"{name}.")]
        graph[entry] |= {each.partition(".")[0] for each in inside} - {entry}
    assert len(list(TopologicalSorter(graph).static_order())) == len(graph)


def run_by_importing(node: ast.AST) -> Iterator[ast.AST]:
    """What of a file runs when it is imported: no functions' bodies, no annotations, and nothing for type checkers."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
            defaults = [*node.args.defaults, *filter(None, node.args.kw_defaults)]
            parts = [*getattr(node, "decorator_list", []), *defaults]
        case ast.AnnAssign():
            parts = [node.target, *filter(None, [node.value])]
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            parts = node.orelse
        case _:
            parts = list(ast.iter_child_nodes(node))
    yield node
    for part in parts:
        yield from run_by_importing(part)


def imports_torch(node: ast.AST) -> bool:
    match node:
        case ast.Import():
            return any(alias.name.partition(".")[0] == "torch" for alias in node.names)
        case ast.ImportFrom():
            return (node.module or "").partition(".")[0] == "torch"
        case ast.Name():
            return node.id == "torch"
    return False


def test_importing_a_file_that_takes_torch_when_it_is_used_does_not_use_it():
    when_used = [file for file in FILES if "precisionctl.torch_when_used.torch" in imports(file)]
    assert when_used
    for file in when_used:
        text = file.read_text(encoding="utf-8")
        assert "from __future__ import annotations" in text, f"annotations of {file} would use it"
        lines = [getattr(node, "lineno", 0) for node in run_by_importing(ast.parse(text)) if imports_torch(node)]
        assert not lines, f"lines {lines} of {file} use torch"


def test_every_other_package_that_is_imported_is_declared_in_pyproject():
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    needed = [
        *project["dependencies"],
        *(each for extra in extras if extra not in ("dev", "docs") for each in extras[extra]),
    ]
    declared = {re.split(r"[^\w-]", each)[0] for each in needed}
    with_others = {"transformer_engine_torch", "triton"}  # the latter with PyTorch for CUDA
    known = {"precisionctl", *with_others, *sys.stdlib_module_names, *declared}
    others = {"pyyaml": "yaml", "flash-linear-attention": "fla", "megatron-core": "megatron"}
    known |= {name for package, name in others.items() if package in declared}
    strangers = {(unit_of(file), name) for file in FILES for name in imports(file) if name.split(".")[0] not in known}
    assert not strangers


def test_no_test_file_is_imported():
    """Not by a program in a string either: what two of them need is in a module that is no test, or a fixture."""
    files = PACKAGE.with_name("tests").rglob("*.py")
    importing = re.compile(r"^\s*(?:from|import) (?:test_\w+|conftest)\b", re.MULTILINE)
    assert [str(file) for file in files if importing.search(file.read_text(encoding="utf-8"))] == []
