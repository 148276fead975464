"""Exports in blocks of 128 x 128, and what an export makes of weights that are FP8 codes already."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import fp8_directories
import in_memory
import pico
import pytest
import torch
from command_line import run
from conversions import carry_out
from installed import need_loader
from safetensors.torch import load_file, save_file
from soaking import first
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.checkpoints.module import LiveModel
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion import recoding
from precisionctl.conversion.command import execute
from precisionctl.conversion.convert import convert
from precisionctl.dtypes import DType
from precisionctl.engines.base import engine_named
from precisionctl.errors import PrecisionError, RecipeError
from precisionctl.evaluate import load
from precisionctl.evaluate.quantizers import GroupInputs
from precisionctl.fp8 import sidecar
from precisionctl.param import TensorSpec
from precisionctl.planning.make_plan import make_plan
from precisionctl.precision import Precision
from precisionctl.quant_methods.scales import Scales
from precisionctl.trainer.model.gpt import GPT
from precisionctl.verify.compare import compare
from precisionctl.verify.engine_rules import check

WHOLE = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
"""A Llama of which every linear is whole blocks."""
MLA = {"q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 128, "v_head_dim": 64}
SIZES = {
    "llama-3": WHOLE,
    "qwen3": WHOLE,
    "qwen3-moe": {**WHOLE, "moe_intermediate_size": 128},
    "mixtral": WHOLE,
    "deepseek-v3": {"hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 128, **MLA},
}
TOKENS = torch.randint(1, 250, (2, 32), generator=torch.Generator().manual_seed(0))
ENGINES = ("vllm", "sglang", "tensorrt-llm", "transformers")


def export(source: Path, out: Path, target: str = "vllm", scheme: str | None = "block", **more: object) -> list[str]:
    work = carry_out(Request.export(source, out, target, scheme, **more), workers=1, verify=True)  # type: ignore[arg-type]
    return list(work.notes)


def check_with_every_engine(exported: Path) -> None:
    """What is exported for vLLM has no findings there; in others, none but keys that they look for in config.json."""
    found = {engine: check(open_checkpoint(exported), engine_named(engine)) for engine in ENGINES}
    assert found["vllm"] == []
    others = {(finding.where, finding.what.partition(" ")[0]) for findings in found.values() for finding in findings}
    assert others <= {("config.json", "no")}


BLOCKS: dict[str, object] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def stored(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def quantization(directory: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((directory / "config.json").read_text())["quantization_config"]
    return found


def slow_scales(weight: torch.Tensor) -> torch.Tensor:
    """Of each block the largest magnitude over 448, one after the other."""
    rows, columns = weight.shape
    grid = torch.empty(-(-rows // 128), -(-columns // 128))
    for i in range(len(grid)):
        for j in range(grid.shape[1]):
            grid[i, j] = weight[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)].abs().max().float() / 448
    return grid


@pytest.mark.parametrize("family", first(2, SIZES))
def test_each_block_is_divided_by_its_largest_magnitude_over_448(tmp_path: Path, family: str) -> None:
    pico.save(tmp_path / "hf", family, dtype=torch.bfloat16, **SIZES[family])
    export(tmp_path / "hf", tmp_path / "out")
    plain, made = stored(tmp_path / "hf"), stored(tmp_path / "out")
    codes = [name for name, values in made.items() if values.dtype == torch.float8_e4m3fn]
    assert len(codes) >= 14
    for name in codes:
        grid = made[f"{name}_scale_inv"]
        assert torch.equal(grid, slow_scales(plain[name])) and grid.dtype == torch.float32
        scale = grid.repeat_interleave(128, 0)[: len(plain[name])].repeat_interleave(128, 1)[:, : plain[name].shape[1]]
        assert torch.equal(made[name].float(), (plain[name].float() / scale).to(torch.float8_e4m3fn).float())
    config = quantization(tmp_path / "out")
    ignored = config.pop("modules_to_not_convert")
    assert config == {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
    }
    linears = {name.removesuffix(".weight") for name, values in plain.items() if values.dim() == 2}
    named = set(ignored) | {name.removesuffix(".weight") for name in codes}  # type: ignore[call-overload]
    renamed = {name for name in named if re.search(r"mlp\.(gate|router)$", name)}  # as transformers has it in memory
    assert named - (renamed if family == "mixtral" else set()) == linears
    check_with_every_engine(tmp_path / "out")
    assert compare(open_checkpoint(tmp_path / "hf"), open_checkpoint(tmp_path / "out")).equal


def test_codes_and_scales_are_those_of_transformers_own_quantizer(tmp_path: Path) -> None:
    """It multiplies by 448 / amax, which rounds another time: scales to one FP32 rounding, codes but for near ties."""
    pico.save(tmp_path / "hf", dtype=torch.bfloat16, **WHOLE)
    export(tmp_path / "hf", tmp_path / "out")

    class Quantizer:
        quantization_config = FineGrainedFP8Config()

    made, total, other = stored(tmp_path / "out"), 0, 0
    for name, weight in stored(tmp_path / "hf").items():
        if made[name].dtype != torch.float8_e4m3fn:
            continue
        theirs = Fp8Quantize(Quantizer()).convert({name: weight})
        scale = theirs[f"{name}_scale_inv"]
        assert torch.allclose(made[f"{name}_scale_inv"], scale, rtol=3e-7, atol=0)
        total += weight.numel()
        apart = (theirs[name].view(torch.uint8).int() - made[name].view(torch.uint8).int()).abs()
        assert apart.max() <= 1
        other += int(apart.sum())
    assert total > 500_000 and other < total / 500


def in_fp32(directory: Path) -> None:
    """Everything that is not FP8, so that nothing else rounds."""
    tensors = {name: t.float() if t.dtype == torch.bfloat16 else t for name, t in stored(directory).items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))


@pytest.mark.parametrize("family", first(2, SIZES))
def test_transformers_loads_blocks_and_its_logits_are_those_of_our_own_decoding(tmp_path: Path, family: str) -> None:
    pico.save(tmp_path / "hf", family, dtype=torch.bfloat16, **SIZES[family])
    export(tmp_path / "hf", tmp_path / "out", "transformers")
    need_loader(tmp_path / "out")
    in_fp32(tmp_path / "out")
    reader = HuggingFaceReader(tmp_path / "out")
    plan = make_plan(reader, "megatron", dtype=DType.float32)
    ours = GPT(plan.model, Precision(fp8=False), "emulated", torch.float32)
    convert(plan, reader, LiveModel(plan.model, dict(ours.named_parameters())))
    theirs = fp8_directories.decoded_by_transformers(tmp_path / "out", FineGrainedFP8Config(dequantize=True))
    with torch.no_grad():
        expected = theirs(TOKENS).logits
        assert (ours(TOKENS)[..., :250] - expected).abs().max() < 1e-4 * expected.abs().max()


def respelled(directory: Path) -> None:
    """The same codes as llm-compressor spells blocks, which transformers computes with on a CPU."""
    tensors = {name.replace("weight_scale_inv", "weight_scale"): t for name, t in stored(directory).items()}
    config = json.loads((directory / "config.json").read_text())
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**fp8, "strategy": "block", "block_structure": [128, 128], "dynamic": False},
        "input_activations": {**fp8, "strategy": "group", "group_size": 128, "dynamic": True},
    }
    quantization_config = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": config["quantization_config"]["modules_to_not_convert"],
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": quantization_config}))
    assert check(open_checkpoint(directory), engine_named("vllm")) == []


def test_evaluation_is_what_compressed_tensors_simulates_of_groups(tmp_path: Path) -> None:
    """transformers rounds the inputs of linears by groups of a token."""
    pico.save(tmp_path / "hf", dtype=torch.bfloat16, **WHOLE)
    export(tmp_path / "hf", tmp_path / "out", "transformers")
    in_fp32(tmp_path / "out")
    respelled(tmp_path / "out")
    need_loader(tmp_path / "out")
    model, precision = load(HuggingFaceReader(tmp_path / "out"))
    assert precision == "FP8 codes with dynamic per-128 input scales"
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    plain = fp8_directories.decoded_by_transformers(tmp_path / "out", CompressedTensorsConfig(dequantize=True))
    with torch.no_grad():
        ours, expected = model(TOKENS)[..., :250], theirs(TOKENS).logits
        rounding = (plain(TOKENS).logits - expected).norm()
    assert rounding > 0.001 * expected.norm()
    assert (ours - expected).norm() < 0.01 * rounding


def test_a_group_of_inputs_has_the_scale_of_its_largest_and_a_short_last_one_its_own() -> None:
    values = torch.tensor([[448.0, 1.0, 3.5, -0.5, 0.25]])
    quantized = GroupInputs(2).quantize(values).rows
    assert quantized.codes.tolist() == [[448.0, 1.0, 3.5, -0.5, 0.25]]
    one = GroupInputs(4).quantize(torch.tensor([[448.0, 0.0005, 0.0, 0.0, 0.0005]])).rows
    assert one.codes[0, 1] == 0 and one.codes[0, 4].item() == pytest.approx(0.0005, rel=1e-6)
    assert GroupInputs(4).quantize(torch.zeros(1, 4)).rows.codes.tolist() == [[0.0] * 4]


def test_inputs_of_mxfp8_are_rounded_by_32_under_powers_of_two(tmp_path: Path) -> None:
    """A linear alone, in float64 from the bytes on the disk."""
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    export(tmp_path / "hf", tmp_path / "out", "vllm", "mxfp8")
    model, precision = load(HuggingFaceReader(tmp_path / "out"))
    assert precision == "FP8 codes with dynamic per-32 input scales"
    made, name = stored(tmp_path / "out"), "model.layers.0.self_attn.o_proj.weight"
    weight = made[name].double().view(64, 2, 32) * (made[f"{name}_scale"].double() - 127).exp2()[..., None]
    values = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    groups = values.double().view(16, 2, 32)
    scale = (groups.abs().amax(2, keepdim=True) / 448).log2().ceil().exp2()
    inputs = (groups / scale).float().to(torch.float8_e4m3fn).double() * scale
    expected = inputs.view(16, 64) @ weight.view(64, 64).t()
    with torch.no_grad():
        found = model.decoder.layers[0].self_attention.linear_proj(values)
    assert torch.equal(found.double(), expected.bfloat16().double())


def test_shapes_that_an_engine_refuses_are_found_before_anything_is_read(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16, **{**WHOLE, "intermediate_size": 320})
    with pytest.raises(PrecisionError, match=r"4 weights.*gate_proj.*320, 256.*static or dynamic.*--keep-misfits"):
        export(tmp_path / "hf", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    export(tmp_path / "hf", tmp_path / "channels", scheme="dynamic")
    notes = export(tmp_path / "hf", tmp_path / "out", keep_misfits=True)
    made = stored(tmp_path / "out")
    kept = {name for name, values in made.items() if ".mlp." in name and values.dtype == torch.bfloat16}
    assert len(kept) == 6 and any(
        "for their shapes, or for those of what is computed with them: 6." in n for n in notes
    )
    assert made["model.layers.0.self_attn.k_proj.weight"].dtype == torch.float8_e4m3fn
    assert {name.removesuffix(".weight") for name in kept} <= set(
        quantization(tmp_path / "out")["modules_to_not_convert"]  # type: ignore[call-overload]
    )
    check_with_every_engine(tmp_path / "out")


def test_shapes_are_those_of_one_gpu(tmp_path: Path) -> None:
    """384 inner rows are three blocks, which two GPUs would cut in the second."""
    pico.save(tmp_path / "hf", dtype=torch.bfloat16, **WHOLE)
    with pytest.raises(PrecisionError, match="on each of 2 GPUs.*--scheme static or dynamic"):
        export(tmp_path / "hf", tmp_path / "out", ranks=2)
    notes = export(tmp_path / "hf", tmp_path / "out", ranks=2, keep_misfits=True)
    assert any(note.endswith("--tensor-parallel-size 2") for note in notes)
    vllm, reader = engine_named("vllm"), open_checkpoint(tmp_path / "out")
    assert check(reader, vllm, 2) == []
    assert {finding.where for finding in check(reader, vllm, 4)} >= {"model.layers.0.self_attn.o_proj.weight"}


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture in blocks, for two GPUs that get experts whole: half of an expert would be half a block."""
    here = tmp_path_factory.mktemp("spread")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128, "moe_intermediate_size": 128}
    pico.save(here / "hf", "qwen3-moe", dtype=torch.bfloat16, **sizes)
    with pytest.raises(PrecisionError, match="experts.0.gate_proj.weight.*with --expert-parallel experts are not cut"):
        export(here / "hf", here / "out", ranks=2)
    notes = export(here / "hf", here / "out", ranks=2, expert_parallel=True)
    assert any(note.endswith("--tensor-parallel-size 2 --enable-expert-parallel") for note in notes)
    return here / "out"


def test_experts_that_are_dealt_out_whole_keep_their_blocks(spread: Path) -> None:
    assert stored(spread)["model.layers.1.mlp.experts.0.down_proj.weight"].dtype == torch.float8_e4m3fn
    assert "--tensor-parallel-size 2 --enable-expert-parallel" in (spread / "README.md").read_text()
    told = run("verify", spread, "--target", "vllm", "--tp", 2, "--expert-parallel")
    assert told.exit_code == 0 and "every rule is kept" in told.stdout


def test_findings_that_differ_in_numbers_alone_are_told_once_and_json_has_all(spread: Path) -> None:
    told = run("verify", spread, "--target", "vllm", "--tp", 2)
    assert told.exit_code == 1
    for linear in ("gate_proj", "up_proj", "down_proj"):
        assert told.stdout.count(f"experts.*.{linear}.weight") == 1
        assert f"the first   model.layers.1.mlp.experts.0.{linear}.weight\n" in told.stdout
    counts = [line.split()[1] for line in told.stdout.splitlines() if line.split()[:1] == ["count"]]
    assert counts == ["8", "8", "8"] and "experts.1" not in told.stdout
    findings = json.loads(run("verify", spread, "--target", "vllm", "--tp", 2, "--json").stdout)["findings"]
    assert len({finding["where"] for finding in findings}) == len(findings) == 24


def test_whole_experts_are_for_an_engine_on_several_gpus(spread: Path) -> None:
    for words, error in {
        "--target vllm --expert-parallel": "Give their number as --tp",
        "--fp8 --expert-parallel": "are for --target",
        "--target te --expert-parallel": "cannot be given for PyTorch with Transformer Engine",
    }.items():
        refused = run("verify", spread, *words.split())
        assert refused.exit_code == 2 and error in refused.stderr, refused.stderr
    with pytest.raises(RecipeError, match="several GPUs"):
        Request.export(spread, spread, "vllm", expert_parallel=True)
    with pytest.raises(RecipeError, match="cannot be given"):
        Request.export(spread, spread, "te", expert_parallel=True)


def test_experts_must_be_there_and_as_many_for_each_gpu_where_the_engine_asks_that(
    tmp_path: Path,
) -> None:
    """7 experts on 2 GPUs: SGLang and TensorRT-LLM assert that the one divides the other."""
    pico.save(tmp_path / "seven", "qwen3-moe", dtype=torch.bfloat16, num_experts=7)
    words = {
        engine: run("verify", tmp_path / "seven", "--target", engine, "--tp", 2, "--expert-parallel").stdout
        for engine in ENGINES
    }
    assert {engine for engine in ENGINES if "7 experts on 2 GPUs" in words[engine]} == {"sglang", "tensorrt-llm"}
    with pytest.raises(PrecisionError, match="7 experts on 2 GPUs"):
        export(tmp_path / "seven", tmp_path / "out", "sglang", ranks=2, expert_parallel=True)
    pico.save(tmp_path / "hf", dtype=torch.bfloat16, **WHOLE)
    with pytest.raises(PrecisionError, match="a model without experts"):
        export(tmp_path / "hf", tmp_path / "out", scheme="dynamic", ranks=2, expert_parallel=True)
    told = run("verify", tmp_path / "hf", "--target", "vllm", "--tp", 2, "--expert-parallel").stdout
    assert "a model without experts" in told


def test_where_one_part_of_experts_cannot_be_codes_none_is(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "qwen3-moe", dtype=torch.bfloat16, **{**WHOLE, "moe_intermediate_size": 192})
    export(tmp_path / "hf", tmp_path / "out", keep_misfits=True)
    made = stored(tmp_path / "out")
    assert all(values.dtype == torch.bfloat16 for name, values in made.items() if ".experts." in name)
    assert made["model.layers.0.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn
    assert check(open_checkpoint(tmp_path / "out"), engine_named("vllm")) == []


@pytest.mark.soak
def test_ragged_latent_attention_is_for_every_engine_but_transformers(tmp_path: Path) -> None:
    """DeepSeek's own 576 rows: 512 and 64."""
    sizes = SIZES["deepseek-v3"] | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_hidden_layers": 1}
    pico.save(tmp_path / "hf", "deepseek-v3", dtype=torch.bfloat16, **sizes)
    for engine in ("vllm", "sglang", "tensorrt-llm"):
        export(tmp_path / "hf", tmp_path / engine, engine)
        assert stored(tmp_path / engine)["model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"].shape == (5, 2)
    with pytest.raises(PrecisionError, match="kv_a_proj_with_mqa"):
        export(tmp_path / "hf", tmp_path / "transformers", "transformers")
    export(tmp_path / "hf", tmp_path / "transformers", "transformers", keep_misfits=True)
    kept = {name for name, values in stored(tmp_path / "transformers").items() if values.dtype == torch.bfloat16}
    assert {"model.layers.0.self_attn.q_a_proj.weight", "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"} <= kept


@pytest.mark.parametrize("spelling, scheme", [("fp8-block", "block"), ("fp8-block-bf16", "block")])
def test_blocks_pass_through_to_the_byte(tmp_path: Path, spelling: str, scheme: str) -> None:
    """Random codes under random scales: whoever makes scales anew is found out."""
    fp8_directories.make(tmp_path / "fp8", spelling, **WHOLE)
    before = stored(tmp_path / "fp8")
    notes = export(tmp_path / "fp8", tmp_path / "out", scheme=None)
    assert notes[0] == "Scheme block: the weights are FP8 codes of that kind already."
    assert "14 of 14 weights have the same codes and scales as before." in notes
    after = stored(tmp_path / "out")
    for name, values in before.items():
        if name.endswith("_scale_inv"):
            assert torch.equal(values.float(), after[name])
        else:
            assert torch.equal(values.view(torch.uint8), after[name].view(torch.uint8)), name


def test_codes_of_a_megatron_checkpoint_were_blocks_and_are_again(tmp_path: Path) -> None:
    fp8_directories.make(tmp_path / "fp8", "fp8-block", **WHOLE)
    execute(plan_command(Request(tmp_path / "fp8", tmp_path / "megatron", "megatron")), workers=1)
    notes = export(tmp_path / "megatron", tmp_path / "out", scheme=None)
    assert notes[0].startswith("Scheme block: the weights were FP8 codes of that kind")
    before, after = stored(tmp_path / "fp8"), stored(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8)) for name in before)


@pytest.mark.parametrize("spelling", ["modelopt-tensor", "compressed-tensor"])
def test_fixed_input_scales_go_along_with_codes_per_tensor(tmp_path: Path, spelling: str) -> None:
    fp8_directories.make(tmp_path / "fp8", spelling, **WHOLE)
    before = stored(tmp_path / "fp8")
    notes = export(tmp_path / "fp8", tmp_path / "out", scheme="static")
    assert "Input scales are the fixed ones of the source's weights." in notes
    after = stored(tmp_path / "out")
    for alone in ("model.layers.0.self_attn.o_proj", "model.layers.1.mlp.down_proj"):
        assert torch.equal(before[f"{alone}.weight"].view(torch.uint8), after[f"{alone}.weight"].view(torch.uint8))
        for kind in ("weight_scale", "input_scale"):
            assert after[f"{alone}.{kind}"].item() == pytest.approx(before[f"{alone}.{kind}"].item(), rel=1e-7)
    fused = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
    largest = max(before[f"{name}.input_scale"].item() for name in fused)
    assert [after[f"{name}.input_scale"].item() for name in fused] == [pytest.approx(largest, rel=1e-7)] * 3
    assert any(note.startswith("4 of 14 weights have the same codes") for note in notes)
    assert any(note.startswith("10 have blocks that are encoded again") for note in notes)


def test_codes_of_another_scheme_are_encoded_anew_and_counted(tmp_path: Path) -> None:
    made = fp8_directories.make(tmp_path / "fp8", "modelopt-channel", **WHOLE)
    notes = export(tmp_path / "fp8", tmp_path / "out")
    (note,) = [note for note in notes if note.startswith("The scheme changed from ")]
    assert "from dynamic to block: all of 14 weights are encoded again. " in note
    assert not any("have blocks that are encoded again" in note for note in notes)
    after = stored(tmp_path / "out")
    for name, weight in made.items():
        assert torch.equal(after[f"{name}_scale_inv"], slow_scales(weight.values))


@pytest.mark.parametrize(
    ("before", "names_both"), [({"quant_method": "fbgemm_fp8"}, True), (BLOCKS, False), ({}, False)]
)
def test_a_scheme_has_changed_only_if_both_are_known_and_differ(before: dict[str, object], names_both: bool) -> None:
    """Rows that are split have other blocks in the same scheme, and codes of no directory were in none."""
    weight = {"w": TensorSpec((256, 256), DType.float8_e4m3fn)}
    encodings = SimpleNamespace(quantization=before, scales={"w": Scales("s", None, (1, 256))}, weights=weight)
    job = SimpleNamespace(codes=SimpleNamespace(weights={"w": Scales("s", None, (128, 128))}))
    plan = SimpleNamespace(jobs=[job], quantization=BLOCKS, targets=weight)
    assert bool(recoding._other_scheme(encodings, plan)[1]) == names_both  # type: ignore[arg-type]


def test_of_no_code_that_differs_no_weight_is_said_to_have_most(tmp_path: Path) -> None:
    """The next number of BF16 is no number of the block's grid any more, but has the same code."""
    fp8_directories.make(tmp_path / "fp8", "fp8-block", **WHOLE)
    run("convert", tmp_path / "fp8", tmp_path / "bf16", "--to", "hf", "--precision", "bf16")
    tensors, name = stored(tmp_path / "bf16"), "model.layers.0.mlp.up_proj.weight"
    row = tensors[name][0, :128].abs()
    at = int((row - row.median()).abs().argmin())
    tensors[name].view(torch.int16)[0, at] += 1
    save_file(tensors, tmp_path / "bf16" / "model.safetensors", metadata={"format": "pt"})
    told = run("convert", tmp_path / "bf16", tmp_path / "back", "--to", "hf", "--precision", "fp8").stdout
    assert "\n1 have blocks that are encoded again (" in told
    assert f"). With their new scales 0 of {384 * 256:,} codes are others than " in told


def best(source: Path, target: str = "vllm") -> str:
    work = plan_command(Request.export(source, source.with_name("out"), target))
    (note,) = [note for note in work.notes if note.startswith("Scheme ")]
    return note


def test_the_target_alone_gets_the_best_scheme_that_the_state_allows(tmp_path: Path) -> None:
    source = tmp_path / "hf"
    pico.save(source, dtype=torch.bfloat16, **WHOLE)
    assert best(source).startswith("Scheme dynamic: the checkpoint has no FP8 state")
    states = in_memory.recorded(HuggingFaceReader(source))
    sidecar.write(source / sidecar.RELATIVE, states)
    for target in ENGINES:
        assert best(source, target).startswith("Scheme static: the FP8 state has an amax for every input")
    without = {name: state for name, state in states.modules.items() if "layers.1.mlp.linear_fc1" not in name}
    sidecar.write(source / sidecar.RELATIVE, replace(states, modules=without))
    assert "`decoder.layers.1.mlp.linear_fc1` was never recorded" in best(source)


def test_the_best_scheme_asks_for_no_input_of_what_the_engine_takes_in_no_fp8(tmp_path: Path) -> None:
    """104 is no multiple of 16, so no calibration records these inputs."""
    source = tmp_path / "hf"
    pico.save(source, dtype=torch.bfloat16, **(WHOLE | {"intermediate_size": 104}))
    states = in_memory.recorded(HuggingFaceReader(source))
    recordable = {name: state for name, state in states.modules.items() if "mlp.linear_fc2" not in name}
    sidecar.write(source / sidecar.RELATIVE, replace(states, modules=recordable))
    with pytest.raises(PrecisionError, match=r"shape \[104, .*multiples of 16.*--keep-misfits"):
        best(source)
    work = plan_command(Request.export(source, tmp_path / "out", "vllm", keep_misfits=True))
    assert any(note.startswith("Scheme static: the FP8 state has an amax for every input") for note in work.notes)


def test_groups_of_32_under_floats_are_not_taken_for_mxfp8(tmp_path: Path) -> None:
    fp8_directories.make(tmp_path / "fp8", "compressed-mxfp8")
    assert best(tmp_path / "fp8").startswith("Scheme mxfp8: the weights are FP8 codes of that kind already")
    tensors = stored(tmp_path / "fp8")
    for name in [name for name in tensors if name.endswith("_scale")]:
        tensors[name] = (tensors[name].float() - 127).exp2().bfloat16()
    save_file(tensors, tmp_path / "fp8" / "model.safetensors", metadata={"format": "pt"})
    config = (tmp_path / "fp8" / "config.json").read_text()
    (tmp_path / "fp8" / "config.json").write_text(config.replace("mxfp8-quantized", "float-quantized"))
    assert best(tmp_path / "fp8").startswith("Scheme dynamic: the checkpoint has no FP8 state")


def test_experts_get_blocks_where_an_engine_has_no_channels_for_them(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "mixtral", dtype=torch.bfloat16, **WHOLE)
    assert best(tmp_path / "hf").startswith("Scheme dynamic")
    assert best(tmp_path / "hf", "tensorrt-llm").startswith("Scheme block")


@pytest.mark.parametrize("target", ["vllm", "transformers"])
def test_mx_scales_are_the_next_powers_of_two_as_bytes(tmp_path: Path, target: str) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    export(tmp_path / "hf", tmp_path / "out", target, "mxfp8")
    plain, made = stored(tmp_path / "hf"), stored(tmp_path / "out")
    codes = [name for name, values in made.items() if values.dtype == torch.float8_e4m3fn]
    assert len(codes) == 14
    for name in codes:
        bytes_ = made[f"{name}_scale"]
        rows, columns = plain[name].shape
        assert bytes_.dtype == torch.uint8 and bytes_.shape == (rows, columns // 32)
        amax = plain[name].view(rows, -1, 32).abs().amax(2).double()
        scale = (bytes_.double() - 127).exp2()
        assert (amax / scale <= 448).all() and (amax / (scale / 2) > 448).all()
        values = plain[name].double().view(rows, -1, 32) / scale[..., None]
        assert torch.equal(made[name].float(), values.float().to(torch.float8_e4m3fn).float().view(rows, columns))
    assert check(open_checkpoint(tmp_path / "out"), engine_named(target)) == []
    assert compare(open_checkpoint(tmp_path / "hf"), open_checkpoint(tmp_path / "out")).equal


def test_scales_that_bytes_cannot_hold_are_not_kept_for_mx(tmp_path: Path) -> None:
    """A channel's scale is one for every 32 of it, but no power of two."""
    made = fp8_directories.make(tmp_path / "fp8", "modelopt-channel")
    notes = export(tmp_path / "fp8", tmp_path / "out", scheme="mxfp8")
    assert any(note.startswith("0 of 14 weights have the same codes") for note in notes)
    reader = HuggingFaceReader(tmp_path / "out")
    for name, weight in made.items():
        decoded = reader.encodings[name].decode_rows(stored(tmp_path / "out")[name], 0)
        assert (decoded - weight.values).norm() < 0.05 * weight.values.norm()


def test_groups_of_32_pass_through_and_are_the_best_for_an_engine_that_takes_them(tmp_path: Path) -> None:
    fp8_directories.make(tmp_path / "fp8", "modelopt-mxfp8")
    notes = export(tmp_path / "fp8", tmp_path / "out", "transformers", None)
    assert notes[0] == "Scheme mxfp8: the weights are FP8 codes of that kind already."
    before, after = stored(tmp_path / "fp8"), stored(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8)) for name in before)
    export(tmp_path / "fp8", tmp_path / "sglang", "sglang", None)
    other = {name.replace("_scale_inv", "_scale"): part for name, part in stored(tmp_path / "sglang").items()}
    assert before.keys() == other.keys()
    assert all(torch.equal(before[name].view(torch.uint8), other[name].view(torch.uint8)) for name in before)
