"""A LoRA adapter of mlx-lm, read as PEFT would have saved it.

`mlx_lm.lora` writes `adapters.safetensors` beside an adapter_config.json of its own: to `MODULE.weight` is added
`scale * (lora_a @ lora_b)^T`, of `MODULE.lora_a` `[in, rank]` and `MODULE.lora_b` `[rank, out]`; with DoRA, `MODULE.m`
`[out]` are the lengths that rows have then. Source: mlx-lm 0.32 (tuner/lora.py, tuner/dora.py, tuner/utils.py).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from precisionctl.checkpoints.adapter.lora_config import FILE, LARGEST_ALPHA, LoraConfig
from precisionctl.checkpoints.adapter.reader import MLX_FILE, PREFIX, AdapterReader, open_base
from precisionctl.checkpoints.adapter.tied import is_embedding
from precisionctl.checkpoints.base import Container, Hints, Reader, without_iterations
from precisionctl.checkpoints.chunks import Chunk, Chunked, whole
from precisionctl.checkpoints.computed_rows import TransposedRows
from precisionctl.checkpoints.hf_directory.huggingface_files import SAFETENSORS
from precisionctl.checkpoints.hf_directory.safetensors_file import StoredTensors
from precisionctl.checkpoints.mlx.mlx_names import is_known, within
from precisionctl.errors import DamagedCheckpoint, MappingError, UnknownFormat, at, shown
from precisionctl.param import TensorSpec
from precisionctl.untrusted.safe_files import check_file, read_json

_PARTS = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "m": "lora_magnitude_vector"}
"""What mlx-lm calls the tensors of a linear's adapter, and what PEFT does."""
_FUSE = "Fuse it with mlx-lm: `mlx_lm.fuse --model BASE --adapter-path ADAPTER --save-path OUT`, and give OUT."


def recognise(path: Path) -> bool:
    """A directory with mlx-lm's file of an adapter."""
    return (path / FILE).exists() and (path / MLX_FILE).exists()


def _open(path: Path, hints: Hints) -> AdapterReader:
    if (path / "config.json").exists():
        raise UnknownFormat(
            "a model and an adapter of mlx-lm in one directory, and nothing says whether the two are fused",
            where=path,
            do=f"If they are not, move {MLX_FILE} and {FILE} into a directory of their own, ADAPTER: `precisionctl "
            "convert ADAPTER OUT --to hf --reference MODEL`. If they are, the model without these two files is all.",
        )
    base = open_base(path, hints, "mlx-lm")

    said = read_json(path / FILE, path)
    kind = said.get("fine_tune_type", "lora")
    if kind not in ("lora", "dora"):
        what = f"fine_tune_type is {shown(kind)}; only lora and dora are read"
        raise MappingError(what, where=path / FILE, do=_FUSE)
    table = said.get("lora_parameters")
    settings: Mapping[str, Any] = table if isinstance(table, Mapping) else {}
    rank: Any = settings.get("rank")
    scale: Any = settings.get("scale")
    known = type(rank) is int and type(scale) in (int, float) and 0 < rank < 1 << 31
    if not (known and abs(scale) * rank < LARGEST_ALPHA):
        what = f"lora_parameters has the rank {shown(rank)} and the scale {shown(scale)}"
        raise DamagedCheckpoint(what, where=path / FILE)
    model = said.get("model")
    base_name = model if isinstance(model, str) else None
    config = LoraConfig(rank, scale * rank, dora=kind == "dora", base=base_name)

    file = path / MLX_FILE
    check_file(file, path)
    with at(file):
        if not is_known(base.model):
            what = f"an adapter of mlx-lm for a `{base.model.model_type}`, whose tensors mlx-lm was not seen to store"
            raise MappingError(f"{what} as published files do", do=_FUSE)
        stored = StoredTensors({name: (file, one) for name, one in SAFETENSORS.read(file).items()})
        return AdapterReader(path, base, config, _MlxFactors(stored, base), (file, path / FILE))


class _MlxFactors:
    """mlx-lm's factors under PEFT's names, and as PEFT's turned, as a source of tensors."""

    def __init__(self, stored: Chunked, base: Reader) -> None:
        self._chunks: dict[str, Sequence[Chunk]] = {}
        self.specs: dict[str, TensorSpec] = {}
        before, wrapper = within(base.model), base.model.wrapper
        for name, spec in stored.specs.items():
            module, _, part = name.removeprefix(before).rpartition(".")
            module = wrapper.name_of(module) if wrapper else module
            if part not in _PARTS:
                raise MappingError(f"`{name}` is no tensor of a LoRA adapter of mlx-lm", do=_FUSE)
            if len(spec.shape) != (1 if part == "m" else 2):
                raise MappingError(f"`{name}` is {list(spec.shape)}, as of a stack of experts", do=_FUSE)
            if is_embedding(f"{module}.weight"):
                raise MappingError(f"`{module}` is an embedding, whose adapters are not read", do=_FUSE)
            if f"{module}.weight" not in base.specs:
                what = f"`{module}` is changed by the adapter, and published files have no such linear"
                raise MappingError(what, do=f"Is it the adapter's base? If so: {_FUSE}")
            called = f"{PREFIX}{module}.{_PARTS[part]}"
            turned = TensorSpec(spec.shape[::-1], spec.dtype)
            self.specs[called] = turned
            self._chunks[called] = (
                stored.chunks(name) if part == "m" else [Chunk(whole(turned), TransposedRows(stored, name))]
            )

    def chunks(self, name: str) -> Sequence[Chunk]:
        return self._chunks[name]


CONTAINER = Container(recognise, without_iterations(_open), f"{MLX_FILE} beside {FILE}, of mlx-lm")
