"""Directories that mlx-lm saves: we read the values that `mx.dequantize` gives, under the names of published files, and
write the same bytes."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import conversions
import environments
import mlx_directories
import pico
import pytest
import tiny_wrappers
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from precisionctl.checkpoints.base import Hints
from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.request import MLX, Request

SIZES = {"hidden_size": 128, "intermediate_size": 128}
LATENTS = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 48}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama-3": SIZES,
    "qwen3-moe": SIZES | {"moe_intermediate_size": 64},
    "deepseek-v3": SIZES | LATENTS,
    "gemma3": SIZES,
    "nemotron-h": {},
    "nemotron-nas": {"hidden_size": 128},
}
STEP = {**SIZES, "moe_intermediate_size": 64, "share_expert_dim": 64}
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{f"affine-{bits}": ({"bits": bits, "group_size": 32}, {}) for bits in (2, 3, 4, 5, 6, 8)},
    "affine-128": ({"bits": 4, "group_size": 128}, {}),
    "mxfp4": ({"mode": "mxfp4"}, {}),
    "mxfp8": ({"mode": "mxfp8"}, {}),
    "nvfp4": ({"mode": "nvfp4", "global_scale": True}, {}),
    "mixed": ({"bits": 3, "group_size": 32}, {"down_proj": {"bits": 6, "group_size": 32}, "v_proj": False}),
    "values": ({"quantize": False}, {}),
}
"""Keywords of mlx-lm's `quantize_model`, and settings of modules by parts of their names."""


@pytest.mark.parametrize("family", FAMILIES)
def test_what_mlx_lm_saves_decodes_to_what_mlx_makes_of_it(tmp_path: Path, family: str) -> None:
    pico.save(tmp_path / "bf16", family, dtype=torch.bfloat16, **FAMILIES[family])
    path = tmp_path / "bf16" / "config.json"
    config = json.loads(path.read_text())  # with keys that mlx-lm looks for and transformers 5 has elsewhere
    config |= {"rope_theta": 10000.0, "num_experts": config.get("num_local_experts", config.get("num_experts"))}
    path.write_text(json.dumps({key: each for key, each in config.items() if key != "rope_parameters"}))
    program = Path(__file__).parent / "mlx_save.py"
    cases = json.dumps([("bf16", way, *said) for way, said in WAYS.items()])
    command = [environments.mlx(), program, tmp_path, cases]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    names = load_file(tmp_path / "bf16" / "model.safetensors").keys()
    for way in WAYS:
        reader = open_checkpoint(tmp_path / way)
        assert reader.specs.keys() == names, way
        assert bool(reader.encodings) is False and reader.model == open_checkpoint(tmp_path / "bf16").model
        expected = mlx_directories.published(load_file(tmp_path / f"{way}-values.safetensors"))
        for name, values in expected.items():
            found = read_tensor(reader, name)
            assert torch.equal(found, values.bfloat16().view(found.shape)), (way, name)


TOKENS = [3, 17, 42, 99, 5, 7, 11, 200]
SCHEMES: dict[str, dict[str, Any] | None] = {
    "bf16": None,
    "4bit": {"bits": 4, "group_size": 64},
    "8bit": {"bits": 8, "group_size": 64},
    **{mode: {"mode": mode} for mode in ("mxfp4", "mxfp8", "nvfp4")},
}
WRITTEN = FAMILIES | {
    "deepseek": SIZES | {"moe_intermediate_size": 64, "routed_scaling_factor": 1.0},
    "deepseek-v3": FAMILIES["deepseek-v3"] | {"qk_nope_head_dim": 64},
    "granite-moe": SIZES,
    "falcon-mamba": {"hidden_size": 128, "intermediate_size": 256},
    "step3p5": STEP,
}


@pytest.mark.parametrize("family", WRITTEN)
def test_what_is_written_for_mlx_is_what_mlx_lm_converts(tmp_path: Path, family: str) -> None:
    pico.save(tmp_path / "hf", family, dtype=torch.bfloat16, **WRITTEN[family])
    if family == "step3p5":  # norms that have one added to them without rounding
        file = tmp_path / "hf" / "model.safetensors"
        before = load_file(file)
        save_file(before | {name: (each * 64).round() / 64 for name, each in before.items() if "norm" in name}, file)
    check_written(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    of_transformers = model(torch.tensor([TOKENS])).logits
    assert torch.allclose(load_file(tmp_path / "bf16.safetensors")["ours"], of_transformers, rtol=1e-3, atol=1e-4)


FOUR_LAYERS = {"num_hidden_layers": 4}
WRAPPERS: dict[str, dict[str, Any]] = {
    "qwen3_5": FOUR_LAYERS,
    "qwen3_5_moe": FOUR_LAYERS | {"moe_intermediate_size": 64},
    "qwen3_vl_moe": {"moe_intermediate_size": 64},
    "gemma3n": {"num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma4": {},
    "llama4": {},
    "mistral3": {},
    "mistral3 of mistral4": tiny_wrappers.MISTRAL_4,
    "kimi_k25": {},
}


@pytest.mark.parametrize("case", WRAPPERS)
def test_the_text_model_of_a_wrapper_is_what_mlx_lm_converts(tmp_path: Path, case: str) -> None:
    """With norms that are no longer than BF16 plus one. mlx-lm reads experts of Qwen3.5 in one tensor alone."""
    kind, tokens = case.partition(" ")[0], [token % 79 for token in TOKENS]
    model = tiny_wrappers.make(kind, dtype=torch.bfloat16, **WRAPPERS[case])
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" in name:
                tensor.copy_((tensor * 64).round() / 64)
    tiny_wrappers.save_made(tmp_path / "hf", kind, model, in_memory=kind == "qwen3_5_moe")
    check_written(tmp_path, tokens)
    made = getattr(model.float(), "model", model).language_model(torch.tensor([tokens]))
    of_transformers = made.logits if hasattr(made, "logits") else model.lm_head(made.last_hidden_state)
    if cap := getattr(model.config.text_config, "final_logit_softcapping", None):
        of_transformers = cap * torch.tanh(of_transformers / cap)
    found = load_file(tmp_path / "bf16.safetensors")["ours"]
    assert torch.allclose(found, of_transformers, rtol=1e-3, atol=1e-4)


def check_written(folder: Path, tokens: list[int] = TOKENS) -> None:
    """Hold what is written of `hf` in a folder, in each scheme, against mlx-lm's conversion. The config.json of the
    source is that of the result, without what it says of codes, as mlx-lm asks for its keys."""
    shutil.copytree(folder / "hf", folder / "for-mlx")
    for scheme, how in SCHEMES.items():
        ours = folder / f"ours-{scheme}"
        conversions.carry_out(Request.export(folder / "hf", ours, MLX, scheme))
        if how is None:
            shutil.copy(ours / "config.json", folder / "for-mlx")
        program = Path(__file__).parent / "mlx_convert.py"
        paths = (folder / name for name in ("for-mlx", f"mlx-{scheme}"))
        logits = folder / f"{scheme}.safetensors"
        command = [environments.mlx(), program, *paths, ours, logits, json.dumps(tokens), json.dumps(how)]
        done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        expected, found = (load_file(folder / f"{whose}-{scheme}" / "model.safetensors") for whose in ("mlx", "ours"))
        assert found.keys() == expected.keys(), scheme
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, (scheme, name)
            assert torch.equal(found[name].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8)), name
        said = [json.loads((folder / f"{whose}-{scheme}" / "config.json").read_text()) for whose in ("mlx", "ours")]
        assert said[0].get("quantization") == said[1].get("quantization")
        assert said[0].get("quantization_config") == said[1].get("quantization_config")
        assert torch.equal(*load_file(logits).values())


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_adapters_are_merged_to_what_mlx_lm_fuses(tmp_path: Path, kind: str) -> None:
    """In FP32, in which mlx-lm rounds nothing either; sums are in another order."""
    pico.save(tmp_path / "base", "llama-3", dtype=torch.float32, **SIZES)
    path = tmp_path / "base" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_theta": 10000.0}))
    program = Path(__file__).parent / "mlx_adapters.py"
    command = [environments.mlx(), program, *(tmp_path / name for name in ("base", "adapter", "fused")), kind]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    reader = open_checkpoint(tmp_path / "adapter", hints=Hints(reference=tmp_path / "base"))
    fused = load_file(tmp_path / "fused" / "model.safetensors")
    before = load_file(tmp_path / "base" / "model.safetensors")
    assert sum(not torch.equal(values, before[name]) for name, values in fused.items()) == 7
    for name, values in fused.items():
        assert torch.allclose(read_tensor(reader, name), values, rtol=1e-4, atol=1e-5), name
