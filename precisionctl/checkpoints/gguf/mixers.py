"""Mamba-2 mixers: their tensors, and what metadata say of them.

Sources: llama.cpp's src/models/mamba-base.cpp, and conversion/mamba.py, nemotron.py and granite.py.
"""

from dataclasses import replace

from precisionctl.architectures.config_keys import Fields
from precisionctl.checkpoints.gguf.metadata import Described
from precisionctl.checkpoints.gguf.metadata_keys import GgufEntry, Said, ignored_keys
from precisionctl.checkpoints.gguf.tensor_rows import GgufRow, in_layer, in_layers
from precisionctl.checkpoints.tensor_changes import DECAY, GROUPED_NORM, KERNEL, VECTOR_AS_COLUMN, Both
from precisionctl.model.model_shape import ModelShape


def mixer(module: str) -> list[GgufRow]:
    """The rows of a mixer in such modules."""
    return [
        *in_layers({f"{module}.in_proj": "ssm_in", f"{module}.out_proj": "ssm_out"}),
        *in_layers({f"{module}.norm": "ssm_norm"}, GROUPED_NORM),
        *in_layers({f"{module}.conv1d": "ssm_conv1d"}, KERNEL),
        in_layer(f"{module}.conv1d.bias", "ssm_conv1d.bias"),
        in_layer(f"{module}.dt_bias", "ssm_dt.bias"),
        in_layer(f"{module}.A_log", "ssm_a", Both(DECAY, VECTOR_AS_COLUMN)),
        in_layer(f"{module}.D", "ssm_d", VECTOR_AS_COLUMN),
    ]


def _read_mixer(file: Described) -> Fields:
    file.expect("ssm.conv_kernel", 4)
    return {
        "mamba.num_heads": file.count("ssm.time_step_rank", least=1),
        "mamba.head_dim": file.share("ssm.inner_size", "ssm.time_step_rank"),
        "mamba.num_groups": file.count("ssm.group_count"),
        "mamba.state_dim": file.count("ssm.state_size"),
    }


def _write_mixer(model: ModelShape) -> Said:
    assert model.mamba
    return {
        "ssm.conv_kernel": model.mamba.conv_kernel_dim,
        "ssm.state_size": model.mamba.state_dim,
        "ssm.group_count": model.mamba.num_groups,
        "ssm.inner_size": model.mamba.inner_size,
        "ssm.time_step_rank": model.mamba.num_heads,
    }


_KEYS = tuple(f"ssm.{key}" for key in ("conv_kernel", "inner_size", "state_size", "time_step_rank", "group_count"))
MIXER = GgufEntry(
    ("mamba.num_heads", "mamba.head_dim", "mamba.num_groups", "mamba.state_dim"), _KEYS, _read_mixer, _write_mixer
)


def _write_as_mamba2(model: ModelShape) -> Said:
    said = _write_mixer(model)
    return {key: said[key] for key in _KEYS}


MIXER_AS_MAMBA2 = replace(MIXER, write=_write_as_mamba2)
"""In the order of Mamba-2's converter."""
NO_MIXER = ignored_keys(*_KEYS)
"""Of a family whose converter also has models with mixers, and writes their keys of all."""
