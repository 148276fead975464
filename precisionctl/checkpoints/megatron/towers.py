"""A wrapper's towers in a Megatron checkpoint: safetensors files beside its config.json, where Megatron does not look,
under their Hugging Face names. In a plan these begin with `towers.`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from precisionctl.architectures.wrappers import TOWERS
from precisionctl.checkpoints.base import Reader, Writer
from precisionctl.checkpoints.chunks import Chunk, Chunked
from precisionctl.checkpoints.hf_directory.huggingface_files import (
    MAX_SHARD_SIZE,
    SAFETENSORS,
    WeightFileFormat,
    WeightFiles,
    places_in,
    read_stored,
)
from precisionctl.checkpoints.hf_directory.safetensors_file import StoredTensors
from precisionctl.checkpoints.megatron.keys import COMPANIONS
from precisionctl.errors import DamagedCheckpoint, RecipeError
from precisionctl.fp8.state import Fp8States
from precisionctl.param import TensorSpec
from precisionctl.untrusted.safe_files import check_link

FORMAT = WeightFileFormat("safetensors", "towers", SAFETENSORS.suffix, SAFETENSORS.read, SAFETENSORS.lay_out)


def stored_towers(directory: Path) -> StoredTensors:
    """The towers that are kept in an iteration's directory. Raises as `read_stored` and `places_in`."""
    companions = directory / COMPANIONS
    check_link(companions, directory)
    there = {*companions.glob(f"{FORMAT.stem}*{FORMAT.suffix}")}
    places = places_in(read_stored(companions, FORMAT)) if there else {}
    if others := sorted(there - {file for file, _ in places.values()}):
        raise DamagedCheckpoint(f"{others[0].name} is no part of the towers", where=companions, do="Is the copy whole?")
    if coded := next((name for name, (_, stored) in places.items() if stored.spec.is_codes), None):
        raise DamagedCheckpoint(f"the tower `{coded}` is codes, without scales", where=companions)
    return StoredTensors({TOWERS + name: place for name, place in places.items()})


def tower_names(reader: Reader) -> dict[str, str]:
    """The names that a checkpoint's towers have there, by those that they have in a plan; none of a text model."""
    if (wrapper := reader.model.wrapper) is None:
        return {}
    if reader.layout == "megatron":
        return {name: name for name in reader.specs if name.startswith(TOWERS)}
    return {TOWERS + name: name for name in reader.specs if not wrapper.is_text(name)}


class TowersOf:
    """The towers of another checkpoint, which `--reference` names, as a source. Raises RecipeError for codes, whose
    scales are not among them."""

    def __init__(self, reader: Reader) -> None:
        self._reader, self._names = reader, tower_names(reader)
        self.specs: Mapping[str, TensorSpec] = {name: reader.specs[there] for name, there in self._names.items()}
        if coded := next((name for name in self._names.values() if name in reader.encodings), None):
            raise RecipeError(
                f"`{coded}` is codes, and only values are taken from a reference",
                where=reader.path or "",
                do="Decode it first with `convert --to hf --precision bf16`, and give that.",
            )

    def chunks(self, name: str) -> Sequence[Chunk]:
        return self._reader.chunks(self._names[name])


def with_towers(text: Mapping[str, TensorSpec], towers: Chunked, where: Path) -> dict[str, TensorSpec]:
    """The tensors of a checkpoint, text model and towers. Raises DamagedCheckpoint for a name that both have."""
    if twice := text.keys() & towers.specs.keys():
        raise DamagedCheckpoint(f"`{min(twice)}` is there twice", where=where)
    return {**text, **towers.specs}


class TowersWriter:
    """A Writer of the towers that are kept in the `directory` of an iteration."""

    def __init__(self, directory: Path, towers: Mapping[str, TensorSpec], max_shard_size: int = MAX_SHARD_SIZE) -> None:
        self.directory, self.specs = directory, towers
        named = {name.removeprefix(TOWERS): spec for name, spec in towers.items()}
        self._files = WeightFiles(directory / COMPANIONS, named, max_shard_size, FORMAT)

    def lay_out(self) -> None:
        self._files.directory.mkdir(parents=True, exist_ok=True)
        self._files.lay_out()

    def chunks(self, name: str) -> Sequence[Chunk]:
        return self._files.chunks(name.removeprefix(TOWERS))

    def finish(self, fp8: Fp8States | None) -> None:
        self._files.write_index(of_one=True)  # nothing else says how many there are


class WithTowers:
    """A Writer of a Megatron checkpoint, and of the towers that go with it."""

    def __init__(self, text: Writer, towers: Mapping[str, TensorSpec], max_shard_size: int = MAX_SHARD_SIZE) -> None:
        self.directory, self.text = text.directory, text
        self.specs: Mapping[str, TensorSpec] = {**text.specs, **towers}
        self._towers = TowersWriter(self.directory, towers, max_shard_size)

    def lay_out(self) -> None:
        self.text.lay_out()
        self._towers.lay_out()

    def chunks(self, name: str) -> Sequence[Chunk]:
        return (self._towers if name.startswith(TOWERS) else self.text).chunks(name)

    def finish(self, fp8: Fp8States | None) -> None:
        self._towers.finish(fp8)
        self.text.finish(fp8)
