"""Arcee (AFM-4.5B).

Sources: llama.cpp's src/models/arcee.cpp, and conversion/llama.py.
"""

from precisionctl.checkpoints.gguf import metadata_keys as keys, rope_keys, tensor_rows as rows
from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys

FAMILIES = {
    "arcee": GgufFamily(
        "arcee",
        rows=[*rows.DECODER_IN_PAIRS, *rows.UNGATED_MLP],
        keys=base_keys(),
        more=(keys.VOCABULARY, rope_keys.TURNED),
        computed={"activation": "squared_relu", "gated_linear_unit": False},
        scalings=rope_keys.AND_LLAMA3,
    ),
}
