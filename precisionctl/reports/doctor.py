"""What `doctor` found, for people."""

from precisionctl.doctor import VARIABLES, Machine, Payloads
from precisionctl.reports.table import Table


def machine_tables(machine: Machine) -> list[Table]:
    """What is installed, which recipes run, and the environment variables that bear on them."""
    gpus = [f"{name}, compute capability {major}.{minor}" for name, (major, minor) in machine.devices.items()]
    rows = [
        ("Python", machine.python),
        *((name, found or "not installed") for name, found in machine.packages.items()),
        ("CUDA of PyTorch", machine.cuda or "none: a build for CPUs"),
        *(("GPU", gpu) for gpu in gpus or ["none"]),
        ("FP8 on Transformer Engine", _yes(machine.transformer_engine)),
    ]
    recipes = [(recipe.name, _yes(recipe.problem)) for recipe in machine.recipes]
    found = [Table("This machine", ("", ""), rows), Table("Recipes of FP8 and NVFP4", ("recipe", "runs"), recipes)]
    set_here = [(name, machine.variables.get(name, "-"), meaning) for name, meaning in VARIABLES.items()]
    return [*found, Table("Environment", ("variable", "set to", "what it does"), set_here)]


def payload_tables(payloads: Payloads) -> list[Table]:
    """The FP8 payloads of a checkpoint, and what to do about them."""
    if not payloads.forms:
        return [Table(payloads.path, ("",), [("It holds no FP8 payloads of Transformer Engine.",)])]
    rows = [(form, str(count)) for form, count in payloads.forms.items()]
    advice = [(line,) for line in payloads.advice] or [("Transformer Engine loads them as they are.",)]
    return [Table(f"FP8 payloads of {payloads.path}", ("form", "count"), rows), Table("What to do", ("",), advice)]


def _yes(problem: str | None) -> str:
    return "yes" if problem is None else f"no: {problem}"
