"""The way back: what was FP8 becomes the same codes again, whatever it has been in between."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import conversions
import fp8_directories
import pytest
import torch
import training
from conversions import carry_out
from safetensors.torch import load_file, save_file
from soaking import few, in_soak

from precisionctl.checkpoints.chunks import read_tensor, write_rows
from precisionctl.checkpoints.hf_directory import encodings_file
from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import PrecisionChoice, Request
from precisionctl.conversion import buffers
from precisionctl.conversion.command import execute
from precisionctl.errors import DamagedCheckpoint, MappingError, UnknownFormat
from precisionctl.evaluate import evaluate
from precisionctl.fp8 import sidecar
from precisionctl.fp8.delayed_scaling import recorded_amax
from precisionctl.fp8.state import DelayedScaling
from precisionctl.param import Parallelism
from precisionctl.precision import PRESETS
from precisionctl.quant_methods import compressed_tensors
from precisionctl.reports.inspect import describe

run = conversions.run

EACH = pytest.mark.parametrize("spelling", few(fp8_directories.SPELLINGS, *fp8_directories.KINDS.values()))
UP = "model.layers.0.mlp.up_proj.weight"


def stored(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype
        and a[name].shape == b[name].shape
        and torch.equal(a[name].reshape(-1).view(torch.uint8), b[name].reshape(-1).view(torch.uint8))
        for name in a
    )


def quantization(directory: Path) -> object:
    return json.loads((directory / "config.json").read_text())["quantization_config"]


@EACH
def test_by_way_of_megatron_every_code_and_scale_comes_back(tmp_path: Path, spelling: str) -> None:
    """Random scales that no amax would give, ragged blocks, gate and up cut for two ranks: codes, scales of weights and
    inputs, names, shapes, dtypes and config are those of the source."""
    fp8_directories.make(tmp_path / "fp8", spelling, **fp8_directories.RAGGED)
    run(tmp_path / "fp8", tmp_path / "megatron", "megatron", parallelism=Parallelism(2))
    work = run(tmp_path / "megatron", tmp_path / "back", "hf", precision="fp8")
    assert same(stored(tmp_path / "back"), stored(tmp_path / "fp8"))
    assert quantization(tmp_path / "back") == quantization(tmp_path / "fp8")
    assert any("14 of 14 weights have the same codes" in note for note in work.notes)


def test_every_way_says_which_files_are_missing(tmp_path: Path) -> None:
    fp8_directories.make(tmp_path / "fp8", "fp8-block", **fp8_directories.RAGGED)
    work = run(tmp_path / "fp8", tmp_path / "megatron", "megatron")
    missing = "so in the result: tokenizer. --reference HF_DIR takes them from a Hugging Face directory."
    assert any(note.endswith(missing) for note in work.notes)  # which `resume` and `eval` need
    work = run(tmp_path / "fp8", tmp_path / "referred", "megatron", reference=tmp_path / "fp8")
    missing = f"Missing in the source, in the reference {tmp_path / 'fp8'}, and so in the result: tokenizer."
    assert missing in work.notes
    resharded = run(tmp_path / "megatron", tmp_path / "resharded", "megatron", parallelism=Parallelism(2))
    assert not any("tokenizer" in note for note in resharded.notes)  # it has its own beside the run, or none
    for precision in ("keep", "bf16", "fp8"):
        work = run(tmp_path / "megatron", tmp_path / f"{precision} again", "hf", precision=precision)
        assert any("Missing in the source, and so in the result: tokenizer" in note for note in work.notes)


@pytest.mark.parametrize("spelling", ["fp8-block", *in_soak("compressed-tensor", "modelopt-channel")])
def test_by_way_of_hugging_face_in_bf16_and_in_fp32(tmp_path: Path, spelling: str) -> None:
    """And of BF16 that was made FP32 then."""
    fp8_directories.make(tmp_path / "fp8", spelling, **fp8_directories.RAGGED)
    run(tmp_path / "fp8", tmp_path / "between", "hf")
    run(tmp_path / "between", tmp_path / "wider", "hf", precision="fp32")
    run(tmp_path / "wider", tmp_path / "wider-back", "hf", precision="fp8")
    assert same(stored(tmp_path / "wider-back"), stored(tmp_path / "fp8"))
    for precision in ("bf16", "fp32"):
        run(tmp_path / "fp8", tmp_path / precision, "hf", precision=precision)
        run(tmp_path / precision, tmp_path / f"{precision}-back", "hf", precision="fp8")
        assert same(stored(tmp_path / f"{precision}-back"), stored(tmp_path / "fp8"))
    assert stored(tmp_path / "fp32")[UP].dtype == torch.float32


def test_fp8_to_fp8_is_the_same_directory(tmp_path: Path) -> None:
    fp8_directories.make(tmp_path / "fp8", "fp8-ue8m0", **fp8_directories.RAGGED)
    run(tmp_path / "fp8", tmp_path / "again", "hf", precision="fp8")
    assert same(stored(tmp_path / "again"), stored(tmp_path / "fp8"))


@pytest.mark.parametrize("family", ["deepseek-v3", *in_soak("qwen3-moe", "gpt2", "mixtral", "phi3")])
def test_other_families_come_back_too(tmp_path: Path, family: str) -> None:
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64} if family == "deepseek-v3" else {}
    fp8_directories.make(tmp_path / "fp8", "fp8-block", family, **sizes)
    run(tmp_path / "fp8", tmp_path / "megatron", "megatron")
    run(tmp_path / "megatron", tmp_path / "back", "hf", precision="fp8")
    assert same(stored(tmp_path / "back"), stored(tmp_path / "fp8"))


@pytest.mark.soak
def test_the_bytes_do_not_depend_on_the_number_of_workers(tmp_path: Path) -> None:
    fp8_directories.make(tmp_path / "fp8", "compressed-block", **fp8_directories.RAGGED)
    for workers in (1, 2):
        run(tmp_path / "fp8", tmp_path / f"megatron{workers}", "megatron", workers=workers)
        run(tmp_path / "megatron1", tmp_path / f"back{workers}", "hf", workers=workers, precision="fp8")
    kept = [(tmp_path / f"megatron{w}" / "release" / encodings_file.RELATIVE).read_bytes() for w in (1, 2)]
    made = [(tmp_path / f"back{w}" / "model.safetensors").read_bytes() for w in (1, 2)]
    assert kept[0] == kept[1] and made[0] == made[1]


@pytest.mark.parametrize("spelling", ["fp8-block", *in_soak("compressed-tensor", "compressed-mxfp8")])
def test_pieces_of_fewer_rows_than_a_block_make_the_same_codes(
    tmp_path: Path, spelling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some blocks get new scales, most keep theirs: in one piece, and in pieces of 7 rows."""
    fp8_directories.make(tmp_path / "fp8", spelling, **fp8_directories.RAGGED)
    run(tmp_path / "fp8", tmp_path / "bf16", "hf")
    values = stored(tmp_path / "bf16")
    values[UP][130:140] *= 1.3
    save_file(values, tmp_path / "bf16" / "model.safetensors", metadata={"format": "pt"})
    notes = []
    for rows in (192, 7):
        monkeypatch.setattr(buffers, "BUFFER", 4 * 192 * rows)
        notes.append(run(tmp_path / "bf16", tmp_path / f"{rows}", "hf", precision="fp8").notes)
    assert same(stored(tmp_path / "7"), stored(tmp_path / "192")) and notes[0] == notes[1]
    assert any("13 of 14 weights have the same codes" in note for note in notes[0])


@pytest.mark.parametrize(
    "spelling", ["fp8-block", "modelopt-tensor", *in_soak("fp8-ue8m0", "compressed-channel", "compressed-mxfp8")]
)
def test_a_block_that_was_trained_gets_a_new_scale_and_the_others_keep_theirs(tmp_path: Path, spelling: str) -> None:
    made = fp8_directories.make(tmp_path / "fp8", spelling, **fp8_directories.RAGGED)[UP]
    run(tmp_path / "fp8", tmp_path / "bf16", "hf")
    values = stored(tmp_path / "bf16")
    values[UP][130, 5] = 100.0  # row 130 is in the second row of blocks of 128
    save_file(values, tmp_path / "bf16" / "model.safetensors", metadata={"format": "pt"})
    work = run(tmp_path / "bf16", tmp_path / "back", "hf", precision="fp8")
    before, after = stored(tmp_path / "fp8"), stored(tmp_path / "back")
    reader = HuggingFaceReader(tmp_path / "back")
    old, new = HuggingFaceReader(tmp_path / "fp8").encodings[UP], reader.encodings[UP]
    high, wide = made.block
    place = (130 // high, 5 // wide)
    others = torch.ones(new.scale_inv.shape, dtype=torch.bool)
    others[place] = False
    assert torch.equal(new.scale_inv.float()[others], old.scale_inv.float()[others])
    inside = values[UP][place[0] * high :][:high, place[1] * wide :][:, :wide].float()
    scale = float(new.scale_inv.float()[place])
    assert 100 / 448 * (1 - 2**-8) <= scale <= 2 * 100 / 448
    codes = (inside / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    found = after[UP].view(torch.uint8)[place[0] * high :][:high, place[1] * wide :][:, :wide]
    assert torch.equal(found, codes.view(torch.uint8))
    changed = int((after[UP].view(torch.uint8) != before[UP].view(torch.uint8)).sum())
    (note,) = [note for note in work.notes if "codes are others than they would be" in note]
    # The changed value itself had no code under the old scale but the largest.
    assert abs(int(note.partition("new scales ")[2].split(" of ")[0].replace(",", "")) - changed) <= 1
    assert same({k: v for k, v in before.items() if UP not in k}, {k: v for k, v in after.items() if UP not in k})


def test_fused_experts_come_back_under_the_names_of_their_class(tmp_path: Path) -> None:
    """Gate and up of 48 rows have one block in the fused tensor, and one each when they are apart: 0 codes change."""
    fp8_directories.make(tmp_path / "fp8", "fp8-block", "qwen3-moe")
    file = tmp_path / "fp8" / "model.safetensors"
    tensors, experts = load_file(file), "model.layers.1.mlp.experts"
    fused: list[torch.Tensor] = []
    down: list[torch.Tensor] = []
    for expert in range(8):
        parts = {
            part: tensors.pop(f"{experts}.{expert}.{part}_proj.weight").view(torch.uint8)
            for part in ("gate", "up", "down")
        }
        fused.append(torch.cat([parts["gate"], parts["up"]]))
        down.append(parts["down"])
        for part in ("gate", "up", "down"):
            del tensors[f"{experts}.{expert}.{part}_proj.weight_scale_inv"]
    generator = torch.Generator().manual_seed(3)
    for part, found in {"gate_up_proj": fused, "down_proj": down}.items():
        tensors[f"{experts}.{part}"] = torch.stack(found).view(torch.float8_e4m3fn)
        tensors[f"{experts}.{part}_scale_inv"] = fp8_directories.random_scales((8, 1, 1), generator, torch.float32)
    save_file(tensors, file, metadata={"format": "pt"})
    run(tmp_path / "fp8", tmp_path / "megatron", "megatron")
    work = run(tmp_path / "megatron", tmp_path / "back", "hf", precision="fp8")
    assert not any("codes differ" in note for note in work.notes)
    back = stored(tmp_path / "back")
    for expert in range(8):
        for number, part in enumerate(("gate", "up")):
            codes = back[f"{experts}.{expert}.{part}_proj.weight"].view(torch.uint8)
            assert torch.equal(codes, fused[expert][48 * number : 48 * (number + 1)])
            scale = back[f"{experts}.{expert}.{part}_proj.weight_scale_inv"]
            assert torch.equal(scale, tensors[f"{experts}.gate_up_proj_scale_inv"][expert])


def test_the_encodings_travel_through_any_number_of_conversions(tmp_path: Path) -> None:
    fp8_directories.make(tmp_path / "fp8", "fp8-block-bf16")
    run(tmp_path / "fp8", tmp_path / "1", "megatron", parallelism=Parallelism(2))
    run(tmp_path / "1", tmp_path / "2", "megatron", container="torch", precision="bf16")
    run(tmp_path / "2", tmp_path / "3", "hf")
    run(tmp_path / "3", tmp_path / "4", "hf", precision="fp8")
    assert same(stored(tmp_path / "4"), stored(tmp_path / "fp8"))


def test_encodings_are_dropped_with_their_fixed_scales(tmp_path: Path) -> None:
    fp8_directories.make(tmp_path / "fp8", "modelopt-tensor")
    run(tmp_path / "fp8", tmp_path / "hf", "hf", drop_encodings=True)
    assert encodings_file.find(tmp_path / "hf") is None and sidecar.find(tmp_path / "hf") is None


@pytest.mark.parametrize("precision", ["fp8", *in_soak("bf16")])
def test_dropping_the_fp8_state_keeps_the_encodings(tmp_path: Path, precision: PrecisionChoice) -> None:
    fp8_directories.make(tmp_path / "fp8", "modelopt-tensor")
    run(tmp_path / "fp8", tmp_path / "out", "megatron", precision=precision, drop_fp8_state=True)
    states = open_checkpoint(tmp_path / "out").fp8
    roles = [each for state in states.modules.values() for each in state.roles.items()] if states else []
    assert {name for name, role in roles if role.recorded} == ({"weight"} if precision == "fp8" else set())
    run(tmp_path / "out", tmp_path / "back", "hf", precision="fp8")
    assert same(stored(tmp_path / "back"), stored(tmp_path / "fp8"))


def test_calibrated_input_scales_become_state_that_waits_in_the_sidecar(tmp_path: Path) -> None:
    fp8_directories.make(tmp_path / "fp8", "modelopt-tensor")
    tensors = stored(tmp_path / "fp8")
    run(tmp_path / "fp8", tmp_path / "kept", "megatron")
    reader = open_checkpoint(tmp_path / "kept")
    states = sidecar.find(tmp_path / "kept" / "release")
    assert states is not None and reader.fp8 is not None and states.producer == "input scales of modelopt"
    parts = [tensors[f"model.layers.1.self_attn.{part}_proj.input_scale"] for part in "qkv"]
    state = states.modules["decoder.layers.1.self_attention.linear_qkv"]
    assert recorded_amax(state.roles["input"], "input", states.recipe) == torch.stack(parts).max() * 448
    assert not state.roles["weight"].recorded and not state.roles["grad_output"].recorded
    run(tmp_path / "fp8", tmp_path / "live", "megatron", precision="fp8")
    assert sidecar.find(tmp_path / "live" / "release") is None
    live = open_checkpoint(tmp_path / "live").fp8
    assert live is not None
    assert live.modules["decoder.layers.1.self_attention.linear_qkv"].roles["weight"].recorded


@pytest.mark.parametrize("family", ["mixtral", *in_soak("llama-3")])
def test_input_scales_come_back_from_histories_of_one_row(tmp_path: Path, family: str) -> None:
    """Megatron's default: the amax is in the scale alone, two roundings away. Parts of a group keep their scales."""
    fp8_directories.make(tmp_path / "fp8", "fp8-tensor-vllm", family)
    one_row = replace(
        PRESETS["fp8-delayed"], delayed=DelayedScaling(amax_history_len=1, amax_compute_algo="most_recent")
    )
    run(tmp_path / "fp8", tmp_path / "megatron", "megatron", precision="fp8", recipe=one_row)
    run(tmp_path / "megatron", tmp_path / "longer", "megatron", precision="fp8", recipe=PRESETS["fp8-delayed"])
    for source in ("megatron", "longer"):
        run(tmp_path / source, tmp_path / f"{source}-back", "hf", precision="fp8")
        assert same(stored(tmp_path / f"{source}-back"), stored(tmp_path / "fp8"))


def test_an_input_that_was_recorded_since_gets_its_own_scale(tmp_path: Path) -> None:
    fp8_directories.make(tmp_path / "fp8", "modelopt-tensor")
    run(tmp_path / "fp8", tmp_path / "bf16", "hf")
    path = tmp_path / "bf16" / sidecar.RELATIVE
    states = sidecar.read(path)
    state = states.modules["decoder.layers.0.mlp.linear_fc2"].roles["input"]
    state.amax_history[-1] = 7.0
    sidecar.write(path, states)
    run(tmp_path / "bf16", tmp_path / "back", "hf", precision="fp8")
    before, after = stored(tmp_path / "fp8"), stored(tmp_path / "back")
    name = "model.layers.0.mlp.down_proj.input_scale"
    assert after.pop(name) == 7.0 / 448
    del before[name]
    assert same(after, before)


def test_scales_of_a_kv_cache_come_back(tmp_path: Path) -> None:
    fp8_directories.make(tmp_path / "fp8", "compressed-tensor")
    tensors = stored(tmp_path / "fp8")
    tensors["model.layers.0.self_attn.k_scale"] = torch.tensor([0.25], dtype=torch.bfloat16)
    save_file(tensors, tmp_path / "fp8" / "model.safetensors", metadata={"format": "pt"})
    run(tmp_path / "fp8", tmp_path / "megatron", "megatron")
    run(tmp_path / "megatron", tmp_path / "back", "hf", precision="fp8")
    assert same(stored(tmp_path / "back"), tensors)


def test_an_export_keeps_codes_where_its_scales_can_be_the_old_ones(tmp_path: Path) -> None:
    """Per channel to per channel, in another spelling: the codes are the same."""
    fp8_directories.make(tmp_path / "fp8", "modelopt-channel")
    run(tmp_path / "fp8", tmp_path / "bf16", "hf")
    execute(plan_command(Request.export(tmp_path / "bf16", tmp_path / "out", "vllm", "dynamic")))
    before, after = stored(tmp_path / "fp8"), stored(tmp_path / "out")
    codes = [name for name, values in before.items() if values.dtype == torch.float8_e4m3fn]
    assert len(codes) == 14
    for name in codes:
        assert torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8))
        assert torch.equal(before[f"{name}_scale"], after[f"{name}_scale"].flatten())


def test_weights_that_an_export_leaves_in_bf16_are_no_codes_again(tmp_path: Path) -> None:
    """Half of the layers stay in BF16: of the other seven linears all keep their codes, and it says seven."""
    fp8_directories.make(tmp_path / "fp8", "modelopt-channel")
    run(tmp_path / "fp8", tmp_path / "bf16", "hf")
    recipe = replace(PRESETS["fp8-delayed"], keep_bf16=("decoder.layers.0.*",))
    work = carry_out(Request.export(tmp_path / "bf16", tmp_path / "out", "vllm", "dynamic", recipe=recipe))
    codes = [name for name, values in stored(tmp_path / "out").items() if values.dtype == torch.float8_e4m3fn]
    assert len(codes) == 7
    assert "7 of 7 weights have the same codes and scales as before." in work.notes


def test_encodings_of_another_model_are_refused(tmp_path: Path) -> None:
    fp8_directories.make(tmp_path / "fp8", "fp8-block")
    run(tmp_path / "fp8", tmp_path / "one", "hf")
    fp8_directories.make(tmp_path / "other-fp8", "fp8-block", intermediate_size=64)
    run(tmp_path / "other-fp8", tmp_path / "two", "hf")
    (tmp_path / "two" / encodings_file.RELATIVE).write_bytes((tmp_path / "one" / encodings_file.RELATIVE).read_bytes())
    with pytest.raises(MappingError, match="which this model does not have"):
        plan_command(Request(tmp_path / "two", tmp_path / "back", "hf", precision="fp8"))


@pytest.fixture(scope="module")
def encodings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of encodings of values that were codes in blocks."""
    room = tmp_path_factory.mktemp("encodings")
    fp8_directories.make(room / "fp8", "fp8-block")
    run(room / "fp8", room / "hf", "hf")
    return room / "hf" / encodings_file.RELATIVE


def edited(file: Path, directory: Path, **fields: object) -> None:
    """Put the file into a directory with other metadata, as somebody with bad intentions could."""
    said = json.loads(encodings_file.read_described(file)[1]["precisionctl"]) | fields
    (directory / encodings_file.RELATIVE).parent.mkdir()
    further = {"two": torch.ones(2), "zeros": torch.zeros(1, 1, dtype=torch.int32)}
    save_file(
        load_file(file) | further, directory / encodings_file.RELATIVE, metadata={"precisionctl": json.dumps(said)}
    )


WEIGHT = {
    "codes": "F8_E4M3",
    "shape": [96, 64],
    "block": [128, 128],
    "scale_inv": f"{UP}_scale_inv",
    "input_scale_inv": None,
}
CONTRADICTORY: list[dict[str, object]] = [
    *({"codes": codes} for codes in ("I64", "BF16", "X", None)),
    *({"shape": shape} for shape in ([0, 64], [-1, 64], [96.0, 64], [True, 64], [1 << 40, 64], 3)),
    *({"block": block} for block in ([0, 1], [1, 0], [1, -1], [1.0, 1], [1, 1 << 40], [1], 128, [1, 1])),
    {"scale_inv": "x"},
    {"input_scale_inv": 3},
    {"input_scale_inv": "two"},
    {"zero_points": "zeros"},
    {"packed": ["NVFP4", "E2M1", "U8", "_packed", None]},
]


@pytest.mark.parametrize(
    "fields",
    [
        {"format_version": 9},
        {"format_version": None},
        {"weights": 3},
        {"quantization_config": 7},
        {"files": 3},
        {"of_weights": 3},
        *({"weights": {UP: WEIGHT | changes}} for changes in CONTRADICTORY),
    ],
    ids=str,
)
def test_encodings_that_contradict_themselves_are_one_error(
    encodings: Path, tmp_path: Path, fields: dict[str, object]
) -> None:
    edited(encodings, tmp_path, **fields)
    with pytest.raises(
        (DamagedCheckpoint, UnknownFormat), match="the encodings make no sense|of another format version"
    ):
        encodings_file.find(tmp_path)


def test_of_encodings_only_what_they_are_known_by_is_read(encodings: Path, tmp_path: Path) -> None:
    edited(encodings, tmp_path, weights={UP: WEIGHT}, files={"config.json": 3, encodings_file.QUANT_CONFIG: "{}"})
    coded = encodings_file.find(tmp_path)
    assert coded is not None and coded.files == {encodings_file.QUANT_CONFIG: b"{}"}
    assert coded.weights.keys() == {UP} and coded.has_fixed_scales  # the tensors that belong to none


def test_encodings_of_codes_that_their_config_does_not_have_are_damage(encodings: Path, tmp_path: Path) -> None:
    shutil.copytree(encodings.parent.parent, tmp_path / "hf", ignore=shutil.ignore_patterns("precisionctl"))
    edited(encodings, tmp_path / "hf", quantization_config=compressed_tensors.config("nvfp4a16", ()))
    with pytest.raises(DamagedCheckpoint, match="codes of .+, and their `quantization_config` has no such format"):
        plan_command(Request(tmp_path / "hf", tmp_path / "back", "hf", precision="fp8"))


def test_encodings_cut_short_are_damage(tmp_path: Path) -> None:
    fp8_directories.make(tmp_path / "fp8", "fp8-block")
    run(tmp_path / "fp8", tmp_path / "hf", "hf")
    path = tmp_path / "hf" / encodings_file.RELATIVE
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(DamagedCheckpoint):
        plan_command(Request(tmp_path / "hf", tmp_path / "back", "hf", precision="fp8"))


def test_one_code_that_was_changed_on_the_way_is_counted(tmp_path: Path) -> None:
    """A value between two codes: the tensor's one scale is made anew, and what that changes is told."""
    fp8_directories.make(tmp_path / "fp8", "modelopt-tensor")
    run(tmp_path / "fp8", tmp_path / "bf16", "hf")
    reader = HuggingFaceReader(tmp_path / "bf16")
    values = read_tensor(reader, UP)
    values[3, 3] *= 1.03125
    write_rows(reader, UP, 0, values)
    work = run(tmp_path / "bf16", tmp_path / "back", "hf", precision="fp8")
    assert any("13 of 14 weights have the same codes" in note for note in work.notes)


@pytest.fixture
def trainable(tmp_path: Path) -> Path:
    """A directory of block-scaled codes with a tokenizer, and text."""
    training.make_text(tmp_path / "text.txt")
    source = training.make_source(tmp_path / "source")
    fp8_directories.make(tmp_path / "fp8", "fp8-block", vocab_size=80, **fp8_directories.RAGGED)
    for file in source.glob("tokenizer*"):
        (tmp_path / "fp8" / file.name).write_bytes(file.read_bytes())
    return tmp_path / "fp8"


@pytest.mark.soak
def test_training_on_from_codes_is_training_on_from_what_they_decode_to(trainable: Path, tmp_path: Path) -> None:
    """In FP32, which masters are: the same losses to the last bit. And the run's checkpoints go back to blocks, trained
    ones with new scales."""
    run(trainable, tmp_path / "fp32", "hf", precision="fp32")
    losses = []
    for source in ("fp8", "fp32"):
        made = training.settings(tmp_path / source, tmp_path / "text.txt", tmp_path / f"run-{source}")
        losses.append(training.run(made)[2])
    assert len(losses[0]) == 6 and losses[0] == losses[1]
    work = run(tmp_path / "run-fp8", tmp_path / "back", "hf", precision="fp8")
    assert quantization(tmp_path / "back") == quantization(trainable)
    assert any("0 of 14 weights have the same codes" in note for note in work.notes)
    assert any("14 have blocks that are encoded again" in note for note in work.notes)


def test_a_run_that_changes_nothing_goes_back_to_the_same_codes(trainable: Path, tmp_path: Path) -> None:
    tensors = stored(trainable)
    for codes in tensors.values():
        if codes.dtype == torch.float8_e4m3fn:  # a zero would become 1e-30, which is a change
            codes.view(torch.uint8)[codes.float() == 0] = 1
    save_file(tensors, trainable / "model.safetensors", metadata={"format": "pt"})
    changes = {"train__steps": 2, "optimizer__lr": 1e-30, "optimizer__weight_decay": 0.0}
    settings = training.settings(trainable, tmp_path / "text.txt", tmp_path / "run", **changes)
    training.run(settings)
    run(tmp_path / "run", tmp_path / "back", "hf", precision="fp8")
    assert same(stored(tmp_path / "back"), stored(trainable))


def test_inspect_and_eval_take_codes(trainable: Path, tmp_path: Path) -> None:
    """Blocks are evaluated as engines compute with them: not as their BF16 directory, but nearly."""
    run(trainable, tmp_path / "bf16", "hf")
    found = [
        evaluate(open_checkpoint(path), tmp_path / "text.txt", sequence_length=32)
        for path in (trainable, tmp_path / "bf16")
    ]
    assert 0 < abs(found[0].loss - found[1].loss) < 0.01 * found[1].loss
    assert found[0].precision == "FP8 codes with dynamic per-128 input scales"
    assert describe(open_checkpoint(trainable))["precision"] == "float8_e4m3fn codes"
