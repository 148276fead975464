"""Step 3.5, in whose layers with a window attention has more heads, and turns all of a head by another base.

Sources: llama.cpp's src/models/step35.cpp, and conversion/step3.py.
"""

from collections.abc import Callable

from precisionctl.architectures.config_keys import Fields
from precisionctl.architectures.config_layers import by_kind
from precisionctl.checkpoints.gguf import expert_keys, metadata_keys as keys, rope_keys, tensor_rows as rows
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys
from precisionctl.checkpoints.gguf.metadata import Described
from precisionctl.checkpoints.tensor_changes import PLUS_ONE
from precisionctl.errors import DamagedCheckpoint
from precisionctl.model.model_shape import ModelShape

_HEADS = "attention.head_count"
_TURNED = ("rope.dimension_count", "rope.dimension_count_swa")
_WIDTHS = ("num_attention_heads", "rotary_percent")


def _windows(model: ModelShape) -> list[bool]:
    """Whether each layer has the window. Those of prediction have it."""
    if model.window_layers is None or all(model.window_layers) or not any(model.window_layers):
        raise keys.refused(model, "with windows in all layers or in none")
    return [*model.window_layers, *[True] * model.mtp_num_layers]


def _read_attention(file: Described) -> Fields:
    """Of layers without a window, llama.cpp turns half of what a file says, which by itself is all of a head."""
    windows, heads = file.flags(keys.PATTERN), file.counts(_HEADS, least=1)
    if windows is None:
        raise DamagedCheckpoint(f"no `{file.architecture}.{keys.PATTERN}`", do="Copy it again.")
    of_all = [*windows, *[True] * file.prediction_layers()]
    file.expect(keys.PATTERN, of_all)
    in_window, elsewhere = (
        keys.one_of(file, _HEADS, [number for number, window in zip(heads, of_all, strict=True) if window is kind])
        for kind in (True, False)
    )
    size = keys.head_size(file)
    turned = file.count(_TURNED[0], size)
    return {
        "num_query_groups": keys.one_of(file, keys.HEADS_KV, file.counts(keys.HEADS_KV, least=1)),
        "window_layers": tuple(windows),
        **by_kind(
            windows,
            dict(zip(_WIDTHS, (in_window, file.count(_TURNED[1], turned) / size), strict=True)),
            dict(zip(_WIDTHS, (elsewhere, turned // 2 / size), strict=True)),
        ),
    }


_ATTENTION = keys.GgufEntry(
    ("num_query_groups", "window_layers", *(f"{of}{each}" for of in ("", "global_attention.") for each in _WIDTHS)),
    (_HEADS, keys.HEADS_KV, keys.PATTERN, *_TURNED),
    _read_attention,
    lambda model: {_HEADS: [model.attention_of(window).num_attention_heads for window in _windows(model)]},
)
_LAYERS_WITH_EXPERTS = keys.ignored_keys(
    "leading_dense_block_count",
    "moe_every_n_layers",
    write=lambda model: {
        "leading_dense_block_count": (*keys.value_of(model, "moe.layer_freq"), True).index(True),
        "moe_every_n_layers": 1,
    },
)
"""llama.cpp goes by the tensors, as ROUTED_LAYERS does."""


def _limits(field: str, key: str, heeds: Callable[[Described], tuple[bool, ...]]) -> keys.GgufEntry:
    """What layers are clamped to, of those that heed it. 0 is nothing, and so are the limits of layers of
    prediction."""

    def read(file: Described) -> Fields:
        listed = file.numbers(key) or [0.0] * file.decoder_layers()
        limits = tuple(limit if heeded else 0.0 for limit, heeded in zip(listed, heeds(file), strict=True))
        return {field: limits if any(limits) else None}

    def write(model: ModelShape) -> keys.Said:
        limits = keys.value_of(model, field) or [0.0] * model.num_layers
        return {key: [*limits, *[0.0] * model.mtp_num_layers]}

    return keys.GgufEntry((field,), (key,), read, write)


_OUTPUT_LAYERS = keys.GgufEntry(
    ("mtp_output_layers",),
    (),
    lambda file: {"mtp_output_layers": file.has(f"blk.{file.decoder_layers()}.nextn.shared_head_head.weight")},
)
"""Of layers of prediction without one, llama.cpp takes the model's."""

_AS_RELEASED = {"low_freq_factor": 1.0, "high_freq_factor": 32.0, rope_keys.ORIGINAL: 131072}

FAMILIES = {
    "step3p5": GgufFamily(
        "step35",
        rows=[
            *rows.outside_layers(PLUS_ONE),
            *rows.in_layers({**rows.NORMS, **rows.QK_NORMS}, PLUS_ONE),
            *rows.ATTENTION,
            *rows.in_layers({"self_attn.g_proj": "attn_gate", "moe.gate": "ffn_gate_inp"}),
            *rows.MLP,
            rows.GgufRow("model.layers.{layer}.moe.router_bias", rows.CORRECTION),
            *(
                rows.in_layer(f"moe.{hf}.weight[{{expert}}]", f"{gguf}_exps.weight[{{expert}}]")
                for hf, gguf in rows.GATED.items()
            ),
            *rows.shared_expert("share_expert"),
            *rows.in_layers(
                {
                    "enorm": "nextn.enorm",
                    "hnorm": "nextn.hnorm",
                    "transformer.shared_head.norm": "nextn.shared_head_norm",
                },
                PLUS_ONE,
            ),
            *rows.in_layers({"eh_proj": "nextn.eh_proj", "transformer.shared_head.output": "nextn.shared_head_head"}),
        ],
        keys=base_keys(
            expert_keys.scored_by("sigmoid"),
            layers=keys.LAYERS_AND_PREDICTION,
            heads=_ATTENTION,
            rope=(rope_keys.ROPE, rope_keys.LOCAL_BASE),
        ),
        more=(
            keys.write_only(lambda model: {keys.HEADS_KV: [model.num_query_groups] * len(_windows(model))}),
            keys.WINDOW,
            keys.write_only(lambda model: {keys.PATTERN: _windows(model)}),
            *expert_keys.EXPERT_COUNTS,
            expert_keys.EXPERT_SIZE,
            expert_keys.SHARED_EXPERT_SIZE,
            expert_keys.WEIGHTS_SCALE,
            expert_keys.NORMALISED,
            _LAYERS_WITH_EXPERTS,
            _limits("moe.swiglu_limits", "swiglu_clamp_exp", expert_keys.with_router),
            _limits("swiglu_limits", "swiglu_clamp_shexp", lambda file: (True,) * file.decoder_layers()),
            keys.PREDICTION_LAYERS,
            expert_keys.ROUTED_LAYERS,
            _OUTPUT_LAYERS,
        ),
        computed={
            **dict.fromkeys(("zero_centered_gamma", "hf_zero_centered_gamma", "qk_layernorm"), True),
            **dict.fromkeys(("head_wise_attn_gate", "moe.expert_bias"), True),
            "tied_embeddings": False,
            "rotary_percent": 1.0,
            "global_attention.rotary_percent": 0.5,
            "mtp_dense": lambda fields: bool(fields["mtp_num_layers"]),
        },
        scalings={**rope_keys.UNSCALED_ALONE, "llama3": rope_keys.OF_LLAMA3},
        of_scaling=lambda scaling: _AS_RELEASED if scaling.get("rope_type") == "llama3" else {},
    ),
}
