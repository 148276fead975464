"""The commands: each parses its options, calls one function and prints what comes back.

Nothing heavy is imported until a command runs, so that `precisionctl --help` answers at once.
"""

import click

from precisionctl import __version__
from precisionctl.cli.completion import completion
from precisionctl.cli.group import Commands
from precisionctl.cli.looking import compare, doctor, evaluate, inspect, launch_args, verify
from precisionctl.cli.training import calibrate, demo, resume, tokenize
from precisionctl.cli.writing import convert, export_inference


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__)
def main() -> None:
    """Carry Megatron and Hugging Face checkpoints, with their FP8 state, between BF16 and FP8.

    Exit codes: 0 done, 1 failed or differs, 2 wrong usage, 3 a gap is too large
    (compare), 75 stopped: the same command continues.
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
