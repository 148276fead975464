"""Where NeMo Automodel has the moments of experts that Hugging Face's names stand for.

It saves weights as they are published, `mlp.experts.3.gate_proj.weight` for instance, and moments under the names that
parameters have in memory: of the experts of a layer `mlp.experts.gate_and_up_projs` `[experts, in, gate and up]` and
`mlp.experts.down_projs` `[experts, in, out]` (nemo-automodel 0.7.0, components/moe/state_dict_mixin.py). A few families
have experts under other published names, or gate and up in another order; these moments keep their names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from precisionctl.checkpoints.chunks import Box, Chunked, TransposedRows
from precisionctl.checkpoints.other_trainers.trainer_directory import both_are
from precisionctl.param import TensorSpec

_OF_EXPERT = re.compile(r"(.+\.experts)\.(gate_and_up|down)_projs\[(\d+)\]")
_PARTS = {"gate_and_up": (("gate", "up"), ("up",)), "down": (("down",),)}
"""The linears whose columns follow each other in such a matrix: those of gated experts, and of others."""


def by_hf_names(
    stored: Chunked, prefix: str, names: Iterable[str], weights: Mapping[str, TensorSpec], where: Path
) -> dict[str, str | TransposedRows]:
    """Moments by the names of their `weights`, and for each the stored tensor that it is, or its columns in one.
    `names` are those of stored moments without the `prefix` that each has in `stored`. Raises DamagedCheckpoint for two
    moments of one weight."""
    found: dict[str, str | TransposedRows] = {}
    seen: dict[str, str] = {}
    for name in names:
        made: dict[str, str | TransposedRows] = {}
        first = 0
        for linear in _linears(name, stored.specs[prefix + name], weights):
            count, inputs = weights[linear].shape
            made[linear] = TransposedRows(stored, prefix + name, Box(0, inputs, first, count))
            first += count
        for new in made or (name,):
            if (other := seen.setdefault(new, name)) != name:
                raise both_are(other, name, new, where)
        found |= made or {name: prefix + name}
    return found


def _linears(name: str, spec: TensorSpec, weights: Mapping[str, TensorSpec]) -> list[str]:
    """The weights that an expert's matrix has the moments of, in their order; none if it is no such matrix, or has
    other sizes."""
    if not (match := _OF_EXPERT.fullmatch(name)):
        return []
    experts, kind, number = match.groups()
    for parts in _PARTS[kind]:
        linears = [f"{experts}.{number}.{part}_proj.weight" for part in parts]
        shapes = [weights[linear].shape for linear in linears if linear in weights]
        fit = len(shapes) == len(linears) and all(shape[1:] == (spec.rows,) for shape in shapes)
        if fit and sum(shape[0] for shape in shapes) == spec.columns:
            return linears
    return []
