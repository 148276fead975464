"""nanotron's files: `model/model/decoder/0/pp_block/attn/o_proj/model_weight_pp-rank-0-of-1_tp-rank-1-of-2.safetensors`
is the part that a tensor-parallel rank has of `model.decoder.0.pp_block.attn.o_proj.weight`.

Its metadata say which slices of the tensor in the file are which of the whole one (read off nanotron at 2411b022,
serialize/weights.py, parallel/parameters.py): `0,32,None|None,None,None#64,96,None|None,None,None`, local before the
hash and global behind it, a slice for each dimension, several such pairs with semicolons between them.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from precisionctl.checkpoints.hf_directory.safetensors_file import StoredTensor, read_described
from precisionctl.checkpoints.torch_files.dcp_metadata import DcpPiece, DcpTensor
from precisionctl.checkpoints.torch_files.torch_zip import Span
from precisionctl.errors import DamagedCheckpoint, damage
from precisionctl.untrusted.safe_files import check_file

_FILE = re.compile(r"model_(\w+?)(?:_pp-rank-\d+-of-\d+_tp-rank-(\d+)-of-(\d+)(_exp-rank-\d+-of-\d+)?)?\.safetensors")
_SLICE = re.compile(r"(None|\d{1,18}),(None|\d{1,18}),(?:None|1)")
_SIZE = re.compile(r"(?:np\.int\d+\()?(\d{1,18})\)?")
_COPY = "Copy the files of all ranks again."


def read_parts(directory: Path) -> dict[str, DcpTensor]:
    """The tensors in `model/` of a checkpoint. Reads headers alone. Raises DamagedCheckpoint where files are missing,
    or do not say what they are a part of, and for experts, whose names are not known here."""
    parts: dict[str, list[tuple[tuple[int, ...], StoredTensor, DcpPiece]]] = {}
    ranks: dict[str, set[tuple[str, str]]] = {}
    root = directory / "model"
    for path in sorted(root.rglob("*.safetensors")):
        check_file(path, directory)
        match = _FILE.fullmatch(path.name)
        if match is None or match[4]:
            what = "a part of an expert" if match else "no name that nanotron gives a file"
            raise DamagedCheckpoint(what, where=path, do="Convert it with nanotron's own examples.")
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
    return {name: _whole(name, found, directory) for name, found in parts.items()}


def _whole(name: str, parts: list[tuple[tuple[int, ...], StoredTensor, DcpPiece]], directory: Path) -> DcpTensor:
    kinds = {(shape, stored.spec.dtype) for shape, stored, _ in parts}
    if len(kinds) > 1:
        raise DamagedCheckpoint(f"`{name}` has parts of tensors of several shapes or dtypes", where=directory, do=_COPY)
    ((shape, dtype),) = kinds
    return DcpTensor(shape, dtype, tuple(piece for *_, piece in parts))


def _parts_of(path: Path) -> Iterator[tuple[tuple[int, ...], StoredTensor, DcpPiece]]:
    """For each part that a file has of a whole tensor: the shape of that, the tensor of the file, and the part."""
    tensors, metadata = read_described(path)
    (stored,) = tensors.values()
    spec, said = stored.spec, metadata.get("unsharded_shape")
    if said is None:
        whole = DcpPiece((0,) * len(spec.shape), spec.shape, Span(path, stored.offset, spec.nbytes), bare=True)
        yield spec.shape, stored, whole
        return
    shape = _sizes(said)
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
        yield shape, stored, DcpPiece(tuple(begin for begin, _ in of_whole), sizes, span, bare=True)
        row += sizes[0]
    if row != spec.rows:
        raise ValueError(f"{row} of {spec.rows} rows have a place")


def _sizes(text: str) -> tuple[int, ...]:
    matches = [_SIZE.fullmatch(part.strip()) for part in text.strip("()").split(",") if part.strip()]
    return tuple(int(match[1]) for match in matches if match) if all(matches) else ()


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


def is_step(path: Path) -> bool:
    """Whether a directory has the parts of a model."""
    return (path / CONFIG).is_file() and (path / "model" / "model").is_dir()


CONFIG = "model_config.json"
