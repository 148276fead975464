"""gpt-oss as OpenAI released it: experts in MXFP4, read by every command, and written where they are what they were.

Judge: transformers' own dequantization, to the bit. The files are packed here, from numbers, under the config.json of
gpt-oss-20b (openai/gpt-oss-20b on the Hub) with nothing but its sizes cut.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import in_memory
import pytest
import torch
from click.testing import CliRunner
from conversions import carry_out
from mxfp4_directories import CONFIG, EXPERTS, LAYERS, make, write
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.cli import main
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import execute
from precisionctl.errors import PrecisionctlError
from precisionctl.evaluate.stored import load
from precisionctl.fp8 import sidecar
from precisionctl.verify.compare import compare

LAYER = "model.layers.1.mlp.experts"


def converted(source: Path, to: Path, layout: Any = "hf", workers: int = 1, **options: Any) -> list[str]:
    """Returns what is told."""
    work = carry_out(Request(source, to, layout, **options), workers=workers)
    return list(work.notes)


def decoded(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in BF16, as transformers decodes them."""
    found = dict(stored)
    for name in [name.removesuffix("_blocks") for name in stored if name.endswith("_blocks")]:
        found[name] = convert_moe_packed_tensors(found.pop(f"{name}_blocks"), found.pop(f"{name}_scales"))
    return found


def assert_same_bits(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert torch.equal(found[name].view(torch.uint8), values.contiguous().view(torch.uint8)), name


def test_every_byte_under_every_scale_decodes_as_transformers_does_it(tmp_path: Path) -> None:
    """Negative zeros and subnormal numbers of the scale 0 among them; by way of Megatron too. Under the scales 253 and
    254 some would be infinite, and are refused (test_nan.py)."""
    stored = make(tmp_path / "source", exponents=(0, 253))
    torch.manual_seed(1)
    for name in stored:
        if name.endswith("_blocks"):
            stored[name] = torch.randint(256, stored[name].shape, dtype=torch.uint8)
    every = {int(byte) for name in stored if name.endswith("_scales") for byte in stored[name].unique()}
    assert every == set(range(253))
    write(tmp_path / "source", stored)
    converted(tmp_path / "source", tmp_path / "hf")
    assert_same_bits(load_file(tmp_path / "hf" / "model.safetensors"), decoded(stored))
    converted(tmp_path / "source", tmp_path / "megatron", "megatron")
    converted(tmp_path / "megatron", tmp_path / "back")
    assert_same_bits(load_file(tmp_path / "back" / "model.safetensors"), decoded(stored))


def test_logits_are_those_of_transformers_and_the_config_is_the_same_but_for_the_method(tmp_path: Path) -> None:
    """Eager, in BF16. transformers decodes the source itself."""
    make(tmp_path / "source")
    notes = converted(tmp_path / "source", tmp_path / "hf", drop_encodings=True)
    assert "16 weights were MXFP4 codes, and are what they decode to. The scales stay behind." in notes
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "source", quantization_config=Mxfp4Config(dequantize=True), attn_implementation="eager"
    )
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager")
    assert theirs.dtype == ours.dtype == torch.bfloat16
    tokens = torch.arange(32).view(1, 32) * 7 % 250
    with torch.no_grad():
        expected = theirs(tokens).logits
        assert expected.std() > 0.1 and torch.equal(ours(tokens).logits, expected)
        stored, words = load(HuggingFaceReader(tmp_path / "source"))
        assert words == "bfloat16, with weights from MXFP4"
        assert (stored(tokens)[..., :250] - expected).abs().max() < 0.05 * expected.std()
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    kept = {key: value for key, value in CONFIG.items() if key != "quantization_config"}
    assert config == kept | {"torch_dtype": "bfloat16"}
    assert not (tmp_path / "hf" / "precisionctl" / "encodings.safetensors").exists()


@pytest.mark.parametrize("way", ["hf", "megatron", None])
def test_experts_become_the_very_blocks_again_that_they_were(tmp_path: Path, way: str | None) -> None:
    """By way of BF16, transposed and with gate and up apart or not, or at once; but for the one that has changed."""
    make(tmp_path / "source")
    between = tmp_path / (way or "source")
    if way:
        notes = converted(tmp_path / "source", between, way)
        assert any("16 weights were MXFP4 codes; the result has their decoded values." in note for note in notes)
    notes = converted(between, tmp_path / "back", precision="fp8")
    assert any("16 of 16 weights have the same codes" in note for note in notes)
    assert_same_bits(
        load_file(tmp_path / "back" / "model.safetensors"), load_file(tmp_path / "source/model.safetensors")
    )
    assert (
        json.loads((tmp_path / "back" / "config.json").read_text())["quantization_config"]
        == CONFIG["quantization_config"]
    )
    if way != "hf":
        return
    changed = load_file(between / "model.safetensors")
    changed[f"{LAYER}.down_proj"][3, 95, 63] = 77
    save_file(changed, between / "model.safetensors", metadata={"format": "pt"})
    notes = converted(between, tmp_path / "changed", precision="fp8")
    assert any("15 of 16 weights have the same codes" in note for note in notes)
    found, before = (load_file(tmp_path / each / "model.safetensors") for each in ("changed", "source"))
    differing = {name for name in before if not torch.equal(before[name], found[name])}
    assert differing == {f"{LAYER}.down_proj_blocks", f"{LAYER}.down_proj_scales"}
    scales = [each[f"{LAYER}.down_proj_scales"] for each in (found, before)]
    assert (scales[0] != scales[1]).nonzero().tolist() == [[3, 63, 2]]


@pytest.mark.soak
def test_source_and_result_are_the_same_and_any_number_of_workers_writes_the_same_bytes(tmp_path: Path) -> None:
    make(tmp_path / "source")
    for workers in (1, 3):
        converted(tmp_path / "source", tmp_path / f"hf{workers}", workers=workers)
        converted(tmp_path / "source", tmp_path / f"megatron{workers}", "megatron", workers=workers)
    assert (tmp_path / "hf1/model.safetensors").read_bytes() == (tmp_path / "hf3/model.safetensors").read_bytes()
    for file in (tmp_path / "megatron1").rglob("*.distcp"):
        assert (tmp_path / "megatron3" / file.relative_to(tmp_path / "megatron1")).read_bytes() == file.read_bytes()
    source = HuggingFaceReader(tmp_path / "source")
    found = compare(source, HuggingFaceReader(tmp_path / "hf1"))
    assert found.equal and {each.status for each in found.tensors} == {"exact"}
    assert {each.dtypes for each in found.tensors} == {"bfloat16", "float4_e2m1fn_x2 / bfloat16"}
    changed = load_file(tmp_path / "hf1" / "model.safetensors")
    changed[f"{LAYER}.down_proj"][3, 95, 63] += 1
    write(tmp_path / "changed", changed, {key: value for key, value in CONFIG.items() if key != "quantization_config"})
    found = compare(source, HuggingFaceReader(tmp_path / "changed"), fp8=True)
    assert [each.name for each in found.tensors if not each.equal] == [f"{LAYER}.down_proj[3]"]


def test_one_shard_may_have_blocks_and_another_their_scales(tmp_path: Path) -> None:
    stored = make(tmp_path)
    scales = {name for name in stored if name.endswith("_scales")}
    files = {"model-00001-of-00002.safetensors": stored.keys() - scales, "model-00002-of-00002.safetensors": scales}
    for file, names in files.items():
        save_file({name: stored[name] for name in sorted(names)}, tmp_path / file)
    index = {"metadata": {}, "weight_map": {name: file for file, names in files.items() for name in names}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model.safetensors").unlink()
    found = in_memory.to_hf(in_memory.to_megatron(HuggingFaceReader(tmp_path))).tensors
    assert_same_bits(found, slices(decoded(stored)))


def slices(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Experts one by one, as in_memory has them."""
    found: dict[str, Tensor] = {}
    for name, values in tensors.items():
        found |= {f"{name}[{e}]": values[e] for e in range(EXPERTS)} if ".experts." in name else {name: values}
    return found


def test_inspect_tells_what_is_stored_and_an_export_leaves_experts_in_bf16(tmp_path: Path) -> None:
    stored = make(tmp_path / "source")
    found = CliRunner().invoke(main, ["inspect", str(tmp_path / "source"), "--json"])
    described = json.loads(found.output)
    blocks = sum(values.nbytes for name, values in stored.items() if name.endswith("_blocks"))
    assert described["bytes_by_dtype"]["float4_e2m1fn_x2"] == blocks
    assert described["coded"]["weights_by_scale"] == {"block of 1 x 32": 2 * LAYERS * EXPERTS}
    refused = CliRunner().invoke(main, ["verify", str(tmp_path / "source"), "--target", "vllm"])
    assert refused.exit_code == 2 and "no rules of vLLM for MXFP4" in refused.output
    execute(plan_command(Request.export(tmp_path / "source", tmp_path / "out", "vllm", "dynamic")))
    exported, expected = load_file(tmp_path / "out" / "model.safetensors"), decoded(stored)
    for name in (f"{LAYER}.gate_up_proj", f"{LAYER}.down_proj"):
        assert torch.equal(exported[name], expected[name])
    assert exported["model.layers.1.self_attn.q_proj.weight"].dtype == torch.float8_e4m3fn


def test_who_chooses_what_becomes_codes_gets_no_blocks_of_before(tmp_path: Path) -> None:
    """The experts are values under the names of values then, as with a recipe."""
    stored = make(tmp_path / "source")
    sidecar.write(tmp_path / "state.fp8", in_memory.recorded(HuggingFaceReader(tmp_path / "source")))
    given = {"fp8_state": tmp_path / "state.fp8", "exclude": ("*.q_proj",)}
    converted(tmp_path / "source", tmp_path / "out", precision="fp8", **given)
    found, expected = load_file(tmp_path / "out" / "model.safetensors"), decoded(stored)
    assert torch.equal(found[f"{LAYER}.down_proj"], expected[f"{LAYER}.down_proj"])
    assert not [name for name in found if name.endswith(("_blocks", "_scales"))]


@pytest.mark.parametrize("way", ["as released", "megatron"])
def test_a_release_is_not_exported_in_the_four_bits_that_it_has(tmp_path: Path, way: str) -> None:
    """Its experts would become BF16, and its attention, which was not rounded, MXFP4."""
    source = tmp_path / "source"
    make(source)
    if way == "megatron":
        converted(source, tmp_path / "megatron", "megatron")
        source = tmp_path / "megatron"
    with pytest.raises(
        PrecisionctlError, match="has its experts in MXFP4.*serves the release as it is.*--precision fp8"
    ):
        plan_command(Request.export(source, tmp_path / "out", "vllm", "mxfp4"))
    other = plan_command(Request.export(source, tmp_path / "out", "vllm", "dynamic"))
    said = "Experts become BF16: gpt_oss" if way == "as released" else "Experts stay in BF16: gpt_oss"
    assert any(said in note for note in other.notes)


@pytest.mark.parametrize("way", ["hf", "megatron"])
def test_values_that_remember_no_codes_get_the_form_of_a_reference(tmp_path: Path, way: str) -> None:
    """What transformers trained, or Megatron saved: new codes for the expert that has changed, which are within what
    rounding to MXFP4 costs Gaussian weights (19 dB), the reference's for all others."""
    stored = make(tmp_path / "release")
    values = decoded(stored)
    values[f"{LAYER}.down_proj"][3] = torch.randn(96, 64) / 8
    plain = {key: value for key, value in CONFIG.items() if key != "quantization_config"}
    write(tmp_path / "trained", values, plain)
    source = tmp_path / "trained"
    if way == "megatron":
        converted(source, tmp_path / "megatron", "megatron")
        source = tmp_path / "megatron"
    notes = converted(source, tmp_path / "out", precision="fp8", reference=tmp_path / "release")
    assert any("have the form of the reference's" in note for note in notes)
    assert any("15 of 16 weights have the same codes" in note for note in notes)
    found = load_file(tmp_path / "out" / "model.safetensors")
    kind = (f"{LAYER}.down_proj_blocks", f"{LAYER}.down_proj_scales")
    assert {name for name in stored if not torch.equal(stored[name], found[name])} == set(kind)
    assert all(torch.equal(stored[name][:3], found[name][:3]) for name in kind)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"] == CONFIG["quantization_config"]
    before, after = values[f"{LAYER}.down_proj"][3].float(), decoded(found)[f"{LAYER}.down_proj"][3].float()
    assert 0 < (after - before).norm() < 0.13 * before.norm()


def test_a_reference_gives_no_codes_without_weights_or_to_who_chooses_others(tmp_path: Path) -> None:
    stored = make(tmp_path / "release")
    plain = {key: value for key, value in CONFIG.items() if key != "quantization_config"}
    write(tmp_path / "trained", decoded(stored), plain)
    given = {"reference": tmp_path / "release"}
    work = plan_command(Request.export(tmp_path / "trained", tmp_path / "out", "vllm", "dynamic", **given))
    assert not [name for name in work.plan.targets if "_blocks" in name]
    converted(tmp_path / "trained", tmp_path / "values", precision="bf16", **given)
    assert_same_bits(load_file(tmp_path / "values" / "model.safetensors"), decoded(stored))
    (tmp_path / "release" / "model.safetensors").unlink()
    with pytest.raises(PrecisionctlError, match="scales for the inputs of 4 modules"):
        converted(tmp_path / "trained", tmp_path / "out", precision="fp8", **given)


def without(*names: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda stored: [stored.pop(f"{LAYER}.{name}") for name in names] and None


def put(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    return lambda stored: stored.update({f"{LAYER}.{name}": change(stored[f"{LAYER}.{name}"])})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without("down_proj_scales"), r"no .*down_proj_scales\[0\] for its codes"),
        (without("down_proj_blocks"), "unexpected|missing"),
        (without("gate_up_proj_blocks", "gate_up_proj_scales"), "missing"),
        (put("down_proj_blocks", lambda t: t.to(torch.int8)), "down_proj_blocks.* is int8; MXFP4 is made of bytes"),
        (put("down_proj_scales", lambda t: t.float()), "down_proj_scales.* is float32; MXFP4 is made of bytes"),
        (put("down_proj_blocks", lambda t: t.flatten(2)), r"blocks of MXFP4 are \[rows, columns / 32, 16\]"),
        (put("down_proj_blocks", lambda t: t[..., :8].contiguous()), r"blocks of MXFP4 are"),
        (put("down_proj_scales", lambda t: t[:, :, :1].contiguous()), "down_proj_scales.*has shape"),
        (put("down_proj_blocks", lambda t: t[:, :8].contiguous()), "down_proj_scales.*has shape"),
        (put("down_proj_blocks", lambda t: t[:2].contiguous()), "unexpected|missing"),
        (put("down_proj_blocks", lambda t: t[:0].contiguous()), "a stack of no experts"),
        (put("down_proj_blocks", lambda t: t.new_empty(4, 10**12, 0, 16)), "down_proj_scales.*has shape"),
        (put("gate_up_proj_scales", lambda t: t.index_fill(0, torch.tensor(1), 255)), "negative, infinite or NaN"),
    ],
    ids=[
        *("no scales", "no blocks", "neither", "int8", "FP32 scales", "three dimensions", "half a block", "few scales"),
        *("few rows", "few experts", "no experts", "a million million rows", "a scale that is NaN"),
    ],
)
def test_damaged_files_are_one_error(tmp_path: Path, damage: Callable[[dict[str, Tensor]], None], message: str) -> None:
    stored = make(tmp_path / "source")
    damage(stored)
    write(tmp_path / "source", stored)
    with pytest.raises(PrecisionctlError, match=message):
        converted(tmp_path / "source", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize("quantization", [None, {"quant_method": "fp8", "weight_block_size": [128, 128]}])
def test_blocks_under_another_method_or_none_are_refused(tmp_path: Path, quantization: dict[str, Any] | None) -> None:
    write(tmp_path / "source", make(tmp_path / "source"), CONFIG | {"quantization_config": quantization})
    with pytest.raises(PrecisionctlError, match="is FP8 codes but|for its codes"):
        HuggingFaceReader(tmp_path / "source")


def test_codes_are_read_a_few_rows_at_a_time(tmp_path: Path) -> None:
    stored = make(tmp_path)
    reader = HuggingFaceReader(tmp_path)
    name = f"{LAYER}.gate_up_proj_blocks[2]"
    codes, encoding = read_tensor(reader, name), reader.encodings[name]
    expected = decoded(stored)[f"{LAYER}.gate_up_proj"][2].t()
    for row in range(0, 192, 5):
        rows = codes[row : row + 5]
        assert torch.equal(encoding.decode_rows(rows, row).bfloat16(), expected[row : row + 5])
