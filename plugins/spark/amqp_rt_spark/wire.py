"""Blocking AMQP connections for the processes that Spark starts, without an event loop.

A reader runs in a short-lived process that is forked, makes plain calls, and is killed without notice. So
this module runs the engine over a blocking socket (:mod:`amqp_rt.net.blocking`); nothing here imports
trio, unless the URL requires TLS. A process keeps its connections and reuses them, which saves tasks the
handshake.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from itertools import count
from typing import Any, Final, Self, TypeVar

from msgspec import Struct

from amqp_rt import Anonymous, External, Message, Plain, Scram
from amqp_rt.addresses import parse_url
from amqp_rt.batches import (
    MESSAGE_BATCH,
    MESSAGE_BATCHES,
    RECORD_BATCHES,
    read_records,
    write_messages,
)
from amqp_rt.clock import SystemClock
from amqp_rt.errors import (
    AmqpError,
    ConnectionLost,
    DeadlineExceeded,
    DeliveryRejected,
    LinkDetached,
    LinkRefused,
)
from amqp_rt.fronts import amqp10
from amqp_rt.net.blocking import connect_blocking
from amqp_rt.outcomes import ACCEPTED, RELEASED, Accepted, Error, Rejected
from amqp_rt.termini import COPY, Source, Target
from amqp_rt.values import Described, Symbol

from .losses import Patience
from .malformed import decoded

_compiled_numbers: Callable[[list[bytes]], list[int | None]] | None
try:
    from ._columnar import numbers as _compiled_numbers
    from ._columnar import records as _compiled_records
except ImportError:
    _compiled_numbers = None
    _compiled_records = read_records

#: ``x-opt-incarnation``: property of a log's links that distinguishes it from others of its name.
INCARNATION: Final = Symbol("x-opt-incarnation")
SEQUENCE_NUMBER: Final = "x-opt-sequence-number"

#: Messages on the way to a reader; credit is renewed when half of them have come.
CREDIT: Final = 1_000
#: Bytes of those, estimated from recent sizes: large messages get less credit.
CREDIT_BYTES: Final = 16 * 1024 * 1024
#: Credit of a link until the first messages have shown their size.
_FIRST_CREDIT: Final = 16

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

_log = logging.getLogger("amqp_rt_spark")

#: ``snd-settle-mode`` of a link whose sender sends all messages settled (Part 2 §2.8.2).
SND_SETTLED: Final = 1

_CLOCK: Final = SystemClock()
#: Seconds without use after which a connection is polled before reuse, and seconds of that poll: the peer
#: may have closed it meanwhile.
_IDLE_S: Final = 1.0
_GLANCE_S: Final = 0.01
#: Seconds without a record after which a log is asked whether there are any.
_SILENT_S: Final = 1.0
#: Time limit for an answer that some brokers do not give.
_ECHO_S: Final = 1.0


class DataLost(AmqpError):
    """Messages to read are gone."""

    default_condition = "amqp:not-found"


class Endpoint(Struct, frozen=True):
    """Address of a broker, and the login there. Contains no secret, only the place of one."""

    url: str
    credentials_file: str = ""
    credentials_env: str = ""
    mechanism: str = ""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    container_id: str = ""
    timeout_s: float = 30.0
    #: Seconds to retry after a loss of the broker; 0 for not at all.
    retry_s: float = 120.0


def _secret(endpoint: Endpoint) -> tuple[str, str] | None:
    """Read user and password from their place: one line, ``user:password``."""
    if endpoint.credentials_file:
        try:
            with open(endpoint.credentials_file, encoding="utf-8") as file:
                line = file.readline().strip()
        except OSError as error:
            raise ValueError(
                f"credentialsFile {endpoint.credentials_file!r} cannot be read: {error.strerror}"
            ) from error
        where = f"credentialsFile {endpoint.credentials_file!r}"
    elif endpoint.credentials_env:
        line = os.environ.get(endpoint.credentials_env, "")
        where = f"the environment variable {endpoint.credentials_env!r} (credentialsEnv)"
    else:
        return None
    user, colon, password = line.partition(":")
    if not colon or not user:
        raise ValueError(f"{where} has to hold one line, user:password")
    return user, password


def _mechanism(endpoint: Endpoint) -> amqp10.ClientMechanism:
    wanted = endpoint.mechanism.upper()
    secret = _secret(endpoint)
    if wanted == "EXTERNAL" or (not wanted and secret is None and endpoint.tls_cert):
        return External()
    if wanted == "ANONYMOUS" or (not wanted and secret is None):
        return Anonymous()
    if secret is None:
        raise ValueError(f"sasl.mechanism={wanted} needs credentialsFile or credentialsEnv")
    if wanted in ("", "PLAIN"):
        return Plain(*secret)
    if wanted.startswith("SCRAM-"):
        return Scram(*secret, wanted.removeprefix("SCRAM-"))
    raise ValueError(
        f"sasl.mechanism={wanted} is not one of ANONYMOUS, PLAIN, EXTERNAL, "
        "SCRAM-SHA-1, SCRAM-SHA-256 and SCRAM-SHA-512"
    )


class _End:
    """Endpoint of a link, which keeps its state for the calling code."""

    def __init__(self) -> None:
        self.error: Error | None = None
        self.attached = False
        self.over = False

    def on_attached(self, link: Any) -> None:
        self.attached = True

    def on_detached(self, link: Any, error: Error | None, closed: bool) -> None:
        self.error = error
        self.over = True

    def failure(self, what: str, kind: type[AmqpError]) -> AmqpError:
        error = self.error or Error("amqp:link:detach-forced", "the peer has ended the link")
        return kind(f"{what}: {error.description or error.condition}", condition=error.condition)


class Window:
    """Credit limited by messages and by bytes.

    Credit counts messages, but a reader must have room for their bytes. So the sizes of the last messages
    determine how many more to request.

    Args:
        most: Most messages; may be changed.
        max_bytes: Most bytes of these, or else one message.
    """

    def __init__(self, most: int, max_bytes: int = CREDIT_BYTES) -> None:
        self.most = most
        self._max_bytes = max_bytes
        self._mean = 0.0

    def note(self, count: int, size: int) -> None:
        """Update the mean size by *count* messages of *size* bytes together."""
        if count:
            mean = size / count
            # Larger messages count at once, smaller ones gradually.
            self._mean = mean if mean > self._mean else (3 * self._mean + mean) / 4

    @property
    def credit(self) -> int:
        """Messages to request."""
        if not self._mean:
            return min(self.most, _FIRST_CREDIT)
        return max(min(self.most, int(self._max_bytes / self._mean)), 1)


class _Inbox(_End):
    """Stores payloads until they are taken. Unsettled deliveries are settled with *outcome*."""

    def __init__(self, outcome: Any, credit: int = CREDIT) -> None:
        super().__init__()
        self.ready: deque[bytes] = deque()
        self.window = Window(credit)
        #: Credit of the last drain, and messages that came for it.
        self.asked = 0
        self.came = 0
        #: Whether the sender has sent a flow.
        self.answered = False
        self._outcome = outcome

    def take(self) -> list[bytes]:
        """Return the stored payloads, and remove them."""
        found = list(self.ready)
        self.ready.clear()
        return found

    def deliver(self, link: Any, deliveries: list[Any]) -> None:
        payloads = [delivery.payload for delivery in deliveries]
        self.ready.extend(payloads)
        self.came += len(payloads)
        self.window.note(len(payloads), sum(map(len, payloads)))
        if link.snd_settle_mode != SND_SETTLED:
            for delivery in deliveries:
                if not delivery.settled:
                    delivery.settle(self._outcome)

    def on_data(self, link: Any, deliveries: list[Any]) -> None:
        """Ignore partial deliveries: nothing is streamed here."""

    def on_settled(self, link: Any, deliveries: list[Any]) -> None:
        """Ignore settlement: no code waits for it."""

    def on_flow(self, link: Any) -> None:
        self.answered = True


class _Basket(_End):
    """Stores deliveries until they are taken, and leaves them unsettled."""

    def __init__(self) -> None:
        super().__init__()
        self.ready: list[Any] = []
        #: Whether the broker has sent a flow since credit was last granted.
        self.answered = False

    def deliver(self, link: Any, deliveries: list[Any]) -> None:
        self.ready += deliveries

    def on_data(self, link: Any, deliveries: list[Any]) -> None:
        """Ignore partial deliveries: nothing is streamed here."""

    def on_settled(self, link: Any, deliveries: list[Any]) -> None:
        """Ignore settlement by the broker: the delivery is settled later all the same, without effect."""

    def on_flow(self, link: Any) -> None:
        self.answered = True


class _Outbox(_End):
    """Endpoint of a sending link, whose state is polled."""

    def on_credit(self, link: Any) -> None:
        """Do nothing: senders poll the link's credit."""

    def on_outcomes(self, link: Any, deliveries: list[Any]) -> None:
        """Do nothing: senders poll the deliveries."""


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
        end = _Outbox()
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
            forget(endpoint)
            try:
                self._attach(
                    wire(endpoint), {**self._claim, _RESUMES: True} if self._staged else {}
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


class Drain:
    """Receives the messages of a queue, and leaves them unsettled for the caller to settle.

    The link has a session of its own, which ends with it: some brokers keep unsettled deliveries of a
    detached link until its session ends (RabbitMQ 3), and all release them then.

    Raises:
        LinkRefused: The queue cannot be read.
        AmqpError: The broker ignores the selector, and would send unwanted messages; or it sends settled.
    """

    def __init__(self, wire: Wire, address: str, *, selector: str = "") -> None:
        self._wire = wire
        self._address = address
        self._basket = _Basket()
        self._session = wire.engine.begin()
        filters: dict[Any, Any] | None = None
        if selector:
            filters = {Symbol("selector"): selector_filter(selector)}
        try:
            self._link = wire.receive(
                address,
                self._basket,
                Source(address=address, filter=filters),
                session=self._session,
            )
            # RabbitMQ before 4.0 echoes any filter, and supports none.
            known = not wire.engine.peer_miscounts and (self._link.source.filter or {})
            if selector and not (known and Symbol("selector") in known):
                raise AmqpError(
                    f"{address!r} cannot be read with a selector: the broker passes it over",
                    condition="amqp:not-implemented",
                )
            if self._link.snd_settle_mode == 1:
                raise AmqpError(
                    f"{address!r} sends messages settled: they would be lost if the task failed",
                    condition="amqp:not-implemented",
                )
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    @property
    def over(self) -> bool:
        """Whether the link has ended: unsettled deliveries are redelivered to others."""
        return self._basket.over or self._wire.over

    def take(self, most: int) -> list[Any]:
        """Receive up to *most* deliveries: fewer only if the queue runs empty.

        Raises:
            LinkDetached: The link has ended.
        """
        link, basket = self._link, self._basket
        basket.answered = False
        # RabbitMQ before 4.0 ends the session when fewer messages are available than are to be drained;
        # but its flow reports how many there are.
        crashes = self._wire.engine.peer_miscounts
        link.grant(most, echo=crashes)
        if not crashes:
            link.drain()

        def done() -> bool:
            if basket.over:
                return True
            none_left = link.credit == 0 or (crashes and basket.answered and link.available == 0)
            return none_left and not link.arriving

        self._wire.wait(done, self._wire.endpoint.timeout_s)
        if basket.over:
            raise self._wire.ended(basket, f"reading {self._address!r} has ended", LinkDetached)
        found, basket.ready = basket.ready, []
        return found

    def close(self) -> None:
        """Detach the link and end its session, which releases unsettled deliveries; settled ones stay so."""
        connection = self._wire.connection
        if connection.over:
            return
        try:
            if not self._basket.over and self._basket.attached:
                # The peer's detach shows that it has processed everything before.
                self._link.detach()
                self._wire.wait(lambda: self._basket.over, self._wire.endpoint.timeout_s)
            self._session.end()
            connection.flush(timeout_s=self._wire.endpoint.timeout_s)
        except AmqpError:
            # The next use of the connection notices the loss.
            pass


class Wire:
    """A connection to the broker at *endpoint*, with its operations.

    Raises:
        ConnectFailed: The connection failed; one sentence names the address and the reason.
        ValueError: The endpoint is invalid.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        url = parse_url(endpoint.url)
        if url.password is not None:
            raise ValueError(
                "url holds a password, which Spark would show in plans and logs: "
                "use credentialsFile or credentialsEnv"
            )
        tls = None
        if url.tls and (endpoint.tls_ca or endpoint.tls_cert):
            from amqp_rt import ClientTls

            tls = ClientTls(
                endpoint.tls_ca or None,
                certificate=endpoint.tls_cert or None,
                key=endpoint.tls_key or None,
            )
        self.endpoint = endpoint
        name = endpoint.container_id or f"spark-{socket.gethostname()}"
        options = amqp10.ClientOptions(
            # Links of equal name between equal containers are one link (Part 2 §2.6.1), so make each unique.
            container_id=f"{name}-{os.getpid()}-{secrets.token_hex(4)}",
            hostname=url.virtual_host or url.host or None,
            mechanisms=(_mechanism(endpoint),),
        )
        engine = self.engine = amqp10.client(options, _CLOCK.monotonic())
        self._used_at = _CLOCK.monotonic()
        self.connection = connect_blocking(url, engine, tls=tls, timeout_s=endpoint.timeout_s)
        try:
            self.wait(lambda: engine.open_received, endpoint.timeout_s)
            self.session = engine.begin()
        except BaseException:
            self.connection.drop()
            raise
        self._numbers = count()
        self._replies: tuple[_Inbox, Any] | None = None
        self._requests: dict[str, tuple[_Outbox, Any]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.connection.drop()

    def name(self) -> str:
        """Return a new name for a link."""
        return f"spark-{next(self._numbers)}"

    def wait(self, done: Any, timeout_s: float) -> None:
        """Run the connection until *done()*.

        Raises:
            DeadlineExceeded: The time is up.
            ConnectionLost: The connection has ended.
        """
        self.connection.run_until(done, timeout_s=timeout_s)
        self._used_at = _CLOCK.monotonic()

    @property
    def gone(self) -> bool:
        """Whether the connection has ended."""
        return self.connection.over or self.engine.finished

    def ended(self, end: _End, what: str, kind: type[AmqpError]) -> AmqpError:
        """Return the error of a link that has ended: one of *kind*, or :class:`ConnectionLost` if the
        connection has ended, too."""
        if not self.gone:
            return end.failure(what, kind)
        error = self.connection.error or Error("amqp:connection:forced", "the connection has ended")
        return ConnectionLost(
            f"{what}: {error.description or error.condition}", condition=str(error.condition)
        )

    @property
    def named_by(self) -> str:
        """Application property by which the broker detects duplicates; empty if it uses the ``message-id``,
        or detects none."""
        product = self.engine.peer.properties.get("product")
        return "_AMQ_DUPL_ID" if product == "apache-activemq-artemis" else ""

    @property
    def over(self) -> bool:
        """Whether the connection can no longer be used."""
        if not self.connection.over and _CLOCK.monotonic() - self._used_at > _IDLE_S:
            self.connection.run_for(_GLANCE_S)
        # Some brokers end the session where others refuse a link.
        return self.gone or self.session.ended

    # --- requests ---

    def call(self, address: str, operation: str, body: Any = None, **given: Any) -> Any:
        """Send *operation* to ``<address>/$management``, and return the body of the answer.

        Raises:
            AmqpError: The operation failed; the condition is the broker's.
        """
        try:
            return self._call(address, operation, body, given)
        except (LinkRefused, DeadlineExceeded) as error:
            # amqp_rt sends no product by default, so a product means another broker.
            product = self.engine.peer.properties.get("product")
            if product is None:
                raise
            raise AmqpError(
                f"{product} at {self.endpoint.url} does not answer {operation} for {address!r}, which takes "
                "our broker: queues of others are streamed with mode=spool and browsed with mode=browse, and "
                f"logs are read with the option logs ({error.description})",
                condition="amqp:not-implemented",
            ) from error

    def _call(self, address: str, operation: str, body: Any, given: Mapping[str, Any]) -> Any:
        timeout_s = self.endpoint.timeout_s
        inbox, receiver = self._reply_link()
        node = f"{address}/$management"
        known = self._requests.get(node)
        if known is None or known[0].over:
            outbox = _Outbox()
            sender = self.session.attach_sender(self.name(), outbox, target=Target(address=node))
            self.wait(lambda: outbox.over or sender.credit, timeout_s)
            if outbox.over:
                raise self.ended(outbox, f"{node!r} cannot be asked", LinkRefused)
            known = self._requests[node] = outbox, sender
        outbox, sender = known
        number = f"spark-{next(self._numbers)}"
        message = Message(
            body,
            body_kind="value",
            message_id=number,
            reply_to=receiver.source.address,
            application_properties={"operation": operation, **given},
        )
        self.wait(lambda: outbox.over or sender.credit, timeout_s)
        if outbox.over:
            raise self.ended(outbox, f"{node!r} cannot be asked", LinkDetached)
        sender.send(message.encode())
        replies: list[Message] = []

        def answered() -> bool:
            while inbox.ready:
                reply = Message.decode(inbox.ready.popleft())
                if reply.correlation_id == number:
                    replies.append(reply)
            return bool(replies) or outbox.over or inbox.over

        self.wait(answered, timeout_s)
        receiver.grant(10)
        if not replies:
            end = inbox if inbox.over else outbox
            raise self.ended(end, f"{node!r} did not answer", LinkDetached)
        (reply,) = replies
        said = reply.application_properties
        if int(said.get("statusCode", 200)) >= 400:
            raise AmqpError(
                f"{operation} at {address!r}: {said.get('statusDescription', 'refused')}",
                condition=str(said.get("errorCondition", "amqp:internal-error")),
            )
        return reply.body

    def ask(self, node: str, properties: Mapping[str, Any]) -> Any:
        """Send a request with *properties* to *node*, and return the body of the answer, at a broker without
        dynamic addresses: it answers to the address of our target.

        Raises:
            AmqpError: The request failed.
        """
        timeout_s = self.endpoint.timeout_s
        inbox, outbox, number = _Inbox(ACCEPTED), _Outbox(), self.name()
        receiver = self.session.attach_receiver(
            self.name(), inbox, source=Source(address=node), target=Target(address=number)
        )
        sender = self.session.attach_sender(
            self.name(), outbox, source=Source(address=number), target=Target(address=node)
        )
        try:
            ends = inbox, outbox
            self.wait(
                lambda: any(end.over for end in ends) or bool(inbox.attached and sender.credit),
                timeout_s,
            )
            if not any(end.over for end in ends):
                receiver.grant(1)
                request = Message(
                    None,
                    body_kind="value",
                    message_id=number,
                    reply_to=number,
                    application_properties=dict(properties),
                )
                sender.send(request.encode())
                self.wait(lambda: inbox.ready or any(end.over for end in ends), timeout_s)
            if not inbox.ready:
                end = inbox if inbox.over else outbox
                raise self.ended(end, f"{node!r} cannot be asked", LinkRefused)
        finally:
            for end, link in ((inbox, receiver), (outbox, sender)):
                if not end.over and not self.connection.over:
                    link.detach()
        reply = Message.decode(inbox.ready.popleft())
        said = reply.application_properties
        status = int(said.get("status-code", said.get("statusCode", 200)))
        if status >= 400:
            why = said.get("status-description", said.get("statusDescription", "refused"))
            condition = {401: "amqp:unauthorized-access", 404: "amqp:not-found"}.get(status)
            raise AmqpError(
                f"{properties.get('operation')} at {node!r}: {why}",
                condition=condition or "amqp:internal-error",
            )
        return reply.body

    def names(self, kind: str) -> Iterator[str]:
        """Yield the names of the nodes of *kind*, such as ``amqp_rt.log``, which we may manage.

        Raises:
            AmqpError: The broker refuses the query.
        """
        asked = 0
        while True:
            page = self.call("", "QUERY", entityType=kind, offset=asked)
            rows = page["results"]
            if not rows:
                return
            column = page["attributeNames"].index("name")
            yield from (str(row[column]) for row in rows)
            asked += len(rows)

    def _reply_link(self) -> tuple[_Inbox, Any]:
        if self._replies is None or self._replies[0].over:
            inbox = _Inbox(ACCEPTED)
            receiver = self.session.attach_receiver(self.name(), inbox, source=Source(dynamic=True))
            self.wait(lambda: inbox.over or receiver.attached, self.endpoint.timeout_s)
            if inbox.over:
                raise self.ended(inbox, "the broker makes no addresses for replies", LinkRefused)
            receiver.grant(10)
            self._replies = inbox, receiver
        return self._replies

    # --- reading ---

    def read(
        self, address: str, partition: int, start: int, end: int, **how: Any
    ) -> Iterator[tuple[int, Message]]:
        """Yield the records of :meth:`records`, one at a time and decoded."""
        for offsets, payloads, _ in self.records(address, partition, start, end, **how):
            for offset, payload in zip(offsets, payloads, strict=True):
                yield offset, decoded(payload)

    def records(
        self,
        address: str,
        partition: int,
        start: int,
        end: int,
        *,
        incarnation: str = "",
        selector: str = "",
        credit: int = CREDIT,
        may_lose: bool = False,
        spelling: Spelling | None = None,
        batches: bool = False,
    ) -> Iterator[tuple[list[int], list[bytes], list[int] | None]]:
        """Yield the records of a log from offset *start* on and before *end*, with their offsets, as many at
        a time as have arrived.

        The end is found by offset, not by a count: a record may be missing only if *selector* excludes it.

        With *batches* the broker is asked to send many records in one message. If it does, the records are as
        stored, without the annotations of their position, and their times are returned beside them (in
        milliseconds since 1970).

        Raises:
            DecodeError: A message is not a valid batch.
            DataLost: The log was replaced by another one, or retention has removed records, unless it
                *may_lose* records.
            AmqpError: The log cannot be read.
        """
        if start >= end:
            return
        spelling = spelling or OURS
        node = spelling.node(address, partition)
        filters = spelling.begin(start)
        if selector:
            filters[Symbol("selector")] = selector_filter(selector)
        inbox = _Inbox(ACCEPTED, credit)
        link = self.receive(
            node,
            inbox,
            Source(address=node, filter=filters),
            capabilities=(RECORD_BATCHES,) if batches else (),
        )
        batches = batches and RECORD_BATCHES in link.offered_capabilities
        found = str(link.properties.get(INCARNATION, ""))
        try:
            if incarnation and found != incarnation:
                raise DataLost(
                    f"{address!r} was deleted and made again: it is the log {found}, and the "
                    f"offsets are of {incarnation}"
                )
            expected = start
            # Records and messages received so far, for the average of records in a message.
            records = messages = 0
            while expected < end:
                # Records behind the end would be sent for nothing.
                wanted = end - expected
                if batches:
                    wanted = max(wanted * messages // max(records, 1), 1)
                inbox.window.most = min(credit, wanted)
                # Our broker knows what is left, so silence does not have to be waited out.
                self._next(link, inbox, node, draining=bool(selector), asks=bool(found))
                if not inbox.ready:
                    if not selector and not may_lose:
                        raise DataLost(lost(node, expected, end))
                    break
                for offsets, payloads, times in _taken(inbox, spelling, batches=batches):
                    messages += 1 if batches else len(offsets)
                    records += len(offsets)
                    for at, offset in enumerate(offsets):
                        if offset > expected and not selector and not may_lose:
                            raise DataLost(lost(node, expected, min(offset, end)))
                        expected = offset + 1
                        if offset >= end:
                            del offsets[at:], payloads[at:]
                            if times is not None:
                                del times[at:]
                            break
                    if offsets:
                        yield offsets, payloads, times
                    if expected >= end:
                        break
        finally:
            self._leave(link, inbox)

    def probe(
        self, address: str, partition: int, position: Any, *, spelling: Spelling | None = None
    ) -> int | None:
        """Return the offset of the first record at *position*, a ``rabbitmq:stream-offset-spec``; None if
        there is none yet."""
        with contextlib.closing(self.from_(address, partition, position, 1, spelling)) as found:
            return next(found, None)

    def from_(
        self,
        address: str,
        partition: int,
        position: Any,
        credit: int = CREDIT,
        spelling: Spelling | None = None,
    ) -> Generator[int]:
        """Yield the offsets of the records from *position* on, until no more are available."""
        spelling = spelling or OURS
        node = spelling.node(address, partition)
        inbox = _Inbox(ACCEPTED, credit)
        link = self.receive(node, inbox, Source(address=node, filter=spelling.begin(position)))
        try:
            while True:
                self._next(link, inbox, node, draining=True)
                if not inbox.ready:
                    return
                yield from spelling.numbers(inbox.take())
        finally:
            self._leave(link, inbox)

    def browse(self, address: str, **how: Any) -> Iterator[Message]:
        """Yield the messages of :meth:`browsed`, one at a time and decoded."""
        for payloads in self.browsed(address, **how):
            yield from map(decoded, payloads)

    def browsed(
        self, address: str, *, selector: str = "", most: int | None = None, credit: int = CREDIT
    ) -> Iterator[list[bytes]]:
        """Yield copies of the messages in a queue, *most* of them at most; none is removed.

        Without *most*, the limit is the number that the broker reports as available; if it reports none,
        reading ends when the queue is empty for a moment.

        Raises:
            AmqpError: The queue cannot be read, or not without removing messages.
        """
        filters: dict[Any, Any] = {}
        if selector:
            filters[Symbol("selector")] = selector_filter(selector)
        inbox = _Inbox(RELEASED, credit)
        source = Source(address=address, distribution_mode=COPY, filter=filters or None)
        link = self.receive(address, inbox, source)
        taken = 0
        try:
            # RabbitMQ before 4.0 echoes this mode, too, and removes the messages.
            if link.source.distribution_mode != COPY or self.engine.peer_miscounts:
                raise AmqpError(
                    f"{address!r} cannot be browsed: the broker would take messages away",
                    condition="amqp:not-implemented",
                )
            if most is None:
                most = self._available(link, inbox)
            while most is None or taken < most:
                self._next(link, inbox, address, draining=True, short=most is None)
                if not inbox.ready:
                    return
                payloads = inbox.take()
                if most is not None:
                    del payloads[most - taken :]
                taken += len(payloads)
                yield payloads
        finally:
            self._leave(link, inbox)

    def leased(
        self, address: str, properties: Mapping[Any, Any], *, credit: int = CREDIT
    ) -> Iterator[list[bytes]]:
        """Yield copies of messages that a group has leased; *properties* select them."""
        inbox = _Inbox(ACCEPTED, credit)
        source = Source(address=address, distribution_mode=COPY)
        link = self.receive(address, inbox, source, properties)
        try:
            while True:
                self._next(link, inbox, address, draining=True)
                if not inbox.ready:
                    return
                yield inbox.take()
        finally:
            self._leave(link, inbox)

    def receive(
        self,
        what: str,
        inbox: _Inbox | _Basket,
        source: Source,
        properties: Mapping[Any, Any] | None = None,
        *,
        session: Any = None,
        capabilities: tuple[str, ...] = (),
    ) -> Any:
        """Attach a link from *source* to *inbox*: a basket requests unsettled deliveries, any other endpoint
        settled ones.

        Raises:
            LinkRefused: *what* cannot be read.
        """
        settled = 0 if isinstance(inbox, _Basket) else SND_SETTLED
        link = (session or self.session).attach_receiver(
            self.name(),
            inbox,
            source=source,
            snd_settle_mode=settled,
            properties=properties,
            desired_capabilities=capabilities,
        )
        self.wait(lambda: inbox.over or inbox.attached, self.endpoint.timeout_s)
        if inbox.over or link.source is None:
            self.wait(lambda: inbox.over, self.endpoint.timeout_s)
            raise self.ended(inbox, f"{what!r} cannot be read", LinkRefused)
        return link

    def _available(self, link: Any, inbox: _Inbox) -> int | None:
        """Return how many messages are available for *link*, None if its sender does not report it."""
        link.grant(0, echo=True)
        with contextlib.suppress(DeadlineExceeded):
            self.wait(lambda: inbox.over or inbox.answered, _ECHO_S)
        return int(link.available) or None

    def _next(
        self,
        link: Any,
        inbox: _Inbox,
        what: str,
        *,
        draining: bool,
        short: bool = False,
        asks: bool = False,
    ) -> None:
        """Wait until messages are ready, or with *draining* until the source is empty; with *short*, a drain that
        was not filled counts as empty. With *asks* it drains after some silence, too.

        No more is read from the socket than needed: data on its way stays there.
        """

        def drained() -> bool:
            return draining and spent()

        def spent() -> bool:
            # Without messages only if an earlier drain has ended meanwhile.
            return link.credit == 0 and not link.arriving

        def done() -> bool:
            return bool(inbox.ready) or inbox.over or spent()

        while not inbox.ready:
            if inbox.over:
                raise self.ended(inbox, f"reading {what!r} has ended", LinkDetached)
            if drained():
                if inbox.asked and inbox.came < (inbox.asked if short else 1):
                    return
                inbox.asked, inbox.came = inbox.window.credit, 0
                link.grant(inbox.asked)
                link.drain()
            elif not draining and link.credit <= (credit := inbox.window.credit) // 2:
                link.grant(credit)
            timeout_s = self.endpoint.timeout_s
            try:
                self.wait(done, min(timeout_s, _SILENT_S) if asks and not draining else timeout_s)
            except DeadlineExceeded:
                if draining or not asks:
                    raise
                draining = True
                inbox.asked, inbox.came = link.credit, 0
                link.drain()

    def _leave(self, link: Any, inbox: _Inbox) -> None:
        if inbox.over or self.connection.over:
            return
        link.detach()
        try:
            self.wait(lambda: inbox.over, self.endpoint.timeout_s)
        except AmqpError:
            # The next use of the connection notices the loss.
            pass


def _taken(
    inbox: _Inbox, spelling: Spelling, *, batches: bool
) -> Iterator[tuple[list[int], list[bytes], list[int] | None]]:
    """Yield the offsets, the octets and the times of the received records, which come in *batches* or singly.

    Raises:
        DecodeError: A batch is malformed, or the annotations of a message are.
    """
    if not batches:
        payloads = inbox.take()
        yield spelling.numbers(payloads), payloads, None
        return
    # One batch at a time, so that few records are in memory twice.
    while inbox.ready:
        offsets, times, payloads = _compiled_records(inbox.ready.popleft())
        yield offsets, payloads, times


class Spelling:
    """Addresses and annotations of logs at amqp_rt's broker; those of others are in :mod:`.dialects`."""

    def node(self, address: str, partition: int) -> str:
        """Return the address of a partition."""
        return f"{address}/partitions/{partition}"

    def begin(self, position: Any) -> dict[Any, Any]:
        """Return the filters of a source that begins at *position*: an offset, a timestamp, ``first`` or ``last``."""
        return {Symbol("start"): offset_spec(position)}

    def number(self, message: Message) -> int:
        """Return the offset of a record."""
        return int(message.message_annotations[SEQUENCE_NUMBER])

    def numbers(self, payloads: list[bytes]) -> list[int]:
        """Return the offset of each record.

        Raises:
            DecodeError: The annotations of one are malformed.
        """
        return [self.number(decoded(payload)) for payload in payloads]


class _Ours(Spelling):
    """Spelling of amqp_rt's broker, with offsets at a fixed place, from which they can be read directly."""

    def numbers(self, payloads: list[bytes]) -> list[int]:
        return numbers(payloads)


#: Spelling of amqp_rt's logs.
OURS: Final = _Ours()


def offset_spec(position: Any) -> Described:
    """Return *position* as the filter value by which RabbitMQ selects the start in its streams."""
    return Described(Symbol("rabbitmq:stream-offset-spec"), position)


def selector_filter(selector: str) -> Described:
    """Return a filter by an SQL-like condition."""
    return Described(Symbol("apache.org:selector-filter:string"), selector)


_HEADER_BEGIN: Final = b"\x00\x53\x70\xc0"
_ANNOTATIONS_BEGIN: Final = b"\x00\x53\x72\xc1"
_FIRST_KEY: Final = b"\xa3\x0cx-opt-offset\xa1"
_SECOND_KEY: Final = b"\xa3\x15x-opt-sequence-number"


def numbers(payloads: list[bytes]) -> list[int]:
    """Return the number that amqp_rt's broker has given to each record of a log, or message of a lease.

    Raises:
        DecodeError: The annotations of a message are malformed.
    """
    found = (
        map(number_at_its_place, payloads)
        if _compiled_numbers is None
        else _compiled_numbers(payloads)
    )
    return [
        OURS.number(decoded(payload)) if number is None else number
        for number, payload in zip(found, payloads, strict=True)
    ]


def number_at_its_place(payload: bytes) -> int | None:
    """Return the number of a record whose annotations begin with those of amqp_rt's broker; None for others.

    Most records have only these, so the map need not be decoded. ``numbers`` of the compiled module does
    the same.
    """
    at = 5 + payload[4] if payload.startswith(_HEADER_BEGIN) and len(payload) > 4 else 0
    if payload.startswith(_ANNOTATIONS_BEGIN, at) and payload.startswith(_FIRST_KEY, at + 6):
        # Skip the first key, and its text with the octet of its size.
        at += 21
        at += 1 + int.from_bytes(payload[at : at + 1])
        if payload.startswith(_SECOND_KEY, at):
            # A long or a smalllong.
            for constructor, width in ((b"\x81", 8), (b"\x55", 1)):
                number = payload[at + 24 : at + 24 + width]
                if payload.startswith(constructor, at + 23) and len(number) == width:
                    return int.from_bytes(number, signed=True)
    return None


def lost(node: str, first: int, end: int) -> str:
    """Return the error text for lost records."""
    return (
        f"{node}: the records from {first} to {end - 1} are gone, since retention was faster; "
        "failOnDataLoss=false goes on without them"
    )


#: Connections by process id and endpoint. A forked process must make its own.
_WIRES: Final[dict[tuple[int, Endpoint], Wire]] = {}


def wire(endpoint: Endpoint) -> Wire:
    """Return this process's connection to *endpoint*, made if there is no usable one.

    Raises:
        ConnectFailed: The connection failed; one sentence names the address and the reason.
    """
    key = os.getpid(), endpoint
    found = _WIRES.get(key)
    if found is not None:
        if not found.over:
            return found
        found.connection.drop()
    found = _WIRES[key] = Wire(endpoint)
    return found


def forget(endpoint: Endpoint) -> None:
    """Drop this process's connection to *endpoint*, if there is one."""
    found = _WIRES.pop((os.getpid(), endpoint), None)
    if found is not None:
        found.connection.drop()


Found = TypeVar("Found")


def retried(endpoint: Endpoint, work: Callable[[Wire], Found]) -> Found:
    """Call *work* with this process's connection to *endpoint*, again after each loss of the broker.

    Raises:
        AmqpError: The work failed, or the broker is lost for longer than ``retry_s``.
    """
    patience = Patience(endpoint.retry_s)
    while True:
        try:
            return work(wire(endpoint))
        except AmqpError as error:
            patience.bear(error)
            forget(endpoint)


def call(endpoint: Endpoint, address: str, operation: str, body: Any = None, **given: Any) -> Any:
    """Call ``<address>/$management`` and return the answer, again after each loss of the broker: only for
    operations that may be repeated.

    Raises:
        AmqpError: As for :func:`retried`.
    """
    return retried(endpoint, lambda there: there.call(address, operation, body, **given))


def records(
    endpoint: Endpoint, address: str, partition: int, start: int, end: int, **how: Any
) -> Iterator[tuple[list[int], list[bytes], list[int] | None]]:
    """Yield the records of :meth:`Wire.records`; after a loss of the broker, continue at the next offset.

    Raises:
        AmqpError: As for :meth:`Wire.records` and :func:`retried`.
    """
    patience = Patience(endpoint.retry_s)
    while start < end:
        try:
            for found in wire(endpoint).records(address, partition, start, end, **how):
                # Computed before the yield, since the caller may change the lists.
                after = found[0][-1] + 1
                yield found
                start = after
            return
        except AmqpError as error:
            patience.bear(error, start)
            forget(endpoint)


def browsed(endpoint: Endpoint, address: str, **how: Any) -> Iterator[list[bytes]]:
    """Yield the messages of :meth:`Wire.browsed`; retry after a loss of the broker before the first message.

    A queue has no position at which to continue, so a later loss ends the task, which Spark then repeats.

    Raises:
        AmqpError: As for :meth:`Wire.browsed` and :func:`retried`.
    """
    patience = Patience(endpoint.retry_s)
    begun = False
    while True:
        try:
            for payloads in wire(endpoint).browsed(address, **how):
                begun = True
                yield payloads
            return
        except AmqpError as error:
            if begun:
                raise
            patience.bear(error)
            forget(endpoint)
