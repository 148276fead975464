"""Carry out a plan: stream tensors through workers and ranks, keep a journal, and rename the result when it is
complete."""
