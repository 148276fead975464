"""The rows that towers of plain vision transformers share: Gemma 3's SigLIP, Pixtral, InternVL's and Llama 4's."""

from collections.abc import Mapping

from precisionctl.checkpoints.gguf.towers.tower import TowerRow, linear, norm
from precisionctl.checkpoints.tensor_changes import SAME, TensorChange
from precisionctl.dtypes import DType


def block(
    prefix: str,
    names: Mapping[str, str],
    width: int,
    mlp: int,
    *,
    pairs: TensorChange = SAME,
    with_bias: bool = True,
    qkv_bias: bool = True,
) -> dict[str, TowerRow]:
    """The rows of a layer. `names` are the modules, by llama.cpp's names; `pairs` is what becomes of queries and keys.
    Without `with_bias` nothing has a bias; queries, keys and values have none without `qkv_bias`."""
    ends = ("weight", "bias") if with_bias else ("weight",)
    shapes = {"ffn_gate": (mlp, width), "ffn_up": (mlp, width), "ffn_down": (width, mlp)}
    rows = dict[str, TowerRow]()
    for gguf, hf in names.items():
        name, there = f"{prefix}.{{layer}}.{hf}", f"v.blk.{{layer}}.{gguf}"
        if gguf in ("ln1", "ln2"):
            rows |= norm(name, there, width, ends)
            continue
        change = pairs if gguf in ("attn_q", "attn_k") else SAME
        made = linear(name, there, *shapes.get(gguf, (width, width)), change=change)
        has_bias = qkv_bias or gguf not in ("attn_q", "attn_k", "attn_v")
        rows |= {each: row for each, row in made.items() if each.endswith(ends if has_bias else "weight")}
    return rows


def patches(
    hf: str, width: int, patch: int, *, with_bias: bool = True, dtype: DType | None = None
) -> dict[str, TowerRow]:
    """The kernel that makes a token of each patch, in a `dtype` whatever others have if one is given."""
    kernel = {f"{hf}.weight": TowerRow(("v.patch_embd.weight",), (width, 3, patch, patch), dtype=dtype)}
    return kernel | ({f"{hf}.bias": TowerRow(("v.patch_embd.bias",), (width,))} if with_bias else {})
