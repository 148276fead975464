"""What the documents show must exist: commands, their options, links; and every command must be shown."""

import dataclasses
import re
import shlex
import tomllib

import pytest
from repository import ROOT

from precisionctl.architectures.families import supported
from precisionctl.architectures.wrappers import WRAPPERS
from precisionctl.cli import main
from precisionctl.commands.request import MLX, TE
from precisionctl.engines.base import engines
from precisionctl.recipe import Recipe, bundled_recipes

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
names = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


def shown_commands(document):
    """Command lines in code blocks, continued lines joined, what follows a command's options dropped."""
    for block in re.findall(r"```\w*\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            found = re.match(r"(?:\$ )?(?:\S+=\S+ )*precisionctl (.*)", line)
            if found:
                yield shlex.split(found[1], comments=True)


def check(words):
    command, *rest = [word for word in words if word != "--debug"]
    if command.startswith("-"):
        return
    known = {option for parameter in main.commands[command].params for option in parameter.opts}
    used = {word.partition("=")[0] for word in rest if word.startswith("--")} - {"--help"}
    assert used <= known, f"`{' '.join(words)}` uses {used - known}"


def leaves(kind, prefix=""):
    """Every key of a recipe, and its value where a file does not name it."""
    for field in dataclasses.fields(kind):
        value = getattr(kind, field.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, value


def test_every_key_of_a_recipe_is_documented_with_its_default():
    text = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w.]+)` \| `(.*?)` \|", text, re.MULTILINE)
    shown = {key: tomllib.loads(f"value = {value}")["value"] for key, value in rows if "." in key}
    fixed = {f"precision.delayed.{name}" for name in ("reduce_amax", "fp8_dpa", "fp8_mha")}  # not for a run to change
    known = {key: value for key, value in leaves(Recipe()) if key not in fixed}
    assert shown == {key: list(value) if isinstance(value, tuple) else value for key, value in known.items()}


@names
def test_commands_shown_in_a_document_exist_with_those_options(document):
    for words in shown_commands(document):
        check(words)


def test_every_command_is_shown_in_the_documents():
    shown = {words[0] for document in DOCUMENTS for words in shown_commands(document)}
    assert set(main.commands) <= shown


def anchors(document):
    """What a link may name after `#`: headings, in lower case, without punctuation, with `-` for blanks."""
    headings = re.findall(r"^#+ (.*)", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@names
def test_links_lead_to_files_and_headings(document):
    text = document.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    for name, _, anchor in (link.partition("#") for link in links):
        target = document.parent / name if name else document
        assert target.exists(), name
        assert not anchor or anchor in anchors(target), f"{name}#{anchor}"


def test_the_readme_names_all_that_is_supported_and_nothing_else():
    """Names in code font, in the rows of the table that list what the program finds by itself."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.*?) \| (.*) \|$", text, re.MULTILINE)
    named = {first: set(re.findall(r"`([\w-]+)`", second)) for first, second in rows}
    (families,), (wrappers,) = (
        re.findall(rf"^\| {each} \| .*?(\d+) ", text, re.MULTILINE) for each in ("families", "multimodal models")
    )
    assert [int(families), int(wrappers)] == [len(supported()), len(WRAPPERS)]
    of_models = {
        f"{name}{kind}"
        for name in named["bundled recipes for a model, as `-cpt` and `-sft`"]
        for kind in ("-cpt", "-sft")
    }
    assert named["bundled recipes"] | of_models == set(bundled_recipes())
    schemes = {scheme for engine in engines().values() for scheme in engine.spells}
    assert named["`--target` of an export"] == set(engines()) | schemes | {TE, MLX}


def test_the_readme_of_the_package_has_no_link_that_leads_nowhere_on_an_index() -> None:
    made = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["metadata"]["hooks"]
    (fragment,) = made["fancy-pypi-readme"]["fragments"]
    text, rest, _ = (ROOT / fragment["path"]).read_text(encoding="utf-8").partition(fragment["end-before"])
    for each in made["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(each["pattern"], each["replacement"], text)
    assert rest and set(re.findall(r"\]\((.{8})", text)) == {"https://"}
    assert "`convert`" in text and "serve a BF16 model with vLLM" in text  # words of links stay


@pytest.mark.parametrize("document", [*DOCUMENTS, ROOT / "CHANGELOG.md"], ids=lambda path: path.name)
def test_no_document_has_markers_of_a_merge_in_it(document):
    assert not re.search("^(<<<<<<<|>>>>>>>) ", document.read_text(encoding="utf-8"), re.MULTILINE)
