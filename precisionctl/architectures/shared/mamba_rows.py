"""Rows of a Mamba-2 mixer, under Nemotron-H's names and those of Megatron-Core (megatron/core/ssm/mamba_mixer.py); and
of a Mamba-1 mixer, which Megatron-Core does not have, and whose parameters have the names of mamba_ssm there."""

from dataclasses import replace

from precisionctl.architectures.param_map import Row, as_values, only_in, renamed, when
from precisionctl.architectures.rearrangements import GAMMA
from precisionctl.architectures.shared import llama_rows as llama
from precisionctl.param import COLUMNS, GATED_ROWS, MIXER_CONV_PARTS, MIXER_PARTS, ROWS, Parallel

_HF, _MEGATRON = "model.layers.{layer}.mixer.", "decoder.layers.{layer}.mixer."

MIXER = only_in(
    "mamba",
    (
        Row(
            f"{_HF}in_proj.weight",
            f"{_MEGATRON}in_proj.weight",
            ("mamba.in_proj_size", "hidden_size"),
            parallel=Parallel("rows", names=MIXER_PARTS),
            parts="mamba.in_proj_parts",
            gemm=True,
        ),
        Row(
            f"{_HF}conv1d.weight",
            f"{_MEGATRON}conv1d.weight",
            ("mamba.conv_size", 1, "mamba.conv_kernel_dim"),
            parallel=Parallel("rows", names=MIXER_CONV_PARTS),
            parts="mamba.conv_parts",
        ),
        Row(
            f"{_HF}conv1d.bias",
            f"{_MEGATRON}conv1d.bias",
            ("mamba.conv_size",),
            parallel=Parallel("rows", names=MIXER_CONV_PARTS),
            parts="mamba.conv_parts",
        ),
        *(
            Row(_HF + name, _MEGATRON + name, ("mamba.num_heads",), parallel=ROWS, keeps_dtype=True)
            for name in ("A_log", "D", "dt_bias")
        ),
        Row(f"{_HF}norm.weight", f"{_MEGATRON}norm.weight", ("mamba.inner_size",), parallel=ROWS),
        Row(
            f"{_HF}out_proj.weight",
            f"{_MEGATRON}out_proj.weight",
            ("hidden_size", "mamba.inner_size"),
            parallel=COLUMNS,
            gemm=True,
        ),
    ),
)

_IN_PROJ, *_CONVOLUTION = MIXER[:3]
_OUT_PROJ, _NORMED = MIXER[-1], when("mamba.bcdt_layernorm")
MAMBA_1_MIXER = only_in(
    "mamba",
    (
        replace(_IN_PROJ, parallel=GATED_ROWS, parts=None),
        *(replace(row, parallel=ROWS, parts=None) for row in _CONVOLUTION),
        Row(
            f"{_HF}x_proj.weight",
            f"{_MEGATRON}x_proj.weight",
            ("mamba.x_proj_size", "mamba.inner_size"),
            parallel=COLUMNS,
        ),
        *(
            Row(f"{_HF}{name}.weight", f"{_MEGATRON}{name}.weight", (size,), GAMMA, present=_NORMED)
            for name, size in (
                ("dt_layernorm", "mamba.dt_rank"),
                ("b_layernorm", "mamba.state_dim"),
                ("c_layernorm", "mamba.state_dim"),
            )
        ),
        Row(
            f"{_HF}dt_proj.weight",
            f"{_MEGATRON}dt_proj.weight",
            ("mamba.inner_size", "mamba.dt_rank"),
            parallel=ROWS,
        ),
        *(
            Row(_HF + name, _MEGATRON + name, size, parallel=ROWS, keeps_dtype=True)
            for name, size in (
                ("dt_proj.bias", ("mamba.inner_size",)),
                ("A_log", ("mamba.inner_size", "mamba.state_dim")),
                ("D", ("mamba.inner_size",)),
            )
        ),
        _OUT_PROJ,
    ),
)
"""With norms of what x_proj makes, if these have weights."""

BEFORE_MIXER = renamed(only_in("mamba", llama.ATTENTION_NORM), {}, {"self_attention.linear_qkv": "mixer.in_proj"})
"""The norm of what a mixer reads."""

FINAL_NORM = renamed(llama.FINAL_NORM, {}, {"final_layernorm": "final_norm"})
"""As Megatron's hybrid stack calls it."""

_OR_ATTENTION = only_in("attention", (*llama.ATTENTION_NORM, *llama.QKV_LINEAR, *llama.PROJ))
MIXER_OR_ATTENTION = (*BEFORE_MIXER, *MIXER, *_OR_ATTENTION)
"""Of a layer that is one of the two, with the norm before it."""
MAMBA_1_OR_ATTENTION = (*BEFORE_MIXER, *as_values(MAMBA_1_MIXER), *_OR_ATTENTION)
"""Exports leave a mixer's linears as they are, because vLLM's layer takes no codes for them
(model_executor/layers/mamba/mamba_mixer.py)."""


def mixers_alone(mixer: tuple[Row, ...]) -> tuple[Row, ...]:
    """All rows of a model of such mixers, and nothing else in its layers."""
    names = {
        "model.embed_tokens.": "backbone.embeddings.",
        "model.norm.": "backbone.norm_f.",
        "model.layers.": "backbone.layers.",
        ".input_layernorm.": ".norm.",
    }
    return (*renamed((*llama.EMBEDDING, *BEFORE_MIXER, *mixer, *FINAL_NORM), names), *llama.OUTPUT)
