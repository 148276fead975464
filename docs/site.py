"""For mkdocs: terms of the glossary explain themselves, the page of commands has what their `--help` prints, and two
files from outside docs/ are on the site."""

import re
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path
from typing import Any

import click
from mkdocs.structure.files import File

from precisionctl.cli import main

DOCS = Path(__file__).parent
OUTSIDE = {"../CHANGELOG.md": "changelog.md", "../benchmarks/results/convert.png": "convert.png"}
"""Links that leave docs/, as they work in the repository, and what they lead to on the site."""


def terms() -> dict[str, str]:
    """Each term and what it means, without markup. One that reads like an everyday word (box, code) is left out."""
    glossary = (DOCS / "glossary.md").read_text(encoding="utf-8")
    entries = re.findall(r"^- \*\*(.+?)\*\*(?: \(`\w+`\))?: (.+?)(?=\n- |\n\n|\Z)", glossary, re.MULTILINE | re.DOTALL)
    plain = {names: " ".join(re.sub(r"\(\[.*?\]\(.*?\)\)|[*`]", "", text).split()) for names, text in entries}
    return {
        name: text for names, text in plain.items() for name in names.split(", ") if re.search(r"[A-Z0-9_ ]|amax", name)
    }


COMMANDS = "<!-- commands -->"
"""Where a page has the help of every command."""


def commands() -> Iterator[str]:
    """Each command's help: what it does as text, the rest as a terminal shows it."""
    group = click.Context(main, info_name="precisionctl", terminal_width=100)
    for command in (main, *main.commands.values()):
        context = group if command is main else click.Context(command, group, command.name, terminal_width=100)
        shown = context.make_formatter()
        command.format_usage(context, shown)
        command.format_options(context, shown)
        command.format_epilog(context, shown)
        yield f"## {context.command_path}\n\n{cleandoc(command.help or '')}\n\n```text\n{shown.getvalue()}```\n"


def on_files(files: Any, config: Any) -> Any:
    for source, name in OUTSIDE.items():
        files.append(File.generated(config, name, abs_src_path=str(DOCS / source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    for source, name in OUTSIDE.items():
        markdown = markdown.replace(f"]({source})", f"]({name})")
    if COMMANDS in markdown:
        markdown = markdown.replace(COMMANDS, "\n".join(commands()))
    if page.file.src_uri == "glossary.md":
        return markdown
    return markdown + "\n\n" + "\n".join(f"*[{name}]: {text}" for name, text in terms().items())
