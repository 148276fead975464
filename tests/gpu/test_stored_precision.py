"""An export evaluated with the GPU's own FP8 GEMMs: the numbers of the emulation, which runs on a CPU."""

from pathlib import Path
from typing import Any

import in_memory
import pytest
import torch
import torch.nn.functional as F
from scoring import rows_of, save
from torch import Tensor

from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.evaluate import evaluate, load
from precisionctl.evaluate.quantizers import has_block_gemms
from precisionctl.quant_methods.base import Scheme


def counted(monkeypatch: pytest.MonkeyPatch, where: Any, name: str) -> list[torch.Size]:
    """Shapes of the products made by a function from now on."""
    made: list[torch.Size] = []
    own = getattr(where, name)

    def function(left: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
        if left.is_cuda:
            made.append(left.shape)
        product: Tensor = own(left, *arguments, **keywords)
        return product

    monkeypatch.setattr(where, name, function)
    return made


@pytest.mark.skipif(torch.version.cuda is None, reason="PyTorch's own GEMM, and a PyTorch without CUDA")
@pytest.mark.parametrize("scheme", ["static", "dynamic", "block"])
def test_a_gpu_evaluates_as_a_cpu_does(tmp_path: Path, scheme: Scheme, monkeypatch: pytest.MonkeyPatch) -> None:
    """By products of FP8 codes: PyTorch's with one scale, applied to sums here by tensor and channel, and by blocks."""
    real = torch.cuda.get_device_name() != "a CPU that stands in"
    if real and scheme == "block" and not has_block_gemms(torch.device("cuda")):
        pytest.skip("PyTorch multiplies by blocks on Hopper alone, with CUDA 12.9 and later")
    source, text = sourced(tmp_path)
    method = "fp8" if scheme == "block" else "compressed-tensors"
    reader = in_memory.export(source, tmp_path / "out", method, scheme)
    products = counted(
        monkeypatch, F if scheme == "block" else torch, "scaled_mm" if scheme == "block" else "_scaled_mm"
    )
    assert_alike(tmp_path, reader, text)
    assert len(products) >= 8 or not real


@pytest.mark.parametrize("scheme", ["mxfp8", "nvfp4", "nvfp4a16", "mxfp4", "w4a16"])
def test_a_gpu_decodes_codes_of_groups_as_a_cpu_does(tmp_path: Path, scheme: Scheme) -> None:
    """Their products are emulated, on Hopper for want of GEMMs."""
    source, text = sourced(tmp_path)
    assert_alike(tmp_path, in_memory.export(source, tmp_path / "out", "compressed-tensors", scheme), text)


def sourced(folder: Path) -> tuple[in_memory.InMemory, Path]:
    """A model with recorded state, and text."""
    save(folder / "source", dtype=torch.bfloat16, hidden_size=256, intermediate_size=384, head_dim=128)
    (folder / "text.txt").write_text(" ".join(f"w{number % 249 + 1}" for number in range(7, 7000, 17)))
    return in_memory.with_state(HuggingFaceReader(folder / "source")), folder / "text.txt"


def assert_alike(folder: Path, reader: HuggingFaceReader, text: Path) -> None:
    """On a GPU and on a CPU: losses, how far they are from the source, and logits."""
    against = HuggingFaceReader(folder / "source")
    cpu, gpu = (evaluate(reader, text, against=against, sequence_length=64, device=on) for on in ("cpu", "cuda"))
    assert gpu.precision == cpu.precision and gpu.tokens == cpu.tokens
    assert gpu.loss == pytest.approx(cpu.loss, abs=2e-3)
    assert gpu.against is not None and cpu.against is not None
    assert gpu.against.kl == pytest.approx(cpu.against.kl, rel=0.2)
    tokens = rows_of(text, 64)[:4, :64]
    found, expected = (load(reader, on)[0](tokens.to(on)).float().cpu() for on in ("cuda", "cpu"))
    assert (found - expected).norm() < 0.02 * expected.norm()
