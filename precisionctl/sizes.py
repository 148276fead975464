"""Numbers of bytes in words."""


def size(count: float) -> str:
    """Bytes for people: `1.5 GB`, in powers of 1000 as disks are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
