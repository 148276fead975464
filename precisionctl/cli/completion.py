"""completion: what makes a shell complete commands, options and paths."""

import click
from click.shell_completion import get_completion_class

from precisionctl.cli.group import Command
from precisionctl.cli.options import Choice
from precisionctl.errors import on_stdout


@click.command(
    cls=Command,
    short_help="Print a shell's completion of commands and options.",
    examples=["completion bash >> ~/.bashrc", "completion fish > ~/.config/fish/completions/precisionctl.fish"],
)
@click.argument("shell", type=Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the code that makes a shell complete commands, options and paths. Append it to the shell's start-up file.

    For this session alone: `eval "$(precisionctl completion bash)"`, or `precisionctl completion fish | source`.
    """
    kind = get_completion_class(shell)
    assert kind is not None, "click knows all three"
    with on_stdout():
        click.echo(kind(ctx.find_root().command, {}, "precisionctl", "_PRECISIONCTL_COMPLETE").source())
