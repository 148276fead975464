"""AdamW in FP32 and with the state of FP8-LM, and learning rates."""
