"""Hugging Face directories as GPTQ's and AWQ's tools write them, by a slow writer of its own.

Random codes under random scales; what they are worth is computed in FP64.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import coded_directories
import torch
from coded_directories import SIZES, of_module
from torch import Tensor


@dataclass(frozen=True)
class Spelled:
    """`less` is what zero points are stored less than they are; `order` which output each place of a word has."""

    config: dict[str, Any]
    bits: int = 4
    group: int = 32
    less: int = 0
    order: Sequence[int] = (0, 1, 2, 3, 4, 5, 6, 7)
    g_idx: bool = True
    shuffled: bool = False
    scales: torch.dtype = torch.float16


def _gptq(bits: int = 4, form: str | None = "gptq", group: int = 32, **more: Any) -> dict[str, Any]:
    said = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": True, **more}
    return said | ({"checkpoint_format": form} if form else {})


def _auto_round(packing: str, **more: Any) -> dict[str, Any]:
    said = {"quant_method": "auto-round", "packing_format": packing, "bits": 4, "group_size": 32, "data_type": "int"}
    return said | {"sym": True, "block_name_to_quantize": "model.layers", **more}


SPELLINGS = {
    "gptq": Spelled(_gptq(form=None), less=1),
    "gptq-v2": Spelled(_gptq(form="gptq_v2"), scales=torch.bfloat16),
    "gptq-8": Spelled(_gptq(8), 8, less=1),
    "gptq-rows": Spelled(_gptq(group=-1), group=0, less=1, g_idx=False),
    "gptq-desc-act": Spelled(_gptq(desc_act=True), less=1, shuffled=True),
    "gptq-8-desc-act": Spelled(_gptq(8, desc_act=True), 8, less=1, shuffled=True),
    "awq": Spelled(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        order=(0, 2, 4, 6, 1, 3, 5, 7),
        g_idx=False,
    ),
    "auto-round": Spelled(_auto_round("auto_round", sym=False, extra_config={"lm_head": {"bits": 16}}), g_idx=False),
    "auto-round-gptq": Spelled(_auto_round("auto_round:auto_gptq"), less=1, g_idx=False),
    "auto-round-2": Spelled(_auto_round("auto_round:auto_gptq", bits=2), 2, less=1, g_idx=False),
    "auto-round-8-gptqmodel": Spelled(_auto_round("auto_round:gptqmodel", bits=8), 8),
    "auto-round-awq": Spelled(_auto_round("auto_round:auto_awq"), order=(0, 2, 4, 6, 1, 3, 5, 7), g_idx=False),
}


def words(codes: Tensor, bits: int, order: Sequence[int] = range(8)) -> Tensor:
    """int32 `[rows, columns * bits / 32]`: each has neighbours of a row, `order` says which of them comes first."""
    each = 32 // bits
    found = torch.zeros(len(codes), -(-codes.shape[1] // each), dtype=torch.int64)
    for column in range(codes.shape[1]):
        place = list(order).index(column % each) if each == 8 else column % each
        found[:, column // each] |= codes[:, column].long() << bits * place
    return torch.where(found >= 1 << 31, found - (1 << 32), found).int()


def coded(shape: tuple[int, ...], spelled: Spelled, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a weight `[out, in]`, by the end of their names, and its values, FP64."""
    out, inputs = shape
    group = spelled.group or inputs
    groups = -(-inputs // group)
    top = 1 << spelled.bits
    codes = torch.randint(top, (out, inputs), generator=generator)
    zeros = torch.randint(spelled.less, top, (groups, out), generator=generator)
    scales = (torch.rand((groups, out), generator=generator) * 0.01 + 0.001).to(spelled.scales)
    g_idx = torch.arange(inputs) // group
    if spelled.shuffled:
        g_idx = g_idx[torch.randperm(inputs, generator=generator)]
    values = (codes - zeros.t()[:, g_idx]) * scales.double().t()[:, g_idx]
    awq = spelled.order != Spelled.order
    packed = words(codes.t(), spelled.bits, spelled.order) if awq else words(codes, spelled.bits).t()
    stored = {"qweight": packed.contiguous(), "scales": scales}
    stored["qzeros"] = words(zeros - spelled.less, spelled.bits, spelled.order)
    return stored | ({"g_idx": g_idx.int()} if spelled.g_idx else {}), values


def make(
    directory: Path,
    spelling: str,
    family: str = "llama-3",
    quantized: Callable[[str], bool] = lambda name: True,
    **sizes: Any,
) -> dict[str, Tensor]:
    """Save a small model whose linears, as far as `quantized` says, are codes. Returns what they decode to, FP64."""
    spelled, generator = SPELLINGS[spelling], torch.Generator().manual_seed(1)

    def stored(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        tensors, values = coded(tuple(weight.shape), spelled, generator)
        return of_module(name, tensors), values

    return coded_directories.make(directory, family, spelled.config, stored, quantized, **SIZES | sizes)
