"""Exports of models that no table here describes, in vLLM's own config parser, name mapping and weight loader: every
stored tensor is found in its parameters, codes as the same codes. Names are not compared: vLLM maps and fuses them."""

from pathlib import Path

import any_models
import environments
import pytest
import tiny_wrappers
import torch
from in_vllm import left_out_of, load_in_vllm

from precisionctl.checkpoints import huggingface

KINDS = (
    *("qwen3_next", "llama4_text", "qwen2_5_vl", "apertus", "opt", "granitemoeshared"),
    *("olmo", "persimmon", "olmo2", "olmoe", "glm4", "seed_oss"),
)
"""Text with experts one by one and in one tensor, hybrids, wrappers of images."""

CASES = [(kind, "dynamic") for kind in KINDS]


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    root, made = tmp_path_factory.mktemp("vllm"), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface, "read_model", any_models.untabled)
        for kind, scheme in CASES:
            source = root / kind
            if not source.is_dir():
                any_models.save(source, kind)
            made[kind, scheme] = root / f"{kind}-{scheme}"
            any_models.export(source, made[kind, scheme], scheme, "vllm")
    load_in_vllm(environments.vllm(), *made.values())
    return made


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_vllm_holds_every_tensor_of_an_export_of_any_model(
    exports: dict[tuple[str, str], Path], case: tuple[str, str]
) -> None:
    stored = any_models.stored(exports[case])
    assert sum(tensor.dtype == torch.float8_e4m3fn for tensor in stored.values()) > 0
    assert left_out_of(exports[case], stored) == []


def test_vllm_holds_every_tensor_of_a_qwen3_asr_in_either_form(tmp_path: Path) -> None:
    forms = "theirs", "published"
    tiny_wrappers.save(tmp_path / forms[0], "qwen3_asr", dtype=torch.bfloat16)
    tiny_wrappers.publish_qwen3_asr(*(tmp_path / form for form in forms))
    exports = [tmp_path / f"{form}-fp8" for form in forms]
    for form, out in zip(forms, exports, strict=True):
        any_models.export(tmp_path / form, out)
    load_in_vllm(environments.vllm(), *exports)
    for out in exports:
        stored = any_models.stored(out)
        assert sum(tensor.dtype == torch.float8_e4m3fn for tensor in stored.values()) == 14
        assert left_out_of(out, stored) == []


def test_vllm_holds_every_tensor_of_an_ernie_4_5_vl_and_keeps_its_routers(tmp_path: Path) -> None:
    """Published files alone: of those that transformers saves, vLLM does not find the tower's sizes."""
    any_models.save(tmp_path / "theirs", "ernie4_5_vl_moe")
    any_models.publish_ernie_vl(tmp_path / "theirs", tmp_path / "published")
    exports = [tmp_path / scheme for scheme in ("dynamic", "w4a16", "mxfp4")]
    for out in exports:
        any_models.export(tmp_path / "published", out, out.name)
    any_models.export(tmp_path / "published", tmp_path / "block", "block", exclude=("*.experts.*",), keep_misfits=True)
    load_in_vllm(environments.vllm(), *exports, tmp_path / "block", tmp_path / "theirs")
    for out in (*exports, tmp_path / "block"):
        assert left_out_of(out, any_models.stored(out)) == []
    with pytest.raises(AssertionError, match="embed_dim"):
        left_out_of(tmp_path / "theirs", {})
