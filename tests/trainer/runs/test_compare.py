import json
import math
import xml.etree.ElementTree
from html import escape
from pathlib import Path

import pytest
from soaking import in_soak

from precisionctl.errors import DataError, printable
from precisionctl.reports import plot
from precisionctl.reports.compare_runs import LAST_STEPS, Gap, RunComparison, compare, draw, find_gap
from precisionctl.reports.curves import Curve, read_curve, read_curves
from precisionctl.reports.plot import smoothed
from precisionctl.trainer.saved.run_folder import Saved, sign


def curve(losses, name="run"):
    return Curve(name, losses)


def test_gaps_are_relative_to_the_first_run_over_the_steps_that_both_have():
    first, other = curve({1: 4.0, 2: 2.0, 3: 2.0}), curve({2: 3.0, 3: 1.9, 4: 9.0})
    gap = find_gap(other, first, LAST_STEPS)
    assert (gap.steps, gap.loss, gap.worst_step) == (2, 1.9, 2)
    assert gap.now == pytest.approx(-0.05)
    assert gap.worst == pytest.approx(0.5)
    assert gap.mean == pytest.approx(4.9 / 4 - 1)


def test_the_mean_gap_leaves_out_what_came_before_the_last_hundred_steps():
    first = curve(dict.fromkeys(range(1, 201), 2.0))
    other = curve({step: 8.0 if step <= 100 else 2.0 for step in range(1, 201)})
    assert find_gap(other, first, LAST_STEPS).mean == 0.0


def test_a_loss_that_is_no_number_is_the_worst_and_passes_no_gate():
    first, other = curve({1: 2.0, 2: 2.0}), curve({1: 100.0, 2: math.nan})
    gap = find_gap(other, first, LAST_STEPS)
    assert gap.worst_step == 2
    assert math.isnan(gap.mean)


def test_a_first_loss_of_zero_is_infinitely_far_from_every_other_and_passes_no_gate():
    first = curve({1: 2.0, 2: 0.0})
    gap = find_gap(curve({1: 2.0, 2: 0.1}), first, LAST_STEPS)
    assert (gap.now, gap.worst, gap.worst_step) == (math.inf, math.inf, 2)
    assert find_gap(curve({2: 0.0}), first, LAST_STEPS).mean == 0.0
    never = curve({1: 0.0})
    assert RunComparison([never], [find_gap(curve({1: 0.1}), never, LAST_STEPS)], last=1).beyond(1e9)


def test_a_gate_wants_as_many_steps_as_it_takes_the_mean_of():
    first, other = curve(dict.fromkeys(range(1, 6), 2.0), "first"), curve(dict.fromkeys(range(1, 9), 2.0), "other")
    gap = find_gap(other, first, 6)
    assert (gap.steps, gap.averaged) == (5, 5)
    with pytest.raises(DataError, match="has 5 steps in common with first, and a gate .* of 6.*--last 5"):
        RunComparison([first, other], [gap], last=6).verdict(0.01)
    enough = RunComparison([first, other], [find_gap(other, first, 5)], last=5)
    assert enough.verdict(0.01) == "Within 1.00 % of first over the last 5 steps: other +0.00 %."


@pytest.mark.parametrize(
    ("limit", "mean", "of", "gap"),
    [
        (1e-2, -0.0123, "1.00 %", "-1.23 %"),
        (1e-6, 3.4e-6, "0.0001 %", "+0.0003 %"),  # which two places show as 0
        (1e-6, 1.02e-6, "0.000100 %", "+0.000102 %"),
        (0.01, 0.010004, "1.0000 %", "+1.0004 %"),
        (0.00015, 1.0, "0.015 %", "+100.000 %"),  # a limit is not rounded
        (0.0, 1e-7, "0.00000 %", "+0.00001 %"),
        (0.01, math.nan, "1.00 %", "+nan %"),
    ],
)
def test_a_verdict_tells_the_limit_and_a_gap_beyond_it_apart(limit: float, mean: float, of: str, gap: str) -> None:
    found = Gap("other", 1, 1, 2.0, mean, mean, mean, 1)
    comparison = RunComparison([curve({1: 2.0}, "first"), curve({1: 2.0}, "other")], [found], last=1)
    assert comparison.verdict(limit) == f"Further than {of} of first over the last 1 step: other {gap}."


def test_a_smoothed_curve_is_the_mean_of_the_last_hundredth_of_its_steps():
    values = {step: float(step) for step in range(1, 301)}
    smooth = smoothed(values)
    assert (smooth[1], smooth[2], smooth[3], smooth[300]) == (1.0, 1.5, 2.0, 299.0)
    many = smoothed({step: float(step) for step in range(1, 100_001)})
    assert 2000 <= len(many) <= 4000 and many[99_951] == 99_951 - 999 / 2


def test_curves_that_are_the_same_are_both_seen():
    same = dict.fromkeys(range(3), 2.0)
    lines = plot.draw([curve(same), curve(same)]).axes[0].lines
    assert lines[0].get_linestyle() == "-" and lines[1].get_linestyle() == "--"


def test_settings_that_differ_are_shown_beside_the_curves(tmp_path):
    started = {"data": "1f", "source": "2e", "optimizer.lr": 1e-5, "train.seed": 1}
    for name, changes in {"a": {}, "b": {"optimizer.lr": 2e-5, "data": ["77"]}, "c": None}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
        if changes is not None:
            (tmp_path / name / "iter_0000001").mkdir()
            sign(tmp_path / name / "iter_0000001", Saved(1, 1, started | changes))
    shown = compare([tmp_path / name for name in "abc"], LAST_STEPS)
    assert shown.settings == {"data": ["1f", ["77"], None], "optimizer.lr": [1e-5, 2e-5, None]}
    assert shown.tables()[-1].rows == [("data", "A", "B", "-"), ("optimizer.lr", "1e-05", "2e-05", "-")]


def test_no_two_of_many_sources_have_the_same_letters():
    digests = [f"{number:x}" for number in range(60)]
    (row,) = RunComparison([curve({1: 2.0})], [], settings={"source": [*digests, "0", None]}).differences().rows
    name, *letters = row
    assert (name, letters[:2], letters[60:]) == ("source", ["A", "B"], ["A", "-"])
    assert len({*letters[:60]}) == 60


def test_a_run_that_is_where_we_are_has_its_folder_s_name(tmp_path, monkeypatch):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    monkeypatch.chdir(tmp_path / "here")
    assert [each.name for each in read_curves([Path(), Path("../there")])] == ["here", "there"]


def test_runs_without_a_common_step_cannot_be_compared():
    with pytest.raises(DataError, match="no step in common"):
        find_gap(curve({1: 2.0}), curve({2: 2.0}), LAST_STEPS)


def test_a_step_run_again_counts_as_run_last_and_a_line_still_being_written_is_left_out(tmp_path):
    lines = [
        {"step": 1, "loss": 3.0},
        {"step": 2, "loss": 9.0},
        {"step": 2, "loss": 2.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"st')
    assert read_curve(tmp_path, "run").losses == {1: 3.0, 2: 2.0}


def test_runs_with_and_without_what_their_steps_took_are_compared(tmp_path):
    taken = {
        "tflops": 412.0,
        "mfu_bf16": 0.4,
        "gpu_bytes": 1,
        "host_bytes": 2,
        "fp8_clipped": 0.0,
        "fp8_underflow": 1.0,
    }
    for name, more in (("old", {}), ("new", taken), ("newer", taken | {"skipped": 1})):
        (tmp_path / name).mkdir()
        rows = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0, **more}]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, *others = read_curves([tmp_path / name for name in ("old", "new", "newer")])
    assert [find_gap(other, first, LAST_STEPS).steps for other in others] == [2, 1]


@pytest.mark.parametrize("content", ["[]\n", "nonsense\n", '{"loss": 1.0}\n', ""])
def test_a_file_that_holds_no_metrics_is_refused(tmp_path, content):
    file = tmp_path / "metrics.jsonl"
    file.write_text(content)
    with pytest.raises(DataError):
        read_curve(file, "run")


def test_runs_of_the_same_name_are_told_apart_by_their_paths(tmp_path):
    paths = [tmp_path / "a" / "run", tmp_path / "b" / "run", tmp_path / "other"]
    for path in paths:
        path.mkdir(parents=True)
        (path / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n')
    assert [each.name for each in read_curves(paths)] == [str(paths[0]), str(paths[1]), "other"]


@pytest.mark.parametrize(
    "name", ["\x1b[2J\x00\u202e", *in_soak("m-$x^{$", "\udcff", "$\\frac$", "_hidden", "<b>&", "%s %(x)s {x}")]
)
def test_a_run_may_have_any_name_and_the_picture_says_it(tmp_path, name):
    runs = [Curve("first", {1: 2.0, 2: 1.0}), Curve(name, {1: 2.0, 2: 1.5})]
    for curves in (runs, runs[::-1]):
        draw(RunComparison(curves, []), png=tmp_path / "a.png", html=tmp_path / "a.html")
        page = (tmp_path / "a.html").read_text(encoding="utf-8")
        assert page[page.index("<svg") :].count(escape(printable(name), quote=False)) >= 1
        xml.etree.ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
