"""Commands, run in this process."""

from click.testing import CliRunner

from precisionctl.cli import main


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def say(*words: object) -> str:
    result = CliRunner().invoke(main, [str(word) for word in words], terminal_width=200)
    assert result.exit_code == 0, result.output
    return " ".join(result.stdout.split())
