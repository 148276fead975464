"""Weights that an engine does not take in the format of an export, and what can be done about them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from precisionctl.engines.base import Engine
from precisionctl.engines.rules.rule import Finding
from precisionctl.engines.serving import EXPERT, ServingLayout
from precisionctl.errors import PrecisionError
from precisionctl.export.encode import WeightFormat, without_refused
from precisionctl.export.schemes import schemes_of
from precisionctl.param import TensorSpec
from precisionctl.planning.plan import Job, Plan
from precisionctl.quant_methods.base import FOUR_BITS, SCHEMES, quant_methods
from precisionctl.quant_methods.scales import Scales


@dataclass(frozen=True)
class Misfits:
    """An export of a plan of values to an engine in a `form`, and what of it the engine does not take. The weights of
    the `jobs` become codes if all fit."""

    engine: Engine
    plan: Plan
    jobs: Sequence[Job]
    form: WeightFormat
    layout: ServingLayout
    config: Mapping[str, Any]

    def refusal(self, name: str, spec: TensorSpec, scales: Scales) -> str | None:
        """Why the engine does not take a weight of this shape as codes with these scales, in words; None if it does."""
        scheme, block = self.form.scheme, SCHEMES[self.form.scheme].block
        codes = self.form.spelling.codes(spec, scheme)
        refused = self.engine.shapes.refusal(name, codes, block, self.layout, self.form.method.name)
        moved = self.engine.shapes.check_moved(name, spec, scales, self.layout)
        return refused or (moved.what if moved else None)

    def left(self) -> list[Job]:
        """The jobs without weights that do not fit, and without those that are computed with them."""
        return without_refused(self.plan, self.jobs, self.form.scales(self.jobs, self.plan), self.refusal)[0]

    def check_taken(self, jobs: Iterable[Job]) -> None:
        """Raise PrecisionError if the engine does not load weights of these jobs, of this model, of experts or of
        modules that it never quantizes, as codes, or loses tensors that it joins with others beside these codes."""
        coded = [name for job in jobs for name in job.weights]
        if module := next(self._never(coded), None):
            alike = re.sub(r".*\.\d+\.", "*.", module)
            raise PrecisionError(
                f"{self.engine.title} makes `{module}` without quantization, and would take its codes for weights",
                do=f"Leave it in BF16: --exclude '{alike}'.",
            )
        if found := self._unloaded(coded):
            do = "Choose another scheme (`export-inference --scheme`)"
            if EXPERT.fullmatch(found[0].where) and not self._loses(()):  # else it would lose them in BF16
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
        others = self._others()
        ways = []
        if fitting := " or ".join(each.form.scheme for each in others if each.all_fit()):
            ways.append(f"--scheme {fitting}, which takes them")
        if divisions := " or ".join(self._divisions()):
            ways.append(f"{divisions}, under which all fit")
        if self._takes(left):
            ways.append("--keep-misfits, which leaves them in BF16 with what is computed with them")
            ways.append("--exclude, or keep_bf16 of a --recipe, for modules by name")
        else:
            keeping = " or ".join(each.form.scheme for each in others if each._takes(each.left()))
            if keeping and not fitting:
                ways.append(f"--keep-misfits in another scheme (--scheme {keeping}), which takes some of them")
            ways.append("--target, for another engine")
        return f"`export-inference` has {'; or '.join(ways)}."

    def _divisions(self) -> Iterator[str]:
        """The options by which the engine's GPUs would cut the model so that it takes all weights: experts whole, or
        the largest smaller number of GPUs."""
        if self.layout.ranks > 1 and self.engine.division.experts and not self.layout.expert_parallel:
            if self._fit_on(replace(self.layout, expert_parallel=True)):
                yield "--expert-parallel"
        if fewer := next(filter(self._fit_on, self.layout.on_fewer()), None):
            yield f"--tp {fewer.ranks}"

    def _fit_on(self, layout: ServingLayout) -> bool:
        """Whether the engine takes all weights as another layout divides them."""
        return not self.engine.division.check(self.plan.targets, layout) and replace(self, layout=layout).all_fit()

    def _others(self) -> list[Misfits]:
        """Those of the same export in the engine's other schemes; in four-bit ones only if this one has four bits."""
        bits = [each for each in self.engine.spells if {each, self.form.scheme} <= FOUR_BITS.keys()]
        schemes = (*bits, *schemes_of(self.engine, self.plan.model, self.jobs))
        forms = [
            replace(self.form, method=quant_methods()[self.engine.spells[scheme]], scheme=scheme)
            for scheme in schemes
            if scheme != self.form.scheme
        ]
        return [replace(self, form=form) for form in forms]

    def all_fit(self) -> bool:
        """Whether the engine takes all weights."""
        scales = self.form.scales(self.jobs, self.plan)
        return not (
            self._unloaded(scales)
            or any(self._never(scales))
            or any(self.refusal(name, self.plan.targets[name], each) for name, each in scales.items())
            or self._loses(scales)
        )

    def _takes(self, left: Sequence[Job]) -> bool:
        """Whether the engine takes the weights of these jobs as codes, if there are any, and all others as values."""
        coded = {name for job in left for name in job.weights}
        values = [name for name in self.plan.targets if name not in coded]
        uncoded = self.engine.check_values(self.plan.model.architecture, self.form.scheme, values)
        unread = self._unloaded(coded) or any(self._never(coded)) or self._loses(coded)
        return bool(coded) and not (unread or uncoded)

    def _never(self, coded: Iterable[str]) -> Iterator[str]:
        """The modules of these weights that the engine never quantizes."""
        method, modules = self.form.method.name, [name.removesuffix(".weight") for name in coded]
        ignored = self.engine.methods[method].list_of(self.form.scheme)
        return ignored.never(self.config, method, self.plan.model.architecture, modules)

    def _unloaded(self, coded: Iterable[str]) -> list[Finding]:
        return self.engine.check_weights(coded, self.form.method.name, self.form.scheme, self.plan.model.architecture)

    def _loses(self, coded: Iterable[str]) -> list[Finding]:
        form = self.form
        if self.engine.methods[form.method.name].joined is None:
            return []
        codes = {name: form.spelling.codes(self.plan.targets[name], form.scheme) for name in coded}
        quantization = form.spelling.config(form.scheme, ())
        return self.engine.check_joined(self.config, form.method.name, quantization, {**self.plan.targets, **codes})
