"""Every spelling and scheme in vLLM's own config parser and weight loader, and what others might write; the checker
says the same. Its FP8 kernels need a GPU and are not run."""

import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import environments
import in_memory
import matrix
import pico
import pytest
import torch
from in_vllm import load_in_vllm, out_of
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import execute
from precisionctl.engines import serving
from precisionctl.engines.base import engines
from precisionctl.engines.serving import LATENT
from precisionctl.fp8 import delayed_scaling, sidecar
from precisionctl.fp8.state import Fp8State
from precisionctl.verify.engine_rules import check

FAMILIES = (*matrix.FAMILIES, "llama-tied", "llama-all-biases", "mistral")
WRITTEN = [(family, *spelling) for family in FAMILIES for spelling in matrix.SPELLINGS]

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
ROUTED = re.compile(r"(.+\.experts)\.routed_experts\.(w13|w2)_(weight|weight_scale_inv|weight_scale|input_scale)")


@pytest.fixture(scope="module")
def python():
    return environments.vllm()


@pytest.fixture(scope="module")
def directories(python, tmp_path_factory):
    """All of them, each with what vLLM made of it beside it: one start of vLLM for all."""
    root = tmp_path_factory.mktemp("vllm")
    made = {case: matrix.make(root, *case) for case in WRITTEN}
    made |= {name: matrix.make_changed(root, name) for name in matrix.CHANGES}
    load_in_vllm(python, *made.values())
    return made


def parts(name: str, count: int, stored: dict[str, torch.Tensor]) -> list[str]:
    """The stored tensors that a parameter of vLLM is made of; of experts' inputs it keeps one scale for gate and up."""
    if match := ROUTED.fullmatch(name):
        stem, part, kind = match.groups()
        gate, up, down = (
            ("w1", "w3", "w2") if f"{stem}.0.w1.weight" in stored else ("gate_proj", "up_proj", "down_proj")
        )
        names = (down,) if part == "w2" else (gate,) if kind == "input_scale" else (gate, up)
        return [f"{stem}.{expert}.{each}.{kind}" for expert in range(count) for each in names]
    module, _, kind = name.rpartition(".")
    stem, _, last = module.rpartition(".")
    return [f"{stem}.{part}.{kind}" for part in FUSED.get(last, (last,))] if stem else [name]


def problem_of_vllm(directory: Path) -> str | None:
    """What it did not load, or holds with other values than are stored; None for nothing."""
    failure = out_of(directory).with_name(f"{out_of(directory).name}.error")
    if failure.is_file():
        return failure.read_text()
    stored, loaded = load_file(directory / "model.safetensors"), load_file(out_of(directory))
    taken: set[str] = set()
    for name, values in loaded.items():
        names = parts(name, len(values) if values.ndim else 1, stored)
        taken |= set(names)
        if problem := _differs(values, [stored[each] for each in names]):
            return f"{name} {problem}"
    # of a fused group of experts vLLM keeps one input scale
    left = {name for name in stored.keys() - taken if not re.search(r"\.experts\..*\.(w3|up_proj)\.input_scale", name)}
    return f"it does not take {sorted(left)}" if left else None


def _differs(values: torch.Tensor, stored: list[torch.Tensor]) -> str | None:
    """Codes and exponents are the stored bytes; the numbers of other tensors are the stored ones, in FP32 or BF16."""
    exact = stored[0].dtype in (torch.float8_e4m3fn, torch.uint8)
    if exact and values.dtype != stored[0].dtype:
        return f"became {values.dtype}"
    found = values.reshape(-1).view(torch.uint8) if exact else values.reshape(-1).double()
    expected = torch.cat(
        [each.reshape(-1).view(torch.uint8) if exact else each.reshape(-1).double() for each in stored]
    )
    if not torch.equal(found[: len(expected)], expected):
        return "has other values"
    return "has more values" if found[len(expected) :].any() else None  # vLLM rounds the vocabulary up to 64


def refused(directory: Path) -> bool:
    return any(found.rule.fatal for found in check(HuggingFaceReader(directory), engines()["vllm"]))


@pytest.mark.parametrize("case", WRITTEN, ids=" ".join)
def test_vllm_holds_what_is_stored_or_the_checker_says_that_it_does_not(directories, case):
    family, method, scheme = case
    problem = problem_of_vllm(directories[case])
    assert refused(directories[case]) == (problem is not None), problem
    if not problem:
        with safe_open(out_of(directories[case]), "pt") as file:
            assert file.metadata()["quantization"] == (
                "modelopt_mxfp8" if case[1:] == ("modelopt", "mxfp8") else method
            )


def test_what_vllm_does_not_load_is_known(directories):
    """So that a checker and a loader that both refuse everything are no agreement."""
    failing = {case for case in WRITTEN if problem_of_vllm(directories[case])}
    of_experts = {(family, "modelopt", "dynamic") for family in ("mixtral", "qwen3-moe", "deepseek-v3")}
    assert failing == of_experts | {(family, "mxfp8", "mxfp8") for family in FAMILIES}


def test_what_vllm_computes_as_one_is_known_and_has_one_scale(directories):
    """Its classes say so, and DeepSeek's model once it is built."""
    seen = set()
    for case in WRITTEN:
        if case[2] == "static":
            with safe_open(out_of(directories[case]), "pt") as file:
                groups = json.loads(file.metadata()["fused"]).values()
            stored = load_file(directories[case] / "model.safetensors")
            seen |= {group for group in map(tuple, groups) if len(group) > 1}
            for group in [group for group in map(tuple, groups) if len(group) > 1]:
                first = f".{group[0]}.weight_scale"
                for name in [name for name in stored if name.endswith(first)]:
                    scales = [stored[f"{name.removesuffix(first)}.{part}.weight_scale"] for part in group]
                    assert all(torch.equal(scale, scales[0]) for scale in scales)
    assert LATENT in seen and seen <= {*serving.FUSED, LATENT}


OTHERS = ("Qwen2", "Phi3", "Gemma2", "Gemma3", "Nemotron", "GptOss", "DeepseekV2", "GPTJ", "GPTNeoX")
CLASSES = """
import json, sys, torchvision_operators
from vllm.model_executor.models.registry import ModelRegistry
classes = [ModelRegistry.models[name].load_model_cls() for name in sys.argv[1:]]
found = [getattr(each, "packed_modules_mapping", None) or {} for each in classes]
print(json.dumps([parts for mapping in found for parts in mapping.values()]))
"""


def test_what_vllm_computes_as_one_in_other_families_is_known(python):
    names = [f"{name}ForCausalLM" for name in OTHERS]
    environment = os.environ | {"VLLM_TARGET_DEVICE": "cpu", "PYTHONPATH": ""}
    command, here = [python, "-c", CLASSES, *names], Path(__file__).parent
    done = subprocess.run(command, check=True, capture_output=True, cwd=here, env=environment, text=True)
    groups = {tuple(parts) for parts in json.loads(done.stdout.splitlines()[-1]) if len(parts) > 1}
    assert groups and groups <= {*serving.FUSED, LATENT}


@pytest.mark.parametrize("name", matrix.CHANGES)
def test_of_directories_that_others_might_write_vllm_takes_those_that_the_checker_does(directories, name):
    problem = problem_of_vllm(directories[name])
    assert refused(directories[name]) == (problem is not None), problem


def test_vllm_does_not_load_deepseek_without_the_key_that_exports_add(tmp_path, python):
    directory = matrix.make(tmp_path, "deepseek-v3", "compressed-tensors", "dynamic")
    config = json.loads((directory / "config.json").read_text())
    assert config.pop("topk_method") == "noaux_tc"
    (directory / "config.json").write_text(json.dumps(config))
    load_in_vllm(python, directory)
    assert "e_score_correction_bias" in (problem_of_vllm(directory) or "") and refused(directory)


def test_vllm_ignores_experts_of_gpt_oss_by_an_expression_alone(tmp_path, python):
    directory = tmp_path / "out"
    settings = matrix.sizes("gpt-oss", "dynamic") | {"swiglu_limit": 7.0}  # which vLLM has fixed
    pico.save(tmp_path / "hf", "gpt-oss", dtype=torch.bfloat16, **settings)
    execute(plan_command(Request.export(tmp_path / "hf", directory, "vllm", "dynamic")))
    named = shutil.copytree(directory, tmp_path / "named")
    config = json.loads((named / "config.json").read_text())
    listed = config["quantization_config"]["ignore"]
    config["quantization_config"]["ignore"] = [entry for entry in listed if not entry.startswith("re:")]
    (named / "config.json").write_text(json.dumps(config))
    load_in_vllm(python, directory, named)
    assert not out_of(directory).with_name(f"{out_of(directory).name}.error").exists() and not refused(directory)
    assert "found multiple" in (problem_of_vllm(named) or "") and refused(named)


@pytest.mark.parametrize("targets", [("Linear",), ("Linear", "re:.*lm_head")])
def test_a_head_in_codes_is_a_linear_to_vllm_only_where_a_target_names_it(tmp_path, python, targets):
    pico.save(tmp_path / "hf", dtype=torch.bfloat16, vocab_size=256)
    directory = tmp_path / "out"
    in_memory.export(HuggingFaceReader(tmp_path / "hf"), directory, "compressed-tensors", "dynamic")
    stored, config = load_file(directory / "model.safetensors"), json.loads((directory / "config.json").read_text())
    scale = stored["lm_head.weight"].float().abs().amax(1, keepdim=True) / 448
    head = {"lm_head.weight": (stored["lm_head.weight"] / scale).to(torch.float8_e4m3fn), "lm_head.weight_scale": scale}
    save_file(stored | head, directory / "model.safetensors", metadata={"format": "pt"})
    config["quantization_config"]["ignore"] = ["model.embed_tokens"]
    config["quantization_config"]["config_groups"]["group_0"]["targets"] = list(targets)
    (directory / "config.json").write_text(json.dumps(config))
    load_in_vllm(python, directory)
    assert refused(directory) == (problem_of_vllm(directory) is not None) == (len(targets) == 1)


def test_vllm_fuses_the_gate_of_olmo_hybrids_delta_net(tmp_path, python):
    directory = tmp_path / "out"
    pico.save(tmp_path / "hf", "olmo-hybrid", dtype=torch.bfloat16)
    execute(plan_command(Request.export(tmp_path / "hf", directory, "vllm", "dynamic")))
    config, stored = json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")
    for name in [name.removesuffix(".weight") for name in stored if name.endswith("g_proj.weight")]:
        scale = stored.pop(f"{name}.weight_scale")
        stored[f"{name}.weight"] = (stored[f"{name}.weight"].float() * scale).bfloat16()
        config["quantization_config"]["ignore"].append(name)
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    load_in_vllm(python, directory)
    assert "shards of model.layers.1.linear_attn.in_proj_qkvg" in (problem_of_vllm(directory) or "")
    assert refused(directory)


def test_vllm_finds_no_place_for_scales_of_latents(tmp_path, python):
    """Which is why none are written. It reads them under the names of compressed-tensors, ModelOpt and its own."""
    directory = matrix.make(tmp_path, "deepseek-v3", "compressed-tensors", "static")
    config, stored = json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")
    config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    for below in ("k_scale", "k_proj.k_scale", "mla_attn.mla_attn.k_scale"):
        scales = {f"model.layers.{n}.self_attn.{below}": torch.full((1,), 0.25) for n in range(3)}
        made = tmp_path / below
        made.mkdir()
        (made / "config.json").write_text(json.dumps(config))
        save_file(stored | scales, made / "model.safetensors", metadata={"format": "pt"})
    load_in_vllm(python, *(made for made in tmp_path.glob("*k_scale")))
    for made in tmp_path.glob("*k_scale"):
        assert "it does not take" in (problem_of_vllm(made) or "")


@pytest.mark.parametrize(
    ("target", "scheme"),
    [("vllm", "static"), ("vllm", "dynamic"), ("vllm", "block"), ("vllm", "mxfp8"), ("tensorrt-llm", "static")],
)
def test_vllm_casts_its_cache_with_the_scales_that_are_stored(tmp_path, python, target, scheme):
    pico.save(tmp_path / "hf", "llama-3", dtype=torch.bfloat16, **matrix.sizes("llama-3", "block"))
    source = in_memory.with_state(HuggingFaceReader(tmp_path / "hf"))
    roles = {
        role: delayed_scaling.after_one_update(torch.tensor(amax), role, source.fp8.recipe)
        for role, amax in (("k", 3.3), ("v", 0.7))
    }
    caches = {f"decoder.layers.{layer}.self_attention.core_attention": Fp8State(roles) for layer in range(2)}
    sidecar.write(tmp_path / "hf" / sidecar.RELATIVE, replace(source.fp8, modules={**source.fp8.modules, **caches}))
    execute(plan_command(Request.export(tmp_path / "hf", tmp_path / "out", target, scheme, kv_cache="fp8")))
    load_in_vllm(python, tmp_path / "out")
    loaded = load_file(out_of(tmp_path / "out"))
    with safe_open(out_of(tmp_path / "out"), "pt") as file:
        cache = file.metadata()["cache"]
    modelopt = target == "tensorrt-llm" or scheme == "mxfp8"
    assert cache == ("auto" if scheme == "block" else "fp8_e4m3" if modelopt else "fp8")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    below = "{0}_scale" if "model.layers.0.self_attn.k_scale" in stored else "{0}_proj.{0}_scale"
    for layer in range(2):
        for kind, amax in (("k", 3.3), ("v", 0.7)):
            found = loaded[f"model.layers.{layer}.self_attn.attn.{kind}_scale"].float().item()
            assert found == stored[f"model.layers.{layer}.self_attn.{below.format(kind)}"].item()
            assert found == pytest.approx(amax / 448, rel=2**-7)
