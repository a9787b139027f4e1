"""Index of correlation filters, which finds those that a message meets without trying each.

Filters with the same fields form a group, which looks a message's values up at once. Each group is filed under one of
its fields, so that only groups are tried of which the message has that field. The time for a message depends on the
number of these groups and of the filters found, not on the number of filters: 10,000 filters on the same field cost
as much as one.

A field is equal if its value is: text by case, numbers of all types by their exact values, other types only
to values of their own type (Service Bus facts, rules on a subscription).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Final, Generic, NamedTuple, TypeAlias, TypeVar

from .declarations import Correlation
from .sql_evaluation import Evaluation
from .sql_values import Opaque, Refused, equality_key, value_of

#: Most fields of a filter, and most characters of its texts.
FIELDS_MAX: Final = 256
TEXT_MAX: Final = 65_536

#: Attribute of a declaration → system property.
_SYSTEM_FIELDS: Final[Mapping[str, str]] = {
    "correlation_id": "CorrelationId",
    "message_id": "MessageId",
    "to": "To",
    "reply_to": "ReplyTo",
    "label": "Label",
    "session_id": "SessionId",
    "reply_to_session_id": "ReplyToSessionId",
    "content_type": "ContentType",
}


class Field(NamedTuple):
    """Field of a message that filters name."""

    #: Whether it is a property of the system; an application property otherwise.
    system: bool
    #: Name as the service spells it; in lower case for application properties.
    name: str


#: Fields of a filter in a fixed order, each with the key of the value that it must have.
Conditions: TypeAlias = tuple[tuple[Field, object], ...]


def conditions_of(correlation: Correlation) -> Conditions:
    """Return the conditions of a filter, which are all to be met.

    Raises:
        ValueError: There is no condition, there are too many, or one can never be met.
    """
    found: dict[Field, object] = {}
    size = 0
    for attribute, name in _SYSTEM_FIELDS.items():
        text: str | None = getattr(correlation, attribute)
        if text is not None:
            found[Field(True, name)] = text
            size += len(text)
    for name, raw in correlation.properties.items():
        field = Field(False, name.lower())
        if field in found:
            raise ValueError(
                f"the correlation filter has property {name!r:.60} twice; names differ by more than case"
            )
        try:
            value = value_of(raw)
        except Refused as refused:
            raise ValueError(f"the correlation filter: property {name!r:.60}: {refused}") from None
        if value is None or (type(value) is Opaque and type(raw) is not bytes):
            kind = "null" if value is None else type(raw).__name__
            raise ValueError(
                f"the correlation filter: property {name!r:.60} is {kind}, which equals no value"
            )
        found[field] = equality_key(value)
        size += len(name) + (len(raw) if isinstance(raw, str | bytes) else 0)
    if not found:
        raise ValueError(
            "the correlation filter has no field; use the true filter for all messages"
        )
    if len(found) > FIELDS_MAX:
        raise ValueError(f"the correlation filter has more than {FIELDS_MAX} fields")
    if size > TEXT_MAX:
        raise ValueError(f"the correlation filter has more than {TEXT_MAX} characters")
    return tuple(sorted(found.items(), key=lambda item: item[0]))


_Item = TypeVar("_Item", bound=Hashable)


class _FieldGroup(Generic[_Item]):
    """Filters with the same fields."""

    __slots__ = ("fields", "members")

    def __init__(self, fields: tuple[Field, ...]) -> None:
        self.fields = fields
        #: Keys of the values, in the order of the fields → items; dicts serve as ordered sets.
        self.members: dict[tuple[object, ...], dict[_Item, None]] = {}

    def find(self, evaluation: Evaluation) -> Iterable[_Item]:
        """Return the items whose values the message has; steps are counted, and never too many."""
        keys = []
        evaluation.steps += 1
        for system, name in self.fields:
            evaluation.steps += 1
            try:
                value = evaluation.system(name) if system else evaluation.application(name)
            except Refused:
                return ()  # a number that .NET does not have equals none
            if value is None:
                return ()
            keys.append(equality_key(value))
        return self.members.get(tuple(keys), ())


class CorrelationIndex(Generic[_Item]):
    """Correlation filters, each with an item that is found by it."""

    def __init__(self) -> None:
        self._groups: dict[tuple[Field, ...], _FieldGroup[_Item]] = {}
        #: Field → groups filed under it, by their fields.
        self._filed: dict[Field, dict[tuple[Field, ...], _FieldGroup[_Item]]] = {}
        #: Group → the field under which it is filed.
        self._places: dict[tuple[Field, ...], Field] = {}
        #: Number of items.
        self.size = 0

    def add(self, conditions: Conditions, item: _Item) -> None:
        """Add a filter; *item* is new for these conditions."""
        fields = tuple(field for field, _ in conditions)
        group = self._groups.get(fields)
        if group is None:
            group = self._groups[fields] = _FieldGroup(fields)
            # The field with the fewest groups, so that few are tried for a message that has it.
            place = min(fields, key=lambda field: len(self._filed.get(field, ())))
            self._places[fields] = place
            self._filed.setdefault(place, {})[fields] = group
        group.members.setdefault(tuple(key for _, key in conditions), {})[item] = None
        self.size += 1

    def remove(self, conditions: Conditions, item: _Item) -> None:
        """Remove a filter that was added with the same arguments."""
        fields = tuple(field for field, _ in conditions)
        keys = tuple(key for _, key in conditions)
        group = self._groups[fields]
        items = group.members[keys]
        del items[item]
        self.size -= 1
        if items:
            return
        del group.members[keys]
        if group.members:
            return
        del self._groups[fields]
        place = self._places.pop(fields)
        del self._filed[place][fields]
        if not self._filed[place]:
            del self._filed[place]

    def search(self, evaluation: Evaluation) -> Iterator[list[_Item]]:
        """Yield the items whose filters the message meets, in no particular order.

        There are pauses between the groups of filters, in which filters may be added and removed: these may be
        found or not. The steps of ``evaluation`` tell how much work was done.
        """
        groups = [
            group for field in self._fields_of(evaluation) for group in self._filed[field].values()
        ]
        for group in groups:
            yield list(group.find(evaluation))

    def _fields_of(self, evaluation: Evaluation) -> list[Field]:
        """Return the fields with groups that the message may have."""
        filed = self._filed
        # There are at most eight system fields, and looking for more decodes nothing else.
        fields = [Field(True, name) for name in _SYSTEM_FIELDS.values()]
        present = [field for field in fields if field in filed]
        if len(present) < len(filed):
            present += [
                field
                for field in (Field(False, name) for name in evaluation.properties())
                if field in filed
            ]
        return present
