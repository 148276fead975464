"""Read a model from GGUF, llama.cpp's file: its tensors under Hugging Face's names and in the shapes that published
files have, and as a config.json what its metadata say.

A file may be one of several (`NAME-00001-of-00003.gguf`), of which the first has the metadata. A directory with one
model in such files is read too, with a config.json and a tokenizer that are in it. A tokenizer is not made of the
file's own: it is the reference's. The tokens that begin and end a text are, where no config.json says others.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from precisionctl.architectures.families import from_hf_config
from precisionctl.checkpoints.base import (
    NO_HINTS,
    NO_WAY_BACK,
    Companions,
    Container,
    Hints,
    without_iterations,
)
from precisionctl.checkpoints.gguf.described_model import check_same, model_of_file
from precisionctl.checkpoints.gguf.families import FAMILIES, model_type_of
from precisionctl.checkpoints.gguf.family import GgufFamily
from precisionctl.checkpoints.gguf.file_types import scheme_of
from precisionctl.checkpoints.gguf.head import GgufHead, read_head
from precisionctl.checkpoints.gguf.metadata import TOKEN_IDS, Described
from precisionctl.checkpoints.gguf.rotary_tensors import ROTARY_TENSORS
from precisionctl.checkpoints.gguf.tensors import ChangedTensors, hf_tensors
from precisionctl.checkpoints.gguf.towers.mmproj_file import OF_TOWERS, is_mmproj
from precisionctl.checkpoints.hf_directory.companions import needed_hints, read_companions, to_json
from precisionctl.checkpoints.hf_directory.config_json import GENERATION, is_token
from precisionctl.checkpoints.hf_directory.huggingface_files import file_format_of
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture, UnknownFormat, at, shown
from precisionctl.fp8.state import Fp8States
from precisionctl.model.model_shape import ModelShape
from precisionctl.param import Layout
from precisionctl.sizes import listed
from precisionctl.untrusted.safe_files import check_file
from precisionctl.untrusted.safe_json import parse_json

_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_MOST_FILES = 10_000
_NAMED = ("bos", "eos", "pad")
"""The tokens that config.json names."""


def recognise(path: Path) -> bool:
    """Whether `path` is a GGUF file, or a directory with some and without other weights."""
    if path.is_dir():
        return any(path.glob("*.gguf")) and file_format_of(path) is None
    return path.suffix == ".gguf"


class GgufReader(ChangedTensors):
    """A model in GGUF as a Reader. Opening it reads the heads of its files.

    With a reference, or a config.json in its directory, that says the model, and must not contradict the metadata;
    without one the metadata say it. `stored` are the tensors in its files, `coded` the formats of those whose values
    are codes, and `mmproj` the files of a wrapper's towers in its directory: one, or the same in several types. Raises
    UnknownFormat for a directory with several models, NotUnderstood and DamagedCheckpoint as `read_head`, and
    UnknownArchitecture for a model of a family that is not read of GGUF.
    """

    layout: Layout = "hf"
    container = "gguf"
    iteration = None
    fp8: Fp8States | None = None

    def __init__(self, path: Path, hints: Hints = NO_HINTS) -> None:
        self.path = path
        self.files: Sequence[Path] = _files_of(path)
        inside = path.glob("*.gguf") if path.is_dir() else ()
        self.mmproj = sorted(each for each in inside if is_mmproj(each))[:_MOST_FILES]
        head = _read_heads(self.files)
        self.metadata = head.metadata
        own = read_companions(path) if path.is_dir() else Companions(directory=path.parent)
        self.own_companions = replace(own, notes=())
        self.companions = needed_hints(hints, self.own_companions).companions or self.own_companions
        self.model, family = self._described(head)
        if "config.json" not in self.companions.files:
            said = {f"{word}_token_id": self.metadata.get(f"tokenizer.ggml.{TOKEN_IDS[word]}") for word in _NAMED}
            if tokens := {key: token for key, token in said.items() if is_token(token, self.model)}:
                files = {GENERATION: to_json(tokens), **self.own_companions.files}
                self.own_companions = replace(self.own_companions, files=files)
            self.companions = self.own_companions

        weights = {name: tensor for name, tensor in head.tensors.items() if name not in ROTARY_TENSORS}
        super().__init__(hf_tensors(weights, family, self.model, path))
        self.stored = tuple(weights.values())
        self.coded = sorted({tensor.format.name for tensor in self.stored if not tensor.format.dtype})

    @property
    def words(self) -> str:
        """Which codes are stored, and what they are read as, in words; empty where there are none."""
        return f"{' and '.join(self.coded)} codes of GGUF, read as float32" if self.coded else ""

    def notes(self) -> Iterator[str]:
        if self.coded:
            scheme = scheme_of(self.metadata.get("general.file_type"), {*self.coded})
            command = f"`export-inference --target llama.cpp --scheme {scheme}`"
            back = f"{command} makes new codes of these values, perhaps others." if scheme else NO_WAY_BACK
            yield f"Weights were {self.words}. {back}"

        # A chat model's file ends texts otherwise than its base, and is of the same model
        files, token = self.companions.files, self.metadata.get("tokenizer.ggml.eos_token_id")
        configs = (parse_json(files[name], name) for name in ("config.json", GENERATION) if name in files)
        ends = [end for each in configs if (end := each.get("eos_token_id")) is not None]
        same = any(token == end or isinstance(end, list) and token in end for end in ends)
        if token is not None and ends and not same:
            said = f"with {shown(ends[-1])} by {self.companions.directory}, which is kept"
            yield f"A text ends with token {shown(token)} by the file, and {said}."

    def _described(self, head: GgufHead) -> tuple[ModelShape, GgufFamily]:
        """The model, and the table of its tensors."""
        architecture = head.metadata.get("general.architecture")
        found = [each for each, family in FAMILIES.items() if architecture in family.architectures]
        if architecture == OF_TOWERS:
            what, do = "towers, and no text model", "Give the directory, or the text model's file that is beside it."
            raise UnknownArchitecture(what, where=self.path, do=do)
        if not found:
            known = ", ".join(sorted({each for family in FAMILIES.values() for each in family.architectures}))
            what = f"a model of llama.cpp's architecture {shown(architecture)}, which is not read"
            raise UnknownArchitecture(what, where=self.path, do=f"Known: {known}. Start from the release.")
        file = Described(head.metadata, head.tensors, str(architecture))
        if "config.json" not in self.companions.files:
            with at(self.path):
                model_type = model_type_of(file, found)
                return model_of_file(file, model_type), FAMILIES[model_type].of_file(file)
        where = self.companions.config_path
        config = parse_json(self.companions.files["config.json"], where)
        said = config.get("model_type")
        if said not in found:
            what = f"config.json is of a {shown(said)}, and the file of llama.cpp's {architecture}"
            do = f"Give the config.json of a {' or '.join(found)}: of a wrapper, its text model's alone."
            raise DamagedCheckpoint(what, where=where, do=do)
        model = from_hf_config(config, where)
        with at(self.path):
            check_same(file, model, config, where)
            return model, FAMILIES[model.architecture].of_file(file)


def _files_of(path: Path) -> list[Path]:
    """The files of the model at a path, in order. Raises UnknownFormat where a directory has several models,
    DamagedCheckpoint where files of one are missing, or are links out of their directory: the one that was named may
    be."""
    is_named = not path.is_dir()
    if not is_named:
        there = [each for each in sorted(path.glob("*.gguf"))[:_MOST_FILES] if not is_mmproj(each)]
        firsts = [each for each in there if not (match := _SPLIT.fullmatch(each.name)) or int(match[2]) == 1]
        if len(firsts) != 1:
            models = f": {listed(each.name for each in firsts)}" if firsts else ", and towers alone"
            what = f"{len(firsts)} models in GGUF{models}"
            raise UnknownFormat(what, where=path, do="Give the file of the one that is meant, or its first file.")
        path = firsts[0]
    match = _SPLIT.fullmatch(path.name)
    if match is None or int(match[3]) == 0:
        files = [path]
    else:
        numbers = range(1, min(int(match[3]), _MOST_FILES) + 1)
        files = [path.with_name(f"{match[1]}-{number:05}-of-{match[3]}.gguf") for number in numbers]
    for file in files:
        check_file(file, path.resolve().parent if is_named and file == path else path.parent)
    return files


def _read_heads(files: Sequence[Path]) -> GgufHead:
    """What all files of a model say together. Raises DamagedCheckpoint for files that are not of one model."""
    first, *others = map(read_head, files)
    tensors = dict(first.tensors)
    for number, head in enumerate((first, *others)):
        said = [head.metadata.get(f"split.{key}", absent) for key, absent in (("no", 0), ("count", 1))]
        if said != [number, len(files)]:
            what = f"it says that it is file {shown(said[0])} of {shown(said[1])}, counted from 0"
            do = "Is every file there, under the name that llama.cpp gave it (NAME-00001-of-00003.gguf)?"
            raise DamagedCheckpoint(what, where=files[number], do=do)
    for file, head in zip(files[1:], others, strict=True):
        if twice := head.tensors.keys() & tensors.keys():
            raise DamagedCheckpoint(f"`{min(twice)}` is in another file too", where=file)
        tensors |= head.tensors
    if first.metadata.get("split.tensors.count", len(tensors)) != len(tensors):
        what = f"{len(tensors)} tensors in all files, and the first says {shown(first.metadata['split.tensors.count'])}"
        raise DamagedCheckpoint(what, where=files[0])
    return GgufHead(first.metadata, tensors, first.types)


CONTAINER = Container(recognise, without_iterations(GgufReader), "*.gguf of llama.cpp")
