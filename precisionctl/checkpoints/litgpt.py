"""Read a checkpoint of LitGPT: `lit_model.pth`, which torch.save or Lightning Fabric wrote, beside `model_config.yaml`
and, after `litgpt download`, config.json and the tokenizer.

LitGPT's output layer is a parameter of its own, also of a model whose embeddings are tied: what it trained has two
matrices, and is tied no longer.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from precisionctl.checkpoints.base import NO_HINTS, Companions, Container, Hints, without_iterations
from precisionctl.checkpoints.chunks import Box, Chunk, read_bytes
from precisionctl.checkpoints.hf_directory.companions import to_json
from precisionctl.checkpoints.hf_directory.huggingface_files import tensors_of
from precisionctl.checkpoints.hf_directory.safetensors_file import JoinedTensor, StoredTensor, StoredTensors
from precisionctl.checkpoints.hf_directory.wrapped_names import names_inside
from precisionctl.checkpoints.megatron.provider import read_yaml
from precisionctl.checkpoints.other_trainers.litgpt_families import (
    EMBEDDINGS,
    FAMILIES,
    OLDER_QKV,
    OUTPUT,
    QKV,
    VOCABULARY,
    LitGptFamily,
)
from precisionctl.checkpoints.other_trainers.name_patterns import pattern_of, with_numbers
from precisionctl.checkpoints.other_trainers.trainer_directory import TrainerDirectory, by_model_names, says_its_model
from precisionctl.checkpoints.torch_files import torch_zip
from precisionctl.errors import DamagedCheckpoint, shown
from precisionctl.model.model_shape import ModelShape
from precisionctl.model.same_model import used
from precisionctl.model.untabled_model import UntabledModel
from precisionctl.param import TensorSpec
from precisionctl.sizes import counted, listed
from precisionctl.untrusted.safe_files import check_link, has_file
from precisionctl.untrusted.safe_json import mapping_or_empty, parse_json
from precisionctl.untrusted.safe_pickle import is_count

FILE = "lit_model.pth"
_CONFIG = "model_config.yaml"

_SAME = {
    "n_layer": "num_layers",
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_query_groups": "num_query_groups",
    "head_size": "kv_channels",
    "parallel_residual": "parallel_residual",
    "rotary_percentage": "rotary_percent",
    "rope_base": "rotary_base",
}
"""What model_config.yaml and config.json must agree on, as shapes of tensors do not tell all of it."""

_KINDS_OF_SCALING = {
    "low_freq_factor": "llama3",
    "high_freq_factor": "llama3",
    "beta_fast": "yarn",
    "beta_slow": "yarn",
    "factor": "linear",
}
"""The kind of rotary scaling, by its numbers: the first that is there tells (litgpt 0.5.13, GPT.rope_cache)."""


class LitGptReader(TrainerDirectory):
    """A model of LitGPT as a Reader. Opening it reads the pickle of its file, and some rows of tied embeddings.

    Without a config.json tensors keep LitGPT's names. Raises DamagedCheckpoint for files that contradict one another,
    and UnsafePickle.
    """

    container = "litgpt"
    iteration = None

    def __init__(self, path: Path, hints: Hints = NO_HINTS) -> None:
        super().__init__(path, hints, "a checkpoint of LitGPT")
        self._file = path / FILE
        check_link(self._file, path)
        saved = torch_zip.skeleton(self._file)
        state, self._left = saved, list[str]()
        if isinstance(saved, dict) and isinstance(saved.get("model"), dict):
            state = saved["model"]
            self._left = sorted(f"{key:.40}" for key in saved if isinstance(key, str) and key != "model")
        stored = tensors_of(state, self._file)
        inside = names_inside(stored, self._file)
        self._tensors = {inside[name]: one for name, one in stored.items()}
        self._untied = False
        model = self.model_with(self._tensors) if says_its_model(self) else None
        if model and not isinstance(model, UntabledModel) and model.tied_embeddings and self._has_two_matrices():
            self._untied, model = True, replace(model, tied_embeddings=False)
        self._otherwise = _otherwise(model, path) if model and not isinstance(model, UntabledModel) else []
        self._padding = 0
        if model and model.wrapper is None and (family := FAMILIES.get(model.architecture)):
            rows = self._tensors[EMBEDDINGS].spec.rows if EMBEDDINGS in self._tensors else 0
            self._padding = max(rows - model.vocab_size, 0)
            self._tensors = by_model_names(_placed(self._tensors, family, model, self._file), self._file)
        self.specs: Mapping[str, TensorSpec] = {name: one.spec for name, one in self._tensors.items()}

    @property
    def files(self) -> Sequence[Path]:
        return [self._file]

    def chunks(self, name: str) -> Sequence[Chunk]:
        return self._tensors[name].chunks(self._file)

    @property
    def companions(self) -> Companions:
        """Those of a directory, whose config.json says that embeddings are tied only where they are."""
        found = super().companions
        if not self._untied:
            return found
        config = parse_json(found.files["config.json"], found.config_path) | {"tie_word_embeddings": False}
        return replace(found, files={**found.files, "config.json": to_json(config)})

    def notes(self) -> Iterator[str]:
        if self._untied:
            yield "config.json says `tie_word_embeddings: false` now: LitGPT trained an output layer of its own."
        for one in self._otherwise:
            yield f"{_CONFIG} says what LitGPT computed, and the result computes otherwise: {one}."
        if self._padding:
            yield f"{counted(self._padding, 'row')} with which LitGPT pads the vocabulary are left out."
        if self._left:
            yield f"Not carried over from the run: {listed(self._left)}."

    def _has_two_matrices(self) -> bool:
        """Whether the output layer has other numbers than the embeddings, by rows that are spread over them."""
        two = [self._tensors[name] for name in (EMBEDDINGS, OUTPUT) if name in self._tensors]
        if len(two) < 2 or two[0].spec != two[1].spec:
            return len(two) == 2
        if two[0].offset == two[1].offset:
            return False
        rows, (one, other) = two[0].spec.rows, (StoredTensors({"": (self._file, each)}) for each in two)
        return any(
            not np.array_equal(read_bytes(one, "", row, 1), read_bytes(other, "", row, 1))
            for row in range(0, rows, max(rows // _COMPARED, 1))
        )


_COMPARED = 256
"""Rows of embeddings that are compared when a checkpoint is opened, as training moves all. If these are equal, a
conversion compares all, and refuses any that differ."""


def _otherwise(model: ModelShape, path: Path) -> list[str]:
    """In words, what model_config.yaml says otherwise than config.json of the same model. Raises DamagedCheckpoint for
    another model."""
    where = path / _CONFIG
    if not has_file(where, path):
        return []
    said = read_yaml(where, path)
    if not isinstance(said, dict):
        raise DamagedCheckpoint("it holds no settings", where=where)
    ours: dict[str, object] = {own: getattr(model, name) for own, name in _SAME.items()}
    if model.moe:
        ours["n_expert_per_token"] = model.moe.topk
    another = [_said(own, said[own], its) for own, its in ours.items() if said.get(own) not in (None, its)]
    if is_count(tokens := said.get("vocab_size")) and tokens > model.vocab_size:
        another.append(_said("vocab_size", tokens, model.vocab_size))
    notes = list[str]()
    if "rope_adjustments" in said:
        if not isinstance(stored := said["rope_adjustments"] or {}, dict):
            raise DamagedCheckpoint("its rope_adjustments are no settings", where=where)
        # in Hugging Face's words; positions that LitGPT divides are a linear scaling
        ratio = said.get("rope_condense_ratio")
        numbers = dict(stored) if ratio in (None, 1) else {"factor": ratio}
        if "original_max_seq_len" in numbers:
            numbers["original_max_position_embeddings"] = numbers.pop("original_max_seq_len")
        kind = next((kind for number, kind in _KINDS_OF_SCALING.items() if number in numbers), None)
        theirs: Mapping[str, Any] = {"rope_type": kind, **numbers} if kind else {}
        scaling = mapping_or_empty(used(model)["rope_scaling"])
        keys = [key for key in theirs or scaling if theirs.get(key) != scaling.get(key)]
        # LitGPT computes Phi-4-mini without its scaling, as it has none of that kind
        known = not scaling or scaling["rope_type"] in _KINDS_OF_SCALING.values()
        differing = [_said(f"rope_adjustments: {key}", theirs.get(key), scaling.get(key)) for key in keys[:1]]
        (another if known else notes).extend(differing)
    if said.get("norm_eps") not in (None, model.norm_epsilon):  # LitGPT's own configs of Gemma have another
        notes.append(_said("norm_eps", said["norm_eps"], model.norm_epsilon))
    if another:
        raise DamagedCheckpoint(listed(another, 4), where=where, do="Does the config belong to this checkpoint?")
    return notes


def _said(key: str, theirs: object, ours: object) -> str:
    return f"{key} is {shown(theirs)} ({shown(ours)} by config.json)"


def _placed(
    stored: Mapping[str, StoredTensor], family: LitGptFamily, model: ModelShape, file: Path
) -> Iterator[tuple[str, str, StoredTensor]]:
    """LitGPT's names, Hugging Face's, and the tensors with rows in the order of the latter. Any that the family has not
    stay as they are, and so do parts of a tensor of which one is missing, or of another width or dtype. Rows that pad
    the vocabulary are left out. Raises DamagedCheckpoint for attention of other sizes than the model's."""
    joined = {part: hf for hf, parts in family.joined.items() for part in parts}
    for name, tensor in stored.items():
        module, _, kind = name.rpartition(".")
        pattern, numbers = pattern_of(module)
        made, source = dict[str, StoredTensor](), name
        if pattern in (QKV, OLDER_QKV):
            heads = _attention(tensor, family, model, file, name, by_groups=pattern == OLDER_QKV)
            made = dict(zip(family.qkv, heads, strict=True))
        elif hf := joined.get(pattern):
            found = (stored.get(f"{with_numbers(part, numbers)}.{kind}") for part in family.joined[hf])
            parts = [part for part in found if part]
            alike = len({(part.spec.shape[1:], part.spec.dtype) for part in parts}) == 1
            if alike and len(parts) == len(family.joined[hf]):  # one below the other
                runs = [(part.offset, part.spec.rows) for part in parts]
                made = {hf: _of_runs(parts[0].spec, runs, file)}
            source = with_numbers(family.joined[hf][0], numbers)
        elif pattern in family.names:
            padded = pattern in VOCABULARY and tensor.spec.rows > model.vocab_size
            made = {family.names[pattern]: _rows(tensor, [(0, model.vocab_size)], file) if padded else tensor}
        for published, rows in made.items():
            yield source, f"{with_numbers(published, numbers)}.{kind}", rows
        if not made:
            yield source, name, tensor


def _attention(
    tensor: StoredTensor, family: LitGptFamily, model: ModelShape, file: Path, name: str, *, by_groups: bool
) -> list[StoredTensor]:
    """Queries, keys and values, or all of them in one."""
    queries, groups, size = model.num_attention_heads, model.num_query_groups, model.kv_channels
    heads = queries + 2 * groups
    wanted_shape = (heads * size,) if name.endswith(".bias") else (heads * size, model.hidden_size)
    if tensor.spec.shape != wanted_shape:
        what = f"`{name}` is {list(tensor.spec.shape)}, the model's sizes say {list(wanted_shape)}"
        raise DamagedCheckpoint(what, where=file, do="Does the config belong to this checkpoint?")
    apart = [range(queries), range(queries, queries + groups), range(queries + groups, heads)]
    # The queries, the key and the value of each group
    per = queries // groups
    grouped = [
        head
        for group in range(groups)
        for head in (*range(group * per, (group + 1) * per), queries + group, queries + groups + group)
    ]
    # Where the heads, as they are numbered one kind after the other, are stored
    places = sorted(range(heads), key=grouped.__getitem__) if by_groups else range(heads)
    wanted = apart if len(family.qkv) > 1 else [grouped if family.by_groups else range(heads)]
    return [_rows(tensor, [(places[head] * size, size) for head in part], file) for part in wanted]


def _rows(tensor: StoredTensor, runs: Sequence[tuple[int, int]], file: Path) -> JoinedTensor:
    """These rows of a tensor, by their first and their number, one run after the other."""
    joined = list[tuple[int, int]]()
    for first, count in runs:
        if joined and sum(joined[-1]) == first:
            first, count = joined[-1][0], joined.pop()[1] + count
        joined.append((first, count))
    length = tensor.spec.columns * tensor.spec.dtype.itemsize
    return _of_runs(tensor.spec, [(tensor.offset + first * length, count) for first, count in joined], file)


def _of_runs(spec: TensorSpec, runs: Sequence[tuple[int, int]], file: Path) -> JoinedTensor:
    """A tensor with the width and dtype of `spec`, of runs of rows: where each begins in the file, and its number."""
    chunks, row = list[Chunk](), 0
    for offset, count in runs:
        chunks.append(Chunk(Box(row, count, 0, spec.columns), file, offset))
        row += count
    return JoinedTensor(replace(spec, shape=(row, *spec.shape[1:])), runs[0][0], tuple(chunks))


def recognise(path: Path) -> bool:
    """Whether a directory has a model of LitGPT."""
    return (path / FILE).is_file()


CONTAINER = Container(recognise, without_iterations(LitGptReader), f"{FILE} of LitGPT")
