"""Fixed scales of inputs and KV caches compared: with one another, or with the FP8 state that they came from.

All are scale_inv. Where all of a side are numbers of BF16, as in some exports, each is the same as what is rounded up
to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.hf_directory.encodings_file import WeightEncodings
from precisionctl.codes.numerics import rounded_up
from precisionctl.engines.rules.cache_rules import attention_and_kind
from precisionctl.export.encode import with_joint_amax
from precisionctl.export.input_scales import is_same_amax
from precisionctl.export.kv_cache import scales_of_state
from precisionctl.fp8.state import Fp8States
from precisionctl.planning.plan import Plan
from precisionctl.quant_methods.caches import CACHE_SCALES
from precisionctl.quant_methods.scales import amax_of, scale_of
from precisionctl.sizes import listed
from precisionctl.torch_when_used import torch
from precisionctl.verify.configs import Found
from precisionctl.verify.not_compared import NotCompared

if TYPE_CHECKING:
    from torch import Tensor

_SHOWN = 3
"""Names of missing scales that a line shows."""


@dataclass(frozen=True)
class FixedScales:
    """One side's fixed scales. `encodings` is how its weights are encoded, or once were, `state` the recorded FP8
    state, and `plan` leads to Hugging Face's names."""

    reader: Reader
    plan: Plan
    encodings: WeightEncodings | None
    state: Fp8States | None

    @cached_property
    def stored(self) -> Mapping[str, Tensor]:
        """Each scale, FP32, by what it is of."""
        if self.encodings is None:
            return {}
        scales = {name: self.encodings.input_scale(weight) for name, weight in self._inputs.items()}
        found = {name: torch.tensor([scale]) for name, scale in scales.items() if scale is not None}
        for name, weight in self._inputs.items():
            if (zero := self.encodings.input_zero_point(weight)) is not None:
                found[f"zero point beside the {name}"] = torch.tensor([zero])
        for name in self.encodings.stored.specs:
            if name.endswith(CACHE_SCALES):
                # k_scale and v_scale, which tools put at different places below an attention module, have one name
                attention = attention_and_kind(name)
                common = f"{attention[1]} scale of {attention[0]}" if attention else name
                found[common] = read_tensor(self.encodings.stored, name).float().reshape(-1)
        return found

    @cached_property
    def in_bf16(self) -> bool:
        """Whether all stored scales are numbers of BF16, in whichever dtype: then they were rounded to it."""
        scales = (scale for name, scale in self.stored.items() if not self.is_computed(name))
        return all(torch.equal(scale, scale.bfloat16().float()) for scale in scales)

    @cached_property
    def _inputs(self) -> Mapping[str, str]:
        """Which weight each input scale belongs to, by the scale's name in reports."""
        renamed = {read: write for job in self.plan.jobs for read, write in zip(job.reads, job.writes, strict=False)}
        one_to_one = self.reader.layout == "hf"  # names of experts may be the file's, or the model class's
        weights = self.encodings.scales if self.encodings else ()
        return {f"input scale of {renamed.get(name, name) if one_to_one else name}": name for name in weights}

    def is_computed(self, name: str) -> bool:
        """Whether a stored scale is computed from what is stored, as that of inputs that are not rounded to FP8."""
        weight = self._inputs.get(name)
        return self.encodings is not None and weight is not None and not self.encodings.scales[weight].inputs_in_fp8

    def divisor_or_not(self, name: str) -> tuple[bool, float] | None:
        """Of a scale that is computed: whether the stored one divides, and that one; None for others."""
        if self.encodings is None or not self.is_computed(name):
            return None
        stored = self.encodings.stored_input_scale(weight := self._inputs[name])
        return None if stored is None else (self.encodings.scales[weight].divides, float(stored))

    @cached_property
    def recorded(self) -> Mapping[str, float]:
        """The amax that each scale would have been made of, as far as it was recorded."""
        if self.state is None:
            return {}
        found: dict[str, float] = {}
        for group, amax in with_joint_amax([job for job in self.plan.jobs if job.row.may_be_codes], self.state):
            if amax > 0:
                found |= {f"input scale of {name}": float(amax) for job in group for name in job.writes}
        for stem, scale in scales_of_state(self.state, self.plan).items():
            for kind, value in (("k", scale.k), ("v", scale.v)):
                found[f"{kind} scale of {stem}"] = float(amax_of(torch.tensor(value)))
        return found


def compare_fixed_scales(a: FixedScales, b: FixedScales) -> Found:
    """Compare each fixed scale with the other side's. If one side is codes and the other values, a scale of the codes
    is also accepted if it follows from the amax that the values' side recorded, since training since then counts more
    than the scales of former codes."""
    alike = bool(a.reader.encodings) == bool(b.reader.encodings)  # both are codes, or both are values
    coded, values = (a, b) if a.reader.encodings else (b, a)
    lines: list[str] = []
    missing: dict[str, list[str]] = {}
    unknown: list[str] = []
    for name in dict.fromkeys((*a.stored, *b.stored)):
        left, right = a.stored.get(name), b.stored.get(name)
        if left is not None and right is not None:
            recorded = not alike and _from_state(name, coded, values)
            same = _same(left, right, a.in_bf16, b.in_bf16) and _are_same_as_stored(name, a, b)
            if not same and not recorded:
                lines.append(f"{name} is {_shown(left)} in A, {_shown(right)} in B")
            continue
        side, other = ("B", "A") if left is None else ("A", "B")
        having, lacking = (b, a) if left is None else (a, b)
        scale, amax = having.stored[name], lacking.recorded.get(name)
        if alike and lacking.encodings is not None and amax is None:
            missing.setdefault(side, []).append(name)
        elif amax is None:
            unknown.append(name)
        elif not _from_state(name, having, lacking):
            made = f"the amax that {other} recorded, {amax:.6g}, gives {_shown(scale_of(torch.tensor(amax)))}"
            lines.append(f"{name} is {_shown(scale)} in {side}; {made}")
    lines += [f"only {side} has the {listed(names, _SHOWN)}" for side, names in missing.items()]
    return lines, [NotCompared("fixed scales", listed(unknown, _SHOWN))] if unknown else []


def _are_same_as_stored(name: str, a: FixedScales, b: FixedScales) -> bool:
    """Whether two scales that are computed are also the same as they are stored, if that is in one form."""
    of_a, of_b = a.divisor_or_not(name), b.divisor_or_not(name)
    return of_a is None or of_b is None or of_a[0] != of_b[0] or of_a[1] == of_b[1]


def _same(left: Tensor, right: Tensor, left_in_bf16: bool, right_in_bf16: bool) -> bool:
    """Whether two scales are equal, or one of a side of numbers of BF16 is the other one rounded up."""
    if left.shape != right.shape:
        return False
    return (
        torch.equal(left, right)
        or (right_in_bf16 and torch.equal(rounded_up(left, "BF16"), right))
        or (left_in_bf16 and torch.equal(left, rounded_up(right, "BF16")))
    )


def _from_state(name: str, having: FixedScales, recording: FixedScales) -> bool:
    """Whether the scale on one side and the amax recorded on the other were made from each other. Both are compared to
    the last bit, except for a computed scale."""
    scale, amax = having.stored[name], recording.recorded.get(name)
    if amax is None or scale.numel() != 1:
        return False
    back = float(amax_of(scale))
    same = is_same_amax(back, amax) if having.is_computed(name) else back == amax
    return same or _same(scale, scale_of(torch.tensor([amax])), having.in_bf16, False)


def _shown(scale: Tensor) -> str:
    return f"{float(scale):.6g}" if scale.numel() == 1 else f"{scale.numel()} numbers"
