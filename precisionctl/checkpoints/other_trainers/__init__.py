"""Shared by checkpoints of trainers that are neither Megatron nor ours: a directory without a description of its model
(`trainer_directory.py`), AdamW's settings and count (`trainer_run.py`), its state by number (`numbered_optimizer.py`),
a model that ranks have in pieces (`flat.py`, `saved_states.py`), and names of other programs: as patterns
(`name_patterns.py`), torchtitan's (`torchtitan_families.py`), OLMo-core's (`olmo_core_families.py`) and LitGPT's
(`litgpt_families.py`)."""
