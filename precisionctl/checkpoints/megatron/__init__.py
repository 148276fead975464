"""Shared by Megatron's containers: names and order of parameters, arguments, FP8 state, the state of a run."""
