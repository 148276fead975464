"""Measurements of a run: memory and disk before it begins; FLOPs, memory, FP8 health and metrics of each step."""
