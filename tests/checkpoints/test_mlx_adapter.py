"""LoRA adapters of mlx-lm, merged like PEFT's. tests/peers/test_mlx.py has what mlx-lm itself fuses."""

import json
import shutil
from pathlib import Path
from typing import Any

import conversions
import mlx_directories
import pico
import pytest
import tiny_wrappers
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from precisionctl.checkpoints.base import Hints
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.errors import PrecisionctlError

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
RANK, SCALE = 4, 10.0


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) * 0.1


def linear(module: str, out: int, into: int) -> dict[str, Tensor]:
    return {f"{module}.lora_a": random(into, RANK), f"{module}.lora_b": random(RANK, out)}


def adapter(directory: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    said = {"fine_tune_type": "lora", "num_layers": 16, "model": "mlx-community/some"}
    said |= {"lora_parameters": {"rank": RANK, "dropout": 0.0, "scale": SCALE}}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(said | config))
    save_file(tensors, directory / "adapters.safetensors")
    save_file(tensors, directory / "0000100_adapters.safetensors")
    return directory


def base(directory: Path, family: str = "llama-3") -> Path:
    pico.save(directory, family, dtype=torch.bfloat16)
    return directory


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_a_product_is_added_and_the_rest_is_the_base(tmp_path: Path, kind: str) -> None:
    before = load_file(base(tmp_path / "base") / "model.safetensors")
    tensors = linear(Q, 64, 64) | linear(DOWN, 64, 96)
    if kind == "dora":
        tensors |= {f"{module}.m": random(64).abs() + 1 for module in (Q, DOWN)}
    made = adapter(tmp_path / "adapter", tensors, fine_tune_type=kind)
    notes = conversions.run(made, tmp_path / "out", "hf", reference=tmp_path / "base", verify=True).notes
    assert any(note.startswith("The adapter names 'mlx-community/some' as its base") for note in notes)
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert merged.keys() == before.keys()
    for name, values in before.items():
        module = name.removesuffix(".weight")
        expected = values
        if module in (Q, DOWN):
            a, b = (tensors[f"{module}.lora_{factor}"] for factor in "ab")
            whole = values.float() + b.T @ a.T * SCALE
            if kind == "dora":
                whole *= (tensors[f"{module}.m"] / whole.norm(dim=1))[:, None]
            expected = whole.bfloat16()
        assert torch.equal(merged[name], expected), name


def test_an_adapter_of_a_base_in_mlxs_codes_is_merged_into_their_values(tmp_path: Path) -> None:
    values = mlx_directories.make(tmp_path / "base", "affine-4")
    out, into = values[f"{Q}.weight"].shape
    tensors = linear(Q, out, into)
    conversions.run(adapter(tmp_path / "adapter", tensors), tmp_path / "out", "hf", reference=tmp_path / "base")
    expected = values[f"{Q}.weight"].float() + SCALE * (tensors[f"{Q}.lora_a"] @ tensors[f"{Q}.lora_b"]).T
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")[f"{Q}.weight"], expected.bfloat16())


def test_an_adapter_of_a_wrapper_s_text_model_is_merged_beside_its_towers(tmp_path: Path) -> None:
    tiny_wrappers.save(tmp_path / "base", "qwen3_5", dtype=torch.bfloat16, num_hidden_layers=4)
    before, changed = tiny_wrappers.stored(tmp_path / "base"), "model.language_model.layers.0.mlp.up_proj.weight"
    tensors = linear("language_model.model.layers.0.mlp.up_proj", *before[changed].shape)
    conversions.run(adapter(tmp_path / "adapter", tensors), tmp_path / "out", "hf", reference=tmp_path / "base")
    product = SCALE * torch.mm(*(each for name, each in sorted(tensors.items()))).T
    merged = tiny_wrappers.stored(tmp_path / "out")
    assert merged.keys() == before.keys()
    for name, values in before.items():
        expected = (values.float() + product).bfloat16() if name == changed else values
        assert torch.equal(merged[name], expected), name


REFUSED: dict[str, tuple[dict[str, Tensor], dict[str, Any], str]] = {
    "all weights": ({f"{Q}.weight": random(64, 64)}, {"fine_tune_type": "full"}, "fine_tune_type is 'full'"),
    "experts": ({f"{Q}.lora_a": random(2, RANK, 64)}, {}, "as of a stack of experts"),
    "an embedding": (linear("model.embed_tokens", 64, 80), {}, "is an embedding"),
    "no linear of the base": (linear("model.layers.0.mlp.switch_mlp.up_proj", 96, 64), {}, "no such linear"),
    "something else": ({f"{Q}.other": random(4)}, {}, "no tensor of a LoRA adapter"),
    "another rank": (linear(Q, 64, 64), {"lora_parameters": {"rank": 8, "scale": 1.0}}, "has rank 4"),
    "one factor": ({f"{Q}.lora_a": random(64, RANK)}, {}, "has no lora_B"),
    "no lengths": (linear(Q, 64, 64), {"fine_tune_type": "dora"}, "use_dora"),
    "another size": (linear(Q, 64, 32), {}, "Is it the adapter's base"),
    "no settings": (linear(Q, 64, 64), {"lora_parameters": None}, "the rank None and the scale None"),
    "a rank beyond any": (linear(Q, 64, 64), {"lora_parameters": {"rank": 10**400, "scale": 0.5}}, "the rank 1000"),
    "no number": (linear(Q, 64, 64), {"lora_parameters": {"rank": 4, "scale": float("nan")}}, "the scale nan"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_read_is_refused_by_name(tmp_path: Path, case: str) -> None:
    tensors, config, what = REFUSED[case]
    made = adapter(tmp_path / "adapter", tensors, **config)
    with pytest.raises(PrecisionctlError, match=what):
        open_checkpoint(made, hints=Hints(reference=base(tmp_path / "base")))


def test_an_adapter_for_a_family_that_mlx_lm_may_store_otherwise_is_refused(tmp_path: Path) -> None:
    made = adapter(tmp_path / "adapter", linear(Q, 64, 64))
    with pytest.raises(PrecisionctlError, match=r"for a `falcon_h1`[\s\S]*mlx_lm.fuse"):
        open_checkpoint(made, hints=Hints(reference=base(tmp_path / "base", "falcon-h1")))


def test_a_model_with_an_adapter_beside_it_is_told_apart(tmp_path: Path) -> None:
    whole = base(tmp_path / "whole")
    adapter(whole, linear(Q, 64, 64))
    with pytest.raises(PrecisionctlError, match="a model and an adapter of mlx-lm in one directory"):
        open_checkpoint(whole)
    (tmp_path / "apart").mkdir()
    for name in ("adapters.safetensors", "adapter_config.json"):
        shutil.move(whole / name, tmp_path / "apart" / name)
    with pytest.raises(PrecisionctlError, match=r"an adapter of mlx-lm \(LoRA\), without the model"):
        open_checkpoint(tmp_path / "apart")
    (whole / "0000100_adapters.safetensors").unlink()
    assert (
        open_checkpoint(tmp_path / "apart", hints=Hints(reference=whole)).specs.keys()
        == open_checkpoint(whole).specs.keys()
    )
