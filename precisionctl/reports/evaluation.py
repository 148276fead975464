"""What `eval` found, in lines."""

from precisionctl.evaluate import Evaluation


def lines(found: Evaluation) -> list[str]:
    """Perplexity, and what it is held against."""
    said = [f"perplexity {found.perplexity:.4f} over {found.tokens:,} tokens, {found.precision}"]
    if other := found.against:
        said += [
            f"perplexity {other.perplexity:.4f} of the source, {other.precision}",
            f"KL divergence {other.kl:.3g} nats a token, top-1 agreement {other.top1:.2%}",
        ]
    return said
