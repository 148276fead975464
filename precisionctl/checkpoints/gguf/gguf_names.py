"""GGUF's tensors and Hugging Face's: one table by family, for reading and for writing.

Sources: llama.cpp's converter (conversion/*.py, gguf-py/gguf/tensor_mapping.py) of llama-cpp-python 0.3.36.
"""

from collections.abc import Mapping

from precisionctl.checkpoints.gguf.changes import GATE_THEN_UP, GATE_UP_IN_TURNS, LATENT_KEYS_VALUES, PLUS_ONE
from precisionctl.checkpoints.gguf.gguf_rows import (
    ATTENTION,
    ATTENTION_IN_PAIRS,
    EXPERT_BIAS,
    EXPERTS,
    FOUR_NORMS,
    GATED,
    JOINED_MLP,
    MLP,
    NORMS,
    NORMS_BEHIND,
    NORMS_BY_PLACE,
    QK_NORMS,
    ROUTER,
    SHARED_EXPERT,
    SHARED_EXPERT_GATE,
    SHARED_EXPERTS,
    GgufFamily,
    GgufRow,
    experts,
    in_layers,
    linears,
    outside_layers,
    stack,
)
from precisionctl.checkpoints.gguf.recurrent_names import (
    JOINED_GATED_MLP,
    JOINED_SHARED_EXPERT,
    OF_GRANITE_HYBRID,
    OF_LFM2,
    OF_LFM2_MOE,
    OF_NEMOTRON_H,
    OF_QWEN3_5,
    OF_QWEN3_5_MOE,
    OF_QWEN3_NEXT,
)

_OF_LLAMA = [*outside_layers(), *in_layers(NORMS), *ATTENTION_IN_PAIRS]
_OF_QWEN = [*outside_layers(), *in_layers(NORMS), *ATTENTION]
_OF_GEMMA = [*outside_layers(PLUS_ONE), *ATTENTION, *MLP]

_OF_MIXTRAL = [
    *in_layers({"block_sparse_moe.gate": "ffn_gate_inp"}),
    *experts("block_sparse_moe.experts", {"w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps"}),
]
_OF_GRANITE_MOE = [
    *in_layers({"block_sparse_moe.router.layer": "ffn_gate_inp"}),
    GgufRow(
        "model.layers.{layer}.block_sparse_moe.input_linear.weight[{expert}]",
        (stack("ffn_gate_exps"), stack("ffn_up_exps")),
        GATE_THEN_UP,
    ),
    GgufRow("model.layers.{layer}.block_sparse_moe.output_linear.weight[{expert}]", (stack("ffn_down_exps"),)),
]
_OF_GPT_OSS = [
    *outside_layers(),
    *in_layers(NORMS_BY_PLACE),
    *ATTENTION,
    GgufRow("model.layers.{layer}.self_attn.sinks", ("blk.{layer}.attn_sinks.weight",)),
    *linears({"mlp.router": "ffn_gate_inp"}),
    *(
        row
        for hf, end in {"_blocks": "weight", "_bias": "bias"}.items()
        for row in (
            GgufRow(
                f"model.layers.{{layer}}.mlp.experts.gate_up_proj{hf}[{{expert}}]",
                (stack("ffn_gate_exps", end), stack("ffn_up_exps", end)),
                GATE_UP_IN_TURNS,
            ),
            GgufRow(
                f"model.layers.{{layer}}.mlp.experts.down_proj{hf}[{{expert}}]",
                (stack("ffn_down_exps", end),),
            ),
        )
    ),
]
"""Its experts are `[out, in]` in GGUF, and so under the names that their codes have."""

_PREDICTION = in_layers(
    {
        "enorm": "nextn.enorm",
        "hnorm": "nextn.hnorm",
        "eh_proj": "nextn.eh_proj",
        "embed_tokens": "nextn.embed_tokens",
        "shared_head.norm": "nextn.shared_head_norm",
        "shared_head.head": "nextn.shared_head_head",
    }
)
_OF_DEEPSEEK = [
    *outside_layers(),
    *in_layers(
        {
            **NORMS,
            "self_attn.q_proj": "attn_q",
            "self_attn.q_a_proj": "attn_q_a",
            "self_attn.q_a_layernorm": "attn_q_a_norm",
            "self_attn.q_b_proj": "attn_q_b",
            "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
            "self_attn.kv_a_layernorm": "attn_kv_a_norm",
            "self_attn.o_proj": "attn_output",
        }
    ),
    GgufRow(
        "model.layers.{layer}.self_attn.kv_b_proj.weight",
        ("blk.{layer}.attn_k_b.weight", "blk.{layer}.attn_v_b.weight"),
        LATENT_KEYS_VALUES,
    ),
    *MLP,
    *ROUTER,
    EXPERT_BIAS,
    *EXPERTS,
    *SHARED_EXPERTS,
    *_PREDICTION,
]
_OF_GLM4_MOE = [
    *outside_layers(),
    *in_layers({**NORMS_BY_PLACE, **QK_NORMS}),
    *ATTENTION,
    *MLP,
    *ROUTER,
    EXPERT_BIAS,
    *EXPERTS,
    *SHARED_EXPERTS,
    *_PREDICTION,
]
_OF_GEMMA4 = [
    *outside_layers(),
    GgufRow("model.embed_tokens_per_layer.weight", ("per_layer_token_embd.weight",)),
    GgufRow("model.per_layer_model_projection.weight", ("per_layer_model_proj.weight",)),
    GgufRow("model.per_layer_projection_norm.weight", ("per_layer_proj_norm.weight",)),
    *ATTENTION,
    *MLP,
    *in_layers(
        {
            **FOUR_NORMS,
            **QK_NORMS,
            "per_layer_input_gate": "inp_gate",
            "per_layer_projection": "proj",
            "post_per_layer_input_norm": "post_norm",
            "post_feedforward_layernorm_1": "post_ffw_norm_1",
            "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
            "post_feedforward_layernorm_2": "post_ffw_norm_2",
            "router.proj": "ffn_gate_inp",
        }
    ),
    GgufRow("model.layers.{layer}.layer_scalar", ("blk.{layer}.layer_output_scale.weight",)),
    GgufRow("model.layers.{layer}.router.scale", ("blk.{layer}.ffn_gate_inp.scale",)),
    GgufRow("model.layers.{layer}.router.per_expert_scale", ("blk.{layer}.ffn_down_exps.scale",)),
    GgufRow("model.layers.{layer}.experts.gate_up_proj[{expert}]", (stack("ffn_gate_up_exps"),)),
    GgufRow("model.layers.{layer}.experts.down_proj[{expert}]", (stack("ffn_down_exps"),)),
]
_OF_LLAMA4 = [
    *_OF_QWEN,
    *in_layers({f"feed_forward.{hf}": gguf for hf, gguf in GATED.items()}),
    *in_layers({f"feed_forward.shared_expert.{hf}": f"{gguf}_shexp" for hf, gguf in GATED.items()}),
    *in_layers({"feed_forward.router": "ffn_gate_inp"}),
    *experts("feed_forward.experts", {hf: f"{gguf}_exps" for hf, gguf in GATED.items()}),
]
"""Its experts are `[out, in]` in GGUF, and so under the names that their codes have, one by one."""
_OF_DSA = [
    *_OF_DEEPSEEK,
    *linears({"self_attn.indexer.k_norm": "indexer.k_norm"}),
    *in_layers(
        {
            "self_attn.indexer.weights_proj": "indexer.proj",
            "self_attn.indexer.wk": "indexer.attn_k",
            "self_attn.indexer.wq_b": "indexer.attn_q_b",
        }
    ),
]
_OF_AFMOE = [
    *outside_layers(),
    *ATTENTION,
    *MLP,
    *in_layers(
        {
            **NORMS_BY_PLACE,
            **QK_NORMS,
            "pre_mlp_layernorm": "ffn_norm",
            "post_mlp_layernorm": "post_ffw_norm",
            "self_attn.gate_proj": "attn_gate",
            "mlp.router.gate": "ffn_gate_inp",
        }
    ),
    *EXPERTS,
    *SHARED_EXPERTS,
    GgufRow("model.layers.{layer}.mlp.expert_bias", ("blk.{layer}.exp_probs_b.bias",)),
]
_GLM4_NORMS = {
    **NORMS,
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
}
_HUNYUAN_NORMS = {
    **NORMS,
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
}
_OF_HUNYUAN_MOE = [
    *in_layers({"mlp.gate.wg": "ffn_gate_inp"}),
    *in_layers({f"mlp.shared_mlp.{hf}": f"{gguf}_shexp" for hf, gguf in GATED.items()}),
    *EXPERTS,
]
_CORRECTION_OF_ERNIE = "model.layers.{layer}.mlp.moe_statics.e_score_correction_bias"
_CORRECTION_OF_MINIMAX = "model.layers.{layer}.block_sparse_moe.e_score_correction_bias"
_CORRECTION = ("blk.{layer}.exp_probs_b.bias",)


_WITH_EXPERTS = {
    "nemotron_h": GgufFamily("nemotron_h_moe", tuple(OF_NEMOTRON_H)),
    "granitemoehybrid": GgufFamily("granitehybrid", (*OF_GRANITE_HYBRID, *JOINED_SHARED_EXPERT, *_OF_GRANITE_MOE)),
}

FAMILIES: Mapping[str, GgufFamily] = {
    model_type: GgufFamily(architecture, tuple(rows), _WITH_EXPERTS.get(model_type))
    for model_type, architecture, rows in (
        ("llama", "llama", [*_OF_LLAMA, *MLP]),
        ("mistral", "llama", [*_OF_LLAMA, *MLP]),
        ("mixtral", "llama", [*_OF_LLAMA, *_OF_MIXTRAL]),
        ("granite", "granite", [*_OF_LLAMA, *MLP]),
        ("granitemoe", "granitemoe", [*_OF_LLAMA, *_OF_GRANITE_MOE]),
        ("smollm3", "smollm3", [*_OF_LLAMA, *MLP]),
        ("qwen2", "qwen2", [*_OF_QWEN, *MLP]),
        ("qwen2_moe", "qwen2moe", [*_OF_QWEN, *ROUTER, *EXPERTS, *SHARED_EXPERT, *SHARED_EXPERT_GATE]),
        ("qwen3", "qwen3", [*_OF_QWEN, *in_layers(QK_NORMS), *MLP]),
        ("qwen3_moe", "qwen3moe", [*_OF_QWEN, *in_layers(QK_NORMS), *ROUTER, *EXPERTS]),
        ("qwen3_next", "qwen3next", OF_QWEN3_NEXT),
        ("qwen3_5_text", "qwen35", OF_QWEN3_5),
        ("qwen3_5_moe_text", "qwen35moe", OF_QWEN3_5_MOE),
        ("gemma", "gemma", [*_OF_GEMMA, *in_layers(NORMS, PLUS_ONE)]),
        ("gemma2", "gemma2", [*_OF_GEMMA, *in_layers(FOUR_NORMS, PLUS_ONE)]),
        ("gemma3_text", "gemma3", [*_OF_GEMMA, *in_layers({**FOUR_NORMS, **QK_NORMS}, PLUS_ONE)]),
        ("gemma4_text", "gemma4", _OF_GEMMA4),
        (
            "phi3",
            "phi3",
            [
                *outside_layers(),
                *in_layers(NORMS),
                *linears({"self_attn.qkv_proj": "attn_qkv", "self_attn.o_proj": "attn_output"}),
                *JOINED_MLP,
            ],
        ),
        ("olmo2", "olmo2", [*outside_layers(), *in_layers({**NORMS_BEHIND, **QK_NORMS}), *ATTENTION, *MLP]),
        ("olmo3", "olmo2", [*outside_layers(), *in_layers({**NORMS_BEHIND, **QK_NORMS}), *ATTENTION, *MLP]),
        ("gpt_oss", "gpt-oss", _OF_GPT_OSS),
        ("deepseek_v2", "deepseek2", _OF_DEEPSEEK),
        ("deepseek_v3", "deepseek2", _OF_DEEPSEEK),
        ("glm4_moe", "glm4moe", _OF_GLM4_MOE),
        ("glm4_moe_lite", "deepseek2", _OF_DEEPSEEK),
        ("ministral3", "mistral3", [*_OF_LLAMA, *MLP]),
        (
            "minimax_m2",
            "minimax-m2",
            [*_OF_QWEN, *in_layers(QK_NORMS), *_OF_MIXTRAL, GgufRow(_CORRECTION_OF_MINIMAX, _CORRECTION)],
        ),
        ("llama4_text", "llama4", _OF_LLAMA4),
        ("deepseek_v32", "deepseek32", _OF_DSA),
        ("glm_moe_dsa", "glm-dsa", _OF_DSA),
        ("nemotron_h", "nemotron_h", OF_NEMOTRON_H),
        ("granitemoehybrid", "granitehybrid", [*OF_GRANITE_HYBRID, *JOINED_GATED_MLP]),
        ("lfm2", "lfm2", OF_LFM2),
        ("lfm2_moe", "lfm2moe", OF_LFM2_MOE),
        ("seed_oss", "seed_oss", [*outside_layers(), *in_layers(NORMS_BY_PLACE), *ATTENTION, *MLP]),
        ("ernie4_5", "ernie4_5", [*_OF_QWEN, *MLP]),
        (
            "ernie4_5_moe",
            "ernie4_5-moe",
            [*_OF_QWEN, *MLP, *ROUTER, *EXPERTS, *SHARED_EXPERTS, GgufRow(_CORRECTION_OF_ERNIE, _CORRECTION)],
        ),
        ("exaone4", "exaone4", [*outside_layers(), *in_layers({**NORMS_BEHIND, **QK_NORMS}), *ATTENTION, *MLP]),
        ("olmoe", "olmoe", [*_OF_QWEN, *in_layers(QK_NORMS), *ROUTER, *EXPERTS]),
        ("cohere", "command-r", [*outside_layers(), *in_layers({"input_layernorm": "attn_norm"}), *ATTENTION, *MLP]),
        ("cohere2", "cohere2", [*outside_layers(), *in_layers({"input_layernorm": "attn_norm"}), *ATTENTION, *MLP]),
        ("glm4", "glm4", [*outside_layers(), *in_layers(_GLM4_NORMS), *ATTENTION, *JOINED_MLP]),
        (
            "starcoder2",
            "starcoder2",
            [
                *outside_layers(),
                GgufRow("model.norm.bias", ("output_norm.bias",)),
                *linears({**NORMS, "mlp.c_fc": "ffn_up", "mlp.c_proj": "ffn_down"}),
                *ATTENTION,
            ],
        ),
        ("afmoe", "afmoe", _OF_AFMOE),
        ("hunyuan_v1_dense", "hunyuan-dense", [*outside_layers(), *in_layers(_HUNYUAN_NORMS), *ATTENTION, *MLP]),
        (
            "hunyuan_v1_moe",
            "hunyuan-moe",
            [*outside_layers(), *in_layers(_HUNYUAN_NORMS), *ATTENTION, *_OF_HUNYUAN_MOE],
        ),
    )
}
"""By the `model_type` of a config.json. Several may have one `general.architecture`."""
