"""A GGUF file for llama.cpp: a plan in its names and types, and the tokenizer in its metadata."""
