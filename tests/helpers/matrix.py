"""Every spelling and scheme that exports are written in, for a family of each kind; made once, for all who judge."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import in_memory
import pico
import torch
from safetensors.torch import load_file, save_file

from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.engines.base import engines
from precisionctl.quant_methods.base import FOUR_BITS

_WRITTEN = sorted({(method, scheme) for engine in engines().values() for scheme, method in engine.spells.items()})
SPELLINGS = [(method, scheme) for method, scheme in _WRITTEN if scheme not in FOUR_BITS]
"""Pairs of method and scheme, of FP8; tests/export/test_four_bit_exports.py has the others."""

_WHOLE = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "moe_intermediate_size": 128}
_LATENT = {"q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "kv_lora_rank": 32, "v_head_dim": 32}
_WHOLE_LATENT = {"q_lora_rank": 128, "qk_rope_head_dim": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 64}

FAMILIES = ("llama-3", "qwen3", "mixtral", "qwen3-moe", "deepseek-v3")


def sizes(family: str, scheme: str) -> dict[str, Any]:
    """Changes to a pico model of which every linear can be codes: of whole blocks, for those."""
    if family == "deepseek-v3":
        return _WHOLE | _WHOLE_LATENT | {"v_head_dim": 64, "head_dim": 128} if scheme == "block" else _LATENT
    return _WHOLE if scheme == "block" else {"moe_intermediate_size": 64}


def make(root: Path, family: str, method: str, scheme: str) -> Path:
    """A directory of FP8 codes, with scales of inputs that were recorded where those are fixed."""
    source, made = root / f"{family}-{scheme == 'block'}", root / f"{family}-{method}-{scheme}"
    if not source.is_dir():
        pico.save(source, family, dtype=torch.bfloat16, **sizes(family, scheme))
    if not made.is_dir():
        in_memory.export(in_memory.with_state(HuggingFaceReader(source)), made, method, scheme)
    return made


Tensors = dict[str, torch.Tensor]
Quantization = dict[str, Any]


@dataclass(frozen=True)
class Changed:
    """A Llama in a spelling, of which something is changed: its tensors, and its `quantization_config`, in place."""

    method: str
    scheme: str
    change: Callable[[Tensors, Quantization], None]


def make_changed(root: Path, name: str) -> Path:
    """The directory of one of CHANGES."""
    case = CHANGES[name]
    directory = shutil.copytree(make(root, "llama-3", case.method, case.scheme), root / name.replace(" ", "-"))
    tensors = load_file(directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    case.change(tensors, config["quantization_config"])
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def _per_tensor(tensors: Tensors, quantization: Quantization) -> None:
    """`quant_method: fp8` with a scale for a tensor and its input, under vLLM's names."""
    ignored = quantization["ignore"]
    quantization.clear()
    quantization.update(quant_method="fp8", activation_scheme="static", modules_to_not_convert=ignored)
    quantization["weight_block_size"] = None
    _reshape(tensors, "_scale", lambda scale: scale.reshape(()))


def _for_transformers(tensors: Tensors, quantization: Quantization) -> None:
    _per_tensor(tensors, quantization)
    for name in [name for name in tensors if name.endswith("_scale")]:
        other = "activation_scale" if name.endswith("input_scale") else "weight_scale_inv"
        tensors[f"{name.rpartition('.')[0]}.{other}"] = tensors.pop(name)


def _reshape(tensors: Tensors, end: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for name in [name for name in tensors if name.endswith(end)]:
        tensors[name] = change(tensors[name]).contiguous()


def _renamed(tensors: Tensors, old: str, new: str) -> None:
    """Another end of names."""
    for name in [name for name in tensors if name.endswith(old)]:
        tensors[name.removesuffix(old) + new] = tensors.pop(name)


def _left_out(pattern: str, *entries: str, key: str = "ignore") -> Callable[[Tensors, Quantization], None]:
    """Linears whose weights become BF16, and what the list says of them."""

    def change(tensors: Tensors, quantization: Quantization) -> None:
        for name in [name for name in tensors if re.fullmatch(pattern, name.removesuffix(".weight"))]:
            stem = name.removesuffix("weight")
            scale = tensors.pop(f"{stem}weight_scale_inv", None)
            if scale is None:
                scale = tensors.pop(f"{stem}weight_scale")
            tensors.pop(f"{stem}input_scale", None)
            rows, columns = tensors[name].shape
            grid = scale.reshape(len(scale) if scale.ndim else 1, -1)
            grid = grid.repeat_interleave(rows // grid.shape[0], 0).repeat_interleave(columns // grid.shape[1], 1)
            tensors[name] = (tensors[name].float() * grid).bfloat16()
        quantization[key] = [*quantization[key], *entries]

    return change


def _unsaid(key: str) -> Callable[[Tensors, Quantization], None]:
    return lambda tensors, quantization: quantization.pop(key)


def _unlisted_head(tensors: Tensors, quantization: Quantization) -> None:
    quantization["ignore"] = [entry for entry in quantization["ignore"] if "head" not in entry]


def _two_kinds(*targets: str, swapped: bool = False) -> Callable[[Tensors, Quantization], None]:
    """Attention as it was, with scales of channels, MLPs with one for a weight and one for its input; in groups with
    these targets, `swapped` if the first is of MLPs."""

    def change(tensors: Tensors, quantization: Quantization) -> None:
        for name in [name for name in tensors if ".mlp." in name and name.endswith(".weight")]:
            module = name.removesuffix(".weight")
            values = tensors[name].float() * tensors[f"{module}.weight_scale"]
            tensors[name] = (values * 1024).to(torch.float8_e4m3fn)
            tensors[f"{module}.weight_scale"] = torch.tensor([1 / 1024])
            tensors[f"{module}.input_scale"] = torch.tensor([2.0**-6])
        (channels,) = quantization["config_groups"].values()
        tensor = {key: each | {"strategy": "tensor", "dynamic": False} for key, each in channels.items() if "_" in key}
        tensor["weights"] = channels["weights"] | {"strategy": "tensor"}
        kinds = (tensor, channels) if swapped else (channels, tensor)
        groups = zip(targets, kinds, strict=True)
        quantization["config_groups"] = {target: kind | {"targets": [target]} for target, kind in groups}

    return change


def _layers_by(*attention: str) -> Callable[[Tensors, Quantization], None]:
    """What ModelOpt says of layers of several algorithms: a name for each linear of MLPs, and these of attention."""

    def change(tensors: Tensors, quantization: Quantization) -> None:
        coded = {name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")}
        named = [name for name in coded if ".mlp." in name]
        named += [f"model.layers.{layer}.self_attn{each}" for layer in range(2) for each in attention]
        del quantization["config_groups"]
        layers = {name: {"quant_algo": "FP8"} for name in sorted(named)}
        quantization |= {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "ignore": []}

    return change


NOT = "modules_to_not_convert"
CHANGES = {
    "fp8 per tensor under the names of vLLM": Changed("compressed-tensors", "static", _per_tensor),
    "fp8 per tensor under the names of transformers": Changed("compressed-tensors", "static", _for_transformers),
    "scales of no dimension": Changed(
        "compressed-tensors", "static", lambda t, q: _reshape(t, "_scale", lambda scale: scale.reshape(()))
    ),
    "channels of one dimension": Changed(
        "compressed-tensors", "dynamic", lambda t, q: _reshape(t, "_scale", lambda scale: scale.reshape(-1))
    ),
    "BF16 scales": Changed("compressed-tensors", "dynamic", lambda t, q: _reshape(t, "_scale", torch.Tensor.bfloat16)),
    "exponents under ModelOpt's name": Changed("mxfp8", "mxfp8", lambda t, q: _renamed(t, "_inv", "")),
    "no activation scheme": Changed("fp8", "block", _unsaid("activation_scheme")),
    "blocks without block size": Changed("fp8", "block", _unsaid("weight_block_size")),
    "left out by a part of its name": Changed(
        "fp8", "block", _left_out(r".*\.1\.mlp\.down_proj", "layers.1.mlp.down_proj", key=NOT)
    ),
    "left out by a pattern": Changed("compressed-tensors", "dynamic", _left_out(r".*down_proj", r"re:.*down_proj$")),
    "left out by no name": Changed("compressed-tensors", "dynamic", _left_out(r".*\.1\.mlp\.down_proj")),
    "codes that are left out": Changed("compressed-tensors", "dynamic", _left_out(r"none", "re:.*mlp.*")),
    "some of a fused group left out": Changed(
        "compressed-tensors", "dynamic", _left_out(r".*\.1\..*k_proj", "model.layers.1.self_attn.k_proj")
    ),
    "a head that no list names": Changed("compressed-tensors", "dynamic", _unlisted_head),
    "a head that no list of ModelOpt names": Changed("modelopt", "static", _unlisted_head),
    "several kinds": Changed("compressed-tensors", "dynamic", _two_kinds("re:.*self_attn.*", "re:.*mlp.*")),
    "several kinds under the names of the others": Changed(
        "compressed-tensors", "dynamic", _two_kinds("re:.*self_attn.*", "re:.*mlp.*", swapped=True)
    ),
    "several kinds of which one is all that is left": Changed(
        "compressed-tensors", "dynamic", _two_kinds("re:.*self_attn.*", "Linear")
    ),
    "several kinds under the names of parts": Changed(
        "compressed-tensors", "dynamic", _two_kinds(r"re:.*\.(q|k|v|o)_proj$", "Linear")
    ),
    "several kinds of which two patterns mean one": Changed(
        "compressed-tensors", "dynamic", _two_kinds("re:.*self_attn.*", "re:.*layers.*")
    ),
    "layers of ModelOpt by name": Changed("modelopt", "static", _layers_by(".q_proj", ".k_proj", ".v_proj", ".o_proj")),
    "layers of ModelOpt by a path": Changed("modelopt", "static", _layers_by("")),
}
"""What the checker and the engines have to agree about, beside what we write."""
