"""INT8 of compressed-tensors, and Quark's FP8 and MXFP4, in vLLM's own config parser and weight loader, without its
kernels: it loads what the checker says that it does."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import environments
import four_bit_directories
import fp8_directories
import int8_directories
import pytest
import torch
from in_vllm import load_in_vllm, out_of
from int8_directories import SPELLINGS
from safetensors.torch import load_file

from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.engines.base import engines
from precisionctl.verify.engine_rules import check

_EXPERTS = {"moe_intermediate_size": 64, "num_experts": 2, "num_experts_per_tok": 1, "num_hidden_layers": 2}
_MADE = {
    **{name: (int8_directories.make, spelled) for name, spelled in SPELLINGS.items()},
    "w8a16-zero-points": (int8_directories.make, int8_directories.WITH_ZERO_POINTS),
    "quark-tensor": (fp8_directories.make, "quark-tensor"),
    "quark-channel": (fp8_directories.make, "quark-channel"),
    "quark-mxfp4": (four_bit_directories.make, "quark-mxfp4"),
}
_OF_EXPERTS = ("w8a8", "w8a8-static", "w8a16-64")


def _group(**said: Any) -> Callable[[dict[str, Any]], None]:
    def change(quantization: dict[str, Any]) -> None:
        quantization["config_groups"]["group_0"] |= said
        quantization["format"] = quantization["config_groups"]["group_0"]["format"]

    return change


def _without(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda quantization: quantization.pop(key)


CHANGES: Mapping[str, tuple[str, Callable[[dict[str, Any]], None]]] = {
    "bytes without inputs": ("w8a8", _group(input_activations=None)),
    "bytes as dense": ("w8a8", _group(format="dense")),
    "words as nothing": ("w8a16", _group(format=None)),
    "Quark without export": ("quark-tensor", _without("export")),
    "Quark without a list": ("quark-tensor", _without("exclude")),
    "Quark without types": ("quark-tensor", _without("layer_type_quant_config")),
    "Quark's head unsaid": ("quark-tensor", lambda quantization: quantization.update(exclude=[])),
}
LOADED = {*_MADE, "experts w8a8", "experts w8a16-64", "Quark's head unsaid"}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """All of them, each with what vLLM made of it beside it."""
    root, made = tmp_path_factory.mktemp("vllm"), {}
    for name, (make, spelled) in _MADE.items():
        made[name] = root / name
        make(made[name], spelled)
    for name in _OF_EXPERTS:
        made[f"experts {name}"] = directory = root / f"experts-{name}"
        int8_directories.make(directory, SPELLINGS[name], "qwen3-moe", **_EXPERTS)
        _change(directory, lambda quantization: quantization.update(ignore=["lm_head", r"re:.*mlp\.gate$"]))
    for name, (source, change) in CHANGES.items():
        made[name] = Path(shutil.copytree(made[source], root / name.replace(" ", "-")))
        _change(made[name], change)
    load_in_vllm(environments.vllm(), *made.values())
    return made


def _change(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    change(config["quantization_config"])
    path.write_text(json.dumps(config))


def test_vllm_loads_what_the_checker_says_that_it_does(directories: Mapping[str, Path]) -> None:
    vllm = engines()["vllm"]
    found = {name: check(open_checkpoint(directory), vllm) for name, directory in directories.items()}
    taken = {name for name, findings in found.items() if not any(each.rule.fatal for each in findings)}
    loaded = {name for name, directory in directories.items() if out_of(directory).is_file()}
    assert taken == loaded == LOADED


@pytest.mark.parametrize("name", ["w8a8", "w8a16", "w8a16-zero-points", "quark-channel"])
def test_vllm_holds_the_codes_scales_and_zero_points_that_are_stored(
    directories: Mapping[str, Path], name: str
) -> None:
    stored, held = load_file(directories[name] / "model.safetensors"), load_file(out_of(directories[name]))
    kinds = ("weight", "weight_packed", "weight_scale", "weight_zero_point")
    of_q = [kind for kind in kinds if f"model.layers.0.self_attn.q_proj.{kind}" in stored]
    assert len(of_q) > 1
    for kind in of_q:
        parts = [stored[f"model.layers.0.self_attn.{part}_proj.{kind}"].float().reshape(-1) for part in "qkv"]
        assert torch.equal(held[f"model.layers.0.self_attn.qkv_proj.{kind}"].float().reshape(-1), torch.cat(parts))


def test_of_fixed_scales_of_inputs_vllm_keeps_the_last_that_it_loads(directories: Mapping[str, Path]) -> None:
    stored = load_file(directories["w8a8-static"] / "model.safetensors")
    held = load_file(out_of(directories["w8a8-static"]))["model.layers.0.self_attn.qkv_proj.input_scale"]
    scales = {part: float(stored[f"model.layers.0.self_attn.{part}_proj.input_scale"]) for part in "qkv"}
    assert float(held) == scales["v"] < max(scales.values())
