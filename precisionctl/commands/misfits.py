"""Weights that an engine does not take in the format of an export, and what can be done about them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from precisionctl.engines.base import Engine
from precisionctl.engines.rule import Finding
from precisionctl.engines.serving import ServingLayout
from precisionctl.errors import PrecisionError
from precisionctl.export.encode import WeightFormat, fp8_jobs
from precisionctl.export.schemes import schemes_of
from precisionctl.param import TensorSpec
from precisionctl.planning.plan import Job, Plan
from precisionctl.precision import Precision
from precisionctl.quant_methods.base import FOUR_BITS, SCHEMES, Scheme, quant_methods


@dataclass(frozen=True)
class Misfits:
    """An export of a plan of values to an engine in a `form`, and what of it the engine does not take."""

    engine: Engine
    plan: Plan
    precision: Precision
    form: WeightFormat
    layout: ServingLayout
    config: Mapping[str, Any]

    @property
    def jobs(self) -> list[Job]:
        """Those whose weights become codes if all fit."""
        return fp8_jobs(self.plan, self.precision)

    def refusal(self, name: str, spec: TensorSpec) -> str | None:
        """Why the engine does not take a weight of this shape as codes, in words; None if it does."""
        method, scheme = self.form.method, self.form.scheme
        refused = self.engine.shapes.refusal(name, spec, SCHEMES[scheme].block, self.layout, method.name)
        moved = self.engine.shapes.check_moved(name, spec, method.scales(name, spec, scheme), self.layout)
        return refused or (moved.what if moved else None)

    def check_taken(self, jobs: Iterable[Job]) -> None:
        """Raise PrecisionError if the engine does not load experts among the weights of these jobs as codes, or loses
        tensors that it joins with others beside these codes."""
        coded = [name for job in jobs for name in job.weights]
        if found := self._experts(coded):
            do = "Choose another scheme (`export-inference --scheme`)"
            if not self._loses(()):  # else the engine would lose them in BF16
                do += ", or leave the experts in BF16: --exclude '*.experts.*'"
            what = f"{self.engine.title} does not load {found[0].what}"
            raise PrecisionError(what, where=found[0].where, do=f"{do}.")
        if found := self._loses(coded):
            raise PrecisionError(
                f"{self.engine.title} loses tensors that it joins with others as it loads them: {found[0].what}",
                where=found[0].where,
                do="Choose --scheme static or dynamic, or another engine (--target).",
            )

    def advice(self, left: Sequence[Job]) -> str:
        """What to do if not all weights fit, and these jobs are left without those that do not."""
        others = " or ".join(self._schemes())
        others = others and f"--scheme {others}, which takes them, or "
        if not left or self._loses(name for job in left for name in job.weights):  # in BF16, they would be
            return f"`export-inference` has {others}--target, for another engine."
        return (
            f"`export-inference` has {others}--keep-misfits, which leaves them in BF16 with what is computed with "
            "them; or name modules in --exclude, or keep_bf16 of a --recipe."
        )

    def _schemes(self) -> list[Scheme]:
        """The other schemes in which the engine takes all weights; four-bit ones only if this one has four bits."""
        bits = [each for each in self.engine.spells if {each, self.form.scheme} <= FOUR_BITS.keys()]
        schemes = (*bits, *schemes_of(self.engine, self.plan, self.precision))
        return [each for each in schemes if self._in(each)._all_fit()]

    def _in(self, scheme: Scheme) -> Misfits:
        """Those of the same export in another scheme."""
        method = quant_methods()[self.engine.spells[scheme]]
        return replace(self, form=replace(self.form, method=method, scheme=scheme))

    def _all_fit(self) -> bool:
        names = [name for job in self.jobs for name in job.weights]
        return not (
            self._experts(names)
            or any(self.refusal(name, self.plan.targets[name]) for name in names)
            or self._loses(names)
        )

    def _experts(self, coded: Iterable[str]) -> list[Finding]:
        return self.engine.check_experts(coded, self.form.method.name, self.form.scheme, self.plan.model.architecture)

    def _loses(self, coded: Iterable[str]) -> list[Finding]:
        form = self.form
        codes = {name: form.spelling.codes(self.plan.targets[name], form.scheme) for name in coded}
        quantization = form.spelling.config(form.scheme, ())
        return self.engine.check_joined(self.config, form.method.name, quantization, {**self.plan.targets, **codes})
