"""Write GGUF files: everything before the tensors' bytes follows from names, shapes and types."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precisionctl.checkpoints.base import Companions
from precisionctl.checkpoints.chunks import Chunk, whole
from precisionctl.checkpoints.gguf.global_scales import scales_of
from precisionctl.checkpoints.gguf.head import MAGIC, VERSIONS, aligned, without_ones
from precisionctl.checkpoints.gguf.metadata_bytes import Metadata, metadata_bytes, string_bytes
from precisionctl.checkpoints.hf_directory.companions import write_companions
from precisionctl.checkpoints.hf_directory.fused_experts import stacked
from precisionctl.checkpoints.output import lay_out_file
from precisionctl.codes.elements import KeptCodes
from precisionctl.codes.ggml_formats import FORMATS
from precisionctl.dtypes import DType
from precisionctl.fp8.state import Fp8States
from precisionctl.param import TensorSpec, stack_and_slice

if TYPE_CHECKING:
    from numpy.typing import NDArray

_TYPES = {form.dtype or form.name: number for number, form in FORMATS.items()}
"""The numbers of tensor types, by dtype or by the name of the packing."""


_SET_LAST = ("general.quantization_version", "general.file_type")


def layer_and_name(name: str) -> tuple[int, str]:
    """By what llama.cpp sorts the tensors of a file that it loads (llama-model-loader.h, weight_name_comparer)."""
    layer = re.match(r"blk\.(\d+)", name)
    return int(layer[1]) if layer else -1, name


@dataclass(frozen=True)
class GgufContents:
    """What a GGUF file called `name` holds: metadata, and tensors: `specs` are those of the source, in the order of the
    file, an expert's as a slice `name[expert]` of the stack that is stored. Others are `made` without it, FP32: scales
    of codes that are kept stand behind these, which the file begins with, and others before all values. With
    `quantized` the head is as llama-quantize writes it: tensors by layer and name, without first dimensions of 1, and
    metadata that it sets itself behind all other."""

    name: str
    metadata: Metadata
    specs: Mapping[str, TensorSpec]
    made: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    quantized: bool = False

    @cached_property
    def metadata_bytes(self) -> bytes:
        last = _SET_LAST if self.quantized else ()
        ordered = [key for key in self.metadata if key not in last] + [*last]
        return metadata_bytes({key: self.metadata[key] for key in ordered})

    @cached_property
    def stored(self) -> dict[str, TensorSpec]:
        """The tensors of the file. Raises ShapeMismatch for slices that do not make one tensor."""
        made = {name: TensorSpec(values.shape, DType.float32) for name, values in self.made.items()}
        stored, found = stacked(self.specs, stack_and_slice), dict[str, TensorSpec]()
        for name in [name for name, spec in stored.items() if isinstance(spec.packing, KeptCodes)]:
            found[name] = stored[name]
            found |= {scale: made[scale] for scale in scales_of(name) if scale in made}
        found = found | made | stored
        return {name: found[name] for name in sorted(found, key=layer_and_name)} if self.quantized else found

    @cached_property
    def head(self) -> tuple[bytes, dict[str, int]]:
        """The bytes before all tensors, and each tensor's offset behind them."""
        offsets, at, infos = dict[str, int](), 0, bytearray()
        for name, spec in self.stored.items():
            shape = without_ones(spec.shape) if self.quantized else spec.shape
            infos += string_bytes(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
            infos += struct.pack("<IQ", _TYPES[spec.packing.name if spec.packing else spec.dtype], at)
            offsets[name] = at
            at += aligned(spec.nbytes)
        counts = struct.pack("<IQQ", VERSIONS[-1], len(offsets), len(self.metadata))
        head = MAGIC + counts + self.metadata_bytes + infos
        return head.ljust(aligned(len(head)), b"\0"), offsets


@dataclass(frozen=True)
class GgufWriter:
    """GGUF files being built in `directory`, whose tensors have different names, and the files `beside` them."""

    directory: Path
    files: Sequence[GgufContents]
    beside: Mapping[str, bytes] = field(default_factory=dict)

    @cached_property
    def specs(self) -> Mapping[str, TensorSpec]:
        return {name: spec for file in self.files for name, spec in file.specs.items()}

    @cached_property
    def _places(self) -> dict[str, Chunk]:
        places = {}
        for file in self.files:
            head, offsets = file.head
            for name, spec in file.specs.items():
                stack, number = stack_and_slice(name)
                at = len(head) + offsets[stack] + (number or 0) * spec.nbytes
                places[name] = Chunk(whole(spec), self.directory / file.name, at)
        return places

    def chunks(self, name: str) -> Sequence[Chunk]:
        return [self._places[name]]

    def lay_out(self) -> None:
        for file in self.files:
            head, offsets = file.head
            made = [(len(head) + offsets[name], values.tobytes()) for name, values in file.made.items()]
            length = len(head) + sum(aligned(spec.nbytes) for spec in file.stored.values())
            lay_out_file(self.directory / file.name, [(0, head), *made], length)

    def finish(self, fp8: Fp8States | None) -> None:
        write_companions(self.directory, Companions(self.beside))
