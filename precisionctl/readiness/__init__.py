"""Readiness: whether FP8 is safe for a checkpoint, by layer and role, and what to keep in BF16."""
