"""Which keys of config.json `verify` may leave out: transformers is the judge, by the logits that it computes."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import in_memory
import pico
import pytest
import repository
import tiny_wrappers
import torch
from checkpoint_mutations import changed_configs
from soaking import few, in_soak
from transformers import AutoModelForCausalLM

from precisionctl.architectures.families import from_hf_config, to_hf_config
from precisionctl.checkpoints.base import Companions
from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.huggingface import HuggingFaceReader, HuggingFaceWriter
from precisionctl.engines.base import engines
from precisionctl.errors import PrecisionctlError
from precisionctl.model.same_model import differences
from precisionctl.model.text_config import config_parts
from precisionctl.reports import verify as report
from precisionctl.verify import not_compared
from precisionctl.verify.compare import Comparison, compare
from precisionctl.verify.configs import compare_configs, compare_quantization
from precisionctl.verify.not_compared import CONFIG_KEYS, LIST, OF_THE_MODEL, QUANTIZER_KEYS, NotCompared

TOKENS = torch.arange(3, 51).view(1, -1)  # beyond every window, and beyond the original context of every scaling


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "family", ["deepseek-v3", *in_soak("gpt-oss", "llama-3", "qwen2-window", "phi3-long", "gemma2")]
)
def test_no_key_that_changes_the_logits_goes_unnoticed(tmp_path: Path, family: str) -> None:
    pico.save(tmp_path, family, num_hidden_layers=2)
    one, path = HuggingFaceReader(tmp_path), tmp_path / "config.json"
    text = path.read_text()
    expected = logits(tmp_path)
    assert expected is not None
    unchanged = 0
    for name, config in changed_configs(json.loads(text)):
        path.write_text(json.dumps(config))
        if noticed(one, tmp_path):
            continue
        unchanged += 1
        found = logits(tmp_path)
        assert found is None or torch.equal(found, expected), name
    assert unchanged > 5


def noticed(one: HuggingFaceReader, directory: Path) -> bool:
    try:
        return not compare(one, HuggingFaceReader(directory)).equal
    except PrecisionctlError:
        return True


def logits(directory: Path) -> torch.Tensor | None:
    """What transformers computes; None where it refuses."""
    try:
        model = pico.as_its_config_says(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)).eval()
        with torch.no_grad():
            return model(TOKENS).logits
    except Exception:
        return None


def unequal(a: dict[str, object], b: dict[str, object], method: str = "fp8") -> list[str]:
    """The lines of what two configs of a method say differently, and what is left out, after a minus."""
    lines, left_out = compare_quantization({"quant_method": method, **a}, {"quant_method": method, **b})
    return [*lines, *(f"-{each.what}" for each in left_out)]


def test_an_object_that_one_side_has_is_a_difference_in_each_of_its_keys() -> None:
    assert unequal({"x": {"y": {"z": 1}, "w": 2}}, {}) == [
        "quantization_config x.y.z is 1 in A, not there in B",
        "quantization_config x.w is 2 in A, not there in B",
    ]
    assert unequal({}, {"x": {"y": 1}}) == ["quantization_config x.y is not there in A, 1 in B"]
    assert unequal({"x": 3}, {"x": {"y": 1}}) == ["quantization_config x.y is not there in A, 1 in B"]
    assert unequal({"x": {}}, {}) == ["quantization_config x is {} in A, not there in B"]


def test_true_is_not_one_and_only_lists_of_modules_have_no_order() -> None:
    assert unequal({"x": True}, {"x": 1}) == ["quantization_config x is True in A, 1 in B"]
    assert unequal({"x": 1}, {"x": 1.0}) == []
    for key in ("ignore", "exclude_modules", "modules_to_not_convert", "ignored_layers", "targets"):
        assert unequal({"group": {key: ["b", "a"]}}, {"group": {key: ["a", "b"]}}) == []
        assert len(unequal({key: ["a"]}, {key: ["a", "b"]})) == 1
    assert len(unequal({"weight_block_size": [64, 128]}, {"weight_block_size": [128, 64]})) == 1


def test_what_a_quantizer_says_of_itself_is_left_out_and_nulls_of_compressed_tensors_alone() -> None:
    for key in QUANTIZER_KEYS:
        assert unequal({"group": {key: "a"}}, {"group": {key: "b"}}) == [f"-group.{key}"]
    assert unequal({"x": None}, {}, "compressed-tensors") == ["-x"]
    assert len(unequal({"x": None}, {"x": 1}, "compressed-tensors")) == 1
    assert len(unequal({"x": None}, {})) == 1
    lines, (left_out,) = compare_quantization({"quant_method": "fp8", "x": 1}, {"quant_method": "mxfp8"})
    assert lines == [] and (left_out.topic, left_out.what) == ("quantization_config", "fp8 / mxfp8")


def test_lists_of_ignored_modules_differ_only_in_what_they_say_of_codes() -> None:
    coded = ["model.layers.0.mlp.up_proj.weight"]
    for method, key in (("fp8", "modules_to_not_convert"), ("modelopt", "exclude_modules")):
        listed = {"quant_method": method, key: ["lm_head", "model.layers.0.mlp.gate"]}
        lines, (told,) = compare_quantization({"quant_method": method}, listed, coded)
        assert lines == [] and (told.topic, told.what) == ("ignored modules", key)
        wrong = listed | {key: ["model.layers.0.mlp.up_proj"]}
        assert "says that model.layers.0.mlp.up_proj" in compare_quantization(listed, wrong, coded)[0][0]
    files = ({"quantization": {"exclude_modules": [entry]}} for entry in ("lm_head", "*up_proj"))
    assert len(compare_quantization(*files, coded)[0]) == 1


def test_another_name_for_the_same_function_is_no_difference_and_one_config_alone_is_said(tmp_path: Path) -> None:
    pico.save(tmp_path / "llama", "llama-2", num_hidden_layers=1)
    shutil.copytree(tmp_path / "llama", tmp_path / "mistral")
    path = tmp_path / "mistral" / "config.json"
    config = json.loads(path.read_text()) | {"model_type": "mistral", "sliding_window": None}
    path.write_text(json.dumps(config | {"architectures": ["MistralForCausalLM"]}))
    one, other = (HuggingFaceReader(tmp_path / name) for name in ("llama", "mistral"))
    assert not any("model_type" in line for line in compare(one, other).settings)
    assert differences(one.model, other.model) == {}
    tensors = {name: read_tensor(one, name) for name in one.specs}
    bare = in_memory.InMemory(one.model, "hf", tensors)
    for a, b, said in ((one, bare, ["only A has one"]), (bare, one, ["only B has one"]), (bare, bare, [])):
        assert [each.what for each in compare(a, b).not_compared if each.topic == "config.json"] == said


def test_the_document_has_the_list_of_what_is_not_compared() -> None:
    text = (repository.DOCS / "compare.md").read_text()
    section = text.partition("### What is not compared")[2].partition("\n## ")[0]
    listed = re.findall(r"^\| ([^|]+) \| (.+) \|$", section, re.MULTILINE)
    keys = {**CONFIG_KEYS, "quantizer": QUANTIZER_KEYS}
    expected = [*LIST.items(), *((topic, ", ".join(f"`{key}`" for key in names)) for topic, names in keys.items())]
    assert [row for row in listed if row != ("", "keys")] == expected


def test_what_follows_from_the_formats_is_a_line_and_what_the_model_computes_with_a_table() -> None:
    usual, news = NotCompared("optimizer", "only A has one"), NotCompared("fixed scales", "q_proj.input_scale")
    keys = NotCompared("code", "\x1b" + "k" * 10_000)
    nothing, both = (Comparison((), (), fp8=None, not_compared=left_out) for left_out in ((), (usual, news, keys)))
    assert report.left_out(nothing) == [] and "Not compared" not in {table.title for table in report.tables(nothing)}
    (line,) = report.left_out(both)
    assert line.startswith("Not compared: optimizer (only A has one), code (") and "fixed" not in line
    assert "\x1b" not in line and len(line) < 3000
    (table,) = [table for table in report.tables(both) if table.title == "Not compared"]
    assert table.rows == [("fixed scales", "q_proj.input_scale", LIST["fixed scales"])]
    assert LIST.keys() > OF_THE_MODEL


def test_every_line_of_the_list_is_used() -> None:
    folder = Path(not_compared.__file__).parent
    source = "".join(path.read_text() for path in folder.glob("*.py") if path.name != "not_compared.py")
    unused = [topic for topic in LIST if f'"{topic}"' not in source and topic not in CONFIG_KEYS]
    assert unused == []


def with_what_engines_ask_for(directory: Path, config: dict[str, object]) -> list[str]:
    """The settings that differ between a config.json and that of an export, with what any engine asks for."""
    files, before = {"config.json": json.dumps(config).encode()}, json.loads(json.dumps(config))
    model = from_hf_config(before)
    writer = HuggingFaceWriter(
        directory,
        {},
        Companions(files),
        to_hf_config(model, "bfloat16"),
        lacks=lambda said: [key for engine in engines().values() for key in engine.lacks(said)],
    )
    writer.finish(None)
    made = (directory / "config.json").read_bytes()
    readers = (
        SimpleNamespace(model=from_hf_config(json.loads(file)), companions=Companions({"config.json": file}))
        for file in (files["config.json"], made)
    )
    lines, _ = compare_configs(*readers)  # type: ignore[arg-type]
    assert differences(model, from_hf_config(json.loads(made))) == {}
    return lines


def test_what_exports_add_to_a_config_for_engines_is_no_difference(tmp_path: Path) -> None:
    for family in pico.FAMILIES:
        (tmp_path / family).mkdir()
        assert with_what_engines_ask_for(tmp_path / family, pico.config(family)) == [], family


@pytest.mark.parametrize("kind", few(tiny_wrappers.WRAPPERS, "kimi_k25"))
def test_what_exports_add_to_a_wrappers_config_for_engines_is_no_difference(tmp_path: Path, kind: str) -> None:
    config = json.loads(tiny_wrappers.make(kind).config.to_json_string(use_diff=False))
    for part in config_parts(config):
        part["dtype"] = "bfloat16"
    assert with_what_engines_ask_for(tmp_path, config) == []


def test_of_a_wrapper_only_the_keys_that_its_text_model_reads_are_spelled_otherwise(tmp_path: Path) -> None:
    tiny_wrappers.save(tmp_path / "a", "qwen3_vl_moe")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    path = tmp_path / "b" / "config.json"
    config = json.loads(path.read_text())
    text = config["text_config"]
    text["rope_theta"] = text["rope_parameters"]["rope_theta"]
    text["rope_parameters"]["mrope_section"] = text["rope_parameters"]["mrope_section"][::-1]
    text["strange"] = config["rope_theta"] = 7.0
    config["vision_config"]["num_heads"] *= 2
    path.write_text(json.dumps(config))
    found = compare(HuggingFaceReader(tmp_path / "a"), HuggingFaceReader(tmp_path / "b"))
    (told,) = [each.what for each in found.not_compared if each.topic == "spelled otherwise"]
    assert told == "text_config.rope_theta"
    names = [line.split()[1] for line in found.settings]
    assert names == [
        "text_config.rope_parameters.mrope_section",
        "text_config.strange",
        "vision_config.num_heads",
        "rope_theta",
    ]
