"""INT8 in Hugging Face directories: decoded as compressed-tensors decompresses it, brought back to the very codes,
encoded again by its rule, and computed as engines do."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import int8_directories
import pytest
import torch
import training
from conversions import carry_out, run as convert
from int8_directories import SPELLINGS, WITH_ZERO_POINTS
from safetensors.torch import load_file, save_file
from soaking import few, in_soak
from torch import Tensor

from precisionctl.checkpoints.chunks import read_tensor, write_rows
from precisionctl.checkpoints.hf_directory import encodings_file
from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.checkpoints.megatron.carried_run import CarriedRun
from precisionctl.checkpoints.megatron.keys import COMPANIONS
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.checkpoints.torch_dist.writer import TorchDistWriter
from precisionctl.codes.elements import INT8, INT8_PLUS_128, Element
from precisionctl.codes.encoding import Encoding
from precisionctl.commands.request import Request
from precisionctl.dtypes import DType
from precisionctl.errors import PrecisionctlError, PrecisionError, UnmappedTensor
from precisionctl.evaluate import load
from precisionctl.evaluate.quantizers import InputQuantizer, Int8Inputs, Int8TokenInputs
from precisionctl.fp8 import sidecar
from precisionctl.fp8.delayed_scaling import recorded_amax
from precisionctl.param import Parallelism
from precisionctl.planning.make_plan import make_plan
from precisionctl.reports.inspect import describe
from precisionctl.verify.code_comparison import compare_with_bf16
from precisionctl.verify.compare import compare

UP, QUERY = "model.layers.0.mlp.up_proj.", "model.layers.0.self_attn.q_proj."


def stored(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "model.safetensors")


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_same(a: Path, b: Path) -> None:
    left, right = stored(a), stored(b)
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert (tensor.dtype, tensor.shape) == (right[name].dtype, right[name].shape), name
        assert torch.equal(bits(tensor), bits(right[name])), name


@pytest.mark.parametrize("spelling", few(SPELLINGS, "w8a8", "w8a8-zero-points", "w8a8-static-zero-points", "w8a16-64"))
def test_codes_decode_to_what_compressed_tensors_decompresses_and_come_back_from_megatron(
    tmp_path: Path, spelling: str
) -> None:
    """All 256 codes, of channels and groups; gate and up cut for two ranks."""
    values = int8_directories.make(tmp_path / "source", SPELLINGS[spelling])
    assert len(values) == 7
    convert(tmp_path / "source", tmp_path / "bf16", "hf", verify=True)
    decoded = stored(tmp_path / "bf16")
    for name, expected in values.items():
        exact = expected.bfloat16()
        if expected.dtype == torch.float16:  # rounded twice there: the product of its scale and a code is exact in FP32
            scale = stored(tmp_path / "source")[f"{name}_scale"].float()
            exact = (stored(tmp_path / "source")[name].float() * scale).bfloat16()
        assert torch.equal(bits(decoded[name]), bits(exact)), name
    source, bf16 = open_checkpoint(tmp_path / "source"), open_checkpoint(tmp_path / "bf16")
    assert compare(source, bf16).equal
    codes = compare(source, bf16, fp8=True).codes
    assert len(codes) == 7 and not any(code.changed for code in codes) and all(code.idempotent for code in codes)
    convert(tmp_path / "source", tmp_path / "megatron", "megatron", parallelism=Parallelism(2))
    notes = convert(tmp_path / "megatron", tmp_path / "back", "hf", precision="fp8", verify=True).notes
    assert_same(tmp_path / "source", tmp_path / "back")
    assert any("7 of 7 weights have the same codes" in note for note in notes)
    config = [json.loads((tmp_path / each / "config.json").read_text()) for each in ("source", "back")]
    assert config[0]["quantization_config"] == config[1]["quantization_config"]
    assert describe(source)["coded"]["formats"] == {"INT8": 7} and describe(source)["precision"] == "int8 codes"


@pytest.mark.parametrize("element", [INT8, INT8_PLUS_128], ids=lambda element: element.dtype.value)
@pytest.mark.parametrize("through", [torch.bfloat16, torch.float32])
def test_every_code_comes_back_under_its_own_scale(element: Element, through: torch.dtype) -> None:
    """One row for each of 20,000 scales, 2^-90 to 2^90, and for their neighbours."""
    scales = (180 * torch.rand(20_000, generator=torch.Generator().manual_seed(0)) - 90).exp2()
    powers = torch.arange(-90, 90).float().exp2()
    scales = torch.cat([scales, powers, powers.nextafter(torch.tensor(0.0)), powers.nextafter(torch.tensor(1e30))])
    codes = torch.arange(256, dtype=torch.uint8).view(element.dtype.torch).expand(len(scales), -1).contiguous()
    encoding = Encoding(element, scales.unsqueeze(1), (1, 256))
    values = encoding.decode_rows(codes, 0)
    numbers = codes.double() - 128 if element is INT8_PLUS_128 else codes.double()
    assert torch.equal(values, (numbers * scales.double().unsqueeze(1)).float())
    assert torch.equal(encoding.encode_rows(values.to(through), 0), codes)


def test_weights_with_zero_points_come_back_from_fp32_and_are_refused_in_bf16(tmp_path: Path) -> None:
    values = int8_directories.make(tmp_path / "source", WITH_ZERO_POINTS)
    convert(tmp_path / "source", tmp_path / "fp32", "hf", "fp32", verify=True)
    decoded = stored(tmp_path / "fp32")
    assert all(torch.equal(decoded[name].bfloat16(), expected) for name, expected in values.items())
    notes = convert(tmp_path / "fp32", tmp_path / "back", "hf", "fp8").notes
    assert any(note.startswith("7 of 7 weights have the same codes") for note in notes)
    assert_same(tmp_path / "source", tmp_path / "back")
    with pytest.raises(PrecisionError, match="do not survive BF16") as refused:
        convert(tmp_path / "source", tmp_path / "bf16", "megatron")
    assert "--precision fp32" in refused.value.do
    assert not all(code.idempotent for code in compare_with_bf16(open_checkpoint(tmp_path / "source")))
    with pytest.raises(PrecisionError, match="do not survive BF16"):
        convert(tmp_path / "fp32", tmp_path / "bf16", "hf", "bf16")
    convert(tmp_path / "source", tmp_path / "bf16", "hf", drop_encodings=True)
    assert all(torch.equal(stored(tmp_path / "bf16")[name], expected) for name, expected in values.items())


def test_moments_in_bf16_are_no_values_of_codes_with_zero_points(tmp_path: Path) -> None:
    """As Megatron-Core stores them with `--exp-avg-dtype bf16`."""
    int8_directories.make(tmp_path / "source", WITH_ZERO_POINTS)
    convert(tmp_path / "source", tmp_path / "fp32", "megatron", "fp32")
    decoded = open_checkpoint(tmp_path / "fp32")
    weights = make_plan(decoded, "megatron").targets
    moments = {
        f"optimizer.state.{kind}.{name}": replace(spec, dtype=DType.bfloat16)
        for name, spec in weights.items()
        for kind in ("exp_avg", "exp_avg_sq")
    }
    adam = {"optimizer": {"state": {"common_step": 3}, "param_groups": [{"lr": 0.1, "params": []}]}}
    run = CarriedRun(iteration=3, common={"optimizer": adam})
    iteration = tmp_path / "run" / "iter_0000003"
    writer = TorchDistWriter(iteration, decoded.model, {**weights, **moments}, run=run)
    writer.lay_out()
    for name, spec in writer.specs.items():
        values = torch.ones(spec.shape) if name in moments else read_tensor(decoded, name)
        write_rows(writer, name, 0, values.to(spec.dtype.torch))
    writer.finish(None)
    for beside in (encodings_file.RELATIVE, COMPANIONS / "config.json"):
        (iteration / beside).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(tmp_path / "fp32" / "release" / beside, iteration / beside)
    convert(iteration, tmp_path / "again", "megatron")
    again: Any = open_checkpoint(tmp_path / "again")
    assert {str(again.optimizer_specs[name].dtype) for name in moments} == {"bfloat16"}
    convert(tmp_path / "again", tmp_path / "back", "hf", "fp8", drop_optimizer=True)
    assert_same(tmp_path / "source", tmp_path / "back")


@pytest.mark.parametrize("zero", [-128.0, -100.0, 0.0, 127.0])
def test_of_zero_points_a_value_of_bf16_that_a_code_decodes_to_exactly_is_no_other_codes_value(zero: float) -> None:
    """By which codes are known to be those from before: all codes under 20,000 scales, of which BF16 merges many."""
    scales = (180 * torch.rand(20_000, 1, generator=torch.Generator().manual_seed(0)) - 90).exp2()
    scales[::2] = scales[::2].bfloat16().float()
    codes = torch.arange(256, dtype=torch.uint8).expand(len(scales), -1).contiguous()
    encoding = Encoding(INT8_PLUS_128, scales, (1, 256), zeros=torch.full_like(scales, zero))
    values = encoding.decode_rows(codes, 0)
    known = values.bfloat16() == values
    back = encoding.encode_rows(values.bfloat16(), 0)
    assert torch.equal(back[known], codes[known]) and int(known.sum()) > len(scales)
    assert zero == 0 or not torch.equal(back, codes)


def test_weights_with_zero_points_that_were_trained_in_bf16_are_not_said_to_have_their_codes_again(
    tmp_path: Path,
) -> None:
    """An update of nothing: the same BF16 values, and of neighbours that are one of them, other codes. In FP32 too, in
    which these values are then written."""
    training.make_text(tmp_path / "text.txt")
    int8_directories.make(tmp_path / "source", WITH_ZERO_POINTS, vocab_size=80)
    training.add_tokenizer(tmp_path / "source")
    changes = {"train__steps": 1, "optimizer__lr": 1e-60, "optimizer__weight_decay": 0.0}
    training.run(training.settings(tmp_path / "source", tmp_path / "text.txt", tmp_path / "run", **changes))
    notes = convert(tmp_path / "run", tmp_path / "back", "hf", precision="fp8").notes
    convert(tmp_path / "run", tmp_path / "fp32", "hf", "fp32", drop_optimizer=True)  # whose masters give the codes back
    assert stored(tmp_path / "fp32")[f"{UP}weight"].dtype == torch.float32
    by_way_of_fp32 = convert(tmp_path / "fp32", tmp_path / "back-by-fp32", "hf", precision="fp8").notes
    before, after = stored(tmp_path / "source"), stored(tmp_path / "back")
    kept = [name for name in before if name.endswith("_scale") and torch.equal(before[name], after[name])]
    weights = [name.removesuffix("_scale") for name in kept]
    assert sum(not torch.equal(before[f"{name}_packed"], after[f"{name}_packed"]) for name in weights) > 4
    for told in (notes, by_way_of_fp32):
        assert any(note.startswith("0 of 7 weights have the same codes") for note in told)
        assert any(note.startswith(f"{len(kept)} have the same scales, and codes of the same BF16") for note in told)
    for each in ("source", "back"):
        convert(tmp_path / each, tmp_path / f"{each}-bf16", "hf", drop_encodings=True)
    values = [stored(tmp_path / f"{each}-bf16") for each in ("source", "back")]
    assert all(torch.equal(values[0][name], values[1][name]) for name in weights)


@pytest.mark.parametrize("spelling", ["w8a8", "w8a16-64", *in_soak("w8a8-fp32-scales", "w8a8-static", "w8a16")])
def test_what_was_trained_gets_a_scale_by_compressed_tensors_rule_and_the_rest_keeps_its_codes(
    tmp_path: Path, spelling: str
) -> None:
    """Half the range of 255 steps, in the dtype of the old scales; codes are then the nearest."""
    values = int8_directories.make(tmp_path / "source", SPELLINGS[spelling])
    convert(tmp_path / "source", tmp_path / "bf16", "hf")
    tensors, name = stored(tmp_path / "bf16"), f"{UP}weight"
    tensors[name][1, :64] = torch.linspace(-1, 0.7, 64).bfloat16()
    save_file(tensors, tmp_path / "bf16" / "model.safetensors", metadata={"format": "pt"})
    notes = convert(tmp_path / "bf16", tmp_path / "back", "hf", precision="fp8").notes
    assert any(note.startswith("1 have blocks that are encoded again") for note in notes)
    before, after = stored(tmp_path / "source"), stored(tmp_path / "back")
    differ = {each for each in before if not torch.equal(bits(before[each]), bits(after[each]))}
    packed = name if name in before else f"{name}_packed"
    assert differ == {packed, f"{name}_scale"}
    scale, old = after[f"{name}_scale"], before[f"{name}_scale"]
    here = (1, 0) if scale.dim() == 2 else (0,)
    assert torch.equal(scale[here], (torch.tensor(1.0) / 127.5).to(scale.dtype))
    if scale.dim() == 2:
        elsewhere = torch.ones_like(scale, dtype=torch.bool)
        elsewhere[here] = False
        assert torch.equal(scale[elsewhere], old[elsewhere])
    numbers = after[packed].view(torch.uint8).int() - 128 if packed != name else after[packed].int()
    quotient = tensors[name][1, :64].double() / float(scale[here])
    assert torch.equal(numbers[1, :64].double(), quotient.round().clamp(-128, 127))
    assert values[name].shape == numbers.shape


@pytest.mark.parametrize(("spelling", "beyond"), [("w8a8-static", 127.5), ("w8a8-static-zero-points", 128.0)])
def test_fixed_scales_of_inputs_are_amaxes_and_one_recorded_since_gets_its_own(
    tmp_path: Path, spelling: str, beyond: float
) -> None:
    """With a zero point, the amax is the farther end of the range, and a recorded one has a zero point of 0."""
    int8_directories.make(tmp_path / "source", SPELLINGS[spelling])
    tensors = stored(tmp_path / "source")
    convert(tmp_path / "source", tmp_path / "bf16", "hf")
    states = sidecar.read(tmp_path / "bf16" / sidecar.RELATIVE)
    down = "model.layers.0.mlp.down_proj."
    scale, zero = float(tensors[f"{down}input_scale"]), float(tensors.get(f"{down}input_zero_point", torch.zeros(1)))
    expected = scale * (127.5 if beyond == 127.5 else max(127 - zero, 128 + zero))
    found = states.modules["decoder.layers.0.mlp.linear_fc2"].roles["input"]
    assert float(recorded_amax(found, "input", states.recipe)) == pytest.approx(expected, rel=1e-6)
    found.amax_history[-1] = 7.0
    sidecar.write(tmp_path / "bf16" / sidecar.RELATIVE, states)
    convert(tmp_path / "bf16", tmp_path / "back", "hf", precision="fp8")
    after = stored(tmp_path / "back")
    assert float(after[f"{down}input_scale"]) == pytest.approx(7 / beyond, rel=2**-8)
    if zero:
        assert float(after[f"{down}input_zero_point"]) == 0
    others = [name for name in tensors if not name.startswith(f"{down}input")]
    assert all(torch.equal(bits(tensors[name]), bits(after[name])) for name in others)


def test_a_scale_of_keys_in_an_mlp_is_of_no_cache_and_refused_by_name(tmp_path: Path) -> None:
    int8_directories.make(tmp_path, SPELLINGS["w8a8"])
    stray = {"model.layers.0.mlp.k_scale": torch.ones(1)}
    save_file(stored(tmp_path) | stray, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnmappedTensor, match=r"layers\.0\.mlp\.k_scale"):
        convert(tmp_path, tmp_path / "out", "megatron")


def test_another_zero_point_of_inputs_is_a_difference(tmp_path: Path) -> None:
    """Also where the end of the range that is farther from zero stays where it is."""
    for each in ("source", "other"):
        int8_directories.make(tmp_path / each, SPELLINGS["w8a8-static-zero-points"])
    tensors = stored(tmp_path / "other")
    tensors[f"{UP}input_zero_point"] = -1 - tensors[f"{UP}input_zero_point"]
    save_file(tensors, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
    found = compare(open_checkpoint(tmp_path / "source"), open_checkpoint(tmp_path / "other"))
    assert not found.equal and [line for line in found.settings if "zero point" in line and "up_proj" in line]


def test_a_weight_that_has_become_nan_is_refused(tmp_path: Path) -> None:
    int8_directories.make(tmp_path / "source", SPELLINGS["w8a8"])
    convert(tmp_path / "source", tmp_path / "bf16", "hf")
    tensors = stored(tmp_path / "bf16")
    tensors[f"{UP}weight"][0, 0] = torch.nan
    save_file(tensors, tmp_path / "bf16" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(PrecisionError, match="holds a NaN, for which INT8 has no code"):
        convert(tmp_path / "bf16", tmp_path / "back", "hf", precision="fp8")


def test_a_group_of_linears_whose_inputs_stay_as_they_are_is_told_from_one_whose_inputs_are_rounded(
    tmp_path: Path,
) -> None:
    """By the `format` of each group: `w8a8` in the attention, `w8a16` in the MLP."""
    for name, part in (("w8a8", "self_attn"), ("w8a16", "mlp")):
        int8_directories.make(tmp_path / name, SPELLINGS[name], quantized=lambda weight, part=part: part in weight)
    mlp = {name: tensor for name, tensor in stored(tmp_path / "w8a16").items() if ".mlp." in name}
    rest = {name: tensor for name, tensor in stored(tmp_path / "w8a8").items() if ".mlp." not in name}
    save_file(rest | mlp, tmp_path / "w8a8" / "model.safetensors", metadata={"format": "pt"})
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("w8a8", "w8a16")]
    groups = configs[0]["quantization_config"]["config_groups"]
    groups["group_1"] = configs[1]["quantization_config"]["config_groups"]["group_0"]
    configs[0]["quantization_config"]["format"] = "mixed-precision"
    (tmp_path / "w8a8" / "config.json").write_text(json.dumps(configs[0]))
    _, precision = load(HuggingFaceReader(tmp_path / "w8a8"))
    assert set(precision.split(" and ")) == {"INT8 codes with dynamic per-token input scales", "weights from INT8"}
    convert(tmp_path / "w8a8", tmp_path / "megatron", "megatron")
    convert(tmp_path / "megatron", tmp_path / "back", "hf", precision="fp8")
    assert_same(tmp_path / "w8a8", tmp_path / "back")


def test_experts_are_codes_too_and_compute_with_them(tmp_path: Path) -> None:
    sizes = {"moe_intermediate_size": 64, "num_experts": 2, "num_experts_per_tok": 1, "num_hidden_layers": 2}
    values = int8_directories.make(tmp_path / "source", SPELLINGS["w8a8"], "qwen3-moe", **sizes)
    assert any(".experts.1." in name for name in values)
    convert(tmp_path / "source", tmp_path / "megatron", "megatron")
    convert(tmp_path / "megatron", tmp_path / "back", "hf", precision="fp8")
    assert_same(tmp_path / "source", tmp_path / "back")
    model, precision = load(HuggingFaceReader(tmp_path / "source"))
    assert precision == "INT8 codes with dynamic per-token input scales"
    assert model(torch.arange(32).view(1, 32))[..., :100].isfinite().all()


def test_training_goes_on_from_what_codes_decode_to(tmp_path: Path) -> None:
    """After a step of `resume`, every weight has other scales, of the same format."""
    training.make_text(tmp_path / "text.txt")
    made = training.make_source(tmp_path / "made")
    int8_directories.make(tmp_path / "source", SPELLINGS["w8a8"], vocab_size=80)
    for file in made.glob("tokenizer*"):
        (tmp_path / "source" / file.name).write_bytes(file.read_bytes())
    settings = training.settings(tmp_path / "source", tmp_path / "text.txt", tmp_path / "run", train__steps=1)
    assert len(training.run(settings)[2]) == 1
    notes = convert(tmp_path / "run", tmp_path / "back", "hf", precision="fp8").notes
    assert any("7 have blocks that are encoded again" in note for note in notes)
    before, after = stored(tmp_path / "source"), stored(tmp_path / "back")
    assert before.keys() == after.keys() and all(before[name].dtype == after[name].dtype for name in before)


def test_an_export_in_fp8_is_counted_as_rounded(tmp_path: Path) -> None:
    int8_directories.make(tmp_path / "source", SPELLINGS["w8a8"])
    notes = carry_out(Request.export(tmp_path / "source", tmp_path / "fp8", "vllm", "dynamic")).notes
    assert any("7 weights from INT8 to FP8: rounded once more" in note for note in notes)
    assert any("0 of 7 weights from INT8 to FP8 are exactly what they were" in note for note in notes)
    convert(tmp_path / "fp8", tmp_path / "bf16", "hf")
    convert(tmp_path / "source", tmp_path / "values", "hf")
    for name, tensor in stored(tmp_path / "values").items():
        there = stored(tmp_path / "bf16")[name].float()
        assert float((there - tensor.float()).norm() / tensor.float().norm()) < 0.04


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"weights": {"symmetric": False}}, "zero points that are not packed"),
        ({"weights": {"strategy": "block", "block_structure": [128, 128]}}, "strategy 'block'"),
        ({"weights": {"actorder": "group"}}, "actorder"),
        ({"weights": {"dynamic": True}}, "no scales"),
        ({"weights": {"num_bits": 6}}, "neither of 4 bits nor of 8"),
        ({"weights": {"strategy": "group", "group_size": 0}}, "groups of 0"),
        ({"weights": {"strategy": "tensor", "symmetric": False}}, "strategy 'tensor'"),
        ({"input_activations": {"dynamic": False}}, "inputs of 8-bit integer weights"),
        ({"input_activations": {"type": "float"}}, "inputs of 8-bit integer weights"),
        ({"input_activations": {"num_bits": 4}}, "inputs of 8-bit integer weights"),
        ({"input_activations": {"strategy": "group", "group_size": 128}}, "inputs of 8-bit integer weights"),
        ({"input_activations": {"strategy": "tensor"}}, "inputs of 8-bit integer weights"),
        ({"input_activations": {"strategy": "tensor", "dynamic": False}}, "no .*input_scale for its codes"),
    ],
)
def test_what_is_not_computed_is_refused_by_its_name(tmp_path: Path, change: dict[str, object], why: str) -> None:
    int8_directories.make(tmp_path, SPELLINGS["w8a8"])
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    (part, changed), group = next(iter(change.items())), config["quantization_config"]["config_groups"]["group_0"]
    group[part] |= changed
    path.write_text(json.dumps(config))
    with pytest.raises(PrecisionctlError, match=why):
        HuggingFaceReader(tmp_path)


def test_a_cache_that_is_not_in_fp8_is_refused(tmp_path: Path) -> None:
    int8_directories.make(tmp_path, SPELLINGS["w8a8"])
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "int", "strategy": "tensor"}
    path.write_text(json.dumps(config))
    with pytest.raises(PrecisionError, match="the KV cache is not in FP8"):
        HuggingFaceReader(tmp_path)


@pytest.mark.parametrize(
    ("name", "tensor", "why"),
    [
        (f"{UP}weight_zero_point", torch.zeros(256, 1, dtype=torch.int8), "beside codes that have none"),
        (f"{UP}weight", torch.zeros(256, 128, dtype=torch.uint8), "codes of a kind that cannot be read"),
        (f"{UP}weight_scale", torch.ones(128, 1), "for a weight of"),
        (f"{UP}input_zero_point", torch.zeros(2, dtype=torch.int8), r"not \[\] or \[1\]"),
        (f"{UP}input_zero_point", torch.zeros(1), "is float32, not int8"),
        (f"{UP}input_scale", torch.ones(2), r"not \[\] or \[1\]|not one scale"),
    ],
)
def test_tensors_that_no_tool_writes_so_are_refused(tmp_path: Path, name: str, tensor: Tensor, why: str) -> None:
    int8_directories.make(tmp_path, SPELLINGS["w8a8-static-zero-points"])
    save_file(stored(tmp_path) | {name: tensor}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(PrecisionctlError, match=why):
        HuggingFaceReader(tmp_path)


def rounded(inputs: InputQuantizer, values: Tensor) -> Tensor:
    operand = inputs.quantize(values).rows
    return operand.summands() * operand.multiplier()


def on_a_grid(values: Tensor, scale: float, zero: int) -> list[int]:
    """What vLLM's kernel stores of a token under a scale, number by number."""
    inverse = float(1 / torch.tensor(scale))
    return [max(-128, min(127, round(float(torch.tensor(value) * inverse)) + zero)) for value in values.tolist()]


def test_a_token_is_rounded_as_by_vllms_kernel() -> None:
    """127 / amax of it, or, with zero points, a 255th of its range; a token of zeros stays zero."""
    values = torch.randn(16, 96, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    values[2], values[3] = 0, values[3].abs() + 1
    plain, shifted = Int8TokenInputs(False).quantize(values).rows, Int8TokenInputs(True).quantize(values).rows
    for row in range(16):
        amax, low, high = values[row].abs().amax(), values[row].amin(), values[row].amax()
        if row == 2:
            assert not plain.codes[row].any() and not (shifted.codes[row] * shifted.scale_inv[row]).any()
            continue
        factor = torch.tensor(127.0) / amax
        assert plain.codes[row].tolist() == [round(float(value * factor)) for value in values[row]]
        assert float(plain.scale_inv[row]) == float(amax / torch.tensor(127.0))
        scale = (high - low) / torch.tensor(255.0)
        zero = round(float(-128 - low / scale))
        assert float(shifted.scale_inv[row]) == float(scale)
        assert (shifted.codes[row] + zero).tolist() == on_a_grid(values[row], float(scale), zero)


def test_a_fixed_scale_divides_and_linears_with_one_input_share_a_range() -> None:
    values = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    scale = torch.tensor(0.013)
    expected = [[max(-128, min(127, round(float(x / scale)))) for x in row] for row in values.float()]
    assert Int8Inputs(scale).quantize(values).rows.codes.tolist() == expected
    found = Int8Inputs.of_range(torch.tensor(-1.0), torch.tensor(1.55))
    assert float(found.scale_inv) == pytest.approx(0.01) and found.zero is not None and float(found.zero) == -28
    taken = found.quantize(values.float()).rows.codes + found.zero
    assert taken.tolist() == [on_a_grid(row, float(found.scale_inv), -28) for row in values.float()]
    assert float(rounded(found, torch.tensor([[5.0]]))) == pytest.approx(1.55)


WORDS = {
    "w8a8": "INT8 codes with dynamic per-token input scales",
    "w8a8-zero-points": "INT8 codes with dynamic per-token input scales",
    "w8a8-static": "INT8 codes with static input scales",
    "w8a8-static-zero-points": "INT8 codes with static input scales",
    "w8a16-64": "bfloat16, with weights from INT8",
}


@pytest.mark.parametrize("spelling", WORDS)
def test_a_model_computes_with_its_codes_and_rounds_inputs_where_engines_do(tmp_path: Path, spelling: str) -> None:
    """The output projection against FP64 sums of the decoded weights and the rounded inputs; of q, k and v, the scale
    that vLLM makes of theirs."""
    values = int8_directories.make(tmp_path / "made", SPELLINGS[spelling])
    model, precision = load(HuggingFaceReader(tmp_path / "made"))
    assert precision == WORDS[spelling]
    attention, tensors = model.decoder.layers[0].self_attention, stored(tmp_path / "made")
    if "from INT8" in precision:
        assert not attention.linear_proj.quantizers.get("input")
        return
    name = "model.layers.0.self_attn.o_proj."
    x = torch.randn(16, 128, generator=torch.Generator().manual_seed(2)).bfloat16()
    weight = (tensors[f"{name}weight"].double() * tensors[f"{name}weight_scale"].double()).double()
    with torch.no_grad():
        got = attention.linear_proj(x)
    y = (got[0] if isinstance(got, tuple) else got).double()
    inputs = rounded(attention.linear_proj.quantizers["input"], x).double()
    assert (y - inputs @ weight.t()).norm() < 3e-3 * y.norm()
    assert (inputs - x.double()).norm() > 1e-3 * inputs.norm() and values[f"{name}weight"].shape == weight.shape
    if "static" not in precision:
        return
    given = [tensors[f"model.layers.0.self_attn.{part}_proj.input_scale"].float() for part in "qkv"]
    found = attention.linear_qkv.quantizers["input"]
    if found.zero is None:
        assert float(found.scale_inv) == float(torch.stack(given).amax())
        return
    zeros = [tensors[f"model.layers.0.self_attn.{part}_proj.input_zero_point"].int() for part in "qkv"]
    low = min(float(scale * (-128 - zero)) for scale, zero in zip(given, zeros, strict=True))
    high = max(float(scale * (127 - zero)) for scale, zero in zip(given, zeros, strict=True))
    assert float(found.scale_inv) == pytest.approx((high - low) / 255) and float(found.zero) == int(
        -128 - low / ((high - low) / 255)
    )


def test_the_card_of_codes_that_are_as_before_names_them(tmp_path: Path) -> None:
    for spelling, inputs in (
        ("w8a8", "made by the engine"),
        ("w8a16", "not quantized"),
        ("w8a8-static", "as they were"),
    ):
        int8_directories.make(tmp_path / spelling, SPELLINGS[spelling])
        convert(tmp_path / spelling, tmp_path / f"{spelling}-bf16", "hf")
        convert(tmp_path / f"{spelling}-bf16", tmp_path / f"{spelling}-back", "hf", precision="fp8")
        card = (tmp_path / f"{spelling}-back" / "README.md").read_text()
        assert re.search(r"A `llama` in INT8, for", card) and inputs in card
