"""Read a model in PyTorch's own checkpoint (DCP) with Hugging Face's names, as trainers save it that have no names of
their own: accelerate's FSDP 1 and 2, `dcp.save` of a state dict, megatron-fsdp; and torchtitan's Llama.

`.metadata` says where the pieces are. What the model is says a config.json, beside it or of the reference.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from os.path import commonprefix
from pathlib import Path

from torch import Tensor

from precisionctl.architectures.families import read_model
from precisionctl.checkpoints import dcp
from precisionctl.checkpoints.base import Chunk, Chunked, Companions, Hints, read_rows, whole
from precisionctl.checkpoints.companions import parse_json, read_companions
from precisionctl.checkpoints.fused_experts import stored_name
from precisionctl.checkpoints.megatron.logical import LogicalTensor, check_whole, chunks_of, slices
from precisionctl.errors import CheckpointError, DamagedCheckpoint
from precisionctl.fp8 import sidecar
from precisionctl.fp8.encoding import Encoding
from precisionctl.fp8.state import Fp8States
from precisionctl.model_shape import ModelShape
from precisionctl.param import Layout, TensorSpec

ACCELERATE = "pytorch_model_fsdp_0"
"""Where accelerate has the model, in the directory of a step."""

_NO_WEIGHTS = re.compile(r"(?:optim(?:izers?)?|(?:lr_)?schedulers?|train_state|dataloader|rng_state|extra_state)\..+")
_WRAPPERS = ("model.", "module.", "_orig_mod.", "_fsdp_wrapped_module.")
_INSIDE_MODEL = ("model.", "lm_head.", "module.", "transformer.", "gpt_neox.", "backbone.", "_orig_mod.")
"""What comes next where `model.` is the trainer's and not the model's own."""
_STACK = re.compile(r".+\.experts\.[a-z_]+")
_MOST_EXPERTS = 1 << 18
_TITAN = "tok_embeddings.weight"


def directory_of(path: Path) -> Path | None:
    """The directory with `.metadata`: a path itself, or what accelerate has in it. None where there is none."""
    return next((each for each in (path, path / ACCELERATE) if (each / dcp.FILE).is_file()), None)


class DcpModelReader:
    """A model's weights in a DCP directory. Opening it reads `.metadata` alone.

    Raises DamagedCheckpoint where pieces and files contradict each other, UnsafePickle, and CheckpointError where no
    config.json says which model it is.
    """

    layout: Layout = "hf"
    container = "dcp"
    encodings: Mapping[str, Encoding] = {}
    iteration = None

    def __init__(self, path: Path, directory: Path, index: dcp.Index, hints: Hints) -> None:
        self.path, self._directory, self._hints = path, directory, hints
        weights = {key: one for key, one in index.tensors.items() if not _NO_WEIGHTS.fullmatch(key)}
        self.left = [key for key in index.tensors if key not in weights]
        prefix = _wrapper(weights)
        self._tensors = self._logical({key.removeprefix(prefix): one for key, one in weights.items()})
        if _TITAN in self._tensors and self.model.architecture == "llama":
            self._tensors = self._of_titan()
            self._interleaved = True
        else:
            self._interleaved = False
        self.specs: Mapping[str, TensorSpec] = {name: one.spec for name, one in self._tensors.items()}
        self._chunks: dict[str, tuple[Chunk, ...]] = {}

    def _logical(self, stored: Mapping[str, dcp.DcpTensor]) -> dict[str, LogicalTensor]:
        """The tensors by name, one for each expert of a stack."""
        stacks = {name for name, one in stored.items() if _STACK.fullmatch(name) and len(one.shape) > 1}
        if sum(stored[name].shape[0] for name in stacks) > _MOST_EXPERTS:
            raise DamagedCheckpoint(f"more than {_MOST_EXPERTS} experts", where=self.path)
        found: dict[str, LogicalTensor] = {}
        for name, one in stored.items():
            if stored_name(name)[1] is not None:
                raise DamagedCheckpoint(f"`{name}` is named as a slice of another tensor", where=self.path)
            for at, tensor in slices(one, int(name in stacks), self.path):
                logical = f"{name}[{at[0]}]" if at else name
                check_whole(logical, tensor, self.path)
                found[logical] = tensor
        return found

    def _of_titan(self) -> dict[str, LogicalTensor]:
        """The tensors of torchtitan's Llama by Hugging Face's names."""
        if self.model.kv_channels % 2:
            what = f"heads of {self.model.kv_channels} rows (head_dim): rotary embeddings turn pairs of them"
            raise DamagedCheckpoint(what, where="config.json")
        stored: dict[str, str] = {}
        for name in self._tensors:
            if (first := stored.setdefault(_of_titan(name), name)) != name:
                what = f"`{first}` and `{name}` are both `{_of_titan(name)}`"
                raise DamagedCheckpoint(what, where=self.path, do="Save one model, under one set of names.")
        return {logical: self._tensors[name] for logical, name in stored.items()}

    @cached_property
    def own_companions(self) -> Companions:
        found = read_companions(self.path)
        if "config.json" not in found.files and self._directory != self.path:
            found = read_companions(self._directory)
        return replace(found, notes=())

    @property
    def companions(self) -> Companions:
        """Those of the reference that a user has named, else those beside the checkpoint."""
        return self._hints.companions or self.own_companions

    @cached_property
    def model(self) -> ModelShape:
        if "config.json" not in self.companions.files:
            raise CheckpointError(
                "a PyTorch checkpoint (DCP) does not say which model it is",
                where=self.path,
                do="Give `convert` or `export-inference` a Hugging Face directory of the same model with --reference: "
                "its config.json and tokenizer are enough. Or copy these beside the checkpoint.",
            )
        path = self.path / "config.json"
        return read_model(parse_json(self.companions.files["config.json"], path), path, self._tensors)

    @cached_property
    def fp8(self) -> Fp8States | None:
        return sidecar.find(self.path)

    @property
    def files(self) -> Sequence[Path]:
        return sorted({part.piece.span.path for tensor in self._tensors.values() for part in tensor.parts})

    def chunks(self, name: str) -> Sequence[Chunk]:
        if name not in self._chunks:
            self._chunks[name] = chunks_of(name, self._tensors[name])
        if self._interleaved and name.endswith(("q_proj.weight", "k_proj.weight")):
            turned = _HalvesOfHeads(_AsStored(self.specs, self._chunks), name, self.model)
            return [Chunk(whole(self.specs[name]), turned)]
        return self._chunks[name]


def _wrapper(names: Iterable[str]) -> str:
    """What wrappers have put before all names."""
    names = list(names)
    common, end = commonprefix(names), 0
    while wrapper := next((one for one in _WRAPPERS if common.startswith(one, end)), None):
        start = end + len(wrapper)
        if wrapper == "model." and not any(name.startswith(_INSIDE_MODEL, start) for name in names):
            break
        end = start
    return common[:end]


_TITAN_NAMES = {
    r"tok_embeddings\.weight": "model.embed_tokens.weight",
    r"norm\.weight": "model.norm.weight",
    r"output\.weight": "lm_head.weight",
    r"layers\.(\d+)\.attention\.(?:qkv_linear\.)?w([qkvo])\.weight": r"model.layers.\1.self_attn.\2_proj.weight",
    r"layers\.(\d+)\.feed_forward\.w1\.weight": r"model.layers.\1.mlp.gate_proj.weight",
    r"layers\.(\d+)\.feed_forward\.w2\.weight": r"model.layers.\1.mlp.down_proj.weight",
    r"layers\.(\d+)\.feed_forward\.w3\.weight": r"model.layers.\1.mlp.up_proj.weight",
    r"layers\.(\d+)\.attention_norm\.weight": r"model.layers.\1.input_layernorm.weight",
    r"layers\.(\d+)\.ffn_norm\.weight": r"model.layers.\1.post_attention_layernorm.weight",
}
"""torchtitan's names of a Llama (torchtitan/models/llama3, 0.3.0 and older), as expressions, and Hugging Face's."""


def _of_titan(name: str) -> str:
    """Hugging Face's name for torchtitan's; any other name as it is."""
    return next((re.sub(old, new, name) for old, new in _TITAN_NAMES.items() if re.fullmatch(old, name)), name)


@dataclass(frozen=True)
class _AsStored:
    """Tensors as they are stored."""

    specs: Mapping[str, TensorSpec]
    places: Mapping[str, Sequence[Chunk]]

    def chunks(self, name: str) -> Sequence[Chunk]:
        return self.places[name]


@dataclass(frozen=True)
class _HalvesOfHeads:
    """Queries or keys whose pairs of rotary rows stand beside each other, with the halves of each head one below the
    other, as Hugging Face has them (torchtitan, Llama3StateDictAdapter)."""

    stored: Chunked
    name: str
    model: ModelShape

    def rows(self, row: int, rows: int) -> Tensor:
        """Rows `[row, row + rows)` as `[rows, columns]`."""
        size = self.model.kv_channels
        first, last = row // size, -(-(row + rows) // size)
        heads = read_rows(self.stored, self.name, first * size, (last - first) * size)
        halves = heads.view(last - first, size // 2, 2, -1).transpose(1, 2).reshape(heads.shape)
        return halves[row - first * size :][:rows]
