"""An exported directory held against the rules of what it is for: an inference engine, or Transformer Engine."""

from collections.abc import Sequence
from dataclasses import dataclass

from precisionctl.checkpoints.base import Reader
from precisionctl.commands.request import TE
from precisionctl.engines.base import engine_named
from precisionctl.engines.rule import Finding
from precisionctl.errors import RecipeError
from precisionctl.verify import te_rules
from precisionctl.verify.engine_rules import NO_CODES, check


@dataclass(frozen=True)
class TargetCheck:
    """The rules that a directory breaks, and the name of whose rules they are."""

    title: str
    findings: Sequence[Finding]

    @property
    def passes(self) -> bool:
        """Whether the target would load the directory, read it rightly, and find codes in it."""
        return not any(finding.rule.fatal or finding.rule is NO_CODES for finding in self.findings)


def check_target(reader: Reader, target: str, ranks: int = 1) -> TargetCheck:
    """The rules of `target`, an engine's name or TE, that a directory breaks, served on `ranks` GPUs. Raises
    RecipeError for an unknown target, and for TE on several GPUs; UnknownFormat for what is no such directory."""
    if target != TE:
        engine = engine_named(target, TE)
        return TargetCheck(engine.title, check(reader, engine, ranks))
    if ranks > 1:
        raise RecipeError(f"--tp does not apply to {te_rules.TITLE}", do="Leave it out.")
    return TargetCheck(te_rules.TITLE, te_rules.check_te(reader))
