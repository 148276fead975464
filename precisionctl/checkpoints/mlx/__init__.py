"""MLX: how mlx-lm names tensors (`mlx_names.py`, for reading and writing), which models it loads, its config.json, and
the Writer. Its codes are decoded in `checkpoints/decoded/`, its adapters are a container, `checkpoints/mlx_adapter.py`.
"""
