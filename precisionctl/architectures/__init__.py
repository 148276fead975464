"""One table of rows per model family: how Hugging Face and Megatron tensors correspond."""
