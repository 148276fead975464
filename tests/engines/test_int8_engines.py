"""Which forms of INT8 engines load, by their rules; transformers is the judge of its own, vLLM in tests/peers."""

import json
import re
from dataclasses import replace
from pathlib import Path

import int8_directories
import pytest
import torch
from conversions import run as convert
from installed import judge
from int8_directories import SPELLINGS, WITH_ZERO_POINTS
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.engines.base import engines
from precisionctl.errors import RecipeError
from precisionctl.verify.compare import compare
from precisionctl.verify.engine_rules import check


def findings(directory: Path, engine: str, ranks: int = 1) -> tuple[list[str], list[str]]:
    """What an engine does not load or computes wrongly, and what costs it accuracy or speed."""
    found = check(open_checkpoint(directory), engines()[engine], ranks)
    return [str(each) for each in found if each.rule.fatal], [str(each) for each in found if not each.rule.fatal]


NO_ONE, ROUNDED = (None, None), (None, "is no number of BF16")
OF_ENGINES: dict[str, dict[str, tuple[str | None, str | None]]] = {
    "w8a8": {"vllm": NO_ONE, "sglang": NO_ONE, "transformers": NO_ONE},
    "w8a8-fp32-scales": {"vllm": NO_ONE, "sglang": NO_ONE, "transformers": ROUNDED},
    "w8a8-zero-points": {"vllm": NO_ONE, "sglang": (None, "inputs with zero points"), "transformers": NO_ONE},
    "w8a8-static": {
        "vllm": (None, "of one fused group differ"),
        "sglang": ("one scale of a whole weight", "a fixed scale of inputs"),
        "transformers": NO_ONE,
    },
    "w8a8-static-zero-points": {
        "vllm": (None, "of one fused group differ"),
        "sglang": (None, "inputs with zero points"),
        "transformers": ROUNDED,
    },
    "w8a16": {"vllm": NO_ONE, "sglang": NO_ONE, "transformers": NO_ONE},
    "w8a16-64": {"vllm": NO_ONE, "sglang": NO_ONE, "transformers": NO_ONE},
    "w8a16-zero-points": {
        "vllm": (None, "zero points of weights"),
        "sglang": ("zero points of weights", None),
        "transformers": ("zero points of weights", None),
    },
}
"""For each spelling and engine what is fatal and what costs something."""


@pytest.mark.parametrize("spelling", OF_ENGINES)
def test_the_rules_of_engines_say_what_of_int8_they_load(tmp_path: Path, spelling: str) -> None:
    int8_directories.make(tmp_path, {**SPELLINGS, "w8a16-zero-points": WITH_ZERO_POINTS}[spelling])
    for engine, expected in OF_ENGINES[spelling].items():
        for found, word in zip(findings(tmp_path, engine), expected, strict=True):
            assert bool(found) == bool(word) and (word is None or any(word in each for each in found)), (engine, found)
    with pytest.raises(RecipeError, match="no rules of TensorRT-LLM for INT8"):
        findings(tmp_path, "tensorrt-llm")


def test_fixed_scales_of_latents_that_vllm_fuses_are_compared_too(tmp_path: Path) -> None:
    latents = ("q_a_proj", "kv_a_proj_with_mqa")
    of_latents = lambda name: any(part in name for part in latents)  # noqa: E731
    int8_directories.make(tmp_path, SPELLINGS["w8a8-static"], "deepseek-v3", of_latents, head_dim=8)
    in_config(tmp_path, {"ignore": ["lm_head", "re:.*(mlp|o_proj|_b_proj)"]})
    assert any("q_a_proj" in each and "of one fused group differ" in each for each in findings(tmp_path, "vllm")[1])


@pytest.mark.parametrize("spelling", ["w8a8", "w8a8-zero-points", "w8a8-static", "w8a16", "w8a16-zero-points"])
def test_transformers_is_the_judge_of_what_it_loads_of_int8(tmp_path: Path, spelling: str) -> None:
    values = int8_directories.make(tmp_path, {**SPELLINGS, "w8a16-zero-points": WITH_ZERO_POINTS}[spelling])
    if findings(tmp_path, "transformers")[0]:
        with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
            AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
        return
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    model(torch.tensor([[1, 2, 3]]))  # it decompresses weights then
    held = model.state_dict()
    assert all(torch.equal(held[name], expected) for name, expected in values.items())


def test_no_engine_has_a_scheme_for_packed_words_under_one_scale_of_a_whole_weight(tmp_path: Path) -> None:
    spelled = replace(SPELLINGS["w8a16"], weights=SPELLINGS["w8a8-static"].weights)
    values = int8_directories.make(tmp_path, spelled)
    for engine in ("vllm", "sglang"):
        assert any("INT8 per tensor, without INT8 inputs" in each for each in findings(tmp_path, engine)[0])
    assert findings(tmp_path, "transformers")[0] == []
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    model(torch.tensor([[1, 2, 3]]))  # it decompresses weights then
    assert all(torch.equal(model.state_dict()[name], expected) for name, expected in values.items())


def in_config(directory: Path, said: dict[str, object]) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    for key, value in said.items():
        place = config["quantization_config"] if key == "ignore" else group
        place[key] = {**place[key], **value} if isinstance(value, dict) else value
    config["quantization_config"]["format"] = group["format"]
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("spelling", "said", "refusing", "word"),
    [
        ("w8a8", {"input_activations": None}, {"vllm", "sglang"}, "without INT8 inputs, as 'int-quantized'"),
        ("w8a8", {"format": "dense"}, {"vllm", "sglang"}, "as 'dense'"),
        ("w8a16", {"format": None}, {"vllm", "sglang"}, "as None"),
        ("w8a8", {"ignore": ["lm_head", "re:.*up_proj"]}, {"vllm", "sglang", "transformers"}, "INT8 codes, but its"),
    ],
)
def test_what_a_config_says_of_int8_decides_which_scheme_an_engine_has(
    tmp_path: Path, spelling: str, said: dict[str, object], refusing: set[str], word: str
) -> None:
    int8_directories.make(tmp_path, SPELLINGS[spelling], tie_word_embeddings=False)
    in_config(tmp_path, said)
    fatal = {engine: findings(tmp_path, engine)[0] for engine in ("vllm", "sglang", "transformers")}
    assert {engine for engine, found in fatal.items() if found} == refusing, fatal
    assert all(any(re.search(word, each) for each in fatal[engine]) for engine in refusing), fatal


@pytest.mark.parametrize(
    ("spelling", "refusing"),
    [
        ("w8a8", {"sglang", "transformers"}),
        ("w8a8-static", {"vllm", "sglang", "transformers"}),
        ("w8a16", set()),
    ],
)
def test_of_experts_in_int8_engines_load_less(tmp_path: Path, spelling: str, refusing: set[str]) -> None:
    sizes = {"moe_intermediate_size": 64, "num_experts": 2, "num_experts_per_tok": 1, "num_hidden_layers": 2}
    int8_directories.make(tmp_path, SPELLINGS[spelling], "qwen3-moe", **sizes)
    gates = [
        name.removesuffix(".weight")
        for name in load_file(tmp_path / "model.safetensors")
        if name.endswith("mlp.gate.weight")
    ]
    in_config(tmp_path, {"ignore": ["lm_head", *gates]})
    fatal = {engine: findings(tmp_path, engine)[0] for engine in ("vllm", "sglang", "transformers")}
    assert {engine for engine, found in fatal.items() if any("expert" in each for each in found)} == refusing, fatal


def test_a_share_of_int8_need_not_be_a_multiple_of_16_and_must_be_a_whole_number(tmp_path: Path) -> None:
    int8_directories.make(tmp_path, SPELLINGS["w8a8"], intermediate_size=24, num_attention_heads=16)
    assert findings(tmp_path, "vllm", 2)[0] == []
    assert any("cannot be cut for 16 GPUs" in each for each in findings(tmp_path, "vllm", 16)[0])


@pytest.mark.parametrize("spelling", ["w8a8", "w8a16"])
def test_compressed_tensors_older_key_of_config_json_is_read_and_becomes_the_newer(
    tmp_path: Path, spelling: str
) -> None:
    int8_directories.make(tmp_path / "source", SPELLINGS[spelling])
    path = tmp_path / "source" / "config.json"
    config = json.loads(path.read_text())
    config["compression_config"] = config.pop("quantization_config")
    path.write_text(json.dumps(config))
    theirs = judge("compressed_tensors.utils.safetensors_load").get_quantization_config(str(path))
    assert HuggingFaceReader(tmp_path / "source").config["quantization_config"] == theirs
    assert [findings(tmp_path / "source", engine)[0] for engine in ("vllm", "sglang")] == [[], []]
    (unknown,) = findings(tmp_path / "source", "transformers")[0]
    assert "no quantization_config" in unknown
    assert not hasattr(AutoConfig.from_pretrained(tmp_path / "source"), "quantization_config")
    convert(tmp_path / "source", tmp_path / "bf16", "hf")
    convert(tmp_path / "bf16", tmp_path / "back", "hf", precision="fp8")
    left, right = (load_file(tmp_path / each / "model.safetensors") for each in ("source", "back"))
    assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
    assert findings(tmp_path / "back", "transformers")[0] == []
    found = [json.loads((tmp_path / each / "config.json").read_text()) for each in ("bf16", "back")]
    assert not any("compression_config" in each for each in found) and "quantization_config" not in found[0]
    assert found[1]["quantization_config"] == theirs
    assert compare(open_checkpoint(tmp_path / "source"), open_checkpoint(tmp_path / "back")).equal


def test_a_wrappers_older_key_is_unknown_to_transformers_too(tmp_path: Path) -> None:
    coded = {"quant_method": "compressed-tensors"}
    wrapper = {"model_type": "mistral3", "text_config": {"model_type": "mistral"}, "compression_config": coded}
    (tmp_path / "config.json").write_text(json.dumps(wrapper))
    assert not hasattr(AutoConfig.from_pretrained(tmp_path), "quantization_config")
    assert engines()["transformers"].lacks(wrapper | {"quantization_config": coded}) == ["quantization_config"]
