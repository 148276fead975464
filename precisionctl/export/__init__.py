"""Export for inference: weights become codes for engines, or what llama.cpp and mlx-lm load; and the model card.

- Codes, new ones or the old ones: `encode.py` is the pass over a plan, `as_before.py` one of its policies,
  `schemes.py` chooses if nobody has; `weight_encodings.py`, `input_scales.py` and `kv_cache.py` have the scales.
- Files of programs with names and types of their own: `gguf/` and `mlx_plan.py`, and `changed_parts.py` for both.
- What people read beside any of them: `model_card.py`.
"""
