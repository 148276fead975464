"""A run as checkpoints on the disk, and what it takes from one."""
