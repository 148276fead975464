"""Convert LLM checkpoints between training and inference formats, and between BF16, FP8 and four bits."""

__version__ = "0.1.0"
