"""One meaning for each name in the package: a class, a type alias or a file that is called as another one misleads."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import repository

PACKAGE = repository.ROOT / "precisionctl"
DOCS = PACKAGE.parent / "docs"

SAME_MEANING = {
    "GroupedLinear": "the same module in both backends",
    "LayerNormLinear": "the same module in both backends",
    "Linear": "the same module in both backends",
    "T": "a type variable",
    "base.py": "what all files of a folder of plug-ins share",
    "buckets.py": "the optimizer's buckets, in either of Megatron's containers",
    "reader.py": "the Reader of a container that is a folder",
    "writer.py": "the Writer of a container that is a folder",
    "doctor.py": "reports/ shows what doctor found",
    "plan.py": "reports/ shows a plan",
    "run.py": "reports/ shows a run",
}
"""Names that are in two files on purpose, and why."""


def defined(file: Path) -> set[str]:
    """The classes of a file, wherever in it, and the type aliases and type variables at its top."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    assigned = [name for node in tree.body if isinstance(node, ast.Assign) for name in node.targets]
    aliases = {name.id for name in assigned if isinstance(name, ast.Name) and re.match(r"_?[A-Z]([a-z]|$)", name.id)}
    return aliases | {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def test_a_class_an_alias_and_a_file_have_a_name_that_no_other_has():
    places: dict[str, list[Path]] = defaultdict(list)
    for file in sorted(PACKAGE.rglob("*.py")):
        for name in {*defined(file), file.name} - {"__init__.py"}:
            places[name].append(file.relative_to(PACKAGE))
    twice = {name: files for name, files in places.items() if len(files) > 1}
    assert {name: files for name, files in twice.items() if name not in SAME_MEANING} == {}
    assert SAME_MEANING.keys() - twice.keys() == set(), "no longer twice: take it off the list"


def test_a_folder_that_lists_its_files_lists_all_of_them():
    listed = 0
    for file in sorted(PACKAGE.rglob("__init__.py")):
        said = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        if re.search(r"^\w+\.py\b", said, re.MULTILINE):
            listed += 1
            there = {each.name for each in file.parent.glob("*.py")} - {"__init__.py"}
            assert set(re.findall(r"\b\w+\.py\b", said)) == there, file
    assert listed > 2


def test_the_glossary_has_the_terms_of_the_architecture_and_is_in_alphabetical_order():
    words = (DOCS / "architecture.md").read_text(encoding="utf-8").partition("## Words")[2].partition("\n## ")[0]
    used = {term.lower() for term in re.findall(r"\*\*(.+?)\*\*", words)} - {"state"}  # there it is FP8 state
    entries = re.findall(r"^- \*\*(.+?)\*\*:", (DOCS / "glossary.md").read_text(encoding="utf-8").lower(), re.MULTILINE)
    terms = {term for entry in entries for term in entry.split(", ")}
    assert len(used) > 2 and (used | {"scale", "scale_inv", "role", "fp8 state"}) - terms == set()
    assert entries == sorted(entries)
