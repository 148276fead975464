"""The global scales of NVFP4, which are tensors of their own: `<module>.scale` beside `<module>.weight`, FP32 `[1]`, or
`[experts]` beside a stack; none is 1. `<module>.input_scale` is the one of the module's inputs, which llama.cpp reads
and computes nothing with.

Source: llama.cpp's src/llama-model.cpp (load_tensors) and conversion/base.py (_generate_nvfp4_tensors).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from precisionctl.checkpoints.chunks import read_tensor
from precisionctl.checkpoints.gguf.head import GgufTensor
from precisionctl.checkpoints.hf_directory.encodings_file import WeightEncodings
from precisionctl.dtypes import DType
from precisionctl.errors import DamagedCheckpoint
from precisionctl.param import stack_and_slice

if TYPE_CHECKING:
    from numpy.typing import NDArray

_WEIGHT, SCALE, INPUT_SCALE = ".weight", ".scale", ".input_scale"


def scales_of(weight: str) -> tuple[str, str]:
    """The names that the scales of a weight have, and of its inputs."""
    module = weight.removesuffix(_WEIGHT)
    return module + SCALE, module + INPUT_SCALE


def is_scale(name: str, tensors: Mapping[str, GgufTensor]) -> bool:
    """Whether a tensor is a scale of NVFP4 codes, or of their inputs, by its name: a family may have another tensor of
    this name."""
    module, dot, end = name.rpartition(".")
    weight = tensors.get(module + _WEIGHT)
    return dot + end in (SCALE, INPUT_SCALE) and weight is not None and weight.format.has_global_scale


def global_scales(weight: str, scales: Mapping[str, GgufTensor], count: int, where: object) -> list[float]:
    """The global scales of a weight, or of so many slices of it, from the `scales` of all. Raises DamagedCheckpoint for
    others than it can have."""
    name, _ = scales_of(weight)
    if (tensor := scales.get(name)) is None:
        return [1.0] * count
    if tensor.format.dtype != DType.float32 or tensor.shape != (count,):
        what = f"`{name}` is {tensor.format.name} {list(tensor.shape)}, and `{weight}` has F32 [{count}]"
        raise DamagedCheckpoint(what, where=where)
    with open(tensor.file, "rb") as file:
        file.seek(tensor.offset)
        numbers = np.frombuffer(file.read(tensor.nbytes), "<f4")
    if not np.isfinite(numbers).all():
        raise DamagedCheckpoint(f"`{name}` holds a scale that is infinite or NaN", where=where)
    found: list[float] = numbers.tolist()
    return found


def scale_tensors(kept: Mapping[str, str], encodings: WeightEncodings) -> dict[str, NDArray[np.float32]]:
    """The scales of weights in a file, or of slices of stacks, that are `kept` of the source under other names. Raises
    DamagedCheckpoint for one that is infinite or NaN."""
    found = dict[str, list[float]]()
    for name, source in kept.items():
        of_weight, of_inputs = scales_of(stack_and_slice(name)[0])
        scales = encodings.scales[source]
        whole = None if scales.global_scale is None else read_tensor(encodings.stored, scales.global_scale)
        for made, stored in ((of_weight, whole), (of_inputs, encodings.stored_input_scale(source))):
            number = 1.0 if stored is None else float(1 / stored.float() if scales.divides else stored.float())
            if not math.isfinite(number):
                raise DamagedCheckpoint(f"the global scale of `{source}` makes no sense", where=encodings.path)
            found.setdefault(made, []).append(number)
    tensors = {name: np.array(numbers, np.float32) for name, numbers in found.items()}
    return {name: numbers for name, numbers in tensors.items() if (numbers != 1).any()}
