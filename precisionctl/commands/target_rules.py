"""An exported directory held against the rules of what it is for: an inference engine, or Transformer Engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.request import TE, check_expert_parallel
from precisionctl.engines.base import engine_named
from precisionctl.engines.rule import Finding
from precisionctl.errors import PrecisionError, RecipeError
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


def check_directory(path: Path, target: str, ranks: int = 1, *, expert_parallel: bool = False) -> TargetCheck:
    """The rules of `target`, an engine's name or TE, that a directory breaks, served on `ranks` GPUs, with experts
    whole if `expert_parallel`.

    Raises RecipeError for an unknown target, for TE on several GPUs, for experts on one GPU, and for codes that are not
    read here: that says nothing of whether the target loads them. Raises UnknownFormat for what is no such directory.
    """
    try:
        reader = open_checkpoint(path)
    except PrecisionError as error:
        raise RecipeError(f"{error.what}, so nothing was checked", where=error.where, do=error.do) from error
    if target != TE:
        engine = engine_named(target, TE)
        check_expert_parallel(expert_parallel, ranks)
        return TargetCheck(engine.title, check(reader, engine, ranks, expert_parallel=expert_parallel))
    if ranks > 1 or expert_parallel:
        raise RecipeError(f"--tp and --expert-parallel do not apply to {te_rules.TITLE}", do="Leave them out.")
    return TargetCheck(te_rules.TITLE, te_rules.check_te(reader))
