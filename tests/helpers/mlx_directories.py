"""Directories as mlx-lm quantizes and saves them, by a slow writer of its own.

Random codes under random scales. Rows are packed as one long integer; what they are worth is computed in FP64, which
holds every product and sum here, and rounded where MLX rounds.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pico
import torch
from coded_directories import SIZES
from safetensors.torch import load_file, save_file
from torch import Tensor

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


W = {".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."}
OTHERS = {
    "exaone_moe": {".mlp.e_score": ".mlp.gate.e_score"},
    "laguna": {".experts.e_score": ".gate.e_score", ".gate.weight": ".gate.proj.weight"},
    **dict.fromkeys(("lfm2_moe", "minimax_m3_vl_text", "mixtral"), W),
    "bailing_moe": {".mlp.gate.weight": ".mlp.gate.gate_proj.weight"},
    "gpt_neox": {"gpt_neox.layers.": "model.h.", "gpt_neox.": "model.", "embed_out.": "model.embed_out."},
    "gptj": {"transformer.": "model."},
    "gemma3n_text": {"model.": "model.language_model."},
    "step3p5": {
        ".moe.gate.": ".mlp.gate.gate.",
        ".moe.router": ".mlp.gate.router",
        ".moe.": ".mlp.switch_mlp.",
        ".share_": ".mlp.share_",
    },
    "kimi_linear": {"block_sparse_moe.gate.e_": "mlp.e_", "block_sparse_moe.": "mlp.", "_conv1d.": "_conv.conv."} | W,
}
"""Parts of names that are others, by `model_type`."""
FC = {"up_proj": "fc1", "down_proj": "fc2"}
PLUS_ONE = re.compile(r"(.+(input_layernorm|post_attention_layernorm|[qk]_norm)|model\.norm)\.weight")


def rename(tensors: dict[str, Tensor], config: Mapping[str, Any]) -> None:
    """Give a model's tensors the names, shapes and values that mlx-lm gives them, as far as its family needs."""
    family, stacks = config["model_type"], dict[str, list[Tensor]]()
    for published_name in sorted(tensors, key=in_order):
        name = published_name
        for part, other in OTHERS.get(family, {}).items():
            name = name.replace(part, other)
        tensors[name] = tensors.pop(published_name)
        before, at, after = name.partition(".experts.")
        if at and family == "gpt_oss":
            rename_gpt_oss(tensors, name)
        elif at and after in ("gate_up_proj", "down_proj"):
            rename_joined(tensors, name, family)
        elif at:
            _, matrix, kind = after.split(".")
            matrix = FC[matrix] if before.endswith("mixer") else matrix
            stacks.setdefault(f"{before}.switch_mlp.{matrix}.{kind}", []).append(tensors.pop(name))
        elif name.endswith(("conv1d.weight", "conv.weight")):
            tensors[name] = tensors[name].movedim(1, 2).contiguous()
        elif name.endswith("kv_b_proj.weight"):
            cut_heads(tensors, name, config)
        elif name.endswith("input_linear.weight"):
            names = ("mlp.{}", "shared_mlp") if "shared" in name else ("switch_mlp.{}", "")
            gate, up = tensors.pop(name).chunk(2, -2)
            for matrix, each in (("gate_proj", gate), ("up_proj", up)):
                path = name.replace(names[1], "").replace("..", ".") if names[1] else name
                tensors[path.replace("input_linear", names[0].format(matrix))] = each.contiguous()
        elif name.endswith("output_linear.weight"):
            path = name.replace("shared_mlp.output_linear", "mlp.down_proj")
            tensors[path.replace("output_linear", "switch_mlp.down_proj")] = tensors.pop(name)
        elif family in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "step3p5") and PLUS_ONE.fullmatch(name):
            tensors[name] = tensors[name] + 1
    tensors.update({name: torch.stack(parts) for name, parts in stacks.items()})


STACKS_OF_JOINED = {"gemma4_text": "experts.switch_glu", "llama4_text": "experts"}


def rename_joined(tensors: dict[str, Tensor], name: str, family: str) -> None:
    """Experts that published files have in one tensor: of Llama 4 and Qwen3-VL `[experts, in, out]`."""
    tensor, (before, _, matrix) = tensors.pop(name), name.rpartition(".experts.")
    tensor = tensor.mT if family in ("llama4_text", "qwen3_vl_moe_text") else tensor
    path = f"{before}.{STACKS_OF_JOINED.get(family, 'switch_mlp')}"
    names = ("gate_proj", "up_proj") if matrix == "gate_up_proj" else (matrix,)
    parts = zip(names, tensor.chunk(len(names), 1), strict=True)
    tensors |= {f"{path}.{part}.weight": each.contiguous() for part, each in parts}


def rename_gpt_oss(tensors: dict[str, Tensor], name: str) -> None:
    """Rows of gate and up alternate in published files, whose matrices are `[in, out]`."""
    tensor, kind = tensors.pop(name), ".bias" if name.endswith("_bias") else ".weight"
    tensor = tensor if kind == ".bias" else tensor.mT.contiguous()
    path = name.removesuffix("_bias")
    if path.endswith("down_proj"):
        tensors[path + kind] = tensor
    else:
        tensors[path.replace("gate_up", "gate") + kind] = tensor[:, ::2].contiguous()
        tensors[path.replace("gate_up", "up") + kind] = tensor[:, 1::2].contiguous()


def cut_heads(tensors: dict[str, Tensor], name: str, config: Mapping[str, Any]) -> None:
    """The keys' rows of each head, turned, and the values'."""
    keys, values = config["qk_nope_head_dim"], config["v_head_dim"]
    heads = tensors.pop(name).view(config["num_attention_heads"], keys + values, -1)
    tensors[name.replace("kv_b_proj", "embed_q")] = heads[:, :keys].mT.contiguous()
    tensors[name.replace("kv_b_proj", "unembed_out")] = heads[:, keys:].contiguous()


def published(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Values of matrices and stacks by the names of published files: of experts, of heads, and of gpt-oss."""
    found = dict[str, Tensor]()
    for name, value in values.items():
        other = values.get(name.replace("embed_q", "unembed_out").replace("gate_proj", "up_proj"), value)
        if ".switch_mlp." in name:
            path = name.replace("fc1", "up_proj").replace("fc2", "down_proj")
            found |= {path.replace("switch_mlp", f"experts.{n}"): each for n, each in enumerate(value)}
        elif ".embed_q." in name:
            heads = [torch.cat([keys.t(), rest]) for keys, rest in zip(value, other, strict=True)]
            found[name.replace("embed_q", "kv_b_proj")] = torch.cat(heads)
        elif ".experts.gate_proj." in name:
            pairs = [torch.stack(pair, 1).flatten(0, 1) for pair in zip(value, other, strict=True)]
            path = name.replace("gate_proj.weight", "gate_up_proj_blocks")
            found |= {f"{path}[{n}]": each for n, each in enumerate(pairs)}
        elif ".experts.down_proj." in name:
            path = name.replace("down_proj.weight", "down_proj_blocks")
            found |= {f"{path}[{n}]": each for n, each in enumerate(value)}
        elif ".unembed_out." not in name and ".experts.up_proj." not in name:
            found[name] = value
    return found


def make(directory: Path, spelling: str, family: str = "llama-3", **sizes: Any) -> dict[str, Tensor]:
    """Save a small model of which all matrices are codes, as far as they have whole groups. Returns what these decode
    to, BF16, by the names of published files."""
    spelled, generator = SPELLINGS[spelling], torch.Generator().manual_seed(1)
    pico.save(directory, family, dtype=torch.bfloat16, **SIZES | {"intermediate_size": 128} | sizes)
    file, values, own = directory / "model.safetensors", dict[str, Tensor](), dict[str, Any]()
    path, tensors = directory / "config.json", load_file(file)
    config = json.loads(path.read_text())
    rename(tensors, config)
    for name, tensor in list(tensors.items()):
        module = name.removesuffix(".weight")
        said = next((said for part, said in spelled.own.items() if part in name), True)
        if said is not True:
            own[module] = said
        matrix = name.endswith(".weight") and tensor.dim() > 1 and "conv1d" not in name
        if said is False or not matrix or tensor.shape[-1] % spelled.group:
            continue
        how = spelled if said is True else Spelled("affine", said["bits"], said["group_size"])
        if tensor.dim() == 2 and how.of_experts:
            how = SPELLINGS["nvfp4"]
        stored, values[name] = coded(tuple(tensor.shape), how, generator)
        tensors |= {f"{module}.{kind}": each for kind, each in stored.items()}
    save_file(tensors, file, {"format": "mlx"})
    said = {"quantization": spelled.settings | own}
    if spelling == "affine-4":  # as mlx-lm wrote it before 2025
        del said["quantization"]["mode"]
    else:
        said["quantization_config"] = said["quantization"]
    path.write_text(json.dumps(config | said))
    return published(values)


def in_order(name: str) -> list[tuple[int, str]]:
    """Layers and experts by their numbers."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
