"""Seed-OSS.

Sources: llama.cpp's src/models/seed-oss.cpp, and conversion/olmo.py.
"""

from precisionctl.checkpoints.gguf import metadata_keys as keys, tensor_rows as rows
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys

FAMILIES = {
    "seed_oss": GgufFamily(
        "seed_oss",
        rows=[*rows.outside_layers(), *rows.in_layers(rows.NORMS_BY_PLACE), *rows.ATTENTION, *rows.MLP],
        keys=base_keys(),
        more=(keys.QKV_BIAS,),
    ),
}
