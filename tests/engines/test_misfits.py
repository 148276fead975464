"""What an export advises where an engine does not take a weight's shape: what is advised works."""

import re
from pathlib import Path
from typing import Any

import conversions
import pico
import pytest
import torch
from safetensors.torch import load_file, save_file
from soaking import few
from transformers.integrations.finegrained_fp8 import FP8Experts

from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.request import Request
from precisionctl.engines.base import engine_named
from precisionctl.errors import PrecisionError
from precisionctl.verify.engine_rules import check

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128, "head_dim": 32}

LATENTS: dict[str, Any] = {
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 128),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 32),
}
OF_64: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 4}
"""Heads of 64 channels: in a block of rows are two, which vLLM moves apart."""


def refused(source: Path, out: Path, target: str, scheme: str, **more: Any) -> str:
    with pytest.raises(PrecisionError) as error:
        conversions.carry_out(Request.export(source, out, target, scheme, **more), workers=1)  # type: ignore[arg-type]
    return str(error.value)


WITHOUT_NAMES = {"minicpm3": ("q_a_proj", LATENTS), "deepseek": ("o_proj", {})}
"""Families of which vLLM makes linears without a name, and the last one of these."""


@pytest.mark.parametrize("family", few(WITHOUT_NAMES, "minicpm3"))
def test_what_vllm_makes_without_a_name_is_codes_beside_codes(tmp_path: Path, family: str) -> None:
    """No list of what is not quantized reaches it (models/minicpm3.py, DeepseekAttention of models/deepseek_v2.py);
    tests/peers/test_vllm_families.py lets vLLM load them."""
    linear, sizes = WITHOUT_NAMES[family]
    pico.save(tmp_path / "source", family, dtype=torch.bfloat16, **SIZES, **sizes)
    said = refused(tmp_path / "source", tmp_path / "out", "vllm", "dynamic", exclude=(f"*.{linear}",))
    assert f"{linear}.weight" in said and "without a name" in said and "--exclude" in said
    # SGLang has names for all of MiniCPM3's. What it reads of vLLM's is the same, so a rule finds that, too
    request = Request.export(tmp_path / "source", tmp_path / "other", "sglang", "dynamic", exclude=(f"*.{linear}",))
    conversions.carry_out(request, workers=1)
    rule = engine_named("vllm").codes_alone[family].rule
    found = check(open_checkpoint(tmp_path / "other"), engine_named("vllm"))
    assert [each.where.split(".")[-2] for each in found if each.rule == rule] == [linear]
    conversions.carry_out(Request.export(tmp_path / "source", tmp_path / "out", "vllm", "dynamic"), workers=1)
    found = check(open_checkpoint(tmp_path / "out"), engine_named("vllm"))
    assert not [each for each in found if each.rule == rule]


@pytest.mark.soak
def test_a_norm_that_vllm_asks_for_in_every_layer_is_missed_in_bf16_alone(tmp_path: Path) -> None:
    """Of a directory of values vLLM's loader insists on all parameters (default_loader.py, track_weights_loading);
    tests/peers/test_vllm_families.py lets it load one without the norm."""
    source, wanted = tmp_path / "source", "model.layers.0.post_mlp_layernorm.weight"
    pico.save(source, "axk1", dtype=torch.bfloat16)

    def missed(directory: Path) -> list[str]:
        rule = engine_named("vllm").in_every_layer["axk1"].rule
        return [each.where for each in check(open_checkpoint(directory), engine_named("vllm")) if each.rule == rule]

    assert missed(source) == [wanted]
    request = Request.export(source, tmp_path / "out", "vllm", "dynamic", keep_misfits=True)
    conversions.carry_out(request, workers=1)
    assert missed(tmp_path / "out") == []
    tensors = load_file(source / "model.safetensors")
    tensors[wanted] = torch.ones_like(tensors["model.norm.weight"])
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    assert missed(source) == []


CASES = {
    "experts that INT4 would lose in BF16": (
        ("qwen3-moe", "transformers", "w4a16", {"moe_intermediate_size": 96}),
        ["mxfp4", "static", "dynamic"],
        False,
    ),
    "inputs that 128 does not divide": (
        ("llama-3", "vllm", "w4a16", {"intermediate_size": 160}),
        ["nvfp4", "nvfp4a16", "mxfp4", "static", "dynamic", "mxfp8"],
        True,
    ),
    "blocks": (("llama-3", "vllm", "block", {"intermediate_size": 160}), ["static", "dynamic", "mxfp8"], True),
    "blocks across heads of BLOOM": (("bloom", "vllm", "block", OF_64), ["dynamic", "mxfp8"], True),
    "one number for all of BLOOM's heads": (("bloom", "vllm", "w4a16", OF_64), ["mxfp4", "dynamic", "mxfp8"], True),
    "none that fits": (("llama-3", "vllm", "block", {"hidden_size": 100, "intermediate_size": 100}), [], False),
}


@pytest.mark.parametrize("name", few(CASES, "blocks", "none that fits"))
def test_what_is_advised_against_misfits_works(tmp_path: Path, name: str) -> None:
    (family, target, scheme, sizes), others, keeping = CASES[name]
    pico.save(tmp_path / "source", family, dtype=torch.bfloat16, **(SIZES | sizes))
    said = refused(tmp_path / "source", tmp_path / "out", target, scheme)
    advised = re.search(r"--scheme ([\w ]+)", said)
    assert (advised[1].split(" or ") if advised else []) == others
    assert ("--keep-misfits" in said) == keeping == ("--exclude" in said)
    assert ("--target" in said) == (not keeping)
    for other in {*others} - {"static", "nvfp4"}:  # these ask for amaxes of inputs
        request = Request.export(tmp_path / "source", tmp_path / other, target, other)  # type: ignore[arg-type]
        conversions.carry_out(request, workers=1)
    if keeping:
        request = Request.export(tmp_path / "source", tmp_path / "kept", target, scheme, keep_misfits=True)
        conversions.carry_out(request, workers=1)
    else:
        assert refused(tmp_path / "source", tmp_path / "kept", target, scheme, keep_misfits=True) != said


def test_where_no_scheme_takes_all_one_that_takes_some_is_advised_with_keep_misfits(tmp_path: Path) -> None:
    """No side is a multiple of 128, and the keys have 24 rows, which no GEMM of FP8 takes."""
    sizes = {"hidden_size": 64, "intermediate_size": 80, "head_dim": 12}
    pico.save(tmp_path / "source", "llama-3", dtype=torch.bfloat16, **sizes)
    for keep in (False, True):
        said = refused(tmp_path / "source", tmp_path / "out", "vllm", "block", keep_misfits=keep)
        advised = re.search(r"--keep-misfits in another scheme \(--scheme ([\w ]+)\), .* or --target", said)
        assert advised and "--include" not in said
        assert advised[1].split(" or ") == ["static", "dynamic", "mxfp8"]
    for scheme in ("dynamic", "mxfp8"):  # without amaxes of inputs
        out = tmp_path / scheme
        request = Request.export(tmp_path / "source", out, "vllm", scheme, keep_misfits=True)  # type: ignore[arg-type]
        conversions.carry_out(request, workers=1)
        assert not [each for each in check(open_checkpoint(out), engine_named("vllm")) if each.rule.fatal]


@pytest.mark.parametrize(
    ("family", "sizes", "ranks", "expected"),
    [
        # an expert of 256 rows is two whole blocks, or one for each of two GPUs; heads and shared linears go in four
        ("qwen3-moe", {"moe_intermediate_size": 256, "intermediate_size": 512}, 4, ["--expert-parallel", "--tp 2"]),
        ("qwen3-moe", {"moe_intermediate_size": 128, "intermediate_size": 512}, 2, ["--expert-parallel", "--tp 1"]),
        ("llama-3", {"intermediate_size": 384}, 2, ["--tp 1"]),
        ("llama-3", {"intermediate_size": 160}, 2, []),  # no whole blocks on one either
    ],
)
def test_what_is_advised_of_gpus_against_misfits_works(
    tmp_path: Path, family: str, sizes: dict[str, Any], ranks: int, expected: list[str]
) -> None:
    wide = {"hidden_size": 512, "head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    pico.save(tmp_path / "source", family, dtype=torch.bfloat16, **wide, **sizes)
    said = refused(tmp_path / "source", tmp_path / "out", "vllm", "block", ranks=ranks)
    assert re.findall(r"--expert-parallel(?= or|,)|--tp \d+", said) == expected
    for number, option in enumerate(expected):
        more = {"expert_parallel": True} if option == "--expert-parallel" else {"ranks": int(option.split()[1])}
        out, layout = tmp_path / str(number), {"ranks": ranks, **more}
        conversions.carry_out(Request.export(tmp_path / "source", out, "vllm", "block", **layout), workers=1)
        found = check(open_checkpoint(out), engine_named("vllm"), layout.pop("ranks"), **layout)
        assert not [each for each in found if each.rule.fatal]


def test_another_number_of_gpus_is_advised_that_divides_heads(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 192, "head_dim": 16}
    pico.save(tmp_path / "source", "llama-3", dtype=torch.bfloat16, **heads)
    said = refused(tmp_path / "source", tmp_path / "out", "vllm", "dynamic", ranks=5)
    assert "12 attention heads in 6 query groups on 5 GPUs" in said
    assert said.endswith("Choose another --tp, such as 3.")  # of 12 heads and 6 groups, 4 divides no group


def test_four_bits_of_rows_that_gpus_share_are_refused_by_the_export_as_by_verify(tmp_path: Path) -> None:
    """Granite 4's mixers have one group, whose rows vLLM's mamba_v2_sharded_weight_loader gives to every GPU."""
    sizes = {**pico.ONE_GROUP["granite-hybrid-dense"], "hidden_size": 256, "shared_intermediate_size": 256}
    pico.save(tmp_path / "source", "granite-hybrid-dense", dtype=torch.bfloat16, **sizes)
    said = refused(tmp_path / "source", tmp_path / "out", "vllm", "w4a16", ranks=2)
    assert "mamba.in_proj.weight" in said and "found only in codes of one byte" in said
    request = Request.export(tmp_path / "source", tmp_path / "kept", "vllm", "w4a16", ranks=2, keep_misfits=True)
    conversions.carry_out(request, workers=1)
    assert not [each for each in check(open_checkpoint(tmp_path / "kept"), engine_named("vllm"), 2) if each.rule.fatal]


def test_a_misfit_is_told_by_the_codes_that_were_asked_for(tmp_path: Path) -> None:
    pico.save(tmp_path / "source", "llama-3", dtype=torch.bfloat16, **(SIZES | {"intermediate_size": 136}))
    for scheme, codes in (("w4a16", "INT4"), ("dynamic", "FP8")):
        said = refused(tmp_path / "source", tmp_path / "out", "vllm", scheme)
        assert f"of which {codes} GEMMs need multiples of 16" in said


def test_what_no_shape_helps_is_said_before_shapes(tmp_path: Path) -> None:
    """Convolutions of OLMo Hybrid, which transformers loses beside four bits."""
    pico.save(tmp_path / "source", "olmo-hybrid", dtype=torch.bfloat16)
    for keep in (False, True):
        said = refused(tmp_path / "source", tmp_path / "out", "transformers", "mxfp4", keep_misfits=keep)
        assert "loses tensors that it joins" in said and "--keep-misfits" not in said


@pytest.mark.parametrize("family", ["nemotron-h", "lfm2-moe"])
def test_experts_whose_activation_transformers_does_not_find_on_a_gpu_are_no_blocks(
    tmp_path: Path, family: str
) -> None:
    """Told by the class of transformers that a GPU computes them with; a CPU decodes them."""
    model = pico.make_and_save(tmp_path / "source", family, dtype=torch.bfloat16)
    with pytest.raises(AttributeError, match="none of: .*hidden_act"):
        FP8Experts(model.config, block_size=(128, 128))
    said = refused(tmp_path / "source", tmp_path / "out", "transformers", "block")
    assert "transformers does not load experts of fp8 with block" in said and "hidden_act" in said
    FP8Experts(pico.make("qwen3-moe").config, block_size=(128, 128))


@pytest.mark.parametrize(("family", "whole"), [("bloom", 1), ("falcon-40b", 1), ("bloom", 2), ("falcon-40b", 2)])
def test_blocks_across_heads_that_vllm_moves_are_refused_and_found_in_others_exports(
    tmp_path: Path, family: str, whole: int
) -> None:
    sizes = {"hidden_size": 256 * whole, "num_attention_heads": 4, "ffn_hidden_size": 1024}
    pico.save(tmp_path / "hf", family, dtype=torch.bfloat16, **sizes)
    conversions.carry_out(Request.export(tmp_path / "hf", tmp_path / "sglang", "sglang", "block"), workers=1)
    found = check(open_checkpoint(tmp_path / "sglang"), engine_named("vllm"))
    if whole == 2:  # heads of 128
        assert not found
        conversions.carry_out(Request.export(tmp_path / "hf", tmp_path / "vllm", "vllm", "block"), workers=1)
        return
    assert found and all("heads of 64 rows" in finding.what and finding.rule.fatal for finding in found)
    assert "heads of 64 rows" in refused(tmp_path / "hf", tmp_path / "vllm", "vllm", "block")


@pytest.mark.parametrize("scheme", few(["dynamic", "block", "mxfp8", "nvfp4a16", "mxfp4", "w4a16"], "dynamic", "block"))
def test_weights_whose_scales_no_engine_computes_with_are_refused_and_tiny_ones_get_another(
    tmp_path: Path, scheme: str
) -> None:
    up = "model.layers.0.mlp.up_proj"
    pico.save(tmp_path / "source", "llama-3", dtype=torch.bfloat16, **SIZES, num_key_value_heads=4)
    file = tmp_path / "source" / "model.safetensors"
    stored = load_file(file)
    stored[f"{up}.weight"][3, 3] = 1e30
    stored["model.layers.1.mlp.down_proj.weight"][7] = 1e-18  # a row in a channel of its own
    if scheme == "block":
        stored["model.layers.1.mlp.down_proj.weight"].fill_(1e-18)
    save_file(stored, file, {"format": "pt"})
    said = refused(tmp_path / "source", tmp_path / "out", "vllm", scheme)
    assert f"`{up}.weight` holds 1e+30" in said and f"--exclude '{up}'" in said
    request = Request.export(tmp_path / "source", tmp_path / "kept", "vllm", scheme, exclude=(up,))  # type: ignore[arg-type]
    conversions.carry_out(request, workers=1)
    assert not [each for each in check(open_checkpoint(tmp_path / "kept"), engine_named("vllm")) if each.rule.fatal]


@pytest.mark.parametrize("family", few(["granite-hybrid", "qwen3-moe"], "granite-hybrid"))
def test_routers_that_transformers_never_quantizes_are_no_codes(tmp_path: Path, family: str) -> None:
    pico.save(tmp_path / "source", family, dtype=torch.bfloat16)
    everything: dict[str, Any] = {"include": ("*",), "keep_misfits": True}
    said = refused(tmp_path / "source", tmp_path / "out", "transformers", "dynamic", **everything)
    exclude = re.search("--exclude '(.+)'", said)
    assert "without quantization" in said and exclude
    request = Request.export(
        tmp_path / "source", tmp_path / "kept", "transformers", "dynamic", **everything, exclude=(exclude[1],)
    )
    conversions.carry_out(request, workers=1)
    found = check(open_checkpoint(tmp_path / "kept"), engine_named("transformers"))
    assert not [each for each in found if each.rule.fatal]
