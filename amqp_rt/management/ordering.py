"""Ordered queries: some entities of a type, in the order of one of their attributes, page after page.

The application-properties *sort* (an attribute, with ``-`` in front for the descending order), *q* (a text that
names contain, in any case) and *after* (the ``next`` of the page before) make a QUERY an ordered one. The position of
a page is a value and a name, not a number, so that entities that come and go do not shift it.
"""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from bisect import insort
from collections.abc import Callable, Mapping
from math import isnan
from typing import Any, Final, Protocol, TypeAlias

import msgspec

from ..message import Message

#: Characters of a value by which texts are ordered, so that positions stay short.
_VALUE_MAX: Final = 200
#: Characters of the text that names contain, and of a position.
_TEXT_MAX: Final = 1_024
_POSITION_MAX: Final = 8_192

#: Rank of the type of a value, and the value: values of one attribute may have several types.
Key: TypeAlias = tuple[int, Any]


class Listed(Protocol):
    """Entity of a walk, of which the row is computed when it is needed."""

    name: str

    def row(self) -> Mapping[str, Any] | None:
        """Return the attributes; None if the entity has been deleted meanwhile."""

    def value(self, attribute: str) -> Any:
        """Return one attribute; None if there is none."""


class ListedRow:
    """Entity whose row is known.

    Args:
        row: Its attributes, a ``name`` among them.
        finish: Returns the row for a reply.
    """

    __slots__ = ("_finish", "_row", "name")

    def __init__(
        self, row: Mapping[str, Any], finish: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    ) -> None:
        self.name: str = row["name"]
        self._row = row
        self._finish = finish

    def row(self) -> Mapping[str, Any]:
        return self._finish(self._row)

    def value(self, attribute: str) -> Any:
        return self._row.get(attribute)


class Order(msgspec.Struct, frozen=True):
    """Order and choice of an ordered query."""

    attribute: str = "name"
    descending: bool = False
    #: Text that names contain, in lower case.
    text: str = ""
    #: Position after which the page begins.
    after: tuple[Key, str] | None = None


def order_of(message: Message) -> Order | None:
    """Return the order that the application-properties of a QUERY ask for, None without any.

    Raises:
        ValueError: One of them is malformed.
    """
    given: dict[str, str] = {}
    for name, most in (("sort", _TEXT_MAX), ("q", _TEXT_MAX), ("after", _POSITION_MAX)):
        value = message.application_properties.get(name)
        if value is None:
            continue
        if not isinstance(value, str) or len(value) > most:
            raise ValueError(f"{name} must be a text of at most {most} characters")
        given[name] = str(value)
    if not given:
        return None
    sort = given.get("sort") or "name"
    attribute = sort.removeprefix("-")
    return Order(
        # The identity of an entity is its name.
        attribute="name" if attribute == "identity" else attribute,
        descending=sort.startswith("-"),
        text=given.get("q", "").lower(),
        after=_position(given["after"]) if given.get("after") else None,
    )


def key_of(value: Any) -> Key:
    """Return the key by which *value* is ordered: nothing first, then numbers, then texts."""
    if value is None or (isinstance(value, float) and isnan(value)):
        return 0, 0
    if isinstance(value, bool):
        # In positions, which have no values of other types than numbers and texts.
        return 1, int(value)
    if isinstance(value, int | float):
        return 1, value
    return 2, str(value)[:_VALUE_MAX]


class Selection:
    """The first entities of an order, of those that a walk has offered.

    Args:
        order: The order.
        count: How many there are at most.
    """

    def __init__(self, order: Order, count: int) -> None:
        self._order = order
        self._count = count
        #: Key, name and entity, in ascending order; two entities may have the same name while one replaces the other.
        self._best: list[tuple[Key, str, int, Listed]] = []
        self._number = 0
        #: Entities that match, before the position of the page too, and whether more of them follow the selection.
        self.total = 0
        self.more = False

    def offer(self, entity: Listed) -> None:
        """Take *entity* if it matches and is among the first."""
        order, name = self._order, entity.name
        if order.text and order.text not in name.lower():
            return
        self.total += 1
        key = key_of(name if order.attribute == "name" else entity.value(order.attribute))
        if order.after is not None and (
            (key, name) >= order.after if order.descending else (key, name) <= order.after
        ):
            return
        best = self._best
        if len(best) >= self._count:
            self.more = True
            if not best:
                return
            last = best[0] if order.descending else best[-1]
            if ((key, name) < last[:2]) is order.descending:
                return
        self._number += 1
        insort(best, (key, name, self._number, entity))
        if len(best) > self._count:
            del best[0 if order.descending else -1]

    def entities(self) -> list[tuple[Listed, str]]:
        """Return the selected entities in their order, each with the position after it."""
        best = reversed(self._best) if self._order.descending else self._best
        return [(entity, _text_of(key, name)) for key, name, _, entity in best]


def _text_of(key: Key, name: str) -> str:
    return urlsafe_b64encode(msgspec.msgpack.encode((key, name))).decode()


def _position(text: str) -> tuple[Key, str]:
    """Return the position that :func:`_text_of` wrote.

    Raises:
        ValueError: *text* is none.
    """
    try:
        key, name = msgspec.msgpack.decode(
            urlsafe_b64decode(text), type=tuple[tuple[int, int | float | str], str]
        )
    except (ValueError, msgspec.DecodeError):
        raise ValueError("after must be the next of an earlier page") from None
    if key != key_of(key[1] if key[0] else None):
        raise ValueError("after must be the next of an earlier page")
    return key, name
