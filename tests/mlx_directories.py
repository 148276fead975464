"""Directories as mlx-lm quantizes and saves them, by a slow writer of its own.

Random codes under random scales. Rows are packed as one long integer; what they are worth is computed in FP64, which
holds every product and sum here, and rounded where MLX rounds.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pico
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transposed_directories import SIZES

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True)
class Spelled:
    """What config.json says of all modules, the dtype of an affine mode's scales, and what it says of some."""

    mode: str
    bits: int
    group: int
    scales: torch.dtype = torch.bfloat16
    own: Mapping[str, Any] = field(default_factory=dict)
    of_experts: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        return {"group_size": self.group, "bits": self.bits, "mode": self.mode}


SPELLINGS = {
    **{f"affine-{bits}": Spelled("affine", bits, 32 if bits % 2 else 64) for bits in (1, 2, 3, 4, 5, 6, 8)},
    "affine-128": Spelled("affine", 4, 128),
    "affine-float16": Spelled("affine", 6, 32, torch.float16),
    "affine-float32": Spelled("affine", 8, 64, torch.float32),
    "mxfp4": Spelled("mxfp4", 4, 32),
    "mxfp8": Spelled("mxfp8", 8, 32),
    "nvfp4": Spelled("nvfp4", 4, 16),
    "nvfp4-of-experts": Spelled("nvfp4", 4, 16, of_experts=True),
    "mixed": Spelled("mxfp4", 4, 32, own={"down_proj": {"group_size": 32, "bits": 5}, "v_proj": False, "o_proj": True}),
}


def packed(codes: Tensor, bits: int) -> Tensor:
    """Codes `[..., n]` as U32, each row one integer with the first code in its lowest bits."""
    rows = [sum(code << bits * place for place, code in enumerate(row)) for row in codes.flatten(0, -2).tolist()]
    size = codes.shape[-1] * bits // 8
    data = b"".join(row.to_bytes(size, "little") for row in rows)
    return torch.frombuffer(bytearray(data), dtype=torch.uint32).view(*codes.shape[:-1], size // 4)


def coded(shape: tuple[int, ...], spelled: Spelled, generator: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """What is stored of a weight `[..., out, in]`, and its values, BF16."""
    bits, grid = spelled.bits, (*shape[:-1], shape[-1] // spelled.group)

    def every(each: Tensor) -> Tensor:
        return each.double().repeat_interleave(spelled.group, -1)

    codes = torch.randint(0, 1 << bits, shape, generator=generator)
    if spelled.mode == "affine":
        scales = (torch.rand(grid, generator=generator) * 0.01 + 0.001).to(spelled.scales)
        biases = (torch.randint(-255, 0, grid, generator=generator) / 4096).to(spelled.scales)
        products = (codes * every(scales)).to(spelled.scales)
        values = (products.double() + every(biases)).to(spelled.scales).bfloat16()
        return {"weight": packed(codes, bits), "scales": scales, "biases": biases}, values
    if bits == 8:
        codes = codes.where(codes & 127 != 127, 0)  # NaN
        numbers = codes.to(torch.uint8).view(torch.float8_e4m3fn).double()
    else:
        numbers = torch.tensor(E2M1).double()[codes]
    stored = {"weight": packed(codes, bits)}
    if spelled.mode == "nvfp4":
        stored["scales"] = torch.randint(1, 127, grid, generator=generator).to(torch.uint8)
        by = stored["scales"].view(torch.float8_e4m3fn).float()
        if spelled.of_experts:
            stored["global_scale"] = torch.rand(shape[:1], generator=generator)
            by = by * (stored["global_scale"] / 2688)[:, None, None]  # in FP32
    else:
        stored["scales"] = torch.randint(100, 130, grid, generator=generator).to(torch.uint8)
        by = 2.0 ** (stored["scales"].double() - 127)
    return stored, (numbers * every(by)).float().bfloat16()


FC = {"up_proj": "fc1", "down_proj": "fc2"}


def rename(tensors: dict[str, Tensor]) -> None:
    """Give a model's tensors the names and shapes that mlx-lm gives those of Qwen3-MoE, Nemotron-H and Mamba-2."""
    stacks = dict[str, list[Tensor]]()
    for name in sorted(tensors, key=in_order):
        before, at, after = name.partition(".experts.")
        if at:
            _, matrix, kind = after.split(".")
            matrix = FC[matrix] if before.endswith("mixer") else matrix
            stacks.setdefault(f"{before}.switch_mlp.{matrix}.{kind}", []).append(tensors.pop(name))
        elif name.endswith("conv1d.weight"):
            tensors[name] = tensors[name].movedim(1, 2).contiguous()
    tensors.update({name: torch.stack(parts) for name, parts in stacks.items()})


def make(directory: Path, spelling: str, family: str = "llama-3", **sizes: Any) -> dict[str, Tensor]:
    """Save a small model of which all matrices are codes, as far as they have whole groups. Returns what these decode
    to, BF16, by the names of published files."""
    spelled, generator = SPELLINGS[spelling], torch.Generator().manual_seed(1)
    pico.save(directory, family, dtype=torch.bfloat16, **SIZES | {"intermediate_size": 128} | sizes)
    file, values, own = directory / "model.safetensors", dict[str, Tensor](), dict[str, Any]()
    tensors = load_file(file)
    rename(tensors)
    for name, tensor in list(tensors.items()):
        module = name.removesuffix(".weight")
        said = next((said for part, said in spelled.own.items() if part in name), True)
        if said is not True:
            own[module] = said
        stack = tensor.dim() == 3 and "switch_mlp" in name
        if said is False or tensor.dim() != 2 + stack or tensor.shape[-1] % spelled.group:
            continue
        how = spelled if said is True else Spelled("affine", said["bits"], said["group_size"])
        if not stack and how.of_experts:
            how = SPELLINGS["nvfp4"]
        stored, decoded = coded(tuple(tensor.shape), how, generator)
        tensors |= {f"{module}.{kind}": each for kind, each in stored.items()}
        for number, one in enumerate(decoded if stack else decoded[None]):
            values[name.replace("switch_mlp", f"experts.{number}")] = one
    save_file(tensors, file, {"format": "mlx"})
    path, quantization = directory / "config.json", spelled.settings | own
    said = {"quantization": quantization, "quantization_config": quantization}
    path.write_text(json.dumps(json.loads(path.read_text()) | said))
    return values


def in_order(name: str) -> tuple[int | str, ...]:
    """Layers and experts by their numbers."""
    return tuple(int(part) if part.isdigit() else part for part in name.split("."))
