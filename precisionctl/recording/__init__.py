"""Recording: FP8 state from training that another program does."""
