"""One family in GGUF: its tensors, how metadata say its models, and what llama.cpp computes whatever they say."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from precisionctl.architectures.config_keys import Fields
from precisionctl.architectures.families import fields_of
from precisionctl.checkpoints.gguf.metadata import Described, shortest
from precisionctl.checkpoints.gguf.metadata_bytes import GgufValue
from precisionctl.checkpoints.gguf.metadata_keys import (
    CAUSAL,
    CONTEXT,
    EPSILON,
    HEAD_SIZE,
    HEADS,
    LAYERS,
    MLP_SIZE,
    TIED,
    VOCABULARY,
    WIDTH,
    GgufEntry,
    read_each,
    refused,
    write_each,
)
from precisionctl.checkpoints.gguf.mrope_keys import Images
from precisionctl.checkpoints.gguf.rope_keys import ROPE, SCALINGS, TURNED, always_of_yarn
from precisionctl.checkpoints.gguf.tensor_rows import GgufRow, TensorTable
from precisionctl.errors import shown
from precisionctl.model.model_shape import ModelShape


def base_keys(
    *experts: GgufEntry,
    layers: GgufEntry = LAYERS,
    mlp: Sequence[GgufEntry] = (MLP_SIZE,),
    heads: GgufEntry = HEADS,
    rope: Sequence[GgufEntry] = (ROPE,),
    epsilon: GgufEntry | None = EPSILON,
    head_size: GgufEntry | None = HEAD_SIZE,
) -> tuple[GgufEntry, ...]:
    """What the converter writes of every model, in its order (TextModel.set_gguf_parameters)."""
    found = (layers, CONTEXT, WIDTH, *mlp, heads, *rope, epsilon, *experts, head_size)
    return tuple(entry for entry in found if entry)


@dataclass(frozen=True)
class GgufFamily:
    """What llama.cpp calls a family (`general.architecture`), the rows of its tensors, and how metadata say a
    ModelShape.

    A field has an entry, or is in `computed`. One that is both is written by its entry, but refused unless it is what
    is computed.

    `keys` are written before `general.file_type`, `more` behind it. `reads` are not written: llama.cpp takes them for
    what they are without a key. `computed` are the values of other fields, or how these follow from fields, where they
    are not ModelShape's defaults. `ignored` are fields that llama.cpp does not look at, although it makes a difference,
    each with what it is taken for where no config.json says it. `folded` are factors that weights are multiplied by,
    which are 1 where no config.json says them. `scalings` are the kinds of scaled rotary embeddings that it computes,
    each with what config.json says of it, and `of_scaling` what llama.cpp takes beside it, as the published models have
    it, and no key says; `reads_betas`: it computes with the betas of YaRN that a file says.

    `tokens` are the texts of special tokens that the family has, whatever its tokenizer_config.json calls them, and
    `sentencepiece` is the kind of tokenizer that llama.cpp has for its SentencePiece model. With `down_last` the
    converter's file has down_proj of experts behind the others.

    `scaled` are modules in layers whose results llama.cpp multiplies by the global scale of NVFP4 codes. It reads one
    of any.

    `images` is what metadata say for these, and `in_wrappers` are the families that llama.cpp has for the text model in
    wrappers of a `model_type`, or what it has otherwise of these.

    `recognises`: of several families with one architecture, whether a file is read as one of this, where no config.json
    says which. It goes by what llama.cpp computes. `with_experts` is what differs in models with experts, if the family
    has both.
    """

    architecture: str
    rows: Sequence[GgufRow]
    keys: tuple[GgufEntry, ...]
    more: tuple[GgufEntry, ...] = ()
    reads: tuple[GgufEntry, ...] = ()
    turned: GgufEntry | None = TURNED
    """How many channels of a head turn: read where no other entry reads its key, as any file may say it, though the
    converter writes it of some families alone. None of a family without rotary embeddings, of which such a file is
    refused."""
    computed: Mapping[str, Any] = field(default_factory=dict)
    ignored: Fields = field(default_factory=dict)
    folded: Fields = field(default_factory=dict)
    scalings: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: SCALINGS)
    of_scaling: Callable[[Fields], Fields] = lambda scaling: {}
    reads_betas: bool = False
    tokens: Mapping[str, str] = field(default_factory=dict)
    sentencepiece: str = "llama"
    down_last: bool = False
    scaled: tuple[str, ...] = ()
    images: Images | None = None
    in_wrappers: Mapping[str, GgufFamily] = field(default_factory=dict)
    recognises: Callable[[Described], bool] = lambda file: True
    with_experts: GgufFamily | None = None

    @cached_property
    def tensors(self) -> TensorTable:
        return TensorTable(self.rows)

    @cached_property
    def entries(self) -> tuple[GgufEntry, ...]:
        """All that a file is read by."""
        own = (*_OF_ALL, *self.keys, *self.more, *self.reads)
        said = {key for entry in own for key in entry.keys}
        return own if self.turned is None or said & {*self.turned.keys} else (*own, self.turned)

    @property
    def architectures(self) -> tuple[str, ...]:
        also = (*self.in_wrappers.values(), *((self.with_experts,) if self.with_experts else ()))
        return tuple(dict.fromkeys((self.architecture, *(each.architecture for each in also))))

    @property
    def without_prediction(self) -> bool:
        """Whether layers of multi-token prediction are not written."""
        return "mtp_num_layers" in self.ignored

    def scales(self, name: str) -> bool:
        """Whether llama.cpp multiplies by the global scale of this tensor's codes, or of such a stack's."""
        module = re.fullmatch(r"(?:blk\.\d+\.)?([\w.]+)\.weight(?:\[\d+\])?", name)
        return module is not None and module[1] in self.scaled

    def of(self, model: ModelShape) -> GgufFamily:
        """That of a model."""
        if model.wrapper and (found := self.in_wrappers.get(model.wrapper.model_type)):
            return found
        return self.with_experts if self.with_experts and model.moe else self

    def of_file(self, file: Described) -> GgufFamily:
        """That of a file."""
        for found in self.in_wrappers.values():
            if found.architecture == file.architecture and found.recognises(file):
                return found
        return self.with_experts if self.with_experts and file.count("expert_count", 0) else self

    def read(self, file: Described) -> dict[str, Any]:
        """The fields that a file says. Raises DamagedCheckpoint for keys that are not there or contradict one another,
        UnknownArchitecture for a setting that is not read."""
        file.check_read(key for entry in self.entries for key in entry.keys)
        return {"rope_scaling": None, **read_each(self.entries, file)}

    def completed(self, said: Fields) -> dict[str, Any]:
        """The fields with those that llama.cpp computes whatever a file says."""
        found = dict(said)
        for name, value in {**self.computed, **self.folded, **self.ignored}.items():
            found.setdefault(name, value(found) if callable(value) else value)
        if scaling := found["rope_scaling"]:
            found["rope_scaling"] = {**self.of_scaling(scaling), **scaling}
        return found

    def metadata(self, model: ModelShape, file_type: int) -> dict[str, GgufValue]:
        """What a file says of a model, which `check` lets pass."""
        return {
            **self._named(write_each(self.keys, model)),
            "general.file_type": np.uint32(file_type),
            **self._named(write_each(self.more, model)),
        }

    def _named(self, said: Mapping[str, Any]) -> dict[str, GgufValue]:
        """Keys with the architecture's name, and values in the types under which llama.cpp looks for them."""
        found = dict[str, GgufValue]()
        for key, value in said.items():
            if isinstance(value, list):
                typed: GgufValue = np.array(value, _OF_LIST[type(value[0])])
            elif isinstance(value, bool | str):
                typed = value
            else:
                typed = np.uint32(value) if isinstance(value, int) else np.float32(value)
            found[f"{self.architecture}.{key}"] = typed
        return found

    def check(self, model: ModelShape) -> None:
        """Raise UnknownArchitecture for a model of which llama.cpp would compute something else."""
        entries = (*_OF_ALL, *self.keys, *self.more)
        said = {
            *_STORED,
            *self.ignored,
            *self.folded,
            *(name for entry in entries for name in entry.fields),
        } - self.computed.keys()
        fields = fields_of(model)
        for name, value in fields.items():
            part, _, field = name.rpartition(".")
            wanted = self.computed.get(name, getattr(type(getattr(model, part) if part else model), field, None))
            wanted = wanted(fields) if callable(wanted) else wanted
            if name not in said and value != wanted:
                raise refused(model, f"with {name} {shown(value)}, but with {shown(wanted)}")
        self.check_scaling(model)
        for entry in entries:
            entry.write(model)

    def check_scaling(self, model: ModelShape) -> None:
        """Raise UnknownArchitecture for a model whose rotary embeddings llama.cpp would scale otherwise."""
        scaling = dict(model.rope_scaling or {})
        kind = scaling.get("rope_type", "default")
        known = ("type", "rope_type", "rope_theta", *self.scalings.get(kind, ()))
        always = always_of_yarn(scaling) if kind == "yarn" else {}
        beside = self.of_scaling(scaling)
        said = {key: scaling.get(key, always.get(key)) for key in {**scaling, **beside} if key not in known}
        others = {
            key: value
            for key, value in said.items()
            if _in_fp32(value) not in [_in_fp32(computed[key]) for computed in (always, beside) if key in computed]
        }
        if others or kind not in self.scalings:
            how = " with " + ", ".join(f"{key} {shown(value)}" for key, value in others.items()) if others else ""
            raise refused(model, f"with rotary embeddings that are scaled as {kind}{how}")


def _in_fp32(value: object) -> object:
    return shortest(value) if isinstance(value, float) else value


_OF_LIST: Mapping[type, type[np.generic]] = {bool: np.bool_, int: np.int32, float: np.float32}


_OF_ALL = (VOCABULARY, TIED, CAUSAL)
"""Read of every file."""
_STORED = ("architecture", "make_vocab_size_divisible_by", "wrapper", "zero_centered_gamma") + (
    ("add_bias_linear", "add_qkv_bias")
)
"""How Megatron stores a model, which computes the same."""
