"""GGUF's models with experts in layers of one kind of attention, DeepSeek's, GLM's and newer families': what the
metadata of each say, and what llama.cpp computes whatever they say.

Sources: llama.cpp's src/models/deepseek2.cpp, deepseek32.cpp, glm4-moe.cpp, glm-dsa.cpp, minimax-m2.cpp, llama4.cpp,
afmoe.cpp, ernie4-5.cpp and olmoe.cpp, and conversion/*.py (set_gguf_parameters).
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from precisionctl.architectures.config_keys import Fields
from precisionctl.checkpoints.gguf.gguf_experts import (
    AS_LARGE_AS_MLP,
    EXPERT_SIZE,
    EXPERTS,
    IN_ALL_LAYERS,
    LEADING_DENSE,
    NORMALISED,
    SHARED_EXPERT_SIZE,
    SHARED_EXPERTS,
    TWO_SCORES,
    WEIGHTS_SCALE,
    groups,
    scored_by,
)
from precisionctl.checkpoints.gguf.gguf_family_keys import (
    HUNYUAN,
    LATENT,
    LATENT_HEADS,
    LATENT_KEYS,
    LATENT_RANK,
    QUERY_RANK,
    TOKENS_OF_GLM,
)
from precisionctl.checkpoints.gguf.gguf_keys import (
    DECODER_LAYERS,
    HEAD_SIZE,
    LAYERS_AND_PREDICTION,
    PREDICTION,
    QK_NORMS,
    QKV_BIAS,
    UNUSUAL_HEAD_SIZE,
    VOCABULARY,
    WINDOW,
    GgufEntry,
    GgufKey,
    GgufRule,
    Said,
    every,
    hidden_by_heads,
    refused,
)
from precisionctl.checkpoints.gguf.gguf_metadata import Described
from precisionctl.checkpoints.gguf.gguf_model import GgufModel, base_keys
from precisionctl.checkpoints.gguf.gguf_rope import (
    AND_LLAMA3,
    LOG_MULTIPLIER,
    OF_LATENT,
    STRETCHED,
    TURNED,
    UNSCALED_ALONE,
    mscales,
)
from precisionctl.model_shape import ModelShape

# Llama 4


def _read_step(file: Described) -> Fields:
    step = file.count("interleave_moe_layer_step", least=1)
    return {"moe.layer_freq": tuple((layer + 1) % step == 0 for layer in range(file.count("block_count")))}


def _write_step(model: ModelShape) -> Said:
    assert model.moe
    experts = model.moe.layer_freq
    step = experts.index(True) + 1 if True in experts else 0
    if not step or experts != tuple((layer + 1) % step == 0 for layer in range(len(experts))):
        raise refused(model, "with experts in other layers than each of some number")
    return {"interleave_moe_layer_step": step}


_STEP = GgufRule(("moe.layer_freq",), _read_step, _write_step)

# DeepSeek, GLM

_INDEXER = (
    GgufKey("dsa.n_heads", "attention.indexer.head_count"),
    GgufKey("dsa.head_dim", "attention.indexer.key_length"),
    GgufKey("dsa.topk", "attention.indexer.top_k"),
)


def _read_indexers(file: Described) -> Fields:
    """Of GLM-5 each layer has one; GLM-5.2, known by its context, began without a list of those that have."""
    layers, listed = file.decoder_layers(), file.flags("attention.indexer.types")
    if listed is None:
        every_fourth = file.count("context_length") >= 1 << 20
        listed = [not every_fourth or layer < 2 or layer % 4 == 2 for layer in range(layers)]
    return {"dsa.layers": tuple(listed)}


_INDEXERS = GgufRule(
    ("dsa.layers",),
    _read_indexers,
    lambda model: {"attention.indexer.types": list(model.dsa.layers)} if model.dsa else {},
)


def _latent_attention(
    function: str,
    *behind: GgufEntry,
    group_scores: int = 2,
    layers: GgufEntry = DECODER_LAYERS,
    query_rank: GgufEntry = QUERY_RANK,
    head_first: bool = True,
    **computed: Any,
) -> GgufModel:
    """Latent attention and experts, whose scores `function` makes; `head_first`: the converter writes LATENT so."""
    return GgufModel(
        keys=base_keys(
            *EXPERTS,
            groups(group_scores),
            scored_by(function),
            *((LATENT,) if head_first else ()),
            layers=layers,
            heads=LATENT_KEYS,
        ),
        more=(
            LEADING_DENSE,
            VOCABULARY,
            query_rank,
            LATENT_RANK,
            *(() if head_first else (LATENT,)),
            LATENT_HEADS,
            EXPERT_SIZE,
            SHARED_EXPERTS,
            WEIGHTS_SCALE,
            NORMALISED,
            GgufKey("mla.qk_pos_emb_head_dim", "rope.dimension_count"),
            LOG_MULTIPLIER,
            *behind,
        ),
        reads=(),
        computed={"kv_channels": lambda fields: fields["mla.v_head_dim"], **TWO_SCORES, **computed},
        scalings=OF_LATENT,
        of_scaling=mscales(),
    )


def _deepseek(function: str, **how: Any) -> GgufModel:
    """`deepseek2` of llama.cpp."""
    found = _latent_attention(function, **how)
    return replace(found, ignored=("mtp_num_layers",), of_scaling=mscales(any_number=True))


def _sparse_attention(*indexers: GgufEntry, interleaved: bool, **computed: Any) -> GgufModel:
    """The same with indexers, which choose the keys that a query sees."""
    return _latent_attention(
        "sigmoid",
        PREDICTION,
        *_INDEXER,
        *indexers,
        layers=LAYERS_AND_PREDICTION,
        query_rank=GgufKey("mla.q_lora_rank", "attention.q_lora_rank"),
        **{"moe.expert_bias": True, "dsa.rope_interleaved": interleaved, **computed},
    )


# ERNIE 4.5


def _read_ernie(file: Described) -> Fields:
    file.count("expert_shared_feed_forward_length", None)
    return SHARED_EXPERTS.read(file)


def _write_ernie(model: ModelShape) -> Said:
    assert model.moe
    shared = model.moe.shared_ffn_hidden_size or 0
    size = {"expert_shared_feed_forward_length": shared} if shared else {}
    return {"expert_shared_count": shared // model.moe.ffn_hidden_size, **size}


def _read_ernie_steps(file: Described) -> Fields:
    file.expect("interleave_moe_layer_step", 1)
    return {}


_SHARED_OF_ERNIE = GgufRule(SHARED_EXPERTS.fields, _read_ernie, _write_ernie)
"""The size is theirs together; the converter makes it of other numbers, which come to the same in the releases."""
_STEP_OF_ERNIE = GgufRule((), _read_ernie_steps, lambda model: {"interleave_moe_layer_step": 1})


def _read_one_shared(file: Described) -> Fields:
    file.expect("expert_shared_count", 1)
    return {}


_ONE_SHARED = GgufRule((), _read_one_shared, lambda model: {"expert_shared_count": 1})


SPARSE_MODELS: Mapping[str, GgufModel] = {
    "minimax_m2": GgufModel(
        keys=(*base_keys(*EXPERTS, scored_by("sigmoid")), HEAD_SIZE),
        more=(EXPERT_SIZE, TURNED),
        reads=(),
        computed={
            **IN_ALL_LAYERS,
            **AS_LARGE_AS_MLP,
            **dict.fromkeys(("qk_layernorm", "qk_layernorm_over_heads", "moe.expert_bias"), True),
            "tied_embeddings": False,
        },
    ),
    "llama4_text": GgufModel(
        keys=(*base_keys(*EXPERTS), HEAD_SIZE),
        more=(VOCABULARY, TURNED, _STEP, EXPERT_SIZE),
        reads=(),
        computed={
            "rotary_interleaved": True,
            "rope_layers": every(4),
            "attention_chunk_size": 8192,
            "window_layers": every(4),
            "query_scaling_beta": 0.1,
            "query_scaling_floor": 8192,
            "qk_l2_norm": lambda fields: fields["moe.num_experts"] != 128,
            "moe.shared_ffn_hidden_size": lambda fields: fields["moe.ffn_hidden_size"],
            "moe.score_function": "sigmoid",
            "moe.probs_on_input": True,
        },
        scalings=AND_LLAMA3,
    ),
    "deepseek_v2": _deepseek("softmax", group_scores=1, **{"moe.pre_softmax": True}),
    "deepseek_v3": _deepseek("sigmoid", **{"moe.expert_bias": True}),
    "glm4_moe_lite": replace(_deepseek("sigmoid", head_first=False, **{"moe.expert_bias": True}), tokens=TOKENS_OF_GLM),
    "deepseek_v32": _sparse_attention(
        interleaved=False, **{"dsa.layers": lambda fields: (True,) * fields["num_layers"]}
    ),
    "glm_moe_dsa": replace(  # llama.cpp reads no yarn_log_multiplier of it
        _sparse_attention(_INDEXERS, interleaved=True), scalings=UNSCALED_ALONE, tokens=TOKENS_OF_GLM
    ),
    "glm4_moe": GgufModel(
        keys=(*base_keys(*EXPERTS, groups(2), layers=LAYERS_AND_PREDICTION), HEAD_SIZE),
        more=(
            *(TURNED, EXPERT_SIZE, SHARED_EXPERTS, LEADING_DENSE, scored_by("sigmoid"), WEIGHTS_SCALE, NORMALISED),
            *(PREDICTION, QKV_BIAS, QK_NORMS),
        ),
        reads=(),
        computed={**TWO_SCORES, "moe.expert_bias": True},
        tokens=TOKENS_OF_GLM,
    ),
    "afmoe": GgufModel(
        keys=(*base_keys(*EXPERTS, scored_by("sigmoid")), HEAD_SIZE),
        more=(VOCABULARY, TURNED, SHARED_EXPERTS, EXPERT_SIZE, LEADING_DENSE, NORMALISED, WEIGHTS_SCALE, WINDOW),
        reads=(),
        computed={
            **dict.fromkeys(("post_layernorms", "qk_layernorm", "attention_output_gate", "moe.expert_bias"), True),
            "embedding_multiplier": lambda fields: math.sqrt(fields["hidden_size"]),
            "rope_layers": every(4),
            "window_layers": every(4),
        },
    ),
    "ernie4_5_moe": GgufModel(
        keys=(*base_keys(), UNUSUAL_HEAD_SIZE),
        more=(*EXPERTS, _STEP_OF_ERNIE, LEADING_DENSE, EXPERT_SIZE, _SHARED_OF_ERNIE),
        computed={"rotary_interleaved": True, "moe.expert_bias": True},
    ),
    "hunyuan_v1_moe": GgufModel(
        keys=(*base_keys(EXPERTS[0]), HEAD_SIZE),
        more=(SHARED_EXPERT_SIZE, EXPERT_SIZE, EXPERTS[1], _ONE_SHARED),
        reads=(TURNED, STRETCHED),
        computed={
            **IN_ALL_LAYERS,
            **AS_LARGE_AS_MLP,
            **HUNYUAN,
            "moe.shared_ffn_hidden_size": lambda fields: fields["ffn_hidden_size"],
        },
    ),
    "olmoe": GgufModel(
        keys=(*base_keys(*EXPERTS), UNUSUAL_HEAD_SIZE),
        computed={
            **IN_ALL_LAYERS,
            **AS_LARGE_AS_MLP,
            **dict.fromkeys(("qk_layernorm", "qk_layernorm_over_heads", "moe.pre_softmax"), True),
            "kv_channels": hidden_by_heads,
            "num_query_groups": lambda fields: fields["num_attention_heads"],
            "tied_embeddings": False,
        },
    ),
}
"""By the `model_type` of the text model."""
