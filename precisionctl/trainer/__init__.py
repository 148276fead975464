"""Continued pretraining and SFT, in BF16 or FP8, on Transformer Engine or emulated."""
