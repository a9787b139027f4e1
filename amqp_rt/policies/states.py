"""States of a policy by address, and the check of its arguments."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from math import inf
from typing import Final, Generic, TypeVar

S = TypeVar("S")

#: Default number of addresses with a state in one policy.
ADDRESSES_MAX: Final = 1_024


class ByAddress(Generic[S]):
    """States of a policy by address; the least recently used one is dropped beyond the bound."""

    __slots__ = ("_bound", "_make", "_states")

    def __init__(self, policy: str, make: Callable[[], S], bound: int) -> None:
        check_least(policy, "addresses", bound, 1)
        self._make = make
        self._bound = bound
        self._states: OrderedDict[str, S] = OrderedDict()

    def __len__(self) -> int:
        return len(self._states)

    def get(self, address: str) -> S:
        state = self._states.get(address)
        if state is None:
            state = self._states[address] = self._make()
            if len(self._states) > self._bound:
                self._states.popitem(last=False)
        else:
            self._states.move_to_end(address)
        return state


def check_least(policy: str, name: str, value: float, least: float, most: float = inf) -> None:
    """Check that the argument *name* of *policy* is from *least* to *most*.

    Raises:
        ValueError: It is not, or is NaN; the text has the name, the bounds and the value.
    """
    if not least <= value <= most:
        bound = f"at least {least:g}" if most == inf else f"from {least:g} to {most:g}"
        raise ValueError(f"{policy}: {name} must be {bound}, got {value!r}")
