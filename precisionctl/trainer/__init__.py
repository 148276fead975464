"""Continued pretraining and SFT, in BF16, FP8 or NVFP4, on Transformer Engine or emulated."""
