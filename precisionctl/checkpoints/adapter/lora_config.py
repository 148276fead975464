"""adapter_config.json of PEFT: the settings that decide which function an adapter makes of its base (peft 0.21,
tuners/lora/config.py)."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from precisionctl.errors import DamagedCheckpoint, MappingError, at, shown
from precisionctl.untrusted.safe_files import read_json
from precisionctl.untrusted.safe_patterns import Patterns

FILE = "adapter_config.json"

_READ = frozenset({
    "peft_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "fan_in_fan_out",
    "init_lora_weights", "target_modules", "target_parameters", "ensure_weight_tying",
    "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save",
})  # fmt: skip
_OF_NO_CONSEQUENCE = frozenset({
    # where it is from, and how it was trained
    "auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode", "peft_version",
    "lora_dropout", "megatron_core", "runtime_config",
    # how it was initialised
    "loftq_config", "eva_config", "corda_config", "lora_ga_config",
    # which tensors it has: they say that themselves
    "bias",
    # only read with `use_qalora`, which is refused
    "qalora_group_size",
})  # fmt: skip
_KEEPS_BASE = (True, False, "gaussian", "eva", "orthogonal", "mica")
"""Values of `init_lora_weights` that leave the base as it is. PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA take something off
it, and their adapters belong to what is left."""


@dataclass(frozen=True)
class AdaptedModules:
    """Which modules peft adapts (peft 0.21, tuners/tuners_utils.py, check_target_module_exists). It ignores the tensors
    of others when it loads an adapter.

    `targets` and `excluded` are ends of names, or an expression for whole ones. `targets` are None where nothing says
    them, or an expression that is not read, as one that looks ahead; nothing is `excluded` by such a one. `saved` are
    stored whole, with all that is in them. `layers` are numbers, the first in a module's name, or the first behind one
    of the `layer_lists`; None for all. They say nothing where `targets` are no ends of names, nor of a module that
    these name whole.
    """

    targets: frozenset[str] | Patterns | None = None
    excluded: frozenset[str] | Patterns = frozenset()
    saved: frozenset[str] = frozenset()
    layers: frozenset[int] | None = None
    layer_lists: tuple[str, ...] = ()

    def __contains__(self, module: str) -> bool:
        ends, framed = _ends(module), f".{module}."
        if isinstance(self.excluded, Patterns):
            is_excluded = self.excluded.first(module) is not None
        else:
            is_excluded = not ends.isdisjoint(self.excluded)
        if is_excluded or any(f".{name}." in framed for name in self.saved):
            return False
        if isinstance(self.targets, Patterns):
            return self.targets.first(module) is not None
        if self.targets is None or module in self.targets:
            return True
        if ends.isdisjoint(self.targets):
            return False
        if self.layers is None:
            return True
        found = (each.search(module) for each in self._layer_numbers)
        return next((int(each[1]) in self.layers for each in found if each), False)

    @cached_property
    def _layer_numbers(self) -> list[re.Pattern[str]]:
        """Patterns of which the first that is found in a module's name has its layer's number."""
        lists = [rf"(?:^|\.){re.escape(name)}" for name in self.layer_lists] or [r"\.[^.]*"]
        return [re.compile(rf"{name}\.(\d{{1,9}})\.") for name in lists]  # numbers below _MOST_LAYERS


@dataclass(frozen=True)
class LoraConfig:
    """The settings of an adapter that change what its tensors do.

    `rank` and `alpha` are the usual rank and `lora_alpha` of a module, and `own_ranks` those that some modules may have
    instead. `own_alphas` are of modules whose names end as an expression of `alpha_patterns` says, the first that
    matches (peft 0.21, utils/other.py, get_pattern_key). `modules` are those that are adapted, and `parameters` names
    of parameters that are adapted on their own, such as the experts of a layer. `base` is the model that the adapter
    says it is for; a stranger wrote it. `ensure_weight_tying`: an output layer that is tied to an embedding has the
    same change.
    """

    rank: int
    alpha: float
    own_ranks: frozenset[int] = frozenset()
    alpha_patterns: Patterns | None = None
    own_alphas: Sequence[float] = ()
    rslora: bool = False
    dora: bool = False
    transposed: bool = False
    parameters: frozenset[str] = frozenset()
    modules: AdaptedModules = AdaptedModules()
    base: str | None = None
    ensure_weight_tying: bool = False

    def adapts_parameter(self, name: str) -> bool:
        """Whether a parameter is one of `target_parameters`, by its whole name or the end of it."""
        return not _ends(name).isdisjoint(self.parameters)

    def scale(self, module: str, rank: int) -> float:
        """The factor of the low-rank product of a module, or of a parameter of `target_parameters`, with this rank."""
        first = self.alpha_patterns.first(module) if self.alpha_patterns else None
        alpha = self.alpha if first is None else self.own_alphas[first]
        return alpha / (math.sqrt(rank) if self.rslora else rank)


def read_lora_config(directory: Path) -> LoraConfig:
    """Read and check an adapter_config.json.

    Raises DamagedCheckpoint for a file that is none, and MappingError, which names the key, for a setting under which
    the adapter computes something other than its tensors alone say.
    """
    path = directory / FILE
    config = read_json(path, directory)
    if (kind := config.get("peft_type")) != "LORA":
        raise MappingError(f"an adapter of type {shown(kind)}; only LORA is read", where=path, do=_BY_PEFT)
    if config.get("init_lora_weights", True) not in _KEEPS_BASE:
        raise MappingError(
            f"init_lora_weights is {shown(config['init_lora_weights'])}: the adapter is not for the base itself, but "
            "for what that initialisation left of it",
            where=path,
            do="Save it with peft as one for the base: save_pretrained(..., path_initial_model_for_weight_conversion).",
        )
    unknown = [key for key, value in config.items() if value and key not in _READ | _OF_NO_CONSEQUENCE]
    if unknown:
        named = ", ".join(f"{key:.60} ({shown(config[key])})" for key in unknown)
        raise MappingError(f"settings of the adapter that are not read: {named}", where=path, do=_BY_PEFT)
    rank, alpha = config.get("r", 8), config.get("lora_alpha", 8)
    ranks, alphas = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
    if not all(type(one) is dict for one in (ranks, alphas)):
        raise DamagedCheckpoint("rank_pattern and alpha_pattern are tables", where=path)
    if not all(type(one) is int and 0 < one < 1 << 31 for one in (rank, *ranks.values())):
        raise DamagedCheckpoint(f"r is {shown(rank)}, rank_pattern {shown(ranks)}: ranks are whole numbers", where=path)
    if not all(type(one) in (int, float) and abs(one) < LARGEST_ALPHA for one in (alpha, *alphas.values())):
        raise DamagedCheckpoint(f"lora_alpha is {shown(alpha)}, alpha_pattern {shown(alphas)}", where=path)
    parameters = config.get("target_parameters") or []
    if type(parameters) is not list or not all(type(one) is str for one in parameters):
        raise DamagedCheckpoint(f"target_parameters is {shown(parameters)}, not a list of names", where=path)
    modules = _read_modules(config, path)
    switches: dict[str, bool] = {}
    for key in ("use_rslora", "use_dora", "fan_in_fan_out", "ensure_weight_tying"):
        value = config.get(key, False)
        if value not in (None, True, False):
            raise DamagedCheckpoint(f"{key} is {shown(value)}, neither true nor false", where=path)
        switches[key] = bool(value)
    with at(path):
        # last: damage is told before this
        alpha_patterns = _patterns(list(alphas), "alpha_pattern", r"(?:.*\.)?(?:", ")$") if alphas else None
    return LoraConfig(
        rank,
        alpha,
        own_ranks=frozenset(ranks.values()),
        alpha_patterns=alpha_patterns,
        own_alphas=list(alphas.values()),
        rslora=switches["use_rslora"],
        dora=switches["use_dora"],
        transposed=switches["fan_in_fan_out"],
        parameters=frozenset(parameters),
        modules=modules,
        base=name if isinstance(name := config.get("base_model_name_or_path"), str) else None,
        ensure_weight_tying=switches["ensure_weight_tying"],
    )


def _read_modules(config: Mapping[str, Any], path: Path) -> AdaptedModules:
    said: dict[str, list[str] | str | None] = {}
    for key in ("target_modules", "exclude_modules", "modules_to_save", "layers_pattern"):
        value = config.get(key)
        if not (value is None or isinstance(value, str | list) and all(isinstance(one, str) for one in value)):
            raise DamagedCheckpoint(f"{key} is {shown(value)}, neither names nor an expression", where=path)
        said[key] = value
    targets, excluded, saved, lists = said.values()
    saved, lists = ([each] if isinstance(each, str) and each else list(each or []) for each in (saved, lists))
    for key, names in (("modules_to_save", saved), ("layers_pattern", lists)):
        if len(names) > _MOST_NAMES:
            what = f"{key} has {len(names)} names, more than {_MOST_NAMES}"
            raise MappingError(what, where=path, do=_BY_PEFT)
    layers = config.get("layers_to_transform")
    layers = [layers] if type(layers) is int else layers
    if layers is not None and not (isinstance(layers, list) and all(type(one) is int for one in layers)):
        what = f"layers_to_transform is {shown(layers)}, neither a layer's number nor a list of them"
        raise DamagedCheckpoint(what, where=path)
    if targets is None and config.get("target_parameters"):
        targets = []
    return AdaptedModules(
        targets=_names(targets, "target_modules"),
        excluded=_names(excluded, "exclude_modules") or frozenset(),
        saved=frozenset(saved),
        # other numbers are no layers', and can be chosen to have one hash
        layers=frozenset(each for each in layers if 0 <= each < _MOST_LAYERS) if layers else None,
        layer_lists=tuple(lists),
    )


def _ends(name: str) -> set[str]:
    """A name, and what is behind each of its dots."""
    return {name[begin:] for begin in (0, *(dot.end() for dot in re.finditer(r"\.", name)))}


def _names(value: list[str] | str | None, key: str) -> frozenset[str] | Patterns | None:
    """What a list of ends of names, or a regular expression, says; None for nothing, or if it cannot be read."""
    if isinstance(value, list):
        return frozenset(value)
    if not value or value.lower() == _ALL_LINEAR:
        return None
    try:
        return _patterns([value], key, "(?:", r")\Z")
    except MappingError:
        return None


def _patterns(patterns: list[str], key: str, before: str, after: str) -> Patterns:
    do = f"Name the modules in {key} with fewer and plainer expressions."
    return Patterns(patterns, lambda why: MappingError(f"{key}: {why}", do=do), before, after)


_ALL_LINEAR = "all-linear"
"""A word of peft, for all linear layers but the output layer."""
_MOST_LAYERS = 10**9
_MOST_NAMES = 1000
"""Names of modules to save, and of lists of layers: each is looked for within the names of all adapted modules."""
_BY_PEFT = "Merge it with peft: `model.merge_and_unload().save_pretrained(OUT)`, and give OUT."
LARGEST_ALPHA = 1e9
