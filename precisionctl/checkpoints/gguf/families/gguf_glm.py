"""GLM-4, GLM-4.5 and their models of images, Solar Open, GLM-4.7-Flash and GLM-5; the last two have DeepSeek's
attention (`gguf_deepseek.py`).

Sources: llama.cpp's src/models/chatglm.cpp, glm4.cpp, glm4-moe.cpp, deepseek2.cpp and glm-dsa.cpp, and
conversion/glm.py and chatglm.py.
"""

from dataclasses import replace

from precisionctl.architectures.config_keys import Fields
from precisionctl.checkpoints.gguf import expert_keys, metadata_keys as keys, rope_keys, tensor_rows as rows
from precisionctl.checkpoints.gguf.families.gguf_deepseek import deepseek2, sparse_attention
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys
from precisionctl.checkpoints.gguf.metadata import Described
from precisionctl.checkpoints.gguf.mrope_keys import Images
from precisionctl.checkpoints.tensor_changes import ROTARY_HALVES

_NORMS_OF_GLM4 = {
    **rows.NORMS,
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


_INDEXERS = keys.GgufEntry(
    ("dsa.layers",),
    ("attention.indexer.types",),
    _read_indexers,
    lambda model: {"attention.indexer.types": list(model.dsa.layers)} if model.dsa else {},
)

_GLM4 = GgufFamily(
    "glm4",
    rows=[*rows.outside_layers(), *rows.in_layers(_NORMS_OF_GLM4), *rows.ATTENTION, *rows.JOINED_MLP],
    keys=base_keys(),
    more=(rope_keys.TURNED, keys.QKV_BIAS),
    computed={"post_layernorms": True, "rotary_interleaved": True},
    tokens={"eos": "<|endoftext|>", "eot": "<|user|>", "unk": "<|endoftext|>", "bos": "<|endoftext|>"},
)
_GLM = replace(
    _GLM4,
    architecture="chatglm",
    rows=[*rows.outside_layers(), *rows.in_layers(rows.NORMS), *rows.ATTENTION, *rows.JOINED_MLP],
    keys=(keys.CONTEXT, keys.WIDTH, keys.MLP_SIZE, keys.LAYERS, keys.HEADS, keys.EPSILON, keys.UNUSUAL_HEAD_SIZE),
    more=(rope_keys.TURNED, rope_keys.ROPE, keys.QKV_BIAS),
    computed={"rotary_interleaved": True},
    tokens={"eos": "<|endoftext|>", "eot": "<|user|>", "unk": "<|endoftext|>"},
)
_GLM4_MOE = GgufFamily(
    "glm4moe",
    rows=[
        *rows.outside_layers(),
        *rows.in_layers({**rows.NORMS_BY_PLACE, **rows.QK_NORMS}),
        *rows.ATTENTION,
        *rows.MLP,
        *rows.ROUTER,
        rows.EXPERT_BIAS,
        *rows.EXPERTS,
        *rows.SHARED_EXPERTS,
        *rows.PREDICTION,
    ],
    keys=base_keys(*expert_keys.EXPERT_COUNTS, expert_keys.groups(2), layers=keys.LAYERS_AND_PREDICTION),
    more=(
        rope_keys.TURNED,
        expert_keys.EXPERT_SIZE,
        expert_keys.SHARED_COUNT,
        expert_keys.LEADING_DENSE,
        expert_keys.scored_by("sigmoid"),
        expert_keys.WEIGHTS_SCALE,
        expert_keys.NORMALISED,
        keys.PREDICTION_LAYERS,
        keys.QKV_BIAS,
        keys.HAS_QK_NORMS,
    ),
    computed={**expert_keys.TWO_SCORES, "moe.expert_bias": True},
    tokens=_TOKENS,
)
_IMAGES, _OCR = Images((8, 12, 12)), Images((16, 24, 24))
_GLM4V = replace(
    _GLM4,
    rows=[
        *rows.outside_layers(),
        *rows.in_layers(_NORMS_OF_GLM4),
        *rows.linears({**rows.QUERY, **rows.KEY}, ROTARY_HALVES),  # by such sections llama.cpp turns halves alone
        *rows.linears(rows.VALUE_OUTPUT),
        *rows.JOINED_MLP,
    ],
    keys=base_keys(rope=(_IMAGES.sections, rope_keys.ROPE), head_size=keys.UNUSUAL_HEAD_SIZE),
    images=_IMAGES,
    recognises=_IMAGES.recognises,
)
_GLM_OCR = replace(
    _GLM4V, keys=base_keys(rope=(_OCR.sections, rope_keys.ROPE), head_size=keys.UNUSUAL_HEAD_SIZE), images=_OCR
)
_GLM4V_MOE = replace(
    _GLM4_MOE,
    keys=base_keys(
        *expert_keys.EXPERT_COUNTS,
        expert_keys.groups(2),
        layers=keys.LAYERS_AND_PREDICTION,
        rope=(_IMAGES.sections, rope_keys.ROPE),
        head_size=keys.UNUSUAL_HEAD_SIZE,
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
        sparse_attention("glm-dsa", _INDEXERS, interleaved=True), scalings=rope_keys.UNSCALED_ALONE, tokens=_TOKENS
    ),
}
