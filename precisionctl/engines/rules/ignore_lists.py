"""Which linears a `quantization_config` leaves unquantized. Each engine matches its list of names differently."""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache

from precisionctl.errors import PrecisionError
from precisionctl.untrusted.safe_patterns import Patterns


@dataclass(frozen=True)
class Matching:
    """How an engine tells which modules the entries of a list mean, by their full names.

    Lists may name each of a hundred thousand experts. So plain entries are looked up, and not tried one by one:
    `named(entries, module)` says whether any of them means the module. An entry in which `are_patterns` finds something
    is a pattern, and is tried by `matches(entry, module)`. Without `are_patterns` all entries are plain.
    """

    named: Callable[[Set[str], str], bool]
    are_patterns: re.Pattern[str] = re.compile(r"(?!)")
    matches: Callable[[str, str], bool] = lambda entry, module: False

    def of(self, entries: Iterable[str]) -> Callable[[str], bool]:
        """Whether one of these entries means a module. Raises PrecisionError, once it is asked, for a pattern that is
        invalid or takes too long."""
        listed = dict.fromkeys(entries)
        patterns = [entry for entry in listed if self.are_patterns.search(entry)]
        plain = listed.keys() - patterns
        return lambda module: self.named(plain, module) or any(self.matches(entry, module) for entry in patterns)

    def first(self, entries: Iterable[str]) -> Callable[[str], str | None]:
        """The first of these entries, in their order, that is a module's whole name or a pattern that means it. Raises
        as `of`."""
        places = {entry: place for place, entry in enumerate(dict.fromkeys(entries))}
        patterns = [entry for entry in places if self.are_patterns.search(entry)]

        def found(module: str) -> str | None:
            last = places.get(module, len(places))
            before = itertools.takewhile(lambda entry: places[entry] < last, patterns)
            pattern = next((entry for entry in before if self.matches(entry, module)), None)
            return pattern or (module if module in places else None)

        return found


def names_in_layers(module: str) -> Iterator[str]:
    """The names under which ModelOpt's `quantized_layers` may have a module: its own, and that of all experts of its
    layer; both also with the words of a wrapper the other way round. vLLM 0.33 and SGLang 0.5.23, modelopt.py and
    modelopt_quant.py _resolve_quant_algo."""
    experts, named_so, _ = module.partition(".experts.")
    for name in (module, *([f"{experts}.experts"] if named_so else [])):
        yield name
        for words_of_wrapper, others in (_WRAPPERS, _WRAPPERS[::-1]):
            if name.startswith(words_of_wrapper):
                yield others + name.removeprefix(words_of_wrapper)


_WRAPPERS = ("language_model.model.", "model.language_model.")


def words(value: object) -> Iterator[str]:
    """The entries of a list that are text; none of anything else, as a stranger's config may have."""
    if isinstance(value, list | tuple):
        yield from (entry for entry in value if isinstance(entry, str))


def is_of_a_class(target: str) -> bool:
    """Whether a target means modules of a class, such as `Linear`, and not some by their names."""
    return "." not in target and not target.startswith("re:") and target[:1].isupper()


def _is_named(entries: Set[str], module: str) -> bool:
    return module in entries


def _ends_so(entries: Set[str], module: str) -> bool:
    """Whether an entry is the name, or its end behind a dot."""
    return module in entries or any(module[at + 1 :] in entries for at, letter in enumerate(module) if letter == ".")


def _is_below_one(entries: Set[str], module: str) -> bool:
    """Whether the module or one that it is in is named, with or without `model.`."""
    ends = [at for at, letter in enumerate(module) if letter == "."]
    paths = (module[:end] for end in (*ends, len(module)))
    return any(
        path in entries or f"model.{path}" in entries or path.removeprefix("model.") in entries for path in paths
    )


def _starts_or_ends_so(entries: Set[str], module: str) -> bool:
    """Whether the name ends in an entry, or begins with one that ends before a dot, behind a dot or with the name."""
    places = range(len(module) + 1)
    starts = (module[:at] for at in places if module[at : at + 1] in ("", ".") or module[at - 1 : at] == ".")
    return any(start in entries for start in starts) or any(module[at:] in entries for at in places)


def _has_part(entries: Set[str], module: str) -> bool:
    """Whether an entry is a part of the name."""
    if len(entries) < len(module) ** 2:  # about as many parts as a name has
        return any(entry in module for entry in entries)
    places = range(len(module) + 1)
    return any(module[at:end] in entries for at in places for end in places[at:])


_REGEX, _GLOB = re.compile(r"^re:"), re.compile(r"[*?\[]")
_NO_NAME = re.compile(r"[^\w.-]|^\.|\.$")
"""In an entry that is not the name of a module, whole or in part."""

BY_NAME = Matching(_is_named)
"""vLLM 0.33 quant_utils.py is_layer_skipped, of `quant_method: fp8`."""

BY_PATH = Matching(_is_below_one)
"""SGLang 0.5.23 fp8.py Fp8Config.from_config, utils.py is_layer_skipped."""

BY_NAME_OR_REGEX = Matching(_is_named, _REGEX, lambda entry, module: _matches(entry[3:], module))
"""compressed-tensors' own, in vLLM 0.33 compressed_tensors/utils.py is_equal_or_regex_match."""

BY_END_OR_REGEX = Matching(_ends_so, _REGEX, BY_NAME_OR_REGEX.matches)
"""SGLang 0.5.23 compressed_tensors/utils.py check_equal_or_regex_match."""

BY_START_REGEX_OR_END = Matching(
    _starts_or_ends_so,
    _NO_NAME,
    lambda entry, module: module.endswith(entry) or _matches(rf"(?:{entry})(?:(?<=\.)|(?=\.|$))", module),
)
"""transformers 5.24 quantizers_utils.py should_convert_module, to which every entry is an expression: a dot between
words is any letter there, and a dot here."""

BY_GLOB = Matching(_is_named, _GLOB, lambda entry, module: fnmatchcase(module, entry))
"""TensorRT-LLM models/modeling_utils.py is_module_excluded_from_quantization."""

BY_PART_OR_GLOB = Matching(_has_part, _GLOB, lambda entry, module: entry in module or fnmatchcase(module, entry))
"""vLLM 0.33 and SGLang 0.5.23 modelopt.py, is_layer_excluded."""


def _matches(pattern: str, module: str) -> bool:
    """Whether a regular expression matches at the start of a name. Raises PrecisionError for one that is invalid or
    takes too long."""
    return _compiled(pattern).first(module) is not None


@lru_cache(maxsize=1 << 12)
def _compiled(pattern: str) -> Patterns:
    return Patterns([pattern], lambda why: PrecisionError(why, where="config.json"))
