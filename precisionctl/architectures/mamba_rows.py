"""Rows of a Mamba-2 mixer, under Nemotron-H's names and those of Megatron-Core (megatron/core/ssm/mamba_mixer.py)."""

from precisionctl.architectures.llama_rows import ATTENTION_NORM, PROJ, QKV_LINEAR
from precisionctl.architectures.param_map import Row, only_in, renamed
from precisionctl.param import COLUMNS, MIXER_CONV_PARTS, MIXER_PARTS, ROWS, Parallel

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

BEFORE_MIXER = renamed(only_in("mamba", ATTENTION_NORM), {}, {"self_attention.linear_qkv": "mixer.in_proj"})
"""The norm of what a mixer reads."""

MIXER_OR_ATTENTION = (
    *BEFORE_MIXER,
    *MIXER,
    *only_in("attention", (*ATTENTION_NORM, *QKV_LINEAR, *PROJ)),
)
"""Of a layer that is one of the two, with the norm before it."""
