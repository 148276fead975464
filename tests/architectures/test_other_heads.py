"""Models of a family with another head than a language model's: rewards, classes, values."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import any_models
import pico
import pytest
import torch
from any_models import check_there_and_back, export, stored
from safetensors.torch import load_file, save_file
from soaking import few
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from precisionctl.architectures.read_off import may_be_asked_for, why_not_gemms
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.dtypes import DType
from precisionctl.engines.base import engine_named
from precisionctl.errors import RecipeError, UnknownArchitecture, UnknownFormat
from precisionctl.param import TensorSpec
from precisionctl.verify.compare import compare
from precisionctl.verify.engine_rules import check


def of_class(auto: Any, family: str) -> Callable[[Path], object]:
    def make(directory: Path) -> None:
        config = pico.make(family).config
        config.num_labels, config.pad_token_id = 3, 0
        auto.from_config(config).to(torch.bfloat16).save_pretrained(directory)

    return make


def with_head(kind: str, **head: tuple[int, ...]) -> Callable[[Path], object]:
    """A model with more tensors, whose config.json names this class."""

    def make(directory: Path) -> None:
        pico.save(directory, "llama-2", dtype=torch.bfloat16)
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | {"architectures": [kind]}))
        path = directory / "model.safetensors"
        more = {name: torch.randn(shape).bfloat16() for name, shape in head.items()}
        save_file(load_file(path) | more, path, metadata={"format": "pt"})

    return make


HEADS: dict[str, tuple[Callable[[Path], object], set[str]]] = {
    "classes": (of_class(AutoModelForSequenceClassification, "llama-2"), {"score"}),
    "classes of a family with experts": (of_class(AutoModelForSequenceClassification, "mixtral"), {"score"}),
    "classes of tokens": (of_class(AutoModelForTokenClassification, "gpt-neox"), {"classifier"}),
    "a head of two linears": (
        with_head(
            "LlamaForRewardModel", **{"score.0.weight": (64, 64), "score.0.bias": (64,), "score.2.weight": (1, 64)}
        ),
        {"score.0", "score.2"},
    ),
    "a head with a gate, as ArmoRM's": (
        with_head(
            "LlamaForRewardModelWithGating",
            **{
                "regression_layer.weight": (19, 64),
                "gating.layers.0.weight": (64, 64),
                "reward_transform": (9, 9),
            },
        ),
        {"regression_layer", "gating.layers.0"},
    ),
}


@pytest.mark.parametrize("name", few(HEADS, "classes of a family with experts", "a head with a gate, as ArmoRM's"))
def test_another_head_stays_as_it_is_and_is_on_the_list_of_what_is_not_quantized(tmp_path: Path, name: str) -> None:
    make, head = HEADS[name]
    make(tmp_path / "source")
    check_there_and_back(tmp_path / "source", tmp_path, "dynamic")
    source, fp8 = tmp_path / "source", tmp_path / "out"
    export(source, fp8)
    values, codes = stored(source), stored(fp8)
    for module in head:
        assert torch.equal(codes[f"{module}.weight"], values[f"{module}.weight"])
    assert head <= set(json.loads((fp8 / "config.json").read_text())["quantization_config"]["ignore"])
    assert check(open_checkpoint(fp8), engine_named("vllm")) == []


@pytest.mark.parametrize(
    ("auto", "family"),
    [(AutoModelForSequenceClassification, "llama-2"), (AutoModelForTokenClassification, "gpt-neox")],
)
def test_transformers_loads_an_export_and_computes_nearly_the_same(tmp_path: Path, auto: Any, family: str) -> None:
    of_class(auto, family)(tmp_path / "source")
    export(tmp_path / "source", tmp_path / "fp8", "dynamic", "transformers")
    ours, theirs = (any_models.logits(any_models.load_whole(auto, tmp_path / name)) for name in ("fp8", "source"))
    assert not torch.equal(ours, theirs)
    assert torch.cosine_similarity(ours.flatten().float(), theirs.flatten().float(), dim=0) > 0.98


def test_another_head_is_other_tensors_whichever_checkpoint_comes_first(tmp_path: Path) -> None:
    HEADS["classes"][0](tmp_path / "classes")
    pico.save(tmp_path / "words", "llama-2", dtype=torch.bfloat16)
    classes, words = (open_checkpoint(tmp_path / name) for name in ("classes", "words"))
    for a, b in ((classes, words), (words, classes)):
        found = {each.name: each.status for each in compare(a, b).tensors}
        assert found["score.weight"] == ("only in A" if a is classes else "only in B")


def test_what_needs_the_head_of_a_language_model_is_refused_with_which_model_to_give(tmp_path: Path) -> None:
    HEADS["classes"][0](tmp_path / "source")
    refused = [
        Request(tmp_path / "source", tmp_path / "out", "megatron"),
        Request.export(tmp_path / "source", tmp_path / "out", "vllm", "dynamic", kv_cache="fp8"),
    ]
    for request in refused:
        with pytest.raises(
            UnknownArchitecture, match=r"head for rewards or classes \(LlamaForSequenceClassification\).*language model"
        ):
            plan_command(request)
    with pytest.raises(RecipeError, match="'score' names `score.weight`, which never becomes codes: it is a head"):
        plan_command(Request.export(tmp_path / "source", tmp_path / "out", "vllm", "dynamic", include=("score",)))


def test_a_head_beside_that_of_a_language_model_is_refused_with_what_to_save(tmp_path: Path) -> None:
    """As TRL's value heads are saved: no engine has a class with both."""
    with_head("LlamaForCausalLM", **{"v_head.summary.weight": (1, 64), "v_head.summary.bias": (1,)})(
        tmp_path / "source"
    )
    with pytest.raises(UnknownFormat, match=r"beside its own.*pretrained_model\.save_pretrained"):
        plan_command(Request.export(tmp_path / "source", tmp_path / "out", "vllm", "dynamic"))


@pytest.mark.parametrize("head", "score classifier qa_outputs v_head value_head reward_head rm_head gating".split())
def test_no_linear_of_a_head_becomes_codes(head: str) -> None:
    names = [f"{before}{head}.{linear}weight" for before in ("", "model.") for linear in ("", "0.", "summary.", "a.1.")]
    spec = TensorSpec((64, 64), DType.bfloat16)
    assert why_not_gemms(dict.fromkeys(names, spec)) == dict.fromkeys(names, "a head")
    assert not may_be_asked_for("a head")
    assert why_not_gemms({f"model.layers.0.{head}s.0.weight": spec}) == {}
