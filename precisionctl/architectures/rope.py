"""Rotary embeddings in config.json: their base, the share of a head that turns, and how they are scaled."""

from collections.abc import Mapping, Sequence
from typing import Any

from precisionctl.architectures.config_keys import (
    Config,
    Fields,
    Rule,
    as_list,
    check_passed_over,
    is_on,
    section,
    size,
)
from precisionctl.architectures.config_layers import WINDOWS, by_kind
from precisionctl.errors import DamagedCheckpoint, UnknownArchitecture, shown
from precisionctl.model.model_parts import part_of_head, real
from precisionctl.model.model_shape import ModelShape

# scalings that can be computed, and the numbers of each: those it needs, and those it may have
_KINDS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor",),
        (
            *("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
            *("mscale", "mscale_all_dim"),
        ),
    ),
    "longrope": ((), ("factor", "original_max_position_embeddings", "attention_factor")),
    "proportional": (("partial_rotary_factor",), ("factor",)),
}
_ORIGINAL = "original_max_position_embeddings"
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, _ORIGINAL: 8192}
"""What every Llama from 3.1 on says of its scaling beside the factor."""
_LISTS = ("short_factor", "long_factor")
_TRUNCATE = "truncate"
_QUERY_SCALING = "llama_4_scaling_beta"

KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", _ORIGINAL)
"""The keys of config.json that say it."""

_LOCAL = "rope_local_base_freq"
_LAYERS = WINDOWS.keys()
"""Kinds of layers with parameters of their own."""

PARAMETERS = frozenset(
    (*(name for kind in _KINDS.values() for names in kind for name in names), *_LISTS, _TRUNCATE)
    + ("rope_type", "type", "rope_theta", "partial_rotary_factor", *_LAYERS)
    + (_QUERY_SCALING, "alpha")
)
"""Everything that is read within `rope_parameters` or `rope_scaling`."""


def rope(
    base: float = 10000.0,
    percent: float = 1.0,
    scaling: Mapping[str, Any] | None = None,
    *,
    partial: bool = False,
    query_scaling: bool = False,
    original: int | None = None,
) -> Rule:
    """`rope_parameters` of transformers 5, or the keys of transformers 4; with the family's defaults.

    `partial` says whether the family uses `partial_rotary_factor`, `query_scaling` whether it uses
    `llama_4_scaling_beta`. `original` is the class's default for the original context length, whatever the kind of
    scaling.
    """

    def read(config: Config) -> Fields:
        config = config if original is None else {_ORIGINAL: original} | dict(config)
        parameters = rotary_parameters(config, base, scaling, percent=percent)
        fields = {**read_rope(config, parameters, base, percent)}
        if not partial:
            _check_whole(fields, config)
        if query_scaling and (beta := parameters.get(_QUERY_SCALING)) not in (None, 0):  # 0 scales none (Devstral 2)
            if not (fields["rope_scaling"] or {}).get(_ORIGINAL):
                raise DamagedCheckpoint(f"{_QUERY_SCALING} without `{_ORIGINAL}`")
            fields["query_scaling_beta"] = beta
        return fields

    def write(model: ModelShape) -> Config:
        config: dict[str, Any] = {"rope_theta": model.rotary_base}
        if model.rotary_percent != 1 or percent != 1:  # 1 too, for TensorRT-LLM has a default of its own
            config["partial_rotary_factor"] = model.rotary_percent
        if model.rope_scaling:
            config["rope_scaling"] = dict(model.rope_scaling)
            if query_scaling:
                config["rope_scaling"][_QUERY_SCALING] = model.query_scaling_beta or 0.0  # its class asks for one
        elif scaling:
            config["rope_parameters"] = {"rope_type": "default", "rope_theta": model.rotary_base}
        return config

    return Rule(KEYS, read, write)


def rope_with_dim(head_dim: int, *, heeds_dim: bool) -> Rule:
    """The same of MiniMax, whose released files, and engines, have `rotary_dim`: how many channels of a head turn.
    `head_dim` is the class's default. `heeds_dim` says whether transformers takes it where no `partial_rotary_factor`
    is. Raises DamagedCheckpoint where the two differ."""
    of_share = rope(5000000.0, partial=True)

    def read(config: Config) -> Fields:
        channels, said = size(config, "head_dim", absent=head_dim), config.get("rotary_dim")
        if said is not None and heeds_dim:
            config = {"partial_rotary_factor": size(config, "rotary_dim") / channels, **config}
        fields = of_share.read(config)
        turning = int(channels * fields["rotary_percent"])
        if said not in (None, turning):
            what = f"rotary_dim is {shown(said)}, and in transformers {turning} channels turn"
            raise DamagedCheckpoint(what, do="Say it by partial_rotary_factor, too.")
        return fields

    def write(model: ModelShape) -> Config:
        return {**of_share.write(model), "rotary_dim": model.rotary_size}

    return Rule((*KEYS, "rotary_dim"), read, write)


def rope_by_kind(
    base: float,
    local_base: float,
    absent: Mapping[str, Mapping[str, Any]] | None = None,
    *,
    local_key: bool = False,
) -> Rule:
    """Rotary embeddings of layers without a window, and of layers with one, which have a base of their own and no
    scaling. transformers 5 has parameters for each kind of layer; transformers 4 has `rope_theta` and `rope_scaling`
    for layers without a window, and with `local_key` `rope_local_base_freq` for those with one. A family that
    transformers 4 does not know uses `absent` for missing parameters, and passes over the bases beside them."""

    def read(config: Config) -> Fields:
        config = beside_kinds(config)
        parameters = rotary_parameters(config, base, absent)
        bases = [base if absent else config.get("rope_theta", base), local_base]
        if local_key:
            bases[1] = real(config.get(_LOCAL, local_base), _LOCAL)
        else:
            check_passed_over(config, {_LOCAL: local_base})
        if not _LAYERS & parameters.keys():
            if absent or config.get("rope_parameters"):
                what = "rotary parameters are said for all layers together, and transformers finds none"
                raise DamagedCheckpoint(what, do=f"Say them in `rope_parameters` by kind: {', '.join(_LAYERS)}.")
            if "rope_type" not in parameters and rope_type(parameters) != "default":
                what = f"`type` is {shown(parameters['type'])}, and transformers, which passes over it, scales nothing"
                raise DamagedCheckpoint(what, do="Say it as `rope_type`, too.")
            parameters = {"full_attention": parameters}
        elif not config.get("rope_parameters") and parameters is not absent:
            raise DamagedCheckpoint("`rope_scaling` has parameters by kind of layer", do="Say them in rope_parameters.")
        said = {name: parameters.get(name) for name in ("full_attention", "sliding_attention")}
        kinds = [section(said, name) for name in said]
        if absent and any(each is not None and "rope_theta" not in each for each in said.values()):
            what = f"a kind is without a `rope_theta` in {shown(parameters)}, and transformers takes another or fails"
            raise DamagedCheckpoint(what, do="Say one in the parameters of each kind of layers.")
        beside = {key: value for key, value in config.items() if key != "rope_theta"}
        everywhere, in_window = (
            read_kind(beside, each, default, 1.0) for each, default in zip(kinds, bases, strict=True)
        )
        for fields in (everywhere, in_window):
            _check_whole(fields, config)
        if in_window["rope_scaling"]:
            raise UnknownArchitecture("rotary scaling in layers with a window")
        return {**everywhere, "rotary_base_local": in_window["rotary_base"]}

    def write(model: ModelShape) -> Config:
        if absent or (not local_key and model.rotary_base_local != local_base):
            everywhere = {"rope_type": "default", **(model.rope_scaling or {}), "rope_theta": model.rotary_base}
            in_window = {"rope_type": "default", "rope_theta": model.rotary_base_local}
            return {"rope_parameters": {"full_attention": everywhere, "sliding_attention": in_window}}
        config: dict[str, Any] = {"rope_theta": model.rotary_base}
        if local_key:
            config[_LOCAL] = model.rotary_base_local
        return config | ({"rope_scaling": dict(model.rope_scaling)} if model.rope_scaling else {})

    return Rule((*KEYS, _LOCAL), read, write)


def rope_of_kinds(
    config: Config,
    windows: Sequence[bool],
    absent: Mapping[str, Mapping[str, Any]],
    percent: float,
    *,
    partial: bool = True,
) -> Fields:
    """Rotary embeddings of layers with a window and without one, of a class that takes them by kind of layer alone and
    passes over `rope_theta` beside them (Laguna); the two may turn another share of a head. `absent` is what it takes
    where there are none, `percent` the share where a kind says none and has no scaling. Raises DamagedCheckpoint for a
    kind without parameters or a base. `partial` as in `rope`."""
    sized = {key: value for key, value in config.items() if key == "max_position_embeddings"}
    parameters = rotary_parameters(beside_kinds(config), 1e4, absent)
    used = {name for name, in_window in WINDOWS.items() if in_window in windows}
    kinds: dict[str, Fields] = {}
    for kind in sorted(used):
        given = parameters.get(kind)
        if not isinstance(given, Mapping) or "rope_theta" not in given:
            raise DamagedCheckpoint(f"{kind} is without a `rope_theta` in {shown(parameters)}")
        if given.get("partial_rotary_factor", percent) is None:  # which its class multiplies by
            raise DamagedCheckpoint(f"{kind} has a `partial_rotary_factor` that is null")
        usual = percent if rope_type(given) == "default" else 1.0
        if "partial_rotary_factor" not in given and config.get("partial_rotary_factor", usual) != usual:
            what = f"{kind} is without the `partial_rotary_factor` that is beside it"  # heeded if it is scaled
            raise DamagedCheckpoint(what, do="Say it in the parameters of each kind of layers.")
        kinds[kind] = read_kind(sized, given, 1e4, usual)
        if not partial:
            _check_whole(kinds[kind], config)

    everywhere = kinds.get("full_attention") or kinds["sliding_attention"]
    in_window = kinds.get("sliding_attention") or everywhere
    if in_window["rope_scaling"] and len(used) == 2:
        raise UnknownArchitecture("rotary scaling in layers with a window")
    share = "rotary_percent"
    return {
        **everywhere,
        **by_kind(windows, {share: in_window[share]}, {share: everywhere[share]}),
        "rotary_base_local": in_window["rotary_base"] if len(used) == 2 else None,
    }


def write_rope_of_kinds(model: ModelShape) -> Config:
    """`rope_parameters` by kind of layer, as `rope_of_kinds` reads them."""
    without = model.attention_of(in_window=False)
    everywhere = {
        "rope_type": "default",
        "partial_rotary_factor": without.rotary_percent,
        **(model.rope_scaling or {}),  # a proportional one has a share of its own
        "rope_theta": model.rotary_base,
    }
    local = {
        "rope_type": "default",
        "rope_theta": model.rotary_base_local,
        "partial_rotary_factor": model.rotary_percent,
    }
    in_window = everywhere if model.rotary_base_local is None else local
    return {"rope_parameters": {"full_attention": everywhere, "sliding_attention": in_window}}


def _check_whole(fields: Fields, config: Config) -> None:
    """Raise UnknownArchitecture if only a part of a head is to be rotated: these families' classes ignore such a
    setting."""
    if fields["rotary_percent"] != 1:
        raise UnknownArchitecture(
            f"no {config.get('model_type')} known here has partial_rotary_factor={fields['rotary_percent']}"
        )


def rotary_parameters(
    config: Config, base: float, absent: Mapping[str, Any] | None = None, *, percent: float = 1.0
) -> Mapping[str, Any]:
    """The parameters of rotary embeddings in config.json, under either of its keys. Raises DamagedCheckpoint if both
    keys are there and differ. `base` is the class's default for the rotary base, `percent` for the share of a head that
    turns, `absent` for absent parameters; `{}` is not absent, and scales nothing."""
    both = [said for key in ("rope_parameters", "rope_scaling") if (said := section(config, key))]

    def fields(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
        in_kinds = bool(_LAYERS & parameters.keys())
        return parameters if in_kinds else read_rope(config, parameters, base, percent)

    if len(both) == 2 and fields(both[0]) != fields(both[1]):
        what = f"`rope_parameters` {shown(both[0])} and `rope_scaling` {shown(both[1])} are not the same"
        do = "Keep the one that is meant, with `rope_theta` in it: transformers 5 goes by `rope_scaling` alone."
        raise DamagedCheckpoint(what, do=do)
    taken = absent if config.get("rope_parameters") is None else None
    return (both[0] if both else taken) or {}


def beside_kinds(config: Config) -> Config:
    """What counts beside parameters by kind of layer: transformers looks for the original context in these alone."""
    return {key: value for key, value in config.items() if key != _ORIGINAL}


def read_kind(config: Config, parameters: Mapping[str, Any], base: float, percent: float) -> Fields:
    """As `read_rope`, of the parameters of one kind of layers. Raises DamagedCheckpoint for what transformers
    (_compute_yarn_parameters in modeling_rope_utils.py) looks for in the parameters of all layers alone."""
    if rope_type(parameters) == "yarn" and not is_on(parameters, _TRUNCATE, True):
        what = f"{_TRUNCATE} is {shown(parameters[_TRUNCATE])}, and transformers passes over it by kind of layer"
        raise DamagedCheckpoint(what, do="Leave it out.")
    return read_rope(config, parameters, base, percent)


def read_rope(config: Config, parameters: Mapping[str, Any], base: float, percent: float) -> Fields:
    """Fields of ModelShape from the parameters, and from keys of transformers 4 beside them. Raises
    UnknownArchitecture for parameters by kind of layer: no class that asks for those of all layers finds its own."""
    if kinds := _LAYERS & parameters.keys():
        what = f"no {config.get('model_type')} known here has rotary parameters of {sorted(kinds)[0]} alone"
        raise UnknownArchitecture(what, do="Say those of all layers: transformers finds no others.")
    kind = rope_type(parameters)
    rope = {key: value for key, value in parameters.items() if key not in ("rope_type", "type")}
    theta = rope.pop("rope_theta", config.get("rope_theta", base))
    part = rope.pop("partial_rotary_factor", config.get("partial_rotary_factor", percent))
    if part is None and percent != 1:
        what = "partial_rotary_factor is null: some classes of transformers turn whole heads then, and others fail"
        raise DamagedCheckpoint(what, do=f"Say the share; this family's is {percent}.")
    part = 1.0 if part is None else part
    if kind == "proportional":  # of all pairs, whose frequencies beyond this part are 0
        rope["partial_rotary_factor"], part = part, 1.0
    return {
        "rotary_base": real(theta, "rope_theta"),
        "rotary_percent": part_of_head(part, "partial_rotary_factor"),
        "rope_scaling": _scaling(kind, rope, config),
    }


def rope_type(parameters: Mapping[str, Any]) -> Any:
    """The kind of scaling that parameters say; `type` was the word before transformers 4.43."""
    return parameters.get("rope_type", parameters.get("type", "default"))


def _scaling(kind: object, rope: dict[str, Any], config: Config) -> dict[str, Any] | None:
    if kind == "su" or (kind == "yarn" and "short_factor" in rope):  # what Phi-3 called it at first
        kind = "longrope"
    if not isinstance(kind, str) or kind not in _KINDS:
        known = ", ".join(_KINDS)
        raise UnknownArchitecture(f"rotary scaling of type {shown(kind)}", do=f"Known: {known}.")
    if kind == "default":
        return None
    needed, possible = _KINDS[kind]
    if _ORIGINAL in (*needed, *possible):  # transformers asks in the same order
        said = [each[_ORIGINAL] for each in (config, rope) if _ORIGINAL in each]
        if said and said[0] is None:
            raise DamagedCheckpoint(f"{_ORIGINAL} is null", do="Leave it out, or say the length.")
        rope[_ORIGINAL] = said[0] if said else config.get("max_position_embeddings")
    scaling: dict[str, Any] = {"rope_type": kind}
    for name in (*needed, *possible):
        if rope.get(name) is None and name in needed:
            raise DamagedCheckpoint(f"no `{name}`", do="Is the file whole?")
        if rope.get(name) is not None and not (name.startswith("mscale") and rope[name] == 0):
            real(rope[name], name)
        if name in rope:
            scaling[name] = rope[name]
    if kind == "llama3" and scaling["low_freq_factor"] > scaling["high_freq_factor"]:  # Llama 4 Scout's are equal
        what = f"low_freq_factor {scaling['low_freq_factor']} above high_freq_factor {scaling['high_freq_factor']}"
        raise DamagedCheckpoint(what, do="Is config.json this model's?")
    for name in _LISTS if kind == "longrope" else ():
        listed = as_list(rope.get(name), name, "factors", range(1, (1 << 16) + 1))
        scaling[name] = [real(factor, name) for factor in listed]
    if kind == "yarn":  # what transformers takes for what is not said
        scaling = {"beta_fast": 32.0, "beta_slow": 1.0} | {name: value for name, value in scaling.items() if value}
        if not is_on(rope, _TRUNCATE, True):
            scaling[_TRUNCATE] = False
    return scaling
