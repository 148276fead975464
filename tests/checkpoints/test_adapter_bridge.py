"""Adapters of Megatron-Bridge with their base: merged as Bridge merges them.

tests/peers/test_bridge.py has the same of adapters that Bridge saves on the spot, its CanonicalLoRA too.
"""

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import conversions
import numpy as np
import pico
import pytest
import repository
import torch
import torch.distributed.checkpoint as torch_dcp
import yaml
from safetensors.torch import load_file
from torch import Tensor

from precisionctl.checkpoints.chunks import Chunk, whole
from precisionctl.checkpoints.computed_rows import PickedRows
from precisionctl.dtypes import DType
from precisionctl.errors import PrecisionctlError
from precisionctl.param import TensorSpec

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

GOLDEN = repository.GOLDEN / "bridge_lora"
"""By Megatron-Bridge 0.3.1 in FP32 (tests/peers/bridge_adapters.py)."""

QKV, FC1 = "decoder.layers.0.self_attention.linear_qkv", "decoder.layers.1.mlp.linear_fc1"
LORA = {"_target_": "megatron.bridge.peft.lora.LoRA", "dim": 4, "alpha": 12, "dropout": 0.1}
CANONICAL = LORA | {"_target_": "megatron.bridge.peft.canonical_lora.CanonicalLoRA"}


def pair(module: str, out: int, into: int = 64, rank: int = 4) -> dict[str, Tensor]:
    ends = {"in": (rank, into), "out": (out, rank)}
    generator = torch.Generator().manual_seed(out)
    return {f"{module}.linear_{end}.weight": torch.randn(shape, generator=generator) for end, shape in ends.items()}


def save(directory: Path, tensors: Mapping[str, Tensor], peft: object, **model: Any) -> Path:
    """A `torch_dist` of adapters, as PyTorch writes it."""
    torch_dcp.save(dict(tensors), storage_writer=torch_dcp.FileSystemWriter(directory), no_dist=True)
    (directory / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    torch.save({"iteration": 7}, directory / "common.pt")
    config = {"model": {"tensor_model_parallel_size": 1} | model, "peft": peft}
    (directory / "run_config.yaml").write_text(yaml.safe_dump(config))
    return directory


def test_what_bridge_saved_becomes_what_bridge_merges_bit_for_bit(tmp_path: Path) -> None:
    conversions.run(GOLDEN / "adapter", tmp_path / "out", "hf", reference=GOLDEN / "base", verify=True)
    ours, theirs, base = (
        load_file(path)
        for path in (
            tmp_path / "out/model.safetensors",
            GOLDEN / "merged.safetensors",
            GOLDEN / "base/model.safetensors",
        )
    )
    assert len(theirs) == 14 and not any(torch.equal(theirs[name], base[name]) for name in theirs)
    assert [name for name, values in (base | theirs).items() if not torch.equal(ours[name], values)] == []


def test_each_part_of_a_fused_linear_may_have_an_adapter_of_its_own(tmp_path: Path) -> None:
    pico.save(tmp_path / "base", "llama-3", dtype=torch.float32)
    parts = {"q": (QKV, 64), "v": (QKV, 32), "up": (FC1, 96)}
    tensors = {name: pair(f"{module}.adapter.adapter_{name}", out) for name, (module, out) in parts.items()}
    adapter = save(tmp_path / "adapter", {k: v for one in tensors.values() for k, v in one.items()}, CANONICAL)
    conversions.run(adapter, tmp_path / "out", "hf", reference=tmp_path / "base")
    ours, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "base"))
    for name, hf in {"q": "0.self_attn.q_proj", "v": "0.self_attn.v_proj", "up": "1.mlp.up_proj"}.items():
        a, b = tensors[name].values()
        expected[f"model.layers.{hf}.weight"] += b @ a * 3.0
    assert [name for name in expected if not torch.equal(ours[name], expected[name])] == []


LINEAR, PARTS = pair(f"{QKV}.adapter", 128), pair(f"{FC1}.adapter.adapter_up", 96)
REFUSED: dict[str, tuple[dict[str, Tensor], object, str]] = {
    "DoRA": (LINEAR, LORA | {"_target_": "megatron.bridge.peft.dora.DoRA"}, "Megatron-Bridge's 'DoRA'"),
    "no kind": (LINEAR, {"dim": 4}, "Megatron-Bridge's 'None'"),
    "an unknown setting": (LINEAR, LORA | {"use_hydra": True}, "not read: 'use_hydra'"),
    "no settings": (LINEAR, None, "no `peft` in it"),
    "no alpha": (LINEAR, LORA | {"alpha": None}, "alpha None"),
    "an infinite alpha": (LINEAR, LORA | {"alpha": float("inf")}, "alpha inf"),
    "another rank": (LINEAR, LORA | {"dim": 5}, r"is \[4, 64\], not \[5, 64\]"),
    "a huge rank": (pair(f"{QKV}.adapter", 128, rank=5000), LORA | {"dim": 5000}, "up to 4096"),
    "another base": (pair(f"{QKV}.adapter", 120), LORA, r"is \[120, 4\], not \[128, 4\]"),
    "half a pair": (dict([*LINEAR.items()][:1]), LORA, "without the other factor"),
    "an expert": (
        pair("decoder.layers.0.mlp.experts.experts.linear_fc1.adapter", 8),
        LORA,
        "is of experts, whose adapters each version",
    ),
    "a layer that the base lacks": (pair(QKV.replace("0", "7") + ".adapter", 128), LORA, "has no such linear"),
    "a weight beside it": (LINEAR | {f"{QKV}.weight": torch.ones(128, 64)}, LORA, "is no factor of LoRA"),
    "a magnitude": (LINEAR | {f"{QKV}.adapter.weight_magnitude": torch.ones(128)}, LORA, "is no factor of LoRA"),
    "integers": ({name: one.int() for name, one in LINEAR.items()}, LORA, "no dtype of an adapter's"),
    "part of a linear that is whole": (
        pair("decoder.layers.0.mlp.linear_fc2.adapter.adapter_up", 64, 96),
        CANONICAL,
        "in another form",
    ),
    "both for one": (LINEAR | pair(f"{QKV}.adapter.adapter_q", 64), CANONICAL, "more than one adapter"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_merged_is_one_clear_error(tmp_path: Path, name: str) -> None:
    tensors, peft, message = REFUSED[name]
    pico.save(tmp_path / "base", "llama-3")
    adapter = save(tmp_path / "adapter", tensors, peft)
    with pytest.raises(PrecisionctlError) as refused:
        conversions.run(adapter, tmp_path / "out", "hf", reference=tmp_path / "base")
    assert re.search(message, str(refused.value)), str(refused.value)
    assert refused.value.where and not (tmp_path / "out").exists()


def test_gate_and_up_apart_are_refused_where_bridge_stores_them_in_the_order_of_ranks(tmp_path: Path) -> None:
    """Read in peft/utils.py: its `sharded_state_dict` cuts whatever belongs to linear_fc1 as gate and up together."""
    pico.save(tmp_path / "base", "llama-3")
    adapter = save(tmp_path / "adapter", PARTS, CANONICAL, tensor_model_parallel_size=2)
    with pytest.raises(PrecisionctlError, match="several tensor-parallel ranks"):
        conversions.run(adapter, tmp_path / "out", "hf", reference=tmp_path / "base")


def test_an_adapter_without_its_settings_is_refused(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "adapter", tmp_path / "adapter")
    (tmp_path / "adapter" / "iter_0000007" / "run_config.yaml").unlink()
    with pytest.raises(PrecisionctlError, match=r"run_config\.yaml"):
        conversions.run(tmp_path / "adapter", tmp_path / "out", "hf", reference=GOLDEN / "base")


@dataclass(frozen=True)
class Counted:
    """A tensor that counts the rows that are read of it."""

    tensor: Tensor
    read: list[int]

    def rows(self, row: int, rows: int) -> Tensor:
        self.read.append(rows)
        return self.tensor[row : row + rows]


def test_a_factor_that_is_read_in_pieces_is_not_read_whole_for_each(tmp_path: Path) -> None:
    """In the order of keys in linear_qkv: two queries, a key and a value of 16 rows each, in turn."""
    tensor = torch.randn(64 * 64, 4)
    counted = Counted(tensor, [])
    order = np.arange(len(tensor)).reshape(-1, 4, 16)[:, 2].flatten()
    spec = TensorSpec((len(tensor), 4), DType.float32)
    stored = SimpleNamespace(specs={"b": spec}, chunks=lambda _: [Chunk(whole(spec), counted)])
    picked = PickedRows(stored, "b", order)
    found = torch.cat([picked.rows(row, 64) for row in range(0, len(order), 64)])
    assert found.equal(tensor[torch.from_numpy(order)]) and sum(counted.read) <= len(tensor)
