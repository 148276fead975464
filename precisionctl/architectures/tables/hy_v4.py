"""Hy4 (Tencent's Hunyuan 4): GLM-5's attention with a sink for each head and a gate for each channel, DeepSeek-V3's
experts, and residual streams that are not mixed.

Traps: rotary embeddings turn neighbouring channels in attention and indexers, as in vLLM and SGLang; transformers turns
halves. An indexer's rotary channels are its last. Activations are clamped in routed experts alone. Layers of
multi-token prediction have one stream. Published names differ from those that transformers' class has in memory, and
both from those that it saves.
"""

from dataclasses import replace

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.config_layers import listed_layers
from precisionctl.architectures.head_rearrangements import INDEX_KEYS, INDEX_QUERIES
from precisionctl.architectures.param_map import Architecture, Either, renamed
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared import deepseek_keys, deepseek_rows, llama_rows as llama, moe_rows as moe
from precisionctl.architectures.shared.hyper_connection_rows import head, hyper_connection
from precisionctl.architectures.tables.glm_moe_dsa import write_indexers
from precisionctl.architectures.tables.gpt_oss import SINKS

_OF_INDEXER = {
    "linear_wq_b.weight": INDEX_QUERIES,
    **dict.fromkeys(("linear_wk.weight", "k_norm.weight", "k_norm.bias"), INDEX_KEYS),
}
_ATTENTION = tuple(
    replace(
        row,
        rearrangement=_OF_INDEXER.get(row.megatron.partition(".indexer.")[2], row.rearrangement),
        keeps_dtype=row.keeps_dtype or row.megatron.endswith("linear_weights_proj.weight"),
    )
    for row in deepseek_rows.INDEXED_ATTENTION
)
_GATE_AND_SINKS = (
    *renamed(llama.LINEAR_GATE, {".g_proj.": ".gate_proj."}),
    *(replace(row, keeps_dtype=True) for row in SINKS),  # FP32 as released
)
_STREAMS = (
    *hyper_connection("model.layers.{layer}.attn_hc.", "self_attention", ("pre", "post")),
    *hyper_connection("model.layers.{layer}.ffn_hc.", "mlp", ("pre", "post")),
    *head("model.hc_head.hc_", "decoder."),
)
_IN_MEMORY = (*_GATE_AND_SINKS, *_STREAMS, *llama.MLP, *moe.SHARED_EXPERTS)
_GATES_AND_SINKS_PUBLISHED = {
    ".self_attn.gate_proj.": ".self_attn.linear_gate.",
    ".sinks": ".learnable_sink_param",
}
_PUBLISHED = {
    **_GATES_AND_SINKS_PUBLISHED,
    ".attn_hc.": ".hc_attn_layer.hc_pre.hc_",
    ".ffn_hc.": ".hc_mlp_layer.hc_pre.hc_",
    ".hc_head.hc_": ".hc_head.hc_head_",
}
_SAVED = {
    ".gate_proj.": ".linear_gate.",
    ".sinks": ".learnable_sink_param",
    ".attn_hc.": ".hc_pre.hc_attn_layer.hc_",
    ".ffn_hc.": ".hc_pre.hc_mlp_layer.hc_",
    ".hc_head.hc_": ".hc_pre.hc_head.hc_head_",
}
"""What transformers (5.24) saves: it turns its own renamings around, also where they change nothing."""

_WIDE_OUTPUT = tuple(replace(row, keeps_dtype=True) for row in llama.OUTPUT)
"""As its class keeps it."""

_PREDICTION = deepseek_rows.prediction(
    (*_ATTENTION, *renamed(_GATE_AND_SINKS, _GATES_AND_SINKS_PUBLISHED)),
    last_norm="final_layernorm",
    experts=moe.FUSED_EXPERTS,
)


_SPARSE = "deepseek_sparse_attention"
"""What published files call all layers, and engines look for; transformers reads it as its own word."""


def _read_layers(config: keys.Config) -> keys.Fields:
    listed_layers(config, dict.fromkeys(("indexed_attention", _SPARSE), True))  # raises for another kind
    listed = listed_layers(config, {"full": True, "shared": False}, "indexer_types")
    if listed is None:
        listed = [layer == 0 or layer % 4 == 1 for layer in range(keys.layers(config))]
    return {"dsa.layers": tuple(listed)}


ARCHITECTURE = Architecture(
    model_types={"hy_v4": "HYV4ForCausalLM"},
    rows=(
        *llama.EMBEDDING,
        *_ATTENTION,
        Either(renamed(_IN_MEMORY, _PUBLISHED), in_memory=_IN_MEMORY, other=renamed(_IN_MEMORY, _SAVED)),
        *(*llama.MLP_NORM, *moe.MOE_NORM, *moe.WIDE_ROUTER, *moe.EXPERT_BIAS, *moe.FUSED_EXPERTS),
        *llama.FINAL_NORM,
        *_WIDE_OUTPUT,
        *(each.renamed({"model.layers.{mtp_layer}.": "model.mtp_layers.{mtp}."}) for each in _PREDICTION),
    ),
    config=(
        *deepseek_keys.latent_attention(1536),
        *deepseek_keys.experts_of_a_layer(shared=1),
        deepseek_keys.experts_by_list(dense=1),
        *deepseek_keys.router(1, 1),
        keys.Key("moe.topk_scaling_factor", "routed_scaling_factor", 2.827),
        keys.Key("moe.activation_clamp", "swiglu_limit", 10.0),
        keys.Key("dsa.n_heads", "index_n_heads", 16),
        *deepseek_keys.INDEXER,
        keys.always("dsa.rope_interleaved", True),
        keys.Rule(
            ("layer_types", "indexer_types"),
            _read_layers,
            lambda model: {"layer_types": [_SPARSE] * model.num_layers, **write_indexers(model)},
        ),
        keys.only("gated_mla", True),
        keys.only("gating_type", "elementwise", "linear_gate", "sigmoid per element"),
        keys.only("learnable_sink", True, "softmax_offset", True),
        keys.only("enable_ihc", True),
        keys.Key("mhc.num_residual_streams", "hc_mult", 4),
        keys.always("mhc.mhc_sinkhorn_iterations", None),
        keys.Key("mhc.magnitude", "hc_magnitude", 2.0),
        keys.Key("mhc.epsilon", "hc_eps", 1e-6),
        keys.Key("norm_epsilon", "rms_norm_eps", 1e-5),
        rope(),
        keys.Key("mtp_num_layers", "num_nextn_predict_layers", 0),
        keys.tied(False),
    ),
    names_by="this project",
    otherwise_in_transformers="transformers 5.24 turns halves of Hunyuan 4's rotary channels; vLLM, SGLang and "
    "`resume` turn pairs of neighbours, as the published weights were trained.",
)
