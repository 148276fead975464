"""Recoding: from one format of codes to another. What the conversion of packed codes keeps exactly and what it rounds:
announced before a conversion, counted after it."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from precisionctl.checkpoints.hf_directory.encodings_file import WeightEncodings
from precisionctl.codes.elements import Element
from precisionctl.codes.group_scales import MXFP4_GROUP
from precisionctl.conversion.outcome import Outcome
from precisionctl.param import TensorSpec
from precisionctl.planning.plan import Plan
from precisionctl.quant_methods.base import EXPONENTS
from precisionctl.quant_methods.coded_weights import scheme_of
from precisionctl.quant_methods.scales import Scales
from precisionctl.sizes import counted

RecodingKind = Literal["same", "same values", "exact", "in reach", "rounded"]
"""What happens to codes whose values have not changed. `same`: the codes stay. `same values`: the scales stay, and the
codes where values have not been BF16, in which several codes may be one (`WeightEncodings.merges`). `exact`: new codes
for the same values. `in reach`: the same, except for values that E4M3 does not reach from the largest one of a block
down (from 6 * 2^6 to 2^-9). `rounded`: values are rounded once more."""

_IN_WORDS: Mapping[RecodingKind, str] = {
    "same": "the same codes again, where values, and global scales if there are any, are unchanged",
    "same values": "codes of the same values, where these are unchanged; of values that have been BF16, neighbouring "
    "codes may be one",
    "exact": "exact: under the scales that they have, all of these are numbers of E4M3",
    "in reach": "exact where a block's scales are within a factor of 2^14; else the values that differ are counted",
    "rounded": "rounded once more; the values that differ are counted",
}


@dataclass(frozen=True)
class Recoding:
    """A conversion of a weight's codes, from the format `before` to the format `after`."""

    before: str
    after: str
    kind: RecodingKind

    def __str__(self) -> str:
        return f"from {self.before} to {self.after}" if self.before != self.after else f"in {self.after}"


def recodings(encodings: WeightEncodings, read: Mapping[str, TensorSpec], plan: Plan) -> dict[str, Recoding]:
    """For each weight that was codes before and will be codes, packed ones on at least one side, its recoding. `read`
    are the tensors of the source, codes or values."""
    found = {}
    for job in plan.jobs:
        for name, scales in (job.codes.weights if job.codes else {}).items():
            if name in encodings.weights and (encodings.weights[name].packing or plan.targets[name].packing):
                before = _format(encodings.weights[name], encodings.scales[name], encodings.stored.specs)
                after = _format(plan.targets[name], scales, plan.targets)
                powers_of_2 = job.codes is not None and job.codes.scale_rounding == "powers of 2"
                kind: RecodingKind = "rounded"
                if before == after:
                    merges = encodings.merges(name) and not all(read[each].is_codes for each in job.reads)
                    kind = "same values" if merges else "same"
                elif (before.name, after.name) == ("MXFP4", "MXFP8"):
                    kind = "exact"
                elif (before.name, after.name) == ("MXFP4", "FP8") and powers_of_2:
                    kind = "in reach"
                found[name] = Recoding(before.name, after.name, kind)
    return found


@dataclass(frozen=True)
class _CodedAs:
    """The format of a weight's codes and of its stored scales, as far as the codes depend on it."""

    name: str
    element: Element
    block: tuple[int, int]
    divides: bool | None
    zero_points: bool


def _format(weight: TensorSpec, scales: Scales, stored: Mapping[str, TensorSpec]) -> _CodedAs:
    exponents = scales.block == (1, MXFP4_GROUP) and stored[scales.weight].dtype in EXPONENTS
    name = "MXFP8" if exponents and not weight.packing else weight.codes_name
    return _CodedAs(name, weight.element, scales.block, scales.global_divides, scales.zero_points is not None)


def recoding_notes(encodings: WeightEncodings | None, read: Mapping[str, TensorSpec], plan: Plan) -> Iterator[str]:
    """Before a conversion: how weights are recoded, as in `recodings`."""
    for recoding, count in Counter(recodings(encodings, read, plan).values() if encodings else ()).items():
        yield f"{counted(count, 'weight')} {recoding}: {_IN_WORDS[recoding.kind]}."


def changed_notes(
    outcome: Outcome, encodings: WeightEncodings, read: Mapping[str, TensorSpec], plan: Plan
) -> Iterator[str]:
    """After a conversion: what became of those weights of a plan's result that were codes before; `read` as in
    `recodings`.

    Of a weight with zero points it says "the same codes" only if each value is what its code decodes to, to the last
    bit, as no other code decodes to that. A value that has been BF16 may have been one of two codes."""
    changed = outcome.changed
    again = [name for name in plan.codes if name in encodings.weights]
    each = recodings(encodings, read, plan)
    found = {name: recoding for name, recoding in each.items() if not recoding.kind.startswith("same")}
    kept = [name for name in again if name not in found]
    merged = {
        name for name, recoding in each.items() if recoding.kind == "same values"
    } & outcome.rounded - changed.keys()
    if kept:
        same = len(set(kept) - merged - changed.keys())
        yield f"{same} of {len(kept)} weights have the same codes and scales as before."
    if merged:
        yield (
            f"{len(merged)} have the same scales, and codes of the same BF16 values: where neighbouring codes are one "
            "such value, these may not be the codes from before."
        )
    others = [name for name in kept if name in changed]
    scheme, in_scheme = _other_scheme(encodings, plan)
    if in_new := [name for name in others if name in in_scheme]:
        others = [name for name in others if name not in in_scheme]
        codes = _counted(_OTHERWISE, in_new, changed, encodings)
        weights = counted(len(in_new), "weight")
        yield f"The scheme changed from {scheme}: all of {weights} are encoded again. With their new scales {codes}"
    if others:
        # of new values nobody has the codes from before: what they would be under the old scales is compared
        codes = _counted(_OTHERWISE, others, changed, encodings)
        yield (
            f"{len(others)} have blocks that are encoded again (their values have changed, their rows were split, or "
            f"other blocks were asked for). With their new scales {codes} What new values changed is not counted "
            "here: `verify --fp8` with the codes from before does that."
        )
    for recoding in dict.fromkeys(found.values()):
        names = [name for name in found if found[name] == recoding]
        rounded = [name for name in names if changed.get(name)]
        what = _counted("values differ", rounded, changed, encodings) if rounded else "no value differs."
        yield f"{len(names) - len(rounded)} of {len(names)} weights {recoding} are exactly what they were: {what}"


_OTHERWISE = "codes are others than they would be under the scales from before"


def _other_scheme(encodings: WeightEncodings, plan: Plan) -> tuple[str, set[str]]:
    """`block to dynamic`, if a directory's codes of the one scheme become the other's, and the weights that get other
    blocks by it."""
    now = {name: scales for job in plan.jobs if job.codes for name, scales in job.codes.weights.items()}
    before = scheme_of(encodings.quantization, encodings.scales, encodings.weights)
    after = scheme_of(plan.quantization, now, plan.targets)
    both = encodings.scales.keys() & now.keys() if before and before != after else set()
    return f"{before} to {after}", {name for name in both if encodings.scales[name].block != now[name].block}


def _counted(what: str, names: Sequence[str], changed: Mapping[str, int], encodings: WeightEncodings) -> str:
    total = sum(encodings.weights[name].rows * encodings.weights[name].columns for name in names)
    differ, worst = sum(changed[name] for name in names), max(names, key=lambda name: changed[name])
    most = f", most of them in {worst}" if differ and len(names) > 1 else f", in {worst}" if differ else ""
    return f"{differ:,.0f} of {total:,} {what}{most}."
