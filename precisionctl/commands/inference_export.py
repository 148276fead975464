"""What `export-inference` is asked."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from precisionctl.checkpoints.huggingface import MAX_SHARD_SIZE
from precisionctl.precision import Precision
from precisionctl.quant_methods.base import Scheme


@dataclass(frozen=True)
class InferenceExport:
    """What to export, for which engine (a name in engines/) on `ranks` GPUs. `scheme` static needs recorded input
    scales; None is the best that there is. `recipe` says which modules stay in BF16, and `keep_misfits` that those do
    whose shapes the engine refuses. `kv_cache` fp8 stores scales for a cache of keys and values, which must have been
    recorded too.

    A plain Megatron checkpoint names no family and has no tokenizer: `architecture` and `reference` do, as for a
    conversion. `base_model` is the source's name on the Hub, for the model card."""

    source: Path
    destination: Path
    target: str
    scheme: Scheme | None = None
    recipe: Precision | None = None
    iteration: int | None = None
    max_shard_size: int = MAX_SHARD_SIZE
    fp8_state: Path | None = None
    ranks: int = 1
    keep_misfits: bool = False
    kv_cache: Literal["fp8"] | None = None
    architecture: str | None = None
    reference: Path | None = None
    base_model: str | None = None
