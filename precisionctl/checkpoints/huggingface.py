"""Hugging Face directories: files of weights beside config.json and a tokenizer, whose parts are in `hf_directory/`."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from precisionctl.architectures.families import read_model, table_of
from precisionctl.architectures.param_map import names
from precisionctl.checkpoints.base import (
    NO_HINTS,
    Companions,
    Container,
    Hints,
    without_iterations,
)
from precisionctl.checkpoints.chunks import Chunk, read_tensor
from precisionctl.checkpoints.decoded.base import DecodedWeights
from precisionctl.checkpoints.decoded.methods import decoded_weights
from precisionctl.checkpoints.hf_directory import encodings_file, safetensors_pieces
from precisionctl.checkpoints.hf_directory.companions import ADAPTER, has_own_adapter, needed_hints, read_companions
from precisionctl.checkpoints.hf_directory.config_json import config_of_values, write_beside
from precisionctl.checkpoints.hf_directory.encodings_file import (
    QUANT_CONFIG,
    WeightEncodings,
    stored_encodings,
)
from precisionctl.checkpoints.hf_directory.fused_experts import stored_name
from precisionctl.checkpoints.hf_directory.huggingface_files import (
    MAX_SHARD_SIZE,
    SAFETENSORS,
    WeightFileFormat,
    WeightFiles,
    file_format_of,
)
from precisionctl.checkpoints.hf_directory.safetensors_file import Places, StoredTensors
from precisionctl.checkpoints.other_trainers import numbered_optimizer
from precisionctl.checkpoints.other_trainers.numbered_optimizer import NumberedOptimizer
from precisionctl.checkpoints.other_trainers.trainer_run import TrainerRun, trainer_step
from precisionctl.checkpoints.published_tensors import read_published
from precisionctl.codes.elements import FP8, Cast
from precisionctl.codes.encoding import Encoding
from precisionctl.dtypes import DType
from precisionctl.errors import CheckpointError, DamagedCheckpoint, PrecisionError, damage, shown
from precisionctl.fp8 import sidecar
from precisionctl.fp8.state import Fp8States
from precisionctl.model.model_shape import ModelShape
from precisionctl.model.text_config import text_part
from precisionctl.param import STATE, Layout, TensorSpec
from precisionctl.quant_methods.base import FLOATS
from precisionctl.quant_methods.caches import cache_scales
from precisionctl.quant_methods.coded_weights import coded_weights
from precisionctl.quant_methods.fp8 import expert_dtype
from precisionctl.quant_methods.scales import Scales
from precisionctl.sizes import counted, listed
from precisionctl.untrusted.safe_files import has_file, read_file, read_json, whole_length
from precisionctl.untrusted.safe_json import parse_json

_PACKED = (DType.uint8, DType.int8, DType.int32, DType.uint32)
_OF_WEIGHTS = ("weight", "_packed", "_blocks", "_quantized", "_qdata")
_OF_SCALES = re.compile(r"(?:.*_)?(?:scales?|absmax|SCB)")
"""The last word of names that tools give to codes, and to their scales."""


def recognise(path: Path) -> bool:
    """A directory with a config.json and files of weights (or an index that names some). An adapter's may be those of
    its base."""
    return (path / "config.json").exists() and has_weight_files(path)


def has_weight_files(path: Path) -> bool:
    """Whether a directory has files of weights that hold tensors as a whole, and no adapter beside them that is not a
    part of the model."""
    if file_format_of(path) is None or ((path / ADAPTER.patterns[0]).exists() and not has_own_adapter(path)):
        return False
    return not safetensors_pieces.has_pieces(path)


class HuggingFaceTensors:
    """Tensors under the names of published Hugging Face directories, and the config.json that says their model: what is
    common to Readers of both. A subclass sets `path`, the companions, `container` and `config`, and then has
    `_describe` find out the rest.

    Experts that are stored as one tensor are slices here, `name[expert]`, and in MXFP4 matrices of codes. Packed codes
    have the weight's name and shape, whatever the tensor of their words is called. Scale tensors of codes are not
    among `specs`; they are in `encodings`, and in `stored`, which is every tensor in the files.
    Nor are those of a KV cache, which belong to no weight. Codes that are `decoded` as they are read (GPTQ,
    bitsandbytes and others) are values here; `idle_biases` of zeros that their tools have added are not among `specs`.
    """

    layout: Layout = "hf"
    path: Path
    config: dict[str, Any]

    def _describe(self, places: Places, where: object) -> None:
        """What these tensors are by the config, which is at `where`."""
        stored = {name: tensor.spec for name, (_, tensor) in places.items()}
        self.decoded = decoded_weights(self.config, StoredTensors(places), where)
        coded = {} if self.decoded else coded_weights(self.config, stored, where)
        for name, weight in coded.items():  # packed codes, under the name that the weight has
            file, tensor = places.pop(weight.codes)
            places[name] = file, replace(tensor, spec=weight.spec)
        self.stored = StoredTensors(places)
        self._scales: Mapping[str, Scales] = {name: weight.scales for name, weight in coded.items()}
        self._scale_names = {name for scales in self._scales.values() for name in scales.names}
        self._cache_scales = cache_scales(self.config.get("quantization_config"), self.stored.specs).keys()
        self._scale_names |= self._cache_scales
        hidden = self._scale_names | (self.decoded.read if self.decoded else set())
        self.specs = {name: spec for name, spec in self.stored.specs.items() if name not in hidden}
        self.specs |= self.decoded.specs if self.decoded else {}
        self.model: ModelShape = read_model(self.config, where, self.specs)
        if self.decoded and self.model.architecture == "gpt2":
            what = f"codes of {self.decoded.method} for GPT-2, whose linears are transposed themselves, are not read"
            raise PrecisionError(what, where=self.path, do="Let the tool that made them decode them.")
        self.idle_biases = _idle_biases(self, self.decoded) if self.decoded else []
        for name in self.idle_biases:
            del self.specs[name]
        self._check_codes(where)

    def _check_codes(self, where: object) -> None:
        """Raise PrecisionError for codes in a format that is not read, and DamagedCheckpoint for integers with scales
        beside them where no `quantization_config` says to have codes; without any they are values. Codes that are not
        read would be written as values, and without the `quantization_config` nothing could decode them."""
        matrices = {name: spec for name, spec in self.specs.items() if spec.dtype in _PACKED and len(spec.shape) > 1}
        integers = {name: spec for name, spec in matrices.items() if stored_name(name)[0].endswith(_OF_WEIGHTS)}
        if self.config.get("quantization_config"):
            for name, spec in self.specs.items():
                is_coded = name in integers or (spec.dtype in FP8 and name not in self._scales)
                if is_coded and spec.packing is None:
                    raise PrecisionError(
                        f"`{name}` is {spec.dtype}: codes of a kind that cannot be read",
                        where=self.path,
                        do="Let the tool that made them decode them, or start from the release in BF16.",
                    )
        elif integers:
            scaled = {name.rpartition(".")[0] for name in self.specs if _OF_SCALES.fullmatch(name.rpartition(".")[2])}
            for name, spec in integers.items():
                if not scaled.isdisjoint((name, name.rpartition(".")[0])):
                    raise DamagedCheckpoint(
                        f"{name} is {spec.stored_dtype} codes, with scales beside them, but there is no "
                        "`quantization_config`",
                        where=where,
                        do="Take config.json from where the weights are from.",
                    )

    @property
    def behind(self) -> Collection[str]:
        return self.decoded.behind if self.decoded else ()

    def notes(self) -> Iterator[str]:
        if lone := self.lone_cache_scales:
            what = f"{counted(len(lone.stored.specs), 'scale')} of a KV cache, beside weights that are no codes,"
            yield f"{what} stay behind unless `--kv-cache fp8` takes them along."
        if self.decoded and self.decoded.specs:
            weights = counted(len(self.decoded.specs), "weight was", "weights were")
            yield f"{weights} {self.decoded.words}. {self.decoded.way_back}"
        if self.behind:
            scales = counted(len(self.behind), "scale")
            yield f"{scales} of inputs, outputs or a KV cache stay behind: e.g. {shown(min(self.behind))}."
        if self.idle_biases:
            biases = counted(len(self.idle_biases), "bias of zeros", "biases of zeros")
            yield f"{biases}, which the model does not have, stay behind: e.g. {shown(self.idle_biases[0])}."

    @cached_property
    def encodings(self) -> Mapping[str, Encoding]:
        return stored_encodings(self.stored, self.specs, self._scales, self.path)

    @property
    def weight_encodings(self) -> WeightEncodings | None:
        """How the weights are encoded, or once were; None if they never were."""
        if not self._scales:
            return encodings_file.find(self.path)
        stored = StoredTensors({name: self.stored.places[name] for name in sorted(self._scale_names)})
        weights = {name: self.specs[name] for name in self._scales}
        beside, files = self.path / QUANT_CONFIG, dict[str, bytes]()
        if has_file(beside, self.path):
            files[QUANT_CONFIG] = read_file(beside, self.path)
            with damage("no UTF-8", beside):  # it travels along as text
                files[QUANT_CONFIG].decode()
        return WeightEncodings(weights, self._scales, stored, self.config["quantization_config"], files, self.path)

    @property
    def lone_cache_scales(self) -> WeightEncodings | None:
        """The scales of a KV cache beside weights that are no codes; None if there are none. Those of codes travel with
        them, in `weight_encodings`."""
        lone = self._cache_scales - (self.decoded.read if self.decoded else set())
        if not lone or self._scales:
            return None
        stored = StoredTensors({name: self.stored.places[name] for name in sorted(lone)})
        return WeightEncodings({}, {}, stored, path=self.path)

    def cast(self, name: str) -> Cast | None:
        return self.decoded.cast(name) if self.decoded and name in self.decoded.specs else None

    def decoded_from(self, name: str) -> str:
        cast = self.cast(name)
        return cast.in_words if cast else ""

    def chunks(self, name: str) -> Sequence[Chunk]:
        if self.decoded and name in self.decoded.specs:
            return self.decoded.chunks(name)
        return self.stored.chunks(name)


class HuggingFaceReader(HuggingFaceTensors):
    """A Hugging Face directory as a Reader. Raises DamagedCheckpoint where files contradict one another.

    Names are without the words of wrappers that a program had the model in (`names_inside`); `wrapped` is the first
    tensor that is stored with one, None if there is none.
    """

    def __init__(self, path: Path, hints: Hints = NO_HINTS) -> None:
        """Companions are those of a reference where they are needed (`needed_hints`); config.json is its own if it has
        one."""
        self.path = path
        self._file_format = file_format_of(path) or SAFETENSORS
        self.own_companions = read_companions(path)
        self.companions = needed_hints(hints, self.own_companions).companions or self.own_companions
        where = self.companions.config_path
        config = parse_json(self.companions.files["config.json"], where)
        places, self.config, self.wrapped = read_published(path, self._file_format, config, where)
        if self.config.get("model_type") != config.get("model_type"):  # a wrapper's, of which this is the text model
            files = {name: content for name, content in self.companions.files.items() if name != "config.json"}
            self.companions = replace(self.companions, files=files)
        self._describe(places, where)

    def notes(self) -> Iterator[str]:
        if self.wrapped:
            yield f"Names are without those of modules around the model or its layers, as `{self.wrapped}` has one."
        yield from super().notes()

    @property
    def container(self) -> str:
        return self._file_format.name

    @cached_property
    def hf_quant_config(self) -> dict[str, Any] | None:
        """The content of hf_quant_config.json, if there is one."""
        path = self.path / QUANT_CONFIG
        return read_json(path, self.path) if has_file(path, self.path) else None

    @cached_property
    def live_fp8(self) -> Fp8States | None:
        """The state that an export for Transformer Engine computes with."""
        return sidecar.find(self.path, sidecar.LIVE)

    @cached_property
    def fp8(self) -> Fp8States | None:
        return self.live_fp8 or sidecar.find(self.path)

    @cached_property
    def iteration(self) -> int | None:
        if self.fp8 and self.fp8.iteration is not None:
            return self.fp8.iteration
        if not self._optimizer:
            return None
        if (step := trainer_step(self.path)) is not None:
            return step
        with suppress(CheckpointError):  # an optimizer that can only be dropped
            return self.trainer_run.updates
        return None

    @cached_property
    def _optimizer(self) -> NumberedOptimizer | None:
        """The optimizer of Hugging Face's Trainer; None if it saved none."""
        paths = (self.path / name for name in numbered_optimizer.FILES)
        path = next((path for path in paths if has_file(path, self.path)), None)
        return NumberedOptimizer(path, self.specs, table_of(self.model).behind) if path else None

    @property
    def optimizer_specs(self) -> Mapping[str, TensorSpec]:
        return self._optimizer.specs if self._optimizer else {}

    @property
    def unsupported_state(self) -> str:
        """In words, an optimizer that has no state, and files of one in no form that is known here; empty if there are
        none."""
        own = self._optimizer.path if self._optimizer else None
        found = [path.name for path in sorted(self.path.glob("optimizer*")) if path != own]
        with suppress(CheckpointError):  # an optimizer that can only be dropped
            if own and not self.optimizer_specs:
                found.insert(0, f"{own.name}, which has groups of parameters and no state of any")
        return listed(found)

    @property
    def trainer_run(self) -> TrainerRun:
        if self._optimizer is None:
            raise CheckpointError("there is no optimizer", where=self.path)
        return self._optimizer.run

    @property
    def files(self) -> Sequence[Path]:
        optimizer = {self._optimizer.path} if self._optimizer else set()
        return sorted({file for file, _ in self.stored.places.values()} | optimizer)

    def chunks(self, name: str) -> Sequence[Chunk]:
        if self._optimizer and name.startswith(STATE):
            return self._optimizer.chunks(name)
        return super().chunks(name)


@dataclass(frozen=True)
class HuggingFaceWriter:
    """A Hugging Face directory being built in `directory`.

    `companions` are copied as they are, except config.json. That is made from the source's (or from `config` if the
    source has none), with the target's dtype, its `quantization`, and the keys of `config`, which is of the text model
    alone, that `lacks` reports as missing. `extra_files` are written beside it. Weights are in files of a
    `file_format`. FP8 state goes where a run loads it from if it is `live`, else where it is only carried.
    """

    directory: Path
    specs: Mapping[str, TensorSpec]
    companions: Companions
    config: Mapping[str, Any]
    quantization: Mapping[str, Any] | None = None
    extra_files: Mapping[str, bytes] = field(default_factory=dict)
    max_shard_size: int = MAX_SHARD_SIZE
    file_format: WeightFileFormat = SAFETENSORS
    live: bool = False
    lacks: Callable[[Mapping[str, Any]], Iterable[str]] = lambda config: ()

    @cached_property
    def _files(self) -> WeightFiles:
        return WeightFiles(self.directory, self.specs, self.max_shard_size, self.file_format)

    def lay_out(self) -> None:
        self._files.lay_out()

    def chunks(self, name: str) -> Sequence[Chunk]:
        return self._files.chunks(name)

    def finish(self, fp8: Fp8States | None) -> None:
        files = {**self.companions.files, **self.extra_files}
        config = config_of_values(self.companions, self.config, self.specs)
        text = text_part(config)
        said = text if isinstance(text, dict) else config  # `self.config` is of the text model alone
        said |= {key: self.config[key] for key in self.lacks(config) if key in self.config}
        if self.quantization is not None:
            config["quantization_config"] = self.quantization
            config |= expert_dtype(config, self.specs)
        self._files.write_index()
        write_beside(self.directory, replace(self.companions, files=files), config, fp8, live=self.live)


CONTAINER = Container(
    recognise,
    without_iterations(HuggingFaceReader),
    "config.json with model.safetensors, model.safetensors.index.json or other *.safetensors, or pytorch_model.bin "
    "or its index (Hugging Face)",
)


def _idle_biases(reader: HuggingFaceTensors, decoded: DecodedWeights) -> list[str]:
    """Biases beside codes that the model does not have, all zeros: AutoGPTQ and AutoRound have written one for each
    linear (AutoGPTQ's issue 555, in TheBloke's directories), and vLLM passes over them."""
    specs, model = reader.specs, reader.model
    found = {f"{name.removesuffix('weight')}bias": spec.rows for name, spec in decoded.specs.items()}
    found = {name: rows for name, rows in found.items() if name in specs}
    files = {reader.stored.places[name][0] for name in found}
    if not found or any(map(whole_length, files)):  # headers alone say nothing of values
        return []
    for row in table_of(model).spelled(specs, model):
        if row.present.in_layout("hf", model) and row.count(model) <= len(specs):
            for place in row.places(model):
                for name in names(row, "hf", place):
                    found.pop(name, None)
    fitting = [name for name, rows in found.items() if specs[name].shape == (rows,) and specs[name].dtype in FLOATS]
    return [name for name in fitting if not bool(read_tensor(reader.stored, name).any())]
