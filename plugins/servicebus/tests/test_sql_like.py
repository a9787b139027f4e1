"""Patterns of LIKE: equal to regular expressions, in linear time."""

from __future__ import annotations

import re

import pytest
from amqp_rt_servicebus.sql_like import PATTERN_MAX, BadPattern, LikePattern
from hypothesis import example, given
from hypothesis import strategies as st

pytestmark = pytest.mark.req("Z14")


class Steps:
    """Count of steps."""

    def __init__(self) -> None:
        self.taken = 0

    def spend(self, steps: int) -> None:
        assert steps >= 0
        self.taken += steps


def like(text: str, pattern: str, escape: str = "") -> bool:
    return LikePattern(pattern, escape).matches(text, Steps().spend)


def expression_of(pattern: str, escape: str) -> re.Pattern[str]:
    """Translate *pattern* into a regular expression."""
    parts = []
    characters = iter(pattern)
    for character in characters:
        if escape and character == escape:
            parts.append(re.escape(next(characters)))
        else:
            parts.append({"%": ".*", "_": "."}.get(character) or re.escape(character))
    return re.compile("".join(parts), re.DOTALL)


@pytest.mark.parametrize(
    ("text", "pattern", "escape", "expected"),
    [
        ("", "", "", True),
        ("", "%", "", True),
        ("", "_", "", False),
        ("a", "", "", False),
        ("abc", "abc", "", True),
        ("abc", "ABC", "", False),
        ("abc", "ab", "", False),
        ("abc", "a%", "", True),
        ("abc", "%c", "", True),
        ("abc", "%b%", "", True),
        ("abc", "a%c", "", True),
        ("aba", "ab%ba", "", False),
        ("abba", "ab%ba", "", True),
        ("a", "%a%a%", "", False),
        ("abab", "%ab%ab%", "", True),
        ("ababa", "%aba%aba%", "", False),
        ("abc", "___", "", True),
        ("abc", "__", "", False),
        ("a\nb", "a_b", "", True),
        ("a\nb", "a%b", "", True),
        ("𝄞x", "_x", "", True),
        ("50%", "50!%", "!", True),
        ("500", "50!%", "!", False),
        ("a_b", "a\\_b", "\\", True),
        ("axb", "a\\_b", "\\", False),
        ("a!", "a!!", "!", True),
        ("ab", "a!b", "!", True),
        ("%", "%%", "%", True),
        ("[a]", "[a]", "", True),
        (".*", ".%", "", True),
    ],
)
def test_patterns(text: str, pattern: str, escape: str, expected: bool) -> None:
    assert like(text, pattern, escape) is expected


TEXTS = st.text("ab%_!\n", max_size=12)


@given(text=TEXTS, pattern=TEXTS, escape=st.sampled_from(["", "!", "%", "_", "a"]))
@example(text="ab" * 6, pattern="%_a%b_%", escape="")
def test_patterns_are_equal_to_regular_expressions(text: str, pattern: str, escape: str) -> None:
    try:
        expected = expression_of(pattern, escape).fullmatch(text) is not None
    except (StopIteration, RuntimeError):
        with pytest.raises(BadPattern, match="ends with its escape character"):
            LikePattern(pattern, escape)
        return
    assert like(text, pattern, escape) is expected


def test_a_pattern_is_bounded() -> None:
    assert like("x" * PATTERN_MAX, "_" * PATTERN_MAX)
    with pytest.raises(BadPattern, match=f"longer than {PATTERN_MAX} characters"):
        LikePattern("_" * (PATTERN_MAX + 1))


@pytest.mark.parametrize(
    ("pattern", "least"),
    [
        ("a" * 50 + "b", 10),
        ("%a" * 50 + "b", 10),
        ("%" + "a" * 90 + "b%", 20_000 * 90 // 1_024),
        ("%" + "a" * 900 + "b%", 20_000 * 100 // 1_024),
        ("%_a" * 50 + "b", 10_000),
        ("%" + "a_" * 200 + "b", 10_000),
        ("_%" * 500 + "b", 20_000),
    ],
)
def test_steps_grow_as_the_text_does(pattern: str, least: int) -> None:
    """Backtracking would take at least four times the steps for a text twice as long."""
    taken = []
    for size in (10_000, 20_000):
        steps = Steps()
        assert not LikePattern(pattern).matches("a" * size, steps.spend)
        taken.append(steps.taken)
    assert taken[1] <= 2.1 * taken[0]
    # The budget of a message is for more than one such filter.
    assert least <= taken[1] < 100_000


def test_steps_are_counted_before_they_are_taken() -> None:
    class Enough(Exception):
        pass

    def refuse(steps: int) -> None:
        if steps > 10:
            raise Enough

    with pytest.raises(Enough):
        LikePattern("%_b").matches("a" * 100_000_000, refuse)
