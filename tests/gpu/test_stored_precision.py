"""An export evaluated with the GPU's own FP8 GEMMs: the numbers of the emulation, which runs on a CPU."""

from pathlib import Path

import in_memory
import pytest
import torch
from test_evaluate import rows_of, save

from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.evaluate import evaluate, load


@pytest.mark.skipif(torch.version.cuda is None, reason="PyTorch's own GEMM, and a PyTorch without CUDA")
@pytest.mark.parametrize("scheme", ["static", "dynamic", "block"])
def test_a_gpu_evaluates_as_a_cpu_does(tmp_path: Path, scheme: str) -> None:
    whole = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
    save(tmp_path / "source", dtype=torch.bfloat16, **whole)
    source = in_memory.with_state(HuggingFaceReader(tmp_path / "source"))
    method = "fp8" if scheme == "block" else "compressed-tensors"
    reader = in_memory.export(source, tmp_path / "out", method, scheme)
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{number % 249 + 1}" for number in range(7, 7000, 17)))
    against = HuggingFaceReader(tmp_path / "source")
    cpu, gpu = (evaluate(reader, text, against=against, sequence_length=64, device=on) for on in ("cpu", "cuda"))
    assert gpu.precision == cpu.precision and gpu.tokens == cpu.tokens
    assert gpu.loss == pytest.approx(cpu.loss, abs=2e-3)
    assert gpu.against is not None and cpu.against is not None
    assert gpu.against.kl == pytest.approx(cpu.against.kl, rel=0.2)
    tokens = rows_of(text, 64)[:4, :64]
    found, expected = (load(reader, on)[0](tokens.to(on)).float().cpu() for on in ("cuda", "cpu"))
    assert (found - expected).norm() < 0.01 * expected.norm()
