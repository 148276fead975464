"""Kimi delta attention beside latent attention: its tensors, and what metadata say of both.

Sources: llama.cpp's src/models/kimi-linear.cpp and bailingmoe3.cpp, and conversion/kimi_linear.py and bailingmoe3.py.
"""

from collections.abc import Callable, Mapping
from typing import Any

from precisionctl.architectures.config_keys import Fields
from precisionctl.checkpoints.gguf.metadata import Described
from precisionctl.checkpoints.gguf.metadata_keys import HEADS_KV, GgufEntry, Said, integer, value_of
from precisionctl.checkpoints.gguf.tensor_rows import GgufRow, in_layer, in_layers
from precisionctl.checkpoints.tensor_changes import KERNEL_IN_FOUR, TensorChange
from precisionctl.model.model_shape import ModelShape


def delta_attention(module: str, decay: TensorChange) -> list[GgufRow]:
    """The rows that both families have of delta attention in such modules."""
    return [
        *in_layers({f"{module}.{part}_conv1d": f"ssm_conv1d_{part}" for part in "qkv"}, KERNEL_IN_FOUR),
        *in_layers({f"{module}.b_proj": "ssm_beta", f"{module}.o_norm": "ssm_norm"}),
        in_layer(f"{module}.dt_bias", "ssm_dt.bias"),
        in_layer(f"{module}.A_log", "ssm_a", decay),
    ]


def _read_heads(file: Described) -> Fields:
    heads, layers = file.count("attention.head_count", least=1), file.decoder_layers()
    delta = tuple(not groups for groups in file.counts(HEADS_KV)[:layers])
    return {"num_attention_heads": heads, "num_query_groups": heads, "gdn.layers": delta}


def _write_heads(model: ModelShape) -> Said:
    kinds = [*value_of(model, "gdn.layers"), *[False] * model.mtp_num_layers]
    return {"attention.head_count": model.num_attention_heads, HEADS_KV: [0 if delta else 1 for delta in kinds]}


KDA_HEADS = GgufEntry(
    ("num_attention_heads", "num_query_groups", "gdn.layers"),
    ("attention.head_count", HEADS_KV),
    _read_heads,
    _write_heads,
)
"""To llama.cpp all heads have one key, the latent, and layers of delta attention none."""
KDA_SIZES = (integer("gdn.conv_kernel_dim", "ssm.conv_kernel"), integer("gdn.key_head_dim", "kda.head_dim"))


def _read_key_size(file: Described) -> Fields:
    file.expect("attention.key_length", file.count("attention.kv_lora_rank") + file.count("rope.dimension_count"))
    return {}


def latent_key(head_dim: Callable[[ModelShape], int]) -> GgufEntry:
    """What is a key to llama.cpp, and what published files call `head_dim`, with which it computes nothing."""

    def write(model: ModelShape) -> Said:
        key = value_of(model, "mla.kv_lora_rank") + value_of(model, "mla.qk_pos_emb_head_dim")
        return {"attention.key_length": key, "attention.value_length": head_dim(model)}

    return GgufEntry((), ("attention.key_length", "attention.value_length"), _read_key_size, write)


BESIDE_KDA: Mapping[str, Any] = {
    "kv_channels": lambda fields: fields["mla.v_head_dim"],
    "moe.expert_bias": True,
    "mla.q_lora_rank": None,
    "gdn.kda": True,
    "gdn.value_head_dim": lambda fields: fields["gdn.key_head_dim"],
    **dict.fromkeys(("gdn.num_key_heads", "gdn.num_value_heads"), lambda fields: fields["num_attention_heads"]),
}
"""What llama.cpp computes of both families whatever a file says."""
