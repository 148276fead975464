"""Mamba-2: mixers alone. Granite 4, Nemotron-H and Falcon-H1 have such mixers beside other blocks.

Sources: llama.cpp's src/models/mamba2.cpp and mamba-base.cpp, and conversion/mamba.py, nemotron.py and granite.py.
"""

from collections.abc import Sequence
from dataclasses import replace

from precisionctl.architectures.config_keys import Fields
from precisionctl.checkpoints.gguf import metadata_keys as keys, rope_keys, tensor_rows as rows
from precisionctl.checkpoints.gguf.family import GgufFamily
from precisionctl.checkpoints.gguf.metadata import Described
from precisionctl.checkpoints.tensor_changes import DECAY, GROUPED_NORM, KERNEL, VECTOR_AS_COLUMN, Both
from precisionctl.model.model_shape import ModelShape


def mixer(module: str) -> list[rows.GgufRow]:
    """The rows of a mixer in such modules."""
    return [
        *rows.in_layers({f"{module}.in_proj": "ssm_in", f"{module}.out_proj": "ssm_out"}),
        *rows.in_layers({f"{module}.norm": "ssm_norm"}, GROUPED_NORM),
        *rows.in_layers({f"{module}.conv1d": "ssm_conv1d"}, KERNEL),
        rows.in_layer(f"{module}.conv1d.bias", "ssm_conv1d.bias"),
        rows.in_layer(f"{module}.dt_bias", "ssm_dt.bias"),
        rows.in_layer(f"{module}.A_log", "ssm_a", Both(DECAY, VECTOR_AS_COLUMN)),
        rows.in_layer(f"{module}.D", "ssm_d", VECTOR_AS_COLUMN),
    ]


def _read_mixer(file: Described) -> Fields:
    file.expect("ssm.conv_kernel", 4)
    return {
        "mamba.num_heads": file.count("ssm.time_step_rank", least=1),
        "mamba.head_dim": file.share("ssm.inner_size", "ssm.time_step_rank"),
        "mamba.num_groups": file.count("ssm.group_count"),
        "mamba.state_dim": file.count("ssm.state_size"),
    }


def _write_mixer(model: ModelShape) -> keys.Said:
    assert model.mamba
    return {
        "ssm.conv_kernel": model.mamba.conv_kernel_dim,
        "ssm.state_size": model.mamba.state_dim,
        "ssm.group_count": model.mamba.num_groups,
        "ssm.inner_size": model.mamba.inner_size,
        "ssm.time_step_rank": model.mamba.num_heads,
    }


_KEYS = tuple(f"ssm.{key}" for key in ("conv_kernel", "inner_size", "state_size", "time_step_rank", "group_count"))
MIXER = keys.GgufEntry(
    ("mamba.num_heads", "mamba.head_dim", "mamba.num_groups", "mamba.state_dim"), _KEYS, _read_mixer, _write_mixer
)


def _write_as_mamba2(model: ModelShape) -> keys.Said:
    said = _write_mixer(model)
    return {key: said[key] for key in _KEYS}


MIXER_AS_MAMBA2 = replace(MIXER, write=_write_as_mamba2)
"""In the order of Mamba-2's converter."""
NO_MIXER = keys.ignored_keys(*_KEYS)
"""Of a family whose converter also has models with mixers, and writes their keys of all."""

_NAMES = {"model.embed_tokens.": "backbone.embeddings.", "model.norm.": "backbone.norm_f.", "model.": "backbone."}
_LAYERS = replace(
    keys.LAYERS,
    fields=("num_layers", "mamba.pattern"),
    read=lambda file: {"num_layers": file.layers(), "mamba.pattern": "M" * file.layers()},
)


def mixers_alone(architecture: str, mixer_rows: Sequence[rows.GgufRow], *mixer_keys: keys.GgufEntry) -> GgufFamily:
    """The family of models of such mixers, and nothing else in their layers."""
    return GgufFamily(
        architecture,
        rows=rows.renamed([*rows.outside_layers(), *rows.in_layers({"norm": "attn_norm"}), *mixer_rows], _NAMES),
        keys=(
            keys.ignored_keys("context_length", write=lambda model: {"context_length": 1 << 20}),
            *(keys.WIDTH, keys.always("feed_forward_length", 0), keys.always("attention.head_count", 0)),
            *(_LAYERS, *mixer_keys),
        ),
        turned=None,
        computed={
            "max_position_embeddings": 262144,  # of which nothing is computed
            **dict.fromkeys(("num_attention_heads", "num_query_groups"), keys.SameAs("mamba.num_heads")),
            "kv_channels": keys.SameAs("mamba.head_dim"),
            "ffn_hidden_size": lambda fields: fields["mamba.num_heads"] * fields["mamba.head_dim"],
            "rope_layers": keys.in_all_layers(False),
        },
        scalings=rope_keys.UNSCALED_ALONE,
    )


FAMILIES = {"mamba2": mixers_alone("mamba2", mixer("mixer"), MIXER_AS_MAMBA2, keys.EPSILON)}
