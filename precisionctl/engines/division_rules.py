"""Which models an engine divides among GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from precisionctl.engines.code_rules import EXPERT, experts_module
from precisionctl.engines.rule import EngineRule, Finding
from precisionctl.engines.serving import ServingLayout

_HEADS_EVENLY = EngineRule(
    "every GPU gets the same number of heads; fewer key-value heads than GPUs are each on the same number of GPUs",
    "vLLM 0.33 config/model.py, layers/linear.py QKVParallelLinear, mamba_mixer2.py; SGLang's have the same rules",
)


@dataclass(frozen=True)
class Division:
    """How an engine divides a model among GPUs.

    experts: what it asks of experts that are dealt out whole; None: nothing. evenly: whether each GPU must get as many.
    whole_groups: the rule that GPUs share no group of a mixer beside codes; None: they may.
    """

    experts: EngineRule | None = None
    evenly: bool = False
    whole_groups: EngineRule | None = None

    def check_spread(self, names: Iterable[str], served: ServingLayout) -> list[Finding]:
        """Why the engine does not divide a model with these tensors, as a finding: GPUs do not divide its heads; or its
        experts are to be dealt out whole, and there are none, or the GPUs do not divide their number."""
        if served.uneven:
            return [Finding("config.json", served.uneven, _HEADS_EVENLY)]
        rule = self.experts
        if rule is None or not served.expert_parallel:
            return []
        names = list(names)
        counts = Counter((match[1], match[2]) for match in map(EXPERT.fullmatch, names) if match)
        if not counts and not any(experts_module(name.partition("[")[0]) for name in names):
            return [Finding("config.json", "a model without experts", rule)]
        uneven = ((module, count) for (module, _), count in counts.items() if self.evenly and count % served.ranks)
        what = "{} experts on {} GPUs"
        return [Finding(module, what.format(count, served.ranks), rule) for module, count in islice(uneven, 1)]

    def check_groups(self, served: ServingLayout) -> list[Finding]:
        """That GPUs would share a mixer's only group, where the engine does not let them beside codes, as a finding."""
        if self.whole_groups is None or not served.shares_rows:
            return []
        return [Finding("config.json", f"mixers of one group on {served.ranks} GPUs", self.whole_groups)]
