"""Idempotent producers of a partition: their epochs and the numbers of their events.

A producer numbers its events without gaps. The service compares the numbers of each batch with the last one
that it has stored, so that a batch which is sent again, because its outcome was lost, is stored once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec import Struct

from amqp_rt.errors import AmqpError
from amqp_rt.values import Int, Short, Symbol

from .conditions import ARGUMENT_ERROR, ARGUMENT_OUT_OF_RANGE
from .hub_events import PRODUCER_EPOCH, PRODUCER_ID, PRODUCER_SEQUENCE_NUMBER, Event

#: Capability of the link of an idempotent producer.
IDEMPOTENT: Final = Symbol("com.microsoft:idempotent-producer")
OUT_OF_ORDER: Final = "com.microsoft:out-of-order-sequence"
EPOCH_STOLEN: Final = "com.microsoft:producer-epoch-stolen"

#: Producers that a partition remembers; beyond that, the one that has not attached or sent for longest is
#: forgotten.
PRODUCERS_MAX: Final = 1_000

_SHORT_MAX: Final = 2**15 - 1
_INT_MAX: Final = 2**31 - 1
_LONG_MAX: Final = 2**63 - 1


class ProducerState(Struct, eq=False):
    """Producer, as a partition knows it."""

    id: int
    epoch: int
    #: Number of the last event that was stored, 0 at first.
    sequence: int


class ProducerLink(Struct, frozen=True, eq=False):
    """Link of an idempotent producer."""

    producers: Producers
    state: ProducerState
    #: Epoch with which the link was attached. A later link may have raised that of the producer.
    epoch: int
    #: Number of the last event, as the client knows it.
    sequence: int

    @property
    def properties(self) -> dict[object, object]:
        """Properties with which the attach is answered."""
        return {
            PRODUCER_ID: self.state.id,
            PRODUCER_EPOCH: Short(self.epoch),
            PRODUCER_SEQUENCE_NUMBER: Int(self.sequence),
        }

    def check(self, events: Sequence[Event]) -> bool:
        """Return whether *events*, a batch that has arrived, are to be stored; False if they are already.

        Raises:
            AmqpError: They are not numbered as those of this producer, there is a gap, or a link with a
                higher epoch has been attached.
        """
        state = self.state
        if self.epoch < state.epoch:
            raise _stolen(state, self.epoch)
        first = events[0].producer[2]
        if isinstance(first, bool) or not isinstance(first, int):
            raise AmqpError(
                f"an event of the idempotent producer {state.id} has no {PRODUCER_SEQUENCE_NUMBER}",
                condition=ARGUMENT_ERROR,
            )
        last = number = int(first)
        for event in events:
            if event.producer != (state.id, self.epoch, number):
                raise AmqpError(
                    f"an event has the producer, epoch and sequence number {event.producer!r:.100}, where"
                    f" {(state.id, self.epoch, number)!r} was expected",
                    condition=ARGUMENT_ERROR,
                )
            last, number = number, _following(number)
        self.producers.use(state)
        if first <= last <= state.sequence:
            return False
        if first != _following(state.sequence):
            raise AmqpError(
                f"the producer {state.id} sent the events {first} to {last}, and"
                f" {_following(state.sequence)} was expected next",
                condition=OUT_OF_ORDER,
            )
        return True

    def stored(self, events: Sequence[Event]) -> None:
        """Note that *events*, which were checked, have been stored."""
        last: Any = events[-1].producer[2]
        self.state.sequence = int(last)


class Producers:
    """Idempotent producers of one partition."""

    def __init__(self) -> None:
        #: The one that was used last comes last.
        self._states: dict[int, ProducerState] = {}
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._states)

    def open(self, properties: Mapping[Any, object]) -> ProducerLink:
        """Return the producer of a link that attaches with *properties*, in which each value may be missing.

        Without an id the producer is new. The number in the properties is that of the last event that the
        client knows to be stored; if a batch was stored whose outcome was lost, it is lower than ours, and
        the client will send that batch again.

        Raises:
            AmqpError: A value has another type or is out of range, or the epoch is older than the producer's.
        """
        id_ = _number(properties, PRODUCER_ID, _LONG_MAX)
        epoch = _number(properties, PRODUCER_EPOCH, _SHORT_MAX)
        sequence = _number(properties, PRODUCER_SEQUENCE_NUMBER, _INT_MAX)
        if id_ is None:
            id_ = self._new_id()
        state = self._states.get(id_)
        if state is None:
            state = ProducerState(id_, epoch or 0, sequence or 0)
        elif epoch is not None and epoch < state.epoch:
            raise _stolen(state, epoch)
        elif epoch is not None and epoch > state.epoch:
            state.epoch = epoch
            state.sequence = state.sequence if sequence is None else sequence
        elif sequence is not None:
            state.sequence = max(state.sequence, sequence)
        self.use(state)
        return ProducerLink(
            self, state, state.epoch, state.sequence if sequence is None else sequence
        )

    def _new_id(self) -> int:
        self._last_id += 1
        while self._last_id in self._states:
            self._last_id += 1
        return self._last_id

    def use(self, state: ProducerState) -> None:
        """Remember *state* as the one that was used last."""
        self._states.pop(state.id, None)
        self._states[state.id] = state
        if len(self._states) > PRODUCERS_MAX:
            del self._states[next(iter(self._states))]


def _following(number: int) -> int:
    """Return the number after *number*: an int, after whose largest value comes 0."""
    return 0 if number >= _INT_MAX else number + 1


def _number(properties: Mapping[Any, object], name: Symbol, most: int) -> int | None:
    value = properties.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise AmqpError(
            f"{name}: a number from 0 to {most} expected, not {value!r:.50}",
            condition=ARGUMENT_OUT_OF_RANGE,
        )
    return int(value)


def _stolen(state: ProducerState, epoch: int) -> AmqpError:
    return AmqpError(
        f"the producer {state.id} has the epoch {state.epoch}, and this link the epoch {epoch}: another"
        " client has taken over",
        condition=EPOCH_STOLEN,
    )
