"""Training by 2 and 4 ranks (gloo, on the CPU), held against one process. The runs are made by many_ranks.py, once."""

import filecmp
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import repository
import torch
from in_memory import to_megatron
from programs import run_program, word_for_soak
from soaking import in_soak
from torch import Tensor
from training import SMALL, as_module

from precisionctl.checkpoints.base import WithOptimizer
from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.errors import RecipeError
from precisionctl.fp8 import sidecar
from precisionctl.param import EMBEDDING
from precisionctl.recipe import Optimizer, load_recipe
from precisionctl.trainer.measure.metrics import FILE, SHADOWS, read_metrics
from precisionctl.trainer.optimizer.muon import MasterMuon
from precisionctl.trainer.parallel import world

Told = dict[str, dict[str, Any]]
with_experts = pytest.mark.parametrize("model", ["moe", *in_soak("source")])
ALONE = {"source": "guarded alone", "moe": "shorter alone"}
first_model = pytest.mark.parametrize("model", ["source", *in_soak("moe")])


@pytest.fixture(scope="module")
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    run_program(repository.HELPERS / "many_ranks.py", folder, *word_for_soak(request))
    return folder


@pytest.fixture(scope="module")
def told(place: Path) -> Told:
    found: Told = json.loads((place / "told.json").read_text())
    return found


def steps(told: Told, name: str) -> Any:
    """Step, loss and held-out loss of each update; the first rank alone speaks."""
    assert not any(told[name]["codes"]), told[name]
    first, *others = told[name]["said"]
    assert first and not any(others)
    return first


def differing(a: Path, b: Path) -> set[str]:
    names = sorted(str(path.relative_to(a)) for path in a.rglob("*") if path.is_file())
    assert names == sorted(str(path.relative_to(b)) for path in b.rglob("*") if path.is_file())
    return {name for name in names if not filecmp.cmp(a / name, b / name, shallow=False)}


def moments(checkpoint: Path, kind: str = "exp_avg") -> dict[str, Tensor]:
    source = WithOptimizer(TorchDistReader(checkpoint))
    return {name: read_tensor(source, name) for name in source.specs if f".{kind}." in name}


@first_model
def test_two_ranks_make_every_bit_of_one_process_with_as_many_micro_batches(
    place: Path, told: Told, model: str
) -> None:
    """The FP32 sum of two gradients is the same either way around; nothing else is between ranks here, as gradients
    are not clipped by a norm, whose sum has another order."""
    assert steps(told, f"{model} two") == steps(told, f"{model} alone")
    last = [place / f"{model} {ranks}/iter_0000006" for ranks in ("alone", "two")]
    assert differing(*last) == {str(sidecar.RELATIVE)}  # histories have other rows: one for a pass of all ranks


def test_ranks_that_share_matrices_in_every_way_orthogonalize_them_whole(place: Path, told: Told) -> None:
    """Two tensor ranks, among which FSDP2 shards again, with half of the experts each. Gradients are those of one
    process but for rounding in BF16, which may send a token to another expert. Every update is that of one process from
    the average that was saved."""
    ((_, alone, _),), ((_, shared, _),) = steps(told, "muon alone"), steps(told, "muon shared")
    assert shared == pytest.approx(alone, rel=1e-3)
    one, two = (moments(place / name / "iter_0000001", "momentum_buffer") for name in ("muon alone", "muon shared"))
    assert one.keys() == two.keys() and len(one) > 12
    start, moved = to_megatron(open_checkpoint(place / "moe")), moments(place / "muon shared/iter_0000001", "param")
    settings = Optimizer(preset="muon", muon_extra_scale_factor=0.2, muon_momentum=0.0, clip_norm=0.0)
    names = [name.removeprefix("optimizer.state.momentum_buffer.") for name in two]
    module = as_module({name: start.tensors[name].float() for name in [*names, EMBEDDING]})
    optimizer = MasterMuon(module, start.model, settings)
    for name in names:
        gradient = two[f"optimizer.state.momentum_buffer.{name}"]
        assert (gradient - one[f"optimizer.state.momentum_buffer.{name}"]).norm() < 0.2 * gradient.norm(), name
        optimizer.masters[name].grad = gradient
    optimizer.step(SMALL["optimizer.lr"] / 2)
    for name in names:
        expected, before = optimizer.masters[name], start.tensors[name].float()
        apart = moved[f"optimizer.state.param.{name}"] - expected
        assert apart.norm() < 1e-3 * (expected - before).norm() > 0, name


def test_amaxes_are_the_largest_of_what_one_process_sees_in_as_many_passes(place: Path) -> None:
    """What two ranks collected while they had the same weights as one process: each row is of two of its rows."""
    one, two = (sidecar.find(place / f"source {ranks}/iter_0000006") for ranks in ("alone", "two"))
    assert one and two and set(one.modules) == set(two.modules)
    for name, state in one.modules.items():
        for role in ("input", "weight", "grad_output", "k", "v"):
            if role in state.roles:
                rows = state.roles[role].amax_history[-12:]
                assert bool(rows.all())
                assert torch.equal(two.modules[name].roles[role].amax_history[-6:], rows.view(6, 2).amax(1))
                assert not two.modules[name].roles[role].amax_history[:-6].any()


@pytest.mark.soak
def test_amaxes_of_experts_are_the_largest_of_all_ranks_and_none_of_those_that_none_saw(place: Path) -> None:
    """Of an expert that saw no token in a pass there is no row, so the two histories have rows in common, not all."""
    one, two = (sidecar.find(place / f"moe {ranks}/iter_0000006") for ranks in ("alone", "two"))
    assert one and two
    for name, state in one.modules.items():
        for role, part in state.roles.items():
            assert torch.equal(two.modules[name].roles[role].amax_history.amax(-1), part.amax_history.amax(-1))
            assert torch.equal(two.modules[name].roles[role].recorded_each, part.recorded_each)


@pytest.mark.parametrize("name", ["four sharing", *in_soak("three")])
def test_parts_of_any_shape_come_and_go_as_they_are(place: Path, told: Told, name: str) -> None:
    """Three ranks have 27, 27 and 26 rows of the embedding, and 2, 2 and none of a router's; four have a part of every
    linear and every second expert. An update so small that no weight changes is between loading and saving."""
    assert [step for step, _, _ in steps(told, name)] == [1]
    saved = TorchDistReader(place / name / "iter_0000001")
    source = to_megatron(open_checkpoint(place / "moe")).tensors
    assert saved.specs.keys() == source.keys()
    assert all(torch.equal(read_tensor(saved, name), tensor.bfloat16()) for name, tensor in source.items())
    masters = WithOptimizer(saved)
    assert all(torch.equal(read_tensor(masters, f"optimizer.state.param.{n}"), t.float()) for n, t in source.items())


@pytest.mark.parametrize("copies", [2, *in_soak(1, 4)])
def test_gradients_of_four_ranks_are_those_of_one_process_but_for_the_order_of_a_sum(
    place: Path, told: Told, copies: int
) -> None:
    """Three FP32 additions in another order: each of them rounds by 2^-24 of a partial sum at most, here of gradients
    that cancel little, so a few 2^-24 of a tensor's norm. The first moment is a tenth of the gradient."""
    ((_, alone, _),), ((_, loss, _),) = steps(told, "four alone"), steps(told, f"four in {copies}")
    assert abs(loss - alone) < 4 * 2**-24 * alone
    expected = moments(place / "four alone/iter_0000001")
    found = moments(place / f"four in {copies}/iter_0000001")
    for name, tensor in expected.items():
        assert (found[name] - tensor).norm() <= 8 * 2**-24 * tensor.norm(), name


@first_model
def test_fp8_of_two_ranks_is_that_of_one_process_but_for_rounding(place: Path, told: Told, model: str) -> None:
    """The same rows in a pass, so the same amaxes; but the gradient of a weight is rounded to BF16 for each rank, by up
    to 2^-9 of it. Updates are apart by about as much, and so a loss by less than that share of itself."""
    alone, two = steps(told, f"{model} fp8 alone"), steps(told, f"{model} fp8 two")
    assert [step for step, _, _ in two] == [step for step, _, _ in alone] == [1, 2, 3, 4, 5, 6]
    assert two[0][1] == pytest.approx(alone[0][1], rel=1e-6)
    assert [loss for _, loss, _ in two] == pytest.approx([loss for _, loss, _ in alone], rel=2**-9)
    looks = [[(step, held_out) for step, _, held_out in each if held_out is not None] for each in (alone, two)]
    assert [step for step, _ in looks[1]] == [step for step, _ in looks[0]] == [3, 6]
    assert [loss for _, loss in looks[1]] == pytest.approx([loss for _, loss in looks[0]], rel=2**-9)


@pytest.mark.soak
@pytest.mark.parametrize(("ranks", "at_first"), [("two", 1e-6), ("tensor", 2**-12)])
def test_128_blocks_of_two_ranks_are_those_of_one_process_but_for_rounding(
    told: Told, ranks: str, at_first: float
) -> None:
    """Nothing is kept that ranks must have alike. Those that share a layer cut its squares: some scales are others."""
    alone, two = steps(told, "block alone"), steps(told, f"block {ranks}")
    assert two[0][1] == pytest.approx(alone[0][1], rel=at_first)
    assert [loss for _, loss, _ in two] == pytest.approx([loss for _, loss, _ in alone], rel=2**-9)


@first_model
def test_all_ranks_have_the_same_fp8_state(place: Path, told: Told, model: str) -> None:
    for when in ("start", "end"):
        first, second = (torch.load(place / f"{model} fp8 two.{when}.{rank}.pt") for rank in (0, 1))
        alone = torch.load(place / f"{model} fp8 alone.{when}.0.pt")
        assert first.keys() == second.keys() == alone.keys() and first
        for key, (scale, history) in first.items():
            assert torch.equal(scale, second[key][0]) and torch.equal(history, second[key][1])
            if when == "start":  # of the weights that both have; the sums of a GEMM have another order
                assert torch.equal(history != 0, alone[key][1] != 0)
                assert torch.allclose(history, alone[key][1], rtol=2**-7, atol=0)


@pytest.mark.soak
@first_model
def test_recomputing_layers_changes_no_bit_of_any_rank(place: Path, told: Told, model: str) -> None:
    assert steps(told, f"{model} fp8 two, recomputed") == steps(told, f"{model} fp8 two")
    last = [place / f"{model} fp8 two{how}/iter_0000006" for how in ("", ", recomputed")]
    assert not differing(*last)


def guard_s_looks(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / SHADOWS).read_text().splitlines()]


@pytest.mark.soak
@first_model
def test_the_guard_of_two_ranks_changes_nothing_and_sees_what_that_of_one_process_does(
    place: Path, told: Told, model: str
) -> None:
    """Losses are apart as those of the runs are. Likenesses are of rounding, which is another one where an amax or
    a weight differs in its last bit, so they are near as a whole; the test of copies holds them to the sums."""
    assert steps(told, f"{model} guarded two") == steps(told, f"{model} fp8 two")
    last = [place / f"{model} {how} two/iter_0000006" for how in ("fp8", "guarded")]
    assert differing(*last) == {"precisionctl/run.json"}
    alone, two = (guard_s_looks(place / f"{model} guarded {ranks}") for ranks in ("alone", "two"))
    assert [look["step"] for look in two] == [look["step"] for look in alone] == [2, 4, 6]
    for ours, expected in zip(two, alone, strict=True):
        for key in ("loss", "loss_bf16", "held_out_loss", "held_out_loss_bf16"):
            assert ours[key] == pytest.approx(expected[key], rel=2**-9)
        for key in ("grad_cosine", "grad_norm_ratio"):
            assert ours[key] == pytest.approx(expected[key], abs=2**-6)
        assert list(ours["modules"]) == list(expected["modules"])


@with_experts
def test_ranks_that_share_layers_train_as_one_process_does_but_for_rounding(
    place: Path, told: Told, model: str
) -> None:
    """In FP8, with the sequence shared too, layers made once more, and experts dealt out: of a sum of two GEMMs'
    results each has been rounded to BF16. What the guard sees is of all parts, each once."""
    of_one = f"{model} {ALONE[model]}"
    alone, shared = steps(told, of_one), steps(told, f"{model} tensor")
    assert [loss for _, loss, _ in shared] == pytest.approx([loss for _, loss, _ in alone], rel=2**-9)
    looks = [[loss for _, _, loss in each if loss is not None] for each in (alone, shared)]
    assert len(looks[0]) == 2 and looks[1] == pytest.approx(looks[0], rel=2**-9)
    seen = [guard_s_looks(place / name) for name in (of_one, f"{model} tensor")]
    for expected, ours in zip(*seen, strict=True):
        assert ours["loss_bf16"] == pytest.approx(expected["loss_bf16"], rel=2**-9)
        assert ours["grad_norm_ratio"] == pytest.approx(expected["grad_norm_ratio"], abs=2**-5)
        assert list(ours["modules"]) == list(expected["modules"])
    norms = [[row["grad_norm"] for row in read_metrics(place / name / FILE)] for name in (of_one, f"{model} tensor")]
    assert norms[1] == pytest.approx(norms[0], rel=2**-5)


@with_experts
def test_ranks_that_share_layers_have_one_fp8_state(place: Path, model: str) -> None:
    """That of one process, of the same tokens: amaxes are of a rounding to BF16 that may be another one, after a
    gradient's or activation's way through both layers."""
    count, alone = {"source": 2, "moe": 4}[model], torch.load(place / f"{model} {ALONE[model]}.start.0.pt")
    for when in ("start", "end"):
        first, *others = (torch.load(place / f"{model} tensor.{when}.{rank}.pt") for rank in range(count))
        assert first.keys() == alone.keys()
        for key, (scale, history) in first.items():
            assert all(torch.equal(scale, other[key][0]) and torch.equal(history, other[key][1]) for other in others)
            if when == "start":
                assert torch.equal(history != 0, alone[key][1] != 0)
                assert torch.allclose(history, alone[key][1], rtol=2**-5, atol=0)
                if key[1] == "weight":
                    assert torch.equal(history, alone[key][1])


@pytest.mark.soak
def test_copies_of_the_model_change_nothing_of_what_the_guard_sees(place: Path) -> None:
    """A rank that has all of a gradient and one that has a part of it come to the same."""
    (cut,), (copied,), (both,) = (guard_s_looks(place / f"guarded, four in {copies}") for copies in (1, 4, 2))
    for other in (copied, both):
        assert other["loss_bf16"] == cut["loss_bf16"] and other["loss"] == cut["loss"]
        for module, like in cut["modules"].items():
            assert other["modules"][module] == pytest.approx(like, rel=1e-5)


def test_flops_are_those_of_all_ranks_and_each_has_its_share(place: Path) -> None:
    """The first rank writes down what all did together; its own share of it is half of what one process does."""
    alone, two = ([*read_metrics(place / f"source fp8 {ranks}" / FILE)] for ranks in ("alone", "two"))
    for one, other in zip(alone, two, strict=True):
        assert other["tflops"] * other["seconds"] * 2 == pytest.approx(one["tflops"] * one["seconds"])
        assert {"host_bytes", "fp8_clipped", "fp8_underflow"} < other.keys()


@pytest.mark.soak
def test_phases_of_two_ranks_go_on_after_a_kill_as_if_it_had_not_been(place: Path, told: Told) -> None:
    whole, gone_on = steps(told, "phases"), steps(told, "phases, gone on")
    assert told["phases, killed"]["codes"][1] == -signal.SIGKILL
    assert gone_on == whole[2:] and len(whole) == 6
    places = [place / "phases", place / "phases killed"]
    assert not differing(*(each / "iter_0000006" for each in places))
    assert [row["fp8"] for row in read_metrics(places[1] / FILE)] == [True, False, False, False, True, True]


@pytest.mark.soak
def test_a_run_goes_on_with_another_number_of_ranks(place: Path, told: Told) -> None:
    """Killed with two ranks and with one, ended by four; each pass has the same rows in all of them."""
    assert -signal.SIGKILL in told["2 of 2-1-4"]["codes"] and 0 not in told["2 of 2-1-4"]["codes"]
    assert told["1 of 2-1-4"]["codes"] == [-signal.SIGKILL]
    assert [step for step, _, _ in steps(told, "4 of 2-1-4")] == [5, 6]
    made, alone = [*read_metrics(place / "2-1-4" / FILE)], steps(told, "source fp8 alone")
    assert [row["step"] for row in made] == list(range(1, 7))
    assert [row["loss"] for row in made] == pytest.approx([loss for _, loss, _ in alone], rel=2**-9)
    assert [row["loss"] for row in made[:2]] == [loss for _, loss, _ in steps(told, "source fp8 two")[:2]]


@pytest.mark.soak
def test_a_run_goes_on_with_other_ranks_that_share_layers(place: Path, told: Told) -> None:
    """Killed with two ranks for each layer and two rows of them, and with one; ended by two for each layer."""
    assert -signal.SIGKILL in told["4 of 4-1-2"]["codes"] and 0 not in told["4 of 4-1-2"]["codes"]
    assert [step for step, _, _ in steps(told, "2 of 4-1-2")] == [5, 6]
    made, alone = [*read_metrics(place / "4-1-2" / FILE)], steps(told, "source fp8 alone")
    assert [row["step"] for row in made] == list(range(1, 7))
    assert [row["loss"] for row in made] == pytest.approx([loss for _, loss, _ in alone], rel=2**-9)


@pytest.mark.soak
@with_experts
def test_two_ranks_calibrate_as_one_process_does_in_twice_as_many_passes(place: Path, told: Told, model: str) -> None:
    """The same micro-batches with the same weights: a row of two ranks is the larger of two rows of one process. Of an
    expert that saw no token in a pass there is no row."""
    for name in ("alone", "by two"):
        assert not any(told[f"{model} recorded {name}"]["codes"])
    assert told[f"{model} recorded by two"]["said"] == [[True, None, [1, 2, 3]], [False, None, []]]
    one, two = (sidecar.read(place / f"{model} recorded {name}.safetensors") for name in ("alone", "by two"))
    assert one.modules.keys() == two.modules.keys() and len(one.modules) >= 10
    for module, state in one.modules.items():
        for role, part in state.roles.items():
            found = two.modules[module].roles[role].amax_history
            assert torch.equal(found.amax(-1), part.amax_history.amax(-1))
            if part.amax_history.dim() == 1:
                assert torch.equal(found[-3:], part.amax_history[-6:].view(3, 2).amax(1))


@with_experts
@pytest.mark.parametrize("by", ["tensor", *in_soak("two")])
def test_statistics_are_of_what_all_ranks_saw(place: Path, model: str, by: str) -> None:
    """A pass over the same rows by one process, and by ranks that share layers or do not. Sums have another order, and
    so does what GEMMs of other sizes add up, which may move an element over the edge of underflow; what several ranks
    have alike is counted once."""
    one, two = (sidecar.read(place / f"{model} recorded at once{who}.safetensors") for who in ("", f" by {by}"))
    assert one.statistics.keys() == two.statistics.keys() and one.statistics
    for module, roles in one.statistics.items():
        assert roles.keys() == two.statistics[module].keys()
        for role, expected in roles.items():
            found = two.statistics[module][role]
            assert (found.elements, found.nonfinite) == (expected.elements, expected.nonfinite)
            near = 1e-12 if role == "weight" else {"two": 2**-7, "tensor": 2**-5}[by]  # as of their histories
            assert found.amax == pytest.approx(expected.amax, rel=near)
            assert found.sum_2 == pytest.approx(expected.sum_2, rel=near)


@pytest.mark.soak
def test_ranks_that_were_stopped_go_on_calibrating_to_the_same_bytes(place: Path, told: Told) -> None:
    stopped, gone_on = told["recorded, stopped"]["said"], told["recorded, gone on"]["said"]
    assert stopped == [[True, signal.SIGTERM, [1]], [False, signal.SIGTERM, []]]
    assert gone_on == [[True, None, [2, 3]], [False, None, []]]
    names = ("recorded twice", "source recorded by two")
    files = [(place / f"{name}.safetensors").read_bytes() for name in names]
    assert files[0] == files[1]
    assert [rank[2] for rank in told["shared, gone on"]["said"]] == [[17], [], [], []]
    assert (place / "shared twice.safetensors").read_bytes() == (place / "shared.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *in_soak(("killed", "another rank ended without a message")),
        *in_soak(("failed", "the disk of the last rank failed")),
        ("killed in a save", "another rank ended without a message"),
        *in_soak(("failed in a save", "the disk of the last rank failed")),
        *in_soak(("uneven", "train.batch_size 5 cannot be divided evenly among 2 ranks")),
    ],
)
def test_whatever_happens_to_a_rank_all_end_and_one_of_them_says_so(
    place: Path, told: Told, name: str, message: str
) -> None:
    """None waits for two minutes, which is when a machine that is gone is given up."""
    said = [end for end in told[name]["said"] if end]
    assert all(code for code, _ in said) and len(said) == (1 if "killed" in name else 2)
    assert told[name]["seconds"] < 60
    shown = "".join(text for _, text in said)
    assert shown.count("error[") == 1 and message in shown
    left = sorted(path.name for path in (place / name).glob("iter_*")) if (place / name).exists() else []
    begun = ["iter_0000003.partial"] if "save" in name else []
    assert left == ([] if name == "uneven" else ["iter_0000001", "iter_0000002", *begun])


@pytest.mark.soak
def test_two_ranks_save_meanwhile_what_they_save_at_once_and_go_on_after_a_kill(place: Path, told: Told) -> None:
    assert steps(told, "two, meanwhile") == steps(told, "source two")
    assert told["two, meanwhile, killed"]["codes"][1] == -signal.SIGKILL
    gone_on = steps(told, "two, meanwhile, gone on")  # from step 4, or from 2 where that was not on the disk yet
    assert len(gone_on) in (2, 4) and gone_on == steps(told, "source two")[-len(gone_on) :]
    for name in ("two, meanwhile", "two, meanwhile and killed"):
        for step in (4, 6):
            assert not differing(place / name / f"iter_000000{step}", place / f"source two/iter_000000{step}")
        assert not list((place / name).glob("*.partial"))


@pytest.mark.soak
def test_a_step_that_breaks_on_one_rank_is_skipped_by_all(place: Path, told: Told) -> None:
    assert str(steps(told, "two skip")) == str(steps(told, "one skips"))  # NaN is not itself
    for name in ("two skip", "one skips"):
        rows = [*read_metrics(place / name / FILE)]
        assert [row.get("skipped") for row in rows] == [None, None, 1, None, None, None]
    assert not differing(place / "two skip/iter_0000006", place / "one skips/iter_0000006")


@pytest.mark.soak
def test_two_ranks_go_back_together_where_one_s_loss_jumps(place: Path, told: Told) -> None:
    assert [step for step, _, _ in steps(told, "going back")] == [1, 2, 3, 4, 5, 5, 6]
    jump = json.loads((place / "going back/rollback.json").read_text())
    assert (jump["step"], jump["loss"], jump["back_to"], jump["switched"]) == (5, None, 4, 3)
    rows = [*read_metrics(place / "going back" / FILE)]
    assert [(row["step"], row["fp8"]) for row in rows] == [
        *((step, False) for step in (1, 2, 3)),
        (4, True),
        (5, False),
        (6, False),
    ]


@pytest.mark.soak
def test_all_ranks_stop_when_one_is_out_of_time(place: Path, told: Told) -> None:
    (code, first), (other, said) = told["out of time"]["said"]
    assert (code, other, said) == (75, 75, "") and (place / "out of time/iter_0000001/metadata.json").is_file()


@pytest.mark.soak
def test_a_signal_to_one_rank_is_for_all(place: Path, told: Told) -> None:
    assert [code for code, _ in told["signalled"]["said"]] == [75, 75]
    assert (place / "signalled/iter_0000003/metadata.json").is_file()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("train.batch_size=30", "train.batch_size 30 cannot be divided evenly among 4 ranks"),
        ("parallel.replicate=3", "4 ranks cannot hold parallel.replicate = 3 copies"),
        ("precision.delayed.reduce_amax=false", "scales of its own"),
    ],
)
def test_what_ranks_cannot_share_is_refused(change: str, message: str) -> None:
    world.check(4, load_recipe("fp8-delayed"))
    with pytest.raises(RecipeError, match=message):
        world.check(4, load_recipe("fp8-delayed", [change]))
