"""An export evaluated with the GPU's own FP8 GEMMs: the numbers of the emulation, which runs on a CPU."""

from pathlib import Path
from typing import Any

import in_memory
import int8_directories
import pytest
import torch
import torch.nn.functional as F
from scoring import rows_of, save
from te_pairs import FP8_SQNR, sqnr
from torch import Tensor

from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.evaluate import evaluate, load
from precisionctl.evaluate.quantizers import has_block_gemms
from precisionctl.quant_methods.base import Scheme
from precisionctl.trainer.backends.emulated import Linear

SIZES = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 128}


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
    """Their products are emulated, on Hopper for want of GEMMs. Inputs that are not rounded get no other code."""
    source, text = sourced(tmp_path)
    reader = in_memory.export(source, tmp_path / "out", "compressed-tensors", scheme)
    assert_alike(tmp_path, reader, text, apart=0.02 if scheme.endswith("a16") else 0.5)


@pytest.mark.parametrize("spelling", ["w8a8", "w8a8-static-zero-points", "w8a16"])
def test_a_gpu_decodes_int8_as_a_cpu_does(tmp_path: Path, spelling: str) -> None:
    """By emulated products of its codes and of inputs rounded to it."""
    _, text = sourced(tmp_path)
    int8_directories.make(tmp_path / "out", int8_directories.SPELLINGS[spelling], num_hidden_layers=2, **SIZES)
    assert divergence(HuggingFaceReader(tmp_path / "out"), rows_of(text, 64)[:4, :64]) < 1e-4


def sourced(folder: Path) -> tuple[in_memory.InMemory, Path]:
    """A model with recorded state, and text."""
    save(folder / "source", dtype=torch.bfloat16, **SIZES)
    (folder / "text.txt").write_text(" ".join(f"w{number % 249 + 1}" for number in range(7, 7000, 17)))
    return in_memory.with_state(HuggingFaceReader(folder / "source")), folder / "text.txt"


def assert_alike(folder: Path, reader: HuggingFaceReader, text: Path, apart: float = 0.5) -> None:
    """On a GPU and on a CPU. Each linear by itself makes the same of the same input. A model's linears do not get the
    same: sums in BF16 have another order, by which inputs near the middle between two codes get the other one. So
    logits, losses and the distance from the source are held against that distance: the KL divergence between the two
    devices is at most `apart` of it. On one CPU with two kernels for BF16 it is 1/12 to 1/5 of it."""
    against = HuggingFaceReader(folder / "source")
    cpu, gpu = (evaluate(reader, text, against=against, sequence_length=64, device=on) for on in ("cpu", "cuda"))
    assert gpu.precision == cpu.precision and gpu.tokens == cpu.tokens
    assert gpu.against is not None and cpu.against is not None
    assert gpu.against.kl == pytest.approx(cpu.against.kl, rel=0.2)
    largest = apart * cpu.against.kl
    # KL is half the square of what log probabilities differ by: of so many tokens, three standard deviations
    assert gpu.loss == pytest.approx(cpu.loss, abs=3 * (2 * largest / cpu.tokens) ** 0.5)
    assert divergence(reader, rows_of(text, 64)[:4, :64]) < largest


@torch.no_grad()
def divergence(reader: HuggingFaceReader, tokens: Tensor) -> float:
    """KL between what a CPU and a GPU predict, after each linear of the GPU's model has been held to the CPU's."""
    on_cpu, on_gpu = (load(reader, device)[0] for device in ("cpu", "cuda"))
    made: dict[str, tuple[Tensor, Tensor]] = {}
    for name, module in on_cpu.named_modules():
        if isinstance(module, Linear):
            module.register_forward_hook(lambda _, given, out, name=name: made.update({name: (given[0], out)}))
    expected = on_cpu(tokens)
    assert len(made) == 8
    for name, (values, out) in made.items():
        assert sqnr(out, on_gpu.get_submodule(name)(values.to("cuda")).cpu()) > FP8_SQNR, name
    of_cpu, of_gpu = (
        logits[..., : reader.model.vocab_size].float().log_softmax(-1)
        for logits in (expected, on_gpu(tokens.to("cuda")).cpu())
    )
    return float(F.kl_div(of_gpu, of_cpu, reduction="none", log_target=True).sum(-1).mean())
