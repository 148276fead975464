"""Where NeMo Automodel has the moments of experts that Hugging Face's names stand for.

It saves weights as they are published, `mlp.experts.3.gate_proj.weight` for instance, and moments under the names that
parameters have in memory: of the experts of a layer `mlp.experts.gate_and_up_projs` `[experts, in, gate and up]` and
`mlp.experts.down_projs` `[experts, in, out]` (nemo-automodel 0.7.0, components/moe/state_dict_mixin.py). A few families
have experts under other published names, or gate and up in another order; these moments keep their names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from precisionctl.checkpoints.chunks import Box, Chunked
from precisionctl.checkpoints.computed_rows import TransposedRows
from precisionctl.param import TensorSpec

_OF_EXPERT = re.compile(r"(.+\.experts)\.(gate_and_up|down)_projs\[(\d+)\]")
_PARTS = {"gate_and_up": (("gate", "up"), ("up",)), "down": (("down",),)}
"""The linears whose columns follow each other in such a matrix: those of gated experts, and of others."""


def placed(
    stored: Chunked, prefix: str, names: Iterable[str], weights: Mapping[str, TensorSpec]
) -> Iterator[tuple[str, str, str | TransposedRows]]:
    """Each moment, with the name of each weight that it is of and the stored tensor that this weight's is, or its
    columns in one. `names` are those of stored moments without the `prefix` that each has in `stored`."""
    for name in names:
        first, linears = 0, _linears(name, stored.specs[prefix + name], weights)
        for linear in linears:
            count, inputs = weights[linear].shape
            yield name, linear, TransposedRows(stored, prefix + name, Box(0, inputs, first, count))
            first += count
        if not linears:
            yield name, name, prefix + name


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
