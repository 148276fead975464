"""EXAONE 3.0, 3.5 and 4, and K-EXAONE.

Sources: llama.cpp's src/models/exaone.cpp, exaone4.cpp and exaone-moe.cpp, and conversion/exaone.py.
"""

from dataclasses import replace

from precisionctl.architectures.config_keys import Fields
from precisionctl.architectures.tables.exaone import PUBLISHED
from precisionctl.checkpoints.gguf import expert_keys, metadata_keys as keys, rope_keys, tensor_rows as rows
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys
from precisionctl.checkpoints.gguf.metadata import Described
from precisionctl.model.model_shape import ModelShape

_LAYERS_WITH_WINDOWS = 64


def _windows(fields: Fields) -> tuple[bool, ...] | None:
    return keys.every(4)(fields) if fields["num_layers"] == _LAYERS_WITH_WINDOWS else None


def _read_window(file: Described) -> Fields:
    computed = _windows({"num_layers": file.layers()})
    window = file.count("attention.sliding_window", 4096 if computed else None)
    return {"sliding_window": window if computed else None, "window_layers": computed, "rope_layers": computed}


def _write_window(model: ModelShape) -> keys.Said:
    computed = _windows(vars(model))
    if model.sliding_window is None and computed is None and model.rope_layers is None:
        return {}
    if computed is None or (model.window_layers, model.rope_layers) != (computed, computed) or not model.sliding_window:
        raise keys.refused(model, f"of {model.num_layers} layers with such windows: of 64 three in four have one")
    return {**keys.WINDOW.write(model), **keys.WINDOWS.write(model)}


def _write_a_window(model: ModelShape) -> keys.Said:
    if model.sliding_window is None:
        raise keys.refused(model, "without a window")
    return keys.WINDOW.write(model)


_WINDOW = keys.GgufEntry(
    ("sliding_window", "window_layers", "rope_layers"),
    (*keys.WINDOW.keys, *keys.WINDOWS.keys),
    _read_window,
    _write_window,
)
"""By the number of layers, and not by a pattern: in the model of 32B, three in four have a window, and the others no
rotary embeddings."""

_A_WINDOW = replace(keys.WINDOW, write=_write_a_window)
_SHARED_SIZE = keys.ignored_keys(
    *expert_keys.SHARED_EXPERT_SIZE.keys,
    write=lambda model: dict.fromkeys(
        expert_keys.SHARED_EXPERT_SIZE.keys, model.moe and model.moe.shared_ffn_hidden_size or 0
    ),
)
"""What SHARED_COUNT says too."""


FAMILIES = {
    "exaone": GgufFamily(
        "exaone",
        rows=rows.renamed([*rows.DECODER, *rows.MLP], PUBLISHED),
        keys=base_keys(),
        more=(rope_keys.TURNED,),
        scalings=rope_keys.AND_LLAMA3,
    ),
    "exaone4": GgufFamily(
        "exaone4",
        rows=[
            *rows.outside_layers(),
            *rows.in_layers({**rows.NORMS_BEHIND, **rows.QK_NORMS}),
            *rows.ATTENTION,
            *rows.MLP,
        ],
        keys=base_keys(head_size=keys.UNUSUAL_HEAD_SIZE),
        more=(keys.VOCABULARY, _WINDOW),
        computed={
            "kv_channels": keys.hidden_by_heads,
            "pre_layernorms": False,
            **dict.fromkeys(("post_layernorms", "qk_layernorm"), True),
        },
        scalings=rope_keys.AND_LLAMA3,
    ),
    "exaone_moe": GgufFamily(
        "exaone-moe",
        rows=[
            *rows.DECODER,
            *rows.in_layers(rows.QK_NORMS),
            *rows.MLP,
            *rows.ROUTER,
            rows.GgufRow("model.layers.{layer}.mlp.e_score_correction_bias", rows.CORRECTION),
            *rows.EXPERTS,
            *rows.SHARED_EXPERTS,
        ],
        keys=base_keys(
            *expert_keys.DEEPSEEK_CHOICE,
            layers=keys.DECODER_LAYERS,
        ),
        more=(
            keys.VOCABULARY,
            _A_WINDOW,
            keys.WINDOWS,
            expert_keys.EXPERT_SIZE,
            expert_keys.SHARED_COUNT,
            _SHARED_SIZE,
            expert_keys.WEIGHTS_SCALE,
            expert_keys.NORMALISED,
            expert_keys.LEADING_DENSE,
            keys.write_only(lambda model: {"nextn_predict_layers": 0}),
            rope_keys.SAYS_UNSCALED,
        ),
        computed={
            **expert_keys.TWO_SCORES,
            "qk_layernorm": True,
            "moe.expert_bias": True,
            "rope_layers": lambda fields: fields.get("window_layers"),
        },
        ignored={**keys.NO_PREDICTION, "mtp_dense": False},
        scalings=rope_keys.UNSCALED_ALONE,
    ),
}
