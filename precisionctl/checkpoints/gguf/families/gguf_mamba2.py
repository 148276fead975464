"""Mamba-2: mixers alone.

Sources: llama.cpp's src/models/mamba2.cpp, and conversion/mamba.py.
"""

from dataclasses import replace

from precisionctl.architectures.config_keys import Fields
from precisionctl.checkpoints.gguf.family import GgufFamily
from precisionctl.checkpoints.gguf.metadata import Described
from precisionctl.checkpoints.gguf.metadata_keys import EPSILON, WIDTH, GgufRule, Said, write_only
from precisionctl.checkpoints.gguf.mixers import MIXER, mixer
from precisionctl.checkpoints.gguf.rope_keys import UNSCALED_ALONE
from precisionctl.checkpoints.gguf.tensor_rows import in_layers, outside_layers, renamed
from precisionctl.model.model_parts import MOST_LAYERS
from precisionctl.model.model_shape import ModelShape

_NAMES = {"model.embed_tokens.": "backbone.embeddings.", "model.norm.": "backbone.norm_f.", "model.": "backbone."}
_OF_ATTENTION = ("feed_forward_length", "attention.head_count")
_IN_ORDER = ("ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank", "ssm.group_count")


def _read_layers(file: Described) -> Fields:
    layers = file.count("block_count", most=MOST_LAYERS)
    file.count("context_length")
    for key in _OF_ATTENTION:
        file.expect(key, 0)
    return {"num_layers": layers, "mamba.pattern": "M" * layers}


def _write_mixer(model: ModelShape) -> Said:
    said = MIXER.write(model)
    return {key: said[key] for key in _IN_ORDER}


FAMILIES = {
    "mamba2": GgufFamily(
        "mamba2",
        rows=renamed([*outside_layers(), *in_layers({"norm": "attn_norm"}), *mixer("mixer")], _NAMES),
        keys=(
            write_only(lambda model: {"context_length": 1 << 20}),
            WIDTH,
            GgufRule(
                ("num_layers", "mamba.pattern"),
                _read_layers,
                lambda model: {**dict.fromkeys(_OF_ATTENTION, 0), "block_count": model.num_layers},
            ),
            replace(MIXER, write=_write_mixer),
            EPSILON,
        ),
        reads=(),
        computed={
            "max_position_embeddings": 262144,  # of which nothing is computed
            **dict.fromkeys(("num_attention_heads", "num_query_groups"), lambda fields: fields["mamba.num_heads"]),
            "kv_channels": lambda fields: fields["mamba.head_dim"],
            "ffn_hidden_size": lambda fields: fields["mamba.num_heads"] * fields["mamba.head_dim"],
            "rope_layers": lambda fields: (False,) * fields["num_layers"],
        },
        scalings=UNSCALED_ALONE,
    ),
}
"""By the `model_type` of the text model."""
