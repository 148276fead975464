"""What config.json says of each layer: which have a window, and lists of kinds or numbers of layers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from precisionctl.architectures.config_keys import (
    Config,
    Fields,
    Rule,
    as_list,
    as_object,
    is_on,
    layers,
    section,
    size,
    whole,
)
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture, shown
from precisionctl.model.model_shape import ModelShape
from precisionctl.sizes import counted

Local = Callable[[Config, int], list[bool]]
"""From a config.json, the number of layers and the place for errors: whether each layer has the window, or is of
another kind, where no list says so. Raises DamagedCheckpoint for keys that say no number."""


def sliding_window(
    local: Local,
    switch: str = "",
    absent: int | None = None,
    also: tuple[str, ...] = (),
    listed: bool = True,
    null_is_none: bool = False,
) -> Rule:
    """`sliding_window`, and the layers that it is for: as `layer_types` lists them, else as the family has them.

    `also` are the keys that `local` reads. `switch` names a key that turns the window on; `absent` is the class's
    default window. A class that ignores `layer_types` is not `listed`: a list that contradicts it is refused.

    A null window is refused beside layers that have one, for which transformers makes no mask: listed ones and, unless
    `null_is_none`, those of `local` where nothing is listed. A class with a `switch`, without a window by default, or
    with one in all layers takes null for none, too.
    """
    null_is_none = null_is_none or bool(switch) or absent is None or local is everywhere

    def read(config: Config) -> Fields:
        by_list = listed_layers(config, WINDOWS)  # raises for another kind, also where no window is said
        window = None if switch and not is_on(config, switch) else config.get("sliding_window", absent)
        if window is None:
            said = by_list if by_list is not None or null_is_none else local(config, layers(config))
            if listed and any(said or ()):
                raise DamagedCheckpoint("there are layers with a window, and no sliding_window says how many tokens")
            return {}
        windows = layers_in_window(config, local)
        if not listed and windows != local(config, len(windows)):
            what = f"no {config.get('model_type')} known here has a window in the layers that layer_types lists alone"
            raise UnknownArchitecture(what, do="transformers has it in every layer.")
        if not any(windows):
            return {}
        return {"sliding_window": window, "window_layers": tuple(windows)}

    def write(model: ModelShape) -> Config:
        if model.sliding_window is None:
            if not absent or switch:
                return {}
            return {"sliding_window": None} | ({} if local is everywhere else {"layer_types": layer_types(model)})
        config: dict[str, Any] = {"sliding_window": model.sliding_window}
        if model.window_layers is not None or local is not everywhere:
            config["layer_types"] = layer_types(model)
        return config | ({switch: True} if switch else {})

    keys = ("sliding_window", "layer_types", *also, *((switch,) if switch else ()))
    return Rule(keys, read, write)


def layers_of(kinds: Mapping[str, bool], config: Config, local: Local) -> list[bool]:
    """What the kinds of layers mean: as `layer_types` lists them, else as the family has them. Raises as
    `listed_layers`."""
    listed = listed_layers(config, kinds)
    return local(config, layers(config)) if listed is None else listed


def layers_in_window(config: Config, local: Local) -> list[bool]:
    """Whether each layer has the window."""
    return layers_of(WINDOWS, config, local)


def window_fields(config: Config, windows: Sequence[bool], absent: int | None = None) -> Fields:
    """The fields of layers of which these have a window, of `absent` tokens where no key says how many; none where no
    layer has one. Raises DamagedCheckpoint where nothing says how many."""
    if not any(windows):
        return {}
    window = size(config, "sliding_window", absent=absent)
    return {"sliding_window": window, "window_layers": tuple(windows)}


def write_window(model: ModelShape) -> Config:
    """The tokens that a layer with a window sees, where there is such a layer, and which layers have one."""
    window = {} if model.sliding_window is None else {"sliding_window": model.sliding_window}
    return {**window, "layer_types": layer_types(model)}


def by_kind(windows: Sequence[bool], in_window: Fields, without: Fields) -> Fields:
    """Fields of attention that differ between layers with a window and layers without one."""
    if not any(windows):
        return without
    own = {f"global_attention.{name}": value for name, value in without.items() if value != in_window[name]}
    return in_window if all(windows) else {**in_window, **own}


def layer_types(model: ModelShape) -> list[str]:
    """What each layer sees, or has in the place of attention, in the words of config.json."""
    kinds = []
    for layer in range(model.num_layers):
        if model.has_delta_net(layer):
            kinds.append("linear_attention")
        elif model.has_short_conv(layer):
            kinds.append("conv")
        else:
            kinds.append("sliding_attention" if model.in_window(layer) else "full_attention")
    return kinds


def write_layer_types(model: ModelShape) -> Config:
    return {"layer_types": layer_types(model)}


WINDOWS = {"sliding_attention": True, "full_attention": False}
"""Of `layer_types`: have layers of this kind the window?"""


def listed_layers(config: Config, kinds: Mapping[str, bool], key: str = "layer_types") -> list[bool] | None:
    """What the kinds of layers that are listed under a key mean; None where there is no list. Raises DamagedCheckpoint
    unless each layer has one (as PreTrainedConfig.validate_layer_type), UnknownArchitecture for another kind."""
    if config.get(key) is None:
        return None
    count = layers(config)
    listed = as_list(config[key], key, counted(count, "layer"), (count,))
    unknown = [kind for kind in listed if not isinstance(kind, str) or kind not in kinds]
    if unknown:
        what = f"layers of type {shown(unknown[0])} in {key}"
        raise UnknownArchitecture(what, do=f"Known: {', '.join(kinds)}.")
    return [kinds[kind] for kind in listed]


def listed_flags(value: object, key: str, number: int) -> list[bool]:
    """What a list of 0 or 1 says of each of so many layers. Raises DamagedCheckpoint for anything else."""
    of = f"0 or 1 for each of {counted(number, 'layer')}"
    listed = as_list(value, key, of, (number,))
    if any(each not in (0, 1) for each in listed):
        raise DamagedCheckpoint(f"{key} is {shown(value)}, not a list of {of}")
    return list(map(bool, listed))


def sizes_by_layer(config: Config) -> dict[str, dict[str, Any]]:
    """What transformers saves of single layers that differ from the others, by their numbers, which it writes as wide
    as the largest (`01`)."""
    said = section(config, "per_layer_config")
    sizes = {str(layer): as_object(own, f"per_layer_config[{layer}]") for layer, own in said.items()}
    return {layer.lstrip("0") or "0": {**own} for layer, own in sizes.items()}


def numbered_layers(listed: object, key: str) -> frozenset[int]:
    """The layers whose numbers are listed under a key."""
    # as many as there may be layers: numbers can be chosen to have one hash, and take time quadratic in how many
    return frozenset(as_list(listed, key, "layers", kinds=(int,)))


def everywhere(config: Config, layers: int) -> list[bool]:
    """True for every layer."""
    return [True] * layers


def nowhere(config: Config, layers: int) -> list[bool]:
    return [False] * layers


def but_first_of_four(config: Config, layers: int) -> list[bool]:
    """False for the first layer, the fifth, and so on."""
    return [layer % 4 != 0 for layer in range(layers)]


def every_other(config: Config, layers: int) -> list[bool]:
    """True for the first layer, the third, and so on."""
    return [layer % 2 == 0 for layer in range(layers)]


def from_max_window_layers(absent: int) -> Local:
    """True for the layer of the number that `max_window_layers` says, or `absent`, and for all after it."""

    def local(config: Config, layers: int) -> list[bool]:
        first = whole(config, "max_window_layers", absent)
        return [layer >= first for layer in range(layers)]

    return local


def all_but_every(number: int, key: str = "") -> Local:
    """True for every layer but each of this number; `key` may say another one."""

    def local(config: Config, layers: int) -> list[bool]:
        every = size(config, key, absent=number) if key else number
        return [(layer + 1) % every != 0 for layer in range(layers)]

    return local
