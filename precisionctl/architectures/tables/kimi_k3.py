"""Kimi K3's text model: Kimi delta attention whose gates are projected in one step, latent attention without positions
and with gates, experts of a latent size whose sum is normalised, SiTU, and attention residuals. Names in Megatron are
those of Megatron-Bridge's modules (models/kimi/kimi_k3_layers.py, kimi_k3_bridge.py).

Traps: published is the wrapper alone, whose config.json calls this model `kimi_linear`. Numbers of layers count from 1.
A_log is filled up with zeros, of 96 heads to 128. Bridge has the weights of the last mean in the last layer. SiTU's two
bounds are constants of Bridge.
"""

from collections.abc import Mapping
from typing import Any

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.param_map import Architecture, Either, Row
from precisionctl.architectures.rearrangements import GAMMA, SAME, Padded, Rearrangement
from precisionctl.architectures.row_layers import Layers
from precisionctl.architectures.shared import deepseek_keys, deepseek_rows, llama_rows as llama
from precisionctl.architectures.shared.kda_keys import LISTS, checked, layer_lists, read_sizes, shared_out, write_sizes
from precisionctl.architectures.tables.kimi_linear import EXPERTS
from precisionctl.errors import UnknownArchitecture, shown
from precisionctl.model.model_parts import check_negative
from precisionctl.model.model_shape import ModelShape
from precisionctl.param import COLUMNS, REPLICATED, ROWS, Parallel


def _layer_row(name: str, sizes: tuple[str | int, ...], rearrangement: Rearrangement = SAME) -> Row:
    return Row(f"model.layers.{{layer}}.{name}", f"decoder.layers.{{layer}}.{name}", sizes, rearrangement)


def _linear(
    layers: Layers, name: str, rows: str, columns: str, parallel: Parallel = REPLICATED, gemm: bool = True
) -> Row:
    """Of attention, which exports leave as it is, as it is in the released codes."""
    hf = f"model.layers.{{layer}}.self_attn.{name}_proj.weight"
    megatron = f"decoder.layers.{{layer}}.self_attention.{name}_proj.weight"
    return Row(hf, megatron, (rows, columns), parallel=parallel, layers=layers, gemm=gemm, values=(hf,))


def _other(
    layers: Layers,
    name: str,
    sizes: tuple[str | int, ...],
    rearrangement: Rearrangement = SAME,
    parallel: Parallel = REPLICATED,
    *,
    wide: bool = False,
) -> Row:
    """`wide`: FP32 as released."""
    hf, megatron = f"model.layers.{{layer}}.self_attn.{name}", f"decoder.layers.{{layer}}.self_attention.{name}"
    return Row(hf, megatron, sizes, rearrangement, parallel, layers=layers, keeps_dtype=wide)


_DELTA_ATTENTION = (
    _linear("gdn", "q", "gdn.key_size", "hidden_size", ROWS),
    _linear("gdn", "k", "gdn.key_size", "hidden_size", ROWS),
    _linear("gdn", "v", "gdn.value_size", "hidden_size", ROWS),
    _linear("gdn", "f_a", "gdn.kda_lora_rank", "hidden_size"),
    _linear("gdn", "f_b", "gdn.key_size", "gdn.kda_lora_rank", ROWS),
    _linear("gdn", "b", "gdn.num_value_heads", "hidden_size", ROWS, gemm=False),
    _linear("gdn", "g", "gdn.value_size", "hidden_size", ROWS),
    *(
        _other("gdn", f"{part}_conv1d.weight", (rows, 1, "gdn.conv_kernel_dim"), SAME, ROWS, wide=True)
        for part, rows in (("q", "gdn.key_size"), ("k", "gdn.key_size"), ("v", "gdn.value_size"))
    ),
    _other("gdn", "A_log", ("gdn.num_value_heads",), Padded("gdn.num_value_heads", 128), ROWS, wide=True),
    _other("gdn", "dt_bias", ("gdn.key_size",), SAME, ROWS, wide=True),
    _other("gdn", "o_norm.weight", ("gdn.value_head_dim",), GAMMA, wide=True),
    _linear("gdn", "o", "hidden_size", "gdn.value_size", COLUMNS),
)
_KV_DOWN = "kv_a_proj_with_mqa.weight"
_LATENT_ATTENTION = (
    _linear("attention", "q_a", "mla.q_lora_rank", "hidden_size"),
    _other("attention", "q_a_layernorm.weight", ("mla.q_lora_rank",), GAMMA),
    _linear("attention", "q_b", "query_size", "mla.q_lora_rank", ROWS),
    _linear("attention", "kv_a", "kv_down_size", "hidden_size").renamed(
        {"kv_a_proj.weight": _KV_DOWN}, {"kv_a_proj.weight": _KV_DOWN}
    ),
    _other("attention", "kv_a_layernorm.weight", ("mla.kv_lora_rank",), GAMMA),
    _linear("attention", "kv_b", "key_value_size", "mla.kv_lora_rank", ROWS),
    _linear("attention", "g", "gate_size", "hidden_size", ROWS),
    _linear("attention", "o", "hidden_size", "projection_size", COLUMNS),
)
_RESIDUALS = tuple(
    row
    for block in ("self_attention", "mlp")
    for row in (
        _layer_row(f"{block}_res_norm.weight", ("hidden_size",), GAMMA),
        _layer_row(f"{block}_res_proj.weight", (1, "hidden_size")),
    )
)
_MLP_NORM = _layer_row("post_attention_layernorm.weight", ("hidden_size",), GAMMA).renamed(
    {}, {"post_attention_layernorm": "pre_mlp_layernorm"}
)
_ROUTING: tuple[Row | Either, ...] = tuple(
    each.renamed({".mlp.": ".block_sparse_moe."}) for each in deepseek_rows.ROUTING
)
_MOE_HF, _MOE = "model.layers.{layer}.block_sparse_moe.routed_expert_", "decoder.layers.{layer}.mlp."
_LATENTS = (
    Row(
        f"{_MOE_HF}down_proj.weight",
        f"{_MOE}fc1_latent_proj.weight",
        ("moe.latent_size", "hidden_size"),
        layers="moe",
        gemm=True,
        values=(f"{_MOE_HF}down_proj.weight",),
    ),
    Row(f"{_MOE_HF}norm.weight", f"{_MOE}routed_expert_norm.weight", ("moe.latent_size",), GAMMA, layers="moe"),
    Row(
        f"{_MOE_HF}up_proj.weight",
        f"{_MOE}fc2_latent_proj.weight",
        ("hidden_size", "moe.latent_size"),
        layers="moe",
        gemm=True,
        values=(f"{_MOE_HF}up_proj.weight",),
    ),
)
"""Around routed experts, which vLLM and SGLang compute in BF16 whatever the codes are."""


def _of_last_layer(model: ModelShape) -> tuple[Row, ...]:
    """What the last norm reads is made by the last layer."""
    last = f"decoder.layers.{model.num_layers - 1}."
    return (
        Row("model.output_attn_res_norm.weight", f"{last}output_attn_res_norm.weight", ("hidden_size",), GAMMA),
        Row("model.output_attn_res_proj.weight", f"{last}output_attn_res_proj.weight", (1, "hidden_size")),
    )


_SAID: Mapping[str, Any] = {
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "latent_moe_use_norm": True,
}
"""What its class takes otherwise where it is not said."""


def _read_said(config: keys.Config) -> keys.Fields:
    for key, known in _SAID.items():
        if config.get(key) != known:
            what = f"no kimi_k3 known here has {key}={shown(config.get(key))}"
            raise UnknownArchitecture(what, do=f"Its table was made for {key}={known!r}.")
    return {"activation": "situ", "linear_gate": "sigmoid per element", "moe.latent_norm": True}


_BOUND, _FULL_GATE = "gate_lower_bound", "use_full_rank_gate"


def _read_kda(config: keys.Config) -> keys.Fields:
    said = checked(config.get("linear_attn_config"), "kimi_k3", _BOUND, _FULL_GATE)
    strange = [key for key in (_BOUND, *LISTS) if said.get(key) is None]
    strange += [_FULL_GATE] if said.get(_FULL_GATE) is not True else []
    for key in strange:
        what = f"no kimi_k3 known here has linear_attn_config.{key}={shown(said.get(key))}"
        raise UnknownArchitecture(what)
    check_negative(said[_BOUND], _BOUND)
    return {
        **read_sizes(said, {}, {}),
        "gdn.layers": tuple(shared_out(said, keys.layers(config))),
        "gdn.kda_full_gate": True,
        "gdn.kda_lower_bound": said[_BOUND],
    }


def _write_kda(model: ModelShape) -> keys.Config:
    if model.gdn is None:
        return {}
    said = {**write_sizes(model.gdn), _BOUND: model.gdn.kda_lower_bound, _FULL_GATE: True}
    return {"linear_attn_config": {**said, **layer_lists(model)}}


_ATTENTION: tuple[keys.Entry, ...] = tuple(
    entry
    for entry in deepseek_keys.latent_attention(None)
    if entry is not keys.SILU and "q_lora_rank" not in entry.keys
)

ARCHITECTURE = Architecture(
    model_types={"kimi_k3_text": "KimiLinearForCausalLM"},
    rows=llama.model_rows(
        *llama.SEPARATE_NORM,
        *_DELTA_ATTENTION,
        *_LATENT_ATTENTION,
        *_RESIDUALS,
        _MLP_NORM,
        *llama.MLP,
        *_ROUTING,
        *_LATENTS,
        *EXPERTS,
    ),
    more_rows=_of_last_layer,
    config=(
        *_ATTENTION,
        keys.Key("mla.q_lora_rank", "q_lora_rank"),
        keys.Rule(tuple(_SAID), _read_said, lambda model: dict(_SAID)),
        keys.Rule(("linear_attn_config",), _read_kda, _write_kda),
        keys.in_all_layers("rope_layers", False),
        keys.Key("attn_res_block_size", "attn_res_block_size"),
        keys.Key("moe.num_experts", "num_experts"),
        keys.Key("moe.topk", "num_experts_per_token"),
        keys.Key("moe.ffn_hidden_size", "moe_intermediate_size"),
        keys.Key("moe.latent_size", "routed_expert_hidden_size"),
        deepseek_keys.shared_experts("num_shared_experts", 0),
        deepseek_keys.experts_by_list(dense=0, key="first_k_dense_replace"),
        keys.Reworded(deepseek_keys.groups(1, 1), {"n_group": "num_expert_group"}, published=True),
        keys.only("moe_router_activation_func", "sigmoid", "moe.score_function", "sigmoid"),
        keys.only("topk_method", "noaux_tc", "moe.expert_bias", True),
        keys.only("moe_renormalize", True),
        keys.only("moe_layer_freq", 1),
        keys.only("use_grouped_topk", True),
        keys.only("num_nextn_predict_layers", 0),
        keys.Key("moe.topk_scaling_factor", "routed_scaling_factor", 1.0),
        keys.Key("norm_epsilon", "rms_norm_eps", 1e-6),
        keys.only("tie_word_embeddings", False),
    ),
    aliases=(),
    names_by="Megatron-Bridge",
    heeds_latents_epsilon=True,
)
