"""DeepSeek-V4 as it is published, with experts in MXFP4 beside blocks of FP8, and what transformers and engines make of
our conversions: by its table, and without one where keys stand for other numbers of tokens than the table knows."""

import json
from pathlib import Path

import deepseek_v4
import pytest
import torch
from any_models import export, load_whole, logits, same, stored
from conversions import run
from installed import BEFORE_5_23
from safetensors.torch import load_file, save_file
from soaking import few, in_soak
from transformers import DeepseekV4ForCausalLM

from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.engines.base import engine_named
from precisionctl.engines.rules.rule import Finding
from precisionctl.errors import PrecisionError
from precisionctl.verify.engine_rules import check

RATES = pytest.mark.parametrize("rate", [128, *in_soak(8)], ids=["a table", "no table"])


def rates(heavy: int) -> dict[str, int]:
    return {"compressed_sparse_attention": 4, "heavily_compressed_attention": heavy}


def computed(directory: Path) -> torch.Tensor:
    return logits(load_whole(DeepseekV4ForCausalLM, directory))


def config_of(directory: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((directory / "config.json").read_text())
    return found


def fatal(directory: Path, target: str, ranks: int = 1) -> list[Finding]:
    return [found for found in check(open_checkpoint(directory), engine_named(target), ranks) if found.rule.fatal]


@pytest.mark.soak
@RATES
def test_what_is_published_becomes_its_values_and_the_same_bytes_again(tmp_path: Path, rate: int) -> None:
    """With hyper-connections, sinks, positions in a window and biases of the choice in FP32, and the table of integers
    by which tokens choose experts."""
    worth = deepseek_v4.publish(tmp_path / "source", compress_rates=rates(rate))
    run(tmp_path / "source", tmp_path / "bf16", "hf", "bf16", workers=1)
    decoded = stored(tmp_path / "bf16")
    assert decoded.keys() == worth.keys()
    for name, values in worth.items():
        assert decoded[name].dtype == values.dtype and torch.equal(decoded[name], values), name
    if not BEFORE_5_23:  # which multiplies FP32 by BF16, and fails
        assert torch.equal(computed(tmp_path / "bf16"), computed(tmp_path / "source"))
    run(tmp_path / "bf16", tmp_path / "back", "hf", "fp8", workers=1)
    before, after = stored(tmp_path / "source"), stored(tmp_path / "back")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype, name
        assert torch.equal(after[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert config_of(tmp_path / "back") == config_of(tmp_path / "source")
    assert same(tmp_path / "source", tmp_path / "back") and same(tmp_path / "source", tmp_path / "bf16")


@RATES
@pytest.mark.parametrize("scheme", ["block", *in_soak("dynamic")])
def test_transformers_computes_with_an_export_of_it_what_it_does_with_our_decoding_of_that(
    tmp_path: Path, scheme: str, rate: int
) -> None:
    deepseek_v4.publish(tmp_path / "source", compress_rates=rates(rate))
    export(tmp_path / "source", tmp_path / "fp8", scheme, "transformers")
    assert not fatal(tmp_path / "fp8", "transformers")
    coded = load_whole(DeepseekV4ForCausalLM, tmp_path / "fp8")
    if scheme == "dynamic":  # inputs are rounded too
        return
    run(tmp_path / "fp8", tmp_path / "values", "hf", "bf16", workers=1)
    assert torch.equal(logits(coded), computed(tmp_path / "values"))


@RATES
@pytest.mark.parametrize("target", ["vllm", *in_soak("sglang")])
def test_engines_get_blocks_and_a_config_that_says_so_of_the_experts(tmp_path: Path, target: str, rate: int) -> None:
    """Whatever the source's config.json says of them: MXFP4, or nothing at all."""
    deepseek_v4.publish(tmp_path / "source", compress_rates=rates(rate))
    (tmp_path / "saved").mkdir()
    model = deepseek_v4.make(compress_rates=rates(rate)).bfloat16()
    model.save_pretrained(tmp_path / "saved")
    for source in ("source", "saved") if rate == 128 else ("source",):  # keys of engines are the table's to write
        out = tmp_path / f"{source}-fp8"
        export(tmp_path / source, out, "block", target)
        assert config_of(out)["expert_dtype"] == "fp8"
        assert not fatal(out, target)
        for scheme in ("dynamic", "static"):  # without amaxes, for which nothing sends to `calibrate`
            with pytest.raises(PrecisionError, match="multiplied in blocks of FP8.*--scheme block"):
                export(tmp_path / source, tmp_path / "other", scheme, target)
        with pytest.raises(PrecisionError, match="values, and no codes.*wo_a"):
            export(tmp_path / source, tmp_path / "other", "block", target, exclude=("*.wo_a",))
    if rate == 128:  # without a table what does not fit stays as it is
        with pytest.raises(PrecisionError, match="on each of 2 GPUs.*`export-inference` has --tp 1, under"):
            export(tmp_path / "source", tmp_path / "other", "block", target, ranks=2)  # no other scheme is taken
    export(tmp_path / "source", tmp_path / "for transformers", "dynamic", "transformers")
    assert any("deepseek_v4 with dynamic" in found.what for found in fatal(tmp_path / "for transformers", target))


@pytest.mark.parametrize("target", few(["vllm", "sglang", "transformers"], "vllm"))
def test_what_is_published_keeps_the_rules_of_engines(tmp_path: Path, target: str) -> None:
    """Experts in MXFP4 as expert_dtype says, whole groups of them on each GPU, and powers of two for `wo_a`."""
    deepseek_v4.publish(tmp_path, num_attention_heads=8, o_groups=8)
    assert not fatal(tmp_path, target)
    if target != "transformers":
        cut = fatal(tmp_path, target, ranks=8)
        assert any("experts.0.w2" in found.where and "not a multiple of 32" in found.what for found in cut)
    config = config_of(tmp_path)
    for said in ({}, {"expert_dtype": "fp8"}):
        told = {key: value for key, value in config.items() if key != "expert_dtype"} | said
        (tmp_path / "config.json").write_text(json.dumps(told))
        taken_for_fp8 = target == "transformers" or (target == "vllm" and bool(said))
        assert [found.what for found in fatal(tmp_path, target)] == ["experts are fp4, and taken for 'fp8'"] * (
            taken_for_fp8
        )


@pytest.mark.parametrize("target", few(["vllm", "sglang", "transformers"], "vllm", "transformers"))
def test_engines_that_take_scales_for_powers_of_two_get_some(tmp_path: Path, target: str) -> None:
    deepseek_v4.publish(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "layers.1.attn.wo_a"
    tensors[f"{name}.scale"] = tensors[f"{name}.scale"].float()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert not fatal(tmp_path, target)
    tensors[f"{name}.scale"][0, 0] *= 1.25
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    found = [(each.where, each.what) for each in fatal(tmp_path, target)]
    assert found == ([] if target == "transformers" else [(f"{name}.weight", "scales that are no powers of two")])
