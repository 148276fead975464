"""Conversions end to end: bit-exact there and back, the same bytes however they are made, and nothing half-done."""

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pico
import pytest
import torch
from safetensors.torch import load_file, save_file
from te_pickles import pickled, recipe_object
from te_states import same

from precisionctl.architectures.moves import Grouped
from precisionctl.checkpoints import lock
from precisionctl.checkpoints.base import Reader, read_tensor
from precisionctl.checkpoints.huggingface_files import SAFETENSORS
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.checkpoints.output import Output
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.commands.plan_conversion import Conversion, plan_conversion
from precisionctl.conversion import convert, journal, processes, worker
from precisionctl.conversion.journal import open_journal
from precisionctl.conversion.work import Work, execute
from precisionctl.errors import (
    CheckpointError,
    DamagedCheckpoint,
    DestinationExists,
    DiskProblem,
    MappingError,
    MissingTensor,
    OutputError,
    PrecisionError,
    RecipeError,
    ShapeMismatch,
    UnknownArchitecture,
    UnmappedTensor,
)
from precisionctl.fp8 import sidecar
from precisionctl.fp8.extra_state import read_payload
from precisionctl.fp8.extra_state_writer import TeVersion
from precisionctl.fp8.numerics import after_one_update
from precisionctl.fp8.state import DelayedScaling
from precisionctl.param import Parallelism
from precisionctl.planning.make_plan import make_plan
from precisionctl.precision import PRESETS


def run(source: Path, destination: Path, to: Any, *, workers: int = 2, **options: Any) -> Work:
    work = plan_conversion(Conversion(source, destination, to, **options))
    execute(work, workers=workers)
    return work


def tree(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def tensors(path: Path) -> dict[str, torch.Tensor]:
    reader: Reader = open_checkpoint(path)
    return {name: read_tensor(reader, name) for name in reader.specs}


def assert_same_tensors(a: Path, b: Path) -> None:
    left, right = tensors(a), tensors(b)
    assert set(left) == set(right)
    for name in left:
        assert left[name].dtype == right[name].dtype
        assert torch.equal(left[name].view(torch.uint8), right[name].view(torch.uint8)), name


@pytest.mark.parametrize("tensor_parallel", [1, 2])
@pytest.mark.parametrize("family", pico.FAMILIES)
def test_there_and_back_is_bit_exact(tmp_path: Path, family: str, tensor_parallel: int) -> None:
    pico.save(tmp_path / "hf", family, dtype=torch.bfloat16, max_shard_size="40KB")
    before = tree(tmp_path / "hf")
    run(tmp_path / "hf", tmp_path / "megatron", "megatron", parallelism=Parallelism(tensor_parallel))
    run(tmp_path / "megatron", tmp_path / "back", "hf")
    assert_same_tensors(tmp_path / "hf", tmp_path / "back")
    assert tree(tmp_path / "hf") == before
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "back" / name).read_text()) == json.loads(before[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_values_keep_their_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    pico.save(tmp_path / "hf", dtype=dtype)
    run(tmp_path / "hf", tmp_path / "megatron", "megatron")
    assert {spec.dtype for spec in open_checkpoint(tmp_path / "megatron").specs.values()} == {dtype}
    run(tmp_path / "megatron", tmp_path / "back", "hf")
    assert_same_tensors(tmp_path / "hf", tmp_path / "back")


def test_bf16_rounds_each_value_once_and_says_so_in_the_config(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", dtype=torch.float32)
    run(tmp_path / "hf", tmp_path / "bf16", "hf", precision="bf16")
    expected = {name: values.bfloat16() for name, values in tensors(tmp_path / "hf").items()}
    found = tensors(tmp_path / "bf16")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert json.loads((tmp_path / "bf16" / "config.json").read_text())["dtype"] == "bfloat16"


def test_two_shards_hold_what_one_holds(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "llama-all-biases", dtype=torch.bfloat16)
    run(tmp_path / "hf", tmp_path / "one", "megatron")
    run(tmp_path / "hf", tmp_path / "two", "megatron", parallelism=Parallelism(2))
    one, two = tensors(tmp_path / "one"), tensors(tmp_path / "two")
    assert [len(list((tmp_path / n / "release").glob("__*_0.distcp"))) for n in ("one", "two")] == [1, 2]
    vocabulary = {"embedding.word_embeddings.weight", "output_layer.weight"}  # padded to 128 times the shards
    assert all(torch.equal(one[name], two[name]) for name in one.keys() - vocabulary)
    assert all(torch.equal(one[name][:250], two[name][:250]) for name in vocabulary)


@pytest.mark.parametrize("to", ["hf", "megatron"])
def test_the_bytes_do_not_depend_on_the_number_of_workers(tmp_path: Path, to: str) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    run(tmp_path / "hf", tmp_path / "source", "megatron", precision="fp8")
    outputs: list[dict[str, bytes]] = []
    precision = "fp8" if to == "megatron" else "keep"
    for workers in (1, 2, 4):
        run(tmp_path / "source", tmp_path / str(workers), to, precision=precision, workers=workers)
        outputs.append(tree(tmp_path / str(workers)))
    assert outputs[0] == outputs[1] == outputs[2]


def test_all_bytes_are_moved_by_copies_for_llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No row's merge or split ever sees values: only row numbers, which are integers."""
    pico.save(tmp_path / "hf", "llama-3", dtype=torch.bfloat16)
    seen: list[torch.dtype] = []
    merge = Grouped.merge
    monkeypatch.setattr(
        Grouped, "merge", lambda s, parts, m: (seen.extend(p.dtype for p in parts), merge(s, parts, m))[1]
    )
    run(tmp_path / "hf", tmp_path / "megatron", "megatron", workers=1)
    assert set(seen) == {torch.int64}


def test_lowered_bytes_are_those_of_the_tensor_path(tmp_path: Path) -> None:
    """The rows applied to whole tensors, against what the copies wrote, TP 2 included."""
    pico.save(tmp_path / "hf", "llama-all-biases", dtype=torch.bfloat16)
    work = run(tmp_path / "hf", tmp_path / "megatron", "megatron", parallelism=Parallelism(2))
    source, written = tensors(tmp_path / "hf"), tensors(tmp_path / "megatron")
    for job in work.plan.jobs:
        assert torch.equal(written[job.name], job.row.merge([source[name] for name in job.reads], work.plan.model))


def test_padding_is_cut_off_whatever_it_holds(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    run(tmp_path / "hf", tmp_path / "megatron", "megatron")
    reader = open_checkpoint(tmp_path / "megatron")
    (chunk,) = reader.chunks("output_layer.weight")
    with open(chunk.place, "r+b") as file:  # type: ignore[arg-type]
        file.seek(chunk.offset + 250 * 64 * 2)
        file.write(b"\x42" * 6 * 64 * 2)
    run(tmp_path / "megatron", tmp_path / "back", "hf")
    assert_same_tensors(tmp_path / "hf", tmp_path / "back")


def test_a_bias_that_hugging_face_has_no_place_for_must_be_zero(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "llama-attention-bias", dtype=torch.bfloat16)
    run(tmp_path / "hf", tmp_path / "megatron", "megatron")
    reader = open_checkpoint(tmp_path / "megatron")
    assert not read_tensor(reader, "decoder.layers.0.mlp.linear_fc1.bias").any()
    chunk, _ = reader.chunks("decoder.layers.0.mlp.linear_fc1.bias")  # gate and up
    with open(chunk.place, "r+b") as file:  # type: ignore[arg-type]
        file.seek(chunk.offset)
        file.write(b"\x01")
    with pytest.raises(ShapeMismatch, match=r"linear_fc1.bias` is not zero"):
        run(tmp_path / "megatron", tmp_path / "back", "hf")
    assert not (tmp_path / "back").exists()


def test_a_stored_tied_head_must_equal_the_embedding(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "llama-tied", dtype=torch.bfloat16)
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    save_file(stored, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    run(tmp_path / "hf", tmp_path / "megatron", "megatron")
    stored["lm_head.weight"][3, 3] += 1
    save_file(stored, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DamagedCheckpoint, match=r"`lm_head.weight` .* differs"):
        run(tmp_path / "hf", tmp_path / "again", "megatron")


def test_bf16_to_fp8_fills_the_weight_role_as_one_update_would(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "llama-3", dtype=torch.bfloat16)
    run(tmp_path / "hf", tmp_path / "fp8", "megatron", precision="fp8", recipe=PRESETS["fp8-delayed"])
    states, values = open_checkpoint(tmp_path / "fp8").fp8, tensors(tmp_path / "fp8")
    assert states is not None and len(states.modules) == 8
    for module, state in states.modules.items():
        expected = after_one_update(values[f"{module}.weight"].abs().max().float(), "weight", DelayedScaling())
        assert torch.equal(state.roles["weight"].scale, expected.scale)
        assert torch.equal(state.roles["weight"].amax_history, expected.amax_history)
        assert not state.roles["input"].recorded


def test_fp8_to_hugging_face_and_back_loses_no_state(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    run(tmp_path / "hf", tmp_path / "fp8", "megatron", precision="fp8")
    run(tmp_path / "fp8", tmp_path / "over", "hf")
    run(tmp_path / "over", tmp_path / "bf16", "megatron", precision="bf16")
    run(tmp_path / "bf16", tmp_path / "again", "megatron", precision="fp8")
    first, last = open_checkpoint(tmp_path / "fp8").fp8, open_checkpoint(tmp_path / "again").fp8
    assert first is not None and last is not None
    assert first.recipe == last.recipe and first.modules.keys() == last.modules.keys()
    for module, state in first.modules.items():
        for role, part in state.roles.items():
            assert torch.equal(part.scale, last.modules[module].roles[role].scale)
            assert torch.equal(part.amax_history, last.modules[module].roles[role].amax_history)


@pytest.mark.parametrize(
    ("te_version", "said"),
    [(1, "Transformer Engine 0.6 to 1.14"), (2, "only where NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1")],
)
def test_payloads_are_written_for_either_generation_and_what_loads_them_is_said(
    tmp_path: Path, te_version: TeVersion, said: str
) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    work = run(tmp_path / "hf", tmp_path / "fp8", "megatron", precision="fp8", te_version=te_version)
    assert any(said in note for note in work.notes)
    reader = open_checkpoint(tmp_path / "fp8")
    assert isinstance(reader, TorchDistReader)
    payload = read_payload(
        reader.read_object(next(key for key in reader.objects if "linear_fc1" in key)).numpy().tobytes(), ""
    )
    assert payload is not None and payload.assumed == (te_version == 1)
    again = run(tmp_path / "fp8", tmp_path / "bf16", "megatron", precision="bf16")
    assert any("has no recipe" in note for note in again.notes) == (te_version == 1)
    assert not any(said in note for note in again.notes)


def test_bf16_writes_no_payload_and_keeps_the_state_aside(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    run(tmp_path / "hf", tmp_path / "fp8", "megatron", precision="fp8")
    for container in ("torch_dist", "torch"):
        made = tmp_path / container
        run(tmp_path / "fp8", made, "megatron", precision="bf16", container=container)
        reader = open_checkpoint(made)
        if isinstance(reader, TorchDistReader):
            values = [reader.read_object(key) for key in reader.objects if "_extra_state" in key]
        else:
            saved = torch.load(made / "release" / "mp_rank_00" / "model_optim_rng.pt", weights_only=False)["model"]
            values = [value for name, value in saved.items() if "_extra_state" in name]
        assert values and all(value.numel() == 0 for value in values)
        aside, carried = sidecar.find(made / "release"), open_checkpoint(tmp_path / "fp8").fp8
        assert aside is not None and carried is not None
        assert aside.modules.keys() == carried.modules.keys()


def test_state_in_which_experts_columns_are_unclear_is_refused_until_told(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "mixtral", dtype=torch.bfloat16)
    run(tmp_path / "hf", tmp_path / "plain", "megatron", container="torch")
    file = tmp_path / "plain" / "release" / "mp_rank_00" / "model_optim_rng.pt"
    saved = torch.load(file, weights_only=False)
    recipe = recipe_object(DelayedScaling(amax_history_len=2), (2, 3))
    tensors = {"scale_fwd": torch.arange(1.0, 13), "scale_bwd": torch.arange(1.0, 9)}
    tensors |= {"amax_history_fwd": torch.ones(2, 12), "amax_history_bwd": torch.ones(2, 8)}
    payload = pickled({"recipe": recipe, **tensors, "extra_fp8_variables": {"num_gemms": 4}})
    name = "decoder.layers.0.mlp.experts.linear_fc1._extra_state"
    assert name in saved["model"]
    saved["model"][name] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    torch.save(saved, file)
    with pytest.raises(PrecisionError, match="--grouped-columns gemm"):
        run(tmp_path / "plain", tmp_path / "out", "megatron", precision="bf16")
    work = run(tmp_path / "plain", tmp_path / "out", "megatron", precision="bf16", grouped_columns="gemm")
    assert any("expert by expert, as TE since 2.3, as told" in note for note in work.notes)
    found = open_checkpoint(tmp_path / "out").fp8
    assert found is not None
    weight = found.modules["decoder.layers.0.mlp.experts.linear_fc1"].roles["weight"]
    assert weight.scale.tolist() == [2.0, 5.0, 8.0, 11.0]


def test_experts_state_goes_through_every_size_and_layout(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "mixtral", dtype=torch.bfloat16)
    way: list[tuple[str, dict[str, Any]]] = [
        ("megatron", {"container": "torch", "parallelism": Parallelism(tensor=2, expert=2), "precision": "fp8"}),
        ("megatron", {"parallelism": Parallelism(expert=4)}),
        ("megatron", {"container": "torch", "parallelism": Parallelism(pipeline=2, expert=4), "te_version": 1}),
        ("hf", {}),
        ("megatron", {"parallelism": Parallelism(pipeline=2, expert=2), "precision": "fp8"}),
    ]
    source, states = tmp_path / "hf", []
    for number, (to, options) in enumerate(way):
        run(source, tmp_path / str(number), to, **options)
        source = tmp_path / str(number)
        states.append(open_checkpoint(source).fp8)
    assert states[0] is not None
    experts = states[0].modules["decoder.layers.1.mlp.experts.linear_fc2"].roles["weight"]
    assert experts.scale.shape == (4,) and experts.recorded
    for state in states[1:]:
        assert state is not None and state.modules.keys() == states[0].modules.keys()
        assert all(same(state.modules[name], expected) for name, expected in states[0].modules.items())


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-block", "mxfp8", "some-kept", "last-kept"])
def test_a_recipe_says_which_modules_get_state(tmp_path: Path, recipe: str) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    delayed = PRESETS["fp8-delayed"]
    presets = {
        **PRESETS,
        "some-kept": replace(delayed, keep_bf16=("*.linear_fc2",)),
        "last-kept": replace(delayed, num_layers_at_end_in_bf16=1),
    }
    run(tmp_path / "hf", tmp_path / "fp8", "megatron", precision="fp8", recipe=presets[recipe])
    states = open_checkpoint(tmp_path / "fp8").fp8
    if recipe in PRESETS:
        assert states is None
    elif recipe == "last-kept":
        assert states is not None and {name.split(".")[2] for name in states.modules} == {"0"}
    else:
        assert states is not None
        assert {name.rpartition(".")[2] for name in states.modules} == {"linear_qkv", "linear_proj", "linear_fc1"}


@pytest.mark.parametrize(
    ("recipe", "spelling"),
    [
        ("fp8-current", ("compressed-tensors", "token")),
        ("fp8-block", ("fp8", [128, 128])),
        ("mxfp8", ("modelopt", "MXFP8")),
    ],
)
def test_fp8_for_hugging_face_is_what_the_recipe_computes_and_needs_no_state(
    tmp_path: Path, recipe: str, spelling: tuple[str, Any]
) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16, hidden_size=128, intermediate_size=256, head_dim=64)
    run(tmp_path / "hf", tmp_path / "fp8", "hf", precision="fp8", recipe=PRESETS[recipe])
    said = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    found = {
        "compressed-tensors": lambda: said["config_groups"]["group_0"]["input_activations"]["strategy"],
        "fp8": lambda: said["weight_block_size"],
        "modelopt": lambda: said["quant_algo"],
    }[said["quant_method"]]()
    assert (said["quant_method"], found) == spelling


CONTRADICTORY: dict[str, dict[str, Any]] = {
    "no payloads of Transformer Engine": {"to": "hf", "te_version": 1},
    "an export takes FP8 state as it is read": {"to": "hf", "precision": "fp8", "grouped_columns": "role"},
    "not cut for ranks": {"to": "hf", "parallelism": Parallelism(2)},
    "a recipe says how FP8 is made": {"to": "megatron", "recipe": PRESETS["fp8-delayed"]},
    "input scales of FP8 weights come from": {"to": "hf", "precision": "fp8", "drop_fp8_state": True},
}


@pytest.mark.parametrize("message", CONTRADICTORY)
def test_options_that_contradict_one_another_are_refused(tmp_path: Path, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Conversion(tmp_path, tmp_path / "out", **CONTRADICTORY[message])


def test_a_hugging_face_source_has_no_iterations(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match="no iterations"):
        run(tmp_path / "hf", tmp_path / "out", "megatron", iteration=3)


def test_state_of_a_module_that_the_model_lacks_is_refused(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    run(tmp_path / "hf", tmp_path / "fp8", "megatron", precision="fp8")
    run(tmp_path / "fp8", tmp_path / "over", "hf")
    pico.save(tmp_path / "short", dtype=torch.bfloat16, num_hidden_layers=1)
    shutil.copytree(tmp_path / "over" / "precisionctl", tmp_path / "short" / "precisionctl")
    with pytest.raises(MappingError, match=r"FP8 state of `decoder.layers.1.mlp.linear_fc1`"):
        run(tmp_path / "short", tmp_path / "out", "megatron")
    run(tmp_path / "short", tmp_path / "out", "megatron", drop_fp8_state=True)


@pytest.mark.parametrize("precision", ["fp8", "keep"])
def test_a_stale_weight_amax_is_made_from_the_weights(tmp_path: Path, precision: str) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    run(tmp_path / "hf", tmp_path / "fp8", "megatron", precision="fp8")
    run(tmp_path / "fp8", tmp_path / "over", "hf")
    stored = load_file(tmp_path / "over" / "model.safetensors")
    stored["model.layers.1.mlp.down_proj.weight"] *= 4
    save_file(stored, tmp_path / "over" / "model.safetensors", metadata={"format": "pt"})
    work = run(tmp_path / "over", tmp_path / "again", "megatron", precision=precision)
    assert any("1 modules was stale" in note for note in work.notes)
    states = open_checkpoint(tmp_path / "again").fp8
    assert states is not None
    weight = states.modules["decoder.layers.1.mlp.linear_fc2"].roles["weight"]
    assert weight.amax_history[-1] == stored["model.layers.1.mlp.down_proj.weight"].abs().max().float()


KILL = """
import os, signal, sys
from pathlib import Path
from precisionctl.checkpoints import output
from precisionctl.commands.plan_conversion import Conversion, plan_conversion
from precisionctl.conversion import convert, work, worker
convert.SYNC_EVERY = 20_000
stage, source, destination = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
calls = 0
def count(function):
    def counted(*arguments, **named):
        global calls
        calls += 1
        if calls == stage:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **named)
    return counted
worker.write_rows = count(worker.write_rows)
output.sync = count(output.sync)  # what the commit calls
work.execute(plan_conversion(Conversion(source, destination, "megatron", "fp8")), workers=1)
"""


@pytest.mark.parametrize("stage", [1, 20, 36])
def test_a_kill_leaves_nothing_that_looks_whole_and_the_same_command_goes_on(tmp_path: Path, stage: int) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    run(tmp_path / "hf", tmp_path / "undisturbed", "megatron", precision="fp8")
    command = [sys.executable, "-c", KILL, str(stage), str(tmp_path / "hf"), str(tmp_path / "killed")]
    assert subprocess.run(command).returncode == -signal.SIGKILL
    assert not (tmp_path / "killed").exists()
    assert (tmp_path / "killed.journal").exists()
    run(tmp_path / "hf", tmp_path / "killed", "megatron", precision="fp8")
    assert tree(tmp_path / "killed") == tree(tmp_path / "undisturbed")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "killed", "undisturbed"]


def test_a_worker_that_is_killed_is_one_error_and_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    run(tmp_path / "hf", tmp_path / "undisturbed", "megatron")
    parent, write_rows = os.getpid(), worker.write_rows

    def killed(target: Any, name: str, row: int, values: torch.Tensor) -> None:
        if os.getpid() != parent and name == "decoder.layers.1.mlp.linear_fc1.weight":
            os.kill(os.getpid(), signal.SIGKILL)
        write_rows(target, name, row, values)

    with monkeypatch.context() as patch:
        patch.setattr(worker, "write_rows", killed)
        with pytest.raises(OutputError, match=r"exit code -9.*same command again"):
            run(tmp_path / "hf", tmp_path / "out", "megatron")
    assert not (tmp_path / "out").exists()
    run(tmp_path / "hf", tmp_path / "out", "megatron")
    assert tree(tmp_path / "out") == tree(tmp_path / "undisturbed")


class Unspeakable(Exception):
    """An error that cannot be sent from one process to another."""

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("not to be pickled")


def test_an_error_that_a_worker_cannot_tell_is_an_error_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)

    def fails(*_: object) -> None:
        raise Unspeakable

    monkeypatch.setattr(worker, "write_rows", fails)
    with pytest.raises(OutputError, match="a worker process was killed"):
        run(tmp_path / "hf", tmp_path / "out", "megatron")
    assert not (tmp_path / "out").exists()


def test_jobs_are_dealt_in_neighbouring_runs_of_about_equal_cost() -> None:
    for costs, shares in (([1] * 10, 2), ([5, 1, 1, 1, 1, 1], 2), ([], 3), ([7], 4), ([0, 0, 3], 2)):
        dealt = processes.deal(costs, shares)
        assert [number for share in dealt for number in share] == list(range(len(costs)))
        assert len(dealt) <= shares
    assert processes.deal([5, 1, 1, 1, 1, 1], 2) == [range(1), range(1, 6)]


def test_going_on_does_not_write_again_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    monkeypatch.setattr(convert, "SYNC_EVERY", 1)
    written: list[str] = []
    write_rows = worker.write_rows

    def failing(target: Any, name: str, row: int, values: torch.Tensor) -> None:
        if name == "decoder.layers.1.mlp.linear_fc1.weight" and name not in written:
            written.append(name)
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(name)
        write_rows(target, name, row, values)

    monkeypatch.setattr(worker, "write_rows", failing)
    with pytest.raises(DiskProblem, match="run the same command again"):
        run(tmp_path / "hf", tmp_path / "out", "megatron", workers=1)
    assert not (tmp_path / "out").exists() and (tmp_path / "out.partial").exists()
    first = [name for name in written if written.index(name) < written.index("decoder.layers.1.mlp.linear_fc1.weight")]
    written.clear()
    written.append("decoder.layers.1.mlp.linear_fc1.weight")
    run(tmp_path / "hf", tmp_path / "out", "megatron", workers=1)
    assert not set(first) & set(written)


def test_a_source_that_changed_is_not_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    fails = monkeypatch.context()
    with fails as patch:
        patch.setattr(worker, "write_rows", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        with pytest.raises(DiskProblem):
            run(tmp_path / "hf", tmp_path / "out", "megatron")
    os.utime(tmp_path / "hf" / "model.safetensors")
    with pytest.raises(OutputError, match="--restart"):
        run(tmp_path / "hf", tmp_path / "out", "megatron")
    execute(plan_conversion(Conversion(tmp_path / "hf", tmp_path / "out", "megatron")), restart=True)
    assert (tmp_path / "out" / "release" / "metadata.json").is_file()


def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unfinished conversion at tmp_path/out, with all of its jobs in the journal."""
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    with monkeypatch.context() as patch:
        patch.setattr(Output, "commit", lambda output: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
        with pytest.raises(DiskProblem):
            run(tmp_path / "hf", tmp_path / "out", "megatron")


def test_a_journal_is_not_believed_beside_another_partial_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped(tmp_path, monkeypatch)
    shutil.rmtree(tmp_path / "out.partial")
    run(tmp_path / "hf", tmp_path / "out", "megatron")
    run(tmp_path / "out", tmp_path / "back", "hf")
    assert_same_tensors(tmp_path / "hf", tmp_path / "back")


def test_a_file_that_was_lost_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped(tmp_path, monkeypatch)
    (tmp_path / "out.partial" / "release" / "__0_0.distcp").unlink()
    run(tmp_path / "hf", tmp_path / "out", "megatron")
    run(tmp_path / "out", tmp_path / "back", "hf")
    assert_same_tensors(tmp_path / "hf", tmp_path / "back")


@pytest.mark.parametrize("theirs", ["out.partial/thesis.txt", "out.journal"])
def test_what_is_not_ours_is_not_destroyed(tmp_path: Path, theirs: str) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    (tmp_path / theirs).parent.mkdir(exist_ok=True)
    (tmp_path / theirs).write_text("precious")
    with pytest.raises(OutputError, match="--restart"):
        run(tmp_path / "hf", tmp_path / "out", "megatron")
    assert (tmp_path / theirs).read_text() == "precious"
    assert len(list(tmp_path.iterdir())) == 2
    execute(plan_conversion(Conversion(tmp_path / "hf", tmp_path / "out", "megatron")), restart=True)


def test_a_restart_that_is_killed_leaves_nothing_of_what_it_discards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped(tmp_path, monkeypatch)
    (tmp_path / "out.partial" / "stale.bin").write_bytes(b"of the run before")
    with monkeypatch.context() as patch:
        patch.setattr(Output, "begin", lambda output: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            execute(plan_conversion(Conversion(tmp_path / "hf", tmp_path / "out", "megatron")), restart=True)
    execute(plan_conversion(Conversion(tmp_path / "hf", tmp_path / "out", "megatron")), restart=True)
    assert not (tmp_path / "out" / "stale.bin").exists()


def test_two_runs_do_not_write_one_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "PATIENCE", 0.1)
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    work = plan_conversion(Conversion(tmp_path / "hf", tmp_path / "out", "megatron"))
    with open_journal(work.output, work.digest, work.reader.files):
        with pytest.raises(OutputError, match="another run"):
            execute(work)
        with pytest.raises(OutputError, match="another run"):
            execute(work, restart=True)


def test_a_torn_last_line_of_the_journal_is_ignored(tmp_path: Path) -> None:
    output = Output(tmp_path / "out")
    with open_journal(output, "plan", []) as kept:
        kept.record(["a", "b"], {"a": 1.5})
    with open(output.journal, "a") as file:
        file.write('{"done": ["c"], "am')
    with open_journal(output, "plan", []) as kept:
        assert kept.done == {"a", "b"} and kept.found == {"a": 1.5}
        kept.record(["c"], {})
    with open_journal(output, "plan", []) as kept:
        assert kept.done == {"a", "b", "c"}


def test_whatever_transformers_makes_a_tokenizer_of_travels_there_and_back(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    beside = ("tokenizer.json", "tokenizer.model", "tekken.json", "tiktoken.model", "spiece.model", "vocab.json")
    for name in beside:
        (tmp_path / "hf" / name).write_text(name)
    run(tmp_path / "hf", tmp_path / "megatron", "megatron")
    run(tmp_path / "megatron", tmp_path / "back", "hf")
    assert [(tmp_path / "back" / name).read_text() for name in beside] == list(beside)


def test_a_source_that_changes_while_it_is_read_is_no_result(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    work = plan_conversion(Conversion(tmp_path / "hf", tmp_path / "out", "megatron"))
    with pytest.raises(OutputError, match="changed while it was read"):
        execute(work, on_bytes=lambda count: os.utime(tmp_path / "hf" / "model.safetensors"))
    assert not (tmp_path / "out").exists()
    with pytest.raises(OutputError, match="source that has changed"):
        run(tmp_path / "hf", tmp_path / "out", "megatron")
    work = plan_conversion(Conversion(tmp_path / "hf", tmp_path / "out", "megatron"))
    execute(work, restart=True)
    assert (tmp_path / "out").is_dir()


def test_whatever_a_crash_leaves_in_the_journal_is_gone_on_from_or_refused(tmp_path: Path) -> None:
    output = Output(tmp_path / "out")
    with open_journal(output, "plan", []) as kept:
        kept.record(["a"], {})
    whole = output.journal.read_bytes()
    for junk in (b"\xff\x00\x85", b'{"done": ["\xff"], "found"', b"\x00" * 99 + b"\n", b"\xe2\x80\xa8\x1c\x0b\n"):
        output.journal.write_bytes(whole + junk)
        with open_journal(output, "plan", []) as kept:
            assert kept.done == {"a"}
        assert output.journal.read_bytes() == whole
        output.journal.write_bytes(junk)
        with pytest.raises(OutputError, match="--restart"), open_journal(output, "plan", []):
            pass
        assert output.journal.read_bytes() == junk
    with open_journal(output, "plan", [], restart=True) as kept:
        assert kept.done == set()


def test_a_file_system_without_locks_is_told_from_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(lock.fcntl, "flock", no_locks)
    with pytest.raises(OutputError, match="has no locks"), open_journal(Output(tmp_path / "out"), "plan", []):
        pass


def test_copies_that_are_no_numbers_are_copies(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "llama-tied", dtype=torch.bfloat16)
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    stored["model.embed_tokens.weight"][3, 5] = torch.nan
    stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
    save_file(stored, tmp_path / "hf" / "model.safetensors")
    run(tmp_path / "hf", tmp_path / "out", "megatron")
    assert tensors(tmp_path / "out")["embedding.word_embeddings.weight"][3, 5].isnan()


@pytest.mark.parametrize("destination", ["x", "x.partial/inner"])
def test_a_source_in_the_way_of_what_is_written_is_refused(tmp_path: Path, destination: str) -> None:
    pico.save(tmp_path / "x.partial", dtype=torch.bfloat16)
    before = tree(tmp_path)
    for restart in (False, True):
        with pytest.raises(OutputError, match="one in the other"):
            conversion = Conversion(tmp_path / "x.partial", tmp_path / destination, "megatron")
            execute(plan_conversion(conversion), restart=restart)
    assert tree(tmp_path) == before


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    """With far more results than a pipe holds: a worker that nobody listens to must not wait for ever."""
    script = """
import os, signal
from precisionctl.conversion import processes
parent = os.getpid()
def task(number):
    print(os.getpid(), flush=True)
    return "x" * 100
results = processes.in_processes(task, range(20_000), [1] * 20_000, 2)
next(results)
os.kill(parent, signal.SIGKILL)
"""
    script = script.replace("    print(os.getpid(), flush=True)\n", "")
    killed = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    # the pipe's other end is open for as long as any worker lives
    assert killed.communicate(timeout=30)[0] == b"" and killed.returncode == -signal.SIGKILL


def test_a_full_disk_is_one_error_and_keeps_what_is_done(tmp_path: Path) -> None:
    """A real limit of the kernel's on file size, in a process of its own."""
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    script = (
        "import resource, sys; from pathlib import Path\n"
        "from precisionctl.commands import plan_conversion as c; from precisionctl.conversion import work as w\n"
        "work = c.plan_conversion(c.Conversion(Path(sys.argv[1]), Path(sys.argv[2]), 'megatron'))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try:\n    w.execute(work)\nexcept w.DiskProblem as error:\n    print(error)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "hf"), str(tmp_path / "out")]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert "File too large" in output and "run the same command again" in output
    assert not (tmp_path / "out").exists() and (tmp_path / "out.journal").exists()
    run(tmp_path / "hf", tmp_path / "out", "megatron")


def test_a_source_that_cannot_be_read_is_one_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    before = tree(tmp_path / "hf")

    def fails(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fails)
        with pytest.raises(CheckpointError, match=r"not readable: Input/output error.*model.safetensors"):
            run(tmp_path / "hf", tmp_path / "out", "megatron")
    assert not (tmp_path / "out").exists() and tree(tmp_path / "hf") == before
    run(tmp_path / "hf", tmp_path / "out", "megatron")


def config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def add_tensor(directory: Path) -> None:
    stored = load_file(directory / "model.safetensors")
    stored["model.layers.0.mlp.router.bias"] = torch.zeros(3)
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})


REFUSED: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "an unknown family": (lambda d: config(d, model_type="mamba"), UnknownArchitecture, "no table.*Supported: .*llama"),
    "a tensor that nobody maps": (
        add_tensor,
        UnmappedTensor,
        r"1 unexpected\n  unexpected  model.layers.0.mlp.router.bias",
    ),
    "a missing tensor": (
        lambda d: config(d, mlp_bias=True),
        MissingTensor,
        r"6 missing\n .*mlp.gate_proj.bias  \(2\)",
    ),
    "more layers than tensors": (lambda d: config(d, num_hidden_layers=4000), MissingTensor, "only 21 tensors"),
    "a billion layers": (lambda d: config(d, num_hidden_layers=10**9), DamagedCheckpoint, "1000000000, not a size"),
    "sizes that contradict": (lambda d: config(d, intermediate_size=112), ShapeMismatch, "the model's sizes say"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    change, error, message = REFUSED[name]
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    change(tmp_path / "hf")
    before = tree(tmp_path / "hf")
    with pytest.raises(error, match=message):
        run(tmp_path / "hf", tmp_path / "out", "megatron")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]
    assert tree(tmp_path / "hf") == before


def test_a_destination_that_exists_is_left_alone(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    (tmp_path / "out").mkdir()
    with pytest.raises(DestinationExists):
        run(tmp_path / "hf", tmp_path / "out", "megatron")
    assert list((tmp_path / "out").iterdir()) == []


def test_shapes_that_fp8_gemms_do_not_take_are_refused(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16, intermediate_size=100)
    with pytest.raises(PrecisionError, match="multiples of 16"):
        run(tmp_path / "hf", tmp_path / "out", "megatron", precision="fp8")


@pytest.mark.parametrize("ranks", [5, 8])  # 8 divides all sizes of 4 heads, and Megatron starts no such run
def test_a_tensor_parallel_size_that_heads_do_not_fit_is_refused(ranks: int, tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    with pytest.raises(ShapeMismatch, match=f"4 heads in 2 .* to {ranks} tensor-parallel ranks") as refused:
        run(tmp_path / "hf", tmp_path / "out", "megatron", parallelism=Parallelism(ranks))
    assert refused.value.where == str(tmp_path / "hf")


def test_a_tensor_parallel_size_that_the_mlp_does_not_fit_is_refused(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16, intermediate_size=90)
    with pytest.raises(ShapeMismatch, match=r"layers\.\*\.mlp\.linear_fc1.* into 4 tensor-parallel parts"):
        run(tmp_path / "hf", tmp_path / "out", "megatron", parallelism=Parallelism(4))


def test_a_large_model_is_sharded_with_an_index(tmp_path: Path) -> None:
    model = pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    run(tmp_path / "hf", tmp_path / "out", "hf", max_shard_size=40_000)
    index = json.loads((tmp_path / "out" / SAFETENSORS.index).read_text())
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in model.state_dict().values())
    assert_same_tensors(tmp_path / "hf", tmp_path / "out")


def test_every_source_is_used_once_and_every_target_made_once(tmp_path: Path) -> None:
    for family in pico.FAMILIES:
        pico.save(tmp_path / family, family, dtype=torch.bfloat16)
        reader = open_checkpoint(tmp_path / family)
        plan = make_plan(reader, "megatron")
        assert sorted(name for job in plan.jobs for name in job.reads) == sorted(reader.specs)
        assert [name for job in plan.jobs for name in job.writes] == list(plan.targets)


def test_verify_reads_back_what_is_on_the_disk_and_lists_checksums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    work = plan_conversion(Conversion(tmp_path / "hf", tmp_path / "out", "megatron", parallelism=Parallelism(2)))
    execute(work, verify=True)
    manifest = json.loads((tmp_path / "out" / "release" / "precisionctl" / "manifest.json").read_text())
    for name, values in tensors(tmp_path / "out").items():
        assert manifest["sha256"][name] == hashlib.sha256(values.view(torch.uint8).numpy().tobytes()).hexdigest()
    assert set(manifest["sha256"]) == set(work.plan.targets)

    def flips(target: Any, name: str, row: int, values: torch.Tensor) -> None:
        values = values.clone()
        if name == "decoder.final_layernorm.weight":
            values.view(torch.uint8)[0, 0] ^= 1
        write_rows(target, name, row, values)

    write_rows = worker.write_rows
    monkeypatch.setattr(worker, "write_rows", flips)
    with pytest.raises(DamagedCheckpoint, match="`decoder.final_layernorm.weight` reads back other than"):
        execute(plan_conversion(Conversion(tmp_path / "hf", tmp_path / "flipped", "megatron")), verify=True)
    assert not (tmp_path / "flipped").exists()


def test_weights_as_transformers_once_saved_them(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    run(tmp_path / "hf", tmp_path / "bin", "hf", container="bin", max_shard_size=100_000)
    assert (tmp_path / "bin" / "pytorch_model.bin.index.json").is_file()
    run(tmp_path / "bin", tmp_path / "megatron", "megatron")
    run(tmp_path / "megatron", tmp_path / "back", "hf")
    assert_same_tensors(tmp_path / "hf", tmp_path / "back")
