"""Which linears a `quantization_config` leaves unquantized. Each engine matches its list of names differently."""

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

import regex

from precisionctl.errors import PrecisionError, shown


@dataclass(frozen=True)
class IgnoreList:
    """The list is under the first of `keys` that has one; `matches(entry, module)` is whether an entry of it means a
    module, by the module's full name."""

    keys: tuple[str, ...]
    matches: Callable[[str, str], bool]

    def leaves_out(self, quantization: Mapping[str, Any], module: str) -> bool:
        """Whether a linear is not quantized: it is no target, or it is on the list."""
        entries = next((found for key in self.keys if (found := quantization.get(key))), ())
        groups = quantization.get("config_groups")  # without any, all linears are targets
        listed = list(groups.values()) if isinstance(groups, Mapping) else []
        targets = [target for group in listed if isinstance(group, Mapping) for target in words(group.get("targets"))]
        targeted = not targets or any(of_a_class(target) or by_name_or_regex(target, module) for target in targets)
        return not targeted or any(self.matches(entry, module) for entry in words(entries))


def words(value: object) -> Iterator[str]:
    """The entries of a list that are text; none of anything else, as a stranger's config may have."""
    if isinstance(value, list | tuple):
        yield from (entry for entry in value if isinstance(entry, str))


def of_a_class(target: str) -> bool:
    """Whether a target means modules of a class, such as `Linear`, and not some by their names."""
    return "." not in target and not target.startswith("re:") and target[:1].isupper()


def by_name(entry: str, module: str) -> bool:
    """vLLM 0.33 quant_utils.py is_layer_skipped, of `quant_method: fp8`."""
    return entry == module


def by_path(entry: str, module: str) -> bool:
    """SGLang 0.5.23 fp8.py Fp8Config.from_config, utils.py is_layer_skipped: with and without `model.`."""
    stems = (entry.removeprefix("model."), f"model.{entry.removeprefix('model.')}")
    return any(module == stem or module.startswith(f"{stem}.") for stem in stems)


def by_name_or_regex(entry: str, module: str) -> bool:
    """compressed-tensors' own, in vLLM 0.33 compressed_tensors/utils.py is_equal_or_regex_match."""
    return _matches(entry[3:], module) if entry.startswith("re:") else entry == module


def by_start_regex_or_end(entry: str, module: str) -> bool:
    """transformers 5.23 quantizers_utils.py should_convert_module."""
    return module.endswith(entry) or _matches(rf"(?:{entry})(?:(?<=\.)|(?=\.|$))", module)


def by_glob(entry: str, module: str) -> bool:
    """TensorRT-LLM models/modeling_utils.py is_module_excluded_from_quantization."""
    return fnmatchcase(module, entry)


def by_part_or_glob(entry: str, module: str) -> bool:
    """vLLM 0.33 and SGLang 0.5.23 modelopt.py, is_layer_excluded."""
    return entry in module or fnmatchcase(module, entry)


SECONDS = 0.5
"""Time limit of a match. Patterns come from an untrusted config, and even a short one can take exponential time."""
OF_ALL = 2.0
_OF_EACH = 50e-6
"""Seconds that all matches of a check may take together, and what each adds to them, ten times what it needs: patterns
that take nearly SECONDS each, for many names, would take hours."""
_left: ContextVar[list[float]] = ContextVar("_left")
"""One number: how many of these seconds are left."""


@contextmanager
def in_time() -> Iterator[None]:
    """Within it all matches together are limited."""
    token = _left.set([OF_ALL])
    try:
        yield
    finally:
        _left.reset(token)


_LONGEST = 1000
"""Letters of a pattern. The time limit does not hold for compiling it."""
_MOST_COPIES = 1_000_000
"""Most letters of a pattern with what it repeats written out, as `regex` does: `(a{1000}){1000}` takes 0.3 GB."""


def _matches(pattern: str, module: str) -> bool:
    """Whether a regular expression matches at the start of a name. Raises PrecisionError for one that is invalid or
    takes too long."""
    left, began = _left.get([OF_ALL]), time.thread_time()
    try:
        _check_size(pattern)
        if left[0] < 0:
            raise TimeoutError
        return regex.match(pattern, module, timeout=SECONDS) is not None
    except (regex.error, TimeoutError, RecursionError) as problem:
        why = "takes too long" if isinstance(problem, TimeoutError) else f"cannot be read: {problem}"
        raise PrecisionError(f"the pattern {shown(pattern)} {why}", where="config.json") from None
    finally:
        left[0] += _OF_EACH - (time.thread_time() - began)


@lru_cache(maxsize=1 << 12)
def _check_size(pattern: str) -> None:
    """Raises regex.error for a pattern that is large, or may be once compiled: what is within `+` stands there twice,
    what is within `{n}` n times. Nothing is within more of them than there are brackets, and one."""
    if len(pattern) > _LONGEST:
        raise regex.error(f"longer than {_LONGEST} letters")
    if any(letter.isspace() for letter in pattern):  # `(?x)` skips it, within numbers too; names of modules have none
        raise regex.error("blanks")
    repeated = [int(count or 0) + 1 for count in re.findall(r"\{\D*(\d*)", pattern)] + [2] * pattern.count("+")
    deepest = sorted(repeated)[-1 - pattern.count("(") :]
    if len(pattern) * math.prod(deepest) > _MOST_COPIES:
        raise regex.error("too many repetitions within each other")
