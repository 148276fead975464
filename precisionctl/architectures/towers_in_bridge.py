"""How Megatron-Bridge names the towers of wrappers in its checkpoints, beside a text model at `language_model.`.

Bridge trains towers too. Some are Hugging Face's modules under another prefix, some are Megatron's transformers, with
query, key and value interleaved. The rows are those of Bridge's own mappings (src/megatron/bridge/models/*/*_bridge.py,
0.3.1 and August 2026) in its notation: `*` stands for a number, `**` at the end for any name.

Traps: the same wrapper may have either kind of tower, by Bridge's version (Qwen3-VL's is Hugging Face's in 0.3.1, and
Megatron's in August 2026), and the same module may have one more part in its name, by the version of transformers
(Gemma 3's `vision_model`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from precisionctl.architectures.config_keys import Config
from precisionctl.errors import DamagedCheckpoint, shown
from precisionctl.model.text_config import text_part
from precisionctl.untrusted.safe_json import mapping_or_empty

if TYPE_CHECKING:
    from numpy.typing import NDArray

Order: TypeAlias = "Callable[[NDArray[np.int64], Config], list[NDArray[np.int64]]]"
"""Of a tower's config and the numbers of the rows of Bridge's tensor: those that each Hugging Face tensor has."""


@dataclass(frozen=True)
class BridgeRow:
    """One of Bridge's tensors, and those that it is in published files: the tensor as it is, its rows in another
    `order`, or a matrix `transposed`."""

    bridge: str
    names: str | tuple[str, ...]
    order: Order | None = None
    transposed: bool = False

    @property
    def hf(self) -> tuple[str, ...]:
        return (self.names,) if isinstance(self.names, str) else self.names


def _interleaved(rows: NDArray[np.int64], heads: object, groups: object) -> list[NDArray[np.int64]]:
    """The rows of query, key and value in Megatron's `[q_0 .. q_{r-1}, k, v]` of each query group. Raises
    DamagedCheckpoint for numbers of heads that do not divide them so."""
    if type(heads) is not int or type(groups) is not int or not 0 < groups <= heads or heads % groups:
        raise DamagedCheckpoint(f"{shown(heads)} heads in {shown(groups)} groups", do="Is config.json this model's?")
    if not len(rows) or len(rows) % (heads + 2 * groups):
        what = f"{len(rows)} rows are not query, key and value of {heads} heads in {groups} groups"
        raise DamagedCheckpoint(what, do="Is config.json this model's?")
    grouped = rows.reshape(groups, heads // groups + 2, -1)
    return [part.reshape(-1) for part in (grouped[:, :-2], grouped[:, -2], grouped[:, -1])]


def _query_key_value(rows: NDArray[np.int64], config: Config) -> list[NDArray[np.int64]]:
    """One tensor: all queries, all keys, all values."""
    heads = mapping_or_empty(config.get("vision_config")).get("num_heads")
    return [np.concatenate(_interleaved(rows, heads, heads))]


def _grouped_query_key_value(rows: NDArray[np.int64], config: Config) -> list[NDArray[np.int64]]:
    """The same, with fewer keys and values than queries."""
    tower = mapping_or_empty(config.get("vision_config"))
    return [np.concatenate(_interleaved(rows, tower.get("num_heads"), tower.get("num_key_value_heads")))]


def _radio_query_key_value(rows: NDArray[np.int64], config: Config) -> list[NDArray[np.int64]]:
    """As `_query_key_value`, of a RADIO tower: of its heads NVIDIA's own code says only the name of timm's model."""
    tower = mapping_or_empty(config.get("vision_config"))
    model = mapping_or_empty(tower.get("args")).get("model")
    heads = tower.get("num_attention_heads", _RADIO_HEADS.get(model) if isinstance(model, str) else None)
    return [np.concatenate(_interleaved(rows, heads, heads))]


_RADIO_HEADS = {"vit_huge_patch16_224": 16}
"""Bridge builds this one whatever config.json says (nemotron_vl_provider.py, nemotron_omni_provider.py)."""


def _text_query_key_value(rows: NDArray[np.int64], config: Config) -> list[NDArray[np.int64]]:
    text = mapping_or_empty(text_part(config))
    return _interleaved(rows, text.get("num_attention_heads"), text.get("num_key_value_heads"))


def _gate_up(rows: NDArray[np.int64], config: Config) -> list[NDArray[np.int64]]:
    if len(rows) % 2:
        raise DamagedCheckpoint(f"{len(rows)} rows are not gate and up")
    return [*rows.reshape(2, -1)]


def _as_they_are(*prefixes: str, within: str = "") -> tuple[BridgeRow, ...]:
    return tuple(BridgeRow(f"{prefix}.**", f"{within}{prefix}.**") for prefix in prefixes)


def _blocks(
    modules: dict[str, str], order: Order = _query_key_value, hf: str = "model.visual.blocks.*."
) -> tuple[BridgeRow, ...]:
    """The blocks of a tower that is Megatron's transformer, called `hf`: what all such towers have, and these
    `modules`; with its order of queries, keys and values."""
    norms = {
        f"{linear}.layer_norm_{kind}": f"{norm}.{kind}"
        for linear, norm in (("self_attention.linear_qkv", "norm1"), ("mlp.linear_fc1", "norm2"))
        for kind in ("weight", "bias")
    }
    names = {
        f"{linear}.{kind}": f"{module}.{kind}"
        for linear, module in (modules | {"self_attention.linear_proj": "attn.proj"}).items()
        for kind in ("weight", "bias")
    }
    block = "vision_model.decoder.layers.*."
    qkv = tuple(
        BridgeRow(f"{block}self_attention.linear_qkv.{kind}", f"{hf}attn.qkv.{kind}", order)
        for kind in ("weight", "bias")
    )
    return (*(BridgeRow(block + there, hf + here) for there, here in (norms | names).items()), *qkv)


_QWEN_3 = (
    *_blocks({"mlp.linear_fc1": "mlp.linear_fc1", "mlp.linear_fc2": "mlp.linear_fc2"}),
    BridgeRow(
        "vision_model.decoder.deepstack_merger_list.*.patch_norm.**", "model.visual.deepstack_merger_list.*.norm.**"
    ),
    BridgeRow("vision_model.decoder.deepstack_merger_list.**", "model.visual.deepstack_merger_list.**"),
    BridgeRow("vision_model.merger.patch_norm.**", "model.visual.merger.norm.**"),
    *(
        BridgeRow(f"vision_model.{module}.**", f"model.visual.{module}.**")
        for module in ("patch_embed", "pos_embed", "merger", "blocks", "deepstack_merger_list")
    ),
)
_LAYER_AHEAD = "mtp.layers.*.transformer_layer."
_PREDICTION_OF_EXAONE_4_5 = (
    *(
        BridgeRow(f"{_LAYER_AHEAD}{there}.weight", f"mtp.layers.*.{here}.weight")
        for there, here in {
            "self_attention.q_layernorm": "self_attn.q_norm",
            "self_attention.k_layernorm": "self_attn.k_norm",
            "self_attention.linear_proj": "self_attn.o_proj",
            "self_attention.linear_proj.post_layernorm": "post_attention_layernorm",
            "mlp.linear_fc2": "mlp.down_proj",
            "mlp.linear_fc2.post_layernorm": "post_feedforward_layernorm",
        }.items()
    ),
    BridgeRow(
        f"{_LAYER_AHEAD}self_attention.linear_qkv.weight",
        tuple(f"mtp.layers.*.self_attn.{part}_proj.weight" for part in "qkv"),
        _text_query_key_value,
    ),
    BridgeRow(
        f"{_LAYER_AHEAD}mlp.linear_fc1.weight",
        tuple(f"mtp.layers.*.mlp.{part}_proj.weight" for part in ("gate", "up")),
        _gate_up,
    ),
    BridgeRow("mtp.layers.0.enorm.weight", "mtp.pre_fc_norm_embedding.weight"),
    BridgeRow("mtp.layers.0.hnorm.weight", "mtp.pre_fc_norm_hidden.weight"),
    BridgeRow("mtp.layers.0.eh_proj.weight", "mtp.fc.weight"),
    BridgeRow("mtp.layers.0.final_layernorm.weight", "mtp.norm.weight"),
)
"""Which transformers passes over, and which travels with the towers."""
_EXAONE_4_5 = (
    *_blocks({"mlp.linear_fc2": "mlp.down_proj"}, _grouped_query_key_value),
    *(
        BridgeRow(
            f"vision_model.decoder.layers.*.mlp.linear_fc1.{kind}",
            tuple(f"model.visual.blocks.*.mlp.{linear}_proj.{kind}" for linear in ("gate", "up")),
            _gate_up,
        )
        for kind in ("weight", "bias")
    ),
    BridgeRow("vision_model.merger.patch_norm.**", "model.visual.merger.ln_q.**"),
    BridgeRow("vision_model.merger.linear_fc1.**", "model.visual.merger.mlp.0.**"),
    BridgeRow("vision_model.merger.linear_fc2.**", "model.visual.merger.mlp.2.**"),
    BridgeRow("vision_model.patch_embed.**", "model.visual.patch_embed.**"),
    *_PREDICTION_OF_EXAONE_4_5,
)

NEMOTRONS = (
    *("nemotron_h_omni", "NemotronH_Nano_VL_V2"),
    *("NemotronH_Nano_Omni_Reasoning_V3", "NemotronH_Super_Omni_Reasoning_V3"),
)
_RADIO = "vision_model.radio_model.model"
_NEMOTRON = (
    *_blocks({"mlp.linear_fc1": "mlp.fc1", "mlp.linear_fc2": "mlp.fc2"}, _radio_query_key_value, f"{_RADIO}.blocks.*."),
    BridgeRow("vision_model.class_token", f"{_RADIO}.patch_generator.cls_token.token"),
    BridgeRow("vision_model.position_embeddings", f"{_RADIO}.patch_generator.pos_embed"),
    BridgeRow("vision_model.embedder.weight", f"{_RADIO}.patch_generator.embedder.weight"),
    BridgeRow("vision_model.video_embedder.weight", f"{_RADIO}.patch_generator.video_embedder.weight"),
    BridgeRow("vision_projection.encoder.linear_fc1.layer_norm_weight", "mlp1.0.weight"),
    BridgeRow("vision_projection.encoder.linear_fc1.weight", "mlp1.1.weight"),
    BridgeRow("vision_projection.encoder.linear_fc2.weight", "mlp1.3.weight"),
    BridgeRow("sound_projection.encoder.linear_fc1.layer_norm_weight", "sound_projection.norm.weight"),
    BridgeRow("sound_projection.encoder.linear_fc1.weight", "sound_projection.linear1.weight"),
    BridgeRow("sound_projection.encoder.linear_fc2.weight", "sound_projection.linear2.weight"),
    BridgeRow("sound_model.encoder.**", "sound_encoder.encoder.**"),
)
"""Of Nemotron Nano VL and Omni. The former is within `llava_model.`, the latter was at first."""

_AUDIO_OF_THINKER = BridgeRow("audio_model.**", "thinker.audio_tower.**")
"""Within `thinker.`, as all of a Qwen that thinks and hears."""

TOWERS_IN_BRIDGE: Mapping[str, tuple[BridgeRow, ...]] = {
    "gemma3": (
        BridgeRow("vision_tower.vision_model.**", "vision_tower.vision_model.**"),
        BridgeRow("vision_tower.**", "vision_tower.vision_model.**"),
        BridgeRow("multi_modal_projector.mm_soft_embed_norm.**", "multi_modal_projector.mm_soft_emb_norm.**"),
        BridgeRow(
            "multi_modal_projector.proj.weight", "multi_modal_projector.mm_input_projection_weight", transposed=True
        ),
    ),
    "qwen2_5_vl": _as_they_are("visual"),
    "glm4v_moe": _as_they_are("visual", within="model."),
    "mistral3": _as_they_are("vision_tower", "multi_modal_projector"),
    "kimi_k25": _as_they_are("vision_tower", "mm_projector"),
    "qwen2_audio": _as_they_are("audio_tower", "multi_modal_projector"),
    "gemma4": _as_they_are("vision_tower", "embed_vision", "audio_tower", "embed_audio", within="model."),
    "minimax_m3_vl": _as_they_are("vision_tower", "multi_modal_projector", "patch_merge_mlp"),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _QWEN_3),
    "exaone4_5": _EXAONE_4_5,
    "step3p7": (
        *_as_they_are("vision_model"),
        BridgeRow("image_insert_embedding.align_projector.**", "vit_large_projector.**"),
    ),
    **dict.fromkeys(
        ("qwen2_5_omni", "qwen3_omni_moe"), (*_as_they_are("visual", within="thinker."), _AUDIO_OF_THINKER)
    ),
    "qwen3_asr": (_AUDIO_OF_THINKER,),
    **dict.fromkeys(NEMOTRONS, _NEMOTRON),
}
"""By `model_type`: the towers of wrappers that Bridge trains. The first row that fits a name is its row."""


def _tensors(prefix: str, both: str = "", weights: str = "") -> tuple[str, ...]:
    """Of modules by their names: weight and bias of `both`, and `weights` alone."""
    biased = (f"{prefix}.{module}.{kind}" for module in both.split() for kind in ("weight", "bias"))
    return (*biased, *(f"{prefix}.{module}.weight" for module in weights.split()))


ONCE = ""
_DEPTH, _LAYERS = "vision_config.depth", "vision_config.num_hidden_layers"
_VISUAL, _BLOCK, _SIGLIP = "model.visual", "model.visual.blocks.*", "vision_tower.vision_model"
_PROJECTOR, _RESBLOCK = "multi_modal_projector", "vision_model.transformer.resblocks.*"
_CLIP_LAYER = (
    "layer_norm1 layer_norm2 mlp.fc1 mlp.fc2 self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.out_proj"
)
_QWEN_3_5_TENSORS = {
    ONCE: _tensors(_VISUAL, "patch_embed.proj merger.norm merger.linear_fc1 merger.linear_fc2", "pos_embed"),
    _DEPTH: _tensors(_BLOCK, "norm1 norm2 attn.qkv attn.proj mlp.linear_fc1 mlp.linear_fc2"),
}
_QWEN_3_TENSORS = _QWEN_3_5_TENSORS | {
    "vision_config.deepstack_visual_indexes": _tensors(
        f"{_VISUAL}.deepstack_merger_list.*", "norm linear_fc1 linear_fc2"
    ),
}
_GATED_MLP = "attn.qkv attn.proj mlp.gate_proj mlp.up_proj mlp.down_proj"
_WHISPER_LAYER = "self_attn_layer_norm final_layer_norm fc1 fc2 self_attn.q_proj self_attn.v_proj self_attn.out_proj"
_THINKER_AUDIO, _THINKER_VISUAL = "thinker.audio_tower", "thinker.visual"
_QWEN_3_ASR_TENSORS = {
    ONCE: _tensors(_THINKER_AUDIO, "conv2d1 conv2d2 conv2d3 ln_post proj1 proj2", "conv_out"),
    "thinker_config.audio_config.encoder_layers": _tensors(
        f"{_THINKER_AUDIO}.layers.*", f"{_WHISPER_LAYER} self_attn.k_proj"
    ),
}

TENSORS_OF_TOWERS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "gemma3": {
        ONCE: (
            *_tensors(_SIGLIP, "embeddings.patch_embedding post_layernorm", "embeddings.position_embedding"),
            *_tensors(_PROJECTOR, weights="mm_soft_emb_norm"),
            f"{_PROJECTOR}.mm_input_projection_weight",
        ),
        _LAYERS: _tensors(f"{_SIGLIP}.encoder.layers.*", _CLIP_LAYER),
    },
    "qwen2_5_vl": {
        ONCE: _tensors("visual", "merger.mlp.0 merger.mlp.2", "patch_embed.proj merger.ln_q"),
        _DEPTH: _tensors("visual.blocks.*", _GATED_MLP, "norm1 norm2"),
    },
    "glm4v_moe": {
        ONCE: _tensors(
            _VISUAL,
            "patch_embed.proj downsample merger.post_projection_norm",
            "embeddings.position_embedding post_conv_layernorm post_layernorm "
            "merger.proj merger.gate_proj merger.up_proj merger.down_proj",
        ),
        _DEPTH: _tensors(_BLOCK, weights=f"norm1 norm2 {_GATED_MLP}"),
    },
    "mistral3": {
        ONCE: (
            *_tensors("vision_tower", weights="patch_conv ln_pre"),
            *_tensors(_PROJECTOR, weights="norm patch_merger.merging_layer linear_1 linear_2"),
        ),
        _LAYERS: _tensors(
            "vision_tower.transformer.layers.*",
            weights="attention_norm ffn_norm attention.q_proj attention.k_proj attention.v_proj attention.o_proj "
            "feed_forward.gate_proj feed_forward.up_proj feed_forward.down_proj",
        ),
    },
    "kimi_k25": {
        ONCE: (
            *_tensors("vision_tower", "patch_embed.proj encoder.final_layernorm", "patch_embed.pos_emb"),
            *_tensors("mm_projector", "pre_norm proj.0 proj.2"),
        ),
        **dict.fromkeys(
            ("vision_config.vt_num_hidden_layers", _LAYERS),  # published files', transformers'
            _tensors("vision_tower.encoder.blocks.*", "norm0 norm1 wqkv wo mlp.fc0 mlp.fc1"),
        ),
    },
    "qwen2_audio": {
        ONCE: (*_tensors("audio_tower", "conv1 conv2 layer_norm", "embed_positions"), *_tensors(_PROJECTOR, "linear")),
        "audio_config.encoder_layers": _tensors("audio_tower.layers.*", _WHISPER_LAYER, "self_attn.k_proj"),
    },
    "gemma4": {
        ONCE: (
            "model.vision_tower.patch_embedder.input_proj.weight",
            "model.vision_tower.patch_embedder.position_embedding_table",
            "model.embed_vision.embedding_projection.weight",
        ),
        _LAYERS: (
            *_tensors(
                "model.vision_tower.encoder.layers.*",
                weights="input_layernorm post_attention_layernorm pre_feedforward_layernorm post_feedforward_layernorm "
                "self_attn.q_norm self_attn.k_norm",
            ),
            *(
                f"model.vision_tower.encoder.layers.*.{module}_proj.linear.weight"
                for module in (*(f"self_attn.{part}" for part in "qkvo"), "mlp.gate", "mlp.up", "mlp.down")
            ),
        ),
        "audio_config.num_hidden_layers": (
            "model.embed_audio.embedding_projection.weight",
            *_tensors("model.audio_tower", "output_proj"),
            *_tensors(
                "model.audio_tower.subsample_conv_projection",
                weights="input_proj_linear layer0.conv layer0.norm layer1.conv layer1.norm",
            ),
            *_tensors(
                "model.audio_tower.layers.*",
                weights="norm_pre_attn norm_post_attn norm_out self_attn.relative_k_proj "
                "lconv1d.pre_layer_norm lconv1d.conv_norm lconv1d.depthwise_conv1d",
            ),
            "model.audio_tower.layers.*.self_attn.per_dim_scale",
            *(
                f"model.audio_tower.layers.*.{module}.linear.weight"
                for module in (
                    *(f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "post")),
                    *("lconv1d.linear_start", "lconv1d.linear_end"),
                )
            ),
            *(
                f"model.audio_tower.layers.*.feed_forward{number}.{module}.weight"
                for number in (1, 2)
                for module in ("pre_layer_norm", "post_layer_norm", "ffw_layer_1.linear", "ffw_layer_2.linear")
            ),
        ),
    },
    "minimax_m3_vl": {
        ONCE: (
            *_tensors(_SIGLIP, "pre_layrnorm", "embeddings.patch_embedding"),
            *_tensors(_PROJECTOR, "linear_1 linear_2"),
            *_tensors("patch_merge_mlp", "linear_1 linear_2"),
        ),
        _LAYERS: _tensors(f"{_SIGLIP}.encoder.layers.*", _CLIP_LAYER),
    },
    "qwen2_5_omni": {
        ONCE: (
            *_tensors(_THINKER_VISUAL, "merger.mlp.0 merger.mlp.2", "patch_embed.proj merger.ln_q"),
            *_tensors(_THINKER_AUDIO, "conv1 conv2 ln_post proj", "audio_bos_eos_token"),
        ),
        "thinker_config.vision_config.depth": _tensors(
            f"{_THINKER_VISUAL}.blocks.*",
            "attn.q attn.k attn.v attn.proj mlp.gate_proj mlp.up_proj mlp.down_proj",
            "norm1 norm2",
        ),
        "thinker_config.audio_config.encoder_layers": _tensors(
            f"{_THINKER_AUDIO}.layers.*", _WHISPER_LAYER, "self_attn.k_proj"
        ),
    },
    "qwen3_omni_moe": {
        ONCE: (
            *_tensors(_THINKER_VISUAL, "patch_embed.proj merger.ln_q merger.mlp.0 merger.mlp.2", "pos_embed"),
            *_QWEN_3_ASR_TENSORS[ONCE],
        ),
        "thinker_config.vision_config.depth": _tensors(
            f"{_THINKER_VISUAL}.blocks.*", "norm1 norm2 attn.qkv attn.proj mlp.linear_fc1 mlp.linear_fc2"
        ),
        "thinker_config.vision_config.deepstack_visual_indexes": _tensors(
            f"{_THINKER_VISUAL}.merger_list.*", "ln_q mlp.0 mlp.2"
        ),
        **{key: tensors for key, tensors in _QWEN_3_ASR_TENSORS.items() if key != ONCE},
    },
    "qwen3_asr": _QWEN_3_ASR_TENSORS,
    **dict.fromkeys(
        NEMOTRONS,
        {
            ONCE: (
                *(f"{_RADIO}.patch_generator.{each}" for each in ("cls_token.token", "pos_embed", "embedder.weight")),
                *_tensors("mlp1", weights="0 1 3"),
            ),
            _LAYERS: _tensors(f"{_RADIO}.blocks.*", "norm1 norm2 attn.qkv attn.proj mlp.fc1 mlp.fc2"),
            **dict.fromkeys(
                (f"{part}_config.num_hidden_layers" for part in ("audio", "sound")),  # transformers', NVIDIA's
                (
                    *_tensors("sound_projection", weights="norm linear1 linear2"),
                    *_tensors("sound_encoder.encoder.subsampling", "linear layers.0"),
                    *_tensors(
                        "sound_encoder.encoder.layers.*",
                        "norm_self_att norm_conv norm_feed_forward1 norm_feed_forward2 norm_out conv.norm",
                        "feed_forward1.linear1 feed_forward1.linear2 feed_forward2.linear1 feed_forward2.linear2 "
                        "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj self_attn.relative_k_proj "
                        "conv.pointwise_conv1 conv.pointwise_conv2 conv.depthwise_conv",
                    ),
                    *(
                        f"sound_encoder.encoder.layers.*.{name}"
                        for name in ("self_attn.bias_u", "self_attn.bias_v", "conv.norm.running_mean")
                    ),
                    "sound_encoder.encoder.layers.*.conv.norm.running_var",
                ),
            ),
        },
    ),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), _QWEN_3_TENSORS),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), _QWEN_3_5_TENSORS),
    "exaone4_5": {
        ONCE: _tensors(_VISUAL, "merger.mlp.0 merger.mlp.2", "patch_embed.proj merger.ln_q"),
        _DEPTH: _tensors(_BLOCK, _GATED_MLP, "norm1 norm2"),
    },
    "step3p7": {
        ONCE: (
            *_tensors("vision_model", "ln_pre vit_downsampler1 vit_downsampler2", "conv1"),
            "vision_model.positional_embedding",
            "vit_large_projector.weight",
        ),
        **dict.fromkeys(
            ("vision_config.layers", _LAYERS),  # published files', transformers'
            (
                *_tensors(_RESBLOCK, "ln_1 ln_2 attn.out_proj mlp.c_fc mlp.c_proj"),
                *(
                    f"{_RESBLOCK}.{name}"
                    for name in ("attn.in_proj_weight", "attn.in_proj_bias", "ls_1.gamma", "ls_2.gamma")
                ),
            ),
        ),
    },
}
"""By `model_type`: the tensors that all towers of the kind have, under published names: those that are there `ONCE`,
and those that each layer has, by the key of config.json that says how many layers there are. Where a model hears only
if config.json says how (OPTIONAL_PARTS), those without a number are there once if it does."""

TALKERS = dict.fromkeys(("qwen2_5_omni", "qwen3_omni_moe"), "talker.")
"""What Bridge leaves out of these (qwen25_omni_bridge.py, qwen3_omni_bridge.py), by the beginning of its names."""

OPTIONAL_PARTS = ("audio_config", "sound_config")
"""Parts of config.json that are absent, or null, of models that do not hear."""


def in_bridge(model_type: str, name: str) -> tuple[BridgeRow, tuple[str, ...]] | None:
    """The row of one of Bridge's names, and the tensor's names in published files; None for what is no tower."""
    for row in TOWERS_IN_BRIDGE.get(model_type, ()):
        if match := _pattern(row.bridge).fullmatch(name):
            return row, tuple(_filled(hf, match.groups()) for hf in row.hf)
    return None


def is_tower(name: str) -> bool:
    """Whether a name begins as towers of some wrapper do in Bridge, and as no text model's."""
    return name.startswith(_MODULES)


_MODULES = tuple({f"{row.bridge.split('.')[0]}." for rows in TOWERS_IN_BRIDGE.values() for row in rows} - {"mtp."})


@lru_cache
def _pattern(bridge: str) -> re.Pattern[str]:
    return re.compile(re.escape(bridge).replace(r"\*\*", "(.+)").replace(r"\*", r"(\d{1,9})"))


def _filled(template: str, parts: Iterable[str]) -> str:
    """A name with what its stars stand for."""
    left = iter(parts)
    return re.sub(r"\*+", lambda _: next(left), template)
