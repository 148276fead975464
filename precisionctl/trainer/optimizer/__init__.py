"""Optimizers (AdamW with FP32 state, and with FP8-LM's) and learning rate schedules."""
