"""Megatron-Bridge loads what we write, by the description that we write with it, and we read what Bridge writes."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import environments
import pico
import pytest
import tiny_wrappers
import torch
from judges import BRIDGE
from safetensors.torch import load_file, save_file

from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import execute
from precisionctl.param import Parallelism

ON_CPU, ADAPTERS, OF_WRAPPERS = (
    Path(__file__).with_name(f"bridge_{name}.py") for name in ("on_cpu", "adapters", "wrappers")
)
WRAPPERS: dict[str, dict[str, Any]] = {
    "gemma3": {"num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]},
    "qwen2_5_vl": {"use_sliding_window": False, "sliding_window": None},
    "qwen3_vl": {"num_hidden_layers": 3},  # as many as the tower gives features to
}
TORCH = f"torch=={torch.__version__.partition('+')[0]}"
NEEDED = (TORCH, "transformers>=4.57,<5", *"omegaconf einops rich regex six accelerate peft tensorboard".split())
PACKAGES = ("--no-deps", "megatron-bridge==0.3.1", "megatron-core==0.16.1", "triton")
"""Its own requirements ask for a GPU. The last version for Python 3.11."""


@pytest.fixture(scope="module")
def through_bridge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("bridge")
    python = environments.python_with("bridge", NEEDED, PACKAGES)
    for family, changes in BRIDGE.items():
        pico.save(top / f"{family}-hf", family, dtype=torch.bfloat16, **changes)
        uneven = Parallelism(2, 3, first_layers=1) if changes.get("num_hidden_layers") == 5 else Parallelism(2)
        there = Request(top / f"{family}-hf", top / f"{family}-ours", "megatron", parallelism=uneven)
        execute(plan_command(there))
    done = subprocess.run([python, ON_CPU, top, *BRIDGE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return top


@pytest.mark.parametrize("family", BRIDGE)
def test_bridge_exports_what_we_wrote_bit_for_bit(through_bridge: Path, family: str) -> None:
    before = load_file(through_bridge / f"{family}-hf" / "model.safetensors")
    after = load_file(through_bridge / f"{family}-exported.safetensors")
    assert after.keys() == before.keys()
    for name, values in before.items():
        found = after[name]
        if name.endswith(
            ("embed_tokens.weight", "embeddings.weight", "lm_head.weight")
        ):  # with padding in this version
            assert not found[len(values) :].any()
            found = found[: len(values)]
        if name.endswith("e_score_correction_bias"):  # FP32 in Megatron, and as released
            values = values.float()
        assert found.dtype == values.dtype and torch.equal(found, values), name


@pytest.mark.parametrize("family", BRIDGE)
def test_we_read_what_bridge_saved_bit_for_bit(through_bridge: Path, family: str) -> None:
    ours, theirs = (open_checkpoint(through_bridge / f"{family}-{whose}") for whose in ("ours", "theirs"))
    assert theirs.specs.keys() == ours.specs.keys()
    for name in ours.specs:
        assert torch.equal(read_tensor(theirs, name), read_tensor(ours, name)), name
    sizes = (
        "num_layers",
        "hidden_size",
        "num_query_groups",
        "vocab_size",
        "padded_vocab_size",
        "tied_embeddings",
        "moe",
    )
    assert [getattr(theirs.model, size) for size in sizes] == [getattr(ours.model, size) for size in sizes]


@pytest.fixture(scope="module")
def wrappers_of_bridge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("wrappers")
    python = environments.python_with("bridge", NEEDED, PACKAGES)
    for kind, text in WRAPPERS.items():
        tiny_wrappers.save(top / f"{kind}-hf", kind, dtype=torch.bfloat16, **text)
        shutil.copytree(top / f"{kind}-hf", top / f"{kind}-config", ignore=shutil.ignore_patterns("*.safetensors"))
    file = top / "gemma3-hf" / "model.safetensors"  # as published
    published = {
        re.sub("^vision_tower.", "vision_tower.vision_model.", n): tensor for n, tensor in load_file(file).items()
    }
    save_file(published, file, metadata={"format": "pt"})
    done = subprocess.run([python, OF_WRAPPERS, top, *WRAPPERS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return top


@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_wrapper_that_bridge_saved_comes_back_bit_for_bit(
    wrappers_of_bridge: Path, kind: str, tmp_path: Path
) -> None:
    """By the config.json alone that the model had before Bridge, which describes it in its run_config.yaml, too."""
    theirs, config = (wrappers_of_bridge / f"{kind}-{what}" for what in ("theirs", "config"))
    assert (theirs / "iter_0000000" / "run_config.yaml").is_file()
    execute(plan_command(Request(theirs, tmp_path / "out", "hf", reference=config)))
    before, after = (
        load_file(path / "model.safetensors") for path in (wrappers_of_bridge / f"{kind}-hf", tmp_path / "out")
    )
    assert after.keys() == before.keys()
    assert [name for name, values in before.items() if not torch.equal(after[name], values)] == []


@pytest.mark.parametrize("kind", ["lora", "canonical"])
@pytest.mark.parametrize("family", ["llama-3", "qwen3"])
def test_an_adapter_that_bridge_saved_is_merged_as_by_bridge_bit_for_bit(
    tmp_path: Path, family: str, kind: str
) -> None:
    """In FP32, in which Bridge adds as here; in BF16 it rounds the product and the sum."""
    python = environments.python_with("bridge", NEEDED, PACKAGES)
    base = tmp_path / f"{family}-hf"
    pico.save(base, family, dtype=torch.float32)
    execute(plan_command(Request(base, tmp_path / f"{family}-ours", "megatron")))
    done = subprocess.run([python, ADAPTERS, tmp_path, family, kind], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    execute(plan_command(Request(tmp_path / f"{family}-{kind}-adapter", tmp_path / "out", "hf", reference=base)))
    ours, before = (load_file(path / "model.safetensors") for path in (tmp_path / "out", base))
    theirs = load_file(tmp_path / f"{family}-{kind}-merged.safetensors")
    assert len(theirs) == 14 and not any(torch.equal(theirs[name], before[name]) for name in theirs)
    assert [name for name, values in (before | theirs).items() if not torch.equal(ours[name], values)] == []
