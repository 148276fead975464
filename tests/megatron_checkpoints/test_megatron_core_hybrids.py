"""megatron-core as the judge of its hybrid models, MambaModel: it loads what we wrote at its default strictness, and
what it saves again comes back to the last bit; it computes transformers' logits where no layer is a mixer, and its
arguments say all of the model."""

from pathlib import Path
from typing import Any

import pico
import pytest
import torch
from conversions import assert_same_tensors, run
from core_models import peer
from judges import CORE_HYBRIDS

TOKENS = torch.arange(24).view(2, 12) * 7 % 250
_ATTENTION = {"layer_types": ["attention"] * 2}
_BAMBA = {"num_hidden_layers": 2, "attn_layer_indices": [0, 1]}
_NO_MULTIPLIERS = {
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling"), 1.0),
    "attention_multiplier": 0.25,  # as the root of a head's 16 channels would
}
COMPUTED: dict[str, tuple[str, dict[str, Any]]] = {
    "attention and MLPs": ("granite-hybrid-dense", _ATTENTION | _NO_MULTIPLIERS),
    "attention of which half has positions": ("bamba", _BAMBA),
    "attention without positions, and experts": (
        "granite-hybrid",
        _ATTENTION | _NO_MULTIPLIERS | {"num_hidden_layers": 2},
    ),
}


@pytest.fixture(scope="module")
def top(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("hybrids")
    cases = {family: (family, {}) for family in CORE_HYBRIDS} | COMPUTED
    jobs = []
    for case, (family, changes) in cases.items():
        theirs = pico.make_and_save(top / case, family, **changes)
        run(top / case, top / f"{case}-ours", "megatron")
        directory, again = (top / f"{case}-{whose}" / "release" for whose in ("ours", "theirs"))
        job = {"do": "load", "directory": str(directory), "again": str(again), "out": str(top / f"{case}.found.pt")}
        if case in COMPUTED:
            job["tokens"] = TOKENS.tolist()
            with torch.no_grad():
                torch.save(theirs(TOKENS).logits, top / f"{case}.expected.pt")
        jobs.append(job)
    peer(top, jobs)
    return top


@pytest.mark.parametrize("case", COMPUTED)
def test_megatron_core_computes_transformers_logits(top: Path, case: str) -> None:
    found, expected = torch.load(top / f"{case}.found.pt")["logits"][..., :250], torch.load(top / f"{case}.expected.pt")
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * max(1.0, float(expected.std())))


@pytest.mark.parametrize("case", [*CORE_HYBRIDS, *COMPUTED])
def test_what_megatron_core_saves_comes_back(top: Path, case: str) -> None:
    run(top / f"{case}-theirs" / "release", top / f"{case}-back", "hf", reference=top / case)
    assert_same_tensors(top / case, top / f"{case}-back")
