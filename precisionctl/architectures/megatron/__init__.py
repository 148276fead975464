"""How Megatron's arguments say a ModelShape, both ways, and what Megatron-Core computes of one."""
