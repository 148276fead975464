"""Experts that Hugging Face stores as one tensor: `mlp.experts.gate_up_proj` of shape `[experts, ...]`, in Granite
`block_sparse_moe.input_linear.weight`, in Inkling `mlp.experts.w13_weight`, in Step 3.5 `moe.gate_proj.weight`;
torchtitan does so in all families.

Logical tensors are one per expert, so such a tensor is read as its slices `name[0]`, `name[1]`, ..., each of which is
contiguous. So are the scales of a hyper-connection (DeepSeek-V4, Hunyuan 4), which Megatron has one by one. In MXFP4,
as gpt-oss has it, `experts.gate_up_proj_blocks` is bytes `[experts, rows, columns / 32, 16]` with two E2M1 codes each,
and `..._scales` beside it has one byte for each block of 32 (`quant_methods/mxfp4.py`).
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from precisionctl.checkpoints.hf_directory.safetensors_file import Places, StoredTensor
from precisionctl.dtypes import DType
from precisionctl.errors import DamagedCheckpoint, ShapeMismatch
from precisionctl.param import TensorSpec
from precisionctl.quant_methods.mxfp4 import BLOCKS_OF_16

_SCALES_OF_STREAMS = r"hc_(?:attn|ffn)_scale|(?:attn|ffn)_hc\.scale|hc_(?:attn|mlp)_layer\.(?:hc_pre\.)?hc_scale"
_OF_TORCHTITAN = r"moe\.(?:routed_experts\.inner_)?experts\.(?:w[123]|mlp[12]_(?:weight|bias))(?:_E[DFG]{1,2})?"
_OF_GRANITE = r"block_sparse_moe\.(?:input|output)_linear\.weight"
_STACKS = (
    (1, rf"experts\.(?:[a-z_]*_scale(?:_inv)?|w(?:13|2)_weight_scale)|{_SCALES_OF_STREAMS}"),
    (2, rf"experts\.(?:[a-z_]+|w(?:13|2)_weight)|{_OF_GRANITE}|{_OF_TORCHTITAN}"),
    (3, r"moe\.(?:gate|up|down)_proj\.weight(?:_scale_inv)?"),  # Step 3.5's; in others one MLP may have this name
)
"""The fewest dimensions of a stack, and how its name ends: tensors so named with fewer are no stacks."""
_BY_DIMENSIONS = tuple((fewest, re.compile(rf".+\.(?:{ends})")) for fewest, ends in _STACKS)
_SLICE = re.compile(rf"(.+\.(?:{'|'.join(ends for _, ends in _STACKS)}))\[(\d+)\]")

_MOST_SLICES = 1 << 18
"""Most experts in one file. All of DeepSeek-V3 has 3 x 10^4, but a header of a few bytes can claim any number."""


def sliced(tensors: Mapping[str, StoredTensor], where: object) -> dict[str, StoredTensor]:
    """The logical tensors of a file: stacks of experts replaced by their slices. Raises as `stacks`."""
    found: dict[str, StoredTensor] = {}
    fused = stacks({name: tensor.spec for name, tensor in tensors.items()}, where)
    for name, tensor in tensors.items():
        if name not in fused:
            found[name] = tensor
            continue
        spec = TensorSpec(tensor.spec.shape[1:], tensor.spec.dtype)
        for expert in range(tensor.spec.rows):
            found[f"{name}[{expert}]"] = StoredTensor(spec, tensor.offset + expert * spec.nbytes)
    return found


def stacks(stored: Mapping[str, TensorSpec], where: object) -> set[str]:
    """The stored tensors that are stacks of experts. Raises DamagedCheckpoint for more experts than any model has, for
    none, and for a tensor that is named like a slice, which is another one to a Reader."""
    found = {name for name, spec in stored.items() if is_stack(name, spec)}
    if sum(stored[name].shape[0] for name in found) > _MOST_SLICES:
        raise DamagedCheckpoint(f"more than {_MOST_SLICES} experts", where=where)
    if empty := [name for name in found if not stored[name].shape[0]]:
        raise DamagedCheckpoint(f"`{min(empty)}` is a stack of no experts", where=where)
    if posing := [name for name in stored if _SLICE.fullmatch(name)]:
        raise DamagedCheckpoint(f"`{posing[0]}` is named as a slice of another tensor", where=where)
    return found


def is_stack(name: str, spec: TensorSpec) -> bool:
    """Whether dimension 0 of a tensor is experts: it is in matrices of theirs, and in scales if each has one."""
    return any(len(spec.shape) >= fewest and ends.fullmatch(name) for fewest, ends in _BY_DIMENSIONS)


def stored_name(name: str) -> tuple[str, int | None]:
    """The stored tensor that holds a logical one, and which slice of it: the inverse of `sliced`."""
    match = _SLICE.fullmatch(name)
    return (match[1], int(match[2])) if match else (name, None)


def stacked(
    specs: Mapping[str, TensorSpec], stored_name: Callable[[str], tuple[str, int | None]] = stored_name
) -> dict[str, TensorSpec]:
    """The stored tensors for these logical ones, with slices stacked; in the order of the first slices. `stored_name`
    says which are slices.

    Raises ShapeMismatch where slices are missing or differ in shape or dtype.
    """
    slices: dict[str, dict[int, TensorSpec]] = {}
    found: dict[str, TensorSpec] = {}
    for name, spec in specs.items():
        stored, index = stored_name(name)
        found.setdefault(stored, spec)
        if index is not None:
            slices.setdefault(stored, {})[index] = spec
    for stored, parts in slices.items():
        if parts.keys() != set(range(len(parts))) or len(set(parts.values())) != 1:
            raise ShapeMismatch(f"the slices of `{stored}` do not make one tensor")
        found[stored] = replace(parts[0], shape=(len(parts), *parts[0].shape))
    return found


def stored_tensor(name: str, spec: TensorSpec) -> tuple[str, TensorSpec]:
    """The name and spec in a file of a logical tensor; for packed codes, those of the words that hold them."""
    packing = spec.packing
    if packing is None:
        return name, spec
    return f"{name}{packing.suffix}", TensorSpec(packing.shape(spec.rows, spec.columns), packing.word)


_BLOCKS = re.compile(r"(.+\.experts\.[a-z_]+)_blocks(\[\d+\])")
_BYTES = BLOCKS_OF_16.block


def unpacked(places: Places) -> Places:
    """The tensors of a directory by name, with the MXFP4 blocks of an expert described as its matrix of codes
    `[rows, columns]`, packed.

    Raises DamagedCheckpoint for blocks or scales that are not uint8, and for blocks of another shape.
    """
    found = dict(places)
    for name, (file, stored) in places.items():
        match = _BLOCKS.fullmatch(name)
        if match is None:
            continue
        scales = places.get(f"{match[1]}_scales{match[2]}")
        for kind, spec in ((name, stored.spec), (f"{match[1]}_scales", scales[1].spec if scales else None)):
            if spec is not None and spec.dtype != DType.uint8:
                raise DamagedCheckpoint(f"`{kind}` is {spec.dtype}; MXFP4 is made of bytes", where=file)
        shape = stored.spec.shape
        if len(shape) != 3 or shape[2] != _BYTES:
            what = f"`{name}` is {list(shape)}; blocks of MXFP4 are [rows, columns / 32, {_BYTES}]"
            raise DamagedCheckpoint(what, where=file)
        codes = TensorSpec((shape[0], 2 * _BYTES * shape[1]), DType.uint8, packing=BLOCKS_OF_16)
        found[name] = file, replace(stored, spec=codes)
    return found
