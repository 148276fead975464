"""The checkpoints of a run: saving, loading, and the run's folder."""
