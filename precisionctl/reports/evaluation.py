"""The results of `eval` as lines of text."""

import math
from collections.abc import Mapping
from typing import Any

from precisionctl.evaluate import Evaluation
from precisionctl.sizes import counted


def lines(found: Evaluation, sequence_length: int) -> list[str]:
    """Perplexity on rows of the `sequence_length` that was wanted, or the longest that the models take; the
    comparison with the reference if there is one; and notes on the data."""
    text = f"{counted(found.tokens, 'token')} in rows of {found.sequence_length:,}"
    if found.sequence_length < sequence_length:
        text += f" (not {sequence_length:,}: the model takes no longer ones)"
    lines = [f"perplexity {found.perplexity:.4f} over {text}, {found.precision}"]
    if not math.isfinite(found.perplexity):
        lines.append("A weight may be broken: `precisionctl inspect CHECKPOINT --fp8` names those that are.")
    if other := found.against:
        lines += [
            f"perplexity {other.perplexity:.4f} of the source, {other.precision}",
            f"KL divergence {other.kl:.3g} nats a token, top-1 agreement {other.top1:.2%}",
        ]
    return [*lines, *found.notes]


def task_lines(found: Mapping[str, Any]) -> list[str]:
    """The results of `evaluate.harness.run_tasks`: the metrics of each task, under lm-eval's names."""
    lines = [f"lm-eval, {found['precision']}"]
    for task, metrics in found["results"].items():
        count = found["samples"].get(task, {}).get("effective", "?")
        shown = {name.removesuffix(",none"): value for name, value in metrics.items() if isinstance(value, float)}
        lines.append(f"{task}: {', '.join(f'{name} {value:.4f}' for name, value in shown.items())} ({count} examples)")
    return lines
