"""The backends that make the model's linears and norms: Transformer Engine, or PyTorch with emulated FP8 numerics."""
