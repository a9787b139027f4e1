"""Patterns of LIKE, matched without backtracking.

A pattern without ``_`` is a row of texts between ``%``, which are searched from the left: a later match would only
leave less room for the rest. A pattern with ``_`` runs as an automaton, whose states are the bits of an
integer, over the characters of the text once. Both take time linear in the text; steps are counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

#: Longest pattern, in characters: the automaton has as many states.
PATTERN_MAX: Final = 4_096

#: Comparisons of characters in the time of a step: when a text is searched, and when the automaton runs. Longer
#: texts than this are searched in linear time.
_COMPARED_IN_TEXTS: Final = 1_024
_LONG_TEXT: Final = 100
#: States of the automaton that advance in the time of half a step.
_STATES_OF_A_STEP: Final = 512


class BadPattern(ValueError):
    """Pattern that ends with its escape character, or is too long."""


class LikePattern:
    """Pattern of LIKE, ready to be matched.

    Args:
        pattern: ``%`` stands for any characters, ``_`` for one.
        escape: Character after which the next one stands for itself; "" for none.

    Raises:
        BadPattern: The pattern ends with the escape character, or exceeds :data:`PATTERN_MAX`.
    """

    __slots__ = ("_loops", "_masks", "_other", "_texts", "size")

    def __init__(self, pattern: str, escape: str = "") -> None:
        if len(pattern) > PATTERN_MAX:
            raise BadPattern(f"a pattern of LIKE is longer than {PATTERN_MAX} characters")
        #: Number of characters of the pattern, for counting the steps of its preparation.
        self.size = len(pattern)
        elements = _elements(pattern, escape)
        self._texts: list[str] | None = None
        if None not in elements:
            self._texts = [""]
            for element in elements:
                if element == "":
                    self._texts.append("")
                elif element is not None:
                    self._texts[-1] += element
            return
        # Bit n is set while the first n characters of the pattern are matched.
        self._loops = 0
        #: States that the next character leaves forwards, if it is another one than those of the pattern.
        self._other = 0
        self._masks: dict[str, int] = {}
        state = 1
        for element in elements:
            if element == "":
                self._loops |= state
                continue
            if element is None:
                self._other |= state
            else:
                self._masks[element] = self._masks.get(element, 0) | state
            state <<= 1
        self._masks = {character: mask | self._other for character, mask in self._masks.items()} | {
            "": state
        }

    def matches(self, text: str, spend: Callable[[int], None]) -> bool:
        """Return whether the whole of *text* matches; *spend* counts the steps."""
        if self._texts is None:
            return self._runs(text, spend)
        first, *middle = self._texts
        spend(1 + len(text) // _COMPARED_IN_TEXTS)
        if not middle:
            return text == first
        last = middle.pop()
        at, end = len(first), len(text) - len(last)
        if at > end or not text.startswith(first) or not text.endswith(last):
            return False
        for part in middle:
            spend((end - at) * min(len(part), _LONG_TEXT) // _COMPARED_IN_TEXTS)
            found = text.find(part, at, end)
            if found < 0:
                return False
            at = found + len(part)
        return True

    def _runs(self, text: str, spend: Callable[[int], None]) -> bool:
        masks, other, loops = self._masks, self._other, self._loops
        last = masks[""]
        spend(1 + len(text) * (1 + self.size // _STATES_OF_A_STEP) // 2)
        states = 1
        for character in text:
            states = (states & masks.get(character, other)) << 1 | states & loops
            if not states:
                return False
        return bool(states & last)


def _elements(pattern: str, escape: str) -> list[str | None]:
    """Return the elements of *pattern*: a character, None for any one, "" for any run."""
    elements: list[str | None] = []
    characters = iter(pattern)
    for character in characters:
        if character == escape:
            escaped = next(characters, None)
            if escaped is None:
                raise BadPattern("a pattern of LIKE ends with its escape character")
            elements.append(escaped)
        elif character == "_":
            elements.append(None)
        else:
            elements.append("" if character == "%" else character)
    return elements
