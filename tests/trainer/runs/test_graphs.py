"""Runs that cannot have their layers captured as CUDA graphs are told why, before anything is loaded."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pico import shape
from training import WORDS, make_source, make_text, settings

from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.errors import EnvironmentProblem, RecipeError
from precisionctl.precision import PRESETS
from precisionctl.recipe import Data, Recipe, Train
from precisionctl.tokens.tokenizer import Tokenizer
from precisionctl.trainer.data import Blend, Rows, load_data
from precisionctl.trainer.measure.memory import estimate
from precisionctl.trainer.model.gpt import GPT
from precisionctl.trainer.resume import resume
from precisionctl.trainer.run_plan import check_graph_rows, check_graphs

GRAPHED = Recipe(PRESETS["fp8-delayed"], Train(graphs=True))
CONVERSATION = {"messages": [{"role": role, "content": WORDS[3]} for role in ("user", "assistant")]}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Rows | Blend]:
    """Of a text, of conversations, and of both."""
    folder = tmp_path_factory.mktemp("graphs")
    tokenizer = Tokenizer(open_checkpoint(make_source(folder / "source")).companions.files)
    chats = folder / "chats.jsonl"
    chats.write_text("".join(json.dumps(CONVERSATION) + "\n" for _ in range(4)))
    data = Data(sequence_length=32)
    text = load_data(replace(data, path=str(make_text(folder / "text.txt"))), tokenizer, folder, lambda count: None)
    talk = load_data(replace(data, path=str(chats)), tokenizer, folder, lambda count: None)
    assert isinstance(text, Rows) and isinstance(talk, Rows)
    return {"text": text, "conversations": talk, "both": Blend([text, talk], [1, 1]), "texts": Blend([text], [1])}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"backend": "emulated"}, "this run is emulated"),
        ({"ranks": 2}, "ranks put parameters together"),
        ({"family": "mixtral"}, "the sizes of the experts' GEMMs"),
        ({"family": "gemma4-small"}, "takes more than the hidden states"),
        ({"shape": {"attn_res_block_size": 2}}, "takes more than the hidden states"),
        ({"preset": "nvfp4"}, "NVFP4 rounds gradients at random"),
        ({"preset": "mxfp8"}, None),
        ({"train": {"recompute": "layer"}}, "train.recompute computes"),
        ({"data": {"sequence_length": 1000}}, "rows of a multiple of 128 tokens"),
        ({"rows": "conversations"}, "another shape in each pass"),
        ({"rows": "both"}, "another shape in each pass"),
        ({}, None),
        ({"rows": "texts"}, None),
        ({"train": {"graphs": False, "recompute": "layer"}, "ranks": 2, "backend": "emulated"}, None),
    ],
    ids=str,
)
def test_a_run_is_refused_with_the_reason(
    changes: dict[str, Any], reason: str | None, rows: dict[str, Rows | Blend]
) -> None:
    precision = PRESETS[changes.get("preset", "fp8-delayed")]
    recipe = Recipe(precision, replace(GRAPHED.train, **changes.get("train", {})))
    recipe = replace(recipe, data=replace(recipe.data, **changes.get("data", {})))
    model, data = shape(changes.get("family", "llama-3")), rows[changes.get("rows", "text")]
    model = replace(model, **changes.get("shape", {}))
    with pytest.raises(RecipeError, match=reason) if reason else nullcontext():
        check_graphs(recipe, model, changes.get("backend", "te"), changes.get("ranks", 1))
        check_graph_rows(recipe, data)


def test_resume_says_so_and_the_emulation_captures_none(tmp_path: Path) -> None:
    source, text = make_source(tmp_path / "source"), make_text(tmp_path / "text.txt")
    with pytest.raises(RecipeError, match="train.graphs asks for CUDA graphs .* this run is emulated"):
        resume(settings(source, text, tmp_path / "run", train__graphs=True), lambda started: None, lambda step: None)
    assert not list((tmp_path / "run").glob("iter_*"))
    with pytest.raises(EnvironmentProblem, match="need Transformer Engine"):
        GPT(shape("llama-3"), PRESETS["bf16"], dtype=torch.float32).capture(2, 32)


def test_memory_of_graphs_is_nobody_else_s() -> None:
    model = shape("llama-3")
    with_graphs, without = (
        estimate(model, replace(GRAPHED, train=Train(graphs=graphs)), "te", gpu=True) for graphs in (True, False)
    )
    assert with_graphs.passes > without.passes
    assert replace(with_graphs, passes=0) == replace(without, passes=0)
