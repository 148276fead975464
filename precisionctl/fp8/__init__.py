"""FP8 state: what Transformer Engine keeps of a tensor between steps, without Transformer Engine."""
