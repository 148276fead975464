"""OLMo 3: OLMo 2 with a window in three layers of four.

Trap: layers with the window take no part in the scaling of rotary embeddings.
"""

from precisionctl.architectures.config_layers import all_but_every, sliding_window
from precisionctl.architectures.param_map import Architecture
from precisionctl.architectures.rope import rope_by_kind
from precisionctl.architectures.tables.olmo2 import COMMON, ROWS

ARCHITECTURE = Architecture(
    model_types={"olmo3": "Olmo3ForCausalLM"},
    rows=ROWS,
    config=(*COMMON, rope_by_kind(500000.0, 500000.0), sliding_window(all_but_every(4), absent=4096)),
    names_by="this project",
)
