"""GGUF's tensors of families in whose layers a state passes from token to token: gated delta nets, short convolutions,
Mamba-2 mixers.

Sources: llama.cpp's converter (conversion/qwen.py, lfm2.py, granite.py, nemotron.py) of llama-cpp-python 0.3.36.
"""

from dataclasses import replace

from precisionctl.checkpoints.gguf.changes import (
    DECAY,
    DELTA_NET,
    DELTA_NET_INPUT,
    DELTA_NET_OUTPUT,
    GATE_THEN_UP,
    GROUPED_NORM,
    KERNEL,
    KEY_PAIRS,
    PLUS_ONE,
    QUERY_PAIRS,
    VALUE_HEADS,
    VECTOR_AS_COLUMN,
    Both,
    GgufChange,
)
from precisionctl.checkpoints.gguf.gguf_rows import (
    ATTENTION,
    ATTENTION_IN_PAIRS,
    EXPERTS,
    MLP,
    NORMS,
    NORMS_BY_PLACE,
    QK_NORMS,
    ROUTER,
    SHARED_EXPERT,
    SHARED_EXPERT_GATE,
    GgufRow,
    experts,
    in_layers,
    in_prediction,
    outside_layers,
)

_SPARSE = [*ROUTER, *EXPERTS, *SHARED_EXPERT, *SHARED_EXPERT_GATE]


def _with_delta_nets(block: list[GgufRow], delta_net: list[GgufRow]) -> list[GgufRow]:
    """Layers with attention and layers with a gated delta net; `block` are the rows of a layer's MLP, which the layer
    of multi-token prediction has too."""
    attention = [*in_layers({**NORMS_BY_PLACE, **QK_NORMS}, PLUS_ONE), *ATTENTION, *block]
    return [
        *outside_layers(PLUS_ONE),
        *attention,
        *delta_net,
        *in_layers({"linear_attn.norm": "ssm_norm"}),
        *in_prediction(attention),
        GgufRow("mtp.fc.weight", ("blk.{mtp_layer}.nextn.eh_proj.weight",)),
        GgufRow("mtp.pre_fc_norm_embedding.weight", ("blk.{mtp_layer}.nextn.enorm.weight",), PLUS_ONE),
        GgufRow("mtp.pre_fc_norm_hidden.weight", ("blk.{mtp_layer}.nextn.hnorm.weight",), PLUS_ONE),
        GgufRow("mtp.norm.weight", ("blk.{mtp_layer}.nextn.shared_head_norm.weight",), PLUS_ONE),
    ]


def _in_layer(hf: str, gguf: str, change: GgufChange) -> GgufRow:
    return GgufRow(f"model.layers.{{layer}}.{hf}", (f"blk.{{layer}}.{gguf}",), change)


OF_QWEN3_NEXT = _with_delta_nets(
    _SPARSE,
    [
        GgufRow(
            "model.layers.{layer}.linear_attn.in_proj_qkvz.weight",
            ("blk.{layer}.attn_qkv.weight", "blk.{layer}.attn_gate.weight"),
            DELTA_NET,
        ),
        *in_layers({"linear_attn.in_proj_ba": "ssm_ba", "linear_attn.out_proj": "ssm_out"}),
        *in_layers({"linear_attn.conv1d": "ssm_conv1d"}, KERNEL),
        GgufRow("model.layers.{layer}.linear_attn.dt_bias", ("blk.{layer}.ssm_dt.bias",)),
        _in_layer("linear_attn.A_log", "ssm_a", DECAY),
    ],
)
_DELTA_NET_OF_QWEN3_5 = [
    *in_layers({"linear_attn.in_proj_qkv": "attn_qkv"}, DELTA_NET_INPUT),
    *in_layers(
        {
            "linear_attn.in_proj_z": "attn_gate",
            "linear_attn.in_proj_b": "ssm_beta",
            "linear_attn.in_proj_a": "ssm_alpha",
        },
        VALUE_HEADS,
    ),
    *in_layers({"linear_attn.out_proj": "ssm_out"}, DELTA_NET_OUTPUT),
    *in_layers({"linear_attn.conv1d": "ssm_conv1d"}, Both(KERNEL, DELTA_NET_INPUT)),
    _in_layer("linear_attn.dt_bias", "ssm_dt.bias", VALUE_HEADS),
    _in_layer("linear_attn.A_log", "ssm_a", Both(DECAY, VALUE_HEADS)),
]
OF_QWEN3_5 = _with_delta_nets(MLP, _DELTA_NET_OF_QWEN3_5)
OF_QWEN3_5_MOE = _with_delta_nets(_SPARSE, _DELTA_NET_OF_QWEN3_5)

_W123 = {"w1": "ffn_gate", "w3": "ffn_up", "w2": "ffn_down"}
OF_LFM2 = [
    *outside_layers()[::2],
    GgufRow("model.embedding_norm.weight", ("token_embd_norm.weight",)),
    *in_layers(
        {
            "operator_norm": "attn_norm",
            "ffn_norm": "ffn_norm",
            "conv.in_proj": "shortconv.in_proj",
            "conv.out_proj": "shortconv.out_proj",
            "self_attn.q_proj": "attn_q",
            "self_attn.k_proj": "attn_k",
            "self_attn.v_proj": "attn_v",
            "self_attn.out_proj": "attn_output",
            "self_attn.q_layernorm": "attn_q_norm",
            "self_attn.k_layernorm": "attn_k_norm",
            **{f"feed_forward.{hf}": gguf for hf, gguf in _W123.items()},
        }
    ),
    *in_layers({"conv.conv": "shortconv.conv"}, KERNEL),
]
OF_LFM2_MOE = [
    *OF_LFM2,
    *in_layers({"feed_forward.gate": "ffn_gate_inp"}),
    *experts("feed_forward.experts", {hf: f"{gguf}_exps" for hf, gguf in _W123.items()}),
    GgufRow("model.layers.{layer}.feed_forward.expert_bias", ("blk.{layer}.exp_probs_b.bias",)),
]

_UNGATED = {"up_proj": "ffn_up", "down_proj": "ffn_down"}


def _mixer(module: str) -> list[GgufRow]:
    """A Mamba-2 mixer."""
    return [
        *in_layers({f"{module}.in_proj": "ssm_in", f"{module}.out_proj": "ssm_out"}),
        *in_layers({f"{module}.norm": "ssm_norm"}, GROUPED_NORM),
        *in_layers({f"{module}.conv1d": "ssm_conv1d"}, KERNEL),
        GgufRow(f"model.layers.{{layer}}.{module}.conv1d.bias", ("blk.{layer}.ssm_conv1d.bias",)),
        GgufRow(f"model.layers.{{layer}}.{module}.dt_bias", ("blk.{layer}.ssm_dt.bias",)),
        _in_layer(f"{module}.A_log", "ssm_a", Both(DECAY, VECTOR_AS_COLUMN)),
        _in_layer(f"{module}.D", "ssm_d", VECTOR_AS_COLUMN),
    ]


OF_NEMOTRON_H = [
    replace(row, hf=row.hf.replace("model.", "backbone.", 1))
    for row in (
        GgufRow("model.embeddings.weight", ("token_embd.weight",)),
        GgufRow("model.norm_f.weight", ("output_norm.weight",)),
        GgufRow("lm_head.weight", ("output.weight",)),
        *_mixer("mixer"),
        *in_layers({"mixer.q_proj": "attn_q"}, QUERY_PAIRS),
        *in_layers({"mixer.k_proj": "attn_k"}, KEY_PAIRS),
        *in_layers(
            {
                "norm": "attn_norm",
                "mixer.v_proj": "attn_v",
                "mixer.o_proj": "attn_output",
                "mixer.gate": "ffn_gate_inp",
                "mixer.fc1_latent_proj": "ffn_latent_down",
                "mixer.fc2_latent_proj": "ffn_latent_up",
                **{f"mixer.{hf}": gguf for hf, gguf in _UNGATED.items()},
                **{f"mixer.shared_experts.{hf}": f"{gguf}_shexp" for hf, gguf in _UNGATED.items()},
            }
        ),
        *experts("mixer.experts", {hf: f"{gguf}_exps" for hf, gguf in _UNGATED.items()}),
        GgufRow("model.layers.{layer}.mixer.gate.e_score_correction_bias", ("blk.{layer}.exp_probs_b.bias",)),
    )
]


def _joined(kind: str) -> list[GgufRow]:
    """Granite's MLP, of the kind that ends of names say."""
    gate_up = (f"blk.{{layer}}.ffn_gate{kind}.weight", f"blk.{{layer}}.ffn_up{kind}.weight")
    return [
        GgufRow("model.layers.{layer}.shared_mlp.input_linear.weight", gate_up, GATE_THEN_UP),
        *in_layers({"shared_mlp.output_linear": f"ffn_down{kind}"}),
    ]


OF_GRANITE_HYBRID = [*outside_layers(), *in_layers(NORMS), *ATTENTION_IN_PAIRS, *_mixer("mamba")]
JOINED_GATED_MLP, JOINED_SHARED_EXPERT = _joined(""), _joined("_shexp")
