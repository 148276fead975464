"""What `export-inference` is asked for."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from precisionctl.checkpoints.huggingface import MAX_SHARD_SIZE
from precisionctl.precision import Precision
from precisionctl.quant_methods.base import Scheme


@dataclass(frozen=True)
class InferenceExport:
    """What to export, where to, and for which engine.

    `target` is an engine's name in engines/, or `te`; it serves on `ranks` GPUs. `scheme` None takes the best that the
    checkpoint allows; `static` needs recorded input scales, from the source or from `fp8_state`. `recipe` says which
    modules stay in BF16, and `keep_misfits` that modules do whose shapes the engine refuses. `kv_cache` stores scales
    for a cache of keys and values in FP8, which must have been recorded too.

    A plain Megatron checkpoint names no family and has no tokenizer: `architecture` and `reference` do, as for a
    conversion. `base_model` is the source's name on the Hub, for the model card.
    """

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
