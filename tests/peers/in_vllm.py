"""What vLLM makes of directories, on a CPU."""

import os
import subprocess
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

SCRIPT = Path(__file__).with_name("vllm_load.py")


def load_in_vllm(python: Path, *directories: Path) -> None:
    words = [word for directory in directories for word in (directory, out_of(directory))]
    environment = os.environ | {"VLLM_TARGET_DEVICE": "cpu", "PYTHONPATH": ""}
    subprocess.run([python, SCRIPT, *words], check=True, capture_output=True, env=environment)


def compute_in_vllm(python: Path, tokens: torch.Tensor, directories: Mapping[Path, str]) -> None:
    """Let vLLM's kernels for CPUs compute tokens `[B, S]` by each directory, in a dtype."""
    folder = next(iter(directories)).parent
    save_file({"tokens": tokens}, folder / "tokens")
    words = [word for directory, dtype in directories.items() for word in (directory, dtype, out_of(directory))]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    settings["TORCHDYNAMO_DISABLE"] = "1"  # logits are sorted once, by what would be compiled first
    command = [python, SCRIPT.with_name("vllm_compute.py"), folder / "tokens", *words]
    subprocess.run(command, check=True, capture_output=True, env=os.environ | settings)


def computed(directory: Path) -> dict[str, torch.Tensor]:
    """What it computed, as vllm_compute.py says."""
    failure = out_of(directory).with_name(f"{directory.name}.out.error")
    assert not failure.is_file(), failure.read_text()
    return load_file(out_of(directory))


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The root of the mean square of the difference, over the deviation of theirs."""
    return float((ours.float() - theirs.float()).square().mean().sqrt() / theirs.float().std())


def out_of(directory: Path) -> Path:
    """What vLLM made of a directory: its parameters; beside it, with `.error`, why it made nothing."""
    return directory.with_name(f"{directory.name}.out")


COMPUTED = ("A_log", "inv_freq", "act_fn.beta", "act_fn.eps", "weight_shape")
"""Tensors of which vLLM keeps another function, or buffers, or of what it fuses the last one."""


SCALES = ("weight_scale", "weight_scale_2", "weight_global_scale", "input_scale", "input_global_scale")
"""Those of which there may be one for a tensor. A row of vLLM's experts has several of them."""


def left_out_of(directory: Path, stored: Mapping[str, torch.Tensor]) -> list[str]:
    """The stored tensors that are not found in vLLM's parameters. Names are not compared: vLLM maps and fuses them."""
    out = out_of(directory)
    failure = out.with_name(f"{out.name}.error")
    assert not failure.is_file(), failure.read_text()
    parameters: dict[torch.dtype, set[bytes]] = defaultdict(set)
    numbers: dict[str, set[float]] = defaultdict(set)
    for parameter, tensor in load_file(out).items():
        parameters[tensor.dtype] |= _rows(tensor)
        for kind in SCALES:
            if parameter.endswith(kind) and tensor.dtype == torch.float32:
                numbers[kind].update(tensor.flatten().tolist())

    def is_held(name: str, tensor: torch.Tensor) -> bool:
        kind = name.rpartition(".")[2]
        if kind in SCALES and tensor.numel() == 1:
            return float(tensor) in numbers[kind]
        return name.endswith(COMPUTED) or _holds(parameters, tensor)

    return [name for name, tensor in stored.items() if not is_held(name, tensor)]


def _holds(parameters: Mapping[torch.dtype, set[bytes]], tensor: torch.Tensor) -> bool:
    """Whether the rows of a tensor, or its columns, are rows of them: their bytes, or their numbers in FP32 or BF16.
    vLLM puts tensors one after the other, and the rows of some in another order."""
    exact = tensor.dtype in (torch.float8_e4m3fn, torch.uint8)
    return any(
        _rows(turned.to(dtype)) <= parameters.get(dtype, set())
        for dtype in ((tensor.dtype,) if exact else {tensor.dtype, torch.bfloat16, torch.float32})
        for turned in ((tensor, tensor.transpose(-1, -2)) if tensor.ndim > 1 else (tensor,))
    )


def _rows(tensor: torch.Tensor) -> set[bytes]:
    whole = tensor.reshape(-1, tensor.shape[-1] if tensor.ndim > 1 else 1)
    return {row.numpy().tobytes() for row in whole.flatten().view(torch.uint8).view(len(whole), -1)}
