"""Experts in FP8 through the commands: what a start gives one that saw no token, and what engines get of them."""

import dataclasses
import json
from pathlib import Path

import in_memory
import pico
import pytest
import torch
from safetensors.torch import load_file
from soaking import in_soak
from training import make_source, make_text, run, settings

from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import execute
from precisionctl.dtypes import DType
from precisionctl.engines.base import engines
from precisionctl.errors import MappingError, MissingFp8State, PrecisionError
from precisionctl.fp8 import sidecar
from precisionctl.fp8.carry import carry_state, check_modules, from_other_experts
from precisionctl.fp8.state import DelayedScaling, Fp8State, Fp8States, RoleState
from precisionctl.param import TensorSpec
from precisionctl.planning.make_plan import make_plan
from precisionctl.precision import PRESETS
from precisionctl.verify.engine_rules import check

RECIPE = DelayedScaling(amax_history_len=4)
FC1 = "decoder.layers.1.mlp.experts.linear_fc1"


def test_an_expert_that_saw_no_token_gets_the_largest_amax_of_the_others() -> None:
    history = torch.tensor([[0.0, 0.0, 3.0, 2.0], [0.0] * 4, [0.0, 0.0, 0.0, 7.0]])
    part = RoleState(torch.tensor([448 / 3, 1.0, 64.0]), history)
    made = from_other_experts(part, "input", RECIPE)
    assert made.amax_history.tolist() == [[0, 0, 3, 2], [0, 0, 0, 7], [0, 0, 0, 7]]
    assert made.scale.tolist() == [pytest.approx(448 / 3), 64, 64]
    nothing = RoleState.fresh(4, (3,))
    assert not from_other_experts(nothing, "grad_output", RECIPE).recorded
    alone = RoleState.fresh(4)
    assert not from_other_experts(alone, "input", RECIPE).recorded


def test_a_weight_amax_is_made_anew_for_just_the_expert_whose_is_stale_or_unknown() -> None:
    weights = torch.tensor([2.0, 4.0, 8.0])
    known = RoleState(torch.tensor([224.0, 448.0, 1.0]), torch.tensor([[0, 0, 0, 2.0], [0, 0, 0, 1.0], [0, 0, 0, 0]]))
    state = Fp8State({**Fp8State.fresh(4, (3,)).roles, "weight": known})
    change = carry_state(Fp8States(RECIPE, {FC1: state}), {FC1: weights}, None)
    assert change.stale[FC1].tolist() == [False, True, False]
    assert change.from_weights[FC1].tolist() == [False, False, True]
    made = change.states.modules[FC1].roles["weight"]
    assert made.scale.tolist() == [224, 112, 56]
    assert made.amax_history[:, -1].tolist() == [2, 4, 8]


def test_state_of_another_number_of_experts_is_refused() -> None:
    states = Fp8States(RECIPE, {FC1: Fp8State.fresh(4, (3,))})
    with pytest.raises(MappingError, match="of 3 experts; this model has 4 experts there"):
        check_modules(states, {FC1: (4,)})
    with pytest.raises(MappingError, match="of 3 experts; this model has one module there"):
        carry_state(states, {FC1: torch.tensor(1.0)}, None)


@pytest.mark.soak
def test_a_start_says_how_many_experts_saw_no_token_and_a_run_goes_on_to_the_bit(tmp_path: Path) -> None:
    source = make_source(tmp_path / "hf", family="qwen3-moe", num_experts=32, num_experts_per_tok=1)
    text = make_text(tmp_path / "text.txt")

    def made(out: str, **changes: object) -> object:
        keys = {"train__warmup_passes": 1, "train__micro_batch_size": 4, "train__save_every": 4, **changes}
        return settings(source, text, tmp_path / out, "fp8", schedule__kind="constant", **keys)

    started, _, _ = run(made("whole", train__steps=4))
    silent = started.fp8["from other experts"]
    assert silent["input"] > 0 and silent["grad_output"] >= silent["input"] and "weight" not in silent
    assert any("saw no token" in note for note in started.notes)
    run(made("parts", train__steps=2))
    again, _, _ = run(made("parts", train__steps=4))
    assert set(again.fp8) == {"carried"}
    whole, parts = (open_checkpoint(tmp_path / name) for name in ("whole", "parts"))
    assert whole.fp8 is not None and parts.fp8 is not None
    assert whole.fp8.modules[FC1].shape == (32,)
    for name, state in whole.fp8.modules.items():
        for role, part in state.roles.items():
            assert torch.equal(part.scale, parts.fp8.modules[name].roles[role].scale)
            assert torch.equal(part.amax_history, parts.fp8.modules[name].roles[role].amax_history)
    for name in whole.specs:
        assert torch.equal(read_tensor(whole, name), read_tensor(parts, name)), name


def exported(tmp_path: Path, target: str, scheme: str) -> dict[str, torch.Tensor]:
    out = tmp_path / f"{target}-{scheme}"
    execute(plan_command(Request.export(tmp_path / "hf", out, target, scheme)))  # type: ignore[arg-type]
    return load_file(out / "model.safetensors")


def source(tmp_path: Path, family: str, **changes: float) -> HuggingFaceReader:
    sizes = {"q_lora_rank": 32, "qk_rope_head_dim": 16} if family == "deepseek-v3" else {}
    pico.save(tmp_path / "hf", family, dtype=torch.bfloat16, **sizes, **changes)
    reader = HuggingFaceReader(tmp_path / "hf")
    sidecar.write(tmp_path / "hf" / sidecar.RELATIVE, in_memory.recorded(reader))
    return reader


PARTS = {"mixtral": ("block_sparse_moe", "w1", "w3", "w2"), "qwen3-moe": ("mlp", "gate_proj", "up_proj", "down_proj")}
PARTS["deepseek-v3"] = PARTS["qwen3-moe"]


@pytest.mark.parametrize(
    ("family", "target"),
    # each spelling of experts and each method once: a scale does not depend on both
    [
        *(("mixtral", "tensorrt-llm"), ("qwen3-moe", "vllm"), ("deepseek-v3", "tensorrt-llm")),
        *in_soak(("mixtral", "vllm"), ("qwen3-moe", "tensorrt-llm"), ("deepseek-v3", "vllm")),
    ],
)
def test_experts_have_weight_scales_of_their_own_and_one_input_scale(tmp_path: Path, family: str, target: str) -> None:
    reader = source(tmp_path, family)
    states = in_memory.recorded(reader)
    stored = exported(tmp_path, target, "static")
    module, gate, up, down = PARTS[family]
    assert reader.model.moe is not None
    for expert in range(reader.model.moe.num_experts):
        at = f"model.layers.1.{module}.experts.{expert}"
        for linear, names in (("linear_fc1", (gate, up)), ("linear_fc2", (down,))):
            weights = [read_tensor(reader, f"{at}.{name}.weight").float() for name in names]
            recorded = states.modules[f"decoder.layers.1.mlp.experts.{linear}"].roles["input"].amax_history.max()
            for name, weight in zip(names, weights, strict=True):
                scale = stored[f"{at}.{name}.weight_scale"]
                assert scale == max(each.abs().max() for each in weights) / 448
                codes = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
                assert torch.equal(stored[f"{at}.{name}.weight"].view(torch.uint8), codes.view(torch.uint8))
                assert stored[f"{at}.{name}.input_scale"] == recorded / 448
    assert stored[f"model.layers.1.{module}.gate.weight"].dtype == torch.bfloat16
    config = json.loads((tmp_path / f"{target}-static" / "config.json").read_text())
    ignored = config["quantization_config"]["ignore"]
    assert f"model.layers.1.{module}.gate" in ignored and not any(".experts." in name for name in ignored)
    specs = {name: TensorSpec(tuple(values.shape), DType.of(values.dtype)) for name, values in stored.items()}

    def findings() -> set[str]:
        """But for DeepSeek's two latent projections, which Megatron has as two GEMMs, each with scales of its own."""
        found = engines()[target].check(config, specs, stored.__getitem__)
        return {finding.what for finding in found if not finding.where.endswith("q_a_proj.weight")}

    assert not findings()
    other = f"model.layers.1.{module}.experts.1"
    for name in (gate, up):
        stored[f"{other}.{name}.input_scale"] *= 2
    (finding,) = findings()
    assert "input scales of experts differ" in finding


def with_experts(tmp_path: Path, recorded: list[bool]) -> None:
    states = sidecar.read(tmp_path / "hf" / sidecar.RELATIVE)
    state = states.modules[FC1]
    fresh = RoleState.fresh(4, state.shape)
    part = fresh.replaced(torch.tensor(recorded), state.roles["input"])
    modules = {**states.modules, FC1: Fp8State({**state.roles, "input": part})}
    sidecar.write(tmp_path / "hf" / sidecar.RELATIVE, dataclasses.replace(states, modules=modules))


def test_an_expert_that_saw_no_token_has_the_input_scale_of_the_others(tmp_path: Path) -> None:
    states = in_memory.recorded(source(tmp_path, "mixtral"))
    with_experts(tmp_path, [False, True, False, True])
    stored = exported(tmp_path, "vllm", "static")
    largest = states.modules[FC1].roles["input"].amax_history[[1, 3]].max() / 448
    assert {float(stored[f"model.layers.1.block_sparse_moe.experts.{e}.w1.input_scale"]) for e in range(4)} == {
        float(largest)
    }


def test_a_layer_none_of_whose_experts_saw_a_token_is_refused_by_name(tmp_path: Path) -> None:
    source(tmp_path, "mixtral")
    with_experts(tmp_path, [False] * 4)
    with pytest.raises(MissingFp8State, match=FC1):
        exported(tmp_path, "vllm", "static")


def test_scales_for_channels_of_experts_are_refused_for_tensorrt_llm_and_not_those_kept_in_bf16(tmp_path: Path) -> None:
    source(tmp_path, "mixtral")
    with pytest.raises(PrecisionError, match="TensorRT-LLM does not load experts of modelopt with dynamic.*--exclude"):
        exported(tmp_path, "tensorrt-llm", "dynamic")
    kept = dataclasses.replace(PRESETS["fp8-delayed"], keep_bf16=("decoder.layers.*.mlp.experts.*",))
    plan_command(Request.export(tmp_path / "hf", tmp_path / "out", "tensorrt-llm", "dynamic", recipe=kept))


def test_experts_in_one_tensor_stay_in_bf16_and_that_is_said(tmp_path: Path) -> None:
    source(tmp_path, "gpt-oss", swiglu_limit=7.0)  # vLLM knows no other
    work = plan_command(Request.export(tmp_path / "hf", tmp_path / "out", "vllm", "static"))
    assert any("Experts stay in BF16: gpt_oss" in note and "in scheme static" in note for note in work.notes)
    execute(work)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored["model.layers.0.mlp.experts.gate_up_proj"].dtype == torch.bfloat16
    assert stored["model.layers.0.self_attn.q_proj.weight"].dtype == torch.float8_e4m3fn
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    listed = config["quantization_config"]["ignore"]
    assert "model.layers.0.mlp.experts" in listed
    vllm = engines()["vllm"]
    assert check(open_checkpoint(tmp_path / "out"), vllm) == []
    # vLLM 0.33 knows what it ignores of gpt-oss by expressions alone: it renames `.down_proj` in the list (tests/peers)
    config["quantization_config"]["ignore"] = [entry for entry in listed if not entry.startswith("re:")]
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    found = check(open_checkpoint(tmp_path / "out"), vllm)
    assert "no expression ignores `model.layers.0.mlp.experts.0.down_proj`" in found[0].what and found[0].rule.fatal
    config["quantization_config"]["ignore"] = 5  # no list, by a stranger
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    assert any("no expression" in each.what for each in check(open_checkpoint(tmp_path / "out"), vllm))


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "gpt-oss", "deepseek-v3"])
def test_a_module_of_experts_is_named_once_and_routers_are_none(tmp_path: Path, family: str) -> None:
    pico.save(tmp_path, family)
    plan = make_plan(HuggingFaceReader(tmp_path), "megatron")
    assert plan.model.moe is not None
    of_experts = {name: shape for name, shape in plan.gemms.items() if ".mlp.experts." in name}
    layers = [layer for layer in range(plan.model.num_layers) if plan.model.has_experts(layer)]
    assert of_experts == {
        f"decoder.layers.{layer}.mlp.experts.linear_fc{number}": (plan.model.moe.num_experts,)
        for layer in layers
        for number in (1, 2)
    }
    assert not any("router" in name for name in plan.gemms)
