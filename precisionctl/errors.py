"""Everything that precisionctl refuses, as one tree.

    PrecisionctlError
      CheckpointError         a checkpoint cannot be read
        UnknownFormat           nothing here is a checkpoint we know
        DamagedCheckpoint       truncated, inconsistent or missing parts
        UnsafePickle            a pickle asks for something outside the allow-list
        NotUnderstood           sound, but nothing here can interpret it; its bytes can be kept
      MappingError            names do not fit
        UnknownArchitecture     no table for this model
        UnmappedTensor          a tensor that no row names
        MissingTensor           a row whose tensor is not there
        ShapeMismatch           a tensor whose shape contradicts the model
      PrecisionError          the numbers asked for cannot be made
        MissingFp8State         a scale is needed that was never recorded
          Unrecordable            and that no command records
      OutputError             the result cannot be written
        DestinationExists       something is already at the destination
        DiskProblem             no space, or the disk failed; the partial output stays
      RecipeError             a recipe or setting that makes no sense
      DataError               training or evaluation data that cannot be used
      EnvironmentProblem      this machine lacks what was asked for (GPU, package, memory)
      SystemProblem           the operating system refused to read or write something
      UnexpectedError         a bug: what no part of the program has foreseen

Each error says *what* is wrong, *where*, and what to *do* about it.
"""

import difflib
import os
import reprlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

DROP_OPTIMIZER = "--drop-optimizer leaves the optimizer behind."
"""What to do about an optimizer that cannot be told, or has no place in the result."""

GO_ON = 75
"""Exit code of a command that was stopped, so that the same command continues, or starts if nothing was begun
(EX_TEMPFAIL of sysexits.h)."""

UNREAD = 128 + 13
"""Exit code of a command whose output nobody reads any longer, as shells have it of a program that SIGPIPE ends."""

NOT_BEGUN = (
    "Stopped before this command wrote anything. The same command starts it, or continues what an earlier one did."
)
"""What a command says that a signal stops when it has nothing to keep: while it imports modules, reads or plans."""

BROKEN_WEIGHTS = "The checkpoint is broken there, in BF16 too: copy it again, or take an earlier one."
"""What to do about weights that are NaN or infinite."""

_LONGEST = 2000
"""Letters of what an error, a note or a cell of a table says: names in a file can be megabytes."""

_MOST_BESIDE = 1000
"""The most names in a folder that a wrong one is compared with; most comparisons take 0.1 ms."""


def printable(text: str) -> str:
    """What a stranger's file says, fit for a terminal: no letter of it moves the cursor, changes colours or turns the
    direction of reading round, and none cannot be encoded."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() or letter == "\n" else letter.encode("unicode_escape").decode()
        for letter in text
    )


def one_line(text: str) -> str:
    """`printable`, on one line: text of a stranger, such as a path, cannot pass for a line of ours."""
    return printable(text).replace("\n", "\\n")


def brief(text: str) -> str:
    """`printable`, for what a stranger may have made as long as they liked."""
    return printable(text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ...")


class PrecisionctlError(Exception):
    """What went wrong, where, and what to do about it."""

    def __init__(self, what: str, *, where: object = "", do: str = "") -> None:
        super().__init__(brief(what))
        self.what = brief(what)
        self.where = one_line(brief(str(where)))
        self.do = brief(do)

    def __str__(self) -> str:
        where = f" ({self.where})" if self.where else ""
        do = f" {self.do}" if self.do else ""
        return f"{self.what}{where}.{do}"


class CheckpointError(PrecisionctlError):
    """A checkpoint cannot be read."""


class UnknownFormat(CheckpointError):
    """Nothing at the path is a checkpoint we know."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint is truncated, inconsistent or incomplete."""


class UnsafePickle(CheckpointError):
    """A pickle asks for something outside the allow-list."""


class NotUnderstood(CheckpointError):
    """A part is sound, but nothing here can interpret it; its bytes can be kept as they are."""


class MappingError(PrecisionctlError):
    """Names or shapes do not fit the model."""


class UnknownArchitecture(MappingError):
    """There is no table for this model."""


class UnmappedTensor(MappingError):
    """A tensor that no row names; dropping it in silence is not an option."""


class MissingTensor(MappingError):
    """A row's tensor is not in the checkpoint."""


class ShapeMismatch(MappingError):
    """A tensor's shape contradicts the model's."""


class PrecisionError(PrecisionctlError):
    """The precision asked for cannot be made from this checkpoint."""


class MissingFp8State(PrecisionError):
    """A scale is needed that was never recorded."""


class Unrecordable(MissingFp8State):
    """A scale is needed that no command can record, because nothing here computes the model or the layer."""


class OutputError(PrecisionctlError):
    """The result cannot be written."""


class DestinationExists(OutputError):
    """Something is already at the destination."""


class DiskProblem(OutputError):
    """The disk is full or failed; partial output and journal stay for another try."""


class RecipeError(PrecisionctlError):
    """A recipe or setting that makes no sense."""


class DataError(PrecisionctlError):
    """Training or evaluation data that cannot be used."""


class EnvironmentProblem(PrecisionctlError):
    """This machine lacks what was asked for."""


class SystemProblem(PrecisionctlError):
    """The operating system refused to read or write something. The command line makes one of an OSError, and
    `on_stdout`."""


class UnexpectedError(PrecisionctlError):
    """A bug: an exception that no part of the program has foreseen. Only the command line makes one."""


class _Short(reprlib.Repr):
    """Looks into plain containers alone: any other object's own repr may be as long as it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring = 2, 60

    def repr_int(self, x: int, level: int) -> str:
        """Python spells out no more than 4300 digits."""
        return super().repr_int(x, level) if x.bit_length() < 1 << 12 else f"a number of {x.bit_length()} bits"

    def repr_instance(self, x: object, level: int) -> str:
        plain = isinstance(x, int | float | None)
        return super().repr_instance(x, level) if plain else f"a {type(x).__name__}"


shown = _Short().repr
"""`repr` for what a stranger's file holds: short, whatever shares its parts with itself 2**60 times."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Advice for an unknown name: the known one that was perhaps meant, else all of them."""
    known = list(known)
    return meant(name, known) or f"Known: {', '.join(known)}."


NEAR = 0.8
"""`fp16` and `bf16`, or `fp8` and `mxfp8`, are 0.75 alike, and other things; `vlm` and `vllm` are 0.86."""


def meant(name: str, known: Iterable[str], alike: float = NEAR) -> str:
    """Advice for an unknown name: the known one that is most like it, if it is at least `alike` (`most_alike`); else
    empty."""
    by_small = {each.lower(): each for each in known}
    near = most_alike(name.lower(), by_small, alike)
    return f"Did you mean {by_small[near]}?" if near else ""


def most_alike(name: str, known: Iterable[str], alike: float = 0.6) -> str | None:
    """The known name that is most like this one, at least so much `alike` (0 to 1, as difflib counts: twice the letters
    in common, divided by the letters of both); None if there is none.

    Only names of a length that allows it are compared, as difflib takes seconds for a name of megabytes.
    """

    def may_be(other: str) -> bool:
        letters = len(name) + len(other)
        return not letters or 2.0 * min(len(name), len(other)) / letters >= alike  # in difflib's own arithmetic

    possible = [each for each in known if may_be(each)]
    near = difflib.get_close_matches(name, possible, n=1, cutoff=alike) if possible else []
    return near[0] if near else None


def nearest_path(path: Path) -> str:
    """Advice for a path that is not there: the one beside it that was perhaps meant; empty if there is none."""
    if os.path.islink(path):
        return one_line(f"It is a link to {os.readlink(path)}, which is not there.")
    try:
        with os.scandir(path.parent) as found:
            beside = [each.name for each in islice(found, _MOST_BESIDE)]
    except OSError:  # the folder is not there, is a file, or is not ours to list
        return ""
    near = most_alike(path.name, beside)
    return one_line(f"Did you mean {path.parent / near}?") if near else ""


def require_package(name: str, extra: str, what: str) -> None:
    """Raise EnvironmentProblem if an optional package is not installed, which the `extra` of ours brings."""
    if find_spec(name) is None:
        raise EnvironmentProblem(
            f"{what} needs {name}, which is not installed", do=f"pip install 'precisionctl[{extra}]'"
        )


@contextmanager
def on_stdout() -> Iterator[None]:
    """A context that prints on stdout. Raises SystemProblem if that fails, as on a full disk, and BrokenPipeError if
    nobody reads it any longer."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        if error.filename:
            raise
        do = "Is there room, and may you write, where it goes?"
        raise SystemProblem(error.strerror or str(error), where="standard output", do=do) from error


@contextmanager
def at(where: object) -> Iterator[None]:
    """A context that adds the place to errors raised without one."""
    try:
        yield
    except PrecisionctlError as error:
        error.where = error.where or one_line(brief(str(where)))
        raise


@contextmanager
def damage(what: str, where: object, do: str = "Is the copy whole?") -> Iterator[None]:
    """A context in which every exception means damage: a value in a stranger's file can have any type."""
    try:
        yield
    except PrecisionctlError:
        raise
    except Exception as error:
        raise DamagedCheckpoint(f"{what}: {type(error).__name__}: {error}", where=where, do=do) from error
