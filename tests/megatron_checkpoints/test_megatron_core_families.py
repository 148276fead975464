"""megatron-core as the judge of the families that it builds: it loads what we wrote at its default strictness, computes
transformers' logits where its arguments say all of the model, and what it saves again comes back to the last bit."""

from pathlib import Path

import pico
import pytest
import torch
from conversions import assert_same_tensors, run
from core_models import peer
from judges import CORE_FIRST, CORE_LATER, CORE_LOADS

from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.dtypes import DType

TOKENS = torch.arange(24).view(2, 12) * 7 % 250


def judge(top: Path, families: tuple[str, ...]) -> Path:
    """Each family as transformers has it, with its logits, and as megatron-core computes and saves what we wrote."""
    jobs = []
    for family in (name for name in families if name not in pico.ABSENT):
        with torch.no_grad():
            torch.save(pico.make_and_save(top / family, family)(TOKENS).logits, top / f"{family}.expected.pt")
        run(top / family, top / f"{family}-ours", "megatron")
        directory, again = (top / f"{family}-{whose}" / "release" for whose in ("ours", "theirs"))
        job = {"do": "load", "directory": str(directory), "again": str(again), "out": str(top / f"{family}.found.pt")}
        jobs.append(job | {"te_names": True, "tokens": TOKENS.tolist()})
    peer(top, jobs)
    return top


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return judge(tmp_path_factory.mktemp("first"), CORE_FIRST)


@pytest.fixture(scope="module")
def later(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return judge(tmp_path_factory.mktemp("later"), (*CORE_LATER, *CORE_LOADS))


def assert_computes(top: Path, family: str) -> None:
    if family in pico.ABSENT:
        pytest.skip(f"this transformers has no {family}")
    found = torch.load(top / f"{family}.found.pt")["logits"][..., :250]
    torch.testing.assert_close(found, torch.load(top / f"{family}.expected.pt"), rtol=0, atol=1e-5)


def assert_comes_back(top: Path, family: str) -> None:
    """megatron-core's own checkpoint, with the config.json of the family."""
    run(top / f"{family}-theirs" / "release", top / f"{family}-back", "hf", reference=top / family)
    assert_same_tensors(top / family, top / f"{family}-back")


@pytest.mark.parametrize("family", CORE_FIRST)
def test_megatron_core_computes_transformers_logits_and_saves_what_comes_back(first: Path, family: str) -> None:
    assert_computes(first, family)
    assert_comes_back(first, family)


@pytest.mark.soak
@pytest.mark.parametrize("family", CORE_LATER)
def test_megatron_core_computes_the_logits_of_the_others_too(later: Path, family: str) -> None:
    assert_computes(later, family)
    assert_comes_back(later, family)


@pytest.mark.soak
@pytest.mark.parametrize("family", CORE_LOADS)
def test_megatron_core_carries_the_parameters_of_what_it_computes_otherwise(later: Path, family: str) -> None:
    assert_comes_back(later, family)


@pytest.mark.soak
def test_megatron_core_loads_routers_in_fp32_into_a_model_in_bf16(tmp_path: Path) -> None:
    """As the rounding that its own router would have, which it saves."""
    pico.make_and_save(tmp_path / "source", "deepseek-v3", num_nextn_predict_layers=0)
    run(tmp_path / "source", tmp_path / "ours", "megatron", precision="bf16")
    written = TorchDistReader(tmp_path / "ours")
    job = {"do": "load", "directory": str(written.path), "again": str(tmp_path / "theirs"), "te_names": True}
    peer(tmp_path, [job | {"out": str(tmp_path / "found.pt"), "tokens": TOKENS.tolist()}])
    saved = TorchDistReader(tmp_path / "theirs")
    for name in (f"decoder.layers.{layer}.mlp.router.weight" for layer in (1, 2)):
        assert (written.specs[name].dtype, saved.specs[name].dtype) == (DType.float32, DType.bfloat16)
        assert torch.equal(read_tensor(written, name).bfloat16(), read_tensor(saved, name))
