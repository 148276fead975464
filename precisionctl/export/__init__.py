"""Export for inference: encode weights, scales of inputs and of KV caches, the model card."""
