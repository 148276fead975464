"""Weights that are loaded are not drawn before, and none is left as it was made."""

from pathlib import Path
from typing import Any

import pico
import pytest
import torch
from soaking import few

from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.evaluate import load
from precisionctl.trainer.model import undrawn


@pytest.mark.parametrize("family", few(pico.first_of_each(pico.rows), "llama-2", "qwen4", "jamba"))
def test_every_weight_that_is_not_drawn_is_loaded(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that holds NaN beforehand."""
    plain, left_out = undrawn.Undrawn.__torch_function__, []

    def poisoned(mode: Any, func: Any, *how: Any) -> Any:
        out = plain(mode, func, *how)
        if func in undrawn._DRAWS:
            left_out.append(func)
            with torch._C.DisableTorchFunction(), torch.no_grad():
                out.fill_(torch.nan)
        return out

    monkeypatch.setattr(undrawn.Undrawn, "__torch_function__", poisoned)
    pico.save(tmp_path / family, family)
    generator = torch.get_rng_state()
    model, _ = load(open_checkpoint(tmp_path / family))
    assert left_out and torch.equal(torch.get_rng_state(), generator)
    assert [name for name, each in model.named_parameters() if each.isnan().any()] == []
