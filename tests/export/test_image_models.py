"""Exports of models of images that have no table: layers that attend to images, and experts for text and for images."""

import json
import re
from pathlib import Path
from typing import Any

import any_models
import pytest
import torch
from soaking import in_soak
from torch import nn
from transformers import AutoModelForImageTextToText

from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.engines.base import engine_named
from precisionctl.errors import PrecisionError
from precisionctl.verify.engine_rules import check

AS_PUBLISHED = {
    r"^lm_head": "language_model.lm_head",
    r"^model\.language_model\.": "language_model.model.",
    r"^model\.": "",
}
"""Names of transformers' Llama 3.2 Vision in memory, as the class of 2024 and published files have them."""

IGNORED = (".*lm_head", "multi_modal_projector.*", "vision_model.*")
"""By llm-compressor's examples/quantization_w8a8_fp8/llama3.2_vision_example.py. RedHatAI's FP8-dynamic of 11B is as
large as a model is whose codes are just these: 12.6 GB."""


def test_llama_3_2_vision_has_codes_where_llm_compressor_makes_them(tmp_path: Path) -> None:
    model = any_models.save(tmp_path / "source", "mllama")
    linears = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for here, there in AS_PUBLISHED.items():
        linears = {re.sub(here, there, name) for name in linears}
    wanted = {f"{name}.weight" for name in linears if not any(re.match(pattern, name) for pattern in IGNORED)}
    any_models.export(tmp_path / "source", tmp_path / "fp8", target="sglang")
    stored = any_models.stored(tmp_path / "fp8")
    codes = {name for name, tensor in stored.items() if tensor.dtype == torch.float8_e4m3fn}
    assert codes == wanted and any(".cross_attn.k_proj." in name for name in codes)


@pytest.fixture(scope="module")
def ernie(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an ERNIE 4.5 VL as transformers saves it, and as it is published."""
    root = tmp_path_factory.mktemp("ernie")
    any_models.save(root / "theirs", "ernie4_5_vl_moe")
    any_models.publish_ernie_vl(root / "theirs", root / "published")
    return root


def findings(directory: Path, target: str) -> list[str]:
    return [f"{one.where}: {one.what}" for one in check(open_checkpoint(directory), engine_named(target))]


@pytest.mark.parametrize("target", ["vllm", *in_soak("sglang")])
def test_both_routers_of_a_layer_are_kept_by_the_names_that_engines_give_them(
    ernie: Path, tmp_path: Path, target: str
) -> None:
    """ernie45_vl_moe.py of vLLM and ernie45_moe_vl.py of SGLang make linears of them, text_experts_gate and
    vision_experts_gate."""
    any_models.export(ernie / "published", tmp_path / "fp8", target=target)
    assert not findings(tmp_path / "fp8", target)
    path = tmp_path / "fp8" / "config.json"
    config: dict[str, Any] = json.loads(path.read_text())
    ignored = config["quantization_config"]["ignore"]
    routers = {f"model.layers.{layer}.mlp.{kind}_experts_gate" for layer in (1, 2) for kind in ("text", "vision")}
    assert routers < {*ignored}
    config["quantization_config"]["ignore"] = [name for name in ignored if not name.endswith("_experts_gate")]
    path.write_text(json.dumps(config))
    found = findings(tmp_path / "fp8", target)
    assert len(found) == 4 and all("_experts_gate`, is not ignored" in each for each in found)


@pytest.mark.parametrize(("target", "scheme"), [("vllm", "mxfp8"), *in_soak(("sglang", "mxfp8"))])
def test_experts_are_no_codes_where_a_list_with_their_router_takes_them_along(
    ernie: Path, tmp_path: Path, target: str, scheme: str
) -> None:
    """vLLM (quant_utils.py) and SGLang (utils.py), is_layer_skipped: `mlp.text_experts` is in a name of the list."""
    with pytest.raises(PrecisionError, match="which are ignored where their routers are"):
        any_models.export(ernie / "published", tmp_path / "out", scheme, target)
    any_models.export(ernie / "published", tmp_path / "out", scheme, target, exclude=("*.experts.*",))
    assert not findings(tmp_path / "out", target)


def test_transformers_computes_no_codes_of_experts_of_two_kinds(ernie: Path, tmp_path: Path) -> None:
    with pytest.raises(PrecisionError, match="transformers computes no codes of a ernie4_5_vl_moe"):
        any_models.export(ernie / "theirs", tmp_path / "out", "dynamic", "transformers")
    any_models.load_whole(AutoModelForImageTextToText, ernie / "theirs")  # and values it does
    any_models.export(ernie / "theirs", tmp_path / "for vllm")
    with pytest.raises(RuntimeError):
        any_models.load_whole(AutoModelForImageTextToText, tmp_path / "for vllm")
