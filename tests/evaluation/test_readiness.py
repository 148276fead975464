"""Verdicts: weights measured in any format, histories read, and both held against the limits in docs/switching.md."""

import math
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import fp8_directories
import pico
import pytest
import repository
import torch
from hypothesis import given, settings, strategies as st
from judged_states import E4M3, E5M2, MODULES, RECIPE, gaussian, healthy, judged, recorded, with_outlier
from safetensors.torch import load_file, save_file

from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.codes import nibbles
from precisionctl.codes.four_bit_loss import GAUSSIAN_DB, GAUSSIAN_ZEROS, four_bit_losses
from precisionctl.codes.health import measure
from precisionctl.codes.statistics import FP8_SCALINGS, Statistics
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion import buffers
from precisionctl.conversion.command import execute
from precisionctl.errors import PrecisionError
from precisionctl.fp8 import sidecar
from precisionctl.fp8.carry import carry_state
from precisionctl.fp8.delayed_scaling import after_one_update
from precisionctl.fp8.state import DelayedScaling, Fp8State, Fp8States, RoleState
from precisionctl.planning.make_plan import plan_weights
from precisionctl.precision import Precision
from precisionctl.readiness import thresholds
from precisionctl.readiness.assess import assess
from precisionctl.readiness.history import headroom, read_history
from precisionctl.readiness.judge import judge
from precisionctl.readiness.patterns import shortened, split_name
from precisionctl.readiness.weights import measure_weights, stored_bytes
from precisionctl.reports import readiness as report
from precisionctl.trainer.model.gpt import GPT

DOCUMENT = repository.DOCS / "switching.md"


def measured(path, states=None, workers=1):
    reader = open_checkpoint(path)
    plan = plan_weights(reader)
    jobs = tuple(job for job in plan.jobs if job.row.gemm)
    seen = []
    found = measure_weights(reader, plan, jobs, states, workers=workers, on_bytes=seen.append)
    assert sum(seen) == stored_bytes(reader, jobs)
    return {module: [one.statistics for one in each] for module, each in found.items()}


def counts(one):
    losses = {name: (loss.elements, loss.underflows, loss.saturated) for name, loss in one.losses.items()}
    return one.elements, one.zeros, one.nonfinite, one.amax, losses


def by_group(q, k, v, heads, groups):
    """Megatron's linear_qkv: for each group of heads their queries, its key, its value."""
    size = len(q) // heads
    parts = (q.view(groups, -1, q.shape[1]), k.view(groups, size, -1), v.view(groups, size, -1))
    return torch.cat(parts, 1).reshape(-1, q.shape[1])


@pytest.mark.parametrize("buffer", [buffers.BUFFER, 4 * 64 * 50], ids=["in one piece", "50 rows at a time"])
def test_weights_are_measured_as_the_whole_of_megatron_s_tensors(tmp_path, monkeypatch, buffer):
    model = pico.make_and_save(tmp_path, dtype=torch.bfloat16, hidden_size=128, intermediate_size=352)
    monkeypatch.setattr(buffers, "BUFFER", buffer)
    layer = model.model.layers[1]
    attention, mlp = layer.self_attn, layer.mlp
    expected = {
        "self_attention.linear_qkv": by_group(
            attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight, heads=4, groups=2
        ),
        "self_attention.linear_proj": attention.o_proj.weight,
        "mlp.linear_fc1": torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]),
        "mlp.linear_fc2": mlp.down_proj.weight,
    }
    found = measured(tmp_path)
    assert len(found) == 8
    for kind, weight in expected.items():
        (one,) = found[f"decoder.layers.1.{kind}"]
        whole = measure(weight, E4M3, None, square=True)
        assert counts(one) == counts(whole), kind
        assert one.kurtosis == pytest.approx(whole.kurtosis, rel=1e-9)
        assert one.losses["block"].error == pytest.approx(whole.losses["block"].error, rel=1e-9)


def test_a_weight_whose_rows_fill_whole_steps_is_measured_as_any_other(tmp_path, monkeypatch):
    model = pico.make_and_save(tmp_path, dtype=torch.bfloat16, hidden_size=128, intermediate_size=352)
    monkeypatch.setattr("precisionctl.readiness.weights._AT_ONCE", 1)  # steps of 128 rows
    weight = model.model.layers[1].self_attn.o_proj.weight
    assert len(weight) == 128
    (one,) = measured(tmp_path)["decoder.layers.1.self_attention.linear_proj"]
    assert counts(one) == counts(measure(weight, E4M3, None, square=True))


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "mixtral", "deepseek-v3"])
def test_a_model_is_judged_alike_whatever_its_format(tmp_path, family):
    pico.save(tmp_path / "hf", family, dtype=torch.bfloat16)
    execute(plan_command(Request(tmp_path / "hf", tmp_path / "megatron", to="megatron")))
    ours, theirs = measured(tmp_path / "hf"), measured(tmp_path / "megatron")
    assert ours == theirs


def test_fp8_codes_are_measured_as_the_values_that_training_would_start_from(tmp_path):
    made = fp8_directories.make(tmp_path, "fp8-block", **fp8_directories.RAGGED)
    values = made["model.layers.1.mlp.down_proj.weight"].values.bfloat16()
    (one,) = measured(tmp_path)["decoder.layers.1.mlp.linear_fc2"]
    assert counts(one) == counts(measure(values, E4M3, None, square=True))


def test_several_workers_measure_the_same(tmp_path):
    pico.save(tmp_path, "mixtral", dtype=torch.bfloat16)
    assert measured(tmp_path, workers=3) == measured(tmp_path)


def test_weights_are_measured_under_the_delayed_scale_that_was_recorded(tmp_path):
    model = pico.make_and_save(tmp_path, dtype=torch.bfloat16)
    module = "decoder.layers.0.self_attention.linear_proj"
    weight = model.model.layers[0].self_attn.o_proj.weight
    half = after_one_update(weight.abs().amax().float() / 2, "weight", RECIPE)
    states = Fp8States(RECIPE, {module: Fp8State({**Fp8State.fresh(17).roles, "weight": half})})
    found = measured(tmp_path, states)
    beyond = (weight.abs() > weight.abs().amax() / 2).sum()
    assert found[module][0].losses["delayed"].saturated == beyond > 0
    assert found["decoder.layers.0.mlp.linear_fc2"][0].losses["delayed"].elements == 0


def test_an_expert_of_which_nothing_was_recorded_is_neither_measured_under_a_scale_nor_stale(tmp_path):
    """`convert` makes the scale of such an expert from its weights, so nothing has to be calibrated for it."""
    pico.save(tmp_path, "mixtral", dtype=torch.bfloat16)
    module = "decoder.layers.0.mlp.experts.linear_fc1"
    amaxes = torch.tensor([one.amax for one in measured(tmp_path)[module]])
    seen = {role: after_one_update(amaxes, role, RECIPE) for role in ("input", "weight", "grad_output")}
    silent = torch.arange(len(amaxes)) == 1
    roles = {role: part.replaced(silent, RoleState.fresh(17, amaxes.shape)) for role, part in seen.items()}
    states = Fp8States(RECIPE, {module: Fp8State({**Fp8State.fresh(17, amaxes.shape).roles, **roles})})
    weights = measured(tmp_path, states)[module]
    assert [one.losses["delayed"].elements > 0 for one in weights] == [True, False, True, True]
    readiness = judged([module], {module: weights}, states)
    (weight,) = (health for health in readiness.roles if health.role == "weight")
    assert [finding.kind for finding in weight.findings] == ["silent"]
    assert not carry_state(states, {module: amaxes}, None).stale


def test_growth_is_of_medians_so_a_single_batch_does_not_make_it():
    steady = read_history(recorded(*[2.0] * 15, 40.0), "input", RECIPE)
    assert steady.growth == 1.0
    doubling = read_history(recorded(*(2.0**i for i in range(16))), "input", RECIPE)
    assert doubling.growth == 2.0**12
    assert (doubling.smallest, doubling.largest, doubling.newest, doubling.rows) == (1.0, 2.0**15, 2.0**15, 16)
    assert read_history(recorded(1.0, 2.0, 4.0), "input", RECIPE).growth is None


@settings(max_examples=60, deadline=None)
@given(amaxes=st.lists(st.floats(2.0**-66, 2.0**66, width=32), min_size=1, max_size=16), e5m2=st.booleans())
def test_a_scale_made_of_its_own_history_covers_it(amaxes, e5m2):
    role = "grad_output" if e5m2 else "input"
    largest = max(amaxes)
    scale = after_one_update(torch.tensor(largest), role, RECIPE).scale
    history = read_history(recorded(*amaxes, scale=float(scale)), role, RECIPE)
    assert not history.saturates
    assert headroom(history) == pytest.approx(math.log2(largest / history.newest), abs=1e-4)


def test_a_scale_too_large_for_the_newest_amax_saturates():
    history = read_history(recorded(1.0, 1.0, 7.0, scale=448.0), "input", RECIPE)
    assert history.saturates and history.used == 7.0
    assert headroom(history) == pytest.approx(-math.log2(7))


def test_a_history_of_one_row_is_read_from_its_scale_and_an_infinite_amax_is_told():
    short = DelayedScaling(amax_history_len=1)
    history = read_history(after_one_update(torch.tensor(3.0), "input", short), "input", short)
    assert history.newest == pytest.approx(3.0) and history.rows == 1 and not history.saturates
    assert read_history(recorded(1.0, math.inf, 2.0, scale=224.0), "input", RECIPE).infinite
    assert read_history(RoleState.fresh(17), "input", RECIPE) is None


def test_of_experts_the_extremes_are_told_and_how_many_were_silent():
    parts = [recorded(*[1.0] * 16), recorded(*[0.5] * 8, *[4.0] * 8), RoleState.fresh(17)]
    together = RoleState(torch.stack([p.scale for p in parts]), torch.stack([p.amax_history for p in parts]))
    history = read_history(together, "input", RECIPE)
    assert (history.smallest, history.largest, history.growth, history.silent) == (0.5, 4.0, 8.0, 1)
    together.amax_history[0, 1:] = math.inf
    history = read_history(together, "input", RECIPE)
    assert history.infinite and history.silent == 1


def kinds(readiness, remedy):
    return {
        (health.module, health.role, each.kind)
        for health in readiness.roles
        for each in health.findings
        if each.remedy == remedy
    }


def test_where_everything_is_known_and_fine_every_scaling_is_ready():
    weights, states = healthy()
    readiness = judged(MODULES, weights, states)
    for scaling in FP8_SCALINGS:
        verdict = readiness.verdicts[scaling]
        assert verdict.ready and verdict.keep_bf16 == () and verdict.words == "ready, all modules in FP8"
    assert not any(health.findings for health in readiness.roles)


def test_an_outlier_channel_in_an_activation_keeps_its_module_in_bf16_but_not_under_mx():
    weights, states = healthy()
    hurt = with_outlier(gaussian(256, 2048))
    planted = {"input": measure(hurt, E4M3, None), "grad_output": states.statistics[MODULES[2]]["grad_output"]}
    readiness = judged(MODULES, weights, replace(states, statistics={**states.statistics, MODULES[2]: planted}))
    assert readiness.verdicts["current"].keep_bf16 == (MODULES[2],)
    assert readiness.verdicts["current"].words == "ready, with 1 of 6 modules in BF16"
    assert readiness.verdicts["block"].kept == 1  # a block of 16 in every row is lost, which is 6 %
    assert readiness.verdicts["mxfp8"].kept == 1  # and 1.5 % with blocks of 32: still more than the limit
    mild = hurt.clone()
    mild[:, 3] = 3e3  # per tensor that costs 0.5 %, under the limit
    planted = {**planted, "input": measure(mild, E4M3, None)}
    readiness = judged(MODULES, weights, replace(states, statistics={**states.statistics, MODULES[2]: planted}))
    assert all(verdict.kept == 0 for verdict in readiness.verdicts.values())


def test_an_outlier_row_in_a_weight_is_a_matter_for_scales_per_tensor():
    weights, states = healthy()
    values = gaussian(16384, 128)
    values[7] *= 1e6
    weights[MODULES[0]] = [measure(values, E4M3, None, square=True)]
    verdicts = judged(MODULES, weights, None).verdicts
    assert verdicts["current"].keep_bf16 == (MODULES[0],)
    assert verdicts["block"].keep_bf16 == verdicts["mxfp8"].keep_bf16 == ()


def test_without_any_state_weights_are_judged_and_the_rest_is_said_to_be_unknown():
    weights, _ = healthy()
    verdicts = judged(MODULES, weights, None).verdicts
    assert verdicts["current"].unjudged == {"input": 6, "grad_output": 6}
    assert not verdicts["current"].ready and not verdicts["delayed"].ready
    assert verdicts["delayed"].recalibrate == 6
    assert verdicts["current"].words == "not known yet; so far all modules in FP8"
    assert verdicts["delayed"].words == "calibrate first (6 modules), then all modules in FP8"


def test_histories_alone_judge_delayed_scaling_and_nothing_else():
    weights, states = healthy()
    verdicts = judged(MODULES, weights, replace(states, statistics={})).verdicts
    assert verdicts["delayed"].ready
    assert not verdicts["current"].ready and verdicts["current"].unjudged == {"input": 6, "grad_output": 6}


PLANTED = {
    "beyond the scale": recorded(*[5.0] * 16, scale=448.0),
    "infinite": recorded(*[5.0] * 14, math.inf, 5.0, scale=448.0 / 5),
    "never recorded": RoleState.fresh(17),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_a_state_not_to_start_from_is_named_by_role(kind):
    weights, states = healthy()
    planted = Fp8State({**states.modules[MODULES[1]].roles, "input": PLANTED[kind]})
    readiness = judged(MODULES, weights, replace(states, modules={**states.modules, MODULES[1]: planted}))
    assert kinds(readiness, "recalibrate") == {(MODULES[1], "input", kind)}
    assert readiness.verdicts["delayed"].recalibrate == 1 and not readiness.verdicts["delayed"].ready
    assert readiness.verdicts["current"].ready


def test_a_module_without_state_among_others_waits_for_calibration():
    weights, states = healthy()
    readiness = judged(MODULES, weights, states.without([MODULES[4]]))
    assert {module for module, _, _ in kinds(readiness, "recalibrate")} == {MODULES[4]}


def test_a_weight_amax_of_other_weights_is_stale():
    weights, states = healthy()
    roles = states.modules[MODULES[0]].roles
    for factor, stale in ((1.9, False), (2.1, True), (1 / 2.1, True)):
        amax = weights[MODULES[0]][0].amax * factor
        planted = Fp8State({**roles, "weight": recorded(amax, scale=448.0 / amax)})
        readiness = judged(MODULES, weights, replace(states, modules={**states.modules, MODULES[0]: planted}))
        assert (kinds(readiness, "recalibrate") == {(MODULES[0], "weight", "stale")}) is stale


def test_growth_and_outliers_are_to_be_watched():
    weights, states = healthy()
    grown = Fp8State({**states.modules[MODULES[3]].roles, "input": recorded(*(1.5**i for i in range(16)))})
    spiky = gaussian(256, 256)
    spiky[0, 0] = 300.0
    planted = {**states.statistics[MODULES[5]], "input": measure(spiky, E4M3, None)}
    readiness = judged(
        MODULES,
        weights,
        replace(
            states,
            modules={**states.modules, MODULES[3]: grown},
            statistics={**states.statistics, MODULES[5]: planted},
        ),
    )
    assert kinds(readiness, "watch") == {(MODULES[3], "input", "growth"), (MODULES[5], "input", "outliers")}
    assert all(verdict.ready for verdict in readiness.verdicts.values())


def test_heavy_tails_of_gradients_are_no_outliers():
    weights, states = healthy()
    spiky = gaussian(256, 256)
    spiky[0, 0] = 300.0
    planted = {**states.statistics[MODULES[5]], "grad_output": measure(spiky, E5M2, None)}
    readiness = judged(MODULES, weights, replace(states, statistics={**states.statistics, MODULES[5]: planted}))
    assert not kinds(readiness, "watch")


def test_saturation_wants_a_margin_once_it_is_more_than_a_few_elements():
    weights, states = healthy()
    values = gaussian(1024, 256)
    largest = values.abs().flatten().sort(descending=True).values
    for beyond, wanted in ((5, False), (20, True)):  # of 262,144: 0.0019 % and 0.0076 %, both above the limit
        scale = 448.0 / float(largest[beyond])
        planted = {**states.statistics[MODULES[0]], "input": measure(values, E4M3, torch.tensor(scale))}
        readiness = judged(MODULES, weights, replace(states, statistics={**states.statistics, MODULES[0]: planted}))
        assert (kinds(readiness, "margin") == {(MODULES[0], "input", "saturation")}) is wanted
        assert readiness.verdicts["delayed"].margin == wanted
        assert readiness.verdicts["current"].margin == 0


def test_dead_and_not_finite_are_told_apart():
    weights, states = healthy()
    dead = {**states.statistics[MODULES[0]], "input": measure(torch.zeros(64, 64), E4M3, None)}
    broken = gaussian(64, 64)
    broken[1, 1] = math.nan
    sick = {**states.statistics[MODULES[1]], "input": measure(broken, E4M3, None)}
    readiness = judged(
        MODULES, weights, replace(states, statistics={**states.statistics, MODULES[0]: dead, MODULES[1]: sick})
    )
    assert kinds(readiness, "watch") == {(MODULES[0], "input", "dead")}
    assert kinds(readiness, "repair") == {(MODULES[1], "input", "not finite")} and not kinds(readiness, "bf16")
    for verdict in readiness.verdicts.values():
        assert not verdict.ready and (verdict.broken, verdict.keep_bf16) == (1, ())
        assert verdict.words == "not ready: NaN or infinity in 1 module, which no precision mends"


@pytest.mark.parametrize("role", ["weight", "input"])
def test_zeros_that_were_measured_do_not_wait_for_calibration(role):
    """No pass records an amax of them, however often there is one."""
    weights, states = healthy()
    zeros = measure(torch.zeros(64, 64), E4M3, None)
    waiting = Fp8State({**states.modules[MODULES[0]].roles, role: RoleState.fresh(17)})
    states = replace(states, modules={**states.modules, MODULES[0]: waiting})
    if role == "weight":
        weights[MODULES[0]] = [zeros]
    else:
        of_module = {**states.statistics[MODULES[0]], role: zeros}
        states = replace(states, statistics={**states.statistics, MODULES[0]: of_module})
    readiness = judged(MODULES, weights, states)
    assert readiness.verdicts["delayed"].ready and not kinds(readiness, "recalibrate")
    assert kinds(readiness, "watch") == {(MODULES[0], role, "dead")}


def test_one_bad_expert_is_enough_for_its_module():
    weights, states = healthy()
    bad = measure(with_outlier(gaussian(256, 256)), E4M3, None, square=True)
    weights[MODULES[0]] = [*weights[MODULES[0]] * 7, bad]
    roles = judged(MODULES, weights, None).roles
    health = next(each for each in roles if (each.module, each.role) == (MODULES[0], "weight"))
    assert health.underflow("current") == bad.losses["current"].underflow > 0.9


def test_caches_keys_and_values_are_shown_and_do_not_weigh_on_gemms():
    weights, states = healthy()
    attention = "decoder.layers.0.self_attention.core_attention"
    keys = Fp8State({"k": recorded(3.0), "v": RoleState.fresh(17)})
    readiness = judged(MODULES, weights, replace(states, modules={**states.modules, attention: keys}))
    assert [health.role for health in readiness.roles if health.module == attention] == ["k"]
    assert readiness.verdicts["delayed"].ready


def test_what_only_has_statistics_is_shown_by_its_own_roles_and_nothing_seen_is_not_measured():
    weights, states = healthy()
    attention = "decoder.layers.0.self_attention.core_attention"
    keys = {"k": measure(gaussian(64, 64), E4M3, None)}
    silent = {**states.statistics[MODULES[0]], "input": Statistics()}
    readiness = judged(
        MODULES, weights, replace(states, statistics={**states.statistics, attention: keys, MODULES[0]: silent})
    )
    assert [health.role for health in readiness.roles if health.module == attention] == ["k"]
    assert not any(health.findings for health in readiness.roles)
    assert readiness.verdicts["current"].unjudged == {"input": 1}


@settings(max_examples=100, deadline=None)
@given(chosen=st.sets(st.sampled_from(MODULES)))
def test_patterns_match_what_they_stand_for_and_nothing_else(chosen):
    from precisionctl.precision import Precision

    kept = Precision(fp8=True, keep_bf16=shortened(chosen, MODULES))
    assert {module for module in MODULES if not kept.in_fp8(module)} == chosen


def test_a_kind_in_every_layer_and_all_of_a_layer_become_patterns():
    assert shortened({m for m in MODULES if m.endswith("fc2")}, MODULES) == ("decoder.layers.*.mlp.linear_fc2",)
    assert shortened({MODULES[0], MODULES[1]}, MODULES) == ("decoder.layers.0.*",)
    stacks = [f"model.layers.{layer}.experts.down_proj[{expert}]" for layer in (0, 1) for expert in (0, 1)]
    assert shortened({*stacks}, stacks) == tuple(stacks)  # a bracket means something else in a pattern
    assert split_name("mtp.layers.0.transformer_layer.mlp.linear_fc1") == (
        "mtp.layers",
        0,
        "transformer_layer.mlp.linear_fc1",
    )
    assert split_name("output_layer") == ("", None, "output_layer")


@pytest.mark.parametrize("width", [104, 112, 128])
def test_what_is_kept_in_bf16_for_its_size_is_what_training_refuses(tmp_path, width):
    """A model is made with each scaling: all of it in FP8, and with the patterns of the verdict."""
    pico.save(tmp_path, dtype=torch.bfloat16, intermediate_size=width)
    reader = open_checkpoint(tmp_path)
    found = assess(reader, None, lambda total: nullcontext(lambda done: None))
    for scaling, verdict in found.verdicts.items():
        precision = Precision(fp8=True, scaling=scaling)
        fits = width % (32 if scaling == "mxfp8" else 16) == 0
        assert (verdict.kept == 0) is fits
        with nullcontext() if fits else pytest.raises(PrecisionError, match="GEMMs need multiples"):
            GPT(reader.model, precision, device="meta")
        GPT(reader.model, replace(precision, keep_bf16=verdict.keep_bf16), device="meta")
    assert found.verdicts["delayed"].recalibrate == (6 if width == 104 else 8)
    left_out = "precision.keep_bf16=" + '["decoder.layers.*.mlp.linear_fc2"]'
    assert any(left_out in line for line in report.to_measure(found, "CKPT")) is (width == 104)


def test_what_stays_in_bf16_for_its_size_is_not_to_be_calibrated():
    """`calibrate` refuses to record it (trainer/backends/base.py, require_alignment)."""
    weights, states = healthy()
    without = replace(states, modules={name: one for name, one in states.modules.items() if name != MODULES[2]})
    for shape in ((256, 24), (256, 256)):
        judged = judge(dict.fromkeys(MODULES, (256, 256)) | {MODULES[2]: shape}, weights, without)
        found = {finding.remedy for role in judged.roles if role.module == MODULES[2] for finding in role.findings}
        assert found == ({"bf16"} if 24 in shape else {"recalibrate"})


def test_a_model_of_which_no_size_fits_is_not_ready():
    weights, states = healthy()
    readiness = judge(dict.fromkeys(MODULES, (24, 256)), weights, states)
    for verdict in readiness.verdicts.values():
        assert not verdict.ready and verdict.words == "not ready: every module has to stay in BF16"


@pytest.mark.parametrize("precision", ["keep", "bf16"])
def test_statistics_travel_with_a_checkpoint_to_megatron_and_back(tmp_path, precision):
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    _, states = healthy()
    found = {m: states.statistics[MODULES[0]] for m in MODULES[:4]}
    sidecar.write(
        tmp_path / "hf" / sidecar.RELATIVE,
        replace(states, modules={m: states.modules[m] for m in MODULES[:4]}, statistics=found),
    )
    there, back = tmp_path / "megatron", tmp_path / "back"
    execute(plan_command(Request(tmp_path / "hf", there, to="megatron", precision=precision)))
    execute(plan_command(Request(there, back, to="hf")))
    assert open_checkpoint(there).fp8.statistics == open_checkpoint(back).fp8.statistics == found


def test_every_limit_is_in_the_document_with_its_value_and_its_source():
    table = re.findall(r"^\| `([A-Z_]+)` \| ([^|]+) \| ([^|]+) \|", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    limits = {name: limit for name, limit in vars(thresholds).items() if isinstance(limit, thresholds.Threshold)}
    assert {name: (value.strip(), source.strip()) for name, value, source in table} == {
        name: (limit.shown, limit.source) for name, limit in limits.items()
    }
    assert {name.lower() for name in limits} == set(thresholds.ALL)


def test_what_a_limit_shows_is_its_value():
    for limit in thresholds.ALL.values():
        number = float(limit.shown.split()[0].replace(",", ""))
        assert limit.value == pytest.approx(number / 100 if "%" in limit.shown else number)


def test_a_gaussian_loses_as_little_as_the_limit_on_underflow_says():
    """Underflow begins at half of E4M3's smallest number, 2^-10; amax is cast to 448."""
    reach = 448 / 2.0**-10
    lost = math.erf(5 / reach / math.sqrt(2))
    assert lost == pytest.approx(1e-5, rel=0.2)
    largest = next(sigmas for sigmas in range(100, 10_000, 10) if math.erf(sigmas / reach / math.sqrt(2)) > 0.01)
    assert largest == pytest.approx(5_700, rel=0.02)


OUTLIERS = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize("workers", [1, 2])
def test_weights_that_four_bits_lose_too_much_of_are_left_out_of_them(tmp_path: Path, workers: int) -> None:
    """A channel of outliers in every 128 spoils INT4's groups; NVFP4's groups, of 16, lose more zeros than noise: an
    outlier is most of its group's signal. The numbers are those of a slow definition of INT4."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    pico.save(tmp_path, "llama-3", dtype=torch.bfloat16, **sizes)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if tensor.dim() == 2:
            tensors[name] = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name))).bfloat16()
    tensors[OUTLIERS][:, ::128] *= 12
    save_file(tensors, file, metadata={"format": "pt"})
    found = assess(open_checkpoint(tmp_path), None, lambda total: nullcontext(lambda done: None), workers)
    cost, module = found.four_bits, "decoder.layers.1.mlp.linear_fc2"
    assert cost is not None and cost.left_out == {"nvfp4": (), "mxfp4": (), "w4a16": (module,)}
    rows = tensors[OUTLIERS][::8].float()
    best = torch.full((16, 2), torch.inf)
    for part in (1.0, 0.9, 0.8):
        groups = rows.view(16, 2, 128)
        scale = (groups.abs().amax(2, keepdim=True) * part / 7.5).bfloat16().float()
        best = best.minimum(((groups / scale).round().clamp(-8, 7) * scale - groups).square().sum(2))
    assert cost.sqnr_db[module]["w4a16"] == pytest.approx(10 * math.log10(rows.square().sum() / best.sum()), abs=0.01)
    tables = "\n".join(" ".join(row) for row in report.four_bit_tables(found)[0].rows)
    assert f"{cost.sqnr_db[module]['w4a16']:.1f} dB" in tables
    (line,) = [line for line in report.advice(found, "CKPT") if line.startswith("keep_bf16")]
    assert line == f'keep_bf16 = ["{module}"]'
    assert report.as_json(found)["four_bits"]["left_out"]["w4a16"] == (module,)


def test_what_gaussian_weights_lose_in_four_bits_is_what_the_limits_are_in_times_of() -> None:
    values = torch.randn(512, 2048, generator=torch.Generator().manual_seed(0))
    for scheme, loss in four_bit_losses(values, values.abs().amax(), torch.empty(nibbles.SCRATCH)).items():
        assert loss.sqnr == pytest.approx(GAUSSIAN_DB[scheme], abs=0.06)
        assert loss.underflow == pytest.approx(GAUSSIAN_ZEROS[scheme], abs=0.001)
