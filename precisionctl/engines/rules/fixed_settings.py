"""Settings of a model that an engine's class of it refuses, or passes over, and what it computes by instead."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from precisionctl.engines.rules.rule import EngineRule, Finding
from precisionctl.errors import shown
from precisionctl.model.model_parts import yarn_mscale


@dataclass(frozen=True)
class FixedSettings:
    """That of models of these `model_types` an engine takes `values`, by key, whatever config.json says, by a `rule`.
    What makes a value of the whole config returns None where the engine computes what is said. A key that config.json
    lacks says the family's usual value, for which the engine's class was written. With a `head`, directories alone
    break the rule that store an output layer (True), or store none (False). With `refused`, the engine does not load
    what says another value; of a `head` without values, what has one."""

    model_types: tuple[str, ...]
    values: Mapping[str, bool | float | Callable[[Mapping[str, Any]], object]]
    rule: EngineRule
    head: bool | None = None
    refused: bool = False

    def taken(self, config: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
        """The keys under which a config.json says other values, and what the engine takes for these."""
        if str(config.get("model_type")) not in self.model_types:
            return
        for key, value in self.values.items():
            said, taken = config.get(key), value(config) if callable(value) else value
            if said is not None and taken is not None and said != taken:
                yield key, taken

    def check(self, config: Mapping[str, Any], stored: Collection[str] | None) -> Iterator[Finding]:
        """The same, as findings on a directory of the tensors that are `stored`, by name; None: the config counts."""
        head = next((name for name in stored or () if "lm_head." in name), None)
        if self.head is not None and stored is not None and self.head != (head is not None):
            return
        for key, taken in self.taken(config):
            instead = "" if self.refused else f", and taken for {shown(taken)}"
            yield Finding("config.json", f"{key} is {shown(config[key])}{instead}", self.rule)
        if not self.values and head and str(config.get("model_type")) in self.model_types:
            yield Finding(head, "an output layer", self.rule)


def window_off_by(tokens: int, key: str = "sliding_window") -> Callable[[Mapping[str, Any]], object]:
    """A window of so many tokens more than config.json says under a key, if a layer has it."""

    def taken(config: Mapping[str, Any]) -> object:
        window, kinds = config.get(key), config.get("layer_types")
        has_windows = not isinstance(kinds, list) or _WINDOW in kinds
        return window + tokens if type(window) is int and has_windows else None

    return taken


def none_without_layers(config: Mapping[str, Any]) -> object:
    """No window, where one is said and no layer has it: then the engine has rotary embeddings in all layers, as without
    a window, and transformers in none. 0 stands for null here, because None means that the engine computes what is
    said."""
    kinds, window = config.get("layer_types"), config.get("sliding_window")
    return 0 if window and isinstance(kinds, list) and _WINDOW not in kinds else None


def one_share_of_heads(config: Mapping[str, Any]) -> object:
    """Rotary embeddings of all kinds of layers that turn the share of a head that is said beside them."""
    kinds, share = config.get("rope_parameters"), config.get("partial_rotary_factor")
    if share is None or not isinstance(kinds, Mapping) or not all(isinstance(each, Mapping) for each in kinds.values()):
        return None
    return {kind: {**each, "partial_rotary_factor": share} for kind, each in kinds.items()}


def longrope_by_contexts(key: str) -> Callable[[Mapping[str, Any]], object]:
    """longrope under a key with the factor of attention that its paper has for a context so much longer, where another
    one is said, or another `factor`, of which transformers makes it."""

    def taken(config: Mapping[str, Any]) -> object:
        rope = config.get(key)
        if not isinstance(rope, Mapping) or _kind(rope) != "longrope":
            return None
        name = "original_max_position_embeddings"
        before, now = config.get(name, rope.get(name)), config.get("max_position_embeddings")
        if type(before) is not int or type(now) is not int or before < 2:
            return None

        def of_attention(factor: float) -> float:
            return math.sqrt(1 + math.log(max(factor, 1)) / math.log(before))

        by_contexts = of_attention(now / before)
        said = _number(rope, "attention_factor", of_attention(_number(rope, "factor", now / before)))
        return None if math.isclose(said, by_contexts, rel_tol=1e-6) else {**rope, "attention_factor": by_contexts}

    return taken


def yarn_of_deepseek(key: str) -> Callable[[Mapping[str, Any]], object]:
    """DeepSeek's YaRN in the place of a scaling under a key, where transformers computes otherwise: another kind, one
    that does not round the channels between which it blends, or other magnitudes of what turns and of scores. To an
    `attention_factor` of 1 scores have none; of what turns it says nothing."""

    def taken(config: Mapping[str, Any]) -> object:
        rope = config.get(key)
        if not isinstance(rope, Mapping) or _kind(rope) in (None, "default"):
            return None
        factor, in_scores = _number(rope, "factor"), _number(rope, "mscale_all_dim")
        turned = yarn_mscale(factor, _number(rope, "mscale", 1.0)) / yarn_mscale(factor, in_scores)
        if rope.get("attention_factor") == 1:
            in_scores = 0.0
        made = {name: value for name, value in rope.items() if name not in _OF_YARN}
        made |= {"rope_type" if "rope_type" in rope else "type": "yarn", "attention_factor": turned}
        made |= {"mscale_all_dim": in_scores} if in_scores else {}
        is_rounded = _kind(rope) == "yarn" and rope.get("truncate", True)
        is_the_same = is_rounded and all(map(math.isclose, _yarn_magnitudes(rope), _yarn_magnitudes(made)))
        return None if is_the_same else made

    return taken


_OF_YARN = ("truncate", "attention_factor", "mscale", "mscale_all_dim")


def _yarn_magnitudes(rope: Mapping[str, Any]) -> tuple[float, float]:
    """By how much transformers multiplies what turns, and scores (5.24, modeling_rope_utils.py
    _compute_yarn_parameters, modeling_deepseek_v3.py yarn_apply_mscale)."""
    factor, mscale, in_scores = (_number(rope, name) for name in ("factor", "mscale", "mscale_all_dim"))
    of_both = (mscale, in_scores) if mscale and in_scores else (1.0, 0.0)
    usual = yarn_mscale(factor, of_both[0]) / yarn_mscale(factor, of_both[1])
    return _number(rope, "attention_factor", usual), yarn_mscale(factor, in_scores) ** 2


def _number(rope: Mapping[str, Any], name: str, absent: float = 0.0) -> float:
    value = rope.get(name)
    return float(value) if isinstance(value, int | float) and 0 <= value < 1e30 else absent


def _kind(rope: Mapping[str, Any]) -> object:
    return rope.get("rope_type", rope.get("type"))


def dense_layers_first(config: Mapping[str, Any]) -> object:
    """`mlp_layer_types` with all dense layers before the others, which is what a number of leading ones can say; None
    where it is so."""
    kinds = config.get("mlp_layer_types")
    if not isinstance(kinds, list) or "dense" not in kinds:
        return None
    first = kinds.count("dense")
    moved = ["dense"] * first + [kind for kind in kinds if kind != "dense"]
    return None if moved == kinds else moved


BY_LEADING_DENSE = ("deepseek", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "hy_v3", "kimi_linear")
"""Models of which transformers' classes go by `mlp_layer_types`, and those of vLLM and SGLang by the number
`first_k_dense_replace`."""

BY_NUMBER = "its class of this model knows only how many layers are dense, which are the first ones"
NUMBER_BY_LIST = (
    "its class of this model goes by this number, and not by `mlp_layer_types`: `export-inference` writes as many as "
    "the list says"
)


def shared_from_the_last_two(config: Mapping[str, Any]) -> object:
    """Of layers before those that share keys and values (Gemma 3n's last 15), the last one without a window and the one
    before it with one: what these read, whatever the two are."""
    kinds, shared = config.get("layer_types"), config.get("num_kv_shared_layers", 15)
    if not isinstance(kinds, list) or type(shared) is not int or not 0 < shared <= len(kinds) - 2:
        return None
    first = len(kinds) - shared
    own, reading = kinds[:first], {*map(str, kinds[first:])}
    taken = list(own)
    if _EVERYWHERE in reading:
        taken[-1] = _EVERYWHERE
    if _WINDOW in reading:
        taken[-2:] = [_WINDOW, _EVERYWHERE]
    return None if taken == own else [*taken, *kinds[first:]]


SHARED_FROM_THE_LAST_TWO = (
    "of layers that share keys and values, those without a window read the last layer before them, and those with one "
    "the layer before that, whatever the two are"
)


def in_every_other_layer(config: Mapping[str, Any]) -> object:
    """Windows in the first layer and every other one after it."""
    kinds = config.get("layer_types")
    return [(_WINDOW, _EVERYWHERE)[layer % 2] for layer in range(len(kinds))] if isinstance(kinds, list) else None


def in_no_layer_unless_all(config: Mapping[str, Any]) -> object:
    """No windows, where some layers have them and others have not."""
    kinds = config.get("layer_types")
    if not isinstance(kinds, list) or not {_WINDOW, _EVERYWHERE} <= {*map(str, kinds)}:
        return None
    return [_EVERYWHERE] * len(kinds)


def off_where_some_layers_from(config: Mapping[str, Any]) -> object:
    """No windows, where layers have them from the number `max_window_layers` on, but not all. So transformers reads it
    where there are no `layer_types` (configuration_qwen2.py, configuration_qwen3.py)."""
    return _off(config, lambda layers, first: 0 < first < layers)


def off_where_every_other_before(config: Mapping[str, Any]) -> object:
    """No windows, where every other layer before that number has them (configuration_qwen2_moe.py)."""
    return _off(config, lambda layers, first: first > 0 and layers > 1)


def _off(config: Mapping[str, Any], in_some: Callable[[int, int], bool]) -> object:
    layers, first = config.get("num_hidden_layers"), config.get("max_window_layers", 28)
    is_null = "sliding_window" in config and config["sliding_window"] is None
    if is_null or config.get("layer_types") is not None or type(layers) is not int or type(first) is not int:
        return None
    return False if in_some(layers, first) else None


def on_unless_said_by(key: str) -> Callable[[Mapping[str, Any]], object]:
    """True, where config.json lacks another key, which wins."""
    return lambda config: None if key in config else True


_WINDOW, _EVERYWHERE = "sliding_attention", "full_attention"
