"""Sending of encoded messages, singly or in batches, also to a stage of an epoch."""

from __future__ import annotations

import contextlib
import logging
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final

from amqp_rt.batches import MESSAGE_BATCH, MESSAGE_BATCHES, write_messages
from amqp_rt.clock import SystemClock
from amqp_rt.errors import (
    AmqpError,
    DeadlineExceeded,
    DeliveryRejected,
    LinkDetached,
    LinkRefused,
)
from amqp_rt.outcomes import Accepted, Error, Rejected
from amqp_rt.termini import Target

from . import connections
from .link_ends import Outbox
from .losses import Patience
from .wire import Wire

_log = logging.getLogger("amqp_rt_spark")

_CLOCK: Final = SystemClock()

#: Bytes and messages of a batch that is staged; a larger message goes alone. A batch fits one frame.
_BATCH_BYTES: Final = 56 * 1024
_BATCH_MESSAGES: Final = 250
#: Bytes that a message takes in a batch beside its own.
_SECTION_BYTES: Final = 8

#: Properties of a link that stages messages, without their prefix: the request for how much of the stage
#: has arrived has the same fields.
_PREFIX: Final = "amqp_rt:"
_STAGE_FIELDS: Final = ("producer", "run", "epoch", "part", "attempt")
PRODUCER: Final = "amqp_rt:producer"
#: Property of a link that continues a stage of an earlier link.
_RESUMES: Final = "amqp_rt:resumes"


class Outlet:
    """Sends encoded messages.

    At most *max_in_flight* messages and *max_bytes* bytes are unsettled, or else one message. A message
    is kept until it is settled: the limit bounds the memory of a task, and the messages to send again if the
    broker is lost. For a link that stages messages, the broker reports those that it has, so each is staged
    once; on any other link, messages whose disposition was lost are sent twice.

    Attributes:
        count: Messages that were accepted.
        crc: CRC-32 over those, in order.
        refused: Messages that were not accepted, if that is permitted.
        refusals: The last of those, with the broker's error, until the caller removes them.
    """

    def __init__(
        self,
        wire: Wire,
        address: str,
        *,
        properties: Mapping[Any, Any] | None = None,
        max_in_flight: int = 1_000,
        max_bytes: int = 16_777_216,
        timeout_s: float,
        credit_s: float | None = None,
        skip: bool = False,
        keep_refused: bool = False,
        batches: bool = False,
    ) -> None:
        self.count = 0
        self.crc = 0
        self.refused = 0
        self.refusals: list[tuple[bytes, Error]] = []
        self._keep_refused = keep_refused
        self._address = address
        self._claim = dict(properties or {})
        self._staged = PRODUCER in self._claim
        self._most = max_in_flight
        self._room = self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._credit_s = timeout_s if credit_s is None else credit_s
        self._skip = skip
        #: Whether messages may go in batches, and whether they do on this link.
        self._may_batch = batches
        self._batches = False
        #: Messages of the next batch, and their bytes.
        self._gathered: list[bytes] = []
        self._gathered_bytes = 0
        #: Unsettled deliveries with their messages, and the number of those messages.
        self._unanswered: deque[tuple[Any, list[bytes]]] = deque()
        self._in_flight = 0
        #: Messages to send again, in order, after the unsettled ones.
        self._unsent: deque[list[bytes]] = deque()
        self._patience = Patience(wire.endpoint.retry_s)
        self._attach(wire, self._claim)
        #: Properties and capabilities from the broker's attach.
        self.properties: Mapping[Any, Any] = self._link.properties
        self.capabilities: tuple[str, ...] = self._link.offered_capabilities

    def send(self, payload: bytes) -> None:
        """Send *payload* as soon as there is room for it, or gather it for the next batch.

        Raises:
            DeliveryRejected: The broker has not accepted an earlier message.
            LinkDetached: The link has ended.
            AmqpError: The broker is lost, or has no room, for too long.
        """
        if not self._may_batch:
            self._send([payload])
            return
        size = len(payload) + _SECTION_BYTES
        # Several batches are on their way at a time.
        full = len(self._gathered) >= min(_BATCH_MESSAGES, max(self._most // 4, 1))
        if full or self._gathered_bytes + size > self._batch_bytes:
            self._send_gathered()
        self._gathered.append(payload)
        self._gathered_bytes += size

    def _send_gathered(self) -> None:
        gathered, self._gathered, self._gathered_bytes = self._gathered, [], 0
        if gathered:
            self._send(gathered)

    def _send(self, parcel: list[bytes]) -> None:
        parcels = [parcel] if self._batches else [[payload] for payload in parcel]
        for at, each in enumerate(parcels):
            try:
                self._give(each)
            except AmqpError as error:
                self._unsent.extend(parcels[at:])
                self._resume(error)
                return

    def finish(self) -> None:
        """Wait until all messages are settled, and detach the link.

        Raises:
            DeliveryRejected: The broker has not accepted a message.
            LinkDetached: The link has ended.
            AmqpError: The broker is lost for too long.
        """
        self._send_gathered()
        while True:
            try:
                self._wait(lambda: not self._settled(), self._timeout_s)
                break
            except AmqpError as error:
                self._resume(error)
        self.close()

    def close(self) -> None:
        """Detach the link."""
        # All messages that count are settled: a lost connection is noticed at its next use.
        with contextlib.suppress(AmqpError):
            if not self._end.over and not self._wire.gone:
                self._link.detach()
                self._wire.connection.flush(timeout_s=self._timeout_s)

    def _attach(self, wire: Wire, properties: Mapping[Any, Any]) -> None:
        end = Outbox()
        link = wire.session.attach_sender(
            wire.name(),
            end,
            target=Target(address=self._address),
            properties=properties or None,
            desired_capabilities=(MESSAGE_BATCHES,) if self._may_batch else (),
        )
        wire.wait(lambda: end.over or end.attached, self._timeout_s)
        # A refusal is an attach without a target, followed by a detach (Part 2 §2.6.3).
        if end.over or link.target is None:
            wire.wait(lambda: end.over, self._timeout_s)
            raise wire.ended(end, f"cannot send to {self._address!r}", LinkRefused)
        self._wire, self._end, self._link = wire, end, link
        self._batches = self._may_batch and MESSAGE_BATCHES in link.offered_capabilities
        self._batch_bytes = min(
            _BATCH_BYTES, self._max_bytes, link.max_message_size or _BATCH_BYTES
        )

    def _give(self, parcel: list[bytes]) -> None:
        link = self._link
        count, size = len(parcel), self._size(parcel)
        if not (
            link.credit
            and link.writable
            and self._in_flight + count <= self._most
            and size <= self._room
        ):
            self._await_room(count, size)
        if count == 1:
            delivery = link.send(parcel[0])
        else:
            delivery = link.send(write_messages(parcel), message_format=MESSAGE_BATCH)
        self._room -= size
        self._in_flight += count
        self._unanswered.append((delivery, parcel))

    def _size(self, parcel: list[bytes]) -> int:
        return min(sum(map(len, parcel)), self._max_bytes)

    def _await_room(self, count: int, size: int) -> None:
        """Wait until *count* messages of *size* bytes may be sent.

        Raises:
            DeadlineExceeded: The broker grants no credit, or does not settle the messages sent.
        """
        link = self._link

        def free() -> bool:
            return bool(
                link.credit
                and link.writable
                and self._settled() + count <= self._most
                and size <= self._room
            )

        until = _CLOCK.monotonic() + self._credit_s
        while True:
            left = until - _CLOCK.monotonic()
            try:
                self._wait(free, min(self._timeout_s, max(left, 0.0)))
                return
            except DeadlineExceeded as error:
                if link.credit or self._settled():
                    raise
                if _CLOCK.monotonic() >= until:
                    raise self._no_room() from error

    def _no_room(self) -> DeadlineExceeded:
        """Return the error of a link that has had no credit for too long."""
        text = f"{self._address!r} has had no room for {self._credit_s:g} s"
        if self._staged:
            text += (
                ": the staged messages have reached the broker's limit staged_bytes_max, or its memory is "
                "full; raise the limit, or make micro-batches smaller (maxMessagesPerTrigger)"
            )
        else:
            text += (
                ": its consumers are behind; give them time with settleTimeout, or raise its length"
            )
        return DeadlineExceeded(text, condition="amqp:resource-limit-exceeded")

    def _wait(self, done: Callable[[], bool], timeout_s: float) -> None:
        self._wire.wait(lambda: self._end.over or done(), timeout_s)
        if self._end.over:
            raise self._wire.ended(
                self._end, f"sending to {self._address!r} has ended", LinkDetached
            )

    def _resume(self, error: AmqpError) -> None:
        """Attach again after a loss of the broker, and send the messages that it does not have.

        Raises:
            AmqpError: *error* is no loss, or the broker is lost for too long; or it has lost messages that
                it had accepted.
        """
        endpoint = self._wire.endpoint
        while True:
            if not self._staged and isinstance(error, DeadlineExceeded):
                # The broker is slow rather than lost, and may have all messages.
                raise error
            self._patience.bear(error, (self.count, self.refused))
            connections.forget(endpoint)
            try:
                self._attach(
                    connections.wire(endpoint),
                    {**self._claim, _RESUMES: True} if self._staged else {},
                )
                self._take_back()
                while self._unsent:
                    self._give(self._unsent[0])
                    self._unsent.popleft()
                return
            except AmqpError as again:
                error = again

    def _take_back(self) -> None:
        """Put the messages that were unsettled at the link's end in front of those to send again, except those
        that the broker has."""
        self._settled()
        self._unsent.extendleft(parcel for _, parcel in reversed(self._unanswered))
        self._unanswered.clear()
        self._in_flight = 0
        self._room = self._max_bytes
        if not self._batches:
            self._unsent = deque([payload] for parcel in self._unsent for payload in parcel)
        if not self._staged:
            _log.warning(
                "messages sent again, whose answers were lost: %d to %r",
                len(self._unsent),
                self._address,
            )
            return
        claim = {name: self._claim[_PREFIX + name] for name in _STAGE_FIELDS}
        found = self._wire.call(self._address, "STAGE", claim)
        kept, crc = int(found["count"]), int(found["crc"])
        while self.count < kept and self._unsent:
            self._note(self._unsent.popleft())
        if (self.count, self.crc) != (kept, crc):
            raise AmqpError(
                f"{self._address!r} has {kept} messages staged, with the checksum {crc:#010x}, and "
                f"had accepted {self.count} with {self.crc:#010x}: its store has lost them, or it has "
                "none; the task has to be done again",
                condition="amqp:precondition-failed",
            )

    def _settled(self) -> int:
        """Process the oldest settled messages; return how many are unsettled.

        Raises:
            DeliveryRejected: A message was not accepted, which is not permitted.
        """
        while self._unanswered and self._unanswered[0][0].settled:
            delivery, parcel = self._unanswered.popleft()
            self._room += self._size(parcel)
            self._in_flight -= len(parcel)
            state = delivery.state
            if isinstance(state, Accepted):
                self._note(parcel)
                continue
            error = state.error if isinstance(state, Rejected) else None
            if error is None:
                error = Error("amqp:not-accepted", "it was not accepted")
            if not self._skip:
                raise DeliveryRejected(
                    f"{self._address!r} did not take a message: {error.description or error.condition}",
                    condition=str(error.condition),
                )
            self.refused += len(parcel)
            if self._keep_refused:
                self.refusals += [(payload, error) for payload in parcel]
        return self._in_flight

    def _note(self, parcel: list[bytes]) -> None:
        """Count messages that the broker has."""
        for payload in parcel:
            self.crc = zlib.crc32(payload, self.crc)
        self.count += len(parcel)
