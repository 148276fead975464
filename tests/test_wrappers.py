"""Wrappers: the text model of a model of images goes to Megatron and through training, its towers beside it."""

import json
from pathlib import Path

import pytest
import tiny_wrappers
import torch
from conversions import run
from gpt_models import as_gpt
from in_memory import to_megatron
from tiny_wrappers import WRAPPERS, stored, towers
from training import make_text, run_with_kills, settings

from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.param import Parallelism


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype and torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("kind", WRAPPERS)
def test_the_text_model_computes_what_the_wrapper_computes_of_text(kind: str, tmp_path: Path) -> None:
    theirs = tiny_wrappers.save(tmp_path, kind)
    made = to_megatron(open_checkpoint(tmp_path))
    text = {name: tensor for name, tensor in made.tensors.items() if not name.startswith("towers.")}
    made.tensors = text
    tokens = torch.randint(80, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, found = theirs(input_ids=tokens).logits, as_gpt(made)(tokens)[..., :80]
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.std()))


@pytest.mark.parametrize(
    ("kind", "in_memory"),
    [(kind, False) for kind in WRAPPERS] + [(kind, True) for kind in ("mistral3", "gemma3", "qwen2_vl")],
)
def test_a_wrapper_comes_back_from_megatron_to_the_last_bit(kind: str, in_memory: bool, tmp_path: Path) -> None:
    tiny_wrappers.save(tmp_path / "hf", kind, in_memory=in_memory, dtype=torch.bfloat16)
    run(tmp_path / "hf", tmp_path / "megatron", "megatron", parallelism=Parallelism(tensor=2, pipeline=2))
    run(tmp_path / "megatron", tmp_path / "back", "hf", verify=True)
    before, after = stored(tmp_path / "hf"), stored(tmp_path / "back")
    assert_same(before, after)
    assert len(towers(before)) > 10
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == json.loads(
        (tmp_path / "back" / "config.json").read_text()
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wrapper, a run of its text model that was killed once, and the text."""
    place = tmp_path_factory.mktemp("trained")
    tiny_wrappers.save(place / "source", "qwen2_5_vl", dtype=torch.bfloat16)
    data = make_text(place / "text.txt")
    run_with_kills(settings(place / "source", data, place / "run", "fp8", train__steps=4), {3})
    return place


def test_a_run_trains_the_text_and_keeps_the_towers(trained: Path, tmp_path: Path) -> None:
    run(trained / "run", tmp_path / "back", "hf")
    before, after = stored(trained / "source"), stored(tmp_path / "back")
    assert_same(towers(before), towers(after))
    assert not any(torch.equal(before[name], after[name]) for name in before.keys() - towers(before) if "proj" in name)
