"""Gemma 3n (text): Gemma 3 between alternating updates of several residual streams (AltUp), with a low-rank residual
beside attention (LAuReL), an embedding of each token for each layer, gates of which the first layers' MLPs keep the
largest channels alone, and last layers that read keys and values of earlier ones.

Traps: norms store their factor, not less one as in Gemma 3; scores are not scaled; values have a norm without weights.
Fewer tokens have embeddings for each layer than are in the vocabulary: those of images and sound have none, and read
the first row. `intermediate_size` and `activation_sparsity_pattern` are lists by layer. Layers that share keys and
values have projections and a norm of their own in published files, and nothing reads them: transformers neither loads
nor saves them. AltUp's coefficients are clamped while a model is trained alone.
"""

from precisionctl.architectures import config_keys as keys
from precisionctl.architectures.config_layers import all_but_every, sliding_window
from precisionctl.architectures.param_map import Architecture, Row
from precisionctl.architectures.rearrangements import GAMMA
from precisionctl.architectures.rope import rope_by_kind
from precisionctl.architectures.shared import llama_rows as llama
from precisionctl.architectures.shared.gemma_rows import PER_LAYER, QKV, sharing_attention
from precisionctl.architectures.tables.gemma2 import SCALED_EMBEDDING
from precisionctl.errors import UnknownArchitecture, shown
from precisionctl.model.model_shape import ModelShape
from precisionctl.sizes import counted

_HF, _MEGATRON = "model.layers.{layer}.", "decoder.layers.{layer}."

_LAUREL = (
    Row(f"{_HF}laurel.linear_left.weight", f"{_MEGATRON}laurel.linear_left.weight", ("laurel_rank", "hidden_size")),
    Row(f"{_HF}laurel.linear_right.weight", f"{_MEGATRON}laurel.linear_right.weight", ("hidden_size", "laurel_rank")),
    Row(
        f"{_HF}laurel.post_laurel_norm.weight",
        f"{_MEGATRON}laurel.post_laurel_norm.weight",
        ("hidden_size",),
        GAMMA,
    ),
)

_ALTUP = (
    Row(f"{_HF}altup.correct_output_scale", f"{_MEGATRON}altup.correct_output_scale", ("hidden_size",)),
    Row(f"{_HF}altup.router_norm.weight", f"{_MEGATRON}altup.router_norm.weight", ("hidden_size",), GAMMA),
    *(
        Row(f"{_HF}altup.{name}.weight", f"{_MEGATRON}altup.{name}.weight", sizes)
        for name, sizes in {
            "correction_coefs": ("altup.num_inputs", "altup.num_inputs"),
            "prediction_coefs": ("altup.mixing_size", "altup.num_inputs"),
            "modality_router": ("altup.num_inputs", "hidden_size"),
        }.items()
    ),
)
"""As in transformers: neither Megatron-Core nor Megatron-Bridge has them. No GEMM of these, of LAuReL's and of those
around the layers computes in FP8."""


def _around_layers(model: ModelShape) -> tuple[Row, ...]:
    """What makes streams of the embedding, with which it is on the first stage of a pipeline, and one of them again."""
    return tuple(
        Row(f"model.{name}.{stream}.weight", f"{module}.{name}.{stream}.weight", ("hidden_size", "hidden_size"))
        for module, name in (("embedding", "altup_projections"), ("decoder", "altup_unembed_projections"))
        for stream in range(model.altup.num_inputs - 1 if model.altup else 0)
    )


def _read_mlps(config: keys.Config) -> keys.Fields:
    number, key = keys.layers(config), "intermediate_size"
    said = config.get(key)
    if isinstance(said, list):
        listed = keys.as_list(said, key, counted(number, "size"), (number,), (int,))
        if len({*listed}) > 1:
            what = f"no gemma3n_text known here has {key}={shown(said)}"
            raise UnknownArchitecture(what, do="Its table was made for MLPs of one size, as released models have them.")
        said = listed[0]
    sparsity = config.get(_SPARSITY)
    if sparsity is None:
        sparsity = [0.95 if layer < 10 < number else 0.0 for layer in range(number)]
    listed = keys.as_list(sparsity, _SPARSITY, counted(number, "part"), (number,), (int, float))
    return {
        "ffn_hidden_size": keys.size({key: said}, key),
        "activation_sparsity": tuple(map(float, listed)) if any(listed) else None,
    }


_SPARSITY = "activation_sparsity_pattern"


def _write_mlps(model: ModelShape) -> keys.Config:
    return {
        "intermediate_size": [model.ffn_hidden_size] * model.num_layers,
        _SPARSITY: [model.sparsity(layer) for layer in range(model.num_layers)],
    }


def _read_per_layer(config: keys.Config) -> keys.Fields:
    said = {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262144, **config}
    tokens = keys.size(said, "vocab_size_per_layer_input")
    return {
        "per_layer_embed_dim": keys.size(said, "hidden_size_per_layer_input"),
        "per_layer_vocab_size": None if tokens == keys.size(config, "vocab_size") else tokens,
    }


def _write_per_layer(model: ModelShape) -> keys.Config:
    return {
        "hidden_size_per_layer_input": model.per_layer_embed_dim,
        "vocab_size_per_layer_input": model.per_layer_tokens,
    }


ARCHITECTURE = Architecture(
    model_types={"gemma3n_text": "Gemma3nForCausalLM"},
    behind={"q_norm": "q_proj", "k_norm": "v_proj"},
    rows=llama.model_rows(
        *llama.SEPARATE_NORM,
        *sharing_attention(QKV),
        *_LAUREL,
        *llama.AFTER_ATTENTION,
        *_ALTUP,
        *PER_LAYER,
    ),
    more_rows=_around_layers,
    config=(
        *keys.SIZES_BESIDE_MLP,
        keys.Rule(("intermediate_size", _SPARSITY), _read_mlps, _write_mlps),
        keys.heads(num_attention_heads=8, num_key_value_heads=2, head_dim=256),
        keys.Rule(("hidden_size_per_layer_input", "vocab_size_per_layer_input"), _read_per_layer, _write_per_layer),
        keys.always("rounded_per_layer_multipliers", True),
        keys.Key("num_kv_shared_layers", "num_kv_shared_layers", 15),
        keys.Key("laurel_rank", "laurel_rank", 64),
        keys.Key("altup.num_inputs", "altup_num_inputs", 4),
        keys.Key("altup.coef_clip", "altup_coef_clip", None, absent=120.0),
        keys.only("altup_active_idx", 0),
        keys.only("altup_correct_scale", True),
        keys.only("attention_bias", False),
        SCALED_EMBEDDING,
        keys.activation("hidden_activation", keys.GELU_TANH, "gelu_pytorch_tanh"),
        keys.always("qk_layernorm", True),
        keys.always("v_l2_norm", True),
        keys.always("query_pre_attn_scalar", 1.0),
        keys.always("post_layernorms", True),
        keys.Key("final_logit_softcapping", "final_logit_softcapping", None, absent=30.0),
        keys.Key("norm_epsilon", "rms_norm_eps", 1e-6),
        rope_by_kind(1e6, 1e4, local_key=True),
        sliding_window(all_but_every(5), absent=512),
        keys.tied(True),
    ),
    names_by="this project",
)
