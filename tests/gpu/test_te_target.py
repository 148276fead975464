"""The export for Transformer Engine, loaded: transformers' model on TE's modules beside the emulated one."""

from pathlib import Path

import in_memory
import pico
import pytest
import torch

from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.commands.plan_export import InferenceExport, plan_export
from precisionctl.conversion.work import execute
from precisionctl.fp8 import sidecar
from precisionctl.te import load_te


@pytest.mark.parametrize("family", ["llama-3", "mixtral"])
def test_the_model_of_an_export_computes_and_generates_as_the_emulated_one(tmp_path: Path, family: str) -> None:
    """Logits within what BF16 rounds; a prompt of 5 tokens, and one token after another, are padded for FP8 GEMMs."""
    pico.save(tmp_path / "hf", family, dtype=torch.bfloat16)
    sidecar.write(tmp_path / "hf" / sidecar.RELATIVE, in_memory.recorded(HuggingFaceReader(tmp_path / "hf")))
    execute(plan_export(InferenceExport(tmp_path / "hf", tmp_path / "out", "te")))
    ours, emulated = load_te(tmp_path / "out", backend="te"), load_te(tmp_path / "out", backend="emulated")
    tokens = torch.randint(1, 250, (2, 32), generator=torch.Generator().manual_seed(0)).to(ours.device)
    first, other = ours(tokens).logits.float(), emulated(tokens).logits.float()
    assert (first - other).norm() < 0.02 * other.norm()
    made = ours.generate(tokens[:1, :5], max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert made.shape == (1, 9)
    assert torch.equal(ours(tokens).logits.float(), first), "inference leaves its scales alone"
