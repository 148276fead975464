"""Containers: what stores tensors, one module or package each, which recognises itself.

- What all share: `base.py` says what a Reader, a Writer and a container are, `chunks.py` where boxes of a tensor are,
  `output.py` how a directory becomes complete. `open.py` finds the container at a path, `foreign.py` names what is not
  read.
- Containers, found by their `CONTAINER`: `huggingface.py`, `gguf/`, `adapter/`, `mlx_adapter.py` and `consolidated/`;
  Megatron's `torch_dist/` and `torch_legacy/`, and `nemo/`; other trainers' `dcp/`, `deepspeed/`, `orbax/`,
  `litgpt.py`, `nanotron.py` and `verl.py`. A live model is none, and read and written like one: `module.py`.
- What several of them are made of: `torch_files/`, `hf_directory/` and `published_tensors.py`, `decoded/`, `mlx/`,
  `other_trainers/`, `megatron/`; `computed_rows.py` for rows in another form than stored, and `tensor_changes.py` for
  the values of GGUF and MLX.
"""
