"""`calibrate`: what is recorded, that a kill changes nothing of it, and how it compares with what FP8 training does."""

import json
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrating import HISTORY, asked
from click.testing import CliRunner
from conversions import carry_out
from programs import run_program
from safetensors import safe_open
from soaking import in_soak
from training import make_source, make_text, run, scales, settings

from precisionctl.calibration.calibrate import Calibrated, calibrate
from precisionctl.calibration.progress import Progress
from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.checkpoints.output import Output
from precisionctl.cli import main
from precisionctl.codes.health import measure
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import execute
from precisionctl.conversion.known_state import KnownState
from precisionctl.errors import (
    DamagedCheckpoint,
    DataError,
    DestinationExists,
    MappingError,
    MissingFp8State,
    OutputError,
    PrecisionError,
    RecipeError,
    UnknownFormat,
)
from precisionctl.fp8 import sidecar
from precisionctl.fp8.carry import under_recipe
from precisionctl.fp8.state import CALIBRATED, COLLECTED, Fp8State, Fp8States, Role, RoleState
from precisionctl.planning.make_plan import make_plan
from precisionctl.precision import PRESETS
from precisionctl.recipe import load_recipe
from precisionctl.tokens.tokenizer import open_tokenizer
from precisionctl.trainer.backends.base import fp8_linears
from precisionctl.trainer.backends.recorder import Recorder
from precisionctl.trainer.fp8_start import start_fp8
from precisionctl.trainer.model.gpt import GPT
from precisionctl.trainer.optimizer.adamw import MasterAdamW
from precisionctl.trainer.parallel.world import World
from precisionctl.trainer.resume import resume
from precisionctl.trainer.run import Run
from precisionctl.trainer.saved import run_folder
from precisionctl.trainer.saved.balance import balance_of
from precisionctl.trainer.saved.loading import load_weights
from precisionctl.trainer.settings import read_recipe, tokenized_rows

IN_USE: tuple[Role, ...] = ("input", "weight", "grad_output")
GEMMS = [
    f"decoder.layers.{layer}.{module}"
    for layer in (0, 1)
    for module in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
]

KILLED = """
import os, signal, sys
from pathlib import Path
from precisionctl.calibration import calibrate as module
from calibrating import asked

place, out, *moments = sys.argv[1:]

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def child(out, moment):
    kind, _, number = moment.partition(" ")
    rename = os.rename
    if kind == "before":
        os.rename = lambda old, new: die() if Path(new).name.startswith(number) else rename(old, new)
    if kind == "after":
        os.rename = lambda old, new: (rename(old, new), die() if Path(new).name.startswith(number) else None)
    last = int(number) if kind == "pass" else None
    module.calibrate(asked(Path(place), Path(out)), lambda done, total: die() if done == last else None)
    os._exit(0)

for out, moment in [(out + ".whole", ""), *((out, moment) for moment in moments), (out, "")]:
    pid = os.fork()
    if pid == 0:
        child(out, moment)
    ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert ended == (-signal.SIGKILL if moment else 0), (moment, ended)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a source and a text; nothing in a test changes them."""
    folder = tmp_path_factory.mktemp("calibrate")
    make_source(folder / "source")
    make_text(folder / "text.txt", words=3000)
    return folder


@pytest.fixture(scope="module")
def calibrated(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Calibrated:
    return calibrate(asked(place, tmp_path_factory.mktemp("made") / "state.safetensors"))


def test_a_file_of_state_has_no_iterations(calibrated: Calibrated) -> None:
    refused = CliRunner().invoke(main, ["inspect", str(calibrated.out), "--iteration", "3"])
    assert refused.exit_code == 2 and "CHECKPOINT is a file of FP8 state" in refused.output


def test_every_gemm_has_a_row_for_each_pass_and_keys_and_values_too(calibrated: Calibrated) -> None:
    states = sidecar.read(calibrated.out)
    caches = [f"decoder.layers.{layer}.self_attention.core_attention" for layer in (0, 1)]
    assert sorted(states.modules) == sorted([*GEMMS, *caches])
    assert (states.producer, states.recipe.amax_history_len) == (CALIBRATED, HISTORY)
    for name, state in states.modules.items():
        for role in IN_USE if name in GEMMS else ("k", "v"):
            assert state.roles[role].amax_history.count_nonzero() == 20, (name, role)  # type: ignore[index]
            assert state.roles[role].amax_history[: HISTORY - 20].count_nonzero() == 0  # type: ignore[index]
    # the sixteenth pass and the last: of two rows of 32 tokens each
    assert states.statistics[GEMMS[0]]["input"].elements == 2 * 2 * 32 * 64
    assert states.statistics[GEMMS[0]]["weight"].elements == 64 * 128
    assert set(states.statistics[caches[0]]) == {"k", "v"}
    assert not calibrated.out.with_name("state.safetensors.partial").exists()


@pytest.mark.soak
def test_a_calibration_killed_at_any_moment_ends_as_one_that_never_was(
    place: Path, calibrated: Calibrated, tmp_path: Path
) -> None:
    moments = [
        "before calibration.json",
        "pass 3",
        "before 00000008",
        "pass 9",
        "pass 16",
        "before state",
        "after state",
    ]
    out = tmp_path / "state.safetensors"
    run_program(KILLED, place, out, *moments)
    assert out.read_bytes() == (tmp_path / "state.safetensors.whole").read_bytes() == calibrated.out.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state.safetensors", "state.safetensors.whole"]


@pytest.mark.parametrize("kind", [signal.SIGTERM, *in_soak(signal.SIGINT)])
def test_a_signal_saves_and_leaves_and_the_same_call_goes_on(
    place: Path, calibrated: Calibrated, tmp_path: Path, kind: signal.Signals
) -> None:
    out, made = tmp_path / "state.safetensors", []

    def stop(done: int, total: int) -> None:
        made.append(done)
        if done == 3:
            os.kill(os.getpid(), kind)

    assert calibrate(asked(place, out), stop).signal == kind
    assert not out.exists()
    assert calibrate(asked(place, out), stop).signal is None
    assert made == list(range(1, 21))
    assert out.read_bytes() == calibrated.out.read_bytes()


def test_what_is_there_is_never_written_over_nor_the_source_written_to(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "state"
    out.write_text("mine")
    with pytest.raises(DestinationExists):
        calibrate(asked(place, out))
    assert out.read_text() == "mine"
    for inside in (place / "source", place / "source/state", place / "source/precisionctl/fp8_state.safetensors"):
        with pytest.raises((OutputError, DestinationExists)):
            calibrate(asked(place, inside))
    (tmp_path / "empty").mkdir()
    with pytest.raises(OutputError, match="--out is a directory"):  # a file cannot take its place
        calibrate(asked(place, tmp_path / "empty"))
    (tmp_path / "other.partial").mkdir()
    (tmp_path / "other.partial/mine").write_text("mine")
    with pytest.raises(OutputError, match="mine is there, and no calibration left it"):
        calibrate(asked(place, tmp_path / "other"))


def test_what_is_refused_before_a_pass_does_not_stand_in_the_way_of_the_corrected_command(tmp_path: Path) -> None:
    make_source(tmp_path / "source", intermediate_size=104)
    make_text(tmp_path / "text.txt")
    with pytest.raises(PrecisionError, match="FP8 GEMMs need multiples of 16"):
        calibrate(asked(tmp_path, tmp_path / "state", passes=1))
    kept = {"precision.keep_bf16": '["*.linear_fc2"]'}
    assert calibrate(asked(tmp_path, tmp_path / "state", passes=1, keys=kept)).passes == 1


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"passes": 21}, "passes"),
        ({"keys": {"data.sequence_length": 16}}, "data, data.sequence_length"),
        ({"keys": {"precision.delayed.margin": 1}}, "precision.delayed.margin"),
    ],
)
def test_another_calibration_under_way_to_the_file_is_refused_by_what_differs(
    place: Path, tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    out = tmp_path / "state"
    calibrate(asked(place, out), lambda done, total: os.kill(os.getpid(), signal.SIGTERM) if done == 1 else None)
    with pytest.raises(OutputError, match=f"it differs in {named} "):
        calibrate(asked(place, out, **changes))


def test_a_recipe_without_state_and_rows_without_positions_are_refused(place: Path, tmp_path: Path) -> None:
    for recipe in ("fp8-current", "fp8-block", "mxfp8"):
        with pytest.raises(RecipeError, match="keeps no state to calibrate"):
            calibrate(asked(place, tmp_path / "a", recipe=recipe))
    with pytest.raises(RecipeError, match="passes = 0 must be 1 or above"):
        calibrate(asked(place, tmp_path / "a", passes=0))
    with pytest.raises(RecipeError, match="beyond the model's 128"):
        calibrate(asked(place, tmp_path / "b", keys={"data.sequence_length": 256}))
    assert not list(tmp_path.iterdir())


def test_a_loss_that_is_no_number_is_no_state(place: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    make_source(tmp_path / "source")
    file = tmp_path / "source/model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][0] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    (tmp_path / "text.txt").write_bytes((place / "text.txt").read_bytes())
    with pytest.raises(PrecisionError, match="the loss of pass 1 is not a number"):
        calibrate(asked(tmp_path, tmp_path / "state"))
    assert not (tmp_path / "state").exists()


def test_less_data_than_passes_is_said_and_seen_once(place: Path, tmp_path: Path) -> None:
    make_text(tmp_path / "short.txt", words=400)
    short = replace(asked(place, tmp_path / "state"), data=tmp_path / "short.txt")
    made = calibrate(short)
    assert made.passes == 400 // 32 // 2
    assert any(note.startswith("6 passes instead of 20: the data has 12 rows") for note in made.notes)


def test_conversations_are_recorded_without_their_padding(place: Path, tmp_path: Path) -> None:
    """A micro-batch of two conversations of different lengths has the largest amaxes of both by themselves."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": "w1"},
                {"role": "assistant", "content": " ".join(f"w{n}" for n in words)},
            ]
        }
        for words in (range(3, 6), range(7, 40))
    ]
    made = {}
    for name, some, size in (("both", rows, 2), ("first", rows[:1], 1), ("second", rows[1:], 1)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, some)))
        sizes = {"train.batch_size": size, "train.micro_batch_size": size, "data.sequence_length": 64}
        one = replace(asked(place, tmp_path / name, passes=1, keys=sizes), data=tmp_path / f"{name}.jsonl")
        calibrate(one)
        made[name] = sidecar.read(tmp_path / name)
    for name, state in made["both"].modules.items():
        for role in ("input", "k", "v"):
            if role in state.roles:
                both, *alone = (float(made[each].modules[name].roles[role].amax_history.max()) for each in made)  # type: ignore[index]
                assert both == pytest.approx(max(alone), rel=2**-6), (name, role)
    real = made["both"].statistics[GEMMS[0]]["input"].elements // 64
    assert real == sum(made[name].statistics[GEMMS[0]]["input"].elements // 64 for name in ("first", "second"))


def test_a_bf16_run_collects_what_calibration_records_and_trains_as_it_would_without(
    place: Path, calibrated: Calibrated, tmp_path: Path
) -> None:
    """At a rate that moves no weight, to the last bit; at any rate weights and losses are those of a plain run."""
    history = {"precision__delayed__amax_history_len": HISTORY, "train__save_every": 10}
    for rate in (1e-30, 1e-2):
        made = {}
        for collect in (True, False):
            plain = settings(
                place / "source",
                place / "text.txt",
                tmp_path / f"{rate} {collect}",
                collect_amax=collect,
                train__steps=10,
                optimizer__lr=rate,
                optimizer__weight_decay=0.0,
                **history,
            )
            made[collect] = run(plain)
        assert made[True][2] == made[False][2]
        (started, finished, _), (_, other, _) = made[True], made[False]
        assert any(note.startswith("amaxes are collected") for note in started.notes)
        assert sidecar.find(other.checkpoint) is None
        collecting, plainly = (open_checkpoint(each.checkpoint) for each in (finished, other))
        for name in plainly.specs:
            assert torch.equal(read_tensor(collecting, name), read_tensor(plainly, name)), name
        states = sidecar.find(finished.checkpoint)
        assert states is not None and (states.producer, states.iteration) == (COLLECTED, 10)
        same = scales(states) == scales(calibrated.states)
        assert same == (rate == 1e-30)


def test_collected_histories_go_on_from_those_that_the_checkpoint_had(place: Path, tmp_path: Path) -> None:
    def collect(source: Path, out: Path, steps: int) -> Path:
        made = settings(source, place / "text.txt", out, collect_amax=True, load="weights", train__steps=steps)
        return run(made)[1].checkpoint

    first = collect(place / "source", tmp_path / "first", 1)
    measured = {"decoder.layers.0.mlp.linear_fc1": {"input": measure(torch.ones(2, 32), torch.float8_e4m3fn, None)}}
    sidecar.write(first / sidecar.RELATIVE, replace(sidecar.read(first / sidecar.RELATIVE), statistics=measured))
    second = collect(first, tmp_path / "second", 1)
    assert sidecar.read(second / sidecar.RELATIVE).statistics == measured
    before, after = (sidecar.read(each / sidecar.RELATIVE).modules for each in (first, second))
    for name, state in after.items():
        for role, part in state.roles.items():
            if part.recorded:  # two passes more, in a history of four rows
                assert torch.equal(part.amax_history[1:2], before[name].roles[role].amax_history[3:]), (name, role)


def test_a_checkpoint_without_a_tokenizer_is_calibrated_with_that_of_a_reference(place: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(place / "source", bare, ignore=shutil.ignore_patterns("tokenizer*", "chat_template*"))
    alone = replace(asked(place, tmp_path / "alone"), checkpoint=bare)
    with pytest.raises(DataError, match="no tokenizer.*Or give a --reference"):
        calibrate(alone)
    made = calibrate(replace(alone, reference=place / "source"))
    same = calibrate(asked(place, tmp_path / "same"))
    assert made.states.modules.keys() == same.states.modules.keys()
    for name, state in same.states.modules.items():
        for role, part in state.roles.items():
            assert torch.equal(made.states.modules[name].roles[role].amax_history, part.amax_history), (name, role)


def test_an_fp8_run_collects_by_itself_and_a_model_that_no_fp8_run_takes_is_told_before(
    place: Path, tmp_path: Path
) -> None:
    said = "--collect-amax is for BF16 runs, and this one is in {}.*{}"
    with pytest.raises(RecipeError, match=said.format("FP8", "delayed scaling records amaxes anyway")):
        run(settings(place / "source", place / "text.txt", tmp_path / "a", "fp8", collect_amax=True))
    with pytest.raises(RecipeError, match=said.format("NVFP4", "this run's scaling takes its own, and keeps none")):
        run(settings(place / "source", place / "text.txt", tmp_path / "a", "nvfp4", collect_amax=True))
    make_source(tmp_path / "odd", intermediate_size=100)
    with pytest.raises(PrecisionError, match="FP8 GEMMs need multiples of 16"):
        run(settings(tmp_path / "odd", place / "text.txt", tmp_path / "b", collect_amax=True))


def test_what_bf16_passes_record_is_what_fp8_training_records(place: Path, tmp_path: Path) -> None:
    """The same batches and weights: FP8 training at a rate that moves no BF16 weight, against calibration, row by row.

    Weights, and the input of the first GEMM (the norm of the embedding), are the same to the last bit. The others have
    gone through FP8 GEMMs. E4M3 rounds an element to 2**-4 of itself at most, E5M2 to 2**-3; an amax is one element of
    a sum of many such, so that errors average: the bounds are those of a single rounding, for each row, and a quarter
    of them for the median.
    """
    keys = {"train.steps": 8, "train.save_every": 8, "optimizer.lr": 1e-30, "optimizer.weight_decay": 0.0}
    calibrate(asked(place, tmp_path / "state", passes=16, keys=keys))
    made = settings(
        place / "source",
        place / "text.txt",
        tmp_path / "run",
        "fp8",
        **{key.replace(".", "__"): value for key, value in keys.items()},
        precision__delayed__amax_history_len=HISTORY,
        fp8_state=tmp_path / "state",
    )
    _, finished, _ = run(made)
    ours, theirs = sidecar.read(tmp_path / "state").modules, open_checkpoint(finished.checkpoint).fp8
    assert theirs is not None
    ratios: dict[str, list[float]] = {"input": [], "grad_output": []}
    for name in GEMMS:
        for role in IN_USE:
            bf16, fp8 = (states[name].roles[role].amax_history[-16:] for states in (ours, theirs.modules))
            assert bf16.count_nonzero() == fp8.count_nonzero() == 16
            if role == "weight" or (role, name) == ("input", GEMMS[0]):
                assert torch.equal(bf16, fp8), (name, role)
            else:
                ratios[role] += ((fp8 - bf16) / bf16).abs().tolist()
    print({role: (max(found), sorted(found)[len(found) // 2]) for role, found in ratios.items()})
    for role, bound in (("input", 2**-4), ("grad_output", 2**-3)):
        assert max(ratios[role]) < bound, role
        assert sorted(ratios[role])[len(ratios[role]) // 2] < bound / 4, role


@pytest.mark.parametrize("pooled", [0.02, *in_soak(0.0)])
def test_calibration_records_what_warm_up_records_also_of_experts_that_losses_balance(
    place: Path, tmp_path: Path, pooled: float
) -> None:
    """Loads of earlier micro-batches, of which `global_aux_loss` is made, play no role in either."""
    make_source(tmp_path / "source", family="mixtral")
    (tmp_path / "text.txt").write_bytes((place / "text.txt").read_bytes())
    keys = {"router.pooled_loss": pooled, "router.global_aux_loss": 0.02, "train.warmup_passes": 3}
    made = calibrate(asked(tmp_path, tmp_path / "state", passes=3, keys=keys)).states.modules
    recipe = read_recipe(
        settings(
            tmp_path / "source",
            tmp_path / "text.txt",
            tmp_path / "run",
            "fp8",
            precision__delayed__amax_history_len=HISTORY,
            **{key.replace(".", "__"): value for key, value in keys.items()},
        )
    )
    source = open_checkpoint(tmp_path / "source")
    with open_tokenizer(source.companions, source.path) as tokenizer:
        rows = tokenized_rows(recipe.data, tokenizer, source.model)
    model = GPT(source.model, recipe.precision, balance=balance_of(source, recipe.router))
    warmed = Run(recipe, model, MasterAdamW(model, recipe.optimizer), rows)
    load_weights(source, warmed)
    start_fp8(warmed, KnownState(), None, cold=False)
    for name, linear in fp8_linears(model).items():
        state = linear.fp8_state()
        assert state is not None
        for role in IN_USE:
            assert torch.equal(state.roles[role].amax_history, made[name].roles[role].amax_history), (name, role)


@pytest.mark.soak
@pytest.mark.parametrize("algorithm", ["max", *in_soak("most_recent")])
def test_a_run_that_starts_from_calibration_is_one_that_warms_up_on_the_same_batches(
    place: Path, tmp_path: Path, algorithm: str
) -> None:
    """To the last bit: losses, weights, and all of the state that the run saves."""
    keys = {"precision.delayed.amax_compute_algo": algorithm, "train.warmup_passes": 5, "train.save_every": 6}
    made = {}
    for name, given in (("warm", None), ("given", tmp_path / "state")):
        if given:
            calibrate(asked(place, given, passes=5, keys=keys))
        changes = {key.replace(".", "__"): value for key, value in keys.items()}
        history = {"precision__delayed__amax_history_len": HISTORY}
        made[name] = run(
            settings(
                place / "source", place / "text.txt", tmp_path / name, "fp8", **changes, **history, fp8_state=given
            )
        )
    assert made["warm"][0].fp8 == {"warm-up": {"input": 8, "weight": 8, "grad_output": 8}}
    assert made["given"][0].fp8 == {"calibrated": {"input": 8, "weight": 8, "grad_output": 8}}
    assert made["warm"][2] == made["given"][2] and len(made["warm"][2]) == 6
    warm, given_ = (open_checkpoint(finished.checkpoint) for _, finished, _ in made.values())
    for name in warm.specs:
        assert torch.equal(read_tensor(warm, name), read_tensor(given_, name)), name
    assert warm.fp8 is not None and given_.fp8 is not None
    ours, theirs = scales(warm.fp8), scales(given_.fp8)
    assert {key: ours[key] for key in ours} == {key: theirs[key] for key in ours}
    assert theirs.keys() == ours.keys()
    assert given_.path is not None and (beside := sidecar.find(given_.path)) is not None
    caches = {f"decoder.layers.{n}.self_attention.core_attention" for n in (0, 1)}
    assert beside.modules.keys() == caches and beside.of_weights != given_.fp8.of_weights, "carried, of other weights"


def test_each_role_comes_from_the_first_that_recorded_it(place: Path, calibrated: Calibrated, tmp_path: Path) -> None:
    """An explicit file before what is carried or collected, that before warm-up, and that before the weights."""
    made = settings(place / "source", place / "text.txt", tmp_path / "bf16", collect_amax=True, train__steps=1)
    collected = run(made)[1].checkpoint
    everything = {"input": 8, "weight": 8, "grad_output": 8}

    def start(source: Path, name: str, **changes: Any) -> Any:
        one = settings(source, place / "text.txt", tmp_path / name, "fp8", load="weights", train__steps=1, **changes)
        return run(one)[0].fp8

    assert start(collected, "collected") == {"collected in BF16 training": everything}
    carried = tmp_path / "collected" / "iter_0000001"
    assert start(carried, "carried") == {"carried": everything}
    assert start(carried, "given", fp8_state=calibrated.out) == {"calibrated": everything}
    states = sidecar.read(calibrated.out)
    fresh = Fp8State.fresh(HISTORY).roles
    parts = {name: state for name, state in states.modules.items() if name in GEMMS[:6]}
    parts[GEMMS[0]] = Fp8State({**parts[GEMMS[0]].roles, "grad_output": fresh["grad_output"]})
    sidecar.write(tmp_path / "some", replace(states, modules=parts))
    assert start(place / "source", "from some", fp8_state=tmp_path / "some") == {
        "calibrated": {"input": 6, "weight": 6, "grad_output": 5},
        "warm-up": {"input": 2, "weight": 2, "grad_output": 3},
    }
    weight = states.modules[GEMMS[0]].roles["weight"]
    thrice = RoleState(weight.scale / 3, weight.amax_history * 3)
    off = Fp8State({**states.modules[GEMMS[0]].roles, "weight": thrice})
    sidecar.write(tmp_path / "off", replace(states, modules={**states.modules, GEMMS[0]: off}))
    assert start(place / "source", "from off", fp8_state=tmp_path / "off") == {
        "calibrated": {"input": 8, "weight": 7, "grad_output": 8},
        "from the weights": {"weight": 1},
    }
    with pytest.raises(RecipeError, match="Leave one of them out"):
        start(place / "source", "cold", fp8_state=calibrated.out, cold_start=True)
    with pytest.raises(RecipeError, match="this run keeps none"):
        start(place / "source", "current", fp8_state=calibrated.out, precision__scaling="current")


def test_a_file_of_another_model_is_refused_by_its_name(place: Path, calibrated: Calibrated, tmp_path: Path) -> None:
    make_source(tmp_path / "smaller", num_hidden_layers=1)
    with pytest.raises(MappingError, match=r"`decoder.layers.1.*which this model does not have.*state.safetensors"):
        run(settings(tmp_path / "smaller", place / "text.txt", tmp_path / "run", "fp8", fp8_state=calibrated.out))


@pytest.mark.soak
def test_another_file_makes_another_run(place: Path, calibrated: Calibrated, tmp_path: Path) -> None:
    made = settings(place / "source", place / "text.txt", tmp_path / "run", "fp8", fp8_state=calibrated.out)
    resume(made, lambda started: None, lambda step: os.kill(os.getpid(), signal.SIGTERM) if step.step == 1 else None)
    with pytest.raises(OutputError, match="it differs in fp8_state "):
        run(replace(made, fp8_state=None))
    assert run(made)[1].step == 6


@pytest.mark.parametrize("container", ["torch_dist", *in_soak("torch")])
def test_a_conversion_with_the_state_is_what_a_run_with_the_state_starts_from(
    place: Path, calibrated: Calibrated, tmp_path: Path, container: str
) -> None:
    recipe = load_recipe("fp8-delayed", [f"precision.delayed.amax_history_len={HISTORY}"]).precision
    asked_for = Request(
        place / "source",
        tmp_path / "converted",
        to="megatron",
        precision="fp8",
        container=container,
        recipe=recipe,
        fp8_state=calibrated.out,
    )
    work = carry_out(asked_for)
    assert any(str(calibrated.out) in note for note in work.notes)
    assert not any("come from the weights" in note for note in work.notes)
    found = open_checkpoint(tmp_path / "converted").fp8
    assert found is not None and found.producer == CALIBRATED
    assert scales(found) == scales(calibrated.states)
    execute(
        plan_command(replace(asked_for, destination=tmp_path / "bf16", precision="bf16", recipe=None, fp8_state=None))
    )
    made = {}
    for name, given in (("converted", None), ("bf16", calibrated.out)):
        keys = {"load": "weights", "fp8_state": given, "precision__delayed__amax_history_len": HISTORY}
        made[name] = run(settings(tmp_path / name, place / "text.txt", tmp_path / f"run-{name}", "fp8", **keys))
        assert made[name][0].fp8 == {"calibrated": {"input": 8, "weight": 8, "grad_output": 8}}
    assert made["converted"][2] == made["bf16"][2]


def test_a_file_comes_before_what_a_checkpoint_carries(place: Path, calibrated: Calibrated, tmp_path: Path) -> None:
    run(settings(place / "source", place / "text.txt", tmp_path / "run", "fp8", train__steps=1))
    carried = open_checkpoint(tmp_path / "run").fp8
    some = dict(list(calibrated.states.modules.items())[:3])
    sidecar.write(tmp_path / "some", replace(calibrated.states, modules=some))
    for name, drop in (("filled", False), ("dropped", True)):
        conversion = Request(
            tmp_path / "run", tmp_path / name, to="hf", drop_fp8_state=drop, fp8_state=tmp_path / "some"
        )
        execute(plan_command(conversion))
    filled, dropped = (sidecar.find(tmp_path / name) for name in ("filled", "dropped"))
    assert carried and filled and dropped and scales(dropped) == scales(sidecar.read(tmp_path / "some"))
    recipe = replace(carried.recipe, amax_history_len=dropped.recipe.amax_history_len)  # no row of the file is cut off
    given, own = under_recipe(recipe, dropped), under_recipe(recipe, carried)
    rest = {name: state for name, state in own.items() if name not in some}
    assert scales(filled) == scales(replace(carried, modules={**given, **rest}))


def test_an_export_takes_its_input_scales_from_the_file(place: Path, calibrated: Calibrated, tmp_path: Path) -> None:
    with pytest.raises(MissingFp8State, match="precisionctl calibrate"):
        plan_command(Request.export(place / "source", tmp_path / "a", target="vllm", scheme="static"))
    export = Request.export(place / "source", tmp_path / "b", target="vllm", fp8_state=calibrated.out)
    execute(plan_command(export))
    with safe_open(tmp_path / "b/model.safetensors", "pt") as file:
        for layer in (0, 1):
            history = calibrated.states.modules[f"decoder.layers.{layer}.mlp.linear_fc2"].roles["input"].amax_history
            stored = file.get_tensor(f"model.layers.{layer}.mlp.down_proj.input_scale")
            assert float(stored) == float(history.max() / 448)
    with pytest.raises(RecipeError, match="Leave --fp8-state out"):
        plan_command(replace(export, destination=tmp_path / "c", scheme="dynamic"))


def test_the_command_says_what_it_recorded_and_what_to_do_with_it(place: Path, tmp_path: Path) -> None:
    words = ["calibrate", place / "source", "--data", place / "text.txt", "--out", tmp_path / "state"]
    words += ["--passes", 2, "--sequence-length", 32, "--batch-size", 2, "--backend", "emulated"]
    shown = CliRunner().invoke(main, [str(word) for word in words])
    assert shown.exit_code == 0, shown.output
    assert "2 passes of 2 rows; recorded input 8, weight 8, grad_output 8, k 2, v 2" in " ".join(shown.stdout.split())
    assert f"--fp8-state {tmp_path / 'state'}" in shown.stdout.replace("\n", "")
    assert sidecar.read(tmp_path / "state").recipe.amax_history_len == 1024


@pytest.mark.soak
@pytest.mark.parametrize("family", ["deepseek-v3", "mixtral", "gpt-oss", "gemma2"])
def test_other_families_start_from_their_calibration_experts_by_themselves(
    place: Path, tmp_path: Path, family: str
) -> None:
    sizes = {"q_lora_rank": 32, "qk_rope_head_dim": 16} if family == "deepseek-v3" else {}  # for FP8 GEMMs
    make_source(tmp_path / "source", family=family, **sizes)
    (tmp_path / "text.txt").write_bytes((place / "text.txt").read_bytes())
    made = calibrate(asked(tmp_path, tmp_path / "state", passes=4))
    on = settings(
        tmp_path / "source", tmp_path / "text.txt", tmp_path / "run", "fp8", fp8_state=made.out, train__steps=1
    )
    started, finished, losses = run(on)
    plan = make_plan(open_checkpoint(tmp_path / "source"), "megatron")
    gemms = {name: shape[0] if shape else 1 for name, shape in plan.gemms.items()}
    counts = {source: counted["weight"] for source, counted in started.fp8.items() if "weight" in counted}
    assert counts == {"calibrated": sum(gemms.values())}
    for name, shape in plan.gemms.items():
        assert made.states.modules[name].shape == shape
    caches = [state for name, state in made.states.modules.items() if name.endswith("core_attention")]
    assert len(caches) == plan.model.num_layers
    assert all(set(state.roles) == ({"k"} if plan.model.mla else {"k", "v"}) for state in caches)
    assert losses[0] < 10
    beside = sidecar.find(finished.checkpoint)
    assert beside is not None and len(beside.modules) == len(caches), "keys and values go along"


def test_the_data_of_the_recipe_are_taken_where_the_command_names_none(
    place: Path, calibrated: Calibrated, tmp_path: Path
) -> None:
    made = asked(place, tmp_path / "state", keys={"data.path": place / "text.txt"})
    assert calibrate(replace(made, data=None)).passes == 20
    assert (tmp_path / "state").read_bytes() == calibrated.out.read_bytes()
    with pytest.raises(RecipeError, match="no data to train on"):
        calibrate(replace(asked(place, tmp_path / "other"), data=None))


@pytest.mark.parametrize("content", ["", "[]", "[" * 100_000, "{", '"identity"'])
def test_damaged_progress_is_said_and_not_gone_on_from(place: Path, tmp_path: Path, content: str) -> None:
    partial = tmp_path / "state.partial"
    partial.mkdir()
    (partial / "calibration.json").write_text(content)
    with pytest.raises(DamagedCheckpoint, match="not readable as JSON|not a JSON object"):
        calibrate(asked(place, tmp_path / "state"))


@pytest.mark.parametrize("damage", ["folder", "cut", "another kind"])
def test_a_state_file_that_is_none_is_refused_before_anything_is_made(
    place: Path, calibrated: Calibrated, tmp_path: Path, damage: str
) -> None:
    file = tmp_path / "state"
    if damage == "folder":
        file.mkdir()
    else:
        file.write_bytes(calibrated.out.read_bytes()[:-100] if damage == "cut" else b"{}" * 100)
    with pytest.raises((DamagedCheckpoint, UnknownFormat, OSError)):
        run(settings(place / "source", place / "text.txt", tmp_path / "run", "fp8", fp8_state=file))
    conversion = Request(place / "source", tmp_path / "dst", to="megatron", precision="fp8", fp8_state=file)
    with pytest.raises((DamagedCheckpoint, UnknownFormat, OSError)):
        plan_command(conversion)
    assert not list(tmp_path.glob("dst*")) and not list((tmp_path / "run").glob("iter_*"))


def test_a_file_beside_what_a_killed_calibration_left_is_not_taken_for_its_result(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "state.safetensors"
    out.write_bytes(b"of another")
    partial = tmp_path / "state.safetensors.partial"
    partial.mkdir()
    for identity in (None, {"passes": 7}):
        if identity:
            (partial / "calibration.json").write_text(json.dumps(identity))
        with pytest.raises(DestinationExists):
            calibrate(asked(place, out))
        assert out.read_bytes() == b"of another"


def test_another_number_of_ranks_is_told_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="differs in ranks .*as many ranks as it was begun with"):
        run_folder.check_same(run_folder.Saved(0, 0, {"ranks": 2}), {}, tmp_path)


def test_ranks_that_go_on_neither_measure_a_weight_again_nor_count_it_twice(tmp_path: Path) -> None:
    """Statistics on the disk are merged: the first rank has all, the others know which weights were measured."""
    weight, values = torch.ones(16, 32), torch.ones(4, 32)
    measuring = Recorder(PRESETS["fp8-delayed"], torch.device("cpu"))
    measuring.measuring = True
    measuring.gemm("decoder.layers.0.mlp.linear_fc1", values, weight, torch.ones(4, 16))
    states = Fp8States(
        measuring.precision.delayed,
        measuring.states(),
        producer=CALIBRATED,
        statistics=measuring.statistics,
        of_weights="",
    )
    output, elements = Output(tmp_path / "state"), dict.fromkeys(("weight", "input"), 0)
    for first in (True, False):
        world = World()
        world.first = first
        progress, going_on = Progress(output, {}, world), Recorder(measuring.precision, torch.device("cpu"), world)
        if first:
            with progress.locked():
                progress.save(16, states)
        assert progress.load(going_on) == 16
        going_on.measuring = True
        going_on.gemm("decoder.layers.0.mlp.linear_fc1", values, weight, torch.ones(4, 16))
        for role in elements:
            elements[role] += going_on.statistics["decoder.layers.0.mlp.linear_fc1"][role].elements
    assert elements == {"weight": 16 * 32, "input": (1 + 2) * 4 * 32}


def test_a_thread_that_is_not_the_main_one_calibrates_too(place: Path, calibrated: Calibrated, tmp_path: Path) -> None:
    out = tmp_path / "state.safetensors"
    with ThreadPoolExecutor(1) as threads:
        threads.submit(calibrate, asked(place, out)).result()
    assert out.read_bytes() == calibrated.out.read_bytes()
