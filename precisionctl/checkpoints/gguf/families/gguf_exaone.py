"""EXAONE 3.0, 3.5 and 4, and K-EXAONE.

Sources: llama.cpp's src/models/exaone.cpp, exaone4.cpp and exaone-moe.cpp, and conversion/exaone.py.
"""

from precisionctl.architectures.config_keys import Fields
from precisionctl.architectures.tables.exaone import PUBLISHED
from precisionctl.checkpoints.gguf.expert_keys import (
    EXPERT_COUNTS,
    EXPERT_SIZE,
    LEADING_DENSE,
    NORMALISED,
    SHARED_COUNT,
    SHARED_EXPERT_SIZE,
    TWO_SCORES,
    WEIGHTS_SCALE,
    groups,
    scored_by,
)
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys
from precisionctl.checkpoints.gguf.metadata import Described
from precisionctl.checkpoints.gguf.metadata_keys import (
    DECODER_LAYERS,
    HEAD_SIZE,
    NO_PREDICTION,
    UNUSUAL_HEAD_SIZE,
    VOCABULARY,
    WINDOW,
    WINDOWS,
    GgufRule,
    Said,
    every,
    hidden_by_heads,
    ignored_keys,
    refused,
    write_only,
)
from precisionctl.checkpoints.gguf.rope_keys import AND_LLAMA3, SAYS_UNSCALED, TURNED, UNSCALED_ALONE
from precisionctl.checkpoints.gguf.tensor_rows import (
    ATTENTION,
    CORRECTION,
    DECODER,
    EXPERTS,
    MLP,
    NORMS_BEHIND,
    QK_NORMS,
    ROUTER,
    SHARED_EXPERTS,
    GgufRow,
    in_layers,
    outside_layers,
    renamed,
)
from precisionctl.model.model_shape import ModelShape

_LAYERS_WITH_WINDOWS = 64


def _windows(fields: Fields) -> tuple[bool, ...] | None:
    return every(4)(fields) if fields["num_layers"] == _LAYERS_WITH_WINDOWS else None


def _read_window(file: Described) -> Fields:
    computed = _windows({"num_layers": file.layers()})
    window = file.count("attention.sliding_window", 4096 if computed else None)
    return {"sliding_window": window if computed else None, "window_layers": computed, "rope_layers": computed}


def _write_window(model: ModelShape) -> Said:
    computed = _windows(vars(model))
    if model.sliding_window is None and computed is None and model.rope_layers is None:
        return {}
    if computed is None or (model.window_layers, model.rope_layers) != (computed, computed) or not model.sliding_window:
        raise refused(model, f"of {model.num_layers} layers with such windows: of 64 three in four have one")
    return {**WINDOW.write(model), **WINDOWS.write(model)}


def _write_a_window(model: ModelShape) -> Said:
    if model.sliding_window is None:
        raise refused(model, "without a window")
    return WINDOW.write(model)


_WINDOW = GgufRule(
    ("sliding_window", "window_layers", "rope_layers"),
    (*WINDOW.keys, *WINDOWS.keys),
    _read_window,
    _write_window,
)
"""By the number of layers, and not by a pattern: in the model of 32B, three in four have a window, and the others no
rotary embeddings."""

_A_WINDOW = GgufRule(WINDOW.fields, WINDOW.keys, WINDOW.read, _write_a_window)
_SHARED_SIZE = ignored_keys(
    *SHARED_EXPERT_SIZE.keys,
    write=lambda model: dict.fromkeys(SHARED_EXPERT_SIZE.keys, model.moe and model.moe.shared_ffn_hidden_size or 0),
)
"""What SHARED_COUNT says too."""


FAMILIES = {
    "exaone": GgufFamily(
        "exaone",
        rows=renamed([*DECODER, *MLP], PUBLISHED),
        keys=(*base_keys(), HEAD_SIZE),
        more=(TURNED,),
        reads=(),
        scalings=AND_LLAMA3,
    ),
    "exaone4": GgufFamily(
        "exaone4",
        rows=[*outside_layers(), *in_layers({**NORMS_BEHIND, **QK_NORMS}), *ATTENTION, *MLP],
        keys=(*base_keys(), UNUSUAL_HEAD_SIZE),
        more=(VOCABULARY, _WINDOW),
        computed={
            "kv_channels": hidden_by_heads,
            "pre_layernorms": False,
            **dict.fromkeys(("post_layernorms", "qk_layernorm"), True),
        },
        scalings=AND_LLAMA3,
    ),
    "exaone_moe": GgufFamily(
        "exaone-moe",
        rows=[
            *DECODER,
            *in_layers(QK_NORMS),
            *MLP,
            *ROUTER,
            GgufRow("model.layers.{layer}.mlp.e_score_correction_bias", CORRECTION),
            *EXPERTS,
            *SHARED_EXPERTS,
        ],
        keys=(*base_keys(*EXPERT_COUNTS, groups(2), scored_by("sigmoid"), layers=DECODER_LAYERS), HEAD_SIZE),
        more=(
            *(VOCABULARY, _A_WINDOW, WINDOWS, EXPERT_SIZE, SHARED_COUNT, _SHARED_SIZE, WEIGHTS_SCALE, NORMALISED),
            *(LEADING_DENSE, write_only(lambda model: {"nextn_predict_layers": 0}), SAYS_UNSCALED),
        ),
        computed={
            **TWO_SCORES,
            "qk_layernorm": True,
            "moe.expert_bias": True,
            "rope_layers": lambda fields: fields.get("window_layers"),
        },
        ignored={**NO_PREDICTION, "mtp_dense": False},
        scalings=UNSCALED_ALONE,
    ),
}
"""By the `model_type` of the text model."""
