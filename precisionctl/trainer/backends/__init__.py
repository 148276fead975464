"""What makes the model's linears and norms: Transformer Engine, or plain PyTorch with its FP8 numerics."""
