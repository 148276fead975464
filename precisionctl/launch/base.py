"""The checkpoint to continue from, and the command line or config that a framework is started with."""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from precisionctl.architectures.megatron.megatron_args import otherwise_in_megatron
from precisionctl.checkpoints.base import Reader
from precisionctl.checkpoints.hf_directory.companions import is_tokenizer, read_companions
from precisionctl.checkpoints.huggingface import HuggingFaceReader
from precisionctl.checkpoints.megatron.arguments import recipe_words
from precisionctl.checkpoints.megatron.directory import of_megatron
from precisionctl.checkpoints.megatron.keys import EXTRA_STATE, TRACKER, directory_name, read_tracker
from precisionctl.checkpoints.torch_dist.reader import TorchDistReader
from precisionctl.commands.notes import GATE
from precisionctl.commands.run_precision import precision_of_run
from precisionctl.doctor import examine_payloads
from precisionctl.errors import CheckpointError, PrecisionError, UnknownArchitecture
from precisionctl.fp8.state import DelayedScaling
from precisionctl.megatron_flags import stateless_words
from precisionctl.model.model_parts import check_size
from precisionctl.model.model_shape import ModelShape
from precisionctl.planning.make_plan import plan_weights, stored_model
from precisionctl.planning.plan import Plan, check_fp8_gemms
from precisionctl.precision import Precision
from precisionctl.readiness.patterns import shortened
from precisionctl.recipe import Recipe
from precisionctl.sizes import counted, listed
from precisionctl.trainer.saved.run_folder import recipe_of_run
from precisionctl.untrusted.safe_files import check_link, has_file

FP32_SCALES = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
"""Transformer Engine's environment variable for block scales that are not powers of two; no framework has a flag."""


_SAVED_TOKENIZER = "tokenizer"
"""Where Megatron-Bridge keeps its tokenizer in an iteration (save_tokenizer_assets, training/checkpointing.py): as
transformers saves it if it is transformers'; of others a file under a name that may be another thing there."""

_BRIDGE_FEATURES = {
    *("attn_logit_softcapping", "final_logit_softcapping", "embedding_multiplier", "post_layernorms"),
    *("rotary_base_local", "query_pre_attn_scalar", "pre_layernorms", "qk_layernorm_over_heads", "mtp_dense"),
    *("logit_multiplier", "multipliers", "mamba.gated_norm"),
}
"""Fields of ModelShape that Megatron-Core ignores and Megatron-Bridge's own modules compute (models/gemma:
gemma2_provider.py, gemma3_provider.py; exaone4, exaone/exaone_moe, olmoe, minimax_m2, falcon_h1)."""

_BRIDGED = ("gemma", "gemma2", "gemma3_text", "exaone4", "exaone_moe", "olmoe", "minimax_m2", "falcon_h1")
"""Families for which Megatron-Bridge has such modules."""


def left_to_provider(model: ModelShape) -> list[str]:
    """The fields of a model that only a model provider of Megatron-Bridge computes. Raises UnknownArchitecture for a
    model with fields that neither such a provider nor Megatron-Core computes."""
    other = otherwise_in_megatron(model)
    bridged = _BRIDGE_FEATURES if model.architecture in _BRIDGED else ()
    if missing := [field for field in other if field not in bridged]:
        raise UnknownArchitecture(
            f"Megatron-Core computes `{model.architecture}` differently: {', '.join(missing)}",
            do="`precisionctl resume` trains it as it is.",
        )
    return list(other)


@dataclass(frozen=True)
class Launch:
    """How to start a framework: a command and its options, each a tuple of flag and values; or `config`, the text of a
    config file. `yours` lists what the user has to add, `notes` what the user should know."""

    framework: str
    command: tuple[str, ...] = ()
    options: tuple[tuple[str, ...], ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    config: str = ""
    yours: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """The lines of a shell script or of a config file; `yours` and `notes` are comments at its end."""
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
    """The checkpoint from which training is to continue. `path` is the path that the user gave, which may be a
    directory of several iterations."""

    reader: Reader
    path: Path

    @cached_property
    def model(self) -> ModelShape:
        """The model that the tensors make: a framework would look for layers that only config.json has."""
        return stored_model(self.reader)

    def conversion(self, to: str) -> str:
        """The command that writes the checkpoint as something else."""
        return f"precisionctl convert {shlex.quote(str(self.path))} NEW --to {to}"

    def require_megatron(self, framework: str, do: str) -> None:
        """Raise CheckpointError, with the advice `do`, if this is not a Megatron checkpoint."""
        if not of_megatron(self.reader):
            raise CheckpointError(
                f"{framework} takes Megatron checkpoints, and this is not one", where=self.path, do=do
            )

    @property
    def is_hugging_face(self) -> bool:
        """Whether it is a directory that transformers loads. Other trainers' checkpoints, and adapters, have Hugging
        Face's names and are none."""
        return isinstance(self.reader, HuggingFaceReader)

    @property
    def directory(self) -> Path:
        """The directory of the iteration, or of the Hugging Face model."""
        return (self.reader.path or self.path).absolute()

    @property
    def root(self) -> Path:
        """The argument of `--load`: the directory that contains the directories of iterations."""
        here = self.directory
        return here.parent if here.name == "release" or here.name.startswith("iter_") else here

    def ckpt_step(self) -> int | None:
        """The iteration that Megatron-LM has to be told, where its tracker names another one or is not there.

        Raises CheckpointError where no number helps: for iteration 0 and a directory of another name, and for a release
        or under a tracker that says `release` or 0 unless that is what it says (`_load_base_checkpoint` and
        `read_metadata`, megatron/training/checkpointing.py). DamagedCheckpoint for a tracker that names nothing.
        """
        here, release = self.directory.name, directory_name(None)
        number = re.fullmatch(r"iter_(\d{7,15})", here)
        step = int(number[1]) if number else 0
        if not step and here != release:
            raise CheckpointError(
                f"Megatron-LM does not load {here}, but a release, or an iteration from 1 on under its name",
                where=self.path,
                do=f"Write one that it loads: {self.conversion('megatron')}",
            )
        do = f"Write `{step or release}` into that file."
        tracked = directory_name(read_tracker(self.root, do)) if has_file(self.root / TRACKER, self.root) else None
        if here == tracked:
            return None
        if step and tracked not in (release, directory_name(0)):
            return step
        says = f"names {tracked}" if tracked else "is not there"
        raise CheckpointError(f"Megatron-LM does not load {here}: {TRACKER} beside it {says}", where=self.path, do=do)

    @cached_property
    def tokenizer(self) -> Path | None:
        """A directory from which transformers can load a tokenizer; None if the checkpoint has none."""
        places = [self.directory, self.reader.companions.directory.absolute()]
        if of_megatron(self.reader):
            saved = self.directory / _SAVED_TOKENIZER
            check_link(saved, self.directory)
            places += [saved] if (saved / "tokenizer_config.json").is_file() else []
        return next((place for place in places if any(map(is_tokenizer, read_companions(place).files))), None)

    @cached_property
    def state(self) -> DelayedScaling | None:
        """The recipe of the FP8 state from which Transformer Engine can continue: in a Megatron checkpoint that of its
        `_extra_state` payloads, in a Hugging Face directory that of the sidecar. None if there is no such state.
        Payloads that Transformer Engine loads only with GATE count: `environment` sets it."""
        states = self.reader.fp8
        if states is None or not states.of_gemms:
            return None
        if of_megatron(self.reader) and not self._refused:
            return None
        return states.recipe

    @cached_property
    def recipe(self) -> Recipe | None:
        """The recipe of the run of `resume` that wrote the checkpoint; None for other checkpoints."""
        return recipe_of_run(self.reader)

    @cached_property
    def stateless(self) -> Precision | None:
        """The precision of the run that wrote the checkpoint, if that is of a recipe without state (current, block or
        MXFP8 scaling, or NVFP4), as run.json or Megatron's arguments say; None otherwise."""
        run = precision_of_run(self.reader)
        return run.precision if run and not run.precision.keeps_state else None

    @cached_property
    def in_fp8(self) -> Precision | None:
        """The precision in which a framework goes on that takes the recipe of `state`, or that of `stateless`: no
        framework has a flag for keep_bf16, and under delayed scaling none keeps layers in BF16 by their number. None
        for BF16."""
        if self.state:
            return Precision(fp8=True, delayed=self.state)
        return replace(self.stateless, keep_bf16=()).of_layers(self.model.num_layers) if self.stateless else None

    @property
    def fp8_words(self) -> Mapping[str, object]:
        """The recipe of `state`, or that of `stateless`, as arguments under the names that Megatron, Bridge and NeMo
        share; empty for BF16."""
        if self.state:
            return recipe_words(self.state)
        return stateless_words(self.stateless) if self.stateless else {}

    def require_fp8_sizes(self, framework: str) -> None:
        """Raise PrecisionError if the framework would have a weight in FP8 whose shape no FP8 GEMM takes: Transformer
        Engine ends its run at the first pass."""
        if self.in_fp8:
            try:
                check_fp8_gemms(self.plan, self.in_fp8)
            except PrecisionError as misfit:
                raise PrecisionError(
                    f"{framework} cannot go on in {self.in_fp8.codes}, and has no flag that keeps modules in BF16: "
                    f"{misfit.what}",
                    where=self.path,
                    do="Convert it with --precision bf16 and continue from that, or go on with `precisionctl resume`.",
                ) from None

    def fp8_notes(self, gemms: Sequence[str]) -> list[str]:
        """Notes on the modules that were in BF16 and go on `in_fp8`, where the framework has these `gemms`."""
        if self.in_fp8 is None:
            return []
        notes, recipe = [], self.recipe
        if recipe and recipe.precision.fp8 and recipe.precision.keep_bf16:
            kept = ", ".join(recipe.precision.keep_bf16)
            notes.append(f"there is no flag for precision.keep_bf16: {kept} go on in {self.in_fp8.codes}")
        if recipe and recipe.precision.keeps_state and recipe.precision.counts_layers:
            notes.append("the first and last layers go on in FP8: no flag keeps any in BF16 under delayed scaling")
        if self.state and self.reader.fp8:
            if lacking := set(gemms) - self.reader.fp8.modules.keys():
                have = counted(len(lacking), "module has no FP8 state, and goes", "modules have no FP8 state, and go")
                notes.append(f"{have} on in FP8 from empty scales: {listed(shortened(lacking, gemms))}")
        return notes

    @property
    def gemms(self) -> list[str]:
        """The modules that an FP8 recipe has in FP8, by Megatron name."""
        return list(self.plan.gemms)

    @cached_property
    def plan(self) -> Plan:
        return plan_weights(self.reader)

    @cached_property
    def _refused(self) -> int:
        return examine_payloads(self.reader, None).refused

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables for Transformer Engine: one that allows it to load pickles (needed from 2.16.1 on), and
        one for block scales that are not powers of two, for which no framework has a flag."""
        gate = {GATE: "1"} if of_megatron(self.reader) and self._refused else {}
        return gate | ({FP32_SCALES: "1"} if self.stateless and self.stateless.f32_block_scales else {})

    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        """The values of these arguments of a Megatron checkpoint, its parallel sizes; without those that it lacks.
        Raises DamagedCheckpoint for a value that is not a size."""
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
        """Whether the checkpoint has states of random number generators."""
        return of_megatron(self.reader) and any("rng_state" in key for key in self.reader.objects)

    @property
    def has_optimizer(self) -> bool:
        """Whether the checkpoint has an optimizer that Megatron loads."""
        return of_megatron(self.reader) and bool(self.reader.optimizer_specs)

    @property
    def lacks_schedule(self) -> bool:
        """Whether the checkpoint has an optimizer without a schedule of learning rates, as one from another trainer
        has. Megatron-LM then ends with a KeyError (`load_checkpoint`, megatron/training/checkpointing.py)."""
        return self.has_optimizer and not self.scheduler

    @property
    def scheduler(self) -> Mapping[str, Any]:
        """The state of Megatron's scheduler of learning rates; empty if there is none to go on with."""
        found = (
            self.reader.common.get("opt_param_scheduler") if of_megatron(self.reader) and self.has_optimizer else None
        )
        return found if isinstance(found, dict) else {}
