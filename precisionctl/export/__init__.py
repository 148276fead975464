"""What makes a directory for inference: codes, scales of inputs and caches, the model card."""
