"""Properties of one message as SQL filters and actions read and change them, with the count of their steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Final, NamedTuple, Protocol, TypeAlias
from uuid import UUID, uuid4

from amqp_rt.values import Int, Timestamp

from .sql_values import (
    PLAIN_TYPES,
    Moment,
    Refused,
    Span,
    Value,
    converted,
    duration_of,
    type_name,
    value_of,
    wire_of,
)

#: Steps of all filters and actions over one message: about a fifth of a second, in several turns of the event loop.
STEPS_MAX: Final = 1_000_000
#: Steps of one filter or action, which nothing interrupts: 5 to 10 ms.
RULE_STEPS_MAX: Final = 25_000


class SystemProperty(NamedTuple):
    """Property after ``sys.``."""

    name: str
    #: Type of its values: ``str``, ``int``, ``Int``, ``UUID``, ``Timestamp`` or ``timedelta``.
    type: type
    #: Whether an action may set it.
    settable: bool
    #: Most characters of its text, 0 for any number.
    length_max: int = 0


_ID_MAX: Final = 128
#: Lower-cased name → property (Service Bus facts, SQL).
SYSTEM_PROPERTIES: Final[Mapping[str, SystemProperty]] = {
    each.name.lower(): each
    for each in (
        SystemProperty("ContentType", str, True),
        SystemProperty("CorrelationId", str, True),
        SystemProperty("DeadLetterSource", str, False),
        SystemProperty("DeliveryCount", Int, False),
        SystemProperty("EnqueuedSequenceNumber", int, False),
        SystemProperty("EnqueuedTimeUtc", Timestamp, False),
        SystemProperty("ExpiresAtUtc", Timestamp, False),
        SystemProperty("Label", str, True),
        SystemProperty("LockedUntilUtc", Timestamp, False),
        SystemProperty("LockToken", UUID, False),
        SystemProperty("MessageId", str, True, _ID_MAX),
        SystemProperty("PartitionKey", str, True, _ID_MAX),
        SystemProperty("ReplyTo", str, True),
        SystemProperty("ReplyToSessionId", str, True, _ID_MAX),
        SystemProperty("ScheduledEnqueueTimeUtc", Timestamp, True),
        SystemProperty("SequenceNumber", int, False),
        SystemProperty("SessionId", str, True, _ID_MAX),
        SystemProperty("Size", int, False),
        SystemProperty("State", Int, False),
        SystemProperty("TimeToLive", timedelta, True),
        SystemProperty("To", str, True),
        SystemProperty("ViaPartitionKey", str, True, _ID_MAX),
    )
}


class MessageFields(Protocol):
    """View of a message for filters: each field is decoded when it is first asked for."""

    def system_property(self, name: str) -> object:
        """Return the value of a property of :data:`SYSTEM_PROPERTIES` in its type; None if it is not set.

        Ids of other types than strings are returned as the text that the SDKs make of them.
        """
        ...

    def application_properties(self) -> Mapping[str, object]:
        """Return the application properties as they are on the wire."""
        ...


class EvaluationError(Exception):
    """Filter or action that failed on a message, which the subscription may dead-letter.

    The text has the position in the filter, and the reason.
    """


_Entry: TypeAlias = tuple[str, object]


class Evaluation:
    """Evaluation of filters over one message: its properties, read once, and the steps taken.

    Args:
        fields: The message.
        steps_max: Steps after which filters and actions raise :class:`EvaluationError`.
        rule_steps_max: Steps after which a single one does so, counted from :meth:`begin_rule`.
        new_id: Result of ``newid()``.
    """

    def __init__(
        self,
        fields: MessageFields,
        *,
        steps_max: int = STEPS_MAX,
        rule_steps_max: int = RULE_STEPS_MAX,
        new_id: Callable[[], UUID] = uuid4,
    ) -> None:
        self._fields = fields
        self.steps_max = steps_max
        self.rule_steps_max = rule_steps_max
        self.new_id = new_id
        #: Number of steps taken.
        self.steps = 0
        #: Number of steps at which the filter or action that is evaluated fails.
        self._end = min(steps_max, rule_steps_max)
        #: Whether the steps of all are used up: each filter and action that follows fails.
        self.exhausted = False
        self._system: dict[str, Value] = {}
        self._properties: dict[str, _Entry] | None = None

    def begin_rule(self) -> None:
        """Count the steps of the next filter or action from here."""
        self._end = min(self.steps_max, self.steps + self.rule_steps_max)

    def spend(self, steps: int) -> None:
        """Count *steps* before they are taken.

        Raises:
            EvaluationError: More steps than allowed would be taken.
        """
        if not self.exhausted and self.steps + steps <= self._end:
            self.steps += steps
            return
        if not self.exhausted and self._end < self.steps_max:
            raise EvaluationError(
                f"the rule takes more than {self.rule_steps_max} steps for this message"
            )
        self.exhausted = True
        raise EvaluationError(
            f"the rules of the topic take more than {self.steps_max} steps for this message"
        )

    def system(self, name: str) -> Value:
        """Return the value of the system property *name*, spelled as the service spells it."""
        try:
            return self._system[name]
        except KeyError:
            found = self._system[name] = value_of(self._fields.system_property(name))
            return found

    def properties(self) -> Mapping[str, _Entry]:
        """Return the application properties: name in lower case → name and value of the wire."""
        found = self._properties
        if found is None:
            found = self._properties = {}
            for name, value in self._fields.application_properties().items():
                found.setdefault(name.lower(), (name, value))
            # Counted only: the filters that follow fail if this was too much. Decoding takes longer than a step.
            self.steps += 3 * len(found)
        return found

    def application(self, folded: str) -> Value:
        """Return the value of the application property of that name in lower case; None if missing."""
        properties = self._properties
        entry = (self.properties() if properties is None else properties).get(folded)
        if entry is None:
            return None
        raw = entry[1]
        return raw if type(raw) in PLAIN_TYPES else value_of(raw)


class Changes(NamedTuple):
    """Properties of a copy after an action."""

    #: All application properties, with values as they are on the wire.
    properties: dict[str, object]
    #: System properties that the action has set, by their names in :data:`SYSTEM_PROPERTIES`, in their types;
    #: None for those that it has removed.
    system: dict[str, object]


class Draft(Evaluation):
    """Evaluation over the copy of a message that an action is changing; the message stays as it is."""

    def __init__(self, original: Evaluation) -> None:
        super().__init__(original._fields, new_id=original.new_id)
        self._original = original
        self._properties = dict(original.properties())
        self._changed: dict[str, Value] = {}

    def spend(self, steps: int) -> None:
        self._original.spend(steps)

    def system(self, name: str) -> Value:
        return self._changed[name] if name in self._changed else self._original.system(name)

    def set_application(self, name: str, value: Value) -> None:
        properties = self._properties
        assert properties is not None
        before = properties.get(name.lower())
        if before is not None:
            name = before[0]
            if before[1] is not None:
                value = converted(value, type(value_of(before[1])))
        properties[name.lower()] = (name, wire_of(value))

    def remove_application(self, name: str) -> None:
        assert self._properties is not None
        self._properties.pop(name.lower(), None)

    def set_system(self, known: SystemProperty, value: Value) -> None:
        if not known.settable:
            raise Refused(f"sys.{known.name} can only be set by the service")
        kind = _SYSTEM_VALUES[known.type]
        value = converted(value, kind)
        if value is not None and type(value) is not kind:
            if kind is Moment and isinstance(value, Moment):
                value = Moment(value)
            else:
                raise Refused(
                    f"sys.{known.name} cannot be set to a value of type '{type_name(value)}'"
                )
        if value is None and known.name == "MessageId":
            raise Refused("sys.MessageId cannot be null")
        if known.length_max and value is not None and len(value) > known.length_max:
            raise Refused(f"sys.{known.name} is longer than {known.length_max} characters")
        if kind is Span and value is not None and value <= 0:
            raise Refused(f"sys.{known.name} must be more than 0")
        self._changed[known.name] = value

    def changes(self) -> Changes:
        return Changes(
            dict(self.properties().values()),
            {
                name: duration_of(value) if type(value) is Span else wire_of(value)
                for name, value in self._changed.items()
            },
        )


#: Type of a system property that can be set → type of its values in expressions.
_SYSTEM_VALUES: Final[Mapping[type, type]] = {str: str, Timestamp: Moment, timedelta: Span}
