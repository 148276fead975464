"""A.X K2 (SK Telecom): DeepSeek-V3.2, with gates on the norms before attention and experts, and a gate on the output of
heads that is projected beside the queries.

Traps: the projection of queries and gates reads the latent of queries twice, normalised and as it is. Files call it
`q_b_proj` as DeepSeek's, and transformers' class otherwise, as the gates of norms. Norms before
dense MLPs have no gate. Without a number there are no groups of experts. Rotary embeddings turn neighbouring pairs of
`qk_rope_head_dim` channels, whatever `head_dim` says.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.config_layers import listed_layers
from precisionctl.architectures.param_map import Architecture, Row, published_or_in_memory, renamed
from precisionctl.architectures.rope import rope
from precisionctl.architectures.row_layers import Layers
from precisionctl.architectures.shared import deepseek_keys, deepseek_rows, llama_rows as llama, moe_rows as moe


def _gate(hf: str, megatron: str, layers: Layers) -> tuple[Row, ...]:
    """The MLP of a norm's gate; it stays in BF16, in training and exports."""
    hf, megatron = f"model.layers.{{layer}}.{hf}", f"decoder.layers.{{layer}}.{megatron}"
    return (
        Row(f"{hf}.W_down.weight", f"{megatron}.W_down.weight", ("norm_gate_rank", "hidden_size"), layers=layers),
        Row(f"{hf}.W_up.weight", f"{megatron}.W_up.weight", ("hidden_size", "norm_gate_rank"), layers=layers),
    )


_WITHIN = {"layernorm.weight": "layernorm.norm.weight"}
_INPUT_NORM, *_ATTENTION = deepseek_rows.INDEXED_ATTENTION

_ROWS = (
    *renamed([_INPUT_NORM], _WITHIN, _WITHIN),
    *_gate("input_layernorm", "input_layernorm", "all"),
    *_ATTENTION,
    *llama.MLP_NORM,
    *llama.MLP,
    *renamed(moe.MOE_NORM, _WITHIN, _WITHIN),
    *_gate("post_attention_layernorm", "pre_mlp_layernorm", "moe"),
)
_IN_MEMORY = renamed(_ROWS, {".W_down.": ".mlp.fc1.", ".W_up.": ".mlp.fc2.", ".q_b_proj.": ".q_gate_proj."})


_KINDS = ("indexed_attention", "deepseek_sparse_attention")
"""What transformers calls all layers, and what 5.17 did."""


def _read_layers(config: keys.Config) -> keys.Fields:
    listed_layers(config, dict.fromkeys(_KINDS, True))  # raises for another kind
    return {"dsa.layers": (True,) * keys.layers(config)}


ARCHITECTURE = Architecture(
    model_types={"axk2": "AXK2ForCausalLM"},
    rows=llama.model_rows(*published_or_in_memory(_IN_MEMORY, _ROWS), *deepseek_rows.ROUTING, *moe.EXPERTS),
    config=(
        *deepseek_keys.latent_attention(384),
        keys.always("mla.query_gate", True),
        keys.Key("norm_gate_rank", "gated_norm_rank", 16),
        *deepseek_keys.experts_of_a_layer(shared=1),
        deepseek_keys.experts_by_list(dense=1, key="first_k_dense_replace"),
        keys.only("moe_layer_freq", 1),
        *deepseek_keys.router(1, None),
        keys.Key("moe.topk_scaling_factor", "routed_scaling_factor", 2.5),
        keys.Key("dsa.n_heads", "index_n_heads", 16),
        *deepseek_keys.INDEXER,
        keys.Rule(("layer_types",), _read_layers),
        keys.Key("norm_epsilon", "rms_norm_eps", 1e-6),
        rope(),
        keys.tied(False),
    ),
    names_by="this project",
)
