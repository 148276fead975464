"""FP8 arithmetic and state: what Transformer Engine keeps, without Transformer Engine."""
