"""Tensors that transformers joins as it loads them, in BF16 or as codes: `verify --target transformers` says of a
directory what transformers itself makes of it."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import conversions
import int8_directories
import pico
import pytest
import torch
from installed import BEFORE_5_23, need_loader
from safetensors.torch import load_file, save_file
from soaking import in_soak
from transformers import AutoModelForCausalLM

from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.request import Request
from precisionctl.engines.base import engine_named
from precisionctl.errors import PrecisionError
from precisionctl.verify.engine_rules import check

pytestmark = pytest.mark.skipif(BEFORE_5_23, reason="older ones join otherwise")

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128}
EXPERTS = ("*.experts.*",)
TRANSFORMERS = engine_named("transformers")


def exported(root: Path, family: str, scheme: str, exclude: tuple[str, ...] = (), target: str = "vllm") -> Path:
    """A small model in a scheme, as an engine has it that does not join."""
    source, out = root / "source", root / scheme
    if not source.exists():
        pico.save(source, family, dtype=torch.bfloat16, **SIZES)
    request = Request.export(source, out, target, scheme, exclude=exclude, keep_misfits=True)  # type: ignore[arg-type]
    conversions.carry_out(request, workers=1)
    return out


def loaded(directory: Path) -> Mapping[str, torch.Tensor] | None:
    """What transformers has of a directory's experts and convolutions in memory; None where it loses some."""
    need_loader(directory)
    try:
        model, found = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, output_loading_info=True)
    except (RuntimeError, AttributeError) as error:  # the latter where it looks for a module by an unfinished name
        assert re.search("automatic conversion of the weights|has no attribute `mlp`", str(error))
        return None
    parts = {name: each for name, each in model.named_parameters() if ".experts." in name or "conv1d" in name}
    return None if found["missing_keys"] else parts


def broken(directory: Path) -> list[str]:
    findings = check(open_checkpoint(directory), TRANSFORMERS)
    return [finding.where for finding in findings if finding.rule.fatal]


CASES = {
    ("llama-3", "w4a16", ()): True,
    ("qwen3-moe", "nvfp4a16", EXPERTS): False,
    ("qwen3-moe", "w4a16", EXPERTS): False,
    ("qwen3-moe", "w4a16", ()): True,
    ("qwen3-moe", "mxfp4", ()): True,
    ("qwen3-moe", "dynamic", EXPERTS): True,
    ("mixtral", "mxfp4", EXPERTS): False,
    ("nemotron-h", "nvfp4a16", EXPERTS): False,  # without an error: experts are as a new model has them
    ("kimi-linear", "nvfp4a16", EXPERTS): False,
    ("kimi-linear", "mxfp4", ()): False,  # its convolutions
    ("kimi-linear", "dynamic", ()): True,
    ("olmo-hybrid", "nvfp4a16", ()): False,
    ("gpt-oss", "w4a16", ()): True,  # stored as one tensor
}


BRIEFLY = [
    *(("llama-3", "w4a16", ()), ("qwen3-moe", "nvfp4a16", EXPERTS), ("qwen3-moe", "dynamic", EXPERTS)),
    ("gpt-oss", "w4a16", ()),
]


@pytest.mark.parametrize(
    ("family", "scheme", "exclude"), [*BRIEFLY, *in_soak(*(case for case in CASES if case not in BRIEFLY))]
)
def test_what_is_joined_is_found_where_transformers_loses_it(
    tmp_path: Path, family: str, scheme: str, exclude: tuple[str, ...]
) -> None:
    """What it does not lose has the values that it is decoded to here."""
    target = "transformers" if scheme == "dynamic" else "vllm"  # which has other names in memory
    out = exported(tmp_path, family, scheme, exclude, target)
    theirs = loaded(out)
    assert (theirs is not None) == (not broken(out)) == CASES[family, scheme, exclude]
    if theirs:
        conversions.run(out, tmp_path / "bf16", "hf", "bf16")
        ours = loaded(tmp_path / "bf16")
        assert ours and all(torch.equal(each, ours[name]) for name, each in theirs.items())


@pytest.mark.parametrize("spelling", ["w8a16", "w8a8"])
def test_experts_in_int8_are_joined_from_words_and_not_from_bytes(tmp_path: Path, spelling: str) -> None:
    ours = int8_directories.make(
        tmp_path, int8_directories.SPELLINGS[spelling], "qwen3-moe", num_hidden_layers=2, **SIZES
    )
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["ignore"] += ["model.layers.1.mlp.gate"]
    path.write_text(json.dumps(config))
    theirs = loaded(tmp_path)
    assert (theirs is not None) == (not broken(tmp_path)) == (spelling == "w8a16")
    for name, each in theirs.items() if theirs else ():
        stem, experts, part = name.partition(".experts.")
        modules = [f"{stem}{experts}{{}}.{one}.weight" for one in ("gate_proj", "up_proj", "down_proj")]
        chosen = modules[:2] if part == "gate_up_proj" else modules[2:]
        expected = [torch.cat([ours[module.format(expert)] for module in chosen]) for expert in range(len(each))]
        assert torch.equal(each, torch.stack(expected))


@pytest.mark.parametrize("of_experts", ["re:.*(gate|up|down)_proj", *in_soak("re:.*experts.*")])
def test_of_several_groups_that_which_speaks_of_experts_decodes_them(tmp_path: Path, of_experts: str) -> None:
    """Attention in FP8, experts in INT4; without the word, they are looked for in the first group's format."""
    attention = exported(tmp_path, "qwen3-moe", "dynamic", EXPERTS)
    experts = exported(tmp_path, "qwen3-moe", "w4a16")
    mixed = {name: each for name, each in load_file(attention / "model.safetensors").items() if ".experts." not in name}
    mixed |= {name: each for name, each in load_file(experts / "model.safetensors").items() if ".experts." in name}
    mixed = {name: each for name, each in mixed.items() if not ("layers.0.mlp" in name and "_scale" in name)}
    dense = load_file(tmp_path / "source" / "model.safetensors")
    mixed |= {name: each for name, each in dense.items() if "layers.0.mlp" in name}
    save_file(mixed, attention / "model.safetensors", metadata={"format": "pt"})
    config, other = (json.loads((each / "config.json").read_text()) for each in (attention, experts))
    quantization = config["quantization_config"]
    fp8, int4 = (each["quantization_config"]["config_groups"]["group_0"] for each in (config, other))
    quantization["config_groups"] = {
        "first": {**fp8, "targets": ["re:.*self_attn.*"], "format": "float-quantized"},
        "second": {**int4, "targets": [of_experts]},
    }
    quantization["format"] = "mixed-precision"
    quantization["ignore"] = ["lm_head", "re:.*layers.0.mlp.*", "re:.*mlp.gate$"]
    (attention / "config.json").write_text(json.dumps(config))
    theirs = loaded(attention)
    assert (theirs is not None) == (not broken(attention)) == ("experts" in of_experts)


def test_an_export_is_refused_with_a_scheme_that_loads(tmp_path: Path) -> None:
    with pytest.raises(PrecisionError, match="joins with others.*bfloat16 values.*--scheme static or dynamic"):
        exported(tmp_path, "olmo-hybrid", "nvfp4a16", target="transformers")
    with pytest.raises(PrecisionError, match="joins with others.*bfloat16 values.*--scheme static or dynamic"):
        exported(tmp_path / "moe", "qwen3-moe", "w4a16", EXPERTS, "transformers")
    with pytest.raises(PrecisionError, match="experts of compressed-tensors with NVFP4") as refused:
        exported(tmp_path / "moe", "qwen3-moe", "nvfp4a16", target="transformers")
    assert "--exclude" not in refused.value.do  # experts in BF16 would be lost
    for root, family in ((tmp_path, "olmo-hybrid"), (tmp_path / "moe", "qwen3-moe")):
        assert loaded(exported(root, family, "dynamic", target="transformers"))
