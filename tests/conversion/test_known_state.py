"""Which FP8 state a checkpoint has: the digest of its weights, and what commands make of state of other weights."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import fp8_directories
import in_memory
import pico
import pytest
import torch
from conversions import carry_out, run
from safetensors.torch import load_file, save_file
from soaking import first, in_soak
from training import make_text, run as train, settings

from precisionctl.checkpoints.base import TensorSource
from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion import weights_digest
from precisionctl.conversion.command import PlannedCommand, execute
from precisionctl.conversion.known_state import known_state
from precisionctl.conversion.weights_digest import _digest, digest_weights
from precisionctl.errors import MappingError, MissingFp8State, PrecisionError
from precisionctl.evaluate.stored import load
from precisionctl.fp8 import sidecar
from precisionctl.fp8.state import DelayedScaling, Fp8State, Fp8States
from precisionctl.param import Parallelism
from precisionctl.planning.make_plan import make_plan
from precisionctl.planning.plan import Plan
from precisionctl.readiness.assess import assess
from precisionctl.reports.inspect import describe, tables

# The digest


@pytest.mark.parametrize("family", pico.representing(pico.mixers, most=3))
def test_the_digest_of_the_same_weights_is_the_same_in_every_layout_and_dtype(family: str, tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", family)
    reader = HuggingFaceReader(tmp_path / "hf")
    digest = digest_weights(reader)
    megatron = in_memory.to_megatron(reader, parallelism=Parallelism(tensor=2))  # with a padded vocabulary
    assert digest_weights(megatron) == digest
    assert digest_weights(in_memory.to_hf(megatron)) == digest
    weights = {name: values for name, values in megatron.tensors.items() if values.is_floating_point()}
    rounded = {**megatron.tensors, **{name: values.to(torch.bfloat16) for name, values in weights.items()}}
    assert digest_weights(replace(megatron, tensors=rounded)) == digest


@pytest.mark.parametrize("container", ["torch_dist", *in_soak("torch")])
def test_the_digest_of_the_same_weights_is_the_same_cut_for_any_ranks(container: str, tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "qwen3-moe", dtype=torch.bfloat16)
    digest = digest_weights(open_checkpoint(tmp_path / "hf"))
    sizes = Parallelism(tensor=2, pipeline=2, expert=2)
    run(tmp_path / "hf", tmp_path / "cut", "megatron", container=container, parallelism=sizes)
    run(tmp_path / "cut", tmp_path / "bin", "hf", "fp32", container="bin")
    assert digest_weights(open_checkpoint(tmp_path / "cut")) == digest_weights(open_checkpoint(tmp_path / "bin"))
    assert digest_weights(open_checkpoint(tmp_path / "cut")) == digest


@pytest.mark.parametrize(
    ("family", "sizes"),
    first(
        2,
        [
            ("llama-3", {}),
            ("gpt2", {}),
            ("qwen3-moe", {"num_experts": 3, "mlp_only_layers": []}),
            ("gpt-oss", {}),
            ("deepseek-v3", {"num_hidden_layers": 2, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}),
        ],
    ),
    ids=str,
)
def test_every_tensor_is_in_the_digest(family: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", family, **{"num_hidden_layers": 1, **sizes})
    made = in_memory.with_state(HuggingFaceReader(tmp_path / "hf"))
    digest = digest_weights(made)
    for name, values in made.tensors.items():
        if values.is_floating_point() and not name.endswith("rotary_emb.inv_freq"):
            changed = replace(made, tensors={**made.tensors, name: values * 1.02})
            assert digest_weights(changed) != digest, name


def test_a_rescaled_channel_that_leaves_the_function_as_it_is_changes_the_digest(tmp_path: Path) -> None:
    """Weights on both sides of one hidden channel of the MLP, whichever it is: its row of the first may not be sampled,
    but every column of the second is."""
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    made = in_memory.with_state(HuggingFaceReader(tmp_path / "hf"))
    digest = digest_weights(made)
    up, down = (f"model.layers.1.mlp.{part}_proj.weight" for part in ("up", "down"))
    for channel in range(0, 96, 8):
        tensors = {name: values.clone() for name, values in made.tensors.items()}
        tensors[up][channel] *= 64
        tensors[down][:, channel] /= 64
        assert digest_weights(replace(made, tensors=tensors)) != digest


# State of other weights


def with_state(directory: Path, **settings: object) -> Path:
    """A Hugging Face directory whose state was recorded with its weights."""
    pico.save(directory, dtype=torch.bfloat16, **settings)
    sidecar.write(directory / sidecar.RELATIVE, in_memory.recorded(HuggingFaceReader(directory)))
    return directory


def rescale_norms(directory: Path) -> None:
    """Norms x 16 and the weights after them / 16: the same function to the last bit, with other inputs of linears."""
    file = directory / "model.safetensors"
    stored = load_file(file)
    for name, values in stored.items():
        if "layernorm" in name:
            stored[name] = values * 16
        elif any(part in name for part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")):
            stored[name] = values / 16
    save_file(stored, file, metadata={"format": "pt"})


@pytest.fixture
def edited(tmp_path: Path) -> Path:
    """A checkpoint whose weights were edited after its state was recorded."""
    rescale_norms(with_state(tmp_path / "hf"))
    return tmp_path / "hf"


def export(source: Path, **options: object) -> PlannedCommand:
    return plan_command(Request.export(source, source.parent / "export", target="vllm", **options))  # type: ignore[arg-type]


def calibrated(directory: Path, file: Path) -> Path:
    """State in a file that was recorded with a checkpoint's weights, with other amaxes than its own."""
    reader = open_checkpoint(directory)
    sidecar.write(file, replace(in_memory.recorded(reader, seed=1), producer="precisionctl calibrate"))
    return file


def inputs(states: Fp8States | None) -> dict[str, float]:
    """The newest amax of each module's input."""
    assert states is not None
    return {name: float(state.roles["input"].amax_history[-1]) for name, state in states.modules.items()}


def test_state_in_a_file_that_does_not_say_whose_it_is_becomes_that_of_these_weights(edited: Path) -> None:
    """Whatever it is written to: the user has said so."""
    file = edited.parent / "state"
    sidecar.write(file, replace(sidecar.read(edited / sidecar.RELATIVE), of_weights=None))
    for container in ("hf", "megatron"):
        out = edited.parent / f"in {container}"
        notes = run(edited, out, container, "bf16", fp8_state=file, drop_fp8_state=True).notes
        assert any("taken to be these" in note for note in notes)
        reader = open_checkpoint(out)
        assert known_state(reader, make_plan(reader, "hf").gemms, None).current is not None


def test_state_of_other_weights_is_so_also_where_the_user_has_had_it_written(edited: Path) -> None:
    file = edited.parent / "state"
    sidecar.write(file, sidecar.read(edited / sidecar.RELATIVE))
    notes = run(edited, edited.parent / "out", "megatron", "fp8", fp8_state=file).notes
    assert any("later commands need --fp8-state again" in note for note in notes)
    reader = open_checkpoint(edited.parent / "out")
    assert known_state(reader, make_plan(reader, "hf").gemms, None).current is None


def test_a_default_export_takes_dynamic_and_says_why_in_one_line(edited: Path) -> None:
    notes = export(edited).notes
    assert notes[0].startswith(
        "Scheme dynamic: the checkpoint's FP8 state (iteration 7) was recorded with other weights"
    )
    assert "precisionctl calibrate" in notes[0]


def test_static_is_refused_and_names_modules_and_the_command_that_helps(edited: Path) -> None:
    with pytest.raises(MissingFp8State) as caught:
        export(edited, scheme="static")
    assert "recorded with other weights" in caught.value.what
    assert "8 modules, e.g. `decoder.layers.0.self_attention.linear_qkv`" in caught.value.what
    assert "precisionctl calibrate" in caught.value.do


def test_the_same_weights_get_static_scales_again_after_any_conversion(tmp_path: Path) -> None:
    with_state(tmp_path / "hf")
    run(tmp_path / "hf", tmp_path / "megatron", "megatron", parallelism=Parallelism(tensor=2))
    run(tmp_path / "megatron", tmp_path / "back", "hf", "fp32")
    for source in ("hf", "megatron", "back"):
        assert export(tmp_path / source).notes[0].startswith("Scheme static"), source


def test_an_explicit_file_wins_over_the_checkpoints_own_state_in_every_command(tmp_path: Path) -> None:
    source = with_state(tmp_path / "hf")
    file = calibrated(source, tmp_path / "state")
    wanted = inputs(sidecar.read(file))
    assert wanted != inputs(sidecar.read(source / sidecar.RELATIVE))
    replaced = f"The FP8 state of 8 modules is taken from {file}, not the checkpoint's own (iteration 7)."

    exported = export(source, fp8_state=file, scheme="static")
    execute(exported)
    scales = load_file(tmp_path / "export" / "model.safetensors")
    amax = sidecar.read(file).modules["decoder.layers.0.self_attention.linear_qkv"].roles["input"].amax_history[-1]
    assert scales["model.layers.0.self_attn.q_proj.input_scale"].item() == pytest.approx(float(amax) / 448, rel=1e-6)
    assert replaced in exported.notes

    converted = run(source, tmp_path / "megatron", "megatron", "fp8", fp8_state=file)
    assert inputs(open_checkpoint(tmp_path / "megatron").fp8) == wanted and replaced in converted.notes

    judged = assess(HuggingFaceReader(source), file, lambda total: in_memory.no_progress())
    found = {each.module: each.history.newest for each in judged.roles if each.role == "input" and each.history}
    assert found == wanted and replaced in judged.notes


def test_a_file_helps_where_the_state_is_of_other_weights(edited: Path, tmp_path: Path) -> None:
    file = calibrated(edited, tmp_path / "state")
    work = export(edited, fp8_state=file)
    assert work.notes[0].startswith("Scheme static")
    assert not any("other weights" in note for note in work.notes)


def test_a_file_of_other_weights_is_used_with_a_warning_and_keeps_its_mark(tmp_path: Path) -> None:
    source = with_state(tmp_path / "hf")
    file = calibrated(source, tmp_path / "state")
    rescale_norms(source)
    work = run(source, tmp_path / "megatron", "megatron", "fp8", fp8_state=file)
    assert any(note.startswith("WARNING: the FP8 state in") and "other weights" in note for note in work.notes)
    run(tmp_path / "megatron", tmp_path / "back", "hf")
    assert "Scheme dynamic" in export(tmp_path / "back").notes[0]


@pytest.mark.parametrize("to", ["hf", "megatron"])
@pytest.mark.parametrize("precision", ["keep", *in_soak("bf16")])
def test_convert_carries_state_of_other_weights_with_its_mark(edited: Path, to: str, precision: str) -> None:
    before = sidecar.read(edited / sidecar.RELATIVE)
    out = edited.parent / "out"
    work = run(edited, out, to, precision)
    reader = open_checkpoint(out)
    assert reader.fp8 is not None and reader.fp8.of_weights == before.of_weights
    assert inputs(reader.fp8) == inputs(before)
    assert known_state(reader, make_plan(reader, "megatron").gemms, None).current is None
    assert any("is carried in the sidecar and used for nothing" in note for note in work.notes)


def test_convert_to_fp8_makes_no_state_of_other_weights_live(edited: Path) -> None:
    out = edited.parent / "out"
    work = run(edited, out, "megatron", "fp8")
    states = open_checkpoint(out).fp8
    assert states is not None and not any(inputs(states).values())
    assert all(state.roles["weight"].recorded for state in states.modules.values())
    assert any("recorded with other weights: it stays behind" in note for note in work.notes)


def test_inspect_and_the_readiness_report_say_the_same(edited: Path) -> None:
    reader = open_checkpoint(edited)
    said = describe(reader)
    assert said["fp8"]["of_these_weights"] is False
    assert any(
        "not used: it was recorded with other weights" in str(row) for table in tables(said) for row in table.rows
    )
    judged = assess(reader, None, lambda total: in_memory.no_progress())
    assert judged.verdicts["delayed"].words.startswith("calibrate first (8 modules)")
    assert "was recorded with other weights: nothing uses it" in judged.notes[0]
    assert {finding.kind for health in judged.roles for finding in health.findings} >= {"outdated"}


def test_state_of_another_model_is_refused_and_can_be_left_behind(tmp_path: Path) -> None:
    """In the checkpoint and in a file, of a module that is not there and of experts where there are none."""
    made = in_memory.with_state(HuggingFaceReader(with_state(tmp_path / "hf")))
    gemms = make_plan(made, "megatron").gemms
    first = next(iter(gemms))
    state = made.fp8.modules[first]  # type: ignore[union-attr]
    for name, other, what in (
        ("decoder.layers.9.mlp.linear_fc1", state, "which this model does not have"),
        (first, Fp8State.fresh(4, (3,)), "of 3 experts; this model has one module there"),
    ):
        strange = replace(made.fp8, modules={**made.fp8.modules, name: other})  # type: ignore[union-attr]
        with pytest.raises(MappingError, match=f"{name}`, {what}.*--drop-fp8-state"):
            known_state(replace(made, fp8=strange), gemms, None)
        assert known_state(replace(made, fp8=strange), gemms, None, drop=True).current is None
        sidecar.write(tmp_path / "state", strange)
        with pytest.raises(MappingError, match=f"{name}`, {what}.*Give a file"):
            known_state(made, gemms, tmp_path / "state")


def test_a_file_that_does_not_say_of_which_weights_it_is_is_used_with_a_note(tmp_path: Path) -> None:
    made = in_memory.with_state(HuggingFaceReader(with_state(tmp_path / "hf")))
    gemms = make_plan(made, "megatron").gemms
    sidecar.write(tmp_path / "state", replace(in_memory.recorded(made, seed=1), of_weights=None))
    for reader in (made, replace(made, fp8=None)):
        known = known_state(reader, gemms, tmp_path / "state")
        assert "does not say with which weights" in known.notes[0] and known.current is not None
        assert ("not the checkpoint's own" in known.notes[1]) is (reader is made)
        assert torch.equal(
            known.current.modules[next(iter(gemms))].roles["input"].scale,
            in_memory.recorded(made, seed=1).modules[next(iter(gemms))].roles["input"].scale,
        )


def test_state_without_a_digest_is_of_the_weights_only_in_a_megatron_checkpoint_of_its_iteration(
    tmp_path: Path,
) -> None:
    reader = in_memory.to_megatron(HuggingFaceReader(with_state(tmp_path / "hf")))
    gemms = make_plan(reader, "megatron").gemms
    assert reader.fp8 is not None
    reader.fp8 = replace(reader.fp8, of_weights=None)
    for iteration, used in ((7, True), (8, False), (None, False)):
        assert (known_state(replace(reader, iteration=iteration), gemms, None).current is not None) == used
    hugging_face = replace(in_memory.to_hf(reader), fp8=reader.fp8, iteration=7)
    assert known_state(hugging_face, gemms, None).current is None


def test_a_weight_amax_that_does_not_fit_leaves_no_state_that_is_used_by_itself(tmp_path: Path) -> None:
    """In a Megatron checkpoint whose state says nothing of weights; somebody has edited those."""
    run(with_state(tmp_path / "hf"), tmp_path / "megatron", "megatron", "bf16")
    (place,) = (tmp_path / "megatron").glob(f"*/{sidecar.RELATIVE}")
    states = sidecar.read(place)
    roles = {name: {**state.roles, "weight": state.roles["grad_output"]} for name, state in states.modules.items()}
    modules = {name: Fp8State(each) for name, each in roles.items()}
    sidecar.write(place, replace(states, modules=modules, iteration=None, of_weights=None))
    work = run(tmp_path / "megatron", tmp_path / "again", "megatron")
    assert any("does not fit the weights" in note for note in work.notes)
    run(tmp_path / "again", tmp_path / "back", "hf")
    assert "Scheme dynamic" in export(tmp_path / "back").notes[0]


# State of one step


def test_a_state_of_one_step_is_not_chosen_by_itself_and_says_what_it_rests_on(tmp_path: Path) -> None:
    source = with_state(tmp_path / "hf")
    one = DelayedScaling(amax_history_len=1, amax_compute_algo="most_recent")
    known = known_state(
        HuggingFaceReader(source), make_plan(HuggingFaceReader(source), "hf").gemms, None, recipe=one
    ).current
    assert known is not None
    sidecar.write(source / sidecar.RELATIVE, known)
    notes = export(source).notes
    assert "Scheme dynamic" in notes[0] and "the amaxes of one step alone" in notes[0]
    assert any("They may be too small" in note for note in export(source, scheme="static").notes)


@pytest.mark.parametrize(("producer", "of_others"), [("transformer_engine", True), ("precisionctl", False)])
def test_inputs_of_experts_that_megatron_weighs_by_its_router_are_not_taken_for_fixed_scales_by_itself(
    tmp_path: Path, producer: str, of_others: bool
) -> None:
    """megatron-core's TEGroupedMLP multiplies before linear_fc2, vLLM's fused_experts what comes out of it."""
    source = with_state(tmp_path / "hf", family="qwen3-moe")
    states = sidecar.read(source / sidecar.RELATIVE)
    sidecar.write(source / sidecar.RELATIVE, replace(states, producer=producer))
    notes = export(source).notes
    assert ("Scheme dynamic" in notes[0] and "the router's weights" in notes[0]) == of_others
    assert any("They may be too small" in note for note in export(source, scheme="static").notes) == of_others
    dense = with_state(tmp_path / "dense")
    sidecar.write(dense / sidecar.RELATIVE, replace(sidecar.read(dense / sidecar.RELATIVE), producer=producer))
    assert "Scheme static" in export(dense).notes[0]


def test_no_recorded_row_of_a_file_is_cut_off_where_the_checkpoint_keeps_fewer(tmp_path: Path) -> None:
    source = with_state(tmp_path / "hf")
    one = DelayedScaling(amax_history_len=1, amax_compute_algo="most_recent")
    gemms = make_plan(HuggingFaceReader(source), "hf").gemms
    known = known_state(HuggingFaceReader(source), gemms, None, recipe=one).current
    assert known is not None
    sidecar.write(source / sidecar.RELATIVE, known)
    file = calibrated(source, tmp_path / "state")
    states = sidecar.read(file)
    for state in states.modules.values():
        state.roles["input"].amax_history[1] = 9.0  # the oldest row
    sidecar.write(file, states)
    work = export(source, fp8_state=file)
    assert work.notes[0].startswith("Scheme static") and not any("one step" in note for note in work.notes)
    execute(work)
    scales = load_file(tmp_path / "export" / "model.safetensors")
    assert scales["model.layers.0.mlp.down_proj.input_scale"].item() == pytest.approx(9 / 448, rel=1e-6)


def test_a_report_on_a_file_of_other_weights_is_not_that_the_checkpoint_is_ready(tmp_path: Path) -> None:
    source = with_state(tmp_path / "hf")
    file = calibrated(source, tmp_path / "state")
    for doubtful in (False, True):
        judged = assess(HuggingFaceReader(source), file, lambda total: in_memory.no_progress())
        findings = {finding.kind for health in judged.roles for finding in health.findings}
        assert ("outdated" in findings) is doubtful
        rescale_norms(source)
    assert judged.verdicts["delayed"].words.startswith("calibrate first (8 modules)")


# Fixed scales that codes came with


def test_fixed_input_scales_are_not_put_beside_codes_of_other_weights(tmp_path: Path) -> None:
    fp8_directories.make(tmp_path / "fp8", "modelopt-tensor")
    run(tmp_path / "fp8", tmp_path / "bf16", "hf")
    (tmp_path / "bf16" / sidecar.RELATIVE).unlink(missing_ok=True)
    run(tmp_path / "bf16", tmp_path / "same", "hf", "fp8")
    before, same = (load_file(tmp_path / name / "model.safetensors") for name in ("fp8", "same"))
    name = "model.layers.0.mlp.down_proj.input_scale"
    assert same[name] == before[name]
    rescale_norms(tmp_path / "bf16")
    with pytest.raises(MissingFp8State, match="weights have changed since the fixed input scales"):
        run(tmp_path / "bf16", tmp_path / "out", "hf", "fp8")
    assert not (tmp_path / "out").exists()
    file = calibrated(tmp_path / "bf16", tmp_path / "state")
    run(tmp_path / "bf16", tmp_path / "out", "hf", "fp8", fp8_state=file)
    scale = load_file(tmp_path / "out" / "model.safetensors")[name].item()
    wanted = sidecar.read(file).modules["decoder.layers.0.mlp.linear_fc2"].roles["input"].amax_history[-1] / 448
    assert scale == pytest.approx(float(wanted), rel=1e-6)


def test_scales_of_a_kv_cache_are_not_put_beside_codes_of_other_weights(tmp_path: Path) -> None:
    """Where no input has a fixed scale, of which it would be said first."""
    fp8_directories.make(tmp_path / "fp8", "compressed-channel")
    tensors = load_file(tmp_path / "fp8" / "model.safetensors")
    tensors["model.layers.0.self_attn.k_scale"] = torch.tensor([0.25], dtype=torch.bfloat16)
    save_file(tensors, tmp_path / "fp8" / "model.safetensors", metadata={"format": "pt"})
    run(tmp_path / "fp8", tmp_path / "bf16", "hf")
    rescale_norms(tmp_path / "bf16")
    with pytest.raises(PrecisionError, match=r"since the scales of their KV cache were made, .*self_attn\.k_scale"):
        run(tmp_path / "bf16", tmp_path / "out", "hf", "fp8")


def test_of_scales_of_a_kv_cache_only_one_for_a_whole_cache_is_carried_back(tmp_path: Path) -> None:
    fp8_directories.make(tmp_path / "fp8", "compressed-channel")
    tensors = load_file(tmp_path / "fp8" / "model.safetensors")
    tensors["model.layers.0.self_attn.k_scale"] = torch.tensor([0.25, 0.5], dtype=torch.bfloat16)
    save_file(tensors, tmp_path / "fp8" / "model.safetensors", metadata={"format": "pt"})
    run(tmp_path / "fp8", tmp_path / "bf16", "hf")
    with pytest.raises(PrecisionError, match=r"k_scale` is \[2\]: only one scale for a whole cache"):
        run(tmp_path / "bf16", tmp_path / "out", "hf", "fp8")


def test_codes_that_are_made_of_the_weights_keep_their_state(tmp_path: Path) -> None:
    """The result's values are other ones, by the rounding to codes; its state is of them all the same."""
    fp8_directories.make(tmp_path / "fp8", "fp8-block")
    run(tmp_path / "fp8", tmp_path / "bf16", "hf")
    rescale_norms(tmp_path / "bf16")  # so that codes are made anew
    sidecar.write(tmp_path / "bf16" / sidecar.RELATIVE, in_memory.recorded(HuggingFaceReader(tmp_path / "bf16")))
    run(tmp_path / "bf16", tmp_path / "again", "hf", "fp8")
    reader = open_checkpoint(tmp_path / "again")
    assert digest_weights(reader) != digest_weights(open_checkpoint(tmp_path / "bf16"))
    assert known_state(reader, make_plan(reader, "megatron").gemms, None).current is not None


# Runs


def test_bf16_steps_leave_state_that_nothing_uses_and_fp8_warms_up_again(place: Path, tmp_path: Path) -> None:
    source, text = place / "source", place / "text.txt"
    train(settings(source, text, tmp_path / "fp8", "fp8", train__steps=4))
    assert "Scheme static" in export(tmp_path / "fp8").notes[0]
    train(settings(tmp_path / "fp8", text, tmp_path / "bf16", train__steps=6))
    assert "Scheme dynamic" in export(tmp_path / "bf16").notes[0]
    assert load(open_checkpoint(tmp_path / "bf16"))[1] == "bfloat16"
    started, _, _ = train(settings(tmp_path / "bf16", text, tmp_path / "again", "fp8", train__steps=2, load="weights"))
    assert started.fp8.keys() == {"warm-up", "from the weights"} or "warm-up" in started.fp8
    assert "carried" not in started.fp8
    nothing = "was recorded with other weights: nothing starts from it"
    assert any(nothing in note for note in started.notes)
    collects = settings(tmp_path / "bf16", text, tmp_path / "amax", train__steps=1, load="weights", collect_amax=True)
    notes = train(collects)[0].notes
    assert "the checkpoint's FP8 state is left behind" in notes and any(nothing in note for note in notes)


@pytest.mark.soak
def test_an_edited_checkpoint_starts_an_fp8_run_with_warm_up_passes(place: Path, tmp_path: Path) -> None:
    text = make_text(tmp_path / "text.txt")
    train(settings(place / "source", text, tmp_path / "fp8", "fp8", train__steps=2))
    run(tmp_path / "fp8", tmp_path / "hf", "hf")
    kept, _, _ = train(settings(tmp_path / "hf", text, tmp_path / "kept", "fp8", train__steps=1))
    assert "carried" in kept.fp8 and "warm-up" not in kept.fp8
    rescale_norms(tmp_path / "hf")
    anew, _, _ = train(settings(tmp_path / "hf", text, tmp_path / "anew", "fp8", train__steps=1))
    assert "carried" not in anew.fp8 and "warm-up" in anew.fp8


def test_what_a_bf16_run_collects_is_of_its_weights(place: Path, tmp_path: Path) -> None:
    made = settings(place / "source", place / "text.txt", tmp_path / "bf16", train__steps=4, collect_amax=True)
    train(made)
    assert "Scheme static" in export(tmp_path / "bf16").notes[0]
    run(tmp_path / "bf16", tmp_path / "hf", "hf")
    assert "Scheme static" in export(tmp_path / "hf").notes[0]
    rescale_norms(tmp_path / "hf")
    assert "Scheme dynamic" in export(tmp_path / "hf").notes[0]


def test_the_sidecar_says_of_which_weights_it_is(tmp_path: Path) -> None:
    states = sidecar.read(with_state(tmp_path / "hf") / sidecar.RELATIVE)
    header = (tmp_path / "hf" / sidecar.RELATIVE).read_bytes()
    said = json.loads(json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")])["__metadata__"]["precisionctl"])
    assert said["of_weights"] == states.of_weights == digest_weights(open_checkpoint(tmp_path / "hf"))


def test_a_command_samples_the_weights_of_its_source_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes with scales of inputs, in an export with others; values, with the state of these; and codes again."""
    sampled = []

    def digest(plan: Plan, source: TensorSource) -> str:
        sampled.append(getattr(source, "path", None))
        return _digest(plan, source)

    file = with_state(tmp_path / "hf") / sidecar.RELATIVE
    carry_out(Request.export(tmp_path / "hf", tmp_path / "codes", "vllm", "static"))
    monkeypatch.setattr(weights_digest, "_digest", digest)
    carry_out(Request.export(tmp_path / "codes", tmp_path / "again", "vllm", "static", fp8_state=file))
    run(tmp_path / "codes", tmp_path / "values", "hf", "bf16")
    run(tmp_path / "values", tmp_path / "back", "hf", "fp8")
    assert sampled == [tmp_path / "codes", tmp_path / "codes", tmp_path / "values", tmp_path / "back.partial"]
