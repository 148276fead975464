"""The program: `precisionctl`, as it is installed, and `python -m precisionctl`."""

import sys

from precisionctl.signals import ignore_until_the_end, stop_on_sigterm


def main() -> None:
    """Run the command line."""
    stop_on_sigterm()
    try:
        try:
            from precisionctl.cli import main as commands
        except KeyboardInterrupt as stop:  # which `commands` answers from here on
            from precisionctl.cli.group import say_stopped
            from precisionctl.errors import GO_ON, NOT_BEGUN

            say_stopped(NOT_BEGUN, kept=False, by=stop)
            sys.exit(GO_ON)
        commands(prog_name="precisionctl")
    finally:
        ignore_until_the_end()
        # An interrupt in the `exec` of a text, by which dataclasses make methods, stays in CPython's memory even if it
        # is caught: it then ends by the signal, whatever the exit code. The next such `exec` makes it forget
        # (Python/pythonrun.c, run_eval_code_obj).
        exec("")


if __name__ == "__main__":
    main()
