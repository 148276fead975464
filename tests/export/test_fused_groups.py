"""One scale for what engines compute as one, where Megatron has it as several GEMMs: DeepSeek's latents, MiniMax-M3's
indexer."""

import json
import re
from functools import partial
from pathlib import Path

import conversions
import fp8_directories
import in_memory
import pico
import pytest
import torch
from conversions import carry_out
from safetensors.torch import load_file, save_file
from soaking import in_soak

from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import execute
from precisionctl.engines.base import engines
from precisionctl.fp8 import sidecar
from precisionctl.verify.engine_rules import check

LATENTS = ("q_a_proj", "kv_a_proj_with_mqa")
SIZES = {"q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "kv_lora_rank": 32, "v_head_dim": 32}


def export(source: Path, out: Path, target: str = "vllm", **settings: object) -> list[str]:
    work = carry_out(Request.export(source, out, target, "static", **settings), workers=2)  # type: ignore[arg-type]
    return list(work.notes)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("latents") / "hf"
    pico.save(path, "deepseek-v3", dtype=torch.bfloat16, moe_intermediate_size=64, topk_method="noaux_tc", **SIZES)
    sidecar.write(path / sidecar.RELATIVE, in_memory.recorded(HuggingFaceReader(path)))
    return path


@pytest.fixture(scope="module")
def exported(source: Path) -> Path:
    export(source, source.with_name("out"))
    return source.with_name("out")


def attention(layer: int, name: str) -> str:
    return f"model.layers.{layer}.self_attn.{name}"


def test_both_have_the_scales_of_the_larger(source: Path, exported: Path) -> None:
    stored, states = load_file(exported / "model.safetensors"), sidecar.read(source / sidecar.RELATIVE)
    plain = HuggingFaceReader(source)
    for layer in range(3):
        weights = [read_tensor(plain, f"{attention(layer, name)}.weight").float() for name in LATENTS]
        amax = torch.stack([weight.abs().amax() for weight in weights]).amax()
        modules = [f"decoder.layers.{layer}.self_attention.linear_{name}_down_proj" for name in ("q", "kv")]
        recorded = [states.modules[module].roles["input"].amax_history.amax() for module in modules]
        assert recorded[0] != recorded[1] and weights[0].abs().amax() != weights[1].abs().amax()
        for name, weight in zip(LATENTS, weights, strict=True):
            scale = stored[f"{attention(layer, name)}.weight_scale"]
            assert scale.item() == (amax / 448).item()
            assert stored[f"{attention(layer, name)}.input_scale"].item() == (max(recorded) / 448).item()
            codes = (weight / scale).to(torch.float8_e4m3fn).float()
            assert torch.equal(stored[f"{attention(layer, name)}.weight"].float(), codes)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_no_engine_has_anything_to_rescale(source: Path, tmp_path: Path, engine: str) -> None:
    export(source, tmp_path / "out", engine)
    assert check(HuggingFaceReader(tmp_path / "out"), engines()[engine]) == []


def test_megatron_gives_the_same_bytes(source: Path, exported: Path, tmp_path: Path) -> None:
    execute(plan_command(Request(source, tmp_path / "megatron", "megatron")))
    export(tmp_path / "megatron", tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (exported / "model.safetensors").read_bytes()


def test_codes_under_one_scale_pass_and_under_two_are_made_anew(exported: Path, tmp_path: Path) -> None:
    before = load_file(exported / "model.safetensors")
    notes = export(exported, tmp_path / "again")
    assert any(re.match(r"(\d+) of \1 weights have the same codes", note) for note in notes), notes
    after = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8)) for name in before)
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_bytes((exported / "config.json").read_bytes())
    halved = f"{attention(1, LATENTS[1])}.weight_scale"
    save_file(before | {halved: before[halved] / 2}, other / "model.safetensors", metadata={"format": "pt"})
    export(other, tmp_path / "made")
    made = load_file(tmp_path / "made" / "model.safetensors")
    one, two = (made[f"{attention(1, name)}.weight_scale"].item() for name in LATENTS)
    values = [before[f"{attention(1, name)}.weight"].float() * before[halved] for name in LATENTS]
    assert one == two == pytest.approx(float(max(values[0].abs().max(), values[1].abs().max() / 2)) / 448)


def quotient(numerator: float, denominator: float) -> float:
    """With one rounding."""
    return float(torch.tensor(float(numerator)) / torch.tensor(float(denominator)))


M3 = [f"model.layers.2.self_attn.{name}_proj" for name in ("q", "k", "v", "index_q", "index_k")]


@pytest.mark.parametrize("largest", ["k_proj", *in_soak("indexer.k_proj")])
@pytest.mark.parametrize(
    ("scheme", "kind", "scale"), [("static", "weight_scale", (30, 448)), ("nvfp4", "weight_global_scale", (2688, 30))]
)
def test_an_indexer_shares_the_scale_of_queries_keys_and_values(
    tmp_path: Path, scheme: str, kind: str, scale: tuple[int, int], largest: str
) -> None:
    """Whichever of them has the largest weight, from Hugging Face's tensors and from Megatron's fused one."""
    pico.save(tmp_path / "hf", "minimax-m3", dtype=torch.bfloat16, hidden_size=128, head_dim=32, rotary_dim=16)
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    tensors[f"model.layers.2.self_attn.{largest}.weight"][0, 0] = 30
    save_file(tensors, file, {"format": "pt"})
    sidecar.write(tmp_path / "state", in_memory.recorded(HuggingFaceReader(tmp_path / "hf")))
    conversions.run(tmp_path / "hf", tmp_path / "megatron", "megatron")
    for source in ("hf", "megatron"):
        out = tmp_path / f"{source} out"
        carry_out(Request.export(tmp_path / source, out, "vllm", scheme, fp8_state=tmp_path / "state"), workers=2)
        stored = load_file(out / "model.safetensors")
        scales = {float(stored[f"{name}.{kind}"]) for name in M3}
        assert scales == {quotient(*scale)}
        assert check(HuggingFaceReader(out), engines()["vllm"]) == []
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "hf out" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("changed", ["indexer.k_proj", *in_soak("k_proj")])
def test_an_indexer_shares_their_scale_again_after_one_of_them_has_changed(tmp_path: Path, changed: str) -> None:
    pico.save(tmp_path / "hf", "minimax-m3", dtype=torch.bfloat16, hidden_size=128, head_dim=32, rotary_dim=16)
    carry_out(Request.export(tmp_path / "hf", tmp_path / "out", "vllm", "nvfp4a16"), workers=1)
    conversions.run(tmp_path / "out", tmp_path / "values", "hf", "bf16")
    file = tmp_path / "values" / "model.safetensors"
    tensors = load_file(file)
    tensors[f"model.layers.2.self_attn.{changed}.weight"][0, 0] = 60
    save_file(tensors, file, {"format": "pt"})
    conversions.run(tmp_path / "values", tmp_path / "back", "hf", "fp8", workers=2)
    stored = load_file(tmp_path / "back" / "model.safetensors")
    assert {float(stored[f"{name}.weight_global_scale"]) for name in M3} == {quotient(2688, 60)}
    assert check(HuggingFaceReader(tmp_path / "back"), engines()["vllm"]) == []


@pytest.mark.parametrize("inputs", ["dynamic", "vllm"])
def test_scales_that_differ_in_what_is_fused_are_found_whatever_is_said_of_inputs(tmp_path: Path, inputs: str) -> None:
    fp8_directories.make(tmp_path / "fp8", f"fp8-tensor-{inputs}")
    for engine in ("vllm", "sglang"):
        found = [each.what for each in check(HuggingFaceReader(tmp_path / "fp8"), engines()[engine])]
        assert sum("weight scales" in what and "of one fused group differ" in what for what in found) == 4


def test_vllm_fuses_the_gate_of_olmo_hybrids_delta_net_with_its_query_key_and_value(tmp_path: Path) -> None:
    """vLLM 0.33 models/olmo_hybrid.py, `in_proj_qkvg`; its attention has no such gate."""
    mixer = "model.layers.1.linear_attn"
    pico.save(tmp_path / "hf", "olmo-hybrid", dtype=torch.bfloat16)
    request = partial(Request.export, tmp_path / "hf", target="vllm", scheme="dynamic")
    carry_out(request(tmp_path / "out", exclude=("*.g_proj",)), workers=1)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {stored[f"{mixer}.{part}_proj.weight"].dtype for part in "qkvg"} == {torch.bfloat16}
    assert stored["model.layers.0.self_attn.q_proj.weight"].dtype == torch.float8_e4m3fn
    carry_out(request(tmp_path / "all"), workers=1)
    file = tmp_path / "all" / "model.safetensors"
    stored, name = load_file(file), f"{mixer}.g_proj"
    stored[f"{name}.weight"] = (stored[f"{name}.weight"].float() * stored.pop(f"{name}.weight_scale")).bfloat16()
    save_file(stored, file, metadata={"format": "pt"})
    config = json.loads((tmp_path / "all" / "config.json").read_text())
    config["quantization_config"]["ignore"].append(name)
    (tmp_path / "all" / "config.json").write_text(json.dumps(config))
    (found,) = check(HuggingFaceReader(tmp_path / "all"), engines()["vllm"])
    assert (
        found.where == f"{mixer}.q_proj.weight" and found.rule.fatal and "not all that it is fused with" in found.what
    )
