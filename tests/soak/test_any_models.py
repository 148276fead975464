"""Models of whatever kind transformers registers, tiny and random: to FP8 in each scheme, and back."""

from pathlib import Path

import any_models
import pico
import pytest
import torch
from any_models import assert_as_tabled, check_there_and_back, export, untabled
from conversions import run

from precisionctl.checkpoints import huggingface
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.engines.base import engine_named
from precisionctl.verify.engine_rules import check

KINDS = (
    # text, dense
    *(
        "afmoe",
        "apertus",
        "arcee",
        "bitnet",
        "cohere",
        "cohere2",
        "ernie4_5",
        "exaone4",
        "falcon",
        "gemma",
        "glm",
        "glm4",
    ),
    *("granite", "helium", "internlm3", "minicpm3", "ministral3", "olmo2", "olmo3", "opt", "persimmon", "phi"),
    *("seed_oss", "smollm3", "stablelm", "starcoder2", "gpt_bigcode", "bloom", "mpt", "codegen"),
    # experts, one by one and in one tensor
    *("deepseek_v32", "ernie4_5_moe", "flex_olmo", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "granitemoe", "jetmoe"),
    *("llama4_text", "minimax_m2", "olmoe", "phimoe", "qwen2_moe"),
    # gated delta nets, state-space layers, convolutions, hybrids
    *("bamba", "falcon_mamba", "jamba", "kimi_linear", "lfm2", "mamba", "mamba2", "minimax", "nemotron_h", "qwen3_5"),
    *("qwen3_5_moe", "qwen3_next", "recurrent_gemma", "rwkv"),
    # wrappers of images and sound
    *(
        "aya_vision",
        "blip-2",
        "deepseek_vl",
        "fuyu",
        "gemma3",
        "glm4v",
        "glm4v_moe",
        "idefics3",
        "internvl",
        "kimi_k25",
    ),
    *("llama4", "llava", "llava_next", "mistral3", "paligemma", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe"),
    *("smolvlm", "mllama"),
    # encoders, and encoders with decoders
    *("bart", "bert", "electra", "roberta", "t5", "whisper", "xlm-roberta"),
)

NO_LOGITS = (
    *(
        "blip-2",
        "codegen",
        "deepseek_v32",
        "helium",
        "minicpm3",
        "glm4_moe_lite",
        "glm4v",
        "glm4v_moe",
        "glm_moe_dsa",
        "kimi_k25",
        "qwen2_5_vl",
    ),
    *("qwen2_vl", "roberta", "xlm-roberta", "whisper"),
)
"""Kinds whose class computes nothing in these sizes, or wants more than tokens: weights in memory are compared."""


@pytest.fixture(autouse=True)
def no_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface, "read_model", untabled)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("falcon_mamba", "mamba")])
def test_every_kind_goes_to_fp8_and_back(tmp_path: Path, kind: str) -> None:
    any_models.save(tmp_path / "source", kind)
    for scheme in ("dynamic", "block", "mxfp8"):
        (tmp_path / scheme).mkdir()
        check_there_and_back(tmp_path / "source", tmp_path / scheme, scheme)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("gpt_bigcode", "nemotron_h")])
def test_transformers_computes_with_every_export_what_it_does_with_our_decoding_of_it(
    tmp_path: Path, kind: str
) -> None:
    model = any_models.save(tmp_path / "source", kind)
    export(tmp_path / "source", tmp_path / "fp8", "block", "transformers")
    run(tmp_path / "fp8", tmp_path / "back", "hf", "bf16", workers=1)
    coded, decoded = (any_models.load_whole(type(model), tmp_path / name) for name in ("fp8", "back"))
    weights = coded.state_dict()
    for name, tensor in decoded.state_dict().items():
        assert torch.equal(weights[name], tensor), name
    if kind not in NO_LOGITS:
        assert torch.equal(any_models.logits(coded), any_models.logits(decoded))


TAKEN_APART = ("llama4", "llama4_text")
"""Kinds whose experts transformers makes linears of, and does not load from one tensor."""


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("gpt_bigcode", *TAKEN_APART)])
def test_transformers_finds_every_weight_of_every_export_in_compressed_tensors(tmp_path: Path, kind: str) -> None:
    model = any_models.save(tmp_path / "source", kind)
    export(tmp_path / "source", tmp_path / "fp8", "dynamic", "transformers")
    found = check(open_checkpoint(tmp_path / "fp8"), engine_named("transformers"))
    assert not [finding for finding in found if finding.rule.fatal]
    any_models.load_whole(type(model), tmp_path / "fp8")


MORE_BY_TABLE = (
    *("exaone", "sarvam-mla", "sarvam-moe"),  # the class that has published names, in config.json
    # experts one by one, as engines look for them
    *("gemma4-moe", "hy4", "lara-mini", "minimax-m3", "mistral4", "step3p5"),
    *("glm-5.3", "jamba", "kimi-k3", "muse-spark", "qwen4"),  # linears that engines compute in BF16
    *("ling-3", "olmo-hybrid", "olmo-hybrid-rope"),  # projections that another name would leave as values
)


@pytest.mark.parametrize("scheme", ["dynamic", "mxfp8"])
@pytest.mark.parametrize("family", sorted(pico.FAMILIES.keys() - {"gpt2", "deepseek-v4", "falcon-mamba", "mamba"}))
def test_every_family_has_the_same_bytes_by_its_own_table(
    tmp_path: Path, family: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But GPT-2, whose matrices are stored as [in, out]: a table knows that, and has them in FP8 under `static`; and
    DeepSeek-V4, which its table knows that vLLM takes in blocks alone; vLLM takes no codes of Mamba."""
    pico.save(tmp_path / "source", family, dtype=torch.bfloat16)
    assert_as_tabled(tmp_path, scheme, monkeypatch, knows_more=family in MORE_BY_TABLE)
