"""Layers of the decoder, and what is between their blocks and the residual stream, or streams."""
