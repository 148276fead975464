"""The pass by which weights of a plan become codes, and what is found out while a plan is carried out."""

import json
from pathlib import Path
from typing import Any

import fp8_directories
import in_memory
import pico
import pytest
import torch
from any_models import export, load_whole, logits
from transformers import AutoModelForCausalLM

from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands import source as opening
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.outcome import Outcome
from precisionctl.dtypes import DType
from precisionctl.engines.base import engine_named
from precisionctl.export import weight_encodings as weight_encodings_module
from precisionctl.export.as_before import AsBefore
from precisionctl.export.encode import Policy, WeightFormat, encode, fp8_jobs, in_scheme
from precisionctl.export.weight_encodings import weight_encodings
from precisionctl.fp8 import sidecar
from precisionctl.planning.make_plan import make_plan
from precisionctl.planning.plan import Plan
from precisionctl.precision import PRESETS
from precisionctl.quant_methods.base import quant_methods
from precisionctl.verify.engine_rules import check


def values_of(reader: HuggingFaceReader) -> Plan:
    return make_plan(reader, "hf", dtype=DType.bfloat16, naming="as saved")


@pytest.mark.parametrize("policy", ["static", "dynamic", "as before"])
def test_encode_makes_another_plan_and_the_same_one_each_time(tmp_path: Path, policy: str) -> None:
    fp8_directories.make(tmp_path / "fp8", "modelopt-tensor")
    reader = HuggingFaceReader(tmp_path / "fp8")
    plan, encodings = values_of(reader), weight_encodings(reader)
    assert encodings is not None
    made: Policy = AsBefore(encodings, None, fixed_hold=True)
    if policy in ("static", "dynamic"):
        form = WeightFormat(quant_methods()["compressed-tensors"], policy)  # type: ignore[arg-type]
        states = in_memory.recorded(reader)
        jobs = fp8_jobs(plan, PRESETS["fp8-delayed"])
        made = in_scheme(
            plan,
            jobs,
            states,
            form,
            lambda name, spec, scales: None,
            why_no_state="",
            advice=lambda left: "",
            keep_refused=False,
            kept=None,
        )
    before = plan.digest
    first, second = encode(plan, made), encode(plan, made)
    assert plan.digest == before and not plan.encodes and not plan.codes
    assert first == second and first.digest != before
    assert len(first.codes) == 14 and all(first.targets[name].dtype == DType.float8_e4m3fn for name in first.codes)
    written = [name for job in first.jobs for name in job.outputs]
    assert sorted(written) == sorted(first.targets), "every tensor of the result is written by one job"


OTHER_FORMS = {"gemma4-moe", "mistral4", "minimax-m3", "llama4", "hy4", "lara-mini", "step3p5"}
"""Families whose experts, or other weights, engines read under names that transformers does not: it lacks them."""
UNREAD = {"gpt2", "deepseek-v4", "minicpm3", "mamba", "falcon-mamba"}
"""Families that vLLM does not read in this scheme; MiniCPM3 at these sizes, of which a linear that no list reaches
stays values."""
LOADED_BY_HAND = ("lfm3", "hy-v3", "gpt-neo")
"""In memory a module has another name or parent, or tensors are parts of others; or linears have GPT-2's names."""


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if family in LOADED_BY_HAND else [pytest.mark.soak])
        for family in sorted(pico.FAMILIES.keys() - OTHER_FORMS - UNREAD)
    ],
)
def test_what_is_for_vllm_loads_by_hand_as_what_is_for_transformers(tmp_path: Path, family: str) -> None:
    model = pico.make_and_save(tmp_path / "source", family, dtype=torch.bfloat16)
    distances = []
    for target in ("vllm", "transformers"):
        export(tmp_path / "source", tmp_path / target, target=target, keep_misfits=True)
        found = check(open_checkpoint(tmp_path / target), engine_named("transformers"))
        no_class = f"a {model.config.model_type}"  # of transformers itself
        assert not [finding for finding in found if finding.rule.fatal and finding.what != no_class]
        loaded = load_whole(AutoModelForCausalLM, tmp_path / target)
        distances.append(torch.dist(*(logits(each).float() for each in (loaded, model))))
    assert distances[0] < 1.5 * distances[1]


@pytest.mark.parametrize("target", [None, "vllm", "te"])
def test_a_request_is_planned_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str | None) -> None:
    pico.save(tmp_path / "hf", dtype=torch.bfloat16)
    sidecar.write(tmp_path / "hf" / sidecar.RELATIVE, in_memory.recorded(HuggingFaceReader(tmp_path / "hf")))
    planned = []

    def counted(*args: Any, **named: Any) -> Plan:
        planned.append(args)
        return make_plan(*args, **named)

    for module in (opening, weight_encodings_module):
        monkeypatch.setattr(module, "make_plan", counted)
    out = tmp_path / "out"
    plan_command(Request.export(tmp_path / "hf", out, target) if target else Request(tmp_path / "hf", out, "megatron"))
    assert len(planned) == 1


def test_findings_come_back_from_json_and_anything_else_is_refused() -> None:
    found = Outcome({"a": 1.5}, {"b": 2}, {"c"}, {"e"}, {"d": 0.25})
    assert Outcome.from_json(json.loads(json.dumps(found.as_json()))) == found
    for said in ({}, [], {**found.as_json(), "amax": {"a": "b"}}, {**found.as_json(), "rounded": [1]}):
        with pytest.raises(ValueError, match="no outcome"):
            Outcome.from_json(said)


def test_findings_of_different_tensors_are_put_together() -> None:
    found = Outcome({"a": 1.0}, {}, {"n"}, set(), {})
    found |= Outcome({"b": 2.0}, {"c": 3}, {"m"}, {"r"}, {"d": 0.5}, ["told"])
    assert found == Outcome({"a": 1.0, "b": 2.0}, {"c": 3}, {"n", "m"}, {"r"}, {"d": 0.5}, ["told"])
