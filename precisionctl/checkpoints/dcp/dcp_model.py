"""Read a model in PyTorch's own checkpoint (DCP) with Hugging Face's names.

Trainers without names of their own save it: accelerate's FSDP 1 and 2, `dcp.save` of a state dict, megatron-fsdp.
torchtitan's names and OLMo-core's are read, too. AdamW's state is read if it is stored by parameter name. `.metadata`
says where the pieces are, or files of safetensors do. A config.json, beside the checkpoint or in the reference, says
which model it is.

NeMo Automodel (0.7) has a model's pieces in safetensors in `model/` of a step, with config.json and
the tokenizer in `model/.hf_metadata`, and its optimizer in `optim/`. Other trainers, too, have each in a directory
(other_trainers/trainer_trees.py).
"""

import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from os.path import commonprefix
from pathlib import Path

from precisionctl.architectures.families import table_of
from precisionctl.checkpoints.base import Hints
from precisionctl.checkpoints.chunks import Chunk, ComputedTensor
from precisionctl.checkpoints.computed_rows import SomeRows
from precisionctl.checkpoints.dcp import automodel, olmo_core, torchtitan
from precisionctl.checkpoints.dcp.dcp_optimizer import DcpOptimizer, split_off, under_a_key, with_names
from precisionctl.checkpoints.dcp.saved_step import SavedStep, saved_step
from precisionctl.checkpoints.hf_directory import safetensors_pieces
from precisionctl.checkpoints.hf_directory.fused_experts import stacks
from precisionctl.checkpoints.hf_directory.wrapped_names import names_inside
from precisionctl.checkpoints.megatron.keys import EXTRA_STATE
from precisionctl.checkpoints.other_trainers import olmo_core_families, torchtitan_families
from precisionctl.checkpoints.other_trainers.trainer_directory import TrainerDirectory, by_model_names, says_its_model
from precisionctl.checkpoints.other_trainers.trainer_run import (
    ParameterGroup,
    TrainerRun,
    adam_run,
    muon_settings,
    number,
    trainer_step,
    with_parameters,
)
from precisionctl.checkpoints.other_trainers.trainer_trees import AUTOMODEL, DCP_TREES, step_of
from precisionctl.checkpoints.torch_files import dcp_metadata, torch_zip
from precisionctl.checkpoints.torch_files.dcp_tensors import LogicalTensor, LogicalTensors, check_whole, slices
from precisionctl.checkpoints.torch_files.torch_zip import Span
from precisionctl.errors import DROP_OPTIMIZER, CheckpointError, DamagedCheckpoint, shown
from precisionctl.model.text_config import config_parts
from precisionctl.model.untabled_model import UntabledModel
from precisionctl.param import MOMENTUM, TensorSpec, state_name, weights_and_states
from precisionctl.paths import above, own_name
from precisionctl.sizes import counted, listed
from precisionctl.untrusted.safe_files import check_link
from precisionctl.untrusted.safe_json import parse_json
from precisionctl.untrusted.safe_pickle import is_count

ACCELERATE = "pytorch_model_fsdp_0"
"""Where accelerate has the model, in the directory of a step."""

_ACCELERATE_OPTIMIZER = re.compile(r"optimizer_\d+")
"""Where it has optimizers: `optimizer_0`, and others if a program has several."""

_AUTOMODEL_COMPANIONS = ".hf_metadata"
"""Where it has config.json and the tokenizer, in the directory of the model."""

_APART = {(tree.model, tree.optimizer): tree.companions for tree in DCP_TREES if tree.optimizer}
"""Where trainers have the model and its optimizer in the directory of a step, and where config or tokenizer."""

_AUTOMODEL_UNFINISHED = ".incomplete"
"""What is in the directory of a step while it is saved, and after a save that was stopped."""

TORCHTITAN, OLMO_CORE = "torchtitan", "OLMo-core"
"""Trainers that have names of their own for a model's tensors."""

_TITANS_STEP = "train_state.step"
"""Where torchtitan has the step of a run: a number, in older versions a tensor."""

_ALL_RANKS = "Copy the files of all ranks. If they are there, let PyTorch join them: consolidate_safetensors_files."

_WRAPPERS = ("model.", "module.")
_INSIDE_MODEL = (
    "model.",
    "lm_head.",
    "transformer.",
    "gpt_neox.",
    "backbone.",
    "tok_embeddings.",
    "module.",
)
"""The beginnings of names inside a model. If one of them follows `model.`, or the key of a program's own dict, that is
a wrapper's and not the model's own."""

_OF_MUON = (
    "Nesterov, scale and Newton-Schulz steps of Muon, which Megatron has from its own --muon-*, and `resume` from "
    "optimizer.muon_* (both take gate and up as one matrix)"
)


def is_dcp(directory: Path) -> bool:
    """Whether a directory has pieces of tensors, and what says where they belong."""
    return (directory / dcp_metadata.FILE).is_file() or safetensors_pieces.has_pieces(directory)


def directories_of(path: Path) -> tuple[Path, Sequence[Path]] | None:
    """The directory of a model in pieces, and those of its optimizers that are apart, whole or not: a path itself, or
    what accelerate, OLMo-core and others have in it. None where there is none."""
    if is_dcp(path):
        return path, ()
    if (path / olmo_core.DIRECTORY / dcp_metadata.FILE).is_file():
        return path / olmo_core.DIRECTORY, ()
    if is_dcp(path / ACCELERATE):
        named = (one for one in path.iterdir() if _ACCELERATE_OPTIMIZER.fullmatch(one.name))
        return path / ACCELERATE, sorted(one for one in named if one.is_dir())
    pairs = _pairs_in(path)  # of two, either could be meant
    return (path / pairs[0][0], [path / pairs[0][1]]) if len(pairs) == 1 else None


def _pairs_in(path: Path) -> Sequence[tuple[str, str]]:
    """Which directories of a model and its optimizer are in that of a step."""
    return [(model, apart) for model, apart in _APART if (path / apart).is_dir() and is_dcp(path / model)]


def _of_optimizers(apart: Sequence[Path], path: Path) -> tuple[dcp_metadata.Index | None, str]:
    """What the directory of an optimizer holds; or in words why none is read."""
    for one in apart:
        check_link(one, path)
        if not (one / dcp_metadata.FILE).is_file():
            why = "which is saved last: a save was stopped, or the copy is not whole"
            return None, f"{one.name}/ has no {dcp_metadata.FILE}, {why}"
    if len(apart) > 1:
        return None, f"optimizers in {listed(one.name for one in apart)}, of which one alone is read"
    return (dcp_metadata.read_index(apart[0]), "") if apart else (None, "")


class DcpModelReader(TrainerDirectory):
    """A model's weights in a DCP directory, and AdamW's moments, in the same one or in one that is `apart`. Opening it
    reads `.metadata` alone, or headers of safetensors. A weight in FP32 is its own master.

    Raises DamagedCheckpoint where pieces and files contradict each other, for a save that was stopped, and if pieces in
    safetensors cannot be all of their tensors; UnsafePickle; and CheckpointError where no config.json says which model
    it is, or weights are FP8 codes. `names_of` is the trainer that has these names, if they are not Hugging Face's.
    """

    container = "dcp"
    _optimizer: DcpOptimizer
    unsupported_state = ""  # what is not read is refused by `optimizer_specs`

    def __init__(
        self,
        path: Path,
        directory: Path,
        index: dcp_metadata.Index,
        hints: Hints,
        apart: Sequence[Path] = (),
    ) -> None:
        own = (path / places for pair in _pairs_in(path) if directory != path and (places := _APART[pair]))
        beside = (directory, directory / _AUTOMODEL_COMPANIONS, *own)
        super().__init__(path, hints, "a PyTorch checkpoint (DCP)", *beside)
        self._directory = directory
        if own_name(directory) == AUTOMODEL and (above(directory) / _AUTOMODEL_UNFINISHED).exists():
            what = f"a save of NeMo Automodel that goes on, or was stopped ({_AUTOMODEL_UNFINISHED})"
            raise DamagedCheckpoint(what, where=above(directory), do="Give an earlier step.")
        index_of_optimizer, unread = _of_optimizers(apart, path)
        named = self._named(index, index_of_optimizer, apart)
        self._optimizer = replace(self._optimizer, unread=unread or self._optimizer.unread)
        tensors = {kind: self._logical(found) for kind, found in named.items()}
        for each in filter(None, (index, index_of_optimizer)):
            dcp_metadata.check_apart(((n, piece.span) for n, one in each.tensors.items() for piece in one.pieces), path)
        self._stored = LogicalTensors({_full(kind, n): one for kind, of in tensors.items() for n, one in of.items()})
        self.names_of: str | None = None
        if any(name in tensors[""] for name in torchtitan_families.EMBEDDINGS):
            self.names_of = TORCHTITAN
        elif olmo_core_families.LAST_NORM in tensors[""]:
            self.names_of = OLMO_CORE
        if self.names_of == OLMO_CORE and says_its_model(self) and not isinstance(self.model, UntabledModel):
            olmo_core.check_config(self.model, directory)
        self._unplaced: Sequence[str] = ()  # buffers of torchtitan's that the model has no place for
        self._places: dict[str, str | ComputedTensor] = {}
        for kind, found in tensors.items():
            placed = by_model_names(self._placed({name: _full(kind, name) for name in found}, _full(kind, "")), path)
            self._places |= {_full(kind, name): place for name, place in placed.items()}
        specs = {name: self._stored.spec_at(place) for name, place in self._places.items()}
        self.specs: Mapping[str, TensorSpec]
        self.specs, self._moments = weights_and_states(specs)
        if codes := [name for name, spec in self.specs.items() if spec.is_codes]:
            what = f"`{codes[0]}` is {self.specs[codes[0]].dtype}: FP8 codes in a DCP, which nothing says the scales of"
            raise CheckpointError(what, where=path, do="Save the weights in BF16.")
        if not (directory / dcp_metadata.FILE).is_file() and says_its_model(self):
            self._check_pieces(directory)

    def _named(
        self, index: dcp_metadata.Index, index_of_optimizer: dcp_metadata.Index | None, apart: Sequence[Path]
    ) -> dict[str, dict[str, dcp_metadata.DcpTensor]]:
        """Weights, as kind "", and moments by kind, under the names that parameters have in the model."""
        stored, self._optimizer = split_off(index, self.path)
        if index_of_optimizer:
            beside, found = split_off(under_a_key(index_of_optimizer), self.path)
            self._optimizer = replace(found, others=(*found.others, *beside))
            if beside and not (found.unread or found.numbered or any(found.moments.values())):
                unread = f"{apart[0].name}/ has `{min(beside)}` and its like, which are under no key of an optimizer"
                self._optimizer = replace(self._optimizer, unread=unread)
        payloads = {name: stored.pop(name) for name in list(stored) if EXTRA_STATE in name}
        self._payloads = [name for name, one in payloads.items() if 0 not in one.shape]
        self._step = _object(index, _TITANS_STEP)
        self._pickled = [span for name, span in index.objects.items() if EXTRA_STATE in name]
        keys = {index.keys_above.get(name) for name in stored}
        key = keys.pop() if len(keys) == 1 else None
        if key is not None:
            stored = {name.removeprefix(f"{key}."): one for name, one in stored.items()}
        weights = _in_model(stored, self.path, key_is_known=key is not None)
        numbered = self._optimizer.numbered and says_its_model(self)
        behind = table_of(self.model_with(weights)).behind if numbered else {}
        self._optimizer = with_names(self._optimizer, index_of_optimizer or index, weights, behind)
        named = {"": weights}
        for kind, moments in self._optimizer.moments.items():
            # Perhaps of a part of the model alone, whose names have more in common than those of all weights
            beside = next((names for names in (stored, weights) if names.keys() & moments.keys()), {})
            known = beside is weights or (beside is stored and key is not None)
            named[kind] = _in_model(moments, self.path, beside, key_is_known=known)
        return named

    def _placed(self, names: Mapping[str, str], prefix: str) -> Iterable[tuple[str, str, str | ComputedTensor]]:
        """Weights, or moments, whose names in `_stored` have a `prefix`: of each a trainer's name, Hugging Face's, and
        the stored tensor that it is, or its rows. `names` are the trainer's, and those in `_stored`; they stay what
        they are where nothing says the model, or the family's are not known."""
        described = self.names_of and says_its_model(self)
        family = self.model.architecture if described else ""
        if self.names_of == TORCHTITAN and (titans := torchtitan_families.FAMILIES.get(family)):
            if not prefix:
                self._unplaced = [name for name in names if titans.hf_name(name, self.model) is None]
            return torchtitan.placed(self._stored, names, titans, self.model, self.path)
        if self.names_of == OLMO_CORE and (olmos := olmo_core_families.FAMILIES.get(family)):
            return olmo_core.placed(self._stored, names, olmos, self.model, self.path)
        if prefix:
            return automodel.placed(self._stored, prefix, names, self._stored.specs)
        return ((name, name, stored) for name, stored in names.items())

    def _check_pieces(self, directory: Path) -> None:
        """Raise DamagedCheckpoint if nothing says that the files of all ranks are there. Pieces in safetensors do not
        say how large a tensor is: of rows, those of the last ranks would not be missed. Of text models, the table of
        the family tells what is missing; of towers and other models, files that other ranks have, and the matrix of
        embeddings."""
        untabled = isinstance(self.model, UntabledModel)
        if (untabled or self.model.wrapper) and (missing := safetensors_pieces.file_of_other_ranks(directory)):
            what = f"{missing} is not there, and other ranks have a file of this number: it may be missing"
            raise DamagedCheckpoint(what, where=directory, do=_ALL_RANKS)
        if not untabled:
            return
        config = parse_json(self.companions.files["config.json"], self.companions.config_path)
        rows, columns = (config_parts(config)[-1].get(key) for key in ("vocab_size", "hidden_size"))
        matrices = [spec for spec in self.specs.values() if len(spec.shape) == 2]
        if is_count(rows) and any(spec.rows >= rows and spec.columns == columns for spec in matrices):
            return
        what = f"no matrix has the {shown(rows)} rows and {shown(columns)} columns of embeddings that config.json says"
        raise DamagedCheckpoint(what, where=self.path, do=_ALL_RANKS)

    @property
    def not_carried(self) -> Sequence[str]:
        """Tensors of the optimizer and of other state that nothing is made of."""
        return self._optimizer.others

    def notes(self) -> Iterator[str]:
        if self.not_carried:
            left = counted(len(self.not_carried), "tensor")
            yield f"Not carried over from the run: {left} of its optimizer and other state."
        yield from self._step_notes()
        if modules := len(self._payloads) + sum(map(_has_state, self._pickled)):
            yield f"FP8 state of Transformer Engine stays behind: {counted(modules, 'module')}."
        if self._unplaced:
            yield (
                f"`{self._unplaced[0]}` and its like, by which torchtitan balanced experts, stay behind: a "
                f"{self.model.model_type} chooses experts by their scores alone, and so perhaps others."
            )
        embeddings = self._places.get("model.embed_tokens.weight")
        if isinstance(embeddings, SomeRows):
            padding = self._stored.specs[embeddings.name].rows - embeddings.count
            yield f"{counted(padding, 'row')} with which OLMo-core pads the vocabulary are left out."

    def _logical(self, stored: Mapping[str, dcp_metadata.DcpTensor]) -> dict[str, LogicalTensor]:
        """The tensors by name, one for each expert of a stack."""
        fused = stacks({name: TensorSpec(one.shape, one.dtype) for name, one in stored.items()}, self.path)
        found: dict[str, LogicalTensor] = {}
        for name, one in stored.items():
            for at, tensor in slices(name, one, int(name in fused), self.path):
                logical = f"{name}[{at[0]}]" if at else name
                check_whole(logical, tensor, self.path)
                found[logical] = tensor
        return found

    @cached_property
    def _groups(self) -> Sequence[ParameterGroup]:
        return with_parameters(self._optimizer.groups())

    @cached_property
    def optimizer_specs(self) -> Mapping[str, TensorSpec]:
        """AdamW's moments, and Muon's. Raises CheckpointError for some that are none of these, or whose parameters are
        not known."""
        what = self._optimizer.unread
        dtypes = {name: spec.dtype for name, spec in self._moments.items()}
        if odd := [name for name, one in dtypes.items() if not one.is_floating_point or one.itemsize < 2]:
            what = f"`{odd[0]}` is {dtypes[odd[0]]}, and AdamW's is floating-point, of 16 bits or more"
        if self._optimizer.moments.get(MOMENTUM) and not any(group.of_muon for group in self._groups):
            what = "a `momentum_buffer` of another optimizer than torch's Muon, which may weigh gradients otherwise"
        if what:
            raise CheckpointError(what, where=self.path, do=DROP_OPTIMIZER)
        return self._moments

    @cached_property
    def trainer_run(self) -> TrainerRun:
        """AdamW's count and settings. Raises CheckpointError where parameters differ in their counts."""
        muon, adam = ([group for group in self._groups if group.of_muon == is_muon] for is_muon in (True, False))
        found = adam_run(self._optimizer.updates, adam, self.path)
        if not muon:
            return found
        own = ("different settings for groups of Muon",) if len({repr(one.settings) for one in muon}) > 1 else ()
        return replace(found, muon=muon_settings(muon, self.path), left=(*found.left, *own, _OF_MUON))

    @cached_property
    def iteration(self) -> int | None:
        """The step that the trainer has saved, else that of the folder's name, else Adam's count; None for weights
        alone. Raises DamagedCheckpoint for a step that is no number."""
        step = self._run_step.step
        return self._updates if step is None else step

    @cached_property
    def _run_step(self) -> SavedStep:
        """The step by the trainer's files and folders, as far as they say one."""
        if (step := trainer_step(self.path)) is not None:
            return SavedStep(step)
        if self._step and self.names_of == TORCHTITAN:
            return SavedStep(number(torch_zip.skeleton_at(self._step), self._step.path))
        saved = saved_step(self._directory)
        return saved if saved.step is not None else replace(saved, step=step_of(self._directory))

    @cached_property
    def _updates(self) -> int | None:
        with suppress(CheckpointError):  # there is no optimizer, or one that can only be dropped
            return self._optimizer.updates  # not `trainer_run`: each setting would take a read
        return None

    def _step_notes(self) -> Iterator[str]:
        step, unread = self._run_step.step, self._run_step.unread
        if unread and step is None:
            yield f"The step of the run is not known, and Adam's count stands in for it: {unread}."
        if None not in (step, self._updates) and step != self._updates:
            yield f"The iteration is {step}, the step that the trainer gave the checkpoint; Adam made {self._updates}."
        if self._directory == self.path and not self._moments:
            here = self.path.resolve()
            above_it = {pair: here.parents[len(Path(pair[0]).parts) - 1] for pair in _APART}
            for (model, apart), step_folder in above_it.items():
                if step_folder / model == here and (model, apart) in _pairs_in(step_folder):
                    yield f"The optimizer in {step_folder / apart} stays behind: give {step_folder} to take it along."

    @property
    def files(self) -> Sequence[Path]:
        return sorted(self._stored.files)

    def chunks(self, name: str) -> Sequence[Chunk]:
        return self._stored.chunks_at(self._places[name])


def _object(index: dcp_metadata.Index, key: str) -> Span | None:
    """Where an object is, or a tensor of one piece that a program has for it."""
    if key in index.tensors and len(pieces := index.tensors[key].pieces) == 1:
        return pieces[0].span
    return index.objects.get(key)


def _has_state(span: Span) -> bool:
    """Whether an object is FP8 state: TE 0.12 to 1.13 have a file in memory for it, of None outside of FP8."""
    try:
        value = torch_zip.load(span.read(), span)
        return value is not None and (
            not isinstance(value, io.BytesIO) or torch_zip.load(value.getvalue(), span) is not None
        )
    except CheckpointError:  # of a form of its own
        return True


def _full(kind: str, name: str) -> str:
    """The name of a weight, of which the kind is empty, or of a moment of this kind."""
    return state_name(kind, name) if kind else name


def _in_model(
    named: Mapping[str, dcp_metadata.DcpTensor],
    where: Path,
    beside: Iterable[str] = (),
    *,
    key_is_known: bool = False,
) -> dict[str, dcp_metadata.DcpTensor]:
    """Tensors by the names that they have in the model: without those of wrappers, which all of them have in common
    with what is `beside` them, and without the key of a program's own dict if that may be there. Raises
    DamagedCheckpoint as `names_inside`."""
    inside = names_inside({**named, **dict.fromkeys(beside)}, where)
    prefix = _wrapper(inside.values(), key_is_known=key_is_known)
    return {inside[name].removeprefix(prefix): one for name, one in named.items()}


def _wrapper(names: Iterable[str], *, key_is_known: bool = False) -> str:
    """The prefix of all names that is not the model's: of wrappers such as DDP, or the key under which a program saves
    its model, unless that is known."""
    names = list(names)
    common, end = commonprefix(names), 0
    if not key_is_known and (word := _APPLICATION.match(common)) and word[0] not in _INSIDE_MODEL:
        end = len(word[0]) if any(name.startswith(_INSIDE_MODEL, len(word[0])) for name in names) else 0
    while wrapper := next((one for one in _WRAPPERS if common.startswith(one, end)), None):
        start = end + len(wrapper)
        if wrapper == "model." and not any(name.startswith(_INSIDE_MODEL, start) for name in names):
            break
        end = start
    return common[:end]


_APPLICATION = re.compile(r"[A-Za-z_]\w{0,40}\.")
