"""Triton's kernels without a GPU: interpreted, and compiled for Hopper."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
TRITON = "triton==3.6.0"
"""That of PyTorch 2.11 for CUDA."""

INTERPRETED = """
import torch
from kernel_pairs import pairs
for name, kernel, expected in pairs("cpu", torch.float32):  # to BF16 the interpreter cuts off instead of rounding
    assert kernel.dtype == expected.dtype == torch.float32
    if name.startswith("rope"):
        assert torch.equal(kernel, expected), name
    torch.testing.assert_close(kernel, expected, rtol=2e-6, atol=1e-6, msg=lambda told: f"{name}: {told}")
    print(name)
"""

COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from precisionctl.trainer.model import gpu_kernels
of_bf16 = ("heads", "out", "values", "gradient", "made", "rows")
sizes = {"PAIRS": 20, "SIZE": 80, "PAIRS_BLOCK": 32, "REST_BLOCK": 64, "HEADS": 2, "BLOCK": 1024}
for name, kernel in vars(gpu_kernels).items():
    if isinstance(kernel, triton.JITFunction) and kernel.fn.__module__ == gpu_kernels.__name__:
        constants = {size: sizes[size] for size in kernel.arg_names if size in sizes}
        integers = [each for each in kernel.arg_names if "stride" in each or each in ("length", "number", "size")]
        kinds = dict.fromkeys(kernel.arg_names, "*fp32") | dict.fromkeys(integers, "i32")
        kinds |= {each: "*bf16" for each in of_bf16 if each in kinds} | {each: "constexpr" for each in constants}
        source = ASTSource(fn=kernel, signature=kinds, constexprs=constants)
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": False})
        assert "fma.rn.f32" not in made.asm["ptx"] and len(made.asm["cubin"]) > 1000
        print(name)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = ["pip", "install", "-q", "--no-deps", "--target", str(folder), TRITON]
    subprocess.run([sys.executable, "-m", *command], check=True)
    return folder


def run(site: Path, program: str, **environment: str) -> list[str]:
    paths = {"PYTHONPATH": os.pathsep.join(map(str, (TESTS.parent, TESTS, site)))}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=os.environ | paths | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout.splitlines()


def test_kernels_compute_what_pytorch_does(site: Path) -> None:
    told = run(site, INTERPRETED, TRITON_INTERPRET="1")
    assert len(told) == 8 + 2 + 6


def test_kernels_compile_for_hopper_and_fuse_no_multiplications(site: Path) -> None:
    assert len(run(site, COMPILED)) == 5
