"""Shared by checkpoints of trainers that have Hugging Face's names but no description of the model. A config.json
describes it: beside the checkpoint, as Hugging Face's Trainer writes it, or in the reference."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from precisionctl.architectures.families import read_model
from precisionctl.checkpoints.base import WITH_REFERENCE, Companions, Hints, Reader
from precisionctl.checkpoints.hf_directory.companions import (
    is_tokenizer,
    needed_hints,
    read_companions,
    with_tokenizer,
)
from precisionctl.codes.encoding import Encoding
from precisionctl.errors import CheckpointError, DamagedCheckpoint
from precisionctl.fp8 import sidecar
from precisionctl.fp8.state import Fp8States
from precisionctl.model.model_shape import ModelShape
from precisionctl.param import Layout, TensorSpec
from precisionctl.untrusted.safe_files import check_link
from precisionctl.untrusted.safe_json import parse_json

T = TypeVar("T")


class TrainerDirectory:
    """The part of a Reader that is not about tensors. `what` names the kind of checkpoint in errors, and `beside` are
    further directories that may have its config.json."""

    layout: Layout = "hf"
    encodings: Mapping[str, Encoding] = {}
    specs: Mapping[str, TensorSpec] = {}

    def __init__(self, path: Path, hints: Hints, what: str, *beside: Path) -> None:
        self.path = path
        self._hints, self._what, self._beside = hints, what, beside

    @cached_property
    def own_companions(self) -> Companions:
        for place in self._beside:
            if place.is_relative_to(self.path) and ".." not in place.parts:  # those above it are the user's, too
                check_link(place, self.path)
        places = list[Companions]()
        for place in dict.fromkeys((self.path, *self._beside)):
            found = replace(read_companions(place), notes=())
            if content := found.files.get("config.json"):
                config = parse_json(content, found.config_path)
                # OLMo-core's config.json does not travel: it has the settings of a run, those of a model under `model`
                if "model_type" not in config and isinstance(config.get("model"), dict):
                    files = {name: file for name, file in found.files.items() if name != "config.json"}
                    found = replace(found, files=files)
            places.append(found)
        own = next((one for one in places if "config.json" in one.files), places[0])
        apart = next((one for one in places if any(map(is_tokenizer, one.files))), None)
        return own if apart is None or any(map(is_tokenizer, own.files)) else with_tokenizer(own, apart)

    @property
    def companions(self) -> Companions:
        """The companion files beside the checkpoint, or those of a reference that it needs."""
        return needed_hints(self._hints, self.own_companions).companions or self.own_companions

    @cached_property
    def model(self) -> ModelShape:
        if not says_its_model(self):
            raise CheckpointError(
                f"{self._what} does not say which model it is",
                where=self.path,
                do=f"{WITH_REFERENCE} Or copy these beside the checkpoint.",
            )
        return self.model_with(self.specs)

    def model_with(self, stored: Collection[str]) -> ModelShape:
        """The model that config.json describes, with tensors of these names."""
        companions = self.companions
        path = companions.config_path
        return read_model(parse_json(companions.files["config.json"], path), path, stored)

    @cached_property
    def fp8(self) -> Fp8States | None:
        return sidecar.find(self.path)


def says_its_model(reader: Reader | TrainerDirectory) -> bool:
    """Whether something describes the model of a checkpoint. If not, tensors keep the names under which they are
    stored."""
    return not isinstance(reader, TrainerDirectory) or "config.json" in reader.companions.files


def by_model_names(found: Iterable[tuple[str, str, T]], where: Path) -> dict[str, T]:
    """What is found of a model, by the model's names; each comes with its own name and the model's. Raises
    DamagedCheckpoint for two that are the same tensor of the model."""
    named, sources = dict[str, T](), dict[str, str]()
    for own, name, one in found:
        if (other := sources.setdefault(name, own)) != own:
            raise both_are(other, own, name, where)
        named[name] = one
    return named


def both_are(one: str, other: str, name: str, where: Path) -> DamagedCheckpoint:
    """The error for two stored tensors that are the same one of the model, of which either could be meant."""
    what = f"`{one}` and `{other}` are both `{name}`"
    return DamagedCheckpoint(what, where=where, do="Save one model, under one set of names.")
