"""Mamba and FalconMamba: Mamba-1 mixers alone. Jamba has such mixers beside other blocks.

Sources: llama.cpp's src/models/mamba.cpp and mamba-base.cpp, and conversion/mamba.py.
"""

from dataclasses import replace

from precisionctl.architectures.config_keys import Fields
from precisionctl.checkpoints.gguf import metadata_keys as keys, tensor_rows as rows
from precisionctl.checkpoints.gguf.families.gguf_mamba2 import mixers_alone
from precisionctl.checkpoints.gguf.family import GgufFamily
from precisionctl.checkpoints.gguf.metadata import Described
from precisionctl.checkpoints.tensor_changes import DECAY, KERNEL
from precisionctl.model.model_shape import ModelShape


def mixer(module: str) -> list[rows.GgufRow]:
    """The rows of a mixer in such modules."""
    linears = {"in_proj": "ssm_in", "x_proj": "ssm_x", "dt_proj": "ssm_dt", "out_proj": "ssm_out"}
    return [
        *rows.in_layers({f"{module}.{hf}": gguf for hf, gguf in linears.items()}),
        *rows.in_layers({f"{module}.conv1d": "ssm_conv1d"}, KERNEL),
        rows.in_layer(f"{module}.conv1d.bias", "ssm_conv1d.bias"),
        rows.in_layer(f"{module}.dt_proj.bias", "ssm_dt.bias"),
        rows.in_layer(f"{module}.A_log", "ssm_a", DECAY),
        rows.in_layer(f"{module}.D", "ssm_d"),
    ]


def _read_channels(file: Described) -> Fields:
    file.expect("ssm.conv_kernel", 4)
    return {"mamba.num_heads": file.count("ssm.inner_size", least=1)}


def _write_channels(model: ModelShape) -> keys.Said:
    assert model.mamba
    if model.mamba.inner_size != 2 * model.hidden_size:
        raise keys.refused(model, f"whose mixers have {model.mamba.inner_size} channels, but twice its hidden states'")
    return {"ssm.conv_kernel": model.mamba.conv_kernel_dim, "ssm.inner_size": model.mamba.inner_size}


MIXER = (
    keys.GgufEntry(("mamba.num_heads",), ("ssm.conv_kernel", "ssm.inner_size"), _read_channels, _write_channels),
    keys.integer("mamba.state_dim", "ssm.state_size"),
    keys.integer("mamba.dt_rank", "ssm.time_step_rank"),
)
COMPUTED = {"mamba.head_dim": 1, "mamba.num_groups": 1, "mamba.gated_norm": False}
"""Of all Mamba-1 mixers."""

_NORMED = "ssm.dt_b_c_rms"


def _family(normed: bool) -> GgufFamily:
    """`normed`: steps, B and C go through norms, of which llama.cpp takes the other norms' epsilon."""
    found = mixers_alone("mamba", mixer("mixer"), *MIXER, keys.EPSILON, keys.always(_NORMED, normed))
    return replace(
        found,
        computed={**COMPUTED, **found.computed},
        ignored={"mamba.bcdt_l2_norm_epsilon": 1e-6} if normed else {},
        recognises=lambda file: file.said(_NORMED) in ((True,) if normed else (False, None)),
    )


FAMILIES = {"mamba": _family(normed=False), "falcon_mamba": _family(normed=True)}
