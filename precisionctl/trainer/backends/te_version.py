"""Versions of Transformer Engine, as numbers that compare. Without PyTorch, as `launch-args` asks for one."""

import re

TE_FLOOR = (2, 9)
"""The oldest Transformer Engine with the functions used here (`autocast`, `quantized_model_init`, `is_fp8_available`).
pyproject.toml requires it, too."""


def version_parts(version: str) -> tuple[int, ...]:
    """The numbers of a version's release: `2.20.2+cu13` as (2, 20, 2), `0.17rc1` as (0, 17); of none ()."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, release[0].split("."))) if release else ()
