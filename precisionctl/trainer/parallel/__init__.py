"""Parallel training: the processes that train together, their shards of the model, and their collectives."""
