"""The checkpoint to continue from, and the command line or config that a framework is started with."""

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from precisionctl.architectures.megatron_args import otherwise_in_megatron
from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.megatron.carried_run import of_megatron
from precisionctl.checkpoints.megatron.keys import EXTRA_STATE, OURS
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.commands.notes import GATE
from precisionctl.doctor import examine_payloads
from precisionctl.errors import CheckpointError, UnknownArchitecture
from precisionctl.fp8.state import DelayedScaling
from precisionctl.model_shape import ModelShape, check_size
from precisionctl.precision import Precision
from precisionctl.recipe import Recipe
from precisionctl.trainer.saved.run_folder import RUN_FILE, recipe_of_run

FP32_SCALES = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"


_OF_BRIDGE = {
    *("attn_logit_softcapping", "final_logit_softcapping", "embedding_multiplier", "post_layernorms"),
    *("rotary_base_local", "query_pre_attn_scalar", "pre_layernorms", "qk_layernorm_over_heads"),
}
"""What Megatron-Bridge's own modules add to Megatron-Core's (models/gemma: gemma2_provider.py, gemma3_provider.py;
exaone4, olmoe, minimax_m2)."""

_BRIDGED = ("gemma", "gemma2", "gemma3_text", "exaone4", "olmoe", "minimax_m2")
"""Families for which it has such modules."""


def left_to_provider(model: ModelShape) -> list[str]:
    """What of a model only a provider of Megatron-Bridge computes. Raises UnknownArchitecture for one that neither such
    a provider nor Megatron-Core does."""
    other = otherwise_in_megatron(model)
    bridged = _OF_BRIDGE if model.architecture in _BRIDGED else ()
    if missing := [field for field in other if field not in bridged]:
        raise UnknownArchitecture(
            f"Megatron-Core computes `{model.architecture}` otherwise: {', '.join(missing)}",
            do="`precisionctl resume` trains it as it is.",
        )
    return list(other)


@dataclass(frozen=True)
class Launch:
    """What to start a framework with: a command and its options, each with its values; or `config`, text for a file of
    its own. `yours` names what the user has to add, `notes` what he should know."""

    framework: str
    command: tuple[str, ...] = ()
    options: tuple[tuple[str, ...], ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    config: str = ""
    yours: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """The lines of a shell script, or of a config file; what belongs in neither is a comment."""
        comment = "# " if self.config else ""
        lines = [f"{comment}export {name}={value}" for name, value in self.environment.items()]
        words = [shlex.join(self.command), *map(shlex.join, self.options)]
        lines += " \\\n    ".join(filter(None, words)).splitlines()
        lines += self.config.splitlines()
        lines += [f"# yours to add: {', '.join(self.yours)}"] if self.yours else []
        return [*lines, *(f"# {note}" for note in self.notes)]

    def as_json(self) -> dict[str, Any]:
        return {
            **vars(self),
            "command": [*self.command, *(word for option in self.options for word in option)],
            "options": [list(option) for option in self.options],
        }


@dataclass(frozen=True)
class LaunchSource:
    """A checkpoint that training shall continue from. `path` is what the user named, which may be a directory of
    several iterations."""

    reader: Reader
    path: Path

    @property
    def model(self) -> ModelShape:
        return self.reader.model

    def require_megatron(self, framework: str, do: str) -> None:
        """Raise CheckpointError where it is not Megatron's."""
        if not of_megatron(self.reader):
            raise CheckpointError(
                f"{framework} takes Megatron checkpoints, and this is not one", where=self.path, do=do
            )

    @property
    def directory(self) -> Path:
        """The directory of the iteration, or of the Hugging Face model."""
        return (self.reader.path or self.path).absolute()

    @property
    def root(self) -> Path:
        """What `--load` names: where iterations are."""
        here = self.directory
        return here.parent if here.name == "release" or here.name.startswith("iter_") else here

    @property
    def tokenizer(self) -> Path | None:
        """A directory that transformers can load a tokenizer from."""
        for place in (self.directory, self.directory / OURS / "hf"):
            if any(place.glob("tokenizer*")):
                return place
        return None

    @cached_property
    def state(self) -> DelayedScaling | None:
        """The recipe of the FP8 state that Transformer Engine would take up: in a Megatron checkpoint that of payloads,
        in a Hugging Face directory that of the sidecar."""
        states = self.reader.fp8
        if states is None or not any(one.of_gemm for one in states.modules.values()):
            return None
        if of_megatron(self.reader) and not self._refused:
            return None
        return states.recipe

    @cached_property
    def recipe(self) -> Recipe | None:
        """The recipe of the run of `resume` that wrote the checkpoint; None where none did."""
        return recipe_of_run(self.reader)

    @property
    def stateless(self) -> Precision | None:
        """What such a run computes in, where that is FP8 that keeps no state."""
        precision = self.recipe.precision if self.recipe else None
        return precision if precision and precision.fp8 and not precision.keeps_state else None

    @cached_property
    def _refused(self) -> int:
        return examine_payloads(self.reader, None).refused

    @property
    def environment(self) -> Mapping[str, str]:
        """What Transformer Engine wants to be told: before it loads pickles, from 2.16.1 on; and of scales that are no
        powers of two, for which there is no flag."""
        told = {GATE: "1"} if of_megatron(self.reader) and self._refused else {}
        precision = self.stateless
        return told | ({FP32_SCALES: "1"} if precision and precision.block.use_f32_scales else {})

    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        """The values of these arguments, which say how a Megatron checkpoint is cut; without those that it does not
        have. Raises DamagedCheckpoint for what is no size."""
        args = self.reader.args if of_megatron(self.reader) else {}
        found = {name: args[name] for name in names if args.get(name) is not None}
        for name, size in found.items():
            check_size(size, name)
        return found

    @property
    def lacks_extra_state(self) -> bool:
        """Whether a `torch_dist` directory has no `_extra_state` at all, not even an empty one; Megatron's default
        strictness then refuses it."""
        found = self.reader
        return isinstance(found, TorchDistReader) and not any(EXTRA_STATE in key for key in found.objects)

    @property
    def has_generators(self) -> bool:
        """Whether there are states of random generators."""
        return of_megatron(self.reader) and any("rng_state" in key for key in self.reader.objects)

    @property
    def ours(self) -> bool:
        """Whether `resume` wrote it."""
        return isinstance(self.reader, TorchDistReader) and (self.directory / RUN_FILE).is_file()

    @property
    def has_optimizer(self) -> bool:
        """Whether there is one that Megatron itself wrote, or that was converted from such a one."""
        return of_megatron(self.reader) and bool(self.reader.optimizer_specs) and not self.ours
