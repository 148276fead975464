"""torchtitan's Llama under Hugging Face's names: weights and moments.

torchtitan stores the two numbers of a rotary pair in neighbouring rows of queries and keys, Hugging Face in the two
halves of a head (torchtitan, Llama3StateDictAdapter). With fused attention, queries, keys and values have their moments
in one tensor: for each group of queries its heads, then a key, then a value. The weights are stored apart, as a hook
splits them when they are saved (models/common/attention.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from precisionctl.checkpoints.chunks import Chunked, read_rows
from precisionctl.errors import DamagedCheckpoint, MappingError
from precisionctl.model.model_shape import ModelShape
from precisionctl.torch_when_used import torch

if TYPE_CHECKING:
    from torch import Tensor

EMBEDDING = "tok_embeddings.weight"

_NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "lm_head": "lm_head",
    "attention.qkv_linear.wq": "self_attn.q_proj",
    "attention.qkv_linear.wk": "self_attn.k_proj",
    "attention.qkv_linear.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
"""torchtitan's names of a Llama's modules, also those inside a layer, and Hugging Face's (torchtitan/models/llama3)."""

_OLDER = {"output": "lm_head", **{f"attention.w{one}": f"self_attn.{one}_proj" for one in "qkv"}}
"""Names in older versions of torchtitan."""

_TITAN = re.compile(r"(layers\.\d+\.|)(.+)\.weight")

_FUSED = re.compile(r"layers\.(\d+)\.attention\.qkv_linear\.wqkv\.weight")


@dataclass(frozen=True)
class Heads:
    """Rows of queries, keys or values: those of each head follow each other in the stored tensor `name`, from row
    `starts[head]` on. With `pairs` the rows of a head are rotary pairs."""

    stored: Chunked
    name: str
    starts: Sequence[int]
    size: int
    pairs: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.starts) * self.size, *self.stored.specs[self.name].shape[1:])

    def rows(self, row: int, rows: int) -> Tensor:
        """Rows `[row, row + rows)` as `[rows, columns]`, as Hugging Face has them."""
        size, first = self.size, row // self.size
        starts = self.starts[first : -(-(row + rows) // size)]
        heads = torch.stack([read_rows(self.stored, self.name, start, size) for start in starts])
        if self.pairs:
            heads = heads.view(len(starts), size // 2, 2, -1).transpose(1, 2)
        return heads.reshape(len(starts) * size, -1)[row - first * size :][:rows]


def hf_name(name: str) -> str:
    """Hugging Face's name for torchtitan's; any other name as it is."""
    match = _TITAN.fullmatch(name)
    found = match and (_NAMES | _OLDER).get(match[2])
    return f"{'model.' if match[1] else ''}{match[1]}{found}.weight" if match and found else name


def torchtitan_name(name: str) -> str:
    """torchtitan's name for Hugging Face's. Raises MappingError for what its Llama has not."""
    for titan, hf in _NAMES.items():
        if match := re.fullmatch(rf"(?:model\.(layers\.\d+\.))?{re.escape(hf)}\.weight", name):
            return f"{match[1] or ''}{titan}.weight"
    raise MappingError(f"torchtitan's Llama has no `{name}`", do="Write --to dcp, or --to hf.")


def fused_name(name: str) -> str:
    """The name that moments of queries, keys or values have together."""
    return re.sub(r"\.w[qkv]\.weight$", ".wqkv.weight", name)


def by_hf_names(stored: Chunked, names: Mapping[str, str], model: ModelShape, where: Path) -> dict[str, str | Heads]:
    """Hugging Face's names, and for each the stored tensor that it is, or its rows in one. `names` are torchtitan's
    names of stored tensors. Raises DamagedCheckpoint for two that are the same tensor, and for odd or cut off heads."""
    size, queries, groups = model.kv_channels, model.num_attention_heads, model.num_query_groups
    if size % 2:
        what = f"heads of {size} rows (head_dim): rotary embeddings turn pairs of them"
        raise DamagedCheckpoint(what, where="config.json")
    per, found, seen = queries // groups, dict[str, str | Heads](), dict[str, str]()
    for titan, name in names.items():
        spec, made = stored.specs[name], dict[str, str | Heads]()
        if match := _FUSED.fullmatch(titan):
            starts = [(head // per * (per + 2) + head % per) * size for head in range(queries)]
            keys = [(group * (per + 2) + per) * size for group in range(groups)]
            _check_rows(titan, spec.rows, (per + 2) * groups * size, where)
            for kind, rows in (("q", starts), ("k", keys), ("v", [start + size for start in keys])):
                hf = f"model.layers.{match[1]}.self_attn.{kind}_proj.weight"
                made[hf] = Heads(stored, name, rows, size, pairs=kind != "v")
        elif (hf := hf_name(titan)).endswith(("self_attn.q_proj.weight", "self_attn.k_proj.weight")):
            heads = queries if hf.endswith("q_proj.weight") else groups
            _check_rows(titan, spec.rows, heads * size, where)
            made[hf] = Heads(stored, name, range(0, heads * size, size), size, pairs=True)
        else:
            made[hf] = name
        for hf in made:
            if (first := seen.setdefault(hf, titan)) != titan:
                what = f"`{first}` and `{titan}` are both `{hf}`"
                raise DamagedCheckpoint(what, where=where, do="Save one model, under one set of names.")
        found |= made
    return found


def _check_rows(name: str, rows: int, expected: int, where: Path) -> None:
    if rows != expected:
        what = f"`{name}` has {rows} rows, the model's sizes say {expected}"
        raise DamagedCheckpoint(what, where=where, do="Does the config belong to this checkpoint?")
