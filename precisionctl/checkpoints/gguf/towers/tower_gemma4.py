"""The towers of Gemma 4: of images, and of sound where a model has it.

Sources: llama.cpp's tools/mtmd/models/gemma4v.cpp and gemma4a.cpp, what mtmd-audio.cpp makes of sound, and
conversion/gemma.py, of llama-cpp-python 0.3.36.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from precisionctl.checkpoints.gguf.metadata_bytes import GgufValue
from precisionctl.checkpoints.gguf.towers.tower import (
    Tower,
    TowerKind,
    TowerRow,
    TowerSettings,
    TowerSizes,
    no_tower,
    norm,
)
from precisionctl.checkpoints.gguf.towers.tower_changes import COLOURS_LAST, NUMBER, SOFTPLUS
from precisionctl.checkpoints.tensor_changes import KERNEL
from precisionctl.dtypes import DType
from precisionctl.untrusted.safe_json import mapping_or_empty

_LOUDER = "of sound llama.cpp takes the larger of a band and 0.001, and transformers their sum"
_BOUNDS = ("input_min", "input_max", "output_min", "output_max")
_IMAGE_SIZE = 224
"""The converter's word for any size: llama.cpp takes images of all."""
_CAUSAL = (1536, 2560)
"""Hidden sizes of the text models (E2B and E4B) in which tokens of an image attend to those before alone."""
_MEL_BINS = 128


def gemma4(settings: TowerSettings) -> Tower:
    rows, metadata = _of_images(settings)
    projectors: dict[str, GgufValue] = {
        "clip.vision.projector_type": "gemma4v",
        "clip.vision.attention.layer_norm_epsilon": settings.epsilon(settings.tower["rms_norm_eps"]),
        "clip.use_gelu": True,
    }
    layers, said = settings.size("num_hidden_layers"), settings.config.get("audio_config")
    if not said:
        return Tower(layers, rows, metadata | projectors)
    if not isinstance(said, Mapping):
        raise no_tower("`audio_config` of its config.json is no object")
    sound = replace(settings, tower={**_SOUND, **said})
    more_rows, more = _of_sound(sound)
    projectors |= {
        "clip.audio.projector_type": "gemma4a",
        "clip.audio.num_mel_bins": np.uint32(_MEL_BINS),
        "clip.audio.attention.layer_norm_epsilon": sound.epsilon(sound.tower["rms_norm_eps"]),
    }
    others = {"audio_tower.": sound.size("num_hidden_layers")}
    return Tower(layers, rows | more_rows, metadata | more | projectors, layers_of=others, otherwise=_LOUDER)


def _of_images(settings: TowerSettings) -> tuple[dict[str, TowerRow], dict[str, GgufValue]]:
    settings.check(hidden_activation="gelu_pytorch_tanh", pooling_kernel_size=3)
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim", "patch_size")
    width, mlp, layers, heads, head, patch = (settings.size(key) for key in keys)
    settings.check(num_key_value_heads=heads)
    both_ways = None if settings.model.hidden_size in _CAUSAL else "vision"
    settings.check(mapping_or_empty(settings.config.get("text_config")), use_bidirectional_attention=both_ways)
    if heads * head != width:
        raise no_tower(f"its tower has {heads} heads of {head} in {width}")
    settings.check_rotary(heads, width, 100)
    not_normalised = replace(settings, processor={"do_normalize": False, **settings.processor})
    metadata = not_normalised.common(TowerSizes(width, mlp, layers, heads, _IMAGE_SIZE, patch))
    block, blk, clipped = "vision_tower.encoder.layers.{layer}", "v.blk.{layer}", _clipped(settings)
    positions = settings.size("position_embedding_size")
    rows = {
        "vision_tower.patch_embedder.input_proj.weight": TowerRow(
            ("v.patch_embd.weight",), (width, 3 * patch * patch), COLOURS_LAST
        ),
        "vision_tower.patch_embedder.position_embedding_table": TowerRow(
            ("v.position_embd.weight",), (2, positions, width)
        ),
        "embed_vision.embedding_projection.weight": TowerRow(
            ("mm.input_projection.weight",), (settings.model.hidden_size, width)
        ),
    }
    for part, gguf in {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_out"}.items():
        rows |= _linear(f"{block}.self_attn.{part}", f"{blk}.{gguf}", width, width, clipped)
    for part, gguf, shape in (
        ("gate_proj", "ffn_gate", (mlp, width)),
        ("up_proj", "ffn_up", (mlp, width)),
        ("down_proj", "ffn_down", (width, mlp)),
    ):
        rows |= _linear(f"{block}.mlp.{part}", f"{blk}.{gguf}", *shape, clipped)
    for part, gguf, size in (
        ("self_attn.q_norm", "attn_q_norm", head),
        ("self_attn.k_norm", "attn_k_norm", head),
        ("input_layernorm", "ln1", width),
        ("post_attention_layernorm", "attn_post_norm", width),
        ("pre_feedforward_layernorm", "ln2", width),
        ("post_feedforward_layernorm", "ffn_post_norm", width),
    ):
        rows |= norm(f"{block}.{part}", f"{blk}.{gguf}", size, ["weight"])
    if settings.tower["standardize"]:
        for part in ("std_bias", "std_scale"):
            rows[f"vision_tower.{part}"] = TowerRow((f"v.{part}",), (width,))
    return rows, metadata


def _of_sound(settings: TowerSettings) -> tuple[dict[str, TowerRow], dict[str, GgufValue]]:
    settings.check(**_COMPUTED)
    said = settings.processor.get("feature_extractor")
    settings.check({**_FEATURES, **mapping_or_empty(said)}, **_FEATURES)
    width, layers, heads, last = (
        settings.size(key) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "output_proj_dims")
    )
    if width % (2 * heads):
        raise no_tower(f"its tower of sound has {heads} heads in {width}")
    first, second = _COMPUTED["subsampling_conv_channels"]
    subsample, block, blk = "audio_tower.subsample_conv_projection", "audio_tower.layers.{layer}", "a.blk.{layer}"
    clipped = _clipped(settings)
    rows = {
        f"{subsample}.input_proj_linear.weight": TowerRow(
            ("a.input_projection.weight",), (width, _MEL_BINS // 4 * second), dtype=DType.float32
        ),
        "audio_tower.output_proj.weight": TowerRow(("a.pre_encode.out.weight",), (last, width)),
        "audio_tower.output_proj.bias": TowerRow(("a.pre_encode.out.bias",), (last,)),
        "embed_audio.embedding_projection.weight": TowerRow(
            ("mm.a.input_projection.weight",), (settings.model.hidden_size, last)
        ),
        f"{block}.self_attn.relative_k_proj.weight": TowerRow((f"{blk}.attn_k_rel.weight",), (width, width)),
        f"{block}.self_attn.per_dim_scale": TowerRow((f"{blk}.per_dim_scale.weight",), (width // heads,), SOFTPLUS),
        f"{block}.lconv1d.depthwise_conv1d.weight": TowerRow(
            (f"{blk}.conv_dw.weight",), (width, 1, _COMPUTED["conv_kernel_size"]), KERNEL, dtype=DType.float32
        ),
    }
    for number, (channels, before) in enumerate([(first, 1), (second, first)]):
        rows[f"{subsample}.layer{number}.conv.weight"] = TowerRow(
            (f"a.conv1d.{number}.weight",), (channels, before, 3, 3), dtype=DType.float32
        )
        rows |= norm(f"{subsample}.layer{number}.norm", f"a.conv1d.{number}.norm", channels, ["weight"])
    for part, gguf, shape in (
        ("feed_forward1.ffw_layer_1", "ffn_up", (4 * width, width)),
        ("feed_forward1.ffw_layer_2", "ffn_down", (width, 4 * width)),
        ("feed_forward2.ffw_layer_1", "ffn_up_1", (4 * width, width)),
        ("feed_forward2.ffw_layer_2", "ffn_down_1", (width, 4 * width)),
        ("self_attn.q_proj", "attn_q", (width, width)),
        ("self_attn.k_proj", "attn_k", (width, width)),
        ("self_attn.v_proj", "attn_v", (width, width)),
        ("self_attn.post", "attn_out", (width, width)),
        ("lconv1d.linear_start", "conv_pw1", (2 * width, width)),
        ("lconv1d.linear_end", "conv_pw2", (width, width)),
    ):
        rows |= _linear(f"{block}.{part}", f"{blk}.{gguf}", *shape, clipped)
    for part, gguf in _NORMS_OF_SOUND.items():
        rows |= norm(f"{block}.{part}", f"{blk}.{gguf}", width, ["weight"])
    sizes = {
        "projection_dim": settings.model.hidden_size,
        "embedding_length": width,
        "feed_forward_length": 4 * width,
        "block_count": layers,
        "attention.head_count": heads,
    }
    return rows, {"clip.has_audio_encoder": True, **{f"clip.audio.{key}": np.uint32(n) for key, n in sizes.items()}}


def _clipped(settings: TowerSettings) -> bool:
    return settings.tower["use_clipped_linears"] is True


def _linear(hf: str, gguf: str, rows: int, columns: int, clipped: bool) -> dict[str, TowerRow]:
    """A linear without a bias, and the bounds of what goes in and comes out."""
    bounds = {f"{hf}.{each}": TowerRow((f"{gguf}.{each}",), (), NUMBER) for each in _BOUNDS if clipped}
    return {f"{hf}.linear.weight": TowerRow((f"{gguf}.weight",), (rows, columns))} | bounds


_NORMS_OF_SOUND = {
    "feed_forward1.pre_layer_norm": "ffn_norm",
    "feed_forward1.post_layer_norm": "ffn_post_norm",
    "feed_forward2.pre_layer_norm": "ffn_norm_1",
    "feed_forward2.post_layer_norm": "ffn_post_norm_1",
    "norm_pre_attn": "attn_pre_norm",
    "norm_post_attn": "attn_post_norm",
    "norm_out": "ln2",
    # the two have each other's name in llama.cpp, which reads them so
    "lconv1d.pre_layer_norm": "conv_norm",
    "lconv1d.conv_norm": "norm_conv",
}
_COMPUTED: Mapping[str, Any] = {
    "hidden_act": "silu",
    "subsampling_conv_channels": [_MEL_BINS, 32],
    "conv_kernel_size": 5,
    "residual_weight": 0.5,
    "attention_chunk_size": 12,
    "attention_context_left": 13,
    "attention_context_right": 0,
    "attention_logit_cap": 50.0,
    "rms_norm_eps": 1e-6,
    "gradient_clipping": 1e10,
}
"""What llama.cpp computes of every tower of sound; it clips nothing, and so does 1e10. These are the defaults of
transformers' class too."""
_FEATURES: Mapping[str, Any] = {
    "feature_size": _MEL_BINS,
    "sampling_rate": 16000,
    "frame_length_ms": 20,
    "hop_length_ms": 10,
    "min_frequency": 0,
    "max_frequency": 8000,
    "preemphasis": 0,
    "fft_overdrive": False,
    "dither": 0,
    "input_scale_factor": 1,
    "mel_floor": 1e-3,
    "per_bin_mean": None,
    "per_bin_stddev": None,
}
"""What llama.cpp makes of sound, by the names and with the defaults of transformers' feature extractor."""
_SOUND: Mapping[str, Any] = {
    **_COMPUTED,
    "hidden_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "output_proj_dims": 1536,
    "use_clipped_linears": True,
}
_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "pooling_kernel_size": 3,
    "patch_size": 16,
    "position_embedding_size": 10240,
    "use_clipped_linears": False,
    "standardize": False,
}
TOWERS = {"gemma4": TowerKind(gemma4, _DEFAULTS)}
"""By the `model_type` of the wrapper."""
