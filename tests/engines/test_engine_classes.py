"""Models that an engine is known to have no class for: an export of one says so, and so does `verify --target`."""

import json
import re
from pathlib import Path

import command_line
import pico
import pytest
import repository
import tiny_wrappers
import torch
from engine_exports import ENGINES
from soaking import in_soak
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto as auto

from precisionctl.architectures.families import supported
from precisionctl.architectures.wrappers import WRAPPERS

GENERATE = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SEQ_TO_SEQ_CAUSAL_LM")


@pytest.mark.skipif("muse_spark" not in CONFIG_MAPPING, reason="of transformers 5.24")
def test_of_transformers_they_are_those_that_no_auto_class_has() -> None:
    known = {name for task in GENERATE for name in getattr(auto, f"MODEL_FOR_{task}_MAPPING_NAMES")}
    kinds = {kind for kind, known in ENGINES["transformers"].no_class.items() if known.where is None}
    assert kinds == {*supported(), *WRAPPERS} - known


def test_the_page_names_them() -> None:
    page = (repository.DOCS / "engines.md").read_text(encoding="utf-8")
    table = page.partition("### Models without a class")[2].partition("\n\n`verify")[0]
    rows = re.findall(r"^\| (\S+) [0-9.]+ \| (.+) \|$", table, re.MULTILINE)
    named = {title: set(re.findall(r"`([\w-]+)`(?: with a `(\w+)`)?", text)) for title, text in rows}
    known = {each.title: each.no_class.items() for each in ENGINES.values() if each.no_class}
    assert named == {title: {(kind, of.where or "") for kind, of in kinds} for title, kinds in known.items()}


def export(source: Path, out: Path, target: str) -> str:
    return " ".join(
        command_line.say("export-inference", source, out, "--target", target, "--scheme", "dynamic").split()
    )


def test_no_command_is_told_to_serve_them(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "kimi-k3", dtype=torch.bfloat16)
    said = export(tmp_path / "hf", tmp_path / "out", "transformers")
    assert "transformers does not serve it: it has no class for a kimi_k3_text" in said and "Serve it with" not in said
    assert "does not load it" in (tmp_path / "out" / "README.md").read_text()
    for directory in ("hf", "out"):
        told = command_line.run("verify", tmp_path / directory, "--target", "transformers", "--json")
        assert told.exit_code == 1
        (found,) = [each for each in json.loads(told.output)["findings"] if each["what"] == "a kimi_k3_text"]
        assert found["rule"]["fatal"]
    assert "Serve it with: vllm serve" in export(tmp_path / "hf", tmp_path / "of vllm", "vllm")


def test_code_of_its_own_is_a_class(tmp_path: Path) -> None:
    pico.save(tmp_path / "hf", "kimi-k3", dtype=torch.bfloat16)
    path = tmp_path / "hf" / "config.json"
    own = {"auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    (tmp_path / "hf" / "modeling_own.py").write_text("")
    assert "Serve it with: transformers serve" in export(tmp_path / "hf", tmp_path / "out", "transformers")
    told = command_line.run("verify", tmp_path / "out", "--target", "transformers")
    assert "kimi_k3_text" not in told.output


@pytest.mark.parametrize(
    ("kind", "target"),
    # each wrapper and each engine once: the note is one
    [
        ("qwen2_5_omni_thinker", "vllm"),
        ("shieldgemma2", "sglang"),
        *in_soak(("qwen2_5_omni_thinker", "sglang"), ("shieldgemma2", "vllm")),
    ],
)
def test_no_engine_has_a_class_for_what_thinks_in_a_qwen_omni_alone_or_for_a_classifier(
    tmp_path: Path, kind: str, target: str
) -> None:
    tiny_wrappers.save(tmp_path / "hf", kind, dtype=torch.bfloat16)
    said = export(tmp_path / "hf", tmp_path / "out", target)
    assert f"has no class for a {kind}" in said and "Serve it with" not in said
