"""Measurements of a run: memory before it begins; FLOPs, memory, FP8 health and metrics of each step."""
