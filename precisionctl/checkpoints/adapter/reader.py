"""A LoRA adapter as a Reader: its base model with the adapter merged in. The adapter is PEFT's, or Bridge's under
PEFT's names.

Tensors have the names of the base. The adapter adds a low-rank product to a matrix, or replaces a whole tensor
(`modules_to_save`, trained biases). All tensors are values: codes of the base are decoded, and
`export/weight_encodings.py` still knows how they were encoded.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import permutations
from pathlib import Path

from precisionctl.architectures.families import table_of
from precisionctl.architectures.param_map import names
from precisionctl.architectures.rearrangements import Transposed
from precisionctl.checkpoints import huggingface
from precisionctl.checkpoints.adapter.expert_stacks import JOINED, stack_of
from precisionctl.checkpoints.adapter.lora_config import FILE, LoraConfig, read_lora_config
from precisionctl.checkpoints.adapter.low_rank import Factors, LowRank, Merged
from precisionctl.checkpoints.adapter.tied import check_known, check_same_change, check_touched, tied_embeddings
from precisionctl.checkpoints.base import (
    NO_HINTS,
    TAKE_REFERENCE,
    Companions,
    Container,
    HasNotes,
    Hints,
    Reader,
    without_iterations,
)
from precisionctl.checkpoints.chunks import Chunk, Chunked, whole
from precisionctl.checkpoints.hf_directory.companions import (
    CHAT_TEMPLATE,
    TOKENIZER,
    is_tokenizer,
    kind_of,
    read_companions,
)
from precisionctl.checkpoints.hf_directory.huggingface_files import BIN, SAFETENSORS, file_format_of
from precisionctl.checkpoints.hf_directory.safetensors_file import StoredTensors
from precisionctl.checkpoints.open import open_checkpoint
from precisionctl.codes.encoding import Encoding
from precisionctl.dtypes import DType
from precisionctl.errors import DamagedCheckpoint, MappingError, ShapeMismatch, UnknownFormat, at, shown
from precisionctl.fp8.state import Fp8States
from precisionctl.model.model_shape import ModelShape
from precisionctl.model.untabled_model import UntabledModel
from precisionctl.param import Layout, TensorSpec
from precisionctl.sizes import counted
from precisionctl.untrusted.safe_files import has_file

PREFIX = "base_model.model."
MLX_FILE = "adapters.safetensors"
"""An adapter of mlx-lm, which `checkpoints/mlx_adapter.py` reads."""
_FACTOR = re.compile(r"(.+)\.(lora_A\.weight|lora_B\.weight|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)")
_NESTED = re.compile(r"(?<!\.base_layer)(?:\.base_layer)+$")
"""The levels of nesting at the end of a name. A match does not begin inside of them: names can have thousands."""
_VALUES = (DType.float32, DType.bfloat16, DType.float16)
_LARGEST_RANK = 4096


def recognise(path: Path) -> bool:
    """A directory with PEFT's config, and not mlx-lm's of that name, nor that of an adapter which is a part of a
    model."""
    return (path / FILE).exists() and not ((path / MLX_FILE).exists() or huggingface.has_weight_files(path))


class AdapterReader:
    """An adapter and its base as a Reader of the merged model.

    Raises DamagedCheckpoint where its files contradict one another, and MappingError for an adapter that is not of this
    base, or that does what cannot be done to weights alone.
    """

    layout: Layout = "hf"
    encodings: Mapping[str, Encoding] = {}

    def __init__(self, path: Path, base: Reader, config: LoraConfig, stored: Chunked, files: Sequence[Path]) -> None:
        self.path, self.base, self._config, self._stored = path, base, config, stored
        self.files: Sequence[Path] = sorted({*base.files, *files})
        if not stored.specs:
            raise MappingError("the adapter has no tensors", do="Was it saved whole? Its base alone may be converted.")
        self._factors = Factors(stored)
        self._tied, self._conv1d = tied_embeddings(base.model, base.specs), _conv1d(base)
        self.changes: dict[str, LowRank] = {}
        self.replaced: dict[str, str] = {}
        """What the adapter has in place of a tensor of the base, by that one's name."""
        # names in the base's files, by those that the class of its family has in memory, and peft writes
        in_memory = table_of(base.model).in_memory(base.specs, base.model)
        in_file = {called: name for name, called in in_memory.items()}
        self._set_changes(self._sorted(in_file), in_file)
        check_touched(base.model, base.specs, {*self.changes, *self.replaced})
        self.specs: dict[str, TensorSpec] = {}
        for name in (*base.specs, *self.replaced):  # the base's shape and dtype, BF16 where it has codes
            mine = stored.specs[self.replaced[name]] if name in self.replaced else None
            of = self._tied.get(name, name)
            before = base.specs.get(of)
            if mine and before and mine.shape != before.shape:
                raise _other_shape(self.replaced[name], mine, f"`{name}`, which it replaces, is {list(before.shape)}")
            if before is None:
                assert mine is not None, "either has it"
                self.specs[name] = mine
            else:
                self.specs[name] = TensorSpec(before.shape, DType.bfloat16) if of in base.encodings else before

    def notes(self) -> Iterator[str]:
        if isinstance(self.base, HasNotes):
            yield from self.base.notes()
        tensors = counted(len(self.base.specs), "tensor")
        yield (
            f"Of the base's {tensors} the adapter changes {len(self.changes)} and replaces {len(self.replaced)}; the "
            "others are the base's."
        )
        if named := self._config.base:
            yield f"The adapter names {shown(named)} as its base; nothing here proves that this is it."
        # peft saves adapters beside the one called `default` in folders; a Trainer's checkpoints are this one, earlier
        folders = [each for each in self.path.iterdir() if each.is_dir() and not each.is_symlink()]
        own = [each for each in folders if not each.name.startswith("checkpoint-")]
        if others := sorted(each.name for each in own if has_file(each / FILE, self.path)):
            are = counted(len(others), "adapter in a folder below it is", "adapters in folders below it are")
            yield f"{are} not merged: {', '.join(map(shown, others[:5]))}{', ...' if others[5:] else ''}."
            yield (
                "To merge several, begin with `convert BASE BASE32 --to hf --precision fp32`, and give each result as "
                "--reference of the next."
            )

    @property
    def container(self) -> str:
        return self.base.container

    @property
    def model(self) -> ModelShape:
        return self.base.model

    @property
    def former_codes(self) -> Chunked:
        return self.base

    @property
    def fp8(self) -> Fp8States | None:
        return self.base.fp8

    @property
    def iteration(self) -> int | None:
        return None

    @cached_property
    def own_companions(self) -> Companions:
        found = read_companions(self.path)
        return replace(found, files={name: data for name, data in found.files.items() if name != "config.json"})

    @cached_property
    def companions(self) -> Companions:
        """The base's, but for tokenizer and chat template where the adapter has a tokenizer: it was trained with it."""
        mine = {name: data for name, data in self.own_companions.files.items() if _of_text(name)}
        if not any(map(is_tokenizer, mine)):
            return self.base.companions
        kept = {name: data for name, data in self.base.companions.files.items() if not _of_text(name)}
        return replace(self.base.companions, files=kept | mine)

    def chunks(self, name: str) -> Sequence[Chunk]:
        replaced, change, spec = self.replaced.get(name), self.changes.get(name), self.specs[name]
        stored = self._stored if replaced else self.base
        encodings = {} if replaced else self.base.encodings
        if change is None and name not in encodings and stored.specs[replaced or name].dtype == spec.dtype:
            return stored.chunks(replaced or name)
        return [Chunk(whole(spec), Merged(stored, encodings, replaced or name, spec, change, self._factors))]

    def _sorted(self, in_file: Mapping[str, str]) -> dict[str, dict[str, str]]:
        """Find out what each tensor of the adapter is: set `replaced`, and return the factors of each module that it
        changes, by kind. `in_file` has names in the base's files for those in memory."""
        modules: dict[str, dict[str, str]] = {}
        for name, spec in self._stored.specs.items():
            if not name.startswith(PREFIX):
                raise MappingError(f"`{name}` does not begin with `{PREFIX}`", do=_SAVED)
            if spec.dtype not in _VALUES:
                raise DamagedCheckpoint(f"`{name}` is {spec.dtype}, no dtype of an adapter's values")
            match = _FACTOR.fullmatch(name.removeprefix(PREFIX))
            if match:
                modules.setdefault(match[1], {})[match[2]] = name
                continue
            if "lora_" in name or "trainable_tokens" in name:
                raise MappingError(f"`{name}` is of a kind that is not read", do=_MERGE)
            called = name.removeprefix(PREFIX).replace(".base_layer.", ".")
            target = in_file.get(called, called)
            if target in self.replaced:
                raise _twice(target, name)
            self.replaced[target] = name
        return modules

    def _set_changes(self, modules: Mapping[str, Mapping[str, str]], in_file: Mapping[str, str]) -> None:
        """Set what the factors of these modules change of the base."""
        stacks: dict[str, list[str]] = {}
        tied: Mapping[str, str] = {}
        heads: dict[str, str] = {}
        if self._config.ensure_weight_tying:
            check_known(self.base.model, (f"{module}.weight" for module in modules))
            tied = self._tied
        for module in modules:
            target = _NESTED.sub("", module)
            weight = in_file.get(f"{target}.weight", f"{target}.weight")
            if weight in tied:
                heads[weight] = module
                continue
            if weight in self.changes:
                raise _twice(weight, module)
            if weight in self.base.specs or weight in self.replaced:
                if target not in self._config.modules and not self._config.adapts_parameter(f"{target}.weight"):
                    what = f"`{target}` is no module that {FILE} says to adapt: peft leaves its tensors out"
                    do = "Is the file this adapter's? See target_modules, exclude_modules and layers_to_transform."
                    raise MappingError(what, do=do)
                self.changes[weight] = self._change(module, modules[module], weight)
            else:
                stacks.setdefault(target, []).append(module)
        for weight, module in heads.items():
            a, b = self._pair(module, modules[module], _LINEAR)
            head = LowRank(a, b, self._config.scale(module, self._rank(a, b, 1)))
            check_same_change(head, self.changes.get(tied[weight]), self._stored)
            self.changes[weight] = self.changes[tied[weight]]
        for target, levels in stacks.items():
            found = self._of_experts(target, {level: modules[level] for level in levels})
            if both := self.changes.keys() & found.keys():
                raise _twice(min(both), target)
            self.changes |= found

    def _change(self, module: str, stored: Mapping[str, str], name: str) -> LowRank:
        """What is added to the weight of a module."""
        embedding = "lora_embedding_A" in stored
        kinds = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A.weight", "lora_B.weight")
        a, b = self._pair(module, stored, kinds)
        transposed = embedding or (self._config.transposed if self._conv1d is None else name in self._conv1d)
        replaced = self.replaced.get(name)
        shape = self._stored.specs[replaced].shape if replaced else self.base.specs[name].shape
        if len(shape) != 2:
            raise MappingError(f"`{name}` is {list(shape)}: only matrices have low-rank changes")
        out, into = shape[::-1] if transposed else shape
        for factor, fits in ((a, self._spec_of(a)[1] == into), (b, self._spec_of(b)[0] == out)):
            if not fits:
                raise _other_shape(factor, self._stored.specs[factor], f"`{name}` is {list(shape)}")
        rank, target = self._rank(a, b, 1), _NESTED.sub("", module)
        named = f"{target}.weight" if self._config.adapts_parameter(f"{target}.weight") else target
        return LowRank(a, b, self._config.scale(named, rank), transposed, self._magnitude(stored, shape, transposed))

    def _magnitude(self, stored: Mapping[str, str], shape: tuple[int, ...], transposed: bool) -> str | None:
        name = stored.get("lora_magnitude_vector")
        if (name is not None) != self._config.dora:
            raise DamagedCheckpoint("use_dora and the adapter's tensors contradict one another")
        if name is None:
            return None
        if transposed:
            what = f"`{name}`: DoRA is merged for linear layers that are stored as [out, in] alone"
            raise MappingError(what, do=_MERGE)
        if self._stored.specs[name].shape != shape[:1]:
            raise _other_shape(name, self._stored.specs[name], f"its matrix is {list(shape)}")
        return name

    def _pair(self, module: str, stored: Mapping[str, str], kinds: tuple[str, str]) -> tuple[str, str]:
        missing = [kind for kind in kinds if kind not in stored]
        surplus = [name for kind, name in stored.items() if kind not in (*kinds, "lora_magnitude_vector")]
        if missing or surplus:
            what = f"`{module}` has no {missing[0]}" if missing else f"`{surplus[0]}` beside others of its module"
            raise DamagedCheckpoint(what, do="Is the copy whole?")
        return stored[kinds[0]], stored[kinds[1]]

    def _rank(self, a: str, b: str, experts: int) -> int:
        """The rank of a product. Raises DamagedCheckpoint for one that is not the config's, or beyond any adapter's."""
        rows, columns = self._spec_of(a)[0], self._spec_of(b)[1]
        rank = rows // experts
        if rows != columns or rows % experts or not 0 < rank <= _LARGEST_RANK:
            what = f"`{a}` and `{b}` have ranks {rows} and {columns}, for {counted(experts, 'expert')}"
            raise DamagedCheckpoint(what, do=f"Ranks are equal, and up to {_LARGEST_RANK}.")
        if rank != self._config.rank and rank not in self._config.own_ranks:
            raise DamagedCheckpoint(f"`{a}` has rank {rank}, {FILE} says {self._config.rank}")
        return rank

    def _spec_of(self, name: str) -> tuple[int, int]:
        spec = self._stored.specs[name]
        if len(spec.shape) != 2:
            raise DamagedCheckpoint(f"`{name}` is {list(spec.shape)}, no matrix")
        return spec.rows, spec.columns

    def _of_experts(self, target: str, levels: Mapping[str, Mapping[str, str]]) -> dict[str, LowRank]:
        """The changes to parameters of all experts of a layer (`target_parameters`).

        An adapter's names do not say which parameter each of its levels of nesting is for, nor whether that is stored
        as [in, out]. Their shapes do. Raises MappingError if the shapes fit no parameters, or fit in several ways.
        """
        wanted = {name.rpartition(".")[2] for name in self._config.parameters}
        stacks = [stack for name in JOINED if name in wanted and (stack := stack_of(target, name, self.base.specs))]
        if len(stacks) < len(levels):
            raise MappingError(
                f"`{target}` is changed by the adapter, and the base has no such module",
                do="Is it the adapter's base? Names must be those of the model's class in transformers.",
            )
        pairs = {level: self._pair(level, stored, _LINEAR) for level, stored in levels.items()}
        sizes = {level: (self._spec_of(b)[0], self._spec_of(a)[1]) for level, (a, b) in pairs.items()}
        found = [
            (transposed, fitting)
            for fitting in ({*zip(levels, some, strict=True)} for some in permutations(stacks, len(levels)))
            for transposed in (False, True)
            if all(sizes[level] == stack.size(transposed) for level, stack in fitting)
        ]
        if len(found) != 1:
            do = "Is it the adapter's base?" if not found else _MERGE
            what = (
                f"the shapes of `{target}`'s changes fit {'none' if not found else 'more than one'} of its parameters"
            )
            raise MappingError(what, do=do)
        transposed, fitting = found[0]
        changes: dict[str, LowRank] = {}
        for level, stack in fitting:
            a, b = pairs[level]
            self._magnitude(levels[level], (), True)
            scale = self._config.scale(f"{target}.{stack.parameter}", self._rank(a, b, stack.count))
            for name, number, first in stack.parts:
                changes[name] = LowRank(a, b, scale, transposed, None, (number, stack.count), first)
        return changes


_LINEAR = ("lora_A.weight", "lora_B.weight")
_SAVED = "Save it with peft: `model.save_pretrained(ADAPTER)`."
_MERGE = "Merge it with peft: `model.merge_and_unload().save_pretrained(OUT)`, and give OUT."


def _conv1d(base: Reader) -> frozenset[str] | None:
    """The matrices that a base stores as [in, out], by its table; None without one. An adapter's `fan_in_fan_out` says
    it of the last module that peft adapted (tuners/lora/layer.py, dispatch_default), and peft does not rely on it."""
    if isinstance(base.model, UntabledModel):
        return None
    rows = table_of(base.model).spelled(base.specs, base.model)
    stored = [row for row in rows if isinstance(row.rearrangement, Transposed)]
    return frozenset(name for row in stored for place in row.places(base.model) for name in names(row, "hf", place))


def _of_text(name: str) -> bool:
    """Whether a file says how text becomes tokens."""
    return kind_of(name) in (CHAT_TEMPLATE, TOKENIZER)


def _twice(target: str, name: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(f"`{name}` is the second that the adapter has for `{target}`", do=_SAVED)


def _other_shape(name: str, spec: TensorSpec, other: str) -> ShapeMismatch:
    do = "Is it the adapter's base? A vocabulary that grew in training is not read."
    return ShapeMismatch(f"the adapter's `{name}` is {list(spec.shape)}, but {other}", do=do)


def open_base(path: Path, hints: Hints, of: str) -> Reader:
    """The base that the user names for an adapter `of` PEFT, Megatron-Bridge or mlx-lm. Raises UnknownFormat without
    it, and MappingError where it is no Hugging Face directory."""
    if hints.reference is None:
        raise UnknownFormat(
            f"an adapter of {of} (LoRA), without the model that it changes",
            where=path,
            do=f"Give {TAKE_REFERENCE} --reference BASE, the Hugging Face directory of the model that it was trained "
            "on. For other commands merge the two: `precisionctl convert ADAPTER OUT --to hf --reference BASE`.",
        )
    base = open_checkpoint(hints.reference)
    if base.layout != "hf":
        raise MappingError(
            "the base of an adapter is a Hugging Face directory",
            where=hints.reference,
            do="Make one of it with `precisionctl convert BASE HF --to hf`, and give that.",
        )
    return base


def _open(path: Path, hints: Hints) -> AdapterReader:
    with_model = (path / "config.json").exists() and file_format_of(path) is not None
    if with_model and hints.reference is None:
        raise UnknownFormat(
            "a model and an adapter of PEFT in one directory: transformers computes with both, and engines with the "
            "model alone",
            where=path,
            do="Merge the two, DIR being the directory: `precisionctl convert DIR OUT --to hf --reference DIR`. For "
            f"the model alone, move {FILE} and the adapter's weights out of it.",
        )
    if with_model and hints.reference and hints.reference.resolve() == path.resolve():
        base: Reader = huggingface.CONTAINER.open(path, None, NO_HINTS)
    else:
        base = open_base(path, hints, "PEFT")
    if has_file(path / "adapter_model.safetensors", path):
        file, file_format = path / "adapter_model.safetensors", SAFETENSORS
    elif has_file(path / "adapter_model.bin", path):
        file, file_format = path / "adapter_model.bin", BIN
    else:
        what = "no adapter_model.safetensors, nor adapter_model.bin"
        raise DamagedCheckpoint(what, where=path, do="Is the copy whole?")
    config = read_lora_config(path)
    stored = StoredTensors({name: (file, one) for name, one in file_format.read(file).items()})
    with at(file):
        return AdapterReader(path, base, config, stored, (file, path / FILE))


CONTAINER = Container(recognise, without_iterations(_open), f"{FILE} of a LoRA adapter of PEFT")
