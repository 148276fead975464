"""Containers: what stores tensors, one file each. Each recognises itself."""
