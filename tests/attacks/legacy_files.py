"""What files of a small `torch` checkpoint hold."""

from typing import Any

ARGS: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 8,
    "ffn_hidden_size": 16,
    "num_attention_heads": 2,
    "kv_channels": 4,
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "layernorm_epsilon": 1e-5,
    "position_embedding_type": "rope",
    "max_position_embeddings": 16,
    "untie_embeddings_and_output_weights": True,
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
}
SHAPES = {
    "self_attention.linear_qkv.layer_norm_weight": (8,),
    "self_attention.linear_qkv.weight": (12, 8),
    "self_attention.linear_proj.weight": (8, 4),
    "mlp.linear_fc1.layer_norm_weight": (8,),
    "mlp.linear_fc1.weight": (16, 8),
    "mlp.linear_fc2.weight": (8, 8),
}
