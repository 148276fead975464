"""Nemotron-H and Nemotron 3: each layer has attention, an MLP or experts, or a mixer.

Sources: llama.cpp's src/models/nemotron-h.cpp and nemotron-h-moe.cpp, and conversion/nemotron.py.
"""

from dataclasses import replace
from typing import Any

from precisionctl.architectures.config_keys import Fields
from precisionctl.checkpoints.gguf import expert_keys, metadata_keys as keys, rope_keys, tensor_rows as rows
from precisionctl.checkpoints.gguf.families.gguf_mamba2 import MIXER, mixer
from precisionctl.checkpoints.gguf.family import GgufFamily
from precisionctl.checkpoints.gguf.metadata import Described
from precisionctl.checkpoints.tensor_changes import ROTARY_NEIGHBOURS
from precisionctl.model.model_shape import ModelShape

_UNGATED = {"up_proj": "ffn_up", "down_proj": "ffn_down"}
_ROWS = rows.renamed(
    [
        rows.GgufRow("model.embeddings.weight", ("token_embd.weight",)),
        rows.GgufRow("model.norm_f.weight", ("output_norm.weight",)),
        rows.GgufRow("lm_head.weight", ("output.weight",)),
        *mixer("mixer"),
        *rows.in_layers({"mixer.q_proj": "attn_q", "mixer.k_proj": "attn_k"}, ROTARY_NEIGHBOURS),
        *rows.in_layers(
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
        *rows.experts("mixer.experts", _UNGATED),
        rows.GgufRow("model.layers.{layer}.mixer.gate.e_score_correction_bias", rows.CORRECTION),
    ],
    {"model.": "backbone."},
)


def _read_pattern(file: Described) -> Fields:
    groups, channels = file.counts(keys.HEADS_KV), file.counts("feed_forward_length")
    sparse = "E" if file.count("expert_count", 0) else "-"
    of_layers = ["*" if heads else sparse if size else "M" for heads, size in zip(groups, channels, strict=True)]
    found: dict[str, Any] = {
        "hidden_size": file.count("embedding_length"),
        "max_position_embeddings": file.count("context_length"),
        "num_layers": len(of_layers),
        "mamba.pattern": "".join(of_layers),
        **keys.read_some_heads(file, groups),
        "ffn_hidden_size": keys.one_of(file, "feed_forward_length", channels) or file.count("embedding_length"),
    }
    return found | ({"moe.layer_freq": tuple(kind == "E" for kind in of_layers)} if sparse == "E" else {})


def _write_pattern(model: ModelShape) -> keys.Said:
    assert model.mamba
    pattern = model.mamba.pattern
    if {"E", "-"} <= {*pattern}:
        raise keys.refused(model, "with experts in some layers and an MLP in others")
    size = model.moe.ffn_hidden_size if model.moe else model.ffn_hidden_size
    return {
        "block_count": len(pattern),
        "context_length": 1 << 20,
        "embedding_length": model.hidden_size,
        "feed_forward_length": [size if kind in "E-" else 0 for kind in pattern],
        "attention.head_count": model.num_attention_heads,
        keys.HEADS_KV: [model.num_query_groups if kind == "*" else 0 for kind in pattern],
    }


_PATTERN = keys.GgufEntry(
    (
        *("num_layers", "mamba.pattern", "max_position_embeddings", "hidden_size", "ffn_hidden_size"),
        *("num_attention_heads", "num_query_groups", "moe.layer_freq"),
    ),
    (*keys.LAYERS.keys, *keys.CONTEXT.keys, *keys.WIDTH.keys, *keys.MLP_SIZE.keys, *keys.HEADS.keys),
    _read_pattern,
    _write_pattern,
)
"""No position limits the context."""


def _read_no_positions(file: Described) -> Fields:
    file.expect("rope.scaling.finetuned", False)
    return {"rotary_base": 10000.0, "rope_scaling": None}


_NO_POSITIONS = replace(keys.always("rope.scaling.finetuned", False), read=_read_no_positions)
"""Of attention."""


def _write_shared_size(model: ModelShape) -> keys.Said:
    if model.moe and model.moe.shared_ffn_hidden_size is None:
        raise keys.refused(model, "without shared experts")
    return expert_keys.SHARED_EXPERT_SIZE.write(model)


_NORMALISED = keys.always("expert_weights_norm", True)
_GROUPS = replace(
    expert_keys.groups(2),
    read=lambda file: {
        "moe.num_groups": file.count("expert_group_count", 1),
        "moe.group_topk": file.count("expert_group_used_count", 1),
    },
)
"""Which config.json says also where they are one."""
_SHARED_SIZE = replace(expert_keys.SHARED_EXPERT_SIZE, write=_write_shared_size)
_LATENT_SIZE = replace(
    keys.integer_or_none("moe.latent_size", "moe_latent_size"),
    write=lambda model: {"moe_latent_size": model.moe.latent_size} if model.moe and model.moe.latent_size else {},
)

_DENSE = GgufFamily(
    "nemotron_h",
    rows=_ROWS,
    keys=(_PATTERN, keys.LAYER_NORM_EPSILON),
    more=(keys.VOCABULARY, rope_keys.TURNED, MIXER, _NO_POSITIONS, keys.HEAD_SIZE),
    reads=(keys.NO_EXPERTS,),
    computed={
        "activation": "squared_relu",
        "gated_linear_unit": False,
        "rope_layers": keys.in_all_layers(False),
    },
    ignored=keys.NO_PREDICTION,
    scaled=(*rows.SCALED, *rows.SCALED_EXPERTS, *rows.SCALED_SHARED_EXPERT, "ssm_in", "ssm_out"),
)
_SPARSE = replace(
    _DENSE,
    architecture="nemotron_h_moe",
    keys=(*_DENSE.keys, *expert_keys.EXPERT_COUNTS, _GROUPS),
    more=(
        *_DENSE.more,
        expert_keys.EXPERT_SIZE,
        _SHARED_SIZE,
        expert_keys.ONE_SHARED,
        _NORMALISED,
        expert_keys.WEIGHTS_SCALE,
        _LATENT_SIZE,
    ),
    reads=(),
    computed={**_DENSE.computed, "moe.score_function": "sigmoid", "moe.expert_bias": True, "moe.group_scores": 2},
)

FAMILIES = {"nemotron_h": replace(_DENSE, with_experts=_SPARSE)}
