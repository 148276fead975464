"""Adapters that peft writes, merged here, are what peft merges in FP32, rounded once."""

import json
import subprocess
from pathlib import Path

import conversions
import environments
import pytest
import torch
import transformers
from safetensors.torch import load_file

from precisionctl.checkpoints.adapter.lora_config import read_lora_config

SCRIPT = Path(__file__).with_name("peft_merged.py")
VERSIONS = (f"torch=={torch.__version__.partition('+')[0]}", f"transformers=={transformers.__version__}")

CASES = [
    *("plain", "rslora", "patterns", "whole", "embeddings", "dora", "biases", "conv1d", "experts", "down", "mixtral"),
    *("lfm3", "axk2", "laguna", "layers", "all_linear", "deepseek", "expressions", "mica"),
    "conv1d_and_linear",
]
"""Those of the script."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    python = environments.python_with("peft", ("peft==0.21.2", *VERSIONS))
    folder = tmp_path_factory.mktemp("peft")
    subprocess.run([python, SCRIPT, folder], check=True, capture_output=True)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_a_merge_is_pefts_own_in_fp32_rounded_once(made: Path, case: str) -> None:
    folder = made / case
    conversions.run(folder / "adapter", folder / "ours", "hf", reference=folder / "base", verify=True)
    ours, theirs = (load_file(folder / name / "model.safetensors") for name in ("ours", "merged"))
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name].bfloat16())] == []
    base = load_file(folder / "base" / "model.safetensors")
    assert any(not torch.equal(ours[name], base[name]) for name in base)


def test_the_same_modules_are_adapted(made: Path, tmp_path: Path) -> None:
    said = json.loads((made / "adapted.json").read_text())
    for settings, adapted in said["adapted"]:
        (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **settings}))
        modules = read_lora_config(tmp_path).modules
        assert [name for name in said["modules"] if name in modules] == adapted, settings
    assert any(len(adapted) not in (0, len(said["modules"])) for _, adapted in said["adapted"])


def test_a_tied_embedding_gets_its_change_once(made: Path) -> None:
    folder = made / "tied"
    conversions.run(folder / "adapter", folder / "ours", "hf", reference=folder / "base", verify=True)
    tokens, theirs = torch.arange(64).unsqueeze(0), load_file(folder / "logits.safetensors")["logits"]
    with torch.no_grad():
        ours, base = (
            transformers.AutoModelForCausalLM.from_pretrained(folder / name)(tokens).logits for name in ("ours", "base")
        )
    assert float((ours - theirs).abs().max()) < 1e-4 < 1 < float((base - theirs).abs().max())


def test_two_adapters_are_merged_on_a_base_in_fp32(made: Path) -> None:
    folder = made / "two"
    conversions.run(folder / "base", folder / "base32", "hf", "fp32")
    conversions.run(folder / "adapter", folder / "one", "hf", reference=folder / "base32")
    conversions.run(folder / "adapter" / "two", folder / "both", "hf", reference=folder / "one")
    conversions.run(folder / "both", folder / "ours", "hf", "bf16")
    ours, theirs = (load_file(folder / name / "model.safetensors") for name in ("ours", "merged"))
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name].bfloat16())] == []


def test_megatron_gets_the_same(made: Path) -> None:
    folder = made / "experts"
    conversions.run(folder / "adapter", folder / "megatron", "megatron", reference=folder / "base")
    conversions.run(folder / "megatron", folder / "back", "hf")
    theirs = load_file(folder / "merged" / "model.safetensors")
    assert all(
        torch.equal(tensor, theirs[name].bfloat16()) for name, tensor in conversions.tensors(folder / "back").items()
    )
