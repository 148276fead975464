"""Text models of which Megatron-Bridge has tensors in other places, or under other names, than a plan."""

import re
from collections.abc import Iterable

from precisionctl.checkpoints.megatron.keys import PARAMETER_STATE

_OUTSIDE_OF_LAYERS = (
    # MiniMax-M3 (models/minimax_m3/modeling_minimax_m3_vl.py)
    (
        re.compile(r"lightning_indexers\.(\d{1,9})\.([qk])_proj\.weight"),
        r"decoder.layers.\1.self_attention.core_attention.indexer.linear_\2.weight",
    ),
    (
        re.compile(r"lightning_indexers\.(\d{1,9})\.([qk])_norm\.weight"),
        r"decoder.layers.\1.self_attention.core_attention.indexer.\2_norm.weight",
    ),
)


def names_in_plans(names: Iterable[str]) -> dict[str, str]:
    """Those of Bridge's `names` of parameters, and of an optimizer's states of them, that a plan has otherwise, by their
    names there."""
    found = {}
    for name in names:
        state = PARAMETER_STATE.fullmatch(name)
        parameter = state[2] if state else name
        for pattern, there in _OUTSIDE_OF_LAYERS:
            if match := pattern.fullmatch(parameter):
                found[name] = name.removesuffix(parameter) + match.expand(there)
    return found
