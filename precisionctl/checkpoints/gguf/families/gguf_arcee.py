"""Arcee (AFM-4.5B).

Sources: llama.cpp's src/models/arcee.cpp, and conversion/llama.py.
"""

from precisionctl.checkpoints.gguf.family import GgufFamily, base_keys
from precisionctl.checkpoints.gguf.metadata_keys import HEAD_SIZE, VOCABULARY
from precisionctl.checkpoints.gguf.rope_keys import AND_LLAMA3, TURNED
from precisionctl.checkpoints.gguf.tensor_rows import DECODER_IN_PAIRS, UNGATED_MLP

FAMILIES = {
    "arcee": GgufFamily(
        "arcee",
        rows=[*DECODER_IN_PAIRS, *UNGATED_MLP],
        keys=(*base_keys(), HEAD_SIZE),
        more=(VOCABULARY, TURNED),
        reads=(),
        computed={"activation": "squared_relu", "gated_linear_unit": False},
        scalings=AND_LLAMA3,
    ),
}
"""By the `model_type` of the text model."""
