"""Regular expressions of strangers mean what they mean to `re`, and take bounded time and memory."""

import itertools
import re
import time
import tracemalloc

import pytest
from hypothesis import given, strategies as st

from precisionctl.errors import MappingError
from precisionctl.untrusted import safe_patterns
from precisionctl.untrusted.safe_patterns import Patterns

WORDS = ["a", "b", "1", "_", "-", ".", r"\.", "[ab]", "[^a]", "[a-b_]", r"\d", r"\W", "|", "(", "(?:", ")", "^", "$"]
WORDS += ["*", "+", "?", "*?", "+?", "*+", "{2}", "{1,}", "{0,2}", "(?=", "(?!", "(?<=", "(?>", "(?P<x>", "(?i:", r"\b"]
WORDS += ["[", "]", "^", "&&", "||", "--", "{", "}", "<", "=", "e", "\\", ":", "~~", "(?i)", "(?V1)", "(?b)", "(?|"]
SPELLED = st.lists(st.lists(st.sampled_from(WORDS), max_size=9).map("".join), min_size=1, max_size=3)
NAMES = ["".join(letters) for length in (0, 1, 2, 3, 4) for letters in itertools.product("ab.1", repeat=length)]


def read(given: list[str], before: str = "", after: str = "") -> Patterns:
    return Patterns(given, MappingError, before, after)


@given(SPELLED, st.sampled_from([("", ""), (r"(.*\.)?(", ")$"), ("(", r")\Z")]))
def test_the_first_that_matches_is_that_of_re(given: list[str], around: tuple[str, str]) -> None:
    before, after = around
    try:
        ours = read(given, before, after)
    except MappingError:
        return
    theirs = [re.compile(f"{before}{pattern}{after}") for pattern in given]
    for name in NAMES:
        expected = next((number for number, each in enumerate(theirs) if each.match(name)), None)
        assert ours.first(name) == expected, name


@given(SPELLED)
def test_anywhere_the_first_place_counts_and_then_the_first_pattern(given: list[str]) -> None:
    try:
        ours = read(given, "(", ")")
    except MappingError:
        return
    theirs = [re.compile(f"({pattern})") for pattern in given]
    for name in NAMES:
        places = [(match.start(), number) for number, each in enumerate(theirs) if (match := each.search(name))]
        assert ours.first(name, anywhere=True) == (min(places)[1] if places else None), name


@pytest.mark.parametrize(
    "pattern",
    [
        *(r"(a)\1", "(?P<x>a)(?P=x)", "(a)?(?(1)b|c)"),  # references: of joined patterns they would be others
        *("(?:cats){e<=1}", r"\\{e}", "a{,2}", "[[:alpha:]]", r"\L<names>", r"\p{L}", "(?R)", "(?1)", "(?|a|b)"),
        *("(?b)a", "(?e)a", "(?r)a", "(?p)a", "(?V1)a", "(?V1)[a--b]", r"a\Kb", r"\X", "(*FAIL)"),
        *("(?x) a", "(q", "q)", "*q", "a{2,1}", "[z-a]", "[", "(" * 5000, "a{99999999999}", "\\"),
        *("(a{1000}){1001}", "a" * 200_000),
    ],
)
def test_what_is_not_read_is_one_error_at_once(pattern: str) -> None:
    began = time.thread_time()
    with pytest.raises(MappingError, match=r"patterns? .*cannot be read"):
        read(["q_proj", pattern])
    assert time.thread_time() - began < 2


def test_a_global_flag_holds_for_a_pattern_alone_as_in_re() -> None:
    assert read(["(?i)q"]).first("Q") == 0
    with pytest.raises(MappingError, match="cannot be read: global flags"):
        read(["(?i)q"], "(", ")")
    with pytest.raises(MappingError, match="cannot be read: global flags"):
        read(["a", "(?i)q"])


@pytest.mark.parametrize("pattern", ["(a|aa)+!", "(a{1,1000}){1,1000}!", "(?:(?=(a+))a)+(a|a)*!"])
def test_what_takes_re_for_ever_is_refused_in_bounded_time_and_memory(
    pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safe_patterns, "_MATCH", 0.1)
    began = time.thread_time()
    tracemalloc.start()
    try:
        slow = read([pattern])
        with pytest.raises(MappingError, match="takes too long"):
            slow.first("a" * 4096)
        assert tracemalloc.get_traced_memory()[1] < 10e6
    finally:
        tracemalloc.stop()
    assert time.thread_time() - began < 2


def test_matches_none_of_which_takes_long_do_not_take_long_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safe_patterns, "_OBJECT", 0.1)
    slow, began = read(["x", "(a|aa)+!"]), time.thread_time()
    with pytest.raises(MappingError, match="matching one of 2 patterns takes too long"):
        for number in range(1_000_000):
            slow.first(f"{'a' * 22}{number}")
    assert time.thread_time() - began < 2


def test_hundreds_of_patterns_are_matched_with_many_names() -> None:
    """What they need is a hundredth of a second for 1,000 names and a pattern; what is granted grows with both."""
    many = read([rf".*\.layers\.{number}\.mlp\.experts\.gate_up_proj" for number in range(300)], r"(.*\.)?(", ")$")
    names = [f"model.layers.{number % 300}.mlp.experts.{number}.{'gate_up_proj'}" for number in range(500)]
    assert [many.first(name) for name in names] == [None] * 500
    assert [many.first(f"model.layers.{number}.mlp.experts.gate_up_proj") for number in (0, 7, 299)] == [0, 7, 299]
