"""Gemma 3n, of which llama.cpp knows the two released models: how many streams there are, the rank beside attention,
the channels for each layer, which MLPs are sparse and which layers have keys and values stand in its code.

Sources: llama.cpp's src/models/gemma3n.cpp, src/llama-hparams.h and, of shared keys and values, src/llama-model.cpp
(create_memory); conversion/gemma.py (Gemma3NModel).
"""

import math
from dataclasses import replace
from statistics import NormalDist

from precisionctl.architectures.config_keys import NEEDED, Fields
from precisionctl.checkpoints.gguf import metadata_keys as keys, rope_keys, tensor_rows as rows
from precisionctl.checkpoints.gguf.families.gguf_gemma import COMPUTED, FINAL_CAP
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys
from precisionctl.checkpoints.tensor_changes import PaddedWithFirstRow
from precisionctl.model.model_shape import ModelShape

_WITH_KEYS, _SPARSE, _SPARSITY = 20, 10, 0.95
"""llama.cpp's n_layer_kv_from_start, n_layer_sparsity and f_sparsity_std_mul's share."""

_ROWS = [
    *rows.outside_layers(),
    rows.GgufRow("model.embed_tokens_per_layer.weight", ("per_layer_token_embd.weight",), PaddedWithFirstRow()),
    rows.GgufRow("model.per_layer_model_projection.weight", ("per_layer_model_proj.weight",)),
    rows.GgufRow("model.per_layer_projection_norm.weight", ("per_layer_proj_norm.weight",)),
    rows.GgufRow("model.altup_projections.{stream}.weight", ("altup_proj.weight[{stream}]",)),
    rows.GgufRow("model.altup_unembed_projections.{stream}.weight", ("altup_unembd_proj.weight[{stream}]",)),
    *rows.ATTENTION,
    *rows.MLP,
    *rows.in_layers(
        {
            **rows.FOUR_NORMS,
            **rows.QK_NORMS,
            "per_layer_input_gate": "inp_gate",
            "per_layer_projection": "proj",
            "post_per_layer_input_norm": "post_norm",
            "altup.correction_coefs": "altup_correct_coef",
            "altup.prediction_coefs": "altup_predict_coef",
            "altup.modality_router": "altup_router",
            "altup.router_norm": "altup_router_norm",
            "laurel.linear_left": "laurel_l",
            "laurel.linear_right": "laurel_r",
            "laurel.post_laurel_norm": "laurel_post_norm",
        }
    ),
    rows.in_layer("altup.correct_output_scale", "altup_correct_scale.weight"),
]


def _sparsity(fields: Fields) -> tuple[float, ...]:
    """`activation_sparsity_pattern`; of models of 10 layers or fewer, too, to which transformers gives zeros alone."""
    return tuple(_SPARSITY if layer < _SPARSE else 0.0 for layer in range(fields["num_layers"]))


def _check_unused(model: ModelShape) -> keys.Said:
    if not model.stores_unused and model.num_kv_shared_layers:
        raise keys.refused(model, "without the keys and values of layers that share others', as published files have")
    return {}


def _check_kinds(model: ModelShape) -> keys.Said:
    last_two = model.windows[_WITH_KEYS - 2 : _WITH_KEYS]
    if model.num_kv_shared_layers and last_two != [True, False]:
        what = f"whose layers {_WITH_KEYS - 2} and {_WITH_KEYS - 1} are not one with a window and one without"
        raise keys.refused(model, f"{what}: of these it reads keys and values for all later layers")
    return {}


_MLPS = keys.GgufEntry(
    ("ffn_hidden_size",),
    ("feed_forward_length",),
    lambda file: {"ffn_hidden_size": keys.one_of(file, "feed_forward_length", file.counts("feed_forward_length"))},
    lambda model: {"feed_forward_length": [model.ffn_hidden_size] * model.num_layers},
)
_UNUSED = keys.GgufEntry(("stores_unused",), (), lambda file: {"stores_unused": True}, _check_unused)
_STREAMS = keys.integer("altup.num_inputs", "altup.num_inputs", 4)
_STREAM = keys.GgufEntry(
    (), ("altup.active_idx",), keys.expected("altup.active_idx", 0).read, lambda model: {"altup.active_idx": 0}
)
_CHANNELS = keys.integer("per_layer_embed_dim", "embedding_length_per_layer_input", 256)
_SHARED = keys.integer("num_kv_shared_layers", "attention.shared_kv_layers", NEEDED)
_SPARSE_LAYERS = keys.ignored_keys(
    "activation_sparsity_scale",
    write=lambda model: {
        "activation_sparsity_scale": [
            NormalDist().inv_cdf(part) if part else -math.inf for part in map(model.sparsity, range(model.num_layers))
        ]
    },
)
_KINDS = keys.write_only(_check_kinds)
_WINDOWS = replace(
    keys.WINDOWS, read=lambda file: keys.WINDOWS.read(file) or {"window_layers": keys.every(5)(keys.LAYERS.read(file))}
)

FAMILIES = {
    "gemma3n_text": GgufFamily(
        "gemma3n",
        rows=_ROWS,
        keys=base_keys(mlp=(_MLPS,), rope=(rope_keys.ROPE, rope_keys.LOCAL_BASE)),
        more=(FINAL_CAP, keys.WINDOW, _STREAM, _STREAMS, _CHANNELS, _SHARED, _SPARSE_LAYERS, _WINDOWS, _KINDS, _UNUSED),
        computed={
            **COMPUTED,
            **dict.fromkeys(("post_layernorms", "qk_layernorm", "v_l2_norm", "rounded_per_layer_multipliers"), True),
            "query_pre_attn_scalar": 1.0,
            "final_logit_softcapping": 30.0,
            "laurel_rank": 64,
            "altup.num_inputs": 4,
            "per_layer_embed_dim": 256,
            "num_kv_shared_layers": lambda fields: max(fields["num_layers"] - _WITH_KEYS, 0),
            "activation_sparsity": _sparsity,
        },
        ignored={"per_layer_vocab_size": None, "altup.coef_clip": 120.0},
    )
}
