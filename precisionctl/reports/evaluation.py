"""What `eval` found, in lines."""

import math
from collections.abc import Mapping
from typing import Any

from precisionctl.evaluate import Evaluation


def lines(found: Evaluation) -> list[str]:
    """Perplexity, and what it is held against."""
    text = f"{found.tokens:,} tokens in rows of {found.sequence_length:,}"
    said = [f"perplexity {found.perplexity:.4f} over {text}, {found.precision}"]
    if not math.isfinite(found.perplexity):
        said.append("A weight may be broken: `precisionctl inspect CHECKPOINT --fp8` names those that are.")
    if other := found.against:
        said += [
            f"perplexity {other.perplexity:.4f} of the source, {other.precision}",
            f"KL divergence {other.kl:.3g} nats a token, top-1 agreement {other.top1:.2%}",
        ]
    return said


def of_tasks(found: Mapping[str, Any]) -> list[str]:
    """What lm-eval found: its numbers by task, under the names it gives them."""
    said = [f"lm-eval, {found['precision']}"]
    for task, numbers in found["results"].items():
        count = found["samples"].get(task, {}).get("effective", "?")
        kept = {name.removesuffix(",none"): value for name, value in numbers.items() if isinstance(value, float)}
        said.append(f"{task}: {', '.join(f'{name} {value:.4f}' for name, value in kept.items())} ({count} examples)")
    return said
