"""Directories that mlx-lm saved: their tensors under the names and in the shapes that published files have.

mlx-lm's `sanitize` stacks the experts of a layer, `mlp.switch_mlp.up_proj.weight` `[experts, out, in]`, and has the
channels of convolutions last. These bytes are only named otherwise here. Where it does more (absorbed projections of
latent attention, norms plus one, weights times multipliers), or where that was not looked at, codes are refused by the
`model_type`. Source: mlx-lm 0.32 (models/*.py, sanitize), run on a small model of each of `READ`.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from precisionctl.checkpoints.decoded.mlx_codes import METHOD
from precisionctl.checkpoints.fused_experts import MOST_SLICES
from precisionctl.checkpoints.safetensors_file import StoredTensor, read_described
from precisionctl.dtypes import DType
from precisionctl.errors import DamagedCheckpoint, PrecisionError, shown
from precisionctl.param import TensorSpec
from precisionctl.quant_methods.coded_weights import MLX_KEY

Places = dict[str, tuple[Path, StoredTensor]]

READ = frozenset(
    "afmoe apertus cohere cohere2 deepseek_v2 dots1 ernie4_5 exaone exaone4 gemma gemma2 gemma3_text glm glm4 glm4_moe "
    "gpt_bigcode granite helium hunyuan_v1_dense internlm3 iquestcoder jamba lfm2 llama mamba2 mellum minicpm3 "
    "minimax_m2 ministral3 mistral mixtral nemotron nemotron_h olmo2 olmo3 olmo_hybrid olmoe phi phi3 phimoe qwen2 "
    "qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open stablelm starcoder2".split()
)
"""The `model_type`s of which mlx-lm changes nothing else."""

_GATE_UP_DOWN = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
_STACKS: tuple[tuple[re.Pattern[str], Mapping[str, str]], ...] = (
    (re.compile(r"(.+\.mlp)\.(?:switch_mlp|experts)\.(gate_proj|up_proj|down_proj)\.(.+)"), {}),
    (re.compile(r"(.+\.feed_forward)\.switch_mlp\.(gate_proj|up_proj|down_proj)\.(.+)"), {}),
    (re.compile(r"(.+\.block_sparse_moe)\.switch_mlp\.(gate_proj|up_proj|down_proj)\.(.+)"), _GATE_UP_DOWN),
    (re.compile(r"(.+\.mixer)\.switch_mlp\.(fc1|fc2)\.(.+)"), {"fc1": "up_proj", "fc2": "down_proj"}),
)
"""Stacks of experts, and what published files call their matrices, if not the same."""
_CONVOLUTION = re.compile(r".+\.(?:[qkv]_conv1d|conv1d|conv)\.weight")
_NUMBER = re.compile(r".+\.act_fn\.alpha_[pn]")


def in_published_names(places: Places, config: Mapping[str, Any], where: object) -> tuple[Places, dict[str, Any]]:
    """The tensors of a directory by their published names, and as a `quantization_config` what config.json says of
    those that are codes. Both are as they were, and empty, where MLX did not make it.

    Raises PrecisionError for codes of a family whose tensors mlx-lm changes in other ways, DamagedCheckpoint for codes
    without `quantization`.
    """
    coded = next((name for name, (_, tensor) in places.items() if _is_coded(name, tensor, places)), None)
    if not (coded or _saved_by_mlx(places)):
        return places, {}
    family, said = config.get("model_type"), config.get(MLX_KEY)
    settings = said if isinstance(said, Mapping) else None
    if coded and settings is None:
        what = f"`{coded}` is codes of MLX, and `{MLX_KEY}` does not say which: {shown(said)}"
        raise DamagedCheckpoint(what, where=where, do="Copy config.json again.")
    if not isinstance(family, str) or family not in READ:
        if not coded:
            return places, {}
        raise PrecisionError(
            f"codes of MLX of a {shown(family)}, of which mlx-lm stores other tensors than published files have, or "
            "was not seen to store the same",
            where=where,
            do="Start from the release, or from what it was trained as with PyTorch.",
        )
    found: Places = {}
    names = dict[str, list[str]]()
    for name, (file, tensor) in places.items():
        published = _published(name, tensor, MOST_SLICES - len(found), file)
        names[name] = list(published)
        for each, placed in published.items():
            if each in found:
                raise DamagedCheckpoint(f"`{each}` is there, and is a part of a stack of experts too", where=file)
            found[each] = file, placed
    return found, {} if not coded or settings is None else _of_modules(settings, names) | {"quant_method": METHOD}


def _is_coded(name: str, tensor: StoredTensor, places: Places) -> bool:
    coded = name.endswith(".weight") and tensor.spec.dtype == DType.uint32
    return coded and f"{name.removesuffix('weight')}scales" in places


def _saved_by_mlx(places: Places) -> bool:
    """Whether a file's metadata say so. All of a directory's do."""
    file = next((file for file, _ in places.values()), None)
    return file is not None and file.suffix == ".safetensors" and read_described(file)[1].get("format") == "mlx"


def _published(name: str, tensor: StoredTensor, most: int, where: Path) -> dict[str, StoredTensor]:
    """What published files have in the place of a tensor: of a stack, at `most` so many."""
    shape = tensor.spec.shape
    if _CONVOLUTION.fullmatch(name) and len(shape) == 3 and shape[2] == 1:
        shape = (shape[0], 1, shape[1])
    elif _NUMBER.fullmatch(name) and not shape:
        shape = (1,)
    for pattern, others in _STACKS:
        match = pattern.fullmatch(name)
        if match is None or not shape:
            continue
        if not 0 < shape[0] <= most:
            raise DamagedCheckpoint(f"`{name}` is a stack of {shape[0]} experts", where=where)
        layer, matrix, kind = match.groups()
        spec = TensorSpec(shape[1:], tensor.spec.dtype)
        return {
            f"{layer}.experts.{expert}.{others.get(matrix, matrix)}.{kind}": StoredTensor(
                spec, tensor.offset + expert * spec.nbytes
            )
            for expert in range(shape[0])
        }
    return {name: replace(tensor, spec=TensorSpec(shape, tensor.spec.dtype))}


def _of_modules(said: Mapping[str, Any], names: Mapping[str, list[str]]) -> dict[str, Any]:
    """What `quantization` says, with modules by the names of their published tensors."""
    found = dict[str, Any]()
    for key, value in said.items():
        published = names.get(f"{key}.weight", [])
        found |= {name.removesuffix(".weight"): value for name in published} if published else {key: value}
    return found
