"""How Hugging Face and Megatron name a model's tensors and settings: the words that tables are written in, `tables/`
with one for each family, `shared/` with groups that several have, and `megatron/` with Megatron's arguments."""
