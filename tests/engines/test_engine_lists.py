"""Modules that are not in a directory's list, and sizes, of which `verify --target` says what transformers makes."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import conversions
import pico
import pytest
import torch
from engine_exports import ENGINES, LAYER, METHODS, exported
from installed import BEFORE_5_23, need_loader
from soaking import in_soak
from transformers import AutoModelForCausalLM
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.utils.quantization_config import FineGrainedFP8Config

from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.request import Request
from precisionctl.dtypes import DType
from precisionctl.engines.base import engine_named
from precisionctl.param import TensorSpec
from precisionctl.verify.engine_rules import check

of_this_release = pytest.mark.skipif(BEFORE_5_23, reason="older ones have other classes")

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128, "head_dim": 32}
EXPERTS = ("*.experts.*",)
TRANSFORMERS, VLLM = engine_named("transformers"), engine_named("vllm")


def made(root: Path, family: str, scheme: str, exclude: tuple[str, ...] = ()) -> Path:
    sizes = SIZES | pico.fp8_sizes(family)
    pico.save(root / "source", family, dtype=torch.bfloat16, **sizes)
    request = Request.export(root / "source", root / "out", "transformers", scheme, exclude=exclude, keep_misfits=True)  # type: ignore[call-arg]
    conversions.carry_out(request, workers=1)
    return root / "out"


def without_one_kind(directory: Path, key: str) -> Any:
    """A list of a directory's config with the modules of one kind left out, for each kind: names that differ in
    numbers alone."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    listed: list[str] = config["quantization_config"][key]
    for kind in dict.fromkeys(["", *(re.sub(r"\d+", "0", name) for name in listed)]):
        config["quantization_config"][key] = [name for name in listed if re.sub(r"\d+", "0", name) != kind]
        path.write_text(json.dumps(config))
        yield kind


def misses(directory: Path) -> set[str]:
    """The scales that transformers looks for and does not find, whose weights it takes for codes."""
    need_loader(directory)
    _, found = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, output_loading_info=True)
    return {name for name in found["missing_keys"] if "_scale" in name}


def fatal(directory: Path) -> list[str]:
    return [str(each) for each in check(open_checkpoint(directory), TRANSFORMERS) if each.rule.fatal]


@of_this_release
@pytest.mark.parametrize(
    ("family", "routers"),
    [
        ("qwen2-moe", True),  # its gate of shared experts
        *in_soak(("qwen3-moe", False), ("afmoe", True), ("mixtral", False), ("granite-moe", False), ("phimoe", True)),
    ],
)
def test_a_list_of_compressed_tensors_lacks_what_transformers_misses(
    tmp_path: Path, family: str, routers: bool
) -> None:
    """Most classes of routers are no linears, which alone are quantized."""
    directory = made(tmp_path, family, "dynamic")
    wrong = set()
    for kind in without_one_kind(directory, "ignore"):
        assert bool(missed := misses(directory)) == bool(fatal(directory)), kind
        wrong |= missed
    assert routers == any("gate" in name or "router" in name for name in wrong)
    assert "lm_head.weight_scale" in wrong


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers makes the modules of `quant_method: fp8` that it computes with on a GPU."""
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda self, *args, **kwargs: None)


@of_this_release
@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize(
    ("family", "exclude", "named"),
    [
        ("qwen3-moe", EXPERTS, "experts"),
        ("qwen2-moe", (), "shared_expert_gate"),
        *in_soak(
            ("afmoe", (), "router.gate"), ("qwen3-moe", (), ""), ("granite-moe", (), "experts"), ("phimoe", (), "")
        ),
    ],
)
def test_a_list_of_fp8_lacks_what_transformers_misses_on_a_gpu(
    tmp_path: Path, family: str, exclude: tuple[str, ...], named: str
) -> None:
    """Experts are one module there, which the list must name; a head must be in the list if there is any."""
    directory = made(tmp_path, family, "block", exclude)
    assert not misses(directory) and not fatal(directory)
    wrong = set()
    for kind in without_one_kind(directory, "modules_to_not_convert"):
        assert bool(missed := misses(directory)) == bool(fatal(directory)), kind
        wrong |= missed
    assert "lm_head.weight_scale_inv" in wrong
    assert any(named in name for name in wrong - {"lm_head.weight_scale_inv"}) == bool(named)


@of_this_release
@pytest.mark.usefixtures("as_on_a_gpu")
def test_without_a_list_transformers_leaves_a_head_as_it_is(tmp_path: Path) -> None:
    directory = made(tmp_path, "llama-3", "block")
    path = directory / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]["modules_to_not_convert"]
    path.write_text(json.dumps(config))
    assert not misses(directory) and not fatal(directory)


@of_this_release
@pytest.mark.parametrize("scheme", ["dynamic", "w4a16", *in_soak("mxfp8", "nvfp4a16")])
def test_transformers_takes_any_number_of_rows_that_it_decodes(tmp_path: Path, scheme: str) -> None:
    sizes = SIZES | {"intermediate_size": 250}
    pico.save(tmp_path / "source", dtype=torch.bfloat16, **sizes)
    request = Request.export(tmp_path / "source", tmp_path / "out", "transformers", scheme, exclude=("*.down_proj",))  # type: ignore[arg-type]
    conversions.carry_out(request, workers=1)
    findings = check(open_checkpoint(tmp_path / "out"), TRANSFORMERS)
    assert not any(each.rule.fatal for each in findings)
    assert any("multiples of 16" in each.what for each in findings) == (scheme == "dynamic")
    conversions.run(tmp_path / "out", tmp_path / "bf16", "hf", "bf16")
    theirs, ours = (decoded(tmp_path / each) for each in ("out", "bf16"))
    assert ours.keys() <= theirs.keys()
    assert all(torch.equal(theirs[name], each) for name, each in ours.items())


def decoded(directory: Path) -> Mapping[str, torch.Tensor]:
    need_loader(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    with torch.no_grad():
        model(torch.arange(1, 9)[None])
    return dict(model.named_parameters())


@pytest.mark.parametrize(
    ("engine", "model_type", "quantized"),
    [
        ("vllm", "deepseek_v3", False),
        ("vllm", "qwen3_moe", True),  # models/qwen3_moe.py, lfm2_moe.py: GateLinear(quant_config=quant_config)
        ("sglang", "qwen3_moe", False),
        ("transformers", "qwen3_moe", False),
        ("tensorrt-llm", "qwen3_moe", True),  # not read
    ],
)
def test_a_router_that_is_not_in_the_list_is_found_where_the_engine_quantizes_it(
    engine: str, model_type: str, quantized: bool
) -> None:
    config, specs = exported(ENGINES[engine], "dynamic")
    router = f"{LAYER}.mlp.gate.weight"
    config |= {"model_type": model_type}
    values = specs | {router: TensorSpec((16, 256), DType.bfloat16)}
    found = ENGINES[engine].check(config, values, lambda name: torch.ones(1))
    assert [each.where for each in found if "not ignored" in each.what] == [router] * quantized
    method = METHODS[ENGINES[engine].spells["dynamic"]]
    codes = TensorSpec((16, 256), DType.float8_e4m3fn)
    scales = method.spelling.specs(method.scales(router, codes, "dynamic"), codes, method.spelling.form("dynamic"))
    coded = specs | {router: codes} | scales
    found = ENGINES[engine].check(config, coded, lambda name: torch.ones(1))
    assert [each.where for each in found if "never quantized" in each.what] == [router] * (not quantized)


@pytest.mark.parametrize("family", ["granite-moe", "gpt-oss"])
@pytest.mark.parametrize(
    ("engine", "scheme", "key", "name"),
    [
        ("vllm", "block", "modules_to_not_convert", "experts"),  # quant_utils.py is_layer_skipped
        ("vllm", "mxfp8", "ignore", "experts"),  # modelopt.py is_layer_excluded
        ("vllm", "dynamic", "ignore", "experts.0.gate_proj"),  # compressed_tensors_moe.py get_moe_method
        ("sglang", "block", "modules_to_not_convert", "experts"),  # utils.py is_layer_skipped
        ("sglang", "mxfp8", "ignored_layers", "experts"),
        ("sglang", "dynamic", "ignore", "experts.0.gate_proj"),  # compressed_tensors.py get_moe_scheme
    ],
)
def test_experts_in_one_tensor_are_in_the_list_by_the_name_that_the_engine_looks_for(
    tmp_path: Path, family: str, engine: str, scheme: str, key: str, name: str
) -> None:
    limit = {"swiglu_limit": 7.0} if family == "gpt-oss" else {}  # vLLM knows no other
    pico.save(tmp_path / "source", family, dtype=torch.bfloat16, **(SIZES | pico.fp8_sizes(family) | limit))
    request = Request.export(tmp_path / "source", tmp_path / "out", engine, scheme, keep_misfits=True)  # type: ignore[arg-type]
    conversions.carry_out(request, workers=1)
    path = tmp_path / "out" / "config.json"
    config = json.loads(path.read_text())
    listed = config["quantization_config"][key]
    assert f"{LAYER}.{'mlp' if family == 'gpt-oss' else 'block_sparse_moe'}.{name}" in listed
    assert not [each for each in check(open_checkpoint(tmp_path / "out"), ENGINES[engine]) if each.rule.fatal]
    config["quantization_config"][key] = [each for each in listed if "experts" not in each]
    path.write_text(json.dumps(config))
    found = check(open_checkpoint(tmp_path / "out"), ENGINES[engine])
    assert any("experts` is not ignored" in each.what or ".0.gate_proj` is not" in each.what for each in found)


@of_this_release
@pytest.mark.parametrize("second", [{}, {"ignored_layers": []}, {"ignored_layers": ["of the second"]}])
@pytest.mark.parametrize("first", [{}, {"modules_to_not_convert": []}, {"modules_to_not_convert": ["of the first"]}])
def test_of_two_lists_transformers_takes_the_first_that_is_there_even_if_it_is_empty(
    first: dict[str, Any], second: dict[str, Any]
) -> None:
    theirs = FineGrainedFP8Config(**first, **second).modules_to_not_convert
    assert TRANSFORMERS.methods["fp8"].ignored.entries(first | second) == theirs


def test_what_only_a_list_behind_an_empty_one_names_is_no_value_to_transformers() -> None:
    config, specs = exported(TRANSFORMERS, "block")
    module, quantization = f"{LAYER}.mlp.down_proj", config["quantization_config"]
    specs[f"{module}.weight"] = TensorSpec(specs[f"{module}.weight"].shape, DType.bfloat16)
    del specs[f"{module}.weight_scale_inv"]
    quantization["ignored_layers"] = [*quantization.pop("modules_to_not_convert"), module]
    ones = {name: torch.ones(spec.shape) for name, spec in specs.items()}
    assert TRANSFORMERS.check(config, specs, ones.__getitem__) == []
    quantization["modules_to_not_convert"] = []
    (found,) = (each for each in TRANSFORMERS.check(config, specs, ones.__getitem__) if module in each.where)
    assert found.what == "bfloat16 values, but its module is not ignored" and found.rule.fatal


def test_vllms_list_has_the_linear_that_would_make_values_where_keys_are_the_values(tmp_path: Path) -> None:
    """Gemma 4: vLLM looks for the third part of what it fuses, which is stored nowhere."""
    pico.save(tmp_path / "hf", "gemma4", dtype=torch.bfloat16)
    out, file = tmp_path / "out", tmp_path / "out" / "config.json"
    request = Request.export(tmp_path / "hf", out, "vllm", "dynamic", exclude=("*self_attn*",), keep_misfits=True)  # type: ignore[call-arg]
    conversions.carry_out(request, workers=1)
    assert not [each for each in check(open_checkpoint(out), VLLM) if each.rule.fatal]
    config = json.loads(file.read_text())
    name = "model.layers.2.self_attn.v_proj"
    config["quantization_config"]["ignore"].remove(name)
    file.write_text(json.dumps(config))
    found = [each for each in check(open_checkpoint(out), VLLM) if each.rule.fatal]
    assert [(each.where, f"`{name}` is not ignored" in each.what) for each in found] == [
        ("model.layers.2.self_attn.k_proj.weight", True)
    ]
