"""Patterns of queues' names in requests over HTTP: regular expressions whose work a stranger cannot make explode. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from amqp_rt.errors import AmqpError

#: Characters of a pattern.
PATTERN_MAX: Final = 255
#: A character, an escape or a class, with what may follow it.
_ATOM: Final = re.compile(r"(\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[^\\()|{}\[\]*+?])([*+?]?)", re.DOTALL)


class NamePattern:
    """Regular expression of characters, escapes, classes, ``.``, ``*``, ``+``, ``?``, and ``^`` and ``$`` at its ends.

    It is matched with all its ways at once, so that the work is that of one pass over the name. Groups, alternatives
    and counts are refused.

    Args:
        text: The pattern, found anywhere in a name unless it is anchored.

    Raises:
        AmqpError: It is malformed, has too many characters, or something else than the above.
    """

    def __init__(self, text: str) -> None:
        if len(text) > PATTERN_MAX:
            raise _refused(f"a pattern has at most {PATTERN_MAX} characters")
        anchored = text.startswith("^")
        self._to_the_end = text.endswith("$") and not text.endswith("\\$")
        inner = text[anchored : len(text) - self._to_the_end]
        #: Bit n: the name so far matches the first n atoms.
        self._many = self._skipped = 0
        self._anywhere = not anchored
        self._tests: list[Callable[[str], object]] = []
        at = 0
        while at < len(inner):
            found = _ATOM.match(inner, at)
            if found is None:
                raise _refused(
                    f"{text!r:.100}: at character {at + anchored + 1}: patterns have characters, escapes, classes,"
                    " '.', '*', '+' and '?' only"
                )
            atom, count = found.groups()
            try:
                self._tests.append(re.compile(atom, re.DOTALL).fullmatch)
            except (re.error, RecursionError, OverflowError):
                raise _refused(f"{text!r:.100}: {atom!r:.50} is no character or class") from None
            place = len(self._tests) - 1
            if count in ("*", "+"):
                self._many |= 1 << place
            if count in ("*", "?"):
                self._skipped |= 1 << place
            at = found.end()
        self._end = 1 << len(self._tests)

    def work(self, name: str) -> int:
        """Return the most steps that :meth:`matches` takes for *name*."""
        return (len(name) + 1) * (len(self._tests) + 1)

    def matches(self, name: str) -> bool:
        """Return whether *name* matches."""
        start = self._with_skipped(1)
        ways = start
        for char in name:
            if ways & self._end and not self._to_the_end:
                return True
            following = start if self._anywhere else 0
            for place, test in enumerate(self._tests):
                # After one of an atom, another of it may follow.
                if ways >> place & 1 and test(char):
                    following |= 1 << place + 1
                    if self._many >> place & 1:
                        following |= 1 << place
            ways = self._with_skipped(following)
        return bool(ways & self._end)

    def _with_skipped(self, ways: int) -> int:
        """Return *ways* with those that leave out atoms which may be absent."""
        for place in range(len(self._tests)):
            if ways >> place & 1 and self._skipped >> place & 1:
                ways |= 1 << place + 1
        return ways


def _refused(why: str) -> AmqpError:
    return AmqpError(why, condition="amqp:invalid-field")
