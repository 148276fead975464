"""What `eval --tasks` gives lm-eval and makes of its errors, with stand-ins for what is imported of it: `tests/peers`
has lm-eval itself."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from scoring import save

from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.errors import DamagedCheckpoint, DataError, RecipeError
from precisionctl.precision import Precision
from precisionctl.trainer.model.gpt import GPT

IMPORTED = {
    "lm_eval": {"simple_evaluate": None},
    "lm_eval.api": {},
    "lm_eval.api.model": {"TemplateLM": object},
    "lm_eval.tasks": {"TaskManager": lambda include_path: SimpleNamespace(all_tasks=["a_task", "arc_easy"])},
    "lm_eval.utils": {"get_rolling_token_windows": None, "make_disjoint_window": None},
}


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name, contents in IMPORTED.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    name = "precisionctl.evaluate.harness"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name)
    del sys.modules[name]


def test_what_fills_up_a_text_is_a_token_of_it(harness: Any, tmp_path: Path) -> None:
    """Under per-tensor scaling a token that is larger than all of the text's would change its logits."""
    save(tmp_path)
    model = GPT(HuggingFaceReader(tmp_path).model, Precision(fp8=True, scaling="current"), "emulated")
    adapter, tokens = harness.StoredModel(model, None, 64, set()), list(range(1, 19))
    logits = adapter._logits(tokens, 18)
    assert torch.equal(logits, adapter._logits([*tokens, *[18] * 14], 32)[:18])
    with torch.no_grad():
        model.embedding.word_embeddings.weight[0] *= 1e3
    changed = adapter._logits(tokens, 18)
    assert torch.equal(changed[:, 1:], logits[:, 1:])  # word 0 has its own logit


@pytest.mark.parametrize("scaling", ["current", "block", "mxfp8"])
def test_a_text_may_have_any_length_under_each_scaling(harness: Any, tmp_path: Path, scaling: Any) -> None:
    save(tmp_path)
    model = GPT(HuggingFaceReader(tmp_path).model, Precision(fp8=True, scaling=scaling), "emulated")
    adapter = harness.StoredModel(model, None, 64, set())
    assert all(adapter._logits(list(range(1, 1 + length)), 1).isfinite().all() for length in (1, 16, 33))


def test_a_text_may_be_as_long_as_is_computed_however_it_is_filled_up(harness: Any, tmp_path: Path) -> None:
    save(tmp_path, "glm-moe-dsa", index_topk=20)
    model = GPT(HuggingFaceReader(tmp_path).model, Precision(fp8=False), "emulated")
    tokens = list(range(1, 21))
    with torch.no_grad():
        expected = model(torch.tensor([tokens]))[0, :, : model.model.vocab_size]
    logits = harness.StoredModel(model, None, 20, set())._logits(tokens, 20)
    assert torch.allclose(logits, expected.float(), atol=0.05)
    with pytest.raises(RecipeError, match="a text of 21 tokens"):
        harness.StoredModel(model, None, 21, set())._logits([*tokens, 21], 1)


@pytest.mark.parametrize("raised", [ValueError, KeyError, TypeError])
def test_an_error_of_the_model_is_not_said_to_be_lm_evals(
    harness: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: type[Exception]
) -> None:
    save(tmp_path, dtype=torch.bfloat16)

    def fail(*_: Any, **__: Any) -> None:
        raise raised("no such thing")

    monkeypatch.setattr(harness, "simple_evaluate", fail)
    with pytest.raises(DataError, match="lm-eval: .*no such thing"):
        harness.run_tasks(HuggingFaceReader(tmp_path), ["a_task"], limit=None, chat_template=False)
    monkeypatch.setattr(harness, "simple_evaluate", lambda adapter, **_: adapter._logits([1, 2], 1))
    monkeypatch.setattr(GPT, "hidden", fail)
    with pytest.raises(raised, match="no such thing"):
        harness.run_tasks(HuggingFaceReader(tmp_path), ["a_task"], limit=None, chat_template=False)


def test_a_generation_config_without_content_is_damaged(harness: Any, tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "generation_config.json").write_bytes(b"")
    with pytest.raises(DamagedCheckpoint, match="generation_config.json"):
        harness.run_tasks(HuggingFaceReader(tmp_path), ["a_task"], limit=None, chat_template=False)


def test_a_task_that_is_not_known_is_refused_before_the_model_is_loaded(
    harness: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path)
    monkeypatch.setattr(harness, "load", lambda *_: pytest.fail("the model is loaded"))
    with pytest.raises(DataError, match="lm-eval knows no task 'arc_eazy'. Did you mean arc_easy?"):
        harness.run_tasks(HuggingFaceReader(tmp_path), ["a_task", "arc_eazy"], limit=None, chat_template=False)
