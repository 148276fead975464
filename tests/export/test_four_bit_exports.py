"""Exports in four bits: what is written is what a slow reference makes of it, engines' rules hold, and transformers
computes with it."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import conversions
import in_memory
import numpy as np
import pico
import pytest
import torch
from installed import need_loader
from safetensors.torch import load_file, save_file
from soaking import first, in_soak
from torch import Tensor
from transformers import AutoModelForCausalLM

from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.engines.base import engine_named, engines
from precisionctl.errors import MissingFp8State, PrecisionError
from precisionctl.fp8 import sidecar
from precisionctl.fp8.delayed_scaling import after_one_update
from precisionctl.quant_methods.base import FOUR_BITS
from precisionctl.verify.engine_rules import check

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128, "head_dim": 32}
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0], np.float32)
INT4 = np.arange(-8, 8, dtype=np.float32)
UP, EXPERT = "model.layers.0.mlp.up_proj", "model.layers.1.mlp.experts.1.gate_proj"
SPELLED = {
    (method, scheme): [other for other in engines().values() if other.spells.get(scheme) == method]
    for engine in engines().values()
    for scheme, method in engine.spells.items()
    if scheme in FOUR_BITS
}
"""Engines by method and scheme."""
GROUPS = {"nvfp4": 16, "nvfp4a16": 16, "mxfp4": 32, "w4a16": 128}


def saved(root: Path, family: str = "llama-3", **sizes: Any) -> Path:
    """A model with recorded state, none of whose weights is too regular."""
    pico.save(root, family, dtype=torch.bfloat16, **SIZES | sizes)
    sidecar.write(root / sidecar.RELATIVE, in_memory.recorded(HuggingFaceReader(root)))
    return root


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    root = tmp_path_factory.mktemp("sources")
    return {family: saved(root / family, family) for family in ("llama-3", "qwen3-moe")}


def export(source: Path, out: Path, target: str, scheme: str, **more: Any) -> list[str]:
    request = Request.export(source, out, target, scheme, **more)  # type: ignore[arg-type]
    return list(conversions.carry_out(request, verify=True, workers=1).notes)


def stored(directory: Path, module: str) -> dict[str, Tensor]:
    """A module's tensors, by the ends of their names."""
    tensors = load_file(directory / "model.safetensors")
    return {name.removeprefix(f"{module}."): t for name, t in tensors.items() if name.startswith(f"{module}.")}


def slowly(found: Mapping[str, Tensor], scheme: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers of the codes `[out, in]`, what each is multiplied by, and the values in FP32."""
    words = found["weight_packed"] if "weight_packed" in found else found["weight"]
    octets = words.view(torch.uint8).numpy()
    codes = np.empty((len(octets), 2 * octets.shape[1]), np.int64)
    codes[:, 0::2], codes[:, 1::2] = octets & 15, octets >> 4
    numbers = (INT4 if scheme == "w4a16" else E2M1)[codes]
    scale = found["weight_scale"]
    grid = np.float32(2.0) ** (scale.numpy().astype(np.float32) - 127) if scheme == "mxfp4" else scale.float().numpy()
    if "weight_global_scale" in found:
        grid = grid / found["weight_global_scale"].numpy()
    if "weight_scale_2" in found:
        grid = grid * found["weight_scale_2"].numpy()
    by_value = np.repeat(grid, GROUPS[scheme], axis=1)
    return numbers, by_value, (numbers * by_value).astype(np.float32)


@pytest.mark.parametrize(("method", "scheme"), first(2, SPELLED))
def test_codes_are_the_nearest_under_their_scales_and_scales_are_of_their_groups(
    tmp_path: Path, sources: Mapping[str, Path], method: str, scheme: str
) -> None:
    """Of attention and experts; and rules of engines find nothing, but that transformers has no experts in NVFP4."""
    source, engine = sources["qwen3-moe"], SPELLED[method, scheme][-1]
    export(source, tmp_path / "out", engine.name, scheme)
    reader = open_checkpoint(tmp_path / "out")
    for engine in SPELLED[method, scheme]:
        found = [finding.what for finding in check(reader, engine)]
        refused = engine.name == "transformers" and scheme.startswith("nvfp4")
        assert all("experts of" in what for what in found) and len(found) == refused
    before = load_file(source / "model.safetensors")
    for module in ("model.layers.0.self_attn.k_proj", EXPERT):
        found = stored(tmp_path / "out", module)
        numbers, scales, decoded = slowly(found, scheme)
        values = before[f"{module}.weight"].float().numpy()
        table = np.sort(INT4 if scheme == "w4a16" else E2M1[:8])
        table = table if scheme == "w4a16" else np.concatenate([-table[::-1], table])
        nearest = np.abs(values[..., None] / scales[..., None] - table).min(-1)
        assert (np.abs(values / scales - numbers) <= nearest + 1e-6).all()
        groups = values.reshape(len(values), -1, GROUPS[scheme])
        amax = np.abs(groups).max(-1)
        ratio = amax / scales[:, :: GROUPS[scheme]]
        if scheme == "mxfp4":
            assert ((ratio >= 3.5) & (ratio < 7)).all()
        else:
            parts = (1.0, 0.9, 0.8) if scheme == "w4a16" else (1.0, 1.5)
            wanted = np.stack([(7.5 / part if scheme == "w4a16" else 6 / part) / ratio for part in parts])
            # one of the candidates, as E4M3 and BF16 round it, and as E4M3 ends
            assert ((np.abs(wanted - 1).min(0) < 0.07) | (found["weight_scale"].float().numpy() == 448)).all()
            assert len(np.unique(np.abs(wanted - 1).argmin(0))) == len(parts)  # each of them somewhere
            by_amax = nearest_error(
                values, np.repeat(amax / (7.5 if scheme == "w4a16" else 6), GROUPS[scheme], 1), table
            )
            assert ((values - decoded) ** 2).sum() < 0.97 * by_amax
    again = conversions.tensors(in_bf16(tmp_path / "out", tmp_path / "bf16"))
    assert torch.equal(again[f"{module}.weight"].float(), torch.from_numpy(decoded).bfloat16().float())


def nearest_error(values: np.ndarray, scales: np.ndarray, table: np.ndarray) -> float:
    """The squared error of the nearest numbers of a table, under these scales."""
    off = np.abs(values[..., None] / scales[..., None] - table).min(-1) * scales
    return float((off**2).sum())


def in_bf16(source: Path, out: Path) -> Path:
    conversions.run(source, out, "hf", workers=1)
    return out


@pytest.mark.parametrize("target", ["vllm", "tensorrt-llm"])
def test_linears_of_one_input_have_one_global_scale_each_of_weights_and_inputs(tmp_path: Path, target: str) -> None:
    """Of an expert its gate and up; inputs of all experts of a layer have one. The first expert saw no token."""
    source = tmp_path / "source"
    pico.save(source, "qwen3-moe", dtype=torch.bfloat16, **SIZES)
    states = in_memory.recorded(HuggingFaceReader(source))
    for name, state in states.modules.items():
        if "experts" in name:
            amaxes = torch.arange(state.shape[0]).float()  # expert 0 saw none
            roles = {**state.roles, "input": after_one_update(amaxes, "input", states.recipe)}
            states.modules[name] = type(state)(roles)  # type: ignore[index]
    sidecar.write(tmp_path / "state", states)
    notes = export(source, tmp_path / "out", target, "nvfp4", fp8_state=tmp_path / "state")
    unreached = sum("experts" in name for name in states.modules)
    assert any(note.startswith(f"{unreached} inputs of experts saw no token") for note in notes)
    before, after = (load_file(path / "model.safetensors") for path in (source, tmp_path / "out"))
    kinds = (
        ("weight_scale_2", "input_scale") if target == "tensorrt-llm" else ("weight_global_scale", "input_global_scale")
    )

    def amax(name: str, kind: str) -> float:
        whole = float(after[f"{name}.{kind}"])
        return 2688 * whole if target == "tensorrt-llm" else 2688 / whole

    for stem, parts in (("self_attn", "qkv"), ("mlp.experts.0", ("gate", "up")), ("mlp.experts.1", ("gate", "up"))):
        modules = [f"model.layers.1.{stem}.{part}_proj" for part in parts]
        largest = max(float(before[f"{name}.weight"].abs().max()) for name in modules)
        for name in modules:
            assert amax(name, kinds[0]) == pytest.approx(largest, rel=1e-6)
    (experts,) = states.modules["decoder.layers.1.mlp.experts.linear_fc1"].shape
    for expert in range(experts):
        assert amax(f"model.layers.1.mlp.experts.{expert}.down_proj", kinds[1]) == pytest.approx(experts - 1)


def test_global_scales_that_differ_among_fused_linears_are_found(tmp_path: Path, sources: Mapping[str, Path]) -> None:
    export(sources["llama-3"], tmp_path / "out", "vllm", "nvfp4a16")
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    tensors[f"{UP}.weight_global_scale"] *= 2
    save_file(tensors, file)
    (finding,) = check(open_checkpoint(tmp_path / "out"), engines()["vllm"])
    assert "global weight scales" in finding.what and finding.rule.fatal


def test_codes_of_a_source_are_copied_and_global_scales_that_differ_become_one(
    tmp_path: Path, sources: Mapping[str, Path]
) -> None:
    export(sources["llama-3"], tmp_path / "once", "vllm", "nvfp4a16")
    export(tmp_path / "once", tmp_path / "twice", "vllm", "nvfp4a16")
    notes = plan_command(Request.export(tmp_path / "once", tmp_path / "fp8", "vllm")).notes
    assert any(note.startswith("Scheme dynamic") and note.endswith("if you ask: --scheme nvfp4a16.") for note in notes)
    once, twice = (load_file(tmp_path / each / "model.safetensors") for each in ("once", "twice"))
    assert all(torch.equal(t.view(torch.uint8), twice[name].view(torch.uint8)) for name, t in once.items())
    once[f"{UP}.weight_global_scale"] *= 2  # values are half of what they were
    save_file(once, tmp_path / "once" / "model.safetensors")
    export(tmp_path / "once", tmp_path / "apart", "vllm", "nvfp4a16")
    apart, gate = (stored(tmp_path / "apart", UP.replace("up", part)) for part in ("up", "gate"))
    assert torch.equal(apart["weight_global_scale"], gate["weight_global_scale"])
    values = [slowly(each, "nvfp4a16")[2] for each in (stored(tmp_path / "once", UP), apart)]
    assert np.abs(values[0] - values[1]).max() <= 0.2 * np.abs(values[0]).max()


def test_what_cannot_be_is_refused_with_the_next_step(tmp_path: Path, sources: Mapping[str, Path]) -> None:
    pico.save(tmp_path / "plain", "llama-3", dtype=torch.bfloat16)  # inputs of 64 and 96
    with pytest.raises(MissingFp8State, match="calibrate.*nvfp4a16"):
        export(tmp_path / "plain", tmp_path / "out", "vllm", "nvfp4")
    with pytest.raises(PrecisionError, match="not a multiple of 128"):
        export(tmp_path / "plain", tmp_path / "out", "vllm", "w4a16")
    with pytest.raises(PrecisionError, match="TensorRT-LLM does not read mxfp4"):
        export(sources["llama-3"], tmp_path / "out", "tensorrt-llm", "mxfp4")
    with pytest.raises(PrecisionError, match="whose inputs are not a multiple of 128"):
        export(sources["llama-3"], tmp_path / "out", "vllm", "w4a16", ranks=2)
    export(sources["llama-3"], tmp_path / "uncut", "vllm", "w4a16")
    uncut = open_checkpoint(tmp_path / "uncut")
    assert check(uncut, engine_named("vllm")) == []
    assert {finding.rule for finding in check(uncut, engine_named("vllm"), 2)} == {engine_named("vllm").shapes.blocks}
    pico.save(tmp_path / "part", "llama-3", dtype=torch.bfloat16, hidden_size=128)  # o_proj and down_proj misfit
    export(tmp_path / "part", tmp_path / "out", "vllm", "w4a16", keep_misfits=True)
    assert stored(tmp_path / "out", UP)["weight_packed"].dtype == torch.int32
    assert stored(tmp_path / "out", UP.replace("up", "down"))["weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("scheme", ["nvfp4", "w4a16", *in_soak("nvfp4a16", "mxfp4")])
def test_transformers_decodes_to_the_same_values(tmp_path: Path, sources: Mapping[str, Path], scheme: str) -> None:
    export(sources["llama-3"], tmp_path / "out", "transformers", scheme)
    need_loader(tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    with torch.no_grad():
        logits = theirs(torch.arange(1, 30)[None]).logits
    assert bool(logits.isfinite().all()) and float(logits.abs().max()) > 0
    ours = conversions.tensors(in_bf16(tmp_path / "out", tmp_path / "bf16"))
    found = {name: p for name, p in theirs.named_parameters() if name.endswith("_proj.weight")}
    assert len(found) == 14
    for name, values in found.items():
        assert torch.equal(values, ours[name]), name
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert said["config_groups"]["group_0"]["format"] == said["format"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"What is {FOUR_BITS[scheme]}" in card and "FP8 codes" not in card


TOGETHER = ("gpt-oss", "granite-moe", "granite-moe-shared", "granite-moe-swa", "granite-hybrid", "llama4", "muse-spark")
IN_BLOCKS_ALONE = ("deepseek-v4",)
ONE_BY_ONE = [
    family for family in pico.FAMILIES if pico.shape(family).moe and family not in (*TOGETHER, *IN_BLOCKS_ALONE)
]
"""Families whose experts have tensors of their own; those in one tensor stay values. Of DeepSeek-V4 vLLM loads no codes
but blocks of FP8."""
BRIEFLY = {("deepseek-v3", "w4a16")}


@pytest.mark.parametrize(
    ("family", "scheme"),
    [
        pytest.param(family, scheme, marks=[] if (family, scheme) in BRIEFLY else [pytest.mark.soak])
        for family in ONE_BY_ONE
        for scheme in ("nvfp4a16", "mxfp4", "w4a16")
    ],
)
def test_codes_of_experts_go_to_megatron_and_come_back_the_same(tmp_path: Path, family: str, scheme: str) -> None:
    """Whatever layout a family gives them there."""
    sizes = {name: size for name, size in SIZES.items() if name != "head_dim"}
    if pico.shape(family).has("moe.latent_size"):
        sizes |= dict.fromkeys(("moe_latent_size", "routed_expert_hidden_size"), 128)
    pico.save(tmp_path / "hf", family, dtype=torch.bfloat16, **sizes)
    export(tmp_path / "hf", tmp_path / "codes", "vllm", scheme, keep_misfits=True)
    conversions.run(tmp_path / "codes", tmp_path / "megatron", "megatron", workers=1)
    conversions.run(tmp_path / "megatron", tmp_path / "back", "hf", precision="fp8", workers=1)
    codes, back = (load_file(tmp_path / each / "model.safetensors") for each in ("codes", "back"))
    assert sum(".experts." in name and name.endswith("weight_packed") for name in codes) >= 6
    assert codes.keys() == back.keys()
    for name, expected in codes.items():
        assert torch.equal(expected.view(torch.uint8), back[name].view(torch.uint8)), name


def test_the_commands_that_measure_what_rounding_costs_name_the_iteration_that_is_read(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    conversions.run(tmp_path / "hf", tmp_path / "run", "megatron")
    one = (tmp_path / "run" / "release").rename(tmp_path / "run" / "iter_0000001")
    shutil.copytree(one, tmp_path / "run" / "iter_0000012")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("12")
    for iteration, read in ((1, one), (None, tmp_path / "run")):
        request = Request.export(tmp_path / "run", tmp_path / "out", "vllm", "nvfp4a16", iteration=iteration)
        (note,) = [note for note in plan_command(request).notes if "are rounded to" in note]
        assert f"inspect {read} --fp8`" in note and f"--against {read}`" in note
