"""Write a directory as mlx-lm saves them: stacks of experts, and codes, scales and biases apart."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from precisionctl.checkpoints.base import Companions
from precisionctl.checkpoints.chunks import Box, Chunk
from precisionctl.checkpoints.hf_directory.config_json import config_of_values, write_beside
from precisionctl.checkpoints.hf_directory.fused_experts import stacked
from precisionctl.checkpoints.hf_directory.huggingface_files import MAX_SHARD_SIZE, MLX_SAFETENSORS, WeightFiles
from precisionctl.checkpoints.mlx.mlx_config import as_mlx_reads
from precisionctl.codes.mlx_groups import MlxGroups
from precisionctl.fp8.state import Fp8States
from precisionctl.param import TensorSpec, stack_and_slice
from precisionctl.quant_methods.coded_weights import MLX_KEY


@dataclass(frozen=True)
class MlxWriter:
    """A directory of mlx-lm being built in `directory`. `specs` are its tensors, an expert's as a slice `name[expert]`
    of the stack that is stored. A row of codes is one of bytes, of which scales and biases are tensors of their own.

    `config` is what config.json says of the model where that of the `companions` lacks it, `words` what mlx-lm
    has others for, and `quantization` what is said of codes; empty if there are none. `extra_files` are beside it.
    """

    directory: Path
    specs: Mapping[str, TensorSpec]
    companions: Companions
    config: Mapping[str, Any]
    words: Mapping[str, Any]
    quantization: Mapping[str, Any]
    extra_files: Mapping[str, bytes] = field(default_factory=dict)
    max_shard_size: int = MAX_SHARD_SIZE

    @cached_property
    def _files(self) -> WeightFiles:
        stored = dict[str, TensorSpec]()
        for name, spec in stacked(self.specs, stack_and_slice).items():
            stored |= {part: each for part, each, _ in _parts(name, spec)}
        return WeightFiles(self.directory, stored, self.max_shard_size, MLX_SAFETENSORS)

    def lay_out(self) -> None:
        self._files.lay_out()

    def chunks(self, name: str) -> Sequence[Chunk]:
        stack, number = stack_and_slice(name)
        found = []
        for part, spec, box in _parts(stack, self.specs[name]):
            (stored,) = self._files.chunks(part)
            found.append(Chunk(box, stored.place, stored.offset + (number or 0) * spec.nbytes))
        return found

    def finish(self, fp8: Fp8States | None) -> None:
        files = {**self.companions.files, **self.extra_files}
        config = as_mlx_reads(config_of_values(self.companions, self.config, self.specs), self.config, self.words)
        if self.quantization:
            config |= {MLX_KEY: self.quantization, "quantization_config": self.quantization}
        self._files.write_index(of_one=True)
        write_beside(self.directory, replace(self.companions, files=files), config, fp8)


def _parts(name: str, spec: TensorSpec) -> list[tuple[str, TensorSpec, Box]]:
    """The stored tensors of a tensor, or of a stack of such: the name and spec of each, and which bytes of rows, or of
    one's values, it is."""
    if not isinstance(spec.packing, MlxGroups):
        return [(name, spec, Box(0, spec.rows, 0, spec.columns))]
    found, start, columns = [], 0, spec.shape[-1]
    repeated = spec.columns // columns  # of heads
    for kind, (dtype, count) in spec.packing.parts(columns).items():
        part = TensorSpec((*spec.shape[:-1], count), dtype)
        width = repeated * count * dtype.itemsize
        found.append((f"{name.removesuffix('weight')}{kind}", part, Box(0, spec.rows, start, width)))
        start += width
    return found
