"""Readiness: whether FP8 is safe from here, by layer and role, and what to keep in BF16."""
