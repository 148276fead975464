"""What `inspect --fp8` shows: JSON of a known form, tables, and a page that is whole in itself."""

import json
import os
from contextlib import nullcontext
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pico
import pytest
import torch
from click.testing import CliRunner
from judged_states import E4M3, MODULES, gaussian, healthy, judged, recorded, with_outlier
from training import make_place, run as train, settings

from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.cli import main
from precisionctl.codes.health import measure
from precisionctl.conversion.weights_digest import digest_weights
from precisionctl.fp8 import sidecar
from precisionctl.fp8.state import Fp8State
from precisionctl.readiness.assess import assess
from precisionctl.readiness.thresholds import Threshold
from precisionctl.reports import readiness as report
from precisionctl.reports.heat import ColourScale
from precisionctl.reports.inspect import describe
from precisionctl.reports.readiness_page import whole_page


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def with_everything():
    """One module with an outlier channel, one whose amaxes grow, one that was never recorded, one not measured."""
    weights, states = healthy()
    hurt = {**states.statistics[MODULES[0]], "input": measure(with_outlier(gaussian(256, 256)), E4M3, None)}
    grown = Fp8State({**states.modules[MODULES[1]].roles, "input": recorded(*(2.0**i for i in range(16)))})
    statistics = {**states.statistics, MODULES[0]: hurt}
    del statistics[MODULES[3]]
    states = replace(states, modules={**states.modules, MODULES[1]: grown}, statistics=statistics)
    return judged(MODULES, weights, states.without([MODULES[2]]))


def test_the_page_of_a_checkpoint_that_is_where_we_are_has_its_name(tmp_path, monkeypatch):
    pico.save(tmp_path / "model", dtype=torch.bfloat16)
    monkeypatch.chdir(tmp_path / "model")
    text = whole_page(describe(open_checkpoint(Path())), judged([], {}, None), "CKPT")
    assert "<title>Is model ready for FP8?" in text


def test_json_has_every_role_of_every_module_and_keeps_its_form():
    found = json.loads(json.dumps(report.as_json(with_everything())))
    assert found.keys() == {"thresholds", "verdicts", "four_bits", "passes", "notes", "modules"}
    assert found["verdicts"].keys() == {"delayed", "current", "block", "mxfp8"}
    assert found["verdicts"]["current"] == {
        "ready": False,
        "words": "not known yet; so far with 1 of 6 modules in BF16",
        "modules_to_repair": 0,
        "keep_bf16": [MODULES[0]],
        "modules_kept": 1,
        "modules": 6,
        "modules_to_calibrate": 0,
        "modules_that_saturate": 0,
        "unjudged": {"input": 2, "grad_output": 2},
    }
    assert list(found["modules"]) == MODULES
    hurt = found["modules"][MODULES[0]]["input"]
    assert hurt.keys() == {
        *("amax", "elements", "kurtosis", "underflow", "saturation", "sqnr_db", "history", "findings"),
    }
    assert hurt["underflow"]["current"] > 0.9 and hurt["underflow"]["delayed"] is None
    assert hurt["history"].keys() == {
        *("rows", "smallest", "largest", "newest", "growth", "used", "infinite", "silent", "headroom_binades"),
    }
    assert [(each["remedy"], each["kind"]) for each in hurt["findings"]][0] == ("bf16", "zeros")
    assert found["modules"][MODULES[3]]["input"]["elements"] == 0
    assert found["thresholds"]["saturation"] == {"value": 1e-5, "source": "FP8-LM, arXiv 2310.18313, section 2.1"}


def test_tables_show_what_needs_most_first_and_many_of_a_kind_in_one_row():
    weights, states = healthy()
    readiness = judged(MODULES, weights, states.without(MODULES[:4]))
    rows = report.findings(readiness).rows
    assert rows[0][1] == f"{MODULES[0]} and 3 more" and rows[0][3] == "never recorded"
    remedies = [row[0] for row in report.findings(with_everything()).rows]
    assert remedies == sorted(remedies, key=list(report.REMEDIES.values()).index)
    assert remedies[0] == "keep in BF16" and remedies[-1] == "watch"


def test_advice_can_be_pasted_into_a_recipe(tmp_path):
    from precisionctl.recipe import load_recipe

    lines = report.advice(with_everything(), "CKPT")
    pasted = tmp_path / "mine.toml"
    pasted.write_text("[precision]\nfp8 = true\n" + "\n".join(lines[:2]))
    precision = load_recipe(pasted).precision
    assert [module for module in MODULES if not precision.in_fp8(module)] == [MODULES[0]]


class Page(HTMLParser):
    """What a page asks for, and its text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.asked, self.words, self.titles, self.open = [], [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        named = dict(attributes)
        self.asked += [named[name] for name in ("src", "href", "srcset", "data", "action") if name in named]
        self.titles += [named["title"]] if "title" in named else []
        if tag not in ("input", "meta", "i"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag != "i":
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def page_of(tmp_path, readiness):
    pico.save(tmp_path)
    description = dict(describe(open_checkpoint(tmp_path)))
    return whole_page({**description, "path": "/models/<i>a & b"}, readiness, "'/models/<i>a & b'")


def test_the_page_asks_for_nothing_and_escapes_names(tmp_path):
    nasty = '<script>alert("x")</script>'
    weights, states = healthy()
    odd = {nasty if module == MODULES[5] else module: found for module, found in weights.items()}
    text = page_of(tmp_path, judged(list(odd), odd, states))
    page = Page(text)
    assert page.asked == [] and "script" not in page.tags and "link" not in page.tags
    assert "url(" not in text and "@import" not in text and "http" not in text
    assert nasty not in text and any(nasty in title for title in page.titles)
    assert "<i>a" not in text.partition("<body>")[2].partition("</h1>")[0]
    assert "prefers-color-scheme: dark" in text
    assert page.open == []


def test_the_page_of_a_model_without_a_table_or_without_modules_says_so(tmp_path):
    pico.save(tmp_path)
    words = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(words | {"model_type": "new", "architectures": ["NewForCausalLM"]})
    )
    text = whole_page(describe(open_checkpoint(tmp_path)), judged([], {}, None), "CKPT")
    assert "<p>new.</p>" in text and "hidden size" not in text
    assert text.count("nothing to judge: no module would be in FP8") == len(judged([], {}, None).verdicts)


def test_the_page_has_a_map_of_each_measure_with_a_cell_for_each_role(tmp_path):
    text = page_of(tmp_path, with_everything())
    page = Page(text)
    assert page.tags.count("input") == page.tags.count("section") == 10
    assert sum(title.startswith(f"{MODULES[0]}, input: ") for title in page.titles) == 10
    assert f"{MODULES[0]}, input: 97 %" in page.titles
    assert f"{MODULES[3]}, input: not known" in page.titles
    assert any("amax has grown" in title for title in page.titles)


def test_a_map_is_left_out_where_nothing_is_known_of_its_measure(tmp_path):
    weights, _ = healthy()
    unmeasured = {module: [measure(gaussian(128, 128), E4M3, None)] for module in weights}
    page = Page(page_of(tmp_path, judged(MODULES, unmeasured, None)))
    assert "Growth" not in page.words and "Zeros: delayed" not in page.words
    assert "Zeros: current" in page.words


def test_the_page_says_how_much_data_its_verdict_rests_on_and_has_commands_to_copy(tmp_path, monkeypatch):
    weights, states = healthy()
    few, enough, nothing = (
        judged(MODULES, weights, with_passes and replace(states, modules=dict.fromkeys(MODULES, with_passes)))
        for with_passes in (state_of(3), state_of(16), None)
    )
    assert (few.passes, enough.passes, nothing.passes) == (3, 16, None)
    assert "were recorded in 3 passes, which is little" in page_of(tmp_path, few)
    assert any("recorded in 3 passes, which is little" in line for line in report.advice(few, "CKPT"))
    monkeypatch.setattr(report, "PASSES", Threshold(16, "16 passes", "ours"))
    experts = replace(states, modules=dict.fromkeys(MODULES, state_of(16)) | {MODULES[0]: state_of(15)})
    told = report.rests_on(judged(MODULES, weights, experts))
    assert told.endswith("activations and gradients were recorded in 16 passes, of some modules in 15.")
    assert report.rests_on(enough).endswith("activations and gradients were recorded in 16 passes.")
    untold = page_of(tmp_path, nothing)
    assert "of activations and gradients nothing is known" in untold and "user-select: all" in untold
    assert "<pre>precisionctl calibrate &#x27;/models/&lt;i&gt;a &amp; b&#x27; --data FILE --out STATE</pre>" in untold


def state_of(passes):
    return Fp8State({role: recorded(*[1.0] * passes) for role in ("input", "weight", "grad_output")})


@pytest.mark.parametrize(
    ("value", "step"), [(0, "c0"), (1, "c1"), (1.5, "c2"), (2, "c2"), (3, "w0"), (9, "w1"), (99, "w2")]
)
def test_colours_turn_warm_beyond_the_limit(value, step):
    assert ColourScale((0, 1, 2), (5, 10, 100), str).step(value) == step


@pytest.mark.parametrize(
    ("value", "shown"), [(0, "0 %"), (1e-7, "<0.001 %"), (2.345e-4, "0.023 %"), (0.0123, "1.2 %"), (0.987, "99 %")]
)
def test_shares_are_short(value, shown):
    assert report.share_in_words(value) == shown


def test_inspect_of_a_bf16_checkpoint_says_what_it_cannot_know(tmp_path):
    pico.save(tmp_path / "ckpt", dtype=torch.bfloat16)
    result = run("inspect", tmp_path / "ckpt", "--fp8", "--html", tmp_path / "page.html")
    assert result.exit_code == 0
    assert "calibrate first (8 modules)" in result.stdout and "not known yet" in result.stdout
    assert "There is no FP8 state" in result.stdout
    assert (
        f"Nothing has measured input and grad_output. To measure:\nprecisionctl calibrate {tmp_path}" in result.stdout
    )
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    assert result.stdout.endswith(f"\nWrote {tmp_path / 'page.html'}.\n")


def test_modules_that_the_run_kept_in_bf16_are_not_to_be_calibrated(tmp_path):
    """Its last layer, of two with four modules each."""
    place = make_place(tmp_path)
    ends = {"precision__num_layers_at_end_in_bf16": 1, "train__steps": 1}
    train(settings(place / "source", place / "text.txt", place / "run", "fp8", **ends))
    shown = run("inspect", place / "run", "--fp8").stdout
    assert "ready, all modules in FP8, but for 4 that the run kept in BF16" in shown and "calibrate first" not in shown
    kept = "4 modules stayed in BF16 in the run, such as decoder.layers.1.self_attention.linear_qkv, and recorded"
    assert kept in shown
    assert "Of input and grad_output amaxes are recorded, and nothing else is measured. To measure:\n" in shown
    assert "Nothing has measured" not in shown
    found = json.loads(run("inspect", place / "run", "--fp8", "--json").stdout)["readiness"]
    assert {name.partition(".self")[0].partition(".mlp")[0] for name in found["modules"]} == {"decoder.layers.0"}


def test_what_inspect_advises_to_run_reads_the_checkpoint_as_it_did(tmp_path):
    pico.save(tmp_path / "ckpt", dtype=torch.bfloat16)
    assert run("convert", tmp_path / "ckpt", tmp_path / "dcp", "--to", "dcp").exit_code == 0
    (tmp_path / "dcp" / "config.json").unlink(missing_ok=True)
    page, read_as = tmp_path / "page.html", ("--reference", tmp_path / "ckpt")
    result = run("inspect", tmp_path / "dcp", "--fp8", "--html", page, *read_as)
    assert result.exit_code == 0, result.output
    command = f"precisionctl calibrate {tmp_path / 'dcp'} --reference {tmp_path / 'ckpt'} --data FILE"
    assert command in result.stdout and command in page.read_text()


def test_inspect_takes_a_state_file_for_the_checkpoint_s_own(tmp_path):
    pico.save(tmp_path / "ckpt", dtype=torch.bfloat16)
    _, states = healthy()
    module = "decoder.layers.0.mlp.linear_fc1"
    sidecar.write(tmp_path / "state", replace(states, modules={}, statistics={module: states.statistics[MODULES[0]]}))
    result = run("inspect", tmp_path / "ckpt", "--fp8", "--fp8-state", tmp_path / "state", "--json")
    assert result.exit_code == 0
    readiness = json.loads(result.stdout)["readiness"]
    assert readiness["modules"][module]["input"]["kurtosis"] == pytest.approx(3, abs=0.2)
    assert readiness["verdicts"]["mxfp8"]["unjudged"] == {"input": 7, "grad_output": 7}


def test_a_state_of_other_weights_is_told_and_used_for_nothing(tmp_path):
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    _, states = healthy()
    four = replace(states, modules={m: states.modules[m] for m in MODULES[:4]}, statistics={}, iteration=100)
    reader = open_checkpoint(tmp_path / "hf")
    digest = digest_weights(reader)
    unknown = "does not say with which weights it was recorded"
    for of_weights, told in ((digest, None), ("another", "was recorded with other weights"), (None, unknown)):
        sidecar.write(tmp_path / "hf" / sidecar.RELATIVE, replace(four, of_weights=of_weights))
        judged = assess(open_checkpoint(tmp_path / "hf"), None, lambda total: nullcontext(lambda count: None))
        assert any(f"{told}: nothing uses it" in note for note in judged.notes) is bool(told)
        findings = [finding for health in judged.roles for finding in health.findings]
        assert {finding.words for finding in findings if finding.kind == "outdated"} == ({told} if told else set())


def test_a_state_of_another_model_is_one_error(tmp_path):
    pico.save(tmp_path / "ckpt", dtype=torch.bfloat16)
    _, states = healthy()  # of three layers
    sidecar.write(tmp_path / "state", states)
    result = run("inspect", tmp_path / "ckpt", "--fp8", "--fp8-state", tmp_path / "state")
    assert result.exit_code == 1 and "decoder.layers.2.mlp.linear_fc1" in result.stderr


def test_a_page_without_a_place_is_told_before_anything_is_measured(tmp_path, monkeypatch):
    result = run("inspect", tmp_path, "--fp8", "--html", tmp_path / "nowhere" / "page.html")
    assert result.exit_code == 2 and "nowhere" in result.stderr
    result = run("inspect", tmp_path, "--fp8", "--html", tmp_path)
    assert result.exit_code == 2 and "is a directory" in result.stderr
    monkeypatch.setattr("os.access", lambda path, mode: str(path) != str(tmp_path) or mode != os.W_OK)
    for command in (["inspect", tmp_path, "--fp8", "--html"], ["compare", tmp_path, tmp_path, "--png"]):
        result = run(*command, tmp_path / "page")
        assert result.exit_code == 2 and "cannot be written to" in result.stderr


@pytest.mark.parametrize("option", ["--html", "--fp8-state"])
def test_options_of_the_verdict_need_it(tmp_path, option):
    assert run("inspect", tmp_path, option, tmp_path).exit_code == 2
