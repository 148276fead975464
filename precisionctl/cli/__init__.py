"""The commands: each parses its options, calls one function and prints what comes back.

Nothing heavy is imported until a command runs, so that `precisionctl --help` answers at once.
"""

import click

from precisionctl import __version__
from precisionctl.cli.completion import completion
from precisionctl.cli.group import Commands
from precisionctl.cli.looking import compare, doctor, evaluate, inspect, launch_args
from precisionctl.cli.training import calibrate, demo, resume, tokenize
from precisionctl.cli.verifying import verify
from precisionctl.cli.writing import convert, export_inference


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__)
def main() -> None:
    """Convert LLM checkpoints between training and inference formats, and between BF16, FP8 and four bits.

    Exit codes: 0 success, 1 error or difference, 2 wrong usage, 3 gap too large (compare),
    75 stopped; the same command continues, or starts if nothing was begun, 141 output not read (`| head`).
    """


COMMANDS = (
    inspect,
    convert,
    tokenize,
    calibrate,
    resume,
    export_inference,
    verify,
    compare,
    evaluate,
    launch_args,
    doctor,
    demo,
    completion,
)
"""In the order in which a user first needs them, which is also that of `--help`."""

for command in COMMANDS:
    main.add_command(command)
