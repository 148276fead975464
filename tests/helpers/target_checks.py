"""What a directory breaks of a target's rules, on one GPU if nothing else is said."""

from pathlib import Path

from precisionctl.commands import target_rules


def check_directory(path: Path, target: str, ranks: int = 1, reference: Path | None = None) -> target_rules.TargetCheck:
    return target_rules.check_directory(path, target, ranks, expert_parallel=False, reference=reference)
