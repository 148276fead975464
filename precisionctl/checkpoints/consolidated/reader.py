"""Read a model in Mistral's own files, or Meta's: its tensors under the names and in the order of rows that published
Hugging Face directories have, and a config.json made of params.json.

Mistral's are `consolidated*.safetensors` (at first `consolidated.00.pth`), Meta's `consolidated.*.pth`, in as many
parts as the model ran on GPUs. A tokenizer in their form travels as it is; a reference has one of Hugging Face's.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from precisionctl.architectures.config_keys import size
from precisionctl.architectures.families import from_hf_config, key_in
from precisionctl.checkpoints.base import NO_HINTS, Companions, Container, Hints, without_iterations
from precisionctl.checkpoints.chunks import Chunk, whole
from precisionctl.checkpoints.computed_rows import Heads
from precisionctl.checkpoints.consolidated.llama_params import llama_config
from precisionctl.checkpoints.consolidated.meta_shards import FILE, read_shards, shard_files
from precisionctl.checkpoints.consolidated.mistral_params import as_transformers_magnifies, mistral_config
from precisionctl.checkpoints.consolidated.params import ParamsJson
from precisionctl.checkpoints.consolidated.published_names import LEFT, PublishedNames
from precisionctl.checkpoints.hf_directory.companions import read_companions, to_json
from precisionctl.checkpoints.hf_directory.huggingface_files import SAFETENSORS, file_format_of, places_in, read_stored
from precisionctl.checkpoints.hf_directory.safetensors_file import Places, StoredTensor, StoredTensors
from precisionctl.checkpoints.huggingface import HuggingFaceTensors
from precisionctl.codes.elements import FP8
from precisionctl.dtypes import DType
from precisionctl.errors import DamagedCheckpoint, PrecisionError, UnmappedTensor, at
from precisionctl.fp8.state import Fp8States
from precisionctl.model.model_shape import ModelShape
from precisionctl.model.same_model import differences
from precisionctl.quant_methods.base import FLOATS
from precisionctl.sizes import counted, listed
from precisionctl.untrusted.safe_files import read_file, read_json
from precisionctl.untrusted.safe_json import parse_json

PARAMS = "params.json"
_FILES = replace(SAFETENSORS, stem="consolidated")
_TOKENIZERS = ("tekken.json", "tokenizer.model")
_MOVED = (*FLOATS, *FP8, DType.uint8)
"""What queries and keys may be stored as."""


def recognise(path: Path) -> bool:
    """A directory with a params.json and consolidated files, and without weights in Hugging Face's form beside them.
    Mistral Large 4 is none: Hugging Face's form of it has Mistral's names."""
    config = path / "config.json"
    if not (path / PARAMS).is_file() or (config.is_file() and b'"mistral_large4' in read_file(config, path)):
        return False
    form = file_format_of(path)
    if form is None:
        return any(FILE.fullmatch(each.name) for each in path.glob("consolidated.*.pth"))
    files = [each.name for each in path.glob("*.safetensors")]
    return form is SAFETENSORS and bool(files) and all(name.startswith(_FILES.stem) for name in files)


@dataclass(frozen=True, slots=True)
class TurnedTensor(StoredTensor):
    """Queries or keys, or one scale for each of their rows: rows that are put into Hugging Face's order."""

    heads: Heads

    def chunks(self, file: Path) -> Sequence[Chunk]:
        return [Chunk(whole(self.spec), self.heads)]


class ConsolidatedReader(HuggingFaceTensors):
    """A model in Mistral's or Meta's own files as a Reader. Opening it reads headers, and norms of several files.

    With a reference its config.json says the model, and must not contradict params.json. Raises DamagedCheckpoint for
    files that contradict one another, UnknownArchitecture for a model that is not read, UnmappedTensor for a tensor
    that it does not have, and PrecisionError for codes that are not read.
    """

    container = "consolidated"
    iteration = None
    fp8: Fp8States | None = None

    def __init__(self, path: Path, hints: Hints = NO_HINTS) -> None:
        self.path = path
        where = path / PARAMS
        params = read_json(where, path)
        own = read_companions(path)
        given = hints.companions or (own if "config.json" in own.files else None)
        reference = _config_of(given) if given else None
        known = from_hf_config(reference, given.config_path) if given and reference else None
        said = ParamsJson(params, known)
        of_meta = "hidden_dim" not in said
        # Where files of both kinds are there, those in safetensors are read, as vLLM does
        shards = [] if file_format_of(path) else shard_files(path)
        read = cache(
            lambda: read_shards(shards, size(params, "dim")) if shards else places_in(read_stored(path, _FILES))
        )
        with at(where):
            made = llama_config(said, read) if of_meta else mistral_config(said)
            model = made.model()
            names = PublishedNames(model, made.config.get("vision_config"))
            tensors = read()
        if given and known:
            _check_same(known, model, made.config, given.config_path)
        self.files: Sequence[Path] = sorted({file for file, _ in tensors.values()} | {*shards})
        left = sorted(name for name in tensors if LEFT.fullmatch(name))
        places = _published({name: each for name, each in tensors.items() if name not in left}, names, where)
        made = replace(made, config=_with_ignored(made.config, places, where))
        if given:  # the reference's files, with the checkpoint's own beside them
            self.own_companions = own
            self.companions = replace(given, files={**own.files, **given.files}, notes=own.notes)
        else:
            self.own_companions = replace(own, files={**own.files, "config.json": to_json(made.config)})
            self.companions = self.own_companions
        self._made, self._left = None if given else made, left
        self.config = _config_of(self.companions) | {"quantization_config": made.config.get("quantization_config")}
        self._describe(places, where)
        for name, scales in self._scales.items():
            tensor, high = places[name][1], scales.block[0]
            if isinstance(tensor, TurnedTensor) and high < tensor.spec.rows and high > 1 and high % tensor.heads.size:
                what = f"`{name}` has scales of {high} rows, in which are parts of heads of {tensor.heads.size}"
                raise PrecisionError(what, where=path, do="Start from the release in BF16.")

    def notes(self) -> Iterator[str]:
        if self._made:
            yield f"config.json is made of {PARAMS}."
            yield from self._made.notes
        files = self.companions.files
        tokenizers = [name for name in files if name in _TOKENIZERS]
        if tokenizers and not any(name in files for name in ("tokenizer.json", "tokenizer_config.json")):
            yield (
                f"{listed(tokenizers)} is copied as it is, and no tokenizer in Hugging Face's form is made of it: "
                "--reference HF_DIR takes that from a Hugging Face directory."
            )
        if self._left:
            tensors = counted(len(self._left), "tensor")
            yield f"Left behind, as no part of the model: {tensors}, e.g. {self._left[0]}."
        yield from super().notes()


def _config_of(companions: Companions) -> dict[str, Any]:
    return parse_json(companions.files["config.json"], companions.config_path)


def _check_same(known: ModelShape, model: ModelShape, config: Mapping[str, Any], where: object) -> None:
    """Raise DamagedCheckpoint unless a reference's config.json is of the model that params.json describes."""
    fields = differences(known, model)
    if model.mla and fields.keys() == {"rope_scaling"}:
        fields = differences(known, from_hf_config(as_transformers_magnifies(config), where))
    for name in ("architecture", "vocab_size"):
        if getattr(known, name) != getattr(model, name):
            fields[name] = (getattr(known, name), getattr(model, name))
    if (known.wrapper is None) != (model.wrapper is None):
        fields["wrapper"] = (known.wrapper and known.wrapper.model_type, model.wrapper and model.wrapper.model_type)
    if fields:
        words = [f"{key_in(config, name)} is {one}, and by {PARAMS} {two}" for name, (one, two) in fields.items()]
        raise DamagedCheckpoint(f"config.json is of another model: {listed(words, 4)}", where=where)


def _published(tensors: Places, names: PublishedNames, where: Path) -> Places:
    """The tensors by their published names, with rows in published order."""
    found: Places = {}
    stored = StoredTensors(tensors)
    for name, (file, tensor) in tensors.items():
        published = names.of(name)
        if published is None:
            what = f"`{name}` is no tensor of such a model"
            raise UnmappedTensor(what, where=file, do="Take the Hugging Face files of the same release.")
        found[published] = file, tensor

        heads, spec = names.heads(name), tensor.spec
        if heads is None:
            continue
        rows = heads.count * heads.size
        if spec.rows != rows:
            if name.endswith(".weight"):
                what = f"`{name}` has {spec.rows} rows, and {heads.count} heads of {heads.size} by {PARAMS}"
                raise DamagedCheckpoint(what, where=file, do=f"Is {PARAMS} this model's?")
            continue  # a scale of all rows, or of whole heads, stays where it is
        if spec.dtype not in _MOVED:
            what = f"`{name}` is {spec.dtype}: queries or keys in codes that are not moved"
            raise PrecisionError(what, where=file, do="Start from the release in BF16.")
        turned = Heads(stored, name, range(0, rows, heads.size), heads.size, pairs=True)
        found[published] = file, TurnedTensor(spec, tensor.offset, turned)
    return found


def _with_ignored(config: dict[str, Any], places: Places, where: object) -> dict[str, Any]:
    """A config that lists the modules that are no codes by their full published names: Mistral's lists have its own, or
    parts of them. Raises PrecisionError for groups of modules by such names."""
    said = config.get("quantization_config")
    if not said:
        return config
    of_fp8 = said["quant_method"] == "fp8"
    groups = said.get("config_groups")
    kinds = [*groups.values()] if isinstance(groups, Mapping) else [None]
    if not of_fp8 and not all(isinstance(each, Mapping) and each.get("targets") == ["Linear"] for each in kinds):
        what = "codes of compressed-tensors for some modules by name"
        raise PrecisionError(what, where=where, do="Start from the release in BF16.")
    weights = ((name, tensor.spec) for name, (_, tensor) in places.items() if name.endswith(".weight"))
    values = [name for name, spec in weights if len(spec.shape) == 2 and spec.dtype in FLOATS]
    ignored = sorted(name.removesuffix(".weight") for name in values)
    return config | {"quantization_config": {**said, "modules_to_not_convert" if of_fp8 else "ignore": ignored}}


CONTAINER = Container(
    recognise,
    without_iterations(ConsolidatedReader),
    f"{PARAMS} with consolidated*.safetensors (Mistral) or consolidated.*.pth (Meta)",
)
