"""Attention of every kind: from hidden states to what heads give, and the scores themselves (`core_attention.py`)."""
