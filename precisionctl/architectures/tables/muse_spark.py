"""Muse Spark (text): Muse Glimmer with experts behind latents, a norm of what each head gives, and gates between blocks
and the residual stream.

Traps: the norm of what attention gives has no weight, and those of what an MLP or an expert gives multiply by their
weight before they normalise. One norm is for all experts of a layer, each by itself. `output_multiplier` multiplies the
logits of routers too. Routers, their biases and the gates are FP32 in memory. Published is the wrapper alone, and of a
text model by itself transformers has no class.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture, Row, as_values, renamed
from precisionctl.architectures.rearrangements import GAMMA
from precisionctl.architectures.rope import rope
from precisionctl.architectures.shared import deepseek_keys, llama_rows as llama, moe_rows as moe
from precisionctl.architectures.tables.afmoe import GATED_QKV
from precisionctl.architectures.tables.muse_glimmer import FINAL_NORM, OF_ALL_MUSES, positions, query_scale
from precisionctl.architectures.tables.nemotron_h import LATENTS
from precisionctl.model.model_parts import real

_GATES = tuple(
    Row(
        f"model.layers.{{layer}}.{gate}.gate",
        f"decoder.layers.{{layer}}.{gate}.gate",
        ("hidden_size",),
        keeps_dtype=True,
    )
    for gate in ("post_attention_residual_gate", "post_feedforward_residual_gate")
)


_LATENTS = (
    *as_values(renamed(LATENTS, {"mixer.fc1_latent": "mlp.pre_expert", "mixer.fc2_latent": "mlp.post_expert"})),
    *(
        Row(
            f"model.layers.{{layer}}.mlp.{hf}.weight",
            f"decoder.layers.{{layer}}.mlp.{megatron}.weight",
            ("moe.latent_size",),
            GAMMA,
            layers="moe",
        )
        for hf, megatron in {
            "pre_expert_norm": "pre_expert_layernorm",
            "experts.post_expert_norm": "post_expert_layernorm",
        }.items()
    ),
)

_EXPERTS = as_values(moe.FUSED)
"""As published, in one tensor. Of what engines load in its place only ModelOpt's NVFP4 is known (vLLM's muse_spark)."""

_OUTPUT_MULTIPLIER = 0.1767766952966369
_HEADS = keys.heads(num_key_value_heads=16, head_dim=64)

ARCHITECTURE = Architecture(
    model_types={"muse_spark_text": "MuseSparkForCausalLM"},
    rows=llama.model_rows(
        *llama.ATTENTION_NORM,
        GATED_QKV,
        *llama.PROJ,
        *_GATES,
        *llama.PRE_MLP_NORM,
        *llama.MLP,
        *llama.POST_MLP_NORM,
        *renamed(moe.MOE_NORM, {"post_attention_layernorm": "pre_feedforward_layernorm"}),
        *moe.WIDE_ROUTER,
        *moe.EXPERT_BIAS,
        *_LATENTS,
        *_EXPERTS,
        *moe.POST_MOE_NORM,
        ending=FINAL_NORM,
    ),
    config=(
        *OF_ALL_MUSES,
        _HEADS,
        keys.SILU,
        query_scale(5.4730064863875, _HEADS),
        keys.Rule(
            ("output_multiplier",),
            lambda config: dict.fromkeys(
                ("logit_multiplier", "moe.logit_multiplier"),
                real(config.get("output_multiplier", _OUTPUT_MULTIPLIER), "output_multiplier"),
            ),
            lambda model: {"output_multiplier": model.logit_multiplier},
        ),
        positions(rope(scaling={"rope_type": "default", "rope_theta": 500000.0})),
        keys.always("attention_output_norm", True),
        keys.always("scaled_post_layernorms", True),
        keys.Key("residual_gate_temperature", "residual_gate_temperature", 0.3),
        deepseek_keys.experts_by_list(dense=0),
        keys.Key("moe.num_experts", "num_local_experts", 256),
        keys.Key("moe.topk", "num_experts_per_tok", 8),
        keys.Key("moe.ffn_hidden_size", "moe_intermediate_size", 4096),
        keys.Key("moe.latent_size", "moe_hidden_size", 4096),
        keys.only("num_shared_experts", 0),
        keys.always("moe.expert_norms", True),
        keys.always("moe.score_function", "sigmoid"),
        keys.always("moe.expert_bias", True),
        keys.Key("moe.topk_scaling_factor", "routed_scaling_factor", 1.0),
    ),
    names_by="this project",
)
