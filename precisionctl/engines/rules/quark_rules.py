"""Rules on directories of AMD's Quark.

Each function yields where a directory breaks a rule, and how; an engine pairs it with its own text and source.
"""

from __future__ import annotations

from collections.abc import Mapping

from precisionctl.engines.rules.demands import CONFIG
from precisionctl.engines.rules.rule import Breaches, QuantizedDirectory


def quark_keys_unsaid(directory: QuantizedDirectory) -> Breaches:
    """Keys of Quark's config that an engine takes for granted, and that are missing or of another type."""
    if directory.method != "quark":
        return
    said, export = directory.quantization, directory.quantization.get("export")
    of_cache = export.get("kv_cache_group") if isinstance(export, Mapping) else None
    for key, value, kind in (
        ("export.kv_cache_group", of_cache, list),
        ("exclude", said.get("exclude"), list),
        ("layer_type_quant_config", said.get("layer_type_quant_config"), Mapping),
    ):
        if not isinstance(value, kind):
            yield CONFIG, f"no {key}"


def quark_channels_in_columns(directory: QuantizedDirectory) -> Breaches:
    """Scales of channels that are a column, and no row, as Quark writes them: the first."""
    for name, scales in directory.scales.items() if directory.method == "quark" else ():
        spec, stored = directory.specs[name], directory.specs[scales.weight]
        if spec.packing is None and scales.block[0] == 1 and len(stored.shape) > 1:
            yield scales.weight, f"shape {list(stored.shape)}, not {[spec.rows]}"
            return
