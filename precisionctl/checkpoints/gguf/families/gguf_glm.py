"""GLM-4, GLM-4.5 and their models of images, Solar Open, GLM-4.7-Flash and GLM-5; the last two have DeepSeek's
attention (`gguf_deepseek.py`).

Sources: llama.cpp's src/models/chatglm.cpp, glm4.cpp, glm4-moe.cpp, deepseek2.cpp and glm-dsa.cpp, and
conversion/glm.py and chatglm.py.
"""

from dataclasses import replace

from precisionctl.architectures.config_keys import Fields
from precisionctl.checkpoints.gguf.expert_keys import (
    EXPERT_COUNTS,
    EXPERT_SIZE,
    LEADING_DENSE,
    NORMALISED,
    SHARED_COUNT,
    TWO_SCORES,
    WEIGHTS_SCALE,
    groups,
    scored_by,
)
from precisionctl.checkpoints.gguf.families.gguf_deepseek import deepseek2, sparse_attention
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys
from precisionctl.checkpoints.gguf.metadata import Described
from precisionctl.checkpoints.gguf.metadata_keys import (
    CONTEXT,
    EPSILON,
    HAS_QK_NORMS,
    HEAD_SIZE,
    HEADS,
    LAYERS,
    LAYERS_AND_PREDICTION,
    MLP_SIZE,
    PREDICTION_LAYERS,
    QKV_BIAS,
    UNUSUAL_HEAD_SIZE,
    WIDTH,
    GgufRule,
)
from precisionctl.checkpoints.gguf.mrope_keys import Images
from precisionctl.checkpoints.gguf.rope_keys import ROPE, TURNED, UNSCALED_ALONE
from precisionctl.checkpoints.gguf.tensor_rows import (
    ATTENTION,
    EXPERT_BIAS,
    EXPERTS,
    JOINED_MLP,
    KEY,
    MLP,
    NORMS,
    NORMS_BY_PLACE,
    PREDICTION,
    QK_NORMS,
    QUERY,
    ROUTER,
    SHARED_EXPERTS,
    VALUE_OUTPUT,
    in_layers,
    linears,
    outside_layers,
)
from precisionctl.checkpoints.tensor_changes import ROTARY_HALVES

_NORMS_OF_GLM4 = {
    **NORMS,
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
}
_TOKENS = {"bos": "[gMASK]", "eot": "<|user|>", "unk": "<|endoftext|>", "eom": "<|observation|>"}

_TOKENS_OF_SOLAR = {"eos": "<|endoftext|>", "eot": "<|endoftext|>", "unk": "<unk>", "bos": "<|startoftext|>"}


def _read_indexers(file: Described) -> Fields:
    """Of GLM-5 each layer has one; GLM-5.2, known by its context, began without a list of those that have."""
    layers, listed = file.decoder_layers(), file.flags("attention.indexer.types")
    if listed is None:
        every_fourth = file.count("context_length") >= 1 << 20
        listed = [not every_fourth or layer < 2 or layer % 4 == 2 for layer in range(layers)]
    return {"dsa.layers": tuple(listed)}


_INDEXERS = GgufRule(
    ("dsa.layers",),
    ("attention.indexer.types",),
    _read_indexers,
    lambda model: {"attention.indexer.types": list(model.dsa.layers)} if model.dsa else {},
)

_GLM4 = GgufFamily(
    "glm4",
    rows=[*outside_layers(), *in_layers(_NORMS_OF_GLM4), *ATTENTION, *JOINED_MLP],
    keys=(*base_keys(), HEAD_SIZE),
    more=(TURNED, QKV_BIAS),
    reads=(),
    computed={"post_layernorms": True, "rotary_interleaved": True},
    tokens={"eos": "<|endoftext|>", "eot": "<|user|>", "unk": "<|endoftext|>", "bos": "<|endoftext|>"},
)
_GLM = replace(
    _GLM4,
    architecture="chatglm",
    rows=[*outside_layers(), *in_layers(NORMS), *ATTENTION, *JOINED_MLP],
    keys=(CONTEXT, WIDTH, MLP_SIZE, LAYERS, HEADS, EPSILON, UNUSUAL_HEAD_SIZE),
    more=(TURNED, ROPE, QKV_BIAS),
    computed={"rotary_interleaved": True},
    tokens={"eos": "<|endoftext|>", "eot": "<|user|>", "unk": "<|endoftext|>"},
)
_GLM4_MOE = GgufFamily(
    "glm4moe",
    rows=[
        *outside_layers(),
        *in_layers({**NORMS_BY_PLACE, **QK_NORMS}),
        *ATTENTION,
        *MLP,
        *ROUTER,
        EXPERT_BIAS,
        *EXPERTS,
        *SHARED_EXPERTS,
        *PREDICTION,
    ],
    keys=(*base_keys(*EXPERT_COUNTS, groups(2), layers=LAYERS_AND_PREDICTION), HEAD_SIZE),
    more=(
        *(TURNED, EXPERT_SIZE, SHARED_COUNT, LEADING_DENSE, scored_by("sigmoid"), WEIGHTS_SCALE, NORMALISED),
        *(PREDICTION_LAYERS, QKV_BIAS, HAS_QK_NORMS),
    ),
    reads=(),
    computed={**TWO_SCORES, "moe.expert_bias": True},
    tokens=_TOKENS,
)
_IMAGES, _OCR = Images((8, 12, 12)), Images((16, 24, 24))
_GLM4V = replace(
    _GLM4,
    rows=[
        *outside_layers(),
        *in_layers(_NORMS_OF_GLM4),
        *linears({**QUERY, **KEY}, ROTARY_HALVES),  # by such sections llama.cpp turns halves alone
        *linears(VALUE_OUTPUT),
        *JOINED_MLP,
    ],
    keys=(*base_keys(rope=(_IMAGES.sections, ROPE)), UNUSUAL_HEAD_SIZE),
    images=_IMAGES,
    recognises=_IMAGES.recognises,
)
_GLM_OCR = replace(_GLM4V, keys=(*base_keys(rope=(_OCR.sections, ROPE)), UNUSUAL_HEAD_SIZE), images=_OCR)
_GLM4V_MOE = replace(
    _GLM4_MOE,
    keys=(
        *base_keys(*EXPERT_COUNTS, groups(2), layers=LAYERS_AND_PREDICTION, rope=(_IMAGES.sections, ROPE)),
        UNUSUAL_HEAD_SIZE,
    ),
    images=_IMAGES,
    recognises=_IMAGES.recognises,
)

FAMILIES = {
    "glm": _GLM,
    "glm4": replace(_GLM4, in_wrappers=dict.fromkeys(("glm4v", "glm46v"), _GLM4V) | {"glm_ocr": _GLM_OCR}),
    "solar_open": replace(_GLM4_MOE, tokens=_TOKENS_OF_SOLAR, recognises=lambda file: False),
    "glm4_moe": replace(_GLM4_MOE, in_wrappers={"glm4v_moe": _GLM4V_MOE}),
    "glm4_moe_lite": replace(
        deepseek2("sigmoid", head_first=False, **{"moe.expert_bias": True}),
        tokens=_TOKENS,
        recognises=lambda file: False,
    ),
    "glm_moe_dsa": replace(  # llama.cpp reads no yarn_log_multiplier of it
        sparse_attention("glm-dsa", _INDEXERS, interleaved=True), scalings=UNSCALED_ALONE, tokens=_TOKENS
    ),
}
"""By the `model_type` of the text model."""
