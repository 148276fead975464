"""Containers: what stores tensors, one module or package each, which recognises itself."""
