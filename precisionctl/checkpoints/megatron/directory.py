"""The directory of an iteration in any of Megatron's containers: which model it holds, and its FP8 state."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

from precisionctl.architectures.families import from_hf_config, from_megatron_args
from precisionctl.architectures.megatron.args_said import TRUST_REFERENCE
from precisionctl.architectures.megatron.megatron_args import (
    MEGATRON_ONLY,
    as_config_says,
    as_in_megatron,
    read_megatron_args,
)
from precisionctl.architectures.wrapped_architecture import beside_towers
from precisionctl.architectures.wrappers import TOWERS
from precisionctl.checkpoints.base import WITH_REFERENCE, Companions, Hints, Reader
from precisionctl.checkpoints.chunks import Chunk, Chunked
from precisionctl.checkpoints.hf_directory.companions import (
    is_tokenizer,
    needed_hints,
    read_companions,
    with_tokenizer,
)
from precisionctl.checkpoints.megatron.fp8_state import ExpertPayloads, as_states, decode_payloads
from precisionctl.checkpoints.megatron.keys import AHEAD, BRIDGE_TOKENIZER, COMPANIONS, OURS, VERL, VERL_COMPANIONS
from precisionctl.checkpoints.megatron.payloads import SavedPayload
from precisionctl.checkpoints.megatron.towers import stored_towers
from precisionctl.checkpoints.torch_files.torch_zip import Span
from precisionctl.codes.encoding import Encoding
from precisionctl.errors import CheckpointError, DamagedCheckpoint, shown
from precisionctl.fp8 import sidecar
from precisionctl.fp8.state import Fp8States
from precisionctl.model.model_shape import ModelShape
from precisionctl.model.same_model import differences
from precisionctl.param import EMBEDDING, OUTPUT, Layout, TensorSpec
from precisionctl.paths import above, own_name
from precisionctl.untrusted.safe_files import check_link
from precisionctl.untrusted.safe_json import parse_json


def companions_of(directory: Path) -> Companions:
    """The Hugging Face files (config, tokenizer) that are kept in an iteration's directory, that verl keeps beside it
    and SkyRL in it, or, of a tokenizer, that Megatron-Bridge keeps in it."""
    places = [directory / COMPANIONS, directory / VERL_COMPANIONS]
    for place in places:
        check_link(place, directory)
    beside = above(directory) / VERL_COMPANIONS
    if own_name(directory) == VERL and not beside.is_symlink():
        places.append(beside)
    own = read_companions(next((place for place in places if place.is_dir()), directory / COMPANIONS))
    if any(map(is_tokenizer, own.files)):
        return own
    check_link(directory / BRIDGE_TOKENIZER, directory)
    bridges = read_companions(directory / BRIDGE_TOKENIZER)
    # Others than transformers' are Megatron's vocabularies, one of which has the name tokenizer.json for another file
    if "tokenizer_config.json" not in bridges.files:
        return own
    return with_tokenizer(own, bridges)


def config_of(companions: Companions) -> Mapping[str, Any]:
    """The config.json among companion files; empty if there is none."""
    data = companions.files.get("config.json")
    return {} if data is None else parse_json(data, companions.config_path)


def model_of(
    directory: Path,
    args: Mapping[str, Any],
    companions: Companions,
    specs: Mapping[str, TensorSpec],
    architecture: str | None = None,
    *,
    trust_reference: bool = False,
) -> ModelShape:
    """The model: from the companions' config.json, checked against Megatron's arguments, which give way to it with
    `trust_reference`; without one from the arguments alone, as a model of `architecture` if given.

    Raises DamagedCheckpoint where the two contradict each other or there is no embedding; otherwise as
    `from_hf_config` and `from_megatron_args`.
    """
    if EMBEDDING not in specs:
        raise DamagedCheckpoint(f"no {EMBEDDING}", where=directory)
    rows = specs[EMBEDDING].rows
    if "config.json" not in companions.files:
        return from_megatron_args(args, rows, directory, architecture)
    path, config = companions.config_path, config_of(companions)
    model = dataclasses.replace(from_hf_config(config, path), padded_vocab_size=rows)
    if model.wrapper:
        towers = [name.removeprefix(TOWERS) for name in specs if name.startswith(TOWERS)]
        model = beside_towers(model, config, towers, has_head=OUTPUT in specs)
    if not args:
        return model
    by_args = by_arguments(as_config_says(args, model) if trust_reference else args, model, directory)
    model = dataclasses.replace(model, **{field: getattr(by_args, field) for field in MEGATRON_ONLY})
    # config.json was copied when the run began; the run may have changed the model since
    if found := contradictions(model, by_args):
        do = f"By which did it train? If by the arguments, remove config.json. If by config.json: {TRUST_REFERENCE}"
        if trust_reference:
            do = "--trust-reference cannot take back what no argument switches off. Give the run's own config.json."
        raise DamagedCheckpoint(f"it contradicts the arguments of Megatron: {found}", where=path, do=do)
    return model


def by_arguments(args: Mapping[str, Any], model: ModelShape, where: object) -> ModelShape:
    """The model that Megatron's arguments describe, with as many tokens as `model` where they do not say how many.
    Raises as `read_megatron_args`."""
    said = args if args.get("vocab_size") is not None else {**args, "vocab_size": model.vocab_size}
    return read_megatron_args(said, model.padded_vocab_size, where)


def contradictions(model: ModelShape, by_args: ModelShape) -> str:
    """The fields in which a model that config.json describes is another one than Megatron's arguments describe, in
    words: `rotary_base 10000.0 / 5.0`. Empty where they agree, as far as arguments can say the model."""
    differing = differences(model, by_args)
    told = as_in_megatron(model, in_bridge=by_args.attn_res_block_size is not None)
    named = {name: differing[name] for name in differences(told, by_args) if name in differing}
    if model.vocab_size < by_args.vocab_size:  # the rows between are tokens, and no padding
        named["vocab_size"] = model.vocab_size, by_args.vocab_size
    return ", ".join(f"{name} {' / '.join(map(shown, both))}" for name, both in named.items())


class MegatronReader(ABC):
    """A Reader of a Megatron container, whose checkpoints often do not name their family. The model and its FP8 state
    are derived from the arguments, common data and payloads that a subclass reads."""

    layout: Layout = "megatron"
    container: str
    hints: Hints

    path: Path
    specs: Mapping[str, TensorSpec]
    encodings: Mapping[str, Encoding]

    @property
    @abstractmethod
    def files(self) -> Sequence[Path]: ...

    @abstractmethod
    def chunks(self, name: str) -> Sequence[Chunk]: ...

    @property
    @abstractmethod
    def optimizer_specs(self) -> Mapping[str, TensorSpec]:
        """The optimizer's tensors: `optimizer.state.<kind>.<parameter>`, if it is stored by parameter."""

    @property
    def expert_ranks(self) -> int | None:
        """The number of expert-parallel ranks, if payloads of grouped linears were cut into one for each expert."""
        return None

    @property
    @abstractmethod
    def args(self) -> Mapping[str, Any]:
        """Megatron's arguments; empty where none were saved."""

    @property
    @abstractmethod
    def common(self) -> Mapping[str, Any]:
        """The data that is no tensor and the same for all ranks: `args`, `iteration`, the optimizer's settings, ..."""

    @property
    @abstractmethod
    def iteration(self) -> int | None:
        """The training step; None for a `release`, weights that belong to no run, and where nothing says it."""

    @property
    def trained_as_args(self) -> bool:
        """Whether a run wrote it in the precision that its arguments name: not of a `release` or before the first step,
        nor where `convert` wrote the arguments of a run to come."""
        ours = self.common.get(OURS)
        return bool(self.iteration) and not (isinstance(ours, dict) and ours.get(AHEAD) is True)

    @property
    @abstractmethod
    def objects(self) -> Sequence[str]:
        """The keys of pickled objects beside the tensors, e.g. `rng_state/shard_0.0_1.1`."""

    @abstractmethod
    def read_object(self, key: str) -> Any:
        """An object. Raises DamagedCheckpoint if there is none of this key, UnsafePickle for classes that are not on
        the allow-list."""

    @abstractmethod
    def checked_object(self, key: str) -> Span:
        """Where an object's bytes are, to be copied; it has been loaded once by the allow-list. Raises as
        `read_object`."""

    @abstractmethod
    def payloads(self) -> Iterator[SavedPayload]:
        """Each `_extra_state` that is not empty."""

    @cached_property
    def own_companions(self) -> Companions:
        """The files that travel with the checkpoint itself."""
        return companions_of(self.path)

    @property
    def companions(self) -> Companions:
        """The checkpoint's own companion files, or those of a reference that it needs."""
        return needed_hints(self.hints, self.own_companions).companions or self.own_companions

    @cached_property
    def towers(self) -> Chunked:
        """A wrapper's towers, by their names in a plan: the run's own, or from where its companion files are."""
        return self._with_own(needed_hints(self.hints, self.own_companions).towers or stored_towers(self.path))

    def _with_own(self, beside: Chunked) -> Chunked:
        """The towers that the run itself trained and saved, over those `beside` it."""
        return beside

    @cached_property
    def model(self) -> ModelShape:
        """The model. Raises CheckpointError if the checkpoint does not describe it; otherwise as `model_of`."""
        if not self.args and "config.json" not in self.companions.files:
            raise CheckpointError(
                "it does not say which model it is: neither Megatron's arguments nor a config.json were saved with it",
                where=self.path,
                do=WITH_REFERENCE,
            )
        hints = self.hints
        return model_of(
            self.path, self.args, self.companions, self.specs, hints.architecture, trust_reference=hints.trust_reference
        )

    @cached_property
    def fp8(self) -> Fp8States | None:
        """The delayed-scaling state in `_extra_state`, else that in the sidecar. Raises as `decode_payloads` and
        `sidecar.read` do."""
        found = decode_payloads(
            self.payloads(), self.path, ExpertPayloads(self.expert_ranks, self.hints.grouped_columns), self.args
        )
        return as_states(found, self.common, self.iteration, sidecar.find(self.path))


def of_megatron(reader: Reader) -> TypeGuard[MegatronReader]:
    """Whether a checkpoint is Megatron's."""
    return reader.layout == "megatron"
