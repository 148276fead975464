"""`python -m precisionctl` is `precisionctl`."""

from precisionctl.cli import main

main(prog_name="precisionctl")
