"""LoRA of Megatron-Bridge (0.3.1, and as its source was in August 2026), read as PEFT would have saved it.

Its checkpoint is a `torch_dist` with the factors alone, beside Megatron's linears (peft/lora.py, peft/utils.py): to
`….linear_qkv.weight` is added `alpha / dim * linear_out @ linear_in`, of `….linear_qkv.adapter.linear_in.weight`
`[dim, in]` and `….linear_out.weight` `[out, dim]`, whose rows stand as in that weight. CanonicalLoRA has such a pair
for each of query, key, value, gate and up, with the rows of that part alone. `run_config.yaml` has the settings.
"""

import re
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from precisionctl.architectures.families import table_of
from precisionctl.architectures.param_map import Place, Row, names
from precisionctl.checkpoints.adapter.lora_config import LARGEST_ALPHA, LoraConfig
from precisionctl.checkpoints.adapter.reader import PREFIX, AdapterReader, open_base
from precisionctl.checkpoints.base import Hints, Reader
from precisionctl.checkpoints.chunks import Chunk, whole
from precisionctl.checkpoints.computed_rows import PickedRows
from precisionctl.checkpoints.megatron.directory import MegatronReader
from precisionctl.checkpoints.megatron.provider import BRIDGE, bridge_section
from precisionctl.errors import DamagedCheckpoint, MappingError, ShapeMismatch, at, shown
from precisionctl.param import TensorSpec

_FACTOR = re.compile(r"(.+)\.adapter\.(?:adapter_(q|k|v|gate|up)\.)?linear_(in|out)\.weight")
_PARTS = {"q": (0, 3), "k": (1, 3), "v": (2, 3), "gate": (0, 2), "up": (1, 2)}
"""For each linear of CanonicalLoRA: the place of its tensor among those of Hugging Face that are fused in Megatron's,
and their number."""
_KINDS = ("LoRA", "CanonicalLoRA")
_KNOWN = frozenset({
    "_target_", "dim", "alpha",
    # which linears it adapts: its tensors say that themselves
    "target_modules", "exclude_modules", "canonical_mapping", "params_to_save",
    # how it was initialised and trained
    "dropout", "dropout_position", "lora_A_init_method", "lora_B_init_method", "lora_dtype", "a2a_experimental",
    "sequence_parallel_input_regather",
    # about experts, whose adapters are refused
    "normalize_moe_lora", "share_expert_adapters", "experts_shared_outer_loras",
})  # fmt: skip
_EXPORT = (
    "Export it in a clone of Megatron-Bridge: `python examples/conversion/adapter/export_adapter.py --hf-model-path "
    "BASE --lora-checkpoint ITERATION --output ADAPTER`; then "
    "`precisionctl convert ADAPTER OUT --to hf --reference BASE`."
)


def has_adapters(tensors: Collection[str]) -> bool:
    """Whether these are names of Bridge's adapters."""
    return any(".adapter." in name for name in tensors)


def with_base(saved: MegatronReader, hints: Hints) -> AdapterReader:
    """Adapters and the base that the user names, as a Reader of the merged model. Raises as AdapterReader, and
    UnknownFormat without a base."""
    path = saved.path
    base = open_base(path, hints, "Megatron-Bridge")
    with at(path):
        said = bridge_section(path, "peft")
        kind = str(said.get("_target_")).rpartition(".")[2]
        if kind not in _KINDS:
            what = f"an adapter of Megatron-Bridge's {shown(kind)}; read are {', '.join(_KINDS)}"
            raise MappingError(what, do=_EXPORT)
        if unknown := [key for key, value in said.items() if value and key not in _KNOWN]:
            what = f"settings of the adapter that are not read: {', '.join(map(shown, unknown))}"
            raise MappingError(what, do=_EXPORT)
        rank: Any = said.get("dim")
        alpha: Any = said.get("alpha")
        if type(rank) is not int or type(alpha) not in (int, float) or not (rank > 0 and abs(alpha) < LARGEST_ALPHA):
            raise DamagedCheckpoint(f"dim is {shown(rank)} and alpha {shown(alpha)}", where=path / BRIDGE)
        factors = _Factors(saved, base, rank)
        return AdapterReader(path, base, LoraConfig(rank, alpha), factors, (*saved.files, path / BRIDGE))


class _Factors:
    """Bridge's factors under PEFT's names, as a source of tensors. The parts of a fused linear (q, k and v; gate and
    up) share one A."""

    def __init__(self, saved: MegatronReader, base: Reader, rank: int) -> None:
        self._saved, self._rank = saved, rank
        self._chunks: dict[str, Sequence[Chunk]] = {}
        self.specs: dict[str, TensorSpec] = {}
        # the row of each of Megatron's linears, and its place, by the linear's name
        linears = {
            names(row, "megatron", place)[0].removesuffix(".weight"): (row, place)
            for row in table_of(base.model).spelled(base.specs, base.model)
            if row.megatron.endswith(".weight") and len(row.shape(base.model)) == 2
            for place in row.places(base.model)
        }
        for name in saved.specs:
            match = _FACTOR.fullmatch(name)
            linear = match and linears.get(match[1])
            if linear is None and ".mlp.experts." in name:
                what = f"`{name}` is of experts, whose adapters each version of Megatron-Bridge stores in another way"
                raise MappingError(what, do=_EXPORT)
            if match is None:
                raise MappingError(f"`{name}` is no factor of LoRA", do=_EXPORT)
            if linear is None:
                what = f"`{match[1]}` is changed by the adapter, and the base has no such linear"
                raise MappingError(what, do="Is it its base?")
            a, b = (f"{name.removesuffix(f'linear_{match[3]}.weight')}linear_{end}.weight" for end in ("in", "out"))
            if a not in saved.specs or b not in saved.specs:
                raise DamagedCheckpoint(f"`{name}` is there without the other factor", do="Is the copy whole?")
            if match[3] == "out":
                self._add(a, b, match[2], *linear, base)

    def chunks(self, name: str) -> Sequence[Chunk]:
        return self._chunks[name]

    def _add(self, a: str, b: str, part: str | None, row: Row, place: Place, base: Reader) -> None:
        """Add the two factors of a linear, or of a part of it, for each tensor of Hugging Face that it makes."""
        model = base.model
        hf, (size, columns) = names(row, "hf", place), row.shape(model)
        shapes = [base.specs[name].shape for name in hf if name in base.specs]
        if shapes != list(row.shapes(model, "hf")):  # before memory of these sizes is allocated
            what = f"the base's {', '.join(hf)} are {shown(shapes)}, and its config.json says other sizes"
            raise ShapeMismatch(what, do="Is the copy of the base whole?")
        if not row.moves_rows(model) or (part and len(hf) != _PARTS[part][1]):
            raise MappingError(
                f"`{b}` is for a weight that the base stores in another form than rows of it", do=_EXPORT
            )
        if part and "linear_fc1" in b and self._saved.args.get("tensor_model_parallel_size") != 1:
            what = f"`{b}` was saved by several tensor-parallel ranks: Bridge cuts it in two then, like gate and up"
            raise MappingError(what, do="Load it in Bridge at the same sizes, and export it there.")
        rows = [moved[:, 0] for moved in row.split(np.arange(size)[:, None], model)]
        if part:  # the factor has this part's rows alone, in their order in the fused weight
            here = _PARTS[part][0]
            hf, rows = (hf[here],), [np.argsort(np.argsort(rows[here]))]
        stored = self._saved.specs
        wanted = {a: (self._rank, columns), b: (sum(map(len, rows)), self._rank)}
        if wrong := [name for name, shape in wanted.items() if stored[name].shape != shape]:
            what = f"the adapter's `{wrong[0]}` is {list(stored[wrong[0]].shape)}"
            raise ShapeMismatch(f"{what}, not {list(wanted[wrong[0]])}", do="Is it the adapter's base?")
        for name, order in zip(hf, rows, strict=True):
            module = f"{PREFIX}{name.removesuffix('.weight')}"
            if f"{module}.lora_A.weight" in self.specs:
                raise DamagedCheckpoint(f"`{name}` has more than one adapter", do="No run of Bridge saves that.")
            self.specs[f"{module}.lora_A.weight"] = stored[a]
            self._chunks[f"{module}.lora_A.weight"] = self._saved.chunks(a)
            picked = TensorSpec((len(order), self._rank), stored[b].dtype)
            self.specs[f"{module}.lora_B.weight"] = picked
            self._chunks[f"{module}.lora_B.weight"] = [Chunk(whole(picked), PickedRows(self._saved, b, order))]
