"""The directory of an iteration, whatever Megatron container it is of."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from precisionctl.checkpoints.base import Companions
from precisionctl.checkpoints.megatron.fp8_state import ExpertPayloads, as_states, decode
from precisionctl.checkpoints.megatron.model import companions_of, model_of
from precisionctl.checkpoints.megatron.payloads import SavedPayload
from precisionctl.errors import CheckpointError
from precisionctl.fp8 import sidecar
from precisionctl.fp8.grouped import ColumnOrder
from precisionctl.fp8.state import Fp8States
from precisionctl.model_shape import ModelShape
from precisionctl.param import Layout, TensorSpec


class MegatronDirectory(ABC):
    """What Readers of Megatron's containers share: which model a directory holds, and its FP8 state, by what they
    find of arguments, common data and payloads."""

    layout: Layout = "megatron"
    family: str | None = None
    """Which family to take the model for, where no config.json says it."""
    grouped_columns: ColumnOrder | None = None
    """In which order a grouped linear's FP8 state stands, where the payloads do not tell."""

    path: Path
    specs: Mapping[str, TensorSpec]

    @property
    def expert_ranks(self) -> int | None:
        """Over how many expert ranks grouped linears were spread, where their payloads are cut for each expert."""
        return None

    @property
    @abstractmethod
    def args(self) -> Mapping[str, Any]:
        """Megatron's arguments; empty where none were saved."""

    @property
    @abstractmethod
    def common(self) -> Mapping[str, Any]:
        """All that is no tensor and belongs to no rank: `args`, `iteration`, the optimizer's settings, ..."""

    @property
    @abstractmethod
    def iteration(self) -> int | None:
        """None for a `release`: weights that belong to no run."""

    @abstractmethod
    def payloads(self) -> Iterator[SavedPayload]:
        """Each `_extra_state` that is not empty."""

    @cached_property
    def companions(self) -> Companions:
        return companions_of(self.path)

    @cached_property
    def model(self) -> ModelShape:
        if not self.args and "config.json" not in self.companions.files:
            raise CheckpointError(
                "it does not say which model it is: neither Megatron's arguments nor a config.json were saved with it",
                where=self.path,
                do="Give `convert` or `export-inference` a Hugging Face directory of the same model with --reference: "
                "its config.json and tokenizer are enough. What `convert --to megatron` makes of it says by itself.",
            )
        return model_of(self.path, self.args, self.companions, self.specs, self.family)

    @cached_property
    def fp8(self) -> Fp8States | None:
        """The delayed-scaling state in `_extra_state`, else the one in the sidecar. Raises what `decode` raises."""
        found = decode(self.payloads(), self.path, ExpertPayloads(self.expert_ranks, self.grouped_columns), self.args)
        return as_states(found, self.common, self.iteration, sidecar.find(self.path))
