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

_ANYWHERE = re.compile(r"(?:(?<=\.)|^)(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
_AROUND = re.compile(r"(?:module\.|base_model\.model\.)*")


def names_inside(names: Iterable[str], where: object) -> dict[str, str]:
    """Stored names, and the same without those words. Raises DamagedCheckpoint where two tensors have one name then."""
    inside = {name: _ANYWHERE.sub("", name) for name in names}
    around = _AROUND.match(commonprefix(list(inside.values())))
    length = around.end() if around else 0
    inside = {stored: name[length:] for stored, name in inside.items()}
    found: dict[str, str] = {}
    for stored, name in inside.items():
        if (other := found.setdefault(name, stored)) != stored:
            raise DamagedCheckpoint(f"`{other}` and `{stored}` are one tensor, but for a wrapper's name", where=where)
    return inside
