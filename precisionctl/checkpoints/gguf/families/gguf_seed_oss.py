"""Seed-OSS.

Sources: llama.cpp's src/models/seed-oss.cpp, and conversion/olmo.py.
"""

from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys
from precisionctl.checkpoints.gguf.metadata_keys import HEAD_SIZE, QKV_BIAS
from precisionctl.checkpoints.gguf.tensor_rows import ATTENTION, MLP, NORMS_BY_PLACE, in_layers, outside_layers

FAMILIES = {
    "seed_oss": GgufFamily(
        "seed_oss",
        rows=[*outside_layers(), *in_layers(NORMS_BY_PLACE), *ATTENTION, *MLP],
        keys=(*base_keys(), HEAD_SIZE),
        more=(QKV_BIAS,),
    ),
}
"""By the `model_type` of the text model."""
