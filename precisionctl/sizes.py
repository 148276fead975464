"""Numbers in words: of bytes, and of things; and lists of them."""

from collections.abc import Iterable


def size(count: float) -> str:
    """Bytes for people: `1.5 GB`, in powers of 1000 as disks are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def counted(count: int, one: str, several: str = "") -> str:
    """A number of things for people: `1 tensor`, `1,200 tensors`. `several` is the plural, if it is not `one` with an
    s."""
    return f"{count:,} {one if count == 1 else several or f'{one}s'}"


def listed(names: Iterable[str], most: int = 8) -> str:
    """Names for people, 100 letters of each: `a, b and 3 more`."""
    every = [name[:100] for name in names]
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")
