"""`resume`: runs that are killed, stopped, branched and continued are the runs that they would have been."""

import fcntl
import json
import os
import signal
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pico import save as save_pico
from programs import run_program
from soaking import in_soak
from training import SMALL, contents, losses, make_place, make_source, make_text, run, scales, settings

from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import execute
from precisionctl.errors import CheckpointError, DamagedCheckpoint, DataError, OutputError, RecipeError
from precisionctl.evaluate import evaluate, load
from precisionctl.fp8 import sidecar
from precisionctl.fp8.state import DelayedScaling, Fp8States
from precisionctl.trainer.backends.base import fp8_linears
from precisionctl.trainer.measure.metrics import FILE, StepMetrics, read_metrics
from precisionctl.trainer.resume import resume

KILLED = """
import os, signal, sys
from training import settings
from precisionctl.checkpoints.output import Output
from precisionctl.trainer.saved import saving
from precisionctl.trainer.resume import resume
from pathlib import Path

source, data, held_out, out, precision, *moments = sys.argv[1:]

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def child(out, moment, precision):
    kind, _, step = moment.partition(" ")
    if kind == "commit":
        Output.commit = die
    if kind == "tracker":
        saving.write_tracker = die
    if kind == "drop":
        saving.prune = die
    if kind == "write":
        saving.LocalRows.sync = die
    precision, _, more = precision.partition(" ")
    changes = {
        "": {},
        "--collect-amax": {"collect_amax": True},
        "fp8-lm": {"optimizer__preset": "fp8-lm"},
        "muon": {"optimizer__preset": "muon"},
        "muon,async": {"optimizer__preset": "muon", "train__async_save": not out.endswith("-whole")},
        "async": {"train__async_save": not out.endswith("-whole")},
        "fp8-lm,async": {"optimizer__preset": "fp8-lm", "train__async_save": not out.endswith("-whole")},
    }[more]
    made = settings(Path(source), Path(data), Path(out), precision, data__held_out=held_out, **changes)
    resume(made, lambda started: None, lambda metrics: die() if kind == "step" and metrics.step == int(step) else None)
    os._exit(0)

for out, moment in [(out + "-whole", ""), *((out, moment) for moment in moments), (out, "")]:
    pid = os.fork()
    if pid == 0:
        child(out, moment, precision)
    ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert ended == (-signal.SIGKILL if moment else 0), (moment, ended)
"""
MOMENTS = ["step 1", "commit", "step 2", "tracker", "step 3", "drop", "step 5", "step 6"]
MEANWHILE = ["step 1", "write", "step 3", "commit"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("resume"))


@pytest.fixture(scope="module")
def fp8_run(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("fp8") / "run"
    run(settings(place / "source", place / "text.txt", out, "fp8"))
    return out


def same_state(a: Fp8States | None, b: Fp8States) -> bool:
    return a is not None and (scales(a), a.iteration, a.recipe) == (scales(b), b.iteration, b.recipe)


@pytest.mark.parametrize(
    "precision",
    [
        "fp8 async",
        *(
            pytest.param(name, marks=pytest.mark.soak)
            for name in (
                *("bf16", "fp8", "fp8 fp8-lm,async", "bf16 --collect-amax", "fp8 fp8-lm", "bf16 async"),
                *("fp8 muon", "bf16 muon,async"),
            )
        ),
    ],
)
def test_a_run_killed_at_any_step_ends_as_one_that_never_was(place: Path, tmp_path: Path, precision: str) -> None:
    out = tmp_path / "run"
    where = [place / "source", place / "text.txt", place / "held_out.txt", out, precision]
    moments = MEANWHILE if "async" in precision else MOMENTS
    run_program(KILLED, *where, *moments)
    whole = tmp_path / "run-whole"
    assert [row[0] for row in losses(whole)] == [("step", step) for step in range(1, 7)]
    assert losses(out) == losses(whole)
    assert contents(out / "iter_0000006") == contents(whole / "iter_0000006")
    assert sorted(path.name for path in out.glob("iter_*")) == ["iter_0000004", "iter_0000006"]


@pytest.mark.parametrize("kind", [signal.SIGTERM, *in_soak(signal.SIGINT)])
def test_a_signal_saves_and_leaves_and_the_same_command_goes_on(place: Path, tmp_path: Path, kind: Any) -> None:
    made = settings(place / "source", place / "text.txt", tmp_path / "run", "bf16")
    finished = resume(made, lambda started: None, lambda step: os.kill(os.getpid(), kind) if step.step == 3 else None)
    assert (finished.step, finished.stopped) == (3, kind)
    assert finished.checkpoint.name == "iter_0000003" and finished.checkpoint.is_dir()
    started, finished, made_losses = run(made)
    assert (started.step, finished.step, finished.stopped, len(made_losses)) == (3, 6, None, 3)
    whole = settings(place / "source", place / "text.txt", tmp_path / "whole", "bf16")
    run(whole)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_another_run_in_the_folder_is_refused_by_what_differs(place: Path, tmp_path: Path) -> None:
    make_text(place / "other.txt", seed=5)
    make_source(place / "other", seed=1)
    out = tmp_path / "run"
    same = {"source": "source", "data": "text.txt", "train__steps": 2, "schedule__kind": "wsd"}
    for named, changes in {
        "": {},
        "optimizer.lr": {"optimizer__lr": 0.02},
        "train.steps": {"train__steps": 8},
        "precision.fp8": {"precision": "fp8"},
        "data": {"data": "other.txt"},
        "source": {"source": "other"},
    }.items():
        fields: dict[str, Any] = same | changes
        source, data = place / fields.pop("source"), place / fields.pop("data")
        with pytest.raises(OutputError, match=f"it differs in {named} ") if named else nullcontext():
            run(settings(source, data, out, **fields))


@pytest.mark.parametrize(
    "name",
    [
        "iter_0000003/mp_rank_00/model_optim_rng.pt",
        "iter_0000999/metadata.json",
        "iter_0000002.partial/__0_0.distcp",
        "latest_checkpointed_iteration.txt",
        "config.json",
        "model-00001-of-00002.safetensors",
    ],
)
def test_a_folder_with_checkpoints_of_another_program_is_refused_and_left_as_it_is(
    place: Path, tmp_path: Path, name: str
) -> None:
    foreign = tmp_path / name
    foreign.parent.mkdir(exist_ok=True, parents=True)
    foreign.write_text("3")
    with pytest.raises(OutputError, match=f"{name.partition('/')[0]} is there, and no run of this program wrote it"):
        run(settings(place / "source", place / "text.txt", tmp_path, train__steps=2))
    assert foreign.read_text() == "3"


def test_pruning_takes_what_is_older_and_ours_and_what_a_kill_left_of_it(place: Path, tmp_path: Path) -> None:
    (tmp_path / "iter_0000003.partial").mkdir()  # killed before its first file
    killed, ours = tmp_path / "iter_0000005.partial/precisionctl/run.json", {"iter_0000006"}
    killed.parent.mkdir(parents=True)
    killed.write_text("{")
    foreign = {"iter_0000001", "iter_0000999", "iter_0000998.partial"}

    def another_program_saves(metrics: StepMetrics) -> None:
        for name in foreign:
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "model.pt").touch()

    made = settings(place / "source", place / "text.txt", tmp_path, train__keep=1)
    resume(made, lambda started: None, another_program_saves)
    assert {path.name for path in tmp_path.glob("iter_*")} == ours | foreign


def test_a_source_whose_model_or_fp8_state_was_edited_is_another_source(place: Path, tmp_path: Path) -> None:
    source = make_source(tmp_path / "source")
    made = settings(source, place / "text.txt", tmp_path / "run", train__steps=1)
    run(made)
    sidecar.write(source / sidecar.RELATIVE, Fp8States(DelayedScaling(), {}))
    with pytest.raises(OutputError, match="it differs in source "):
        run(made)
    (source / sidecar.RELATIVE).unlink()
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    with pytest.raises(OutputError, match="it differs in model.norm_epsilon "):
        run(made)


def test_a_tokenizer_with_more_words_than_the_model_is_one_clear_error(place: Path, tmp_path: Path) -> None:
    source = make_source(tmp_path / "source")
    save_pico(source, vocab_size=40)
    message = "the data has token 64, but the model's last token is 39"
    with pytest.raises(DataError, match=message):
        run(settings(source, place / "text.txt", tmp_path / "run"))
    with pytest.raises(DataError, match=message):
        evaluate(open_checkpoint(source), place / "text.txt")


def test_a_damaged_note_of_where_a_run_was_is_one_clear_error(place: Path, tmp_path: Path) -> None:
    _, first, _ = run(settings(place / "source", place / "text.txt", tmp_path / "first", train__steps=1))
    note = first.checkpoint / "precisionctl/run.json"
    written = json.loads(note.read_text())
    for changes in (
        *({"identity": {}}, {"identity": []}, {"step": "2"}, {"step": True}, {"more": 1}),
        *({"position": None}, {"position": -1}, {"position": 1 << 63}, {"skips": {"total": 0, "running": -1}}),
    ):
        note.write_text(json.dumps(written | changes))
        with pytest.raises(DamagedCheckpoint, match="not what a run writes"):
            run(settings(first.checkpoint, place / "text.txt", tmp_path / "second", load="full"))


def test_what_changes_no_number_may_change_and_a_constant_rate_may_run_longer(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(settings(place / "source", place / "text.txt", out, schedule__kind="constant", train__steps=2))
    longer = settings(
        place / "source", place / "text.txt", out, schedule__kind="constant", train__steps=4, train__keep=1
    )
    started, finished, _ = run(longer)
    assert (started.step, finished.step) == (2, 4)
    assert [path.name for path in out.glob("iter_*")] == ["iter_0000004"]
    whole = tmp_path / "whole"
    run(settings(place / "source", place / "text.txt", whole, schedule__kind="constant", train__steps=4))
    assert losses(out) == losses(whole)


def test_full_goes_on_with_step_optimizer_and_data_and_weights_begin_anew(place: Path, tmp_path: Path) -> None:
    first = tmp_path / "first"
    _, _, whole = run(settings(place / "source", place / "text.txt", first))
    branch = first / "iter_0000004"
    started, _, made = run(settings(branch, place / "text.txt", tmp_path / "full"))
    assert (started.plan.load, started.step) == ("full", 4)
    assert made == whole[4:]
    started, _, made = run(settings(branch, place / "text.txt", tmp_path / "weights", load="weights"))
    assert (started.plan.load, started.step, len(made)) == ("weights", 0, 6)
    assert any("left behind" in note for note in started.notes)


def test_other_data_begins_at_its_first_row_where_the_optimizer_goes_on(place: Path, tmp_path: Path) -> None:
    run(settings(place / "source", place / "text.txt", tmp_path / "first", train__steps=2))
    make_text(tmp_path / "new.txt", seed=9)
    run(settings(tmp_path / "first", tmp_path / "new.txt", tmp_path / "second", train__steps=4))
    saved = json.loads((tmp_path / "second/iter_0000004/precisionctl/run.json").read_text())
    assert (saved["step"], saved["position"]) == (4, 2 * SMALL["train.batch_size"])


def test_full_needs_an_optimizer_and_steps_left(place: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no optimizer state"):
        run(settings(place / "source", place / "text.txt", tmp_path / "out", load="full"))
    run(settings(place / "source", place / "text.txt", tmp_path / "first", train__steps=2))
    with pytest.raises(RecipeError, match="at step 2, and train.steps is 2"):
        run(settings(tmp_path / "first", place / "text.txt", tmp_path / "second", train__steps=2))


def test_an_fp8_run_starts_from_warm_up_passes_and_says_so(place: Path, tmp_path: Path) -> None:
    started, _, _ = run(settings(place / "source", place / "text.txt", tmp_path / "run", "fp8", train__steps=1))
    assert started.fp8 == {"warm-up": {"input": 8, "weight": 8, "grad_output": 8}}


def test_without_warm_up_passes_only_the_weights_are_known(place: Path, tmp_path: Path) -> None:
    made = settings(
        place / "source", place / "text.txt", tmp_path / "run", "fp8", train__steps=1, train__warmup_passes=0
    )
    started, _, _ = run(made)
    assert started.fp8 == {"from the weights": {"weight": 8}, "never recorded": {"input": 8, "grad_output": 8}}
    assert any("a role that no warm-up pass recorded" in note for note in started.notes)


def test_carried_state_is_used_as_it_is(fp8_run: Path, place: Path, tmp_path: Path) -> None:
    started, _, _ = run(settings(fp8_run, place / "text.txt", tmp_path / "run", "fp8", load="weights"))
    assert started.fp8 == {"carried": {"input": 8, "weight": 8, "grad_output": 8}}
    assert not any("the FP8 state is of a run with" in note for note in started.notes)


def test_another_recipe_than_that_of_the_carried_state_is_said(fp8_run: Path, place: Path, tmp_path: Path) -> None:
    other = {"load": "weights", "train__steps": 1, "precision__delayed__margin": 1}
    started, _, _ = run(settings(fp8_run, place / "text.txt", tmp_path / "run", "fp8", **other))
    said = "the FP8 state is of a run with margin 0; this recipe has margin 1 (--set precision.delayed.KEY=VALUE)"
    assert said in started.notes


@pytest.mark.parametrize(("container", "count"), [("torch_dist", 10), *in_soak(("torch_dist", 50), ("torch", 50))])
def test_by_way_of_hugging_face_and_back_the_next_losses_are_the_same_to_the_last_bit(
    fp8_run: Path, place: Path, tmp_path: Path, container: str, count: int
) -> None:
    execute(plan_command(Request(fp8_run, tmp_path / "hf", to="hf")))
    execute(plan_command(Request(tmp_path / "hf", tmp_path / "megatron", to="megatron", container=container)))
    on = {"precision": "fp8", "load": "weights", "train__steps": count, "train__save_every": count}
    started, _, there = run(settings(tmp_path / "megatron", place / "text.txt", tmp_path / "there", **on))
    _, _, here = run(settings(fp8_run, place / "text.txt", tmp_path / "here", **on))
    assert started.fp8 == {"carried": {"input": 8, "weight": 8, "grad_output": 8}}
    assert there == here and len(here) == count
    assert losses(tmp_path / "there") == losses(tmp_path / "here")


def test_a_bf16_run_carries_fp8_state_along_untouched(fp8_run: Path, place: Path, tmp_path: Path) -> None:
    started, finished, _ = run(settings(fp8_run, place / "text.txt", tmp_path / "run", load="weights"))
    assert any("carried along" in note for note in started.notes)
    assert (finished.checkpoint / "precisionctl/fp8_state.safetensors").is_file()
    assert scales(open_checkpoint(finished.checkpoint).fp8) == scales(open_checkpoint(fp8_run).fp8)


def test_a_cold_start_drops_even_what_was_carried(fp8_run: Path, place: Path, tmp_path: Path) -> None:
    cold = settings(fp8_run, place / "text.txt", tmp_path / "a", "fp8", load="weights", cold_start=True, train__steps=1)
    started, finished, _ = run(cold)
    assert started.fp8 == {"never recorded": {"input": 8, "weight": 8, "grad_output": 8}}
    for (_, role), (_, history) in scales(open_checkpoint(finished.checkpoint).fp8).items():
        # one update, of two micro-batches: their two rows, and nothing of the run before
        assert sum(row != 0 for row in history) == (2 if role in ("input", "weight", "grad_output") else 0)


@pytest.mark.parametrize("changes", [{"precision": "bf16"}, {"precision": "fp8", "precision__scaling": "block"}])
def test_a_cold_start_without_state_to_empty_is_refused(place: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="this run keeps none"):
        run(settings(place / "source", place / "text.txt", tmp_path / "run", cold_start=True, **changes))


@pytest.mark.soak
def test_state_of_modules_kept_in_bf16_goes_along_beside_and_keeps_its_date(
    fp8_run: Path, place: Path, tmp_path: Path
) -> None:
    keep = settings(
        fp8_run,
        place / "text.txt",
        tmp_path / "keep",
        "fp8",
        load="weights",
        train__steps=3,
        precision__keep_bf16=["decoder.layers.0.*"],
    )
    resume(keep, lambda started: None, lambda step: os.kill(os.getpid(), signal.SIGTERM) if step.step == 1 else None)
    _, finished, _ = run(keep)
    reader = open_checkpoint(finished.checkpoint)
    live, carried = reader.fp8, sidecar.find(finished.checkpoint)
    assert live is not None and carried is not None
    assert {name[:16] for name in live.modules} == {"decoder.layers.1"} and live.iteration == 3
    assert {name[:16] for name in carried.modules} == {"decoder.layers.0"} and carried.iteration == 6
    before = scales(open_checkpoint(fp8_run).fp8)
    assert scales(carried) == {key: value for key, value in before.items() if key[0] in carried.modules}
    model, _ = load(reader)
    assert set(fp8_linears(model)) == set(live.modules)
    again = replace(keep, checkpoint=finished.checkpoint, out=tmp_path / "again")
    assert same_state(sidecar.find(run(again)[1].checkpoint), carried)
    started, finished, _ = run(settings(finished.checkpoint, place / "text.txt", tmp_path / "bf16", load="weights"))
    assert any(note.startswith("older FP8 state of 4 modules is left behind") for note in started.notes)
    assert same_state(sidecar.find(finished.checkpoint), live)


def test_current_scaling_trains_without_state_and_carries_what_there_is(
    fp8_run: Path, place: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    started, finished, _ = run(
        settings(fp8_run, place / "text.txt", out, "fp8", load="weights", precision__scaling="current")
    )
    assert started.fp8 == {}
    assert scales(open_checkpoint(finished.checkpoint).fp8) == scales(open_checkpoint(fp8_run).fp8)


def test_masters_keep_the_source_s_fp32_values_where_the_model_rounds_them(place: Path, tmp_path: Path) -> None:
    _, finished, _ = run(settings(place / "source", place / "text.txt", tmp_path / "run", optimizer__lr=1e-30))
    saved = TorchDistReader(finished.checkpoint)
    name = "decoder.layers.0.mlp.linear_fc2.weight"
    source = read_tensor(open_checkpoint(place / "source"), "model.layers.0.mlp.down_proj.weight")
    assert source.dtype == torch.float32 and not torch.equal(source, source.bfloat16().float())
    assert torch.equal(read_tensor(saved, name), source.bfloat16())
    optimizer: Any = SimpleNamespace(specs=saved.optimizer_specs, chunks=saved.chunks)
    assert torch.equal(read_tensor(optimizer, f"optimizer.state.param.{name}"), source)


def test_refused_data_leaves_no_folder_of_a_run(place: Path, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text("{")
    for data in (tmp_path / "nowhere.txt", tmp_path / "data.jsonl"):
        with pytest.raises(DataError):
            run(settings(place / "source", data, tmp_path / "run"))
        assert not (tmp_path / "run").exists()


def test_two_processes_never_write_into_one_run(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    with open(out / "run.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(OutputError, match="another process"):
            run(settings(place / "source", place / "text.txt", out))


def test_a_source_is_never_written_to(fp8_run: Path, place: Path) -> None:
    for source in (fp8_run, fp8_run / "iter_0000006"):
        with pytest.raises(OutputError, match="a source is never written to"):
            run(settings(source, place / "text.txt", fp8_run))
    with pytest.raises(OutputError, match="a source is never written to"):
        run(settings(place / "source", place / "text.txt", place / "source" / "run"))


@pytest.mark.parametrize("key", ["precision__delayed__fp8_dpa", "precision__delayed__fp8_mha"])
def test_attention_in_fp8_is_refused_and_not_passed_over(place: Path, tmp_path: Path, key: str) -> None:
    with pytest.raises(RecipeError, match="attention into FP8, which is not supported here"):
        run(settings(place / "source", place / "text.txt", tmp_path / "run", "fp8", **{key: "true"}))


def test_rows_longer_than_the_model_s_positions_are_refused(place: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="beyond the model's 128"):
        run(settings(place / "source", place / "text.txt", tmp_path / "run", data__sequence_length=129))


def test_conversations_are_fine_tuned_on_the_assistant_s_words_alone(place: Path, tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": f"w{n} w1"}, {"role": "assistant", "content": f"w{n} w{n}"}]}
        for n in range(8)
    ]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run(settings(place / "source", tmp_path / "chat.jsonl", tmp_path / "run", "fp8", train__steps=2))
    assert [row["tokens"] for row in read_metrics(tmp_path / "run" / FILE)] == [4 * 3, 2 * 4 * 3]  # two words and <end>


def test_micro_batches_add_up_to_their_batch_however_its_targets_are_spread(place: Path, tmp_path: Path) -> None:
    def reply(words: int) -> dict[str, str]:
        return {"role": "assistant", "content": " ".join(f"w{n}" for n in range(words))}

    rows = [{"messages": [{"role": "user", "content": "w5"}, reply(words)]} for words in (1, 2, 20, 7)]
    (tmp_path / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    made = []
    for size in (1, 2, 4):
        out = tmp_path / str(size)
        run(settings(place / "source", tmp_path / "chat.jsonl", out, train__steps=1, train__micro_batch_size=size))
        made.append([*read_metrics(out / FILE)][0])
    assert [row["tokens"] for row in made] == [1 + 2 + 20 + 7 + 4] * 3
    for row in made[1:]:
        assert row["loss"] == pytest.approx(made[0]["loss"], rel=1e-4)
        assert row["grad_norm"] == pytest.approx(made[0]["grad_norm"], rel=1e-2)  # BF16 gradients


@pytest.mark.soak
def test_a_run_learns(place: Path, tmp_path: Path) -> None:
    _, _, made = run(
        settings(place / "source", place / "text.txt", tmp_path / "run", "fp8", train__steps=16, train__save_every=16)
    )
    assert sum(made[-5:]) / 5 < 0.8 * made[0]


@pytest.mark.soak
def test_a_blend_of_text_and_packed_conversations_stopped_between_updates_goes_on_as_it_would_have(
    place: Path, tmp_path: Path
) -> None:
    """Each update takes rows of both, in two micro-batches; tokens are made once."""
    words = (place / "text.txt").read_text().split()
    asked = [{"prompt": " ".join(words[i : i + 5]) + " ", "completion": words[i + 5]} for i in range(0, 600, 6)]
    (tmp_path / "asked.jsonl").write_text("\n".join(json.dumps(row) for row in asked))
    recipe = tmp_path / "blend.toml"
    recipe.write_text(f"""
        [precision]
        fp8 = false
        [data]
        packing = true
        [[data.blend]]
        path = "{place / "text.txt"}"
        weight = 0.75
        [[data.blend]]
        path = "{tmp_path / "asked.jsonl"}"
        weight = 0.25
        """)

    def going(out: Path, steps: int) -> list[float]:
        changes = {"train__steps": steps, "schedule__kind": "constant", "data__cache": '""'}
        made = settings(place / "source", place, out, recipe=str(recipe), **changes)
        return run(replace(made, data=None))[2]

    whole = going(tmp_path / "whole", 6)
    parts = going(tmp_path / "parts", 3) + going(tmp_path / "parts", 6)
    assert parts == whole and len(set(whole)) == 6
    assert contents(tmp_path / "parts" / "iter_0000006") == contents(tmp_path / "whole" / "iter_0000006")
    assert len([path for path in (tmp_path / "parts" / "tokens").iterdir() if path.is_dir()]) == 2
    with pytest.raises(OutputError, match=r"differs in data \("):
        recipe.write_text(recipe.read_text().replace("0.75", "0.5"))
        going(tmp_path / "parts", 9)
