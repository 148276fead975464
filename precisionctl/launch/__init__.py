"""Command lines and configs with which other frameworks continue from a checkpoint."""
