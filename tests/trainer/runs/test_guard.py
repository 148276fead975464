"""The guard: looking at FP8 beside BF16 changes nothing, says what is so, and what it decides survives every kill."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from soaking import in_soak
from torch import Tensor
from torch.nn.functional import cosine_similarity
from training import Killed, contents, losses, make_place, run, run_with_kills, scales, settings

from precisionctl.checkpoints.megatron.keys import RUN_FILE
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import execute
from precisionctl.errors import DamagedCheckpoint, DataError, PrecisionError, RecipeError
from precisionctl.evaluate import load
from precisionctl.precision import Precision
from precisionctl.recipe import load_recipe
from precisionctl.reports.compare_runs import LAST_STEPS, compare
from precisionctl.reports.run import warnings
from precisionctl.tokens.tokenizer import Tokenizer
from precisionctl.trainer.data import IGNORED, Batch, Feed
from precisionctl.trainer.guard import Guard
from precisionctl.trainer.measure.metrics import SHADOWS, StepMetrics
from precisionctl.trainer.model.gpt import GPT
from precisionctl.trainer.parallel.shards import UNSHARDED
from precisionctl.trainer.parallel.world import ALONE
from precisionctl.trainer.resume import Started, resume
from precisionctl.trainer.rollback import Rollback
from precisionctl.trainer.saved.run_folder import Saved, read_saved, sign
from precisionctl.trainer.settings import Settings, read_recipe, tokenized_rows
from precisionctl.trainer.shadow import Bf16Passes, GradientSimilarity, Shadow, compare_gradients

COARSE = {"checkpoint": "trained", "load": "weights", "precision__delayed__margin": 17}
"""FP8 made bad on purpose: scales so small that most of a tensor underflows, under a model that has learned."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_place(tmp_path_factory.mktemp("guard"))
    learning = settings(
        folder / "source", folder / "text.txt", folder / "trained", train__steps=40, train__save_every=40
    )
    run(learning)
    return folder


def watched(place: Path, out: Path, **changes: Any) -> Settings:
    source = place / changes.pop("checkpoint", "source")
    return settings(source, place / "text.txt", out, "fp8", **{"shadow_every": 1} | changes)


def looks(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / SHADOWS).read_text().splitlines()]


@pytest.mark.parametrize(
    "changes", [{"data__held_out": "held_out.txt"}, *in_soak({}, {"precision__scaling": "block"})], ids=str
)
def test_looking_changes_no_loss_and_no_byte_and_interrupts_no_healthy_run(
    place: Path, tmp_path: Path, changes: dict[str, str]
) -> None:
    changes = {key: str(place / value) if "held_out" in key else value for key, value in changes.items()}
    _, alone, plain = run(watched(place, tmp_path / "alone", shadow_every=None, **changes))
    _, seen, same = run(watched(place, tmp_path / "seen", shadow_every=2, **changes))
    assert same == plain
    assert contents(seen.checkpoint, "run.json") == contents(alone.checkpoint, "run.json")
    assert [(look["step"], look["decision"]) for look in looks(tmp_path / "seen")] == [(2, "ok"), (4, "ok"), (6, "ok")]
    assert not (tmp_path / "alone" / SHADOWS).exists()


def by_hand(model: GPT, batches: list[Batch]) -> tuple[float, dict[str, Tensor]]:
    """Mean loss and FP64 gradients over all targets of some batches, with nothing of the trainer's."""
    targets = sum(int((batch.labels != IGNORED).sum()) for batch in batches)
    total, gradients = 0.0, {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()}
    for batch in batches:
        logits = model(batch.tokens)[..., : model.model.vocab_size].float()
        each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
        loss = each[batch.labels.flatten() != IGNORED].sum()
        total += float(loss.detach())
        made = torch.autograd.grad(loss / targets, list(model.parameters()))
        for name, gradient in zip(gradients, made, strict=True):
            gradients[name] += gradient.double()
    return total / targets, gradients


def test_what_is_seen_is_what_two_models_give(place: Path, tmp_path: Path) -> None:
    held_out = str(place / "held_out.txt")
    made = watched(place, tmp_path / "run", shadow_every=5, train__save_every=4, train__keep=9, data__held_out=held_out)
    run(made)
    (look,) = looks(tmp_path / "run")
    source = TorchDistReader(tmp_path / "run", 4)
    fp8, _ = load(source)
    bf16 = GPT(source.model, Precision(fp8=False))
    bf16.load_state_dict(fp8.state_dict())

    recipe = read_recipe(made)
    position = json.loads((source.path / "precisionctl/run.json").read_text())["position"]
    tokenizer = Tokenizer(source.companions.files)
    rows = tokenized_rows(recipe.data, tokenizer, source.model)
    batches = list(Feed(rows, recipe.train, torch.device("cpu"), ALONE).batches(position))
    beside = tokenized_rows(replace(recipe.data, path=held_out), tokenizer, source.model)
    held = [beside.batch(range(row, row + 1)) for row in range(len(beside))]
    for model, kind in ((fp8, ""), (bf16, "_bf16")):
        with torch.no_grad():
            total, targets = 0.0, 0
            for batch in held:
                logits = model(batch.tokens)[..., : source.model.vocab_size].float()
                log = logits.log_softmax(-1).gather(-1, batch.labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
                total -= float(log[batch.labels != IGNORED].sum())
                targets += int((batch.labels != IGNORED).sum())
        assert look[f"held_out_loss{kind}"] == pytest.approx(total / targets, rel=1e-6)
    (loss, of_fp8), (loss_bf16, of_bf16) = by_hand(fp8, batches), by_hand(bf16, batches)
    assert look["loss"] == pytest.approx(loss, rel=1e-6) and look["loss_bf16"] == pytest.approx(loss_bf16, rel=1e-6)
    assert look["gap"] == pytest.approx(loss / loss_bf16 - 1, abs=2.0**-22) and abs(look["gap"]) > 1e-6
    modules = {name.rpartition(".")[0] for name in of_fp8}
    assert set(look["modules"]) == modules
    for module in modules:
        a, b = (
            torch.cat([g.flatten() for name, g in which.items() if name.rpartition(".")[0] == module])
            for which in (of_fp8, of_bf16)
        )
        expected = [float(cosine_similarity(a, b, dim=0)), float(a.norm() / b.norm())]
        assert look["modules"][module] == pytest.approx(expected, rel=1e-5)
    a, b = (torch.cat([g.flatten() for g in which.values()]) for which in (of_fp8, of_bf16))
    assert look["grad_cosine"] == pytest.approx(float(cosine_similarity(a, b, dim=0)), rel=1e-5)
    assert look["grad_norm_ratio"] == pytest.approx(float(a.norm() / b.norm()), rel=1e-5)
    assert look["grad_cosine"] < 0.9999


def test_gradients_that_are_zero_or_not_there_have_a_likeness_too() -> None:
    there, zero = torch.tensor([3.0, 4.0]), torch.zeros(2)
    whole, modules = compare_gradients(
        {"a.weight": there, "b.weight": zero, "c.weight": zero, "d.weight": there},
        {"a.weight": 2 * there.flip(0), "b.weight": there, "c.weight": zero},
    )
    assert modules == {
        "a": GradientSimilarity(pytest.approx(24 / 25), 0.5),
        "b": GradientSimilarity(0.0, 0.0),
        "c": GradientSimilarity(1.0, 1.0),
        "d": GradientSimilarity(0.0, math.inf),
    }
    assert whole == GradientSimilarity(pytest.approx(48 / math.sqrt(50 * 125)), pytest.approx(math.sqrt(50 / 125)))


def test_bad_fp8_is_warned_of_and_stops_the_run_for_good(place: Path, tmp_path: Path) -> None:
    out, said = tmp_path / "run", list[str]()
    made = watched(place, out, train__save_every=100, train__steps=8, **COARSE)
    with pytest.raises(PrecisionError, match="the guard stopped the run after step 3: its loss was"):
        resume(made, lambda started: None, lambda step: said.extend(warnings(step)))
    found = looks(out)
    assert [(look["step"], look["decision"], look["beyond"]) for look in found] == [
        (1, "warn", 1),
        (2, "warn", 2),
        (3, "stop", 3),
    ]
    assert min(abs(look["gap"]) for look in found) > 0.01
    assert len(said) == 3 and said[2].startswith("Guard, step 3: its loss") and said[2].endswith("the run stops")
    assert [path.name for path in out.glob("iter_*")] == ["iter_0000003"]
    with pytest.raises(PrecisionError, match="the guard stopped the run after step 3"):
        run(made)
    assert looks(out) == found
    _, finished, more = run(replace(made, overrides=(*made.overrides, "guard.act_at=1000")))
    assert (finished.step, len(more)) == (8, 5)


def with_outliers(source: Path, out: Path) -> Path:
    """The same model in BF16, where powers of two cost nothing: a channel of each norm is louder, and the weights that
    read it are quieter. In FP8 the rest of the norm's output is lost beside it."""
    execute(plan_command(Request(source, out, to="hf")))
    (file,) = out.glob("*.safetensors")
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("layernorm.weight"):
            tensor[3] *= 2**18
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")):
            tensor[:, 3] /= 2**18
    save_file(tensors, file, {"format": "pt"})
    return out


@pytest.mark.soak
def test_outliers_are_caught_at_the_first_look_and_the_run_goes_on_as_one_in_bf16(place: Path, tmp_path: Path) -> None:
    still = {"optimizer__lr": 1e-12}  # the weights stay, so that each step's loss may be set against BF16's
    source, text = with_outliers(place / "trained", tmp_path / "source"), place / "text.txt"
    _, _, expected = run(settings(source, text, tmp_path / "bf16", **still))
    acting = {"shadow_every": 2, "guard__act": "bf16", "guard__act_after": 1, "guard__bf16_steps": 4}
    run(settings(source, text, tmp_path / "run", "fp8", **acting, **still))
    (look,) = looks(tmp_path / "run")
    assert (look["step"], look["decision"]) == (2, "bf16") and abs(look["gap"]) > 0.01
    found = [dict(row) for row in losses(tmp_path / "run")]
    assert [row["fp8"] for row in found] == [True, True, False, False, False, False]
    assert [row["loss"] for row in found[2:]] == pytest.approx(expected[2:], rel=1e-4)
    assert min(abs(row["loss"] / loss - 1) for row, loss in zip(found[:2], expected, strict=False)) > 1e-3
    run(settings(place / "trained", text, tmp_path / "healthy", "fp8", load="weights", **acting, **still))
    assert [dict(row)["fp8"] for row in losses(tmp_path / "healthy")] == [True] * 6


@pytest.mark.soak
def test_a_gap_between_the_limits_is_warned_of_and_one_good_look_starts_the_count_anew(
    place: Path, tmp_path: Path
) -> None:
    run(watched(place, tmp_path / "warned", guard__act_at=1000.0, **COARSE))
    assert [(look["decision"], look["beyond"]) for look in looks(tmp_path / "warned")] == [("warn", 0)] * 6
    gaps = [abs(look["gap"]) for look in looks(tmp_path / "warned")]
    limit = sorted(gaps)[2]  # three looks are within it
    counts, running = [], 0
    for gap in gaps:
        running = running + 1 if gap > limit else 0
        counts.append(running)
    run(watched(place, tmp_path / "counted", guard__act_at=limit, guard__act_after=6, **COARSE))
    assert [look["beyond"] for look in looks(tmp_path / "counted")] == counts


SWITCHED = {
    "guard": {"guard__act": "bf16", "guard__act_after": 2, "guard__bf16_steps": 3, **COARSE},
    "schedule": {
        "precision__schedule": "[{until = 0.25, fp8 = true}, {until = 0.75, fp8 = false}, {fp8 = true}]",
    },
    "mxfp8": {
        "precision__schedule": "[{until = 0.25, fp8 = false}, {fp8 = true}]",
        "precision__scaling": "mxfp8",
    },
}
IN_FP8 = {
    "guard": [True, True, False, False, False, True, True, False],
    "schedule": [True, True, False, False, False, False, True, True],
    "mxfp8": [False, False, True, True, True, True, True, True],
}


@pytest.mark.parametrize("way", ["guard", *in_soak("schedule", "mxfp8")])
def test_a_run_that_switches_and_is_killed_decides_and_ends_the_same(place: Path, tmp_path: Path, way: str) -> None:
    whole = watched(place, tmp_path / "whole", train__steps=8, train__save_every=2, **SWITCHED[way])
    run(whole)
    run_with_kills(replace(whole, out=tmp_path / "killed"), {1, 3, 4, 5, 6, 7, 8})
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert [dict(row)["fp8"] for row in losses(tmp_path / "whole")] == IN_FP8[way]
    assert looks(tmp_path / "killed") == looks(tmp_path / "whole")
    assert [look["step"] for look in looks(tmp_path / "whole")] == [n for n, fp8 in enumerate(IN_FP8[way], 1) if fp8]
    for step in (6, 8):
        name = f"iter_000000{step}"
        assert contents(tmp_path / "killed" / name) == contents(tmp_path / "whole" / name)
        _, computed_in = load(open_checkpoint(tmp_path / "whole", step))  # of `eval`: as the step before the save
        assert computed_in.startswith("FP8") == IN_FP8[way][step - 1]


@pytest.mark.soak
def test_a_schedule_is_the_runs_that_it_stands_for_one_after_another(place: Path, tmp_path: Path) -> None:
    """FP8, then BF16 that collects, then FP8: each goes on from the checkpoint of the one before."""
    constant = {"schedule__kind": "constant"}
    made = watched(place, tmp_path / "one", shadow_every=None, **constant, **SWITCHED["schedule"])
    _, one, _ = run(replace(made, overrides=(*made.overrides, "train.steps=8")))
    losses_of_one = [dict(row)["loss"] for row in losses(tmp_path / "one")]

    text, parts, source = place / "text.txt", [], place / "source"
    for number, (precision, steps) in enumerate([("fp8", 2), ("bf16", 6), ("fp8", 8)]):
        collect = {"collect_amax": precision == "bf16"}
        part = settings(source, text, tmp_path / str(number), precision, train__steps=steps, **constant, **collect)
        _, finished, found = run(part)
        parts += found
        source = finished.checkpoint
    assert losses_of_one == parts and len(parts) == 8
    last = scales(open_checkpoint(finished.checkpoint).fp8)
    assert scales(open_checkpoint(one.checkpoint).fp8) == {
        key: value for key, value in last.items() if "core_attention" not in key[0]
    }


@pytest.mark.parametrize(
    "ends", ["[{until = 0.5}]", "[{until = 0.5}, {until = 0.4}, {fp8 = false}]", "[{until = 0.0}]"]
)
def test_phases_that_do_not_follow_one_another_to_the_end_are_refused(place: Path, tmp_path: Path, ends: str) -> None:
    with pytest.raises(RecipeError, match=r"the phases of precision\.schedule end at"):
        run(watched(place, tmp_path / "run", precision__schedule=ends))


@pytest.mark.parametrize("changes", [{"shadow_every": 2}, {"guard__shadow_every": 2}, SWITCHED["schedule"]], ids=str)
def test_a_bf16_run_has_nothing_to_guard(place: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="this one is in BF16"):
        run(settings(place / "source", place / "text.txt", tmp_path / "run", "bf16", **changes))


def test_a_damaged_memory_of_the_guard_is_one_clear_error(place: Path, tmp_path: Path) -> None:
    made = watched(place, tmp_path / "run", train__steps=1)
    _, finished, _ = run(made)
    note = finished.checkpoint / "precisionctl/run.json"
    written = json.loads(note.read_text())
    for kept in ([], {"gaps": []}, {"gaps": ["x"], "bf16_until": 1}, {"gaps": [], "bf16_until": "1"}):
        note.write_text(json.dumps(written | {"guard": kept}))
        with pytest.raises(DamagedCheckpoint, match="what its guard keeps"):
            run(made)


def test_a_checkpoint_that_does_not_say_whether_it_was_in_fp8_as_a_run_does_is_refused(tmp_path: Path) -> None:
    sign(tmp_path, Saved(3, 12, {"data": "x"}))
    kept = read_saved(tmp_path)
    assert kept and kept.fp8 is None
    (tmp_path / RUN_FILE).write_text(json.dumps(json.loads((tmp_path / RUN_FILE).read_text()) | {"fp8": "no"}))
    with pytest.raises(DamagedCheckpoint, match="`fp8` is no true or false"):
        read_saved(tmp_path)


def test_a_gap_that_is_no_number_is_kept_as_json_has_it(tmp_path: Path) -> None:
    gaps = {"gaps": [0.5, math.nan, math.inf], "bf16_until": 0}
    sign(tmp_path, Saved(3, 12, {"data": "x"}, gaps))
    text = (tmp_path / RUN_FILE).read_text()
    assert json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))["guard"]["gaps"][1] is None
    saved = read_saved(tmp_path)
    assert saved and saved.guard
    assert (
        saved.guard["gaps"] == pytest.approx([0.5, math.nan, math.nan], nan_ok=True) and saved.guard["bf16_until"] == 0
    )


def test_compare_tells_what_the_guards_of_runs_have_seen(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 2.0}\n')
    shadows = [
        Shadow(1, 2.02, 2.0, GradientSimilarity(0.9, 1.0), {"x": GradientSimilarity(0.9, 1.0)}, decision="warn"),
        Shadow(2, 1.99, 2.0, GradientSimilarity(0.8, 0.5), {"x": GradientSimilarity(0.8, 0.5)}),
    ]
    file = tmp_path / "b" / SHADOWS
    file.write_text("".join(json.dumps(shadow.as_dict()) + "\n" for shadow in shadows))
    (found,) = compare([tmp_path / "a", tmp_path / "b"], LAST_STEPS).tables()[1].rows
    assert list(found) == ["b", "2", "-0.50 %", "+0.25 %", "+1.00 %", "1", "0.8500", "0.7500", "1"]
    file.write_text('{"step": 1, "loss": 2.0}\n')
    with pytest.raises(DataError, match="not what a guard writes"):
        compare([tmp_path / "a", tmp_path / "b"], LAST_STEPS)


WORTHLESS = {
    "load": "weights",
    "guard__jump_at": 0.1,
    "shadow_every": None,
    "precision__delayed__margin": 40,
    "precision__schedule": "[{until = 0.5, fp8 = false}, {fp8 = true}]",
    "train__steps": 8,
    "train__save_every": 3,
    "optimizer__lr": 1e-5,
}
"""FP8 in which every tensor underflows whole, in the second half of a run, under a model that has learned."""


def jump_of(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "rollback.json").read_text())
    return found


def test_a_jump_after_the_switch_takes_the_run_back_once_and_on_in_bf16(place: Path, tmp_path: Path) -> None:
    out, began, seen = tmp_path / "run", list[Started](), list[int]()
    made = watched(place, out, checkpoint="trained", **WORTHLESS)
    finished = resume(made, began.append, lambda step: seen.append(step.step))
    assert seen == [1, 2, 3, 4, 5, 4, 5, 6, 7, 8] and finished.step == 8
    jump = jump_of(out)
    assert (jump["step"], jump["back_to"], jump["switched"], jump["bound"]) == (5, 3, 4, 0.1)
    assert jump["loss"] > 1.1 * jump["before"]
    rows = [dict(row) for row in losses(out)]
    assert [row["step"] for row in rows] == list(range(1, 9)) and not any(row["fp8"] for row in rows)
    assert jump["before"] == pytest.approx(sum(row["loss"] for row in rows[:4]) / 4, rel=1e-12)
    assert [each.notes[0].startswith("guard: ") for each in began] == [False, True]
    assert began[1].notes[0].startswith("guard: at step 5 the loss ") and began[1].step == 3
    assert (
        began[1]
        .notes[0]
        .endswith("the bound after the switch from BF16 at step 4 is 10.0%: back to step 3, and on in BF16")
    )
    plain = {key: value for key, value in WORTHLESS.items() if not key.startswith(("guard", "precision"))}
    _, _, expected = run(settings(place / "trained", place / "text.txt", tmp_path / "bf16", "bf16", **plain))
    assert [row["loss"] for row in rows] == expected


@pytest.mark.soak
def test_a_run_that_went_back_and_is_killed_ends_the_same(place: Path, tmp_path: Path) -> None:
    whole = watched(place, tmp_path / "whole", checkpoint="trained", **WORTHLESS)
    run(whole)
    run_with_kills(replace(whole, out=tmp_path / "killed"), {2, 4, 6, 7, 8})
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    for name in ("iter_0000006", "iter_0000008"):
        assert contents(tmp_path / "killed" / name) == contents(tmp_path / "whole" / name)
    assert jump_of(tmp_path / "killed") == jump_of(tmp_path / "whole")


@pytest.mark.soak
def test_a_run_that_is_killed_just_after_the_switch_sees_the_jump_all_the_same(place: Path, tmp_path: Path) -> None:
    """It goes on from the last step in BF16, and so begins in FP8."""
    changes = WORTHLESS | {"train__save_every": 4, "guard__jump_within": 3, "guard__jump_at": 0.03}
    whole = watched(place, tmp_path / "whole", checkpoint="trained", **changes)
    run(whole)
    run_with_kills(replace(whole, out=tmp_path / "killed"), {5})
    assert jump_of(tmp_path / "killed") == jump_of(tmp_path / "whole")
    assert jump_of(tmp_path / "whole")["switched"] == jump_of(tmp_path / "whole")["back_to"] == 4
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert contents(tmp_path / "killed/iter_0000008") == contents(tmp_path / "whole/iter_0000008")


@pytest.mark.soak
def test_a_run_that_begins_in_fp8_is_held_against_its_first_batch_in_bf16_and_may_be_told_otherwise(
    place: Path, tmp_path: Path
) -> None:
    changes = {key: value for key, value in WORTHLESS.items() if "schedule" not in key} | {"guard__jump_at": 0.03}
    made = watched(place, tmp_path / "run", checkpoint="trained", **changes)
    with pytest.raises(Killed):
        die_at(made, 4)
    jump = jump_of(tmp_path / "run")
    assert (jump["step"], jump["back_to"], jump["switched"]) == (1, 0, 0)
    assert [dict(row)["fp8"] for row in losses(tmp_path / "run")] == [False] * 4
    assert dict(losses(tmp_path / "run")[0])["loss"] == jump["before"]
    run(replace(made, overrides=(*made.overrides, "guard.jump_at=1000")))
    assert [dict(row)["fp8"] for row in losses(tmp_path / "run")] == [False] * 3 + [True] * 5
    assert jump_of(tmp_path / "run") == jump


def test_a_run_that_went_back_and_returns_to_fp8_is_watched_again(place: Path, tmp_path: Path) -> None:
    """It returns long after the switch that it went back for, which its checkpoints still tell of."""
    changes = WORTHLESS | {"guard__jump_within": 3, "guard__jump_at": 0.03, "train__save_every": 8, "train__steps": 12}
    changes |= {"precision__schedule": "[{until = 0.33, fp8 = false}, {fp8 = true}]"}
    made = watched(place, tmp_path / "run", checkpoint="trained", **changes)
    with pytest.raises(Killed):
        die_at(made, 9)
    assert jump_of(tmp_path / "run")["switched"] == 4
    (tmp_path / "run/rollback.json").unlink()
    run(made)
    jump = jump_of(tmp_path / "run")
    assert (jump["switched"], jump["back_to"]) == (8, 8) and jump["step"] in (9, 10, 11)
    assert not any(dict(row)["fp8"] for row in losses(tmp_path / "run"))


def die_at(made: Settings, at: int) -> None:
    made_once: list[int] = []

    def die(step: StepMetrics) -> None:
        made_once.append(step.step)
        if made_once.count(at) and step.step == at:
            raise Killed

    resume(made, lambda started: None, die)


@pytest.mark.parametrize("precision", ["from BF16", *in_soak("begins in FP8")])
def test_watching_for_jumps_changes_no_byte_of_a_healthy_run(place: Path, tmp_path: Path, precision: str) -> None:
    schedule = {"precision__schedule": "[{until = 0.5, fp8 = false}, {fp8 = true}]"}
    changes = {"shadow_every": None, **(schedule if precision == "from BF16" else {})}
    _, alone, plain = run(watched(place, tmp_path / "alone", **changes))
    _, seen, same = run(watched(place, tmp_path / "seen", guard__jump_at=0.25, **changes))
    assert same == plain
    assert contents(seen.checkpoint, "run.json") == contents(alone.checkpoint, "run.json")
    assert not (tmp_path / "seen/rollback.json").exists()


def test_a_damaged_note_of_going_back_is_one_clear_error(place: Path, tmp_path: Path) -> None:
    made = watched(place, tmp_path / "run", train__steps=1, guard__jump_at=0.5, shadow_every=None)
    run(made)
    for text in ("[]", "{", '{"step": 1}', "{}"):
        (tmp_path / "run/rollback.json").write_text(text)
        with pytest.raises(DamagedCheckpoint, match=r"not what a guard writes.*does not stay in BF16"):
            run(made)


@pytest.mark.parametrize(("loss", "jump"), [(None, math.inf), (0.0, 0.0), (0.5, math.inf)])
def test_a_jump_from_a_loss_of_0_is_no_crash(loss: float | None, jump: float) -> None:
    assert Rollback(step=3, loss=loss, before=0.0, bound=0.1, switched=2).jump == jump


def test_a_first_loss_that_is_no_number_in_bf16_either_is_not_what_later_ones_are_held_against() -> None:
    guard = Guard(load_recipe("fp8-delayed", ["guard.jump_at=0.5", "guard.jump_within=20"]))
    for step, bf16 in ((1, math.nan), (2, 2.0)):
        assert guard.before_step(step - 1) and guard.wants_bf16_passes(step)
        guard.compare(step, Bf16Passes(bf16, {}, None), 1e9, {}, UNSHARDED)
        assert json.dumps(guard.saved_state, allow_nan=False)
        taken_back = guard.after_step(step, 1e9)
        assert (taken_back is not None) == (step == 2)
    assert taken_back and taken_back.before == 2.0
    assert Guard(load_recipe("fp8-delayed", ["guard.jump_at=0.5"]), in_fp8=True).after_step(1, math.nan) is None
