"""Where torchtitan has the tensors that Hugging Face's names stand for: weights and moments.

torchtitan's Llama stores the two numbers of a rotary pair in neighbouring rows of queries and keys, Hugging Face in the
two halves of a head (torchtitan, Llama3StateDictAdapter). With fused attention, queries, keys and values have their
moments in one tensor: for each group of queries its heads, then a key, then a value. The weights are stored apart, as a
hook splits them when they are saved (models/common/attention.py).
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from precisionctl.checkpoints.chunks import Chunked
from precisionctl.checkpoints.computed_rows import Heads
from precisionctl.checkpoints.other_trainers.torchtitan_families import TorchtitanFamily
from precisionctl.errors import DamagedCheckpoint
from precisionctl.model.model_shape import ModelShape

_FUSED = re.compile(r"layers\.(\d+)\.attention\.qkv_linear\.wqkv\.(weight|bias)")
_TURNED = ("self_attn.q_proj.weight", "self_attn.k_proj.weight")


def placed(
    stored: Chunked, names: Mapping[str, str], family: TorchtitanFamily, model: ModelShape, where: Path
) -> Iterator[tuple[str, str, str | Heads]]:
    """Each tensor, with its name in Hugging Face (of fused queries, keys and values three), and the stored tensor that
    it is, or its rows in one. `names` are torchtitan's names of stored tensors; buffers that Hugging Face has no place
    for are left out. Raises DamagedCheckpoint for odd or cut off heads."""
    size, queries, groups = model.kv_channels, model.num_attention_heads, model.num_query_groups
    if family.pairs and size % 2:
        what = f"heads of {size} rows (head_dim): rotary embeddings turn pairs of them"
        raise DamagedCheckpoint(what, where="config.json")
    per = queries // groups
    for titan, name in names.items():
        rows = stored.specs[name].rows
        if match := _FUSED.fullmatch(titan):
            starts = [(head // per * (per + 2) + head % per) * size for head in range(queries)]
            keys = [(group * (per + 2) + per) * size for group in range(groups)]
            _check_rows(titan, rows, (per + 2) * groups * size, where)
            for kind, begins in (("q", starts), ("k", keys), ("v", [start + size for start in keys])):
                part = f"model.layers.{match[1]}.self_attn.{kind}_proj.{match[2]}"
                yield titan, part, Heads(stored, name, begins, size, pairs=family.pairs and kind != "v")
        elif (hf := family.hf_name(titan, model)) and family.pairs and hf.endswith(_TURNED):
            heads = queries if hf.endswith("q_proj.weight") else groups
            _check_rows(titan, rows, heads * size, where)
            yield titan, hf, Heads(stored, name, range(0, heads * size, size), size, pairs=True)
        elif hf:
            yield titan, hf, name


def _check_rows(name: str, rows: int, expected: int, where: Path) -> None:
    if rows != expected:
        what = f"`{name}` has {rows} rows, the model's sizes say {expected}"
        raise DamagedCheckpoint(what, where=where, do="Does the config belong to this checkpoint?")
