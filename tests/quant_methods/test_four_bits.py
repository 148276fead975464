"""NVFP4, MXFP4 and INT4 in Hugging Face directories: decoded, compared, and brought back to the very codes."""

import json
from collections.abc import Callable
from pathlib import Path

import conversions
import four_bit_directories
import pytest
import torch
import training
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from soaking import few, in_soak
from torch import Tensor

from precisionctl.checkpoints.hf_directory import encodings_file
from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.errors import DamagedCheckpoint
from precisionctl.evaluate import evaluate
from precisionctl.fp8 import sidecar
from precisionctl.fp8.delayed_scaling import recorded_amax
from precisionctl.param import Parallelism
from precisionctl.reports.inspect import describe
from precisionctl.verify.compare import compare

SPELLINGS = [*four_bit_directories.SPELLINGS]
UP, GATE = "model.layers.0.mlp.up_proj.", "model.layers.0.mlp.gate_proj."
QUERY = "model.layers.0.self_attn.q_proj."


def stored(directory: Path) -> dict[str, Tensor]:
    return load_file(directory / "model.safetensors")


def save(directory: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape), name
        assert torch.equal(bits(a[name]), bits(b[name])), name


def run(*arguments: object, **options: object) -> list[str]:
    return list(conversions.run(*arguments, workers=1, verify=True, **options).notes)  # type: ignore[arg-type]


@pytest.mark.parametrize("spelling", few(SPELLINGS, *SPELLINGS[::3]))
def test_codes_are_what_a_slow_reader_makes_of_them_and_come_back_from_megatron_unchanged(
    tmp_path: Path, spelling: str
) -> None:
    """In BF16, of random codes under random scales; gate and up cut for two ranks. Negative zeros too."""
    values = four_bit_directories.make(tmp_path / "source", spelling)
    notes = run(tmp_path / "source", tmp_path / "bf16", "hf")
    assert any("`convert --to hf --precision fp8` writes the same codes again" in note for note in notes)
    decoded = stored(tmp_path / "bf16")
    assert len(values) == 7
    for name, expected in values.items():
        assert torch.equal(bits(decoded[name]), bits(expected.bfloat16())), name
    source, bf16 = open_checkpoint(tmp_path / "source"), open_checkpoint(tmp_path / "bf16")
    assert compare(source, bf16).equal
    codes = compare(source, bf16, fp8=True).codes
    assert len(codes) == 7 and not any(code.changed for code in codes) and all(code.idempotent for code in codes)
    run(tmp_path / "source", tmp_path / "megatron", "megatron", parallelism=Parallelism(2))
    notes = run(tmp_path / "megatron", tmp_path / "back", "hf", precision="fp8")
    assert_same(stored(tmp_path / "back"), stored(tmp_path / "source"))
    assert any("7 of 7 weights have the same codes" in note for note in notes)
    config = [json.loads((tmp_path / each / "config.json").read_text()) for each in ("source", "back")]
    assert config[0]["quantization_config"] == config[1]["quantization_config"]


def changed(directory: Path, name: str, change: Callable[[Tensor], Tensor]) -> None:
    """Change one tensor of a directory."""
    tensors = stored(directory)
    tensors[name] = change(tensors[name].clone()).contiguous()
    save(directory, tensors)


def differing(a: Path, b: Path) -> dict[str, int]:
    """How many bytes differ in the tensors of two directories, where some do."""
    left, right = stored(a), stored(b)
    assert left.keys() == right.keys()
    counts = {name: int((bits(left[name]) != bits(right[name])).sum()) for name in left}
    return {name: count for name, count in counts.items() if count}


@pytest.mark.parametrize(
    "spelling", ["ct-nvfp4", "ct-int4-zero-points", *in_soak("ct-mxfp4", "ct-int4-32", "modelopt-nvfp4")]
)
def test_a_group_that_was_trained_gets_a_new_scale_and_the_others_keep_their_codes(
    tmp_path: Path, spelling: str
) -> None:
    """One value of the second row has doubled. Only that group has other codes, and another scale."""
    values = four_bit_directories.make(tmp_path / "source", spelling)
    spelled = four_bit_directories.SPELLINGS[spelling]
    group, name = spelled.group or 0, f"{UP}weight"
    run(tmp_path / "source", tmp_path / "bf16", "hf")
    largest = values[name][1, :group].abs().max()

    def trained(tensor: Tensor) -> Tensor:
        tensor[1, 0] = 0.7 * largest
        return tensor

    changed(tmp_path / "bf16", name, trained)
    notes = run(tmp_path / "bf16", tmp_path / "back", "hf", precision="fp8")
    assert any(note.startswith("1 have blocks that are encoded again") for note in notes)
    found = differing(tmp_path / "source", tmp_path / "back")
    assert found.keys() <= {f"{UP}{end}" for end in ("weight" + spelled.suffix, spelled.scale, "weight_zero_point")}
    codes = [stored(tmp_path / each)[f"{UP}weight{spelled.suffix}"].view(torch.uint8) for each in ("source", "back")]
    elsewhere = torch.ones(codes[0].shape, dtype=torch.bool)
    elsewhere[1, : group // 2] = False
    assert torch.equal(codes[0][elsewhere], codes[1][elsewhere])
    run(tmp_path / "back", tmp_path / "again", "hf")
    again = stored(tmp_path / "again")[name].float()
    assert again[1, 0] == pytest.approx(float(0.7 * largest), rel=0.3)
    step = float(again[1, :group].abs().max()) / 4
    assert (again[1, 1:group] - values[name][1, 1:group]).abs().max() <= step


def with_large_row(tensor: Tensor) -> Tensor:
    tensor[3] = 1000.0
    return tensor


@pytest.mark.parametrize("spelling", ["ct-nvfp4", *in_soak("modelopt-nvfp4")])
def test_a_fused_group_that_outgrows_its_global_scale_gets_one_in_common(tmp_path: Path, spelling: str) -> None:
    """Gate and up share a global scale in the source, q and k do not; one value of up and of q is very large now. Gate
    gets the new one too, and k keeps its own, with its codes."""
    four_bit_directories.make(tmp_path / "source", spelling)
    spelled = four_bit_directories.SPELLINGS[spelling]
    kind = spelled.divisor or spelled.multiplier
    changed(tmp_path / "source", f"{UP}{kind}", lambda _: stored(tmp_path / "source")[f"{GATE}{kind}"])
    run(tmp_path / "source", tmp_path / "bf16", "hf")
    for module in (UP, QUERY):
        changed(tmp_path / "bf16", f"{module}weight", with_large_row)
    run(tmp_path / "bf16", tmp_path / "back", "hf", precision="fp8")
    found = stored(tmp_path / "back")
    assert torch.equal(found[f"{UP}{kind}"], found[f"{GATE}{kind}"])
    expected = 2688 / 1000 if spelled.divisor else 1000 / 2688
    assert float(found[f"{UP}{kind}"]) == pytest.approx(expected)
    assert not [name for name in differing(tmp_path / "source", tmp_path / "back") if "k_proj" in name]
    assert float(found[f"{QUERY}{kind}"]) == pytest.approx(expected)
    run(tmp_path / "back", tmp_path / "again", "hf")
    assert bool((stored(tmp_path / "again")[f"{UP}weight"][3] == 1000).all())


@pytest.mark.parametrize("spelling", few(SPELLINGS, *SPELLINGS[::3]))
def test_one_bit_that_was_flipped_anywhere_is_found(tmp_path: Path, spelling: str) -> None:
    """The highest bit of the last byte of codes, of scales, of global scales, of zero points and of an input's scale:
    each is a difference, of that weight or that scale alone."""
    four_bit_directories.make(tmp_path / "source", spelling, quantized=lambda name: "up_proj" in name)
    four_bit_directories.make(tmp_path / "other", spelling, quantized=lambda name: "up_proj" in name)
    tensors = stored(tmp_path / "source")
    for name in tensors:
        if not name.startswith(UP) or name.endswith("weight_shape"):
            continue
        flipped = bits(tensors[name]).clone()
        flipped[-1] ^= 8 if "scale" in name else 128
        save(tmp_path / "other", tensors | {name: flipped.view(tensors[name].dtype).view(tensors[name].shape)})
        found = compare(open_checkpoint(tmp_path / "source"), open_checkpoint(tmp_path / "other"))
        if "input" in name:
            assert [name for name in found.settings if "up_proj" in name]
        else:
            assert [each.name for each in found.tensors if not each.equal] == [f"{UP}weight"]


def test_codes_of_several_formats_stand_side_by_side(tmp_path: Path) -> None:
    """NVFP4 in the attention and FP8 with a scale for each channel in the MLP, as two config groups say."""
    four_bit_directories.make(tmp_path / "source", "ct-nvfp4", quantized=lambda name: "self_attn" in name)
    tensors, path = stored(tmp_path / "source"), tmp_path / "source" / "config.json"
    for part in ("gate", "up", "down"):
        name = f"model.layers.0.mlp.{part}_proj.weight"
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = torch.rand(len(tensors[name]), 1) + 0.1
    save(tmp_path / "source", tensors)
    config = json.loads(path.read_text())
    channels = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
    config["quantization_config"]["config_groups"]["group_1"] = {"weights": channels, "input_activations": None}
    path.write_text(json.dumps(config))
    described = describe(open_checkpoint(tmp_path / "source"))
    assert described["coded"]["formats"] == {"NVFP4": 4, "FP8": 3}
    assert described["precision"] == "float4_e2m1fn_x2 and float8_e4m3fn codes"
    run(tmp_path / "source", tmp_path / "megatron", "megatron")
    run(tmp_path / "megatron", tmp_path / "back", "hf", precision="fp8")
    assert_same(stored(tmp_path / "back"), tensors)


def test_four_bit_experts_stand_beside_fp8_blocks(tmp_path: Path) -> None:
    """As in DeepSeek-V4: words of signed bytes with E8M0 scales for 32, and 128 x 128 blocks with E8M0 scales."""
    experts = four_bit_directories.make(
        tmp_path / "source",
        "fp8-fp4-experts",
        "qwen3-moe",
        quantized=lambda name: ".experts." in name,
        num_hidden_layers=2,
        moe_intermediate_size=32,
        hidden_size=64,
        num_experts=2,
        num_experts_per_tok=1,
    )
    tensors = stored(tmp_path / "source")
    for name in [name for name in tensors if "self_attn" in name and "proj" in name]:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        grid = [-(-size // 128) for size in tensors[name].shape]
        tensors[f"{name}_scale_inv"] = torch.full(grid, 120, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    save(tmp_path / "source", tensors)
    run(tmp_path / "source", tmp_path / "bf16", "hf")
    decoded = stored(tmp_path / "bf16")
    assert experts and all(torch.equal(decoded[name], values.bfloat16()) for name, values in experts.items())
    run(tmp_path / "bf16", tmp_path / "back", "hf", precision="fp8")
    assert_same(stored(tmp_path / "back"), tensors)


@pytest.mark.parametrize(("spelling", "scale"), [("ct-nvfp4", 2688 / 7), ("modelopt-nvfp4", 7 / 2688)])
def test_fixed_scales_of_inputs_are_recorded_amaxes_and_one_recorded_since_gets_its_own(
    tmp_path: Path, spelling: str, scale: float
) -> None:
    """An amax is 2688 over a divisor, or 2688 times a multiplier, the largest of q, k and v."""
    four_bit_directories.make(tmp_path / "source", spelling)
    kind, tensors = four_bit_directories.SPELLINGS[spelling].input, stored(tmp_path / "source")
    run(tmp_path / "source", tmp_path / "bf16", "hf")
    states = sidecar.read(tmp_path / "bf16" / sidecar.RELATIVE)
    parts = [tensors[f"model.layers.0.self_attn.{part}_proj.{kind}"].reshape(()) for part in "qkv"]
    amaxes = [2688 / part if spelling == "ct-nvfp4" else 2688 * part for part in parts]
    found = states.modules["decoder.layers.0.self_attention.linear_qkv"].roles["input"]
    assert float(recorded_amax(found, "input", states.recipe)) == pytest.approx(float(max(amaxes)))
    states.modules["decoder.layers.0.mlp.linear_fc2"].roles["input"].amax_history[-1] = 7.0
    sidecar.write(tmp_path / "bf16" / sidecar.RELATIVE, states)
    run(tmp_path / "bf16", tmp_path / "back", "hf", precision="fp8")
    after, name = stored(tmp_path / "back"), f"model.layers.0.mlp.down_proj.{kind}"
    assert float(after[name]) == pytest.approx(scale)
    assert_same(after | {name: tensors[name]}, tensors)


def test_training_on_from_four_bits_begins_with_what_they_decode_to_and_inspect_and_eval_take_them(
    tmp_path: Path,
) -> None:
    """After a step of `resume`, every weight has another scale, of the same format. `eval` tells that only weights are
    of four bits: inputs meet them in BF16. It reads a model as `resume` does."""
    training.make_text(tmp_path / "text.txt")
    source = training.make_source(tmp_path / "made")
    four_bit_directories.make(tmp_path / "source", "ct-nvfp4a16", vocab_size=80)
    for file in source.glob("tokenizer*"):
        (tmp_path / "source" / file.name).write_bytes(file.read_bytes())
    run(tmp_path / "source", tmp_path / "fp32", "hf", precision="fp32")
    changes = {"train__steps": 1}
    made = training.settings(tmp_path / "source", tmp_path / "text.txt", tmp_path / "run-source", **changes)
    assert len(training.run(made)[2]) == 1
    notes = run(tmp_path / "run-source", tmp_path / "back", "hf", precision="fp8")
    assert any("7 have blocks that are encoded again" in note for note in notes)
    assert stored(tmp_path / "back").keys() == stored(tmp_path / "source").keys()
    found = [
        evaluate(open_checkpoint(tmp_path / each), tmp_path / "text.txt", sequence_length=32)
        for each in ("source", "fp32")
    ]
    assert found[0].precision == "bfloat16, with weights from NVFP4"
    assert found[0].loss == pytest.approx(found[1].loss, rel=1e-3)
    described = describe(open_checkpoint(tmp_path / "source"))
    words = 7 * 128 * 128 // 2 - 2 * 64 * 128 // 2
    assert described["bytes_by_dtype"]["float4_e2m1fn_x2"] == words
    assert described["coded"]["formats"] == {"NVFP4": 7} and described["coded"]["static_input_scales"] == 0


@pytest.mark.parametrize(
    ("spelling", "codes", "inputs"),
    [
        ("ct-nvfp4", "NVFP4", "as they were"),
        ("ct-int4-32", "INT4", "Inputs are not quantized."),
        ("modelopt-mxfp4", "MXFP4", "Input scales are made by the engine."),
    ],
)
def test_codes_that_are_as_before_are_named_by_a_note_and_by_the_card(
    tmp_path: Path, spelling: str, codes: str, inputs: str
) -> None:
    four_bit_directories.make(tmp_path / "source", spelling)
    run(tmp_path / "source", tmp_path / "bf16", "hf")
    notes = run(tmp_path / "bf16", tmp_path / "back", "hf", precision="fp8")
    assert any(note.startswith(f"Weights become {codes} again, as they were") for note in notes)
    card = (tmp_path / "back" / "README.md").read_text()
    assert f"A `llama` in {codes}, for" in card and f"## What is {codes}" in card and f"- {codes.lower()}\n" in card
    assert inputs in card and "fp8" not in card.lower().replace("--precision fp8", "")


@pytest.fixture(scope="module")
def decoded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """BF16 values, with encodings of one weight of INT4 with zero points beside them."""
    place = tmp_path_factory.mktemp("decoded")
    four_bit_directories.make(place / "source", "ct-int4-zero-points", quantized=lambda name: name == f"{UP}weight")
    run(place / "source", place / "bf16", "hf")
    return place / "bf16" / encodings_file.RELATIVE


SOUND = ["INT4", "INT4", "I32", "_packed", None]


@pytest.mark.parametrize(
    "said",
    [
        *({"packed": SOUND[:at] + [other] + SOUND[at + 1 :]} for at, other in enumerate(["X", "E2M1", "I64"])),
        *({"packed": [*SOUND[:3], suffix, None]} for suffix in ("/../../x", "", "_scale", 3)),
        *({"packed": other} for other in ([*SOUND[:2], "F32", *SOUND[3:]], [*SOUND[:4], 16], SOUND[:4], 3, [SOUND])),
        *({"global_scale": [f"{UP}{name}", True]} for name in ("weight_scale", "weight_shape", "nothing")),
        *({"zero_points": other} for other in (f"{UP}weight_scale", f"{UP}weight_shape", 5)),
        *({"weight_shape": other} for other in (f"{UP}weight_scale", f"{UP}weight_zero_point")),
        {"block": [1, 96]},
        {"input_scale_inv": f"{UP}weight_shape"},
    ],
)
def test_encodings_of_codes_that_no_tool_packs_so_are_damage(
    decoded: Path, tmp_path: Path, said: dict[str, object]
) -> None:
    with safe_open(decoded, "pt") as file:
        fields = json.loads(file.metadata()["precisionctl"])
    assert fields["weights"][f"{UP}weight"]["packed"] == SOUND
    fields["weights"][f"{UP}weight"] |= said
    (tmp_path / encodings_file.RELATIVE).parent.mkdir()
    save_file(load_file(decoded), tmp_path / encodings_file.RELATIVE, metadata={"precisionctl": json.dumps(fields)})
    with pytest.raises(DamagedCheckpoint):
        encodings_file.find(tmp_path)


@pytest.mark.parametrize("value", [torch.inf, torch.nan, -1.0, 0.0])
def test_a_divisor_of_inputs_that_is_none_is_damage(tmp_path: Path, value: float) -> None:
    """An infinite one would be an amax of zero."""
    four_bit_directories.make(tmp_path, "ct-nvfp4", quantized=lambda name: name == f"{UP}weight")
    changed(tmp_path, f"{UP}input_global_scale", lambda tensor: tensor.fill_(value))
    encodings = HuggingFaceReader(tmp_path).weight_encodings
    assert encodings is not None
    with pytest.raises(DamagedCheckpoint, match="input_global_scale holds a scale"):
        encodings.input_amax(f"{UP}weight")
