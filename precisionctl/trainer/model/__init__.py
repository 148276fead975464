"""The one model that is trained: a decoder with Megatron-Core's parameter names."""
