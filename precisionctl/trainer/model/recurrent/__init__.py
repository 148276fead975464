"""Blocks in which a state passes from token to token: delta nets, Mamba's mixers, short convolutions."""
