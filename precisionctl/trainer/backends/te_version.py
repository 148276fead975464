"""Versions of Transformer Engine, as numbers that compare. Without PyTorch, as `launch-args` asks for one."""

TE_FLOOR = (2, 9)
"""The oldest Transformer Engine with the functions used here (`autocast`, `quantized_model_init`, `is_fp8_available`).
pyproject.toml requires it, too."""


def version_parts(version: str) -> tuple[int, ...]:
    """The numeric parts of a version: `2.20.2+cu13` as (2, 20)."""
    return tuple(int(part) for part in version.split(".") if part.isdecimal())
