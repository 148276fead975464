"""Scales for a reader that rounds them to BF16: transformers of compressed-tensors, which judges them here."""

from pathlib import Path

import in_memory
import pytest
import torch
from cache_states import with_cache_state
from installed import judge, need_loader
from safetensors.torch import load_file
from scoring import TOKENS, save
from soaking import in_soak
from transformers import AutoModelForCausalLM

from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.codes import numerics
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import execute
from precisionctl.engines.base import engine_named
from precisionctl.fp8 import sidecar
from precisionctl.verify.compare import compare
from precisionctl.verify.engine_rules import check

BF16 = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16).float()
"""All that are finite and not negative, in their order."""

KINDS = (".weight_scale", ".input_scale", ".k_scale", ".v_scale")


def next_in_bf16(scales: torch.Tensor) -> torch.Tensor:
    """Looked up."""
    return BF16[torch.searchsorted(BF16, scales)]


def source(root: Path, family: str) -> Path:
    save(root, family, dtype=torch.bfloat16)
    states = with_cache_state(root) if family == "llama-3" else in_memory.recorded(HuggingFaceReader(root))
    sidecar.write(root / sidecar.RELATIVE, states)
    return root


def export(path: Path, out: Path, target: str, scheme: str, **more: object) -> dict[str, torch.Tensor]:
    execute(plan_command(Request.export(path, out, target, scheme, **more)), verify=True)  # type: ignore[arg-type]
    return load_file(out / "model.safetensors")


def test_a_scale_is_rounded_up_to_the_next_number_that_bf16_holds() -> None:
    scales = torch.exp2(torch.empty(20000).uniform_(-126, 100, generator=torch.Generator().manual_seed(0)))
    scales = torch.cat([scales, BF16[1:-1:7], torch.nextafter(BF16[1:-1:7], torch.tensor(torch.inf))])
    assert torch.equal(numerics.rounded_up(scales, "BF16"), next_in_bf16(scales))


def test_codes_under_a_rounded_scale_would_be_the_same_so_that_those_of_a_source_keep_theirs() -> None:
    codes = torch.arange(256, dtype=torch.uint8)[torch.arange(256) % 128 != 127].view(torch.float8_e4m3fn)
    scales = torch.exp2(torch.empty(2000, 1).uniform_(-20, 4, generator=torch.Generator().manual_seed(0)))
    scales = torch.cat([scales, torch.nextafter(BF16[BF16 > 2**-20][:128, None], torch.tensor(torch.inf))])
    values = codes.float() * scales
    again = (values / next_in_bf16(scales)).to(torch.float8_e4m3fn)
    assert torch.equal(again.view(torch.uint8), codes.view(torch.uint8).expand(len(scales), -1))


@pytest.mark.parametrize(
    ("family", "scheme"), [("mixtral", "static"), *in_soak(("llama-3", "static"), ("llama-3", "dynamic"))]
)
def test_each_scale_is_the_next_in_bf16_and_transformers_has_it_as_it_is_stored(
    tmp_path: Path, family: str, scheme: str
) -> None:
    """Scales are those of an export for vLLM, looked up among the numbers of BF16; codes are divided by them."""
    plain, cache = source(tmp_path / "hf", family), {"kv_cache": "fp8"} if family == "llama-3" else {}
    exact = export(plain, tmp_path / "vllm", "vllm", scheme, **cache)
    made = export(plain, tmp_path / "out", "transformers", scheme, **cache)
    need_loader(tmp_path / "out")
    values, seen = load_file(plain / "model.safetensors"), 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    loaded = dict(model.named_parameters()) | dict(model.named_buffers())
    for name in (name for name in made if name.endswith(KINDS)):
        assert torch.equal(made[name], next_in_bf16(exact[name])) and made[name].dtype == torch.float32
        if name in loaded:  # it decodes experts, and has no scales of theirs
            assert loaded[name].dtype == torch.bfloat16 and torch.equal(loaded[name].float(), made[name])
            seen += 1
        if name.endswith(".weight_scale") and (weight := name.removesuffix("_scale")) in values:
            codes = (values[weight].float() / made[name]).to(torch.float8_e4m3fn)
            assert torch.equal(made[weight].view(torch.uint8), codes.view(torch.uint8))
    assert seen >= 8 and not all(torch.equal(made[name], exact[name]) for name in made if name.endswith(KINDS))
    assert check(HuggingFaceReader(tmp_path / "out"), engine_named("transformers")) == []
    (found,) = check(HuggingFaceReader(tmp_path / "vllm"), engine_named("transformers"))
    assert "is no number of BF16" in found.what and not found.rule.fatal
    assert compare(HuggingFaceReader(plain), HuggingFaceReader(tmp_path / "out")).equal


@torch.no_grad()
@pytest.mark.parametrize("scheme", ["static", *in_soak("dynamic")])  # which has the same scales of weights
def test_transformers_decodes_to_the_values_that_were_meant(tmp_path: Path, scheme: str) -> None:
    """Its logits in BF16 are, to the bit, those of what an export decodes to; of one for vLLM they are others."""
    quantization = judge("compressed_tensors.quantization")
    plain, same = source(tmp_path / "hf", "llama-3"), {}
    for target in ("transformers", "vllm"):
        out, decoded = tmp_path / target, tmp_path / f"{target} decoded"
        export(plain, out, target, scheme)
        execute(plan_command(Request(out, decoded, "hf", "bf16")))
        theirs = AutoModelForCausalLM.from_pretrained(out)
        theirs.apply(quantization.disable_quantization)  # inputs stay what they are
        expected = AutoModelForCausalLM.from_pretrained(decoded, dtype=torch.bfloat16)
        same[target] = torch.equal(theirs(TOKENS).logits, expected(TOKENS).logits)
    assert same == {"transformers": True, "vllm": False}


@pytest.mark.parametrize("scheme", ["static", *in_soak("dynamic")])  # which has no inputs to round
def test_codes_of_a_source_keep_codes_and_scales_and_inputs_are_rounded(tmp_path: Path, scheme: str) -> None:
    exact = export(source(tmp_path / "hf", "llama-3"), tmp_path / "vllm", "vllm", scheme)
    made = export(tmp_path / "vllm", tmp_path / "out", "transformers", scheme)
    for name, values in made.items():
        before = next_in_bf16(exact[name]) if name.endswith(".input_scale") else exact[name]
        assert torch.equal(values.view(torch.uint8), before.view(torch.uint8)), name
    assert compare(HuggingFaceReader(tmp_path / "vllm"), HuggingFaceReader(tmp_path / "out")).equal
