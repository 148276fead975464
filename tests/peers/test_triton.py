"""Triton's kernels without a GPU: interpreted, and compiled for two kinds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from repository import HELPERS, ROOT

TRITON = "triton==3.6.0"
"""That of PyTorch 2.11 for CUDA."""

INTERPRETED = """
import torch
from kernel_pairs import pairs
from precisionctl.trainer.model import gpu_kernels
for name, kernel, expected in pairs("cpu", torch.float32):  # to BF16 the interpreter cuts off instead of rounding
    assert kernel.dtype == expected.dtype == torch.float32
    if name.startswith("rope"):
        assert torch.equal(kernel, expected), name
    torch.testing.assert_close(kernel, expected, rtol=2e-6, atol=1e-6, msg=lambda told: f"{name}: {told}")
    print(name)
rows = torch.full((3, 8), -torch.inf)
rows[1:, 2] = torch.tensor([torch.inf, torch.nan])
assert torch.equal(gpu_kernels.log_sums(rows.T.contiguous().T, 8).nan_to_num(5, 6, 7), torch.tensor([7.0, 6, 5]))
values = torch.randn(3, 8, requires_grad=True)
try:
    torch.autograd.grad(gpu_kernels.SwiGLU.apply(values).sum(), values, create_graph=True)
except RuntimeError as problem:
    assert "no second derivatives" in str(problem)
else:
    raise AssertionError("a gradient without a graph passes for one")
"""

COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from precisionctl.trainer.model import gpu_kernels
of_bf16 = ("heads", "out", "values", "gradient", "rows")
sizes = {"PAIRS": 20, "SIZE": 80, "PAIRS_BLOCK": 32, "REST_BLOCK": 64, "HEADS": 2, "BLOCK": 1024}
for name, kernel in vars(gpu_kernels).items():
    if isinstance(kernel, triton.JITFunction) and kernel.fn.__module__ == gpu_kernels.__name__:
        constants = {size: sizes[size] for size in kernel.arg_names if size in sizes}
        integers = [each for each in kernel.arg_names if "stride" in each or each in ("length", "number", "size")]
        kinds = dict.fromkeys(kernel.arg_names, "*fp32") | dict.fromkeys(integers, "i32")
        kinds |= {each: "*bf16" for each in of_bf16 if each in kinds} | {each: "constexpr" for each in constants}
        kinds |= {"targets": "*i64"} if "targets" in kinds else {"out": "*fp32"} if name == "_log_sums" else {}
        source, fuses = ASTSource(fn=kernel, signature=kinds, constexprs=constants), name != "_rotate"
        for capability in (90, 100):
            made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": fuses})
            assert len(made.asm["cubin"]) > 1000
            assert fuses or "fma.rn.f32" not in made.asm["ptx"]
        print(name)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = ["pip", "install", "-q", "--no-deps", "--target", str(folder), TRITON]
    subprocess.run([sys.executable, "-m", *command], check=True)
    return folder


def run(site: Path, program: str, **environment: str) -> list[str]:
    paths = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, HELPERS, site)))}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=os.environ | paths | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout.splitlines()


def test_kernels_compute_what_pytorch_does(site: Path) -> None:
    told = run(site, INTERPRETED, TRITON_INTERPRET="1")
    assert len(told) == 8 + 2 + 6


def test_kernels_compile_for_hopper_and_blackwell_and_rope_fuses_no_multiplications(site: Path) -> None:
    assert len(run(site, COMPILED)) == 5
