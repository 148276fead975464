"""Checkpoints compared with one another and with an engine's rules."""
