"""The export for Transformer Engine, loaded: transformers' model on TE's modules beside the emulated one."""

from pathlib import Path

import in_memory
import pico
import pytest
import torch
from te_weights import cast, fp8_weights, taken

from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.commands.plan_command import plan_command
from precisionctl.commands.request import Request
from precisionctl.conversion.command import execute
from precisionctl.fp8 import sidecar
from precisionctl.te import load_te

FAMILIES = ["llama-3", "mixtral", "gpt2"]
TOKENS = torch.randint(1, 250, (2, 32), generator=torch.Generator().manual_seed(0))


def export(root: Path, family: str) -> Path:
    pico.save(root / "hf", family, dtype=torch.bfloat16)
    sidecar.write(root / "hf" / sidecar.RELATIVE, in_memory.recorded(HuggingFaceReader(root / "hf")))
    execute(plan_command(Request.export(root / "hf", root / "out", "te")))
    return root / "out"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_of_an_export_computes_and_generates_as_the_emulated_one(tmp_path: Path, family: str) -> None:
    """Logits within what BF16 rounds; a prompt of 5 tokens, and one token after another, are padded for FP8 GEMMs."""
    out = export(tmp_path, family)
    ours, emulated = load_te(out, backend="te"), load_te(out, backend="emulated")
    tokens = TOKENS.to(ours.device)
    first, other = ours(tokens).logits.float(), emulated(tokens).logits.float()
    assert (first - other).norm() < 0.02 * other.norm()
    made = ours.generate(tokens[:1, :5], max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert made.shape == (1, 9)
    assert torch.equal(ours(tokens).logits.float(), first), "inference leaves its scales alone"


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_codes_alone_and_compute_every_bit_that_bf16_weights_do(tmp_path: Path, family: str) -> None:
    """Each is a byte for a value, cast once, under the scale of its state; after passes, too."""
    out = export(tmp_path, family)
    load_te(out, backend="te")  # what TE allocates once
    memory = [taken()]
    plain = load_te(out, weights="bf16", backend="te")
    memory.append(taken())
    model = load_te(out, backend="te")
    memory.append(taken())
    tokens = TOKENS.to(model.device)
    assert torch.equal(model(tokens).logits, plain(tokens).logits)
    values, codes = fp8_weights(plain), fp8_weights(model)
    assert codes.keys() == values.keys() and codes
    for name, (code, scale) in codes.items():
        assert torch.equal(code._data.cpu(), cast(values[name][0], scale)), name  # type: ignore[attr-defined]
        assert code._scale_inv.item() == scale.reciprocal().item()  # type: ignore[attr-defined]
        assert code._transpose is None and not hasattr(code, "_high_precision_init_val")  # type: ignore[attr-defined]
    assert not any(getattr(module, "_fp8_workspaces", None) for module in model.modules())
    saved = (memory[1] - memory[0]) - (memory[2] - memory[1])
    assert saved > sum(code.numel() for code, _ in codes.values()) - 1024 * len(codes), "a GPU's blocks have 512 bytes"
