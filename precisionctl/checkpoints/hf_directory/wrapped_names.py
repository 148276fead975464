"""Names that tensors get where a program has a model, or some of its layers, inside another module.

torch.compile (`OptimizedModule._orig_mod`), FSDP (`FSDP_WRAPPED_MODULE`) and activation checkpointing
(`_CHECKPOINT_PREFIX`) put a word of their own before the name of any module; DDP (`DistributedDataParallel.module`) and
PEFT (`PeftModel.base_model`, whose adapters may have been merged) around the whole. `save_pretrained` or a state dict
of such a model has those words, and no class of transformers or of an engine finds its names.
"""

import re
from collections.abc import Iterable
from os.path import commonprefix

from precisionctl.errors import DamagedCheckpoint

_ANYWHERE = re.compile(r"_(?<![^.]_)(?:orig_mod|fsdp_wrapped_module|checkpoint_wrapped_module)\.")
"""Whole words. What every match begins with stands first, by which `re` looks for one ten times as fast."""
_AROUND = re.compile(r"(?:module\.|base_model\.model\.)*")


def names_inside(names: Iterable[str], where: object) -> dict[str, str]:
    """Stored names, and the same without those words. Raises DamagedCheckpoint where two tensors have one name then."""
    inside = {name: name for name in names}
    if any(map(_ANYWHERE.search, inside)):  # hardly ever, and of 140,000 names `sub` takes 0.2 s
        inside = {name: _ANYWHERE.sub("", name) for name in inside}
    around = _AROUND.match(commonprefix(list(inside.values())))
    if around and (length := around.end()):
        inside = {stored: name[length:] for stored, name in inside.items()}
    if len({*inside.values()}) < len(inside):
        found: dict[str, str] = {}
        pairs = ((found.setdefault(name, stored), stored) for stored, name in inside.items())
        one, other = next(pair for pair in pairs if pair[0] != pair[1])
        raise DamagedCheckpoint(f"`{one}` and `{other}` are one tensor, but for a wrapper's name", where=where)
    return inside
