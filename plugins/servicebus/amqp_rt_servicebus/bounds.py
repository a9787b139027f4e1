"""Bounds of a namespace, which operators can set: what clients with all rights may make it hold and do."""

from __future__ import annotations

from typing import Any, Final

from msgspec import Struct
from msgspec.structs import fields, replace

from .rules import RuleBounds
from .sql import RULE_STEPS_MAX, STEPS_MAX, SqlBounds


class Bounds(Struct, frozen=True, kw_only=True):
    """Bounds of one namespace, for ``Namespace(bounds=…)`` and ``amqp-rt servicebus --limit NAME=VALUE``.

    Those of messages, connections and memory are limits of the broker (``amqp_rt.Limits``).

    Raises:
        ValueError: A bound is less than 1.
    """

    #: Queues, topics and event hubs of the namespace.
    entities_max: int = 10_000
    #: Subscriptions of one topic.
    subscriptions_max: int = 10_000
    #: Rules of one subscription.
    rules_max: int = 20_000
    #: SQL filters of one topic.
    sql_filters_max: int = 10_000
    #: Correlation filters of one topic.
    correlation_filters_max: int = 100_000
    #: Characters of the text of a SQL filter or action, and of the texts among its parameters. Reading 3,072 of them
    #: takes some 13 ms.
    sql_text_max: int = 3_072
    #: Statements of a SQL action.
    sql_statements_max: int = 256
    #: Steps that all rules of a topic take for one message, a fifth of a microsecond each; rules that would take
    #: more fail.
    steps_max: int = STEPS_MAX
    #: Steps of a single filter or action, which nothing interrupts.
    rule_steps_max: int = RULE_STEPS_MAX
    #: Copies of one message, on all its ways over topics that forward to each other.
    copies_max: int = 10_000
    #: Receivers of one entity that wait for the next session.
    session_waiting_max: int = 5_000
    #: Octets of the state of a session.
    session_state_max: int = 256 * 1024
    #: Messages that one request at `$management` names: lock tokens, sequence numbers, scheduled messages. As many values
    #: are read of one message (``Limits.elements_max``), so that only the size of a request bounds it.
    named_max: int = 65_536
    #: Messages in the answer to one peek.
    peeked_max: int = 250

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 1 <= value < 1 << 63:
                raise ValueError(f"{field.name} has to be at least 1, got {value}")

    @property
    def rules(self) -> RuleBounds:
        """Bounds of the rules of a topic."""
        return RuleBounds(
            sql=SqlBounds(text_max=self.sql_text_max, statements_max=self.sql_statements_max),
            rules_max=self.rules_max,
            sql_filters_max=self.sql_filters_max,
            correlation_filters_max=self.correlation_filters_max,
            steps_max=self.steps_max,
            rule_steps_max=self.rule_steps_max,
        )


DEFAULT_BOUNDS: Final = Bounds()
#: Bounds of the service, where it has stricter ones.
SERVICE_BOUNDS: Final = Bounds(
    sql_text_max=1_024, sql_statements_max=32, sql_filters_max=2_000, subscriptions_max=2_000
)


def is_bound(name: str) -> bool:
    """Return whether *name* is that of a bound."""
    return any(field.name == name for field in fields(Bounds))


def with_bound(bounds: Bounds, name: str, text: str) -> Bounds:
    """Return *bounds* with the bound *name* at the number in *text*.

    Raises:
        ValueError: *text* is no whole number, or less than 1.
    """
    try:
        value = int(text.replace("_", "").replace(",", ""))
    except ValueError:
        raise ValueError(f"{name} is a whole number, not {text!r:.60}") from None
    changed: Any = {name: value}
    return replace(bounds, **changed)
