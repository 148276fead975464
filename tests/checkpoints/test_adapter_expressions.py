"""Regular expressions of adapters match what `re`, with which peft matches, matches, in bounded time."""

import itertools
import random
import re

import pytest
from hypothesis import given, strategies as st
from soaking import in_soak

from precisionctl.checkpoints.adapter import expressions
from precisionctl.checkpoints.adapter.expressions import Expressions
from precisionctl.errors import MappingError

WORDS = ["a", "b", "1", "_", "-", ".", r"\.", "[ab]", "[^a]", "[a-b_]", r"\d", r"\W", "|", "(", "(?:", ")", "^", "$"]
WORDS += ["*", "+", "?", "*?", "+?", "{2}", "{1,}", "{0,2}"]
PATTERNS = st.lists(st.lists(st.sampled_from(WORDS), max_size=9).map("".join), min_size=1, max_size=3)
NAMES = ["".join(letters) for length in (1, 2, 3, 4) for letters in itertools.product("ab.1", repeat=length)]


@given(PATTERNS, st.booleans())
def test_the_first_that_matches_is_that_of_re(patterns: list[str], ends: bool) -> None:
    try:
        ours = Expressions(patterns, "alpha_pattern", ends=ends)
    except MappingError:
        return
    theirs = [re.compile(rf"(.*\.)?({pattern})$" if ends else pattern) for pattern in patterns]
    for name in NAMES:
        expected = next((number for number, each in enumerate(theirs) if each.fullmatch(name)), None)
        assert ours.first(name) == expected, name


READ = [
    r".*\.gate_up_proj",
    "^model.layers.1.*q_proj",
    ".*down_proj",
    r"layers\.\d+\.self_attn\.(?:q|k)_proj",
    r".*\.layers\.([0-9]|1[0-5])\.mlp\.(gate|up|down)_proj",
    r"(model\.)?layers\.[13579]\..{2,9}proj$",
    "",
]


@pytest.mark.parametrize("pattern", READ)
def test_what_users_write_is_read(pattern: str) -> None:
    ours, theirs = Expressions([pattern], "alpha_pattern", ends=True), re.compile(rf"(.*\.)?({pattern})$")
    parts = ["self_attn.q_proj", "mlp.experts.gate_up_proj", "mlp.down_proj", "mlp.gate_proj"]
    for name in [f"model.layers.{layer}.{part}" for layer in (0, 1, 15, 21) for part in parts]:
        assert (ours.first(name) == 0) is (theirs.match(name) is not None), name


@pytest.mark.parametrize(
    "pattern",
    ["(?!k).*", "(?i)q", r"(a)\1", r"\bq", "(q", "q)", "*q", "q**", "q++", "a{2,1}", "[z-a]", "[", "(" * 5000],
)
def test_another_expression_is_refused_by_its_name(pattern: str) -> None:
    with pytest.raises(MappingError, match="alpha_pattern has an expression that is not read: "):
        Expressions(["q_proj", pattern], "alpha_pattern")


LETTERS = random.Random(0)
SLOW = {
    "groups in groups": (["(([a-z_.0-9]+)+)+!"], ["a" * 4096] * 100),
    "alternatives": (["(.|.)" * 40 + "!"], ["a" * 4096] * 100),
    "a name that ends otherwise": (["(.*)*(.*)*(.*)*x"], ["a" * 4096] * 100),
    "sets of states without end": (["(.*a.{12})"], ["".join(LETTERS.choices("ab", k=4096)) for _ in range(20)]),
}


@pytest.mark.parametrize("name", SLOW)
def test_what_takes_re_for_ever_takes_a_step_for_each_letter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patterns, names = SLOW[name]
    monkeypatch.setattr(expressions, "_MOST_STEPS", 1 << 20)
    ours = Expressions(patterns, "alpha_pattern")
    if name != "sets of states without end":
        assert [ours.first(each) for each in names] == [None] * len(names)
    else:
        assert [ours.first(each) for each in names] == [0 if each[-13] == "a" else None for each in names]


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (["((.{1000}){1000}){1000}"], "longer than 131072 letters"),
        (["((){1000}){1000}"], "longer than 131072 letters"),
        (["a"] * 200_000, "longer than 131072 letters"),
        *in_soak((["(a?){5000}b"], "too many steps")),
        ([f".*a.{{{number}}}" for number in range(300)], "too many steps"),
    ],
)
def test_what_has_too_many_states_or_sets_is_refused(
    patterns: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expressions, "_MOST_STEPS", 1 << 20)
    with pytest.raises(MappingError, match=message):
        Expressions(patterns, "alpha_pattern").first("a" * 4000)
