"""Megatron's command-line flags for FP8 and FP4 as keys of a recipe, and back, in one table; and its parallel sizes.

They are fields of megatron-core's TransformerConfig, from which Megatron-LM makes its arguments
(megatron/training/argument_utils.py, ArgumentGroupFactory). A flag that is not given keeps the recipe's value. The
recipe's defaults are TE's, where Megatron's differ (a history of 1 and `most_recent`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from precisionctl.errors import RecipeError, shown

if TYPE_CHECKING:  # `--help` needs the flags, and importing torch would make it slow
    from precisionctl.precision import Precision


PARALLEL_SIZES: Mapping[str, tuple[str, str]] = {
    "tensor": ("--tp", "tensor_model_parallel_size"),
    "pipeline": ("--pp", "pipeline_model_parallel_size"),
    "virtual": ("--vpp", "virtual_pipeline_model_parallel_size"),
    "first_layers": ("--first-stage-layers", "decoder_first_pipeline_num_layers"),
    "last_layers": ("--last-stage-layers", "decoder_last_pipeline_num_layers"),
    "expert": ("--ep", "expert_model_parallel_size"),
    "expert_tensor": ("--etp", "expert_tensor_parallel_size"),
}
"""Fields of a Parallelism: our option for each, and Megatron's argument."""


@dataclass(frozen=True)
class Flag:
    """A flag, the recipe keys that it sets, and Megatron's values -> ours; without `words` it takes an integer."""

    name: str
    keys: tuple[str, ...]
    words: Mapping[str, str] = field(default_factory=dict)

    @property
    def parameter(self) -> str:
        """Its name as a Python parameter."""
        return self.name.removeprefix("--").replace("-", "_")

    @property
    def argument(self) -> str:
        """Its name among the arguments that Megatron stores."""
        return {"fp8_format": "fp8", "fp4_format": "fp4"}.get(self.parameter, self.parameter)


FIRST_LAST = Flag("--first-last-layers-bf16", ())
"""Takes no value. Keeps one layer at each end in BF16, unless the flags in LAYERS give other numbers."""

LAYERS = (
    Flag("--num-layers-at-start-in-bf16", ("precision.num_layers_at_start_in_bf16",)),
    Flag("--num-layers-at-end-in-bf16", ("precision.num_layers_at_end_in_bf16",)),
)

_OF_FP8 = (
    Flag(
        "--fp8-format",
        ("precision.delayed.fp8_format", "precision.block.fp8_format"),
        {"hybrid": "HYBRID", "e4m3": "E4M3"},
    ),
    Flag(
        "--fp8-recipe",
        ("precision.scaling",),
        {"delayed": "delayed", "tensorwise": "current", "blockwise": "block", "mxfp8": "mxfp8"},
    ),
    Flag("--fp8-margin", ("precision.delayed.margin",)),
    Flag("--fp8-amax-history-len", ("precision.delayed.amax_history_len",)),
    Flag(
        "--fp8-amax-compute-algo",
        ("precision.delayed.amax_compute_algo",),
        {"max": "max", "most_recent": "most_recent"},
    ),
)
_OF_FP4 = (
    Flag("--fp4-format", ("precision.scaling",), {"e2m1": "nvfp4"}),  # the recipe's default, too
    Flag("--fp4-recipe", ("precision.scaling",), {"nvfp4": "nvfp4"}),
)
FLAGS = (*_OF_FP8, *_OF_FP4, *LAYERS)


def as_overrides(given: Mapping[str, object], first_last: bool, precision: str | None = None) -> tuple[str, ...]:
    """The given flags as overrides in the form of `--set`, for a command with this `--precision`. Raises RecipeError
    for a number of layers in BF16 without `--first-last-layers-bf16`, which Megatron silently ignores, and for FP8 and
    FP4 at once: Megatron refuses the two formats, and the other flags of FP8 say nothing of a run in NVFP4."""
    of_fp8, of_fp4 = ([flag.name for flag in flags if flag.name in given] for flags in (_OF_FP8, _OF_FP4))
    of_fp4 += ["--precision nvfp4"] * (precision == "nvfp4")
    if of_fp8 and of_fp4:
        raise RecipeError(f"{of_fp8[0]} and {of_fp4[0]} exclude each other", do="Leave one of them out.")
    numbers = [flag.name for flag in LAYERS if flag.name in given]
    if numbers and not first_last:
        raise RecipeError(
            f"{numbers[0]} has no effect without {FIRST_LAST.name}", do=f"Give {FIRST_LAST.name} too, or leave it out."
        )
    given = {**({flag.name: 1 for flag in LAYERS} if first_last else {}), **given}
    known = {flag.name: flag for flag in FLAGS}
    return tuple(
        f"{key}={known[name].words.get(str(value), value)}" for name, value in given.items() for key in known[name].keys
    )


def coded_words(args: Mapping[str, Any]) -> tuple[str, ...]:
    """The arguments by which a run was in FP8 or FP4, with values that `keys_of` may not know; none of one in BF16."""
    return tuple(
        f"{flag.argument} {shown(args[flag.argument])}"
        for flags in (_OF_FP8, _OF_FP4)
        if args.get(flags[0].argument) is not None
        for flag in flags
        if args.get(flag.argument) is not None
    )


def keys_of(args: Mapping[str, Any]) -> Mapping[str, object]:
    """The recipe keys that the arguments in a Megatron checkpoint set, as far as its scaling uses them. Empty if the
    run was in neither FP8 nor FP4, in both, which Megatron refuses, or has a value that no key has (the recipe
    `custom`)."""
    kinds = [flags for flags in (_OF_FP8, _OF_FP4) if args.get(flags[0].argument) is not None]
    kind = kinds[0] if len(kinds) == 1 else ()
    keys: dict[str, object] = {}
    for flag in (*kind, *LAYERS) if kind else ():  # the arguments of the other kind are there too, with their defaults
        value = args.get(flag.argument)
        if flag in LAYERS and value is None:
            value = 1  # Megatron's default
        if value is None or (flag in LAYERS and not args.get(FIRST_LAST.parameter)):
            continue
        if flag.words:
            value = flag.words.get(value) if isinstance(value, str) else None
        elif not (type(value) is int and abs(value) < 1 << 63):
            value = None
        if value is None:
            return {}
        keys |= dict.fromkeys(flag.keys, value)
    unused = _UNUSED[str(keys.get("precision.scaling", "delayed"))]
    return {key: value for key, value in keys.items() if not key.startswith(unused)}


_UNUSED: Mapping[str, tuple[str, ...]] = {
    "delayed": ("precision.block.",),
    "current": ("precision.block.", "precision.delayed.margin", "precision.delayed.amax_"),
    "block": ("precision.delayed.",),
    "mxfp8": ("precision.delayed.",),
    "nvfp4": ("precision.delayed.", "precision.block."),
}
"""How keys begin that a scaling does not use."""


def stateless_words(precision: "Precision") -> Mapping[str, object]:
    """The arguments for a scaling without state, under the names that Megatron, Bridge and NeMo share."""
    if precision.codes == "NVFP4":
        words: dict[str, object] = {flag.argument: _theirs(flag.name, precision.scaling) for flag in _OF_FP4}
    else:
        words = {
            "fp8": _theirs("--fp8-format", precision.fp8_format),
            "fp8_recipe": _theirs("--fp8-recipe", precision.scaling),
        }
    numbers = {flag.parameter: getattr(precision, flag.parameter) for flag in LAYERS}
    return words | ({FIRST_LAST.parameter: True, **numbers} if any(numbers.values()) else {})


def flags_of(words: Mapping[str, object]) -> tuple[tuple[str, ...], ...]:
    """Arguments as flags of Megatron's command line, each with its value if it takes one."""
    names = {flag.argument: flag.name for flag in (*FLAGS, FIRST_LAST)}
    return tuple((names[key],) if value is True else (names[key], str(value)) for key, value in words.items())


_OFF: Mapping[str, object] = {"fp8": None, "fp4": None, FIRST_LAST.parameter: False}
"""The arguments that say that a run is in FP8 or FP4, and of layers in BF16, as they are in any other run."""


def words_of_bf16(args: Mapping[str, Any]) -> Mapping[str, object]:
    """What the arguments of a run become where it goes on in BF16; without those that it lacks."""
    return {name: off for name, off in _OFF.items() if name in args}


def _theirs(name: str, value: str) -> str:
    """Megatron's value of a flag for ours."""
    (words,) = (flag.words for flag in FLAGS if flag.name == name)
    return next(theirs for theirs, ours in words.items() if ours == value)
