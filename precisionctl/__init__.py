"""Carry Megatron and Hugging Face checkpoints, with their FP8 state, between BF16 and FP8."""

__version__ = "0.1.0"
