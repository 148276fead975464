"""The export for Transformer Engine: transformers' model with FP8 linears, against a slow spelling of the casts."""

import json
from dataclasses import replace
from pathlib import Path

import in_memory
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from scoring import TOKENS, in_fp32, save
from soaking import in_soak
from te_exports import export, make_source
from te_weights import cast as as_bytes, fp8_weights, taken
from torch import nn
from transformers import AutoModelForCausalLM

from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.cli import main
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import execute
from precisionctl.errors import EnvironmentProblem, MissingFp8State, PrecisionError, RecipeError, UnknownFormat
from precisionctl.evaluate import load
from precisionctl.fp8 import sidecar
from precisionctl.fp8.delayed_scaling import after_one_update
from precisionctl.fp8.state import Fp8State, RoleState
from precisionctl.planning.make_plan import make_plan
from precisionctl.precision import PRESETS
from precisionctl.te import load_te
from precisionctl.verify.compare import compare
from precisionctl.verify.not_compared import NotCompared
from precisionctl.verify.te_rules import check_te

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "fc1", "up_proj": "fc1"}

MODULES = {
    "qkv": "self_attention.linear_qkv",
    "o_proj": "self_attention.linear_proj",
    "fc1": "mlp.linear_fc1",
    "down_proj": "mlp.linear_fc2",
}


@pytest.mark.parametrize("hurt", [None, "input", "weight"])
def test_verify_finds_the_state_of_the_source_but_for_weights(tmp_path: Path, hurt: str | None) -> None:
    """Whose scales follow from what is written, here not from what was recorded a step before."""
    source = make_source(tmp_path / "source")
    states = sidecar.read(source / sidecar.RELATIVE)
    modules = {}
    for name, state in states.modules.items():
        before = after_one_update(torch.tensor(7.0), "weight", states.recipe)
        modules[name] = Fp8State({**state.roles, "weight": before})
    sidecar.write(source / sidecar.RELATIVE, replace(states, modules=modules))
    out = export(source, tmp_path / "te")
    if hurt:
        made = sidecar.read(out / sidecar.LIVE)
        name = min(made.modules)
        roles = {**made.modules[name].roles, hurt: after_one_update(torch.tensor(3e-3), hurt, made.recipe)}
        sidecar.write(out / sidecar.LIVE, replace(made, modules={**made.modules, name: Fp8State(roles)}))
    found = compare(open_checkpoint(source), open_checkpoint(out))
    assert len(found.fp8 or ()) == (hurt == "input") and found.equal is (hurt != "input")
    assert NotCompared("scales of weights", f"{len(modules)} weights") in found.not_compared
    rules = check_te(open_checkpoint(out), lambda: make_plan(open_checkpoint(out), "megatron"))
    assert bool(rules) is (hurt == "weight"), "which verify --target te says of those"
    again = compare(open_checkpoint(out), open_checkpoint(export(source, tmp_path / "again")))
    assert again.equal is (hurt is None) and not [n for n in again.not_compared if n.topic == "scales of weights"]


def cast(values: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """TE's cast and back: times 448 / amax, saturated, rounded, and over it again."""
    scale = 448 / amax
    return (values * scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() / scale


def slow(directory: Path) -> nn.Module:
    """transformers' model in FP32, with rounded inputs and weights in each layer, fused groups under one scale."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    states = sidecar.read(directory / sidecar.LIVE)
    for number, layer in enumerate(model.model.layers):
        linears = {name.rpartition(".")[2]: m for name, m in layer.named_modules() if isinstance(m, nn.Linear)}
        assert set(linears) == set(LINEARS)
        for name, linear in linears.items():
            group = [linears[other] for other in LINEARS if FUSED.get(other, other) == FUSED.get(name, name)]
            amax = torch.stack([part.weight.abs().max() for part in group]).max().detach()
            of = MODULES[FUSED.get(name, name)]
            recorded = states.modules[f"decoder.layers.{number}.{of}"].roles["input"].amax_history.max()
            rounded = cast(linear.weight.detach(), amax)
            linear.forward = lambda x, w=rounded, a=recorded: cast(x, a) @ w.t()  # type: ignore[assignment]
    return model


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_source(tmp_path_factory.mktemp("te") / "hf")


@pytest.fixture(scope="module")
def exported(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In FP32, so that only FP8 rounds."""
    out = export(source, tmp_path_factory.mktemp("te") / "out")
    in_fp32(out)
    return out


@torch.no_grad()
def test_logits_are_those_of_a_slow_spelling_and_of_eval(exported: Path) -> None:
    model = load_te(exported, backend="emulated")
    ours, expected = model(TOKENS).logits, slow(exported)(TOKENS).logits
    plain = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)(TOKENS).logits
    rounding = (plain - expected).norm()
    assert rounding > 0.001 * expected.norm()
    assert (ours - expected).norm() < 0.01 * rounding
    evaluated, precision = load(HuggingFaceReader(exported))
    assert precision == "FP8 with delayed scaling, float32 weights"
    assert (evaluated(TOKENS)[..., :250] - expected).norm() < 0.01 * rounding


@torch.no_grad()
@pytest.mark.parametrize("family", ["mixtral", *in_soak("llama-3", "gpt2")])
def test_weights_are_codes_alone_and_compute_every_bit_that_bf16_weights_do(tmp_path: Path, family: str) -> None:
    out, before = export(make_source(tmp_path / "hf", family), tmp_path / "out"), taken()
    model = load_te(out, backend="emulated")
    memory = taken() - before
    plain = load_te(out, weights="bf16", backend="emulated")
    assert torch.equal(model(TOKENS).logits, plain(TOKENS).logits)
    codes, values = fp8_weights(model), fp8_weights(plain)
    assert codes.keys() == values.keys() and codes
    for name, (code, scale) in codes.items():
        assert torch.equal(code.view(torch.uint8), as_bytes(values[name][0], scale)), name
    in_fp8 = sum(value.numel() for value, _ in values.values())
    in_bf16 = sum(parameter.nbytes for parameter in plain.parameters()) - 2 * in_fp8
    assert in_fp8 + in_bf16 <= memory < in_fp8 + in_bf16 + 0.1 * in_fp8


FURTHER = ("mixtral", "qwen3-moe", "gpt2", "phi3", "gemma3", "laguna", "hy-v3", "jamba", "kimi-linear", "exaone")
"""The last five, and Nemotron-H, are stored under other names than their classes have in memory."""


def test_it_generates_one_token_after_another_with_a_cache_and_leaves_its_scales_alone(exported: Path) -> None:
    model = load_te(exported, backend="emulated")
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    before = model(TOKENS).logits
    cached = model.generate(TOKENS[:1, :5], use_cache=True, **settings)
    assert torch.equal(cached, model.generate(TOKENS[:1, :5], use_cache=False, **settings))
    assert cached.shape == (1, 11)
    assert torch.equal(model(TOKENS).logits, before)


@torch.no_grad()
@pytest.mark.parametrize("family", ["deepseek-v3", "nemotron-h", *in_soak(*FURTHER)])
def test_other_families_compute_as_eval_does(tmp_path: Path, family: str) -> None:
    sizes = {"q_lora_rank": 32, "qk_rope_head_dim": 16} if family == "deepseek-v3" else {}
    out = export(make_source(tmp_path / "hf", family, **sizes), tmp_path / "out")
    in_fp32(out)
    ours = load_te(out, backend="emulated")(TOKENS).logits
    evaluated, _ = load(HuggingFaceReader(out))
    plain, _ = load(HuggingFaceReader(out), plain=True)
    expected = evaluated(TOKENS)[..., :250]
    rounding = (plain(TOKENS)[..., :250] - expected).norm()
    assert rounding > 0.001 * expected.norm()
    assert (ours - expected).norm() < 0.02 * rounding


def test_the_directory_is_a_whole_model_in_bf16_with_state_of_every_gemm(source: Path, tmp_path: Path) -> None:
    out = export(source, tmp_path / "out")
    stored, before = load_file(out / "model.safetensors"), load_file(source / "model.safetensors")
    assert stored.keys() == before.keys()
    assert all(torch.equal(stored[name], before[name]) for name in stored)
    assert "quantization_config" not in json.loads((out / "config.json").read_text())
    states = sidecar.read(out / sidecar.LIVE)
    assert states.modules.keys() == make_plan(open_checkpoint(source), "megatron").gemms.keys()
    amax = max(before[f"model.layers.0.self_attn.{name}_proj.weight"].abs().max() for name in "qkv").float()
    weight = states.modules["decoder.layers.0.self_attention.linear_qkv"].roles["weight"]
    assert weight.scale == 448 / amax


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("family", ["llama-3", "mixtral"])
def test_scales_of_weights_are_of_the_weights_that_are_written(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    """The state's are of amaxes half as large again, which are no reason to take them for others' weights. Of FP32
    weights the largest is rounded, up as often as down, as it is written."""
    save(tmp_path / "hf", family, dtype=dtype)
    reader = HuggingFaceReader(tmp_path / "hf")
    states = in_memory.recorded(reader)
    weights = in_memory.to_megatron(reader).tensors
    modules = {}
    for name, state in states.modules.items():
        experts = range(*state.shape) if state.shape else ("",)
        amax = torch.stack([weights[f"{name}.weight{number}"].abs().max().float() for number in experts])
        before = after_one_update(1.5 * amax.reshape(state.shape), "weight", states.recipe)
        modules[name] = Fp8State({**state.roles, "weight": before})
    sidecar.write(tmp_path / "hf" / sidecar.RELATIVE, replace(states, modules=modules))
    out = export(tmp_path / "hf", tmp_path / "out")
    stored = in_memory.to_megatron(HuggingFaceReader(out)).tensors
    for name, state in sidecar.read(out / sidecar.LIVE).modules.items():
        experts = range(*state.shape) if state.shape else ("",)
        amax = torch.stack([stored[f"{name}.weight{number}"].abs().max().float() for number in experts])
        assert torch.equal(state.roles["weight"].scale, torch.full_like(amax, 448).div(amax).reshape(state.shape))
        assert torch.equal(state.roles["weight"].amax_history[..., -1], amax.reshape(state.shape))
    reader = HuggingFaceReader(out)
    assert check_te(reader, lambda: make_plan(reader, "megatron")) == []


def test_megatron_gives_the_same_files_and_takes_them_back(source: Path, tmp_path: Path) -> None:
    out = export(source, tmp_path / "first")
    execute(plan_command(Request(source, tmp_path / "megatron", "megatron")))
    again = export(tmp_path / "megatron", tmp_path / "second")
    assert (out / sidecar.LIVE).read_bytes() == (again / sidecar.LIVE).read_bytes()
    assert (out / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
    execute(plan_command(Request(out, tmp_path / "back", "megatron")))
    ours, theirs = open_checkpoint(tmp_path / "back").fp8, sidecar.read(out / sidecar.LIVE)
    assert ours is not None and ours.modules.keys() == theirs.modules.keys()


def test_what_a_recipe_keeps_in_bf16_stays_a_linear_of_torch(source: Path, tmp_path: Path) -> None:
    recipe = replace(PRESETS["fp8-delayed"], keep_bf16=("decoder.layers.0.*",))
    model = load_te(export(source, tmp_path / "out", recipe=recipe), backend="emulated")
    assert isinstance(model.get_submodule("model.layers.0.mlp.up_proj"), nn.Linear)
    assert not isinstance(model.get_submodule("model.layers.1.mlp.up_proj"), nn.Linear)
    assert isinstance(model.get_submodule("lm_head"), nn.Linear)


def test_state_of_what_transformers_computes_as_a_part_of_something_larger_is_refused(tmp_path: Path) -> None:
    """Sarvam's class has three linears for what is stored, and computed here, as one."""
    source = make_source(tmp_path / "hf", "sarvam-moe")
    with pytest.raises(PrecisionError, match=r"no linear of its own for .*layers\.0\.self_attention\.linear_qkv, "):
        load_te(export(source, tmp_path / "out"), backend="emulated")
    kept = replace(PRESETS["fp8-delayed"], keep_bf16=("*.linear_qkv",))
    load_te(export(source, tmp_path / "kept", recipe=kept), backend="emulated")


def test_an_input_that_was_never_recorded_is_refused(source: Path, tmp_path: Path) -> None:
    save(tmp_path / "hf", dtype=torch.bfloat16)
    with pytest.raises(MissingFp8State, match=r"no FP8 state.*precisionctl calibrate"):
        export(tmp_path / "hf", tmp_path / "out")
    states = sidecar.read(source / sidecar.RELATIVE)
    module = "decoder.layers.1.mlp.linear_fc2"
    roles = {**states.modules[module].roles, "input": RoleState.fresh(4)}
    given = tmp_path / "given.safetensors"
    sidecar.write(given, replace(states, modules={**states.modules, module: Fp8State(roles)}))
    with pytest.raises(MissingFp8State, match=module):
        export(tmp_path / "hf", tmp_path / "out", fp8_state=given)


def test_an_expert_without_tokens_casts_as_the_largest_of_the_others(tmp_path: Path) -> None:
    source = make_source(tmp_path / "hf", "mixtral")
    states = sidecar.read(source / sidecar.RELATIVE)
    module = "decoder.layers.0.mlp.experts.linear_fc1"
    roles = dict(states.modules[module].roles)
    silent = torch.tensor([True, False, False, False])
    fresh = RoleState.fresh(4, (4,))
    roles["input"] = roles["input"].replaced(silent, fresh)
    sidecar.write(source / sidecar.RELATIVE, replace(states, modules={**states.modules, module: Fp8State(roles)}))
    made = sidecar.read(export(source, tmp_path / "out") / sidecar.LIVE).modules[module].roles["input"]
    assert made.scale[0] == made.scale[1:].min()
    assert torch.equal(made.scale[1:], roles["input"].scale[1:])


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"scheme": "dynamic"}, "has no scheme dynamic"),
        ({"kv_cache": "fp8"}, "cannot be given"),
        ({"ranks": 2}, "cannot be given"),
    ],
)
def test_options_for_engines_are_refused(source: Path, tmp_path: Path, settings: dict[str, object], why: str) -> None:
    with pytest.raises(RecipeError, match=why):
        export(source, tmp_path / "out", **settings)


def test_another_directory_is_not_loaded_and_te_is_not_pretended(source: Path, exported: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingFp8State, match="export-inference --target te"):
        load_te(source)
    for path, why in ((tmp_path / "absent", "no such file"), (tmp_path, "no checkpoint")):
        with pytest.raises(UnknownFormat, match=why):
            load_te(path)
    if not torch.cuda.is_available():
        with pytest.raises(EnvironmentProblem, match="no CUDA device"):
            load_te(exported, backend="te")


def test_the_command_says_how_to_load_it(source: Path, tmp_path: Path) -> None:
    words = ["export-inference", str(source), str(tmp_path / "out"), "--target", "te"]
    shown = CliRunner().invoke(main, words)
    assert shown.exit_code == 0, shown.output
    assert f'precisionctl.te.load_te("{tmp_path / "out"}")' in "".join(shown.stdout.split("\n"))
