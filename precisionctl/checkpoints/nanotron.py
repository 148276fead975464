"""Read a Llama that nanotron trained, such as SmolLM, under Hugging Face's names. Its model_config.json has the keys of
Hugging Face's Llama, and config.json is made of it (read off nanotron at 2411b022).

A file has a tensor-parallel rank's part of a parameter:
`model/model/decoder/0/pp_block/attn/o_proj/model_weight_pp-rank-0-of-1_tp-rank-1-of-2.safetensors` is of
`model.decoder.0.pp_block.attn.o_proj.weight`. Its metadata say which slices of the tensor in the file are which of the
whole one (serialize/weights.py, parallel/parameters.py): `0,32,None|None,None,None#64,96,None|None,None,None`, local
before the hash and global behind it, a slice for each dimension, several such pairs with semicolons between them.

Trap: with `rope_interleaved`, and before there was such a key, the two numbers of a rotary pair are in neighbouring
rows of queries and keys; in Hugging Face they are in the two halves of a head
(examples/llama/convert_nanotron_to_hf.py).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from precisionctl.checkpoints.base import NO_HINTS, Companions, Container, Hints, without_iterations
from precisionctl.checkpoints.chunks import Chunk, ComputedTensor
from precisionctl.checkpoints.computed_rows import Heads, SomeRows
from precisionctl.checkpoints.hf_directory.companions import to_json
from precisionctl.checkpoints.hf_directory.safetensors_file import read_described
from precisionctl.checkpoints.other_trainers.name_patterns import pattern_of, with_numbers
from precisionctl.checkpoints.other_trainers.trainer_directory import TrainerDirectory, by_model_names
from precisionctl.checkpoints.torch_files.dcp_metadata import DcpPiece, DcpTensor
from precisionctl.checkpoints.torch_files.dcp_tensors import LogicalTensors, check_whole, slices
from precisionctl.checkpoints.torch_files.torch_zip import Span
from precisionctl.errors import CheckpointError, DamagedCheckpoint, UnknownArchitecture, damage
from precisionctl.param import TensorSpec
from precisionctl.paths import own_name
from precisionctl.untrusted.safe_files import check_file, read_json

_CONFIG = "model_config.json"
_IN_CONFIG = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling", "hidden_act"),
    *("attention_bias", "tie_word_embeddings", "initializer_range"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)
"""Keys that nanotron's config has of Hugging Face's (`get_config_mapping`)."""

_HF = "model.layers.#."
_BLOCK = "model.decoder.#.pp_block."
_NAMES: Mapping[str, str] = {
    "model.token_position_embeddings.pp_block.token_embedding": "model.embed_tokens",
    "model.final_layer_norm.pp_block": "model.norm",
    "model.lm_head.pp_block": "lm_head",
    f"{_BLOCK}attn.o_proj": f"{_HF}self_attn.o_proj",
    f"{_BLOCK}mlp.down_proj": f"{_HF}mlp.down_proj",
    f"{_BLOCK}input_layernorm": f"{_HF}input_layernorm",
    f"{_BLOCK}post_attention_layernorm": f"{_HF}post_attention_layernorm",
}
_QKV, _GATE_UP = f"{_BLOCK}attn.qkv_proj", f"{_BLOCK}mlp.gate_up_proj"


class NanotronReader(TrainerDirectory):
    """A step of nanotron as a Reader. Opening it reads headers alone.

    Raises DamagedCheckpoint for files that contradict one another, and UnknownArchitecture for another model than a
    Llama without experts.
    """

    container = "nanotron"

    def __init__(self, path: Path, hints: Hints = NO_HINTS) -> None:
        super().__init__(path, hints, "a checkpoint of nanotron")
        where = path / _CONFIG
        self._config = read_json(where, path)
        if self._config.get("is_llama_config") is not True:
            what = "a model of nanotron that is no Llama, whose names are not known here"
            raise UnknownArchitecture(what, where=where, do="Convert it with nanotron's own examples.")
        tensors = {name: one for name, part in _read_parts(path).items() for _, one in slices(name, part, 0, path)}
        for name, tensor in tensors.items():
            check_whole(name, tensor, path)
            if tensor.spec.is_codes:
                what = f"`{name}` is {tensor.spec.dtype}: FP8 codes, whose scales are not read"
                raise CheckpointError(what, where=path, do="Save the weights in BF16.")
        self._stored = LogicalTensors(tensors)
        placed = ((name, new, place) for name in tensors for new, place in self._by_hf_names(name).items())
        self._places: Mapping[str, str | ComputedTensor] = by_model_names(placed, path)
        self.specs: Mapping[str, TensorSpec] = {
            name: self._stored.spec_at(place) for name, place in self._places.items()
        }

    @cached_property
    def own_companions(self) -> Companions:
        found = super().own_companions
        if "config.json" in found.files:
            return found
        made: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        made |= {key: self._config[key] for key in _IN_CONFIG if key in self._config}
        return replace(found, files={**found.files, "config.json": to_json(made)})

    @property
    def iteration(self) -> int | None:
        """The step, by which nanotron names the directory."""
        name = own_name(self.path)
        return int(name) if name.isdecimal() and len(name) < 19 else None

    @property
    def files(self) -> Sequence[Path]:
        return sorted(self._stored.files)

    def chunks(self, name: str) -> Sequence[Chunk]:
        return self._stored.chunks_at(self._places[name])

    def notes(self) -> Iterator[str]:
        if not (self.path / "config.json").is_file():
            yield f"config.json is made of {_CONFIG}."
        if (self.path / "optimizer").is_dir():
            yield "Not carried over from the run: the optimizer, random generators."

    def _by_hf_names(self, name: str) -> dict[str, str | ComputedTensor]:
        """The tensors of Hugging Face's that a stored one is, or has the rows of."""
        module, _, kind = name.rpartition(".")
        pattern, numbers = pattern_of(module)
        made: dict[str, str | ComputedTensor]
        if pattern == _QKV:
            made = {f"{_HF}self_attn.{part}_proj": place for part, place in self._attention(name).items()}
        elif pattern == _GATE_UP:
            half = self._stored.specs[name].rows // 2
            made = {
                f"{_HF}mlp.{part}_proj": SomeRows(self._stored, name, at * half, half)
                for at, part in enumerate(("gate", "up"))
            }
        elif pattern in _NAMES:
            made = {_NAMES[pattern]: name}
        else:
            return {name: name}
        return {f"{with_numbers(hf, numbers)}.{kind}": place for hf, place in made.items()}

    def _attention(self, name: str) -> dict[str, ComputedTensor]:
        model, rows = self.model, self._stored.specs[name].rows
        size, heads = model.kv_channels, (model.num_attention_heads, model.num_query_groups, model.num_query_groups)
        if rows != sum(heads) * size or size % 2:
            what = f"`{name}` has {rows} rows, and by {_CONFIG} {sum(heads)} heads of {size}"
            raise DamagedCheckpoint(what, where=self.path, do="Is it this checkpoint's?")
        pairs = self._config.get("rope_interleaved", True) is not False
        found, first = dict[str, ComputedTensor](), 0
        for part, count in zip("qkv", heads, strict=True):
            if pairs and part != "v":
                starts = range(first, first + count * size, size)
                found[part] = Heads(self._stored, name, starts, size, pairs=True)
            else:
                found[part] = SomeRows(self._stored, name, first, count * size)
            first += count * size
        return found


_FILE = re.compile(r"model_(\w+?)(?:_pp-rank-\d+-of-\d+_tp-rank-(\d+)-of-(\d+)(_exp-rank-\d+-of-\d+)?)?\.safetensors")
_SLICE = re.compile(r"(None|\d{1,18}),(None|\d{1,18}),(?:None|1)")
_SIZE = re.compile(r"(?:np\.int\d+\()?(\d{1,18})\)?")
_COPY = "Copy the files of all ranks again."


def _read_parts(directory: Path) -> dict[str, DcpTensor]:
    """The tensors in `model/` of a checkpoint. Reads headers alone. Raises DamagedCheckpoint where files are missing,
    or do not say what they are a part of, and UnknownArchitecture for experts."""
    parts: dict[str, list[DcpTensor]] = {}
    ranks: dict[str, set[tuple[str, str]]] = {}
    root = directory / "model"
    for path in sorted(root.rglob("*.safetensors")):
        check_file(path, directory)
        match = _FILE.fullmatch(path.name)
        if match is None:
            what = "no name that nanotron gives a file"
            raise DamagedCheckpoint(what, where=path, do="Convert it with nanotron's own examples.")
        if match[4]:
            what = "a part of nanotron's experts, whose names are not known here"
            do = "Load the model with nanotron, and save its weights under the names of transformers' class."
            raise UnknownArchitecture(what, where=path, do=do)
        name = ".".join((*path.parent.relative_to(root).parts, match[1]))
        if match[2] is not None:
            ranks.setdefault(name, set()).add((match[2], match[3]))
        with damage("not what nanotron writes", path):
            parts.setdefault(name, []).extend(_parts_of(path))
    for name, found in ranks.items():
        counts = {count for _, count in found}
        if len(counts) > 1 or len(found) != int(min(counts)):
            what = f"`{name}` has parts of ranks {sorted(rank for rank, _ in found)} of {' and '.join(sorted(counts))}"
            raise DamagedCheckpoint(what, where=directory, do=_COPY)
    whole: dict[str, DcpTensor] = {}
    for name, of_name in parts.items():
        if len({(part.shape, part.dtype) for part in of_name}) > 1:
            what = f"`{name}` has parts of tensors of several shapes or dtypes"
            raise DamagedCheckpoint(what, where=directory, do=_COPY)
        pieces = tuple(piece for part in of_name for piece in part.pieces)
        whole[name] = DcpTensor(of_name[0].shape, of_name[0].dtype, pieces)
    return whole


def _parts_of(path: Path) -> Iterator[DcpTensor]:
    """The whole tensor that a file has parts of, once for each of them and with it alone."""
    tensors, metadata = read_described(path)
    (stored,) = tensors.values()
    spec, said = stored.spec, metadata.get("unsharded_shape")
    if said is None:
        whole = DcpPiece((0,) * len(spec.shape), spec.shape, Span(path, stored.offset, spec.nbytes), bare=True)
        yield DcpTensor(spec.shape, spec.dtype, (whole,))
        return
    sizes_said = [_SIZE.fullmatch(part.strip()) for part in said.strip("()").split(",") if part.strip()]
    shape = tuple(int(match[1]) for match in sizes_said if match) if all(sizes_said) else ()
    if len(shape) != len(spec.shape) or not 0 < len(shape) < 3:
        raise ValueError(f"a part {spec.shape} of a tensor {shape}")
    row, length = 0, spec.columns * spec.dtype.itemsize
    for pair in metadata["local_global_slices_pairs"].split(";"):
        local, of_whole = (_box(text, size) for text, size in zip(pair.split("#"), (spec.shape, shape), strict=True))
        sizes = tuple(end - begin for begin, end in local)
        # Rows of the file, one pair after the other
        if local[0][0] != row or sizes[1:] != spec.shape[1:] or sizes != tuple(end - begin for begin, end in of_whole):
            raise ValueError(f"{pair:.60} of a tensor {spec.shape}")
        span = Span(path, stored.offset + row * length, sizes[0] * length)
        piece = DcpPiece(tuple(begin for begin, _ in of_whole), sizes, span, bare=True)
        yield DcpTensor(shape, spec.dtype, (piece,))
        row += sizes[0]
    if row != spec.rows:
        raise ValueError(f"{row} of {spec.rows} rows have a place")


def _box(text: str, shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """The beginning and end in each dimension."""
    found = list[tuple[int, int]]()
    for part, size in zip(text.split("|"), shape, strict=True):
        match = _SLICE.fullmatch(part)
        if match is None:
            raise ValueError(f"{part:.40} as a slice")
        begin, end = (
            default if bound == "None" else int(bound) for bound, default in zip(match.groups(), (0, size), strict=True)
        )
        if not 0 <= begin < end <= size:
            raise ValueError(f"{part:.40} as a slice of {size}")
        found.append((begin, end))
    return found


def recognise(path: Path) -> bool:
    """Whether a directory has the parts of a model."""
    return (path / _CONFIG).is_file() and (path / "model" / "model").is_dir()


CONTAINER = Container(recognise, without_iterations(NanotronReader), f"{_CONFIG} beside model/model of nanotron")
