"""AMQP in the calling thread: what the processes that Spark starts need, and no event loop.

A reader lives in a short-lived process that is forked, runs plain calls, and is killed without
notice. So this is the engine over a blocking socket (:mod:`amqp_rt.net.blocking`); nothing here
imports trio, unless the URL says TLS. A process keeps the connections it has made and uses them
again: a task is then not charged a handshake.
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
from amqp_rt.batches import RECORD_BATCHES, read_records
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

#: ``x-opt-incarnation``: the property of a log's links that tells it from others of its name.
INCARNATION: Final = Symbol("x-opt-incarnation")
SEQUENCE_NUMBER: Final = "x-opt-sequence-number"

#: Messages on the way to a reader; half of them are asked for again when they have come.
CREDIT: Final = 1_000
#: Bytes of those, as far as the sizes of messages tell: large messages get less credit.
CREDIT_BYTES: Final = 16 * 1024 * 1024
#: Credit of a link before the first message has told how large its messages are.
_FIRST_CREDIT: Final = 16

#: Properties of a link that stages messages, without their prefix: the request that asks how much of them
#: has arrived has the same fields.
_PREFIX: Final = "amqp_rt:"
_STAGE_FIELDS: Final = ("producer", "run", "epoch", "part", "attempt")
PRODUCER: Final = "amqp_rt:producer"
#: Of a link that goes on with what an earlier one has staged.
_RESUMES: Final = "amqp_rt:resumes"

_log = logging.getLogger("amqp_rt_spark")

#: ``snd-settle-mode`` of a link whose messages are all settled by their sender (Part 2 §2.8.2).
SND_SETTLED: Final = 1

_CLOCK: Final = SystemClock()
#: After so many seconds without use, a connection is looked at for as many before it is used again: the
#: peer may have said meanwhile that it is over.
_IDLE_S: Final = 1.0
_GLANCE_S: Final = 0.01
#: For an answer that some brokers do not give.
_ECHO_S: Final = 1.0


class DataLost(AmqpError):
    """Messages that were to be read are not there any more."""

    default_condition = "amqp:not-found"


class Endpoint(Struct, frozen=True):
    """Where a broker is, and who we are there. It holds no secret, only where one is kept."""

    url: str
    credentials_file: str = ""
    credentials_env: str = ""
    mechanism: str = ""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    container_id: str = ""
    timeout_s: float = 30.0
    #: Seconds for which a loss of the broker is borne; 0 for not at all.
    retry_s: float = 120.0


def _secret(endpoint: Endpoint) -> tuple[str, str] | None:
    """User and password, from where they are kept: one line, ``user:password``."""
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
    """One end of a link: hears it, and says what became of it."""

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
    """Credit by messages and by bytes: how many messages to ask for next.

    Credit counts messages, and a reader has to have room for their bytes. So the sizes of those that came
    last tell how many more there may be.

    Args:
        most: Messages at most; it may be changed.
        max_bytes: Bytes of them, or else one message.
    """

    def __init__(self, most: int, max_bytes: int = CREDIT_BYTES) -> None:
        self.most = most
        self._max_bytes = max_bytes
        self._mean = 0.0

    def note(self, count: int, size: int) -> None:
        """Learn from *count* messages of *size* bytes together."""
        if count:
            mean = size / count
            # Larger ones count at once, smaller ones little by little.
            self._mean = mean if mean > self._mean else (3 * self._mean + mean) / 4

    @property
    def credit(self) -> int:
        """Messages to ask for."""
        if not self._mean:
            return min(self.most, _FIRST_CREDIT)
        return max(min(self.most, int(self._max_bytes / self._mean)), 1)


class _Inbox(_End):
    """Keeps what comes, until it is taken. Whatever is not settled is answered with *outcome*."""

    def __init__(self, outcome: Any, credit: int = CREDIT) -> None:
        super().__init__()
        self.ready: deque[bytes] = deque()
        self.window = Window(credit)
        #: Everything there is has been asked for, up to so many messages, and so many came of it.
        self.asked = 0
        self.came = 0
        #: The sender has spoken of its credit.
        self.answered = False
        self._outcome = outcome

    def take(self) -> list[bytes]:
        """Return what is ready, and remove it."""
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
        """Nothing is streamed here."""

    def on_settled(self, link: Any, deliveries: list[Any]) -> None:
        """Nobody waits for it."""

    def on_flow(self, link: Any) -> None:
        self.answered = True


class _Basket(_End):
    """Keeps deliveries until they are taken, and says nothing of them."""

    def __init__(self) -> None:
        super().__init__()
        self.ready: list[Any] = []
        #: The broker has spoken of the credit that was granted last.
        self.answered = False

    def deliver(self, link: Any, deliveries: list[Any]) -> None:
        self.ready += deliveries

    def on_data(self, link: Any, deliveries: list[Any]) -> None:
        """Nothing is streamed here."""

    def on_settled(self, link: Any, deliveries: list[Any]) -> None:
        """What the broker has settled by itself is answered all the same, in vain."""

    def on_flow(self, link: Any) -> None:
        self.answered = True


class _Outbox(_End):
    """Only its link is looked at."""

    def on_credit(self, link: Any) -> None:
        """Whoever waits for credit looks at the link."""

    def on_outcomes(self, link: Any, deliveries: list[Any]) -> None:
        """Whoever waits for outcomes looks at the deliveries."""


class Outlet:
    """Sends messages that are encoded already.

    At most *max_in_flight* messages and *max_bytes* bytes are unanswered, or else one message. Until its
    answer a message is kept: the bound is what a task takes in memory, and what is sent again if the
    broker is lost. Of a link that stages messages the broker says what it has, so that each is staged
    once; of any other, messages whose answer was lost are sent twice.

    Attributes:
        count: Messages that were accepted.
        crc: CRC-32 over those, in order.
        refused: Messages that were not, if they may be.
        refusals: The last of those, with what the broker has said, until somebody takes them away.
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
        self._unanswered: deque[tuple[Any, bytes]] = deque()
        #: What has to be sent again, in order, after what is unanswered.
        self._unsent: deque[bytes] = deque()
        self._patience = Patience(wire.endpoint.retry_s)
        self._attach(wire, self._claim)
        #: What the broker says of the link, and what it can do.
        self.properties: Mapping[Any, Any] = self._link.properties
        self.capabilities: tuple[str, ...] = self._link.offered_capabilities

    def send(self, payload: bytes) -> None:
        """Send *payload* as soon as there is room for it.

        Raises:
            DeliveryRejected: The broker did not take one of those that were sent.
            LinkDetached: The link is over.
            AmqpError: The broker stays away, or has no room, for too long.
        """
        try:
            self._give(payload)
        except AmqpError as error:
            self._unsent.append(payload)
            self._resume(error)

    def finish(self) -> None:
        """Wait until everything has been answered, and let the link go.

        Raises:
            DeliveryRejected: The broker did not take one of those that were sent.
            LinkDetached: The link is over.
            AmqpError: The broker stays away for too long.
        """
        while True:
            try:
                self._wait(lambda: not self._settled(), self._timeout_s)
                break
            except AmqpError as error:
                self._resume(error)
        self.close()

    def close(self) -> None:
        """Let the link go."""
        # All that counts has been answered: whoever uses the connection next notices its end.
        with contextlib.suppress(AmqpError):
            if not self._end.over and not self._wire.gone:
                self._link.detach()
                self._wire.connection.flush(timeout_s=self._timeout_s)

    def _attach(self, wire: Wire, properties: Mapping[Any, Any]) -> None:
        end = _Outbox()
        link = wire.session.attach_sender(
            wire.name(), end, target=Target(address=self._address), properties=properties or None
        )
        wire.wait(lambda: end.over or end.attached, self._timeout_s)
        # A refusal is an attach without a target, and a detach after it (Part 2 §2.6.3).
        if end.over or link.target is None:
            wire.wait(lambda: end.over, self._timeout_s)
            raise wire.ended(end, f"cannot send to {self._address!r}", LinkRefused)
        self._wire, self._end, self._link = wire, end, link

    def _give(self, payload: bytes) -> None:
        link = self._link
        size = min(len(payload), self._max_bytes)
        if not (
            link.credit
            and link.writable
            and len(self._unanswered) < self._most
            and size <= self._room
        ):
            self._await_room(size)
        delivery = link.send(payload)
        self._room -= size
        self._unanswered.append((delivery, payload))

    def _await_room(self, size: int) -> None:
        """Wait until a message of *size* bytes may be sent.

        Raises:
            DeadlineExceeded: The broker gives no credit, or no answer to what was sent.
        """
        link = self._link

        def free() -> bool:
            return bool(
                link.credit
                and link.writable
                and self._settled() < self._most
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
                ": what is staged there has reached the broker's limit staged_bytes_max, or its memory is "
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
        """Attach again after a loss of the broker, and send what it does not have.

        Raises:
            AmqpError: *error* is no loss, or the broker stays away for too long; or the broker has not
                kept what it had accepted.
        """
        endpoint = self._wire.endpoint
        while True:
            if not self._staged and isinstance(error, DeadlineExceeded):
                # The broker is there, and slow: it may have all of it.
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
        """Put what was unanswered when the link ended in front of what has to be sent again, but for
        what the broker has of it."""
        self._settled()
        self._unsent.extendleft(payload for _, payload in reversed(self._unanswered))
        self._unanswered.clear()
        self._room = self._max_bytes
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
            self.crc = zlib.crc32(self._unsent.popleft(), self.crc)
            self.count += 1
        if (self.count, self.crc) != (kept, crc):
            raise AmqpError(
                f"{self._address!r} has {kept} messages with the checksum {crc:#010x} of what was staged, and "
                f"had accepted {self.count} with {self.crc:#010x}: its store has lost them, or it has "
                "none; the task has to be done again",
                condition="amqp:precondition-failed",
            )

    def _settled(self) -> int:
        """Look at the oldest ones; how many have no answer yet."""
        while self._unanswered and self._unanswered[0][0].settled:
            delivery, payload = self._unanswered.popleft()
            self._room += min(len(payload), self._max_bytes)
            state = delivery.state
            if isinstance(state, Accepted):
                self.count += 1
                self.crc = zlib.crc32(payload, self.crc)
                continue
            error = state.error if isinstance(state, Rejected) else None
            if error is None:
                error = Error("amqp:not-accepted", "it was not accepted")
            if not self._skip:
                raise DeliveryRejected(
                    f"{self._address!r} did not take a message: {error.description or error.condition}",
                    condition=str(error.condition),
                )
            self.refused += 1
            if self._keep_refused:
                self.refusals.append((payload, error))
        return len(self._unanswered)


class Drain:
    """Takes what waits in a queue, and leaves it unsettled until it is said what becomes of it.

    The link has a session of its own, with which it goes: some brokers keep what is unsettled on a link
    that is gone until its session ends (RabbitMQ 3), and all give it back then.

    Raises:
        LinkRefused: The queue cannot be read.
        AmqpError: The broker knows no selector, and would give messages that are not wanted.
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
            # RabbitMQ before 4.0 says yes to any filter, and has none.
            known = not wire.engine.peer_miscounts and (self._link.source.filter or {})
            if selector and not (known and Symbol("selector") in known):
                raise AmqpError(
                    f"{address!r} cannot be read with a selector: the broker passes it over",
                    condition="amqp:not-implemented",
                )
            if self._link.snd_settle_mode == 1:
                raise AmqpError(
                    f"{address!r} sends messages settled: what it sends is lost if it is not kept in time",
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
        """The link has ended: others get what was taken and not settled."""
        return self._basket.over or self._wire.over

    def take(self, most: int) -> list[Any]:
        """Up to *most* deliveries: fewer only if the queue had no more when it was asked.

        Raises:
            LinkDetached: The link has ended.
        """
        link, basket = self._link, self._basket
        basket.answered = False
        # RabbitMQ before 4.0 ends the session when it has less than it is to drain; but it says how much
        # there is.
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
        """Let the link go; what has no outcome goes back. What was settled is settled afterwards."""
        connection = self._wire.connection
        if connection.over:
            return
        try:
            if not self._basket.over and self._basket.attached:
                # The answer says that everything before it has been heard.
                self._link.detach()
                self._wire.wait(lambda: self._basket.over, self._wire.endpoint.timeout_s)
            self._session.end()
            connection.flush(timeout_s=self._wire.endpoint.timeout_s)
        except AmqpError:
            # Whoever uses the connection next will see that.
            pass


class Wire:
    """A connection to the broker at *endpoint*, and what is done there.

    Raises:
        ConnectFailed: One sentence says where, and why not.
        ValueError: The endpoint is not one.
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
            # Links of one container and name are one link (Part 2 §2.6.1): each connection is another.
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
        """A name for a link."""
        return f"spark-{next(self._numbers)}"

    def wait(self, done: Any, timeout_s: float) -> None:
        """Let the connection go on until *done()*.

        Raises:
            DeadlineExceeded: It was not in time.
            ConnectionLost: The connection ended before.
        """
        self.connection.run_until(done, timeout_s=timeout_s)
        self._used_at = _CLOCK.monotonic()

    @property
    def gone(self) -> bool:
        """Whether the connection has ended."""
        return self.connection.over or self.engine.finished

    def ended(self, end: _End, what: str, kind: type[AmqpError]) -> AmqpError:
        """Return the error of a link that is over: one of *kind*, or :class:`ConnectionLost` if its
        connection has ended and the link with it."""
        if not self.gone:
            return end.failure(what, kind)
        error = self.connection.error or Error("amqp:connection:forced", "the connection has ended")
        return ConnectionLost(
            f"{what}: {error.description or error.condition}", condition=str(error.condition)
        )

    @property
    def named_by(self) -> str:
        """The application property by which the broker knows messages that it has had; empty if it goes by
        the ``message-id``, or does not know them."""
        product = self.engine.peer.properties.get("product")
        return "_AMQ_DUPL_ID" if product == "apache-activemq-artemis" else ""

    @property
    def over(self) -> bool:
        """Nothing can be done with it any more."""
        if not self.connection.over and _CLOCK.monotonic() - self._used_at > _IDLE_S:
            self.connection.run_for(_GLANCE_S)
        # Some brokers end the session where others refuse a link.
        return self.gone or self.session.ended

    # --- requests ---

    def call(self, address: str, operation: str, body: Any = None, **given: Any) -> Any:
        """The answer of ``<address>/$management`` to *operation*.

        Raises:
            AmqpError: It cannot be done; the condition is the broker's.
        """
        try:
            return self._call(address, operation, body, given)
        except (LinkRefused, DeadlineExceeded) as error:
            # Ours says nothing of a product, unless somebody has it say so.
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
        """The answer of *node* to a request with *properties*, at a broker without dynamic addresses: the
        name of our target is what it answers to.

        Raises:
            AmqpError: It cannot be done.
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
        """The names of the nodes of *kind*, such as ``amqp_rt.log``, which we may manage.

        Raises:
            AmqpError: The broker does not say.
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
        """Yield what :meth:`records` yields, one record at a time and decoded."""
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

        It ends by the offset, not by a count: a record is left out only if *selector* refuses it.

        With *batches* the broker is asked to send many records in one message. Where it does, records are as
        they are kept, without the annotations that say their place, and their times are beside them (in
        milliseconds since 1970).

        Raises:
            DecodeError: What the broker has sent is not a batch.
            DataLost: The log is another one by now, or retention was faster, unless it *may_lose*
                records.
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
            # Records and messages that have come: what is in a message, on average.
            records = messages = 0
            while expected < end:
                # What comes behind the end would be sent for nothing.
                wanted = end - expected
                if batches:
                    wanted = max(wanted * messages // max(records, 1), 1)
                inbox.window.most = min(credit, wanted)
                self._next(link, inbox, node, draining=bool(selector))
                if not inbox.ready:
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
        """The offset of the first record at *position*, as ``rabbitmq:stream-offset-spec`` takes it;
        None if there is none yet."""
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
        """The offsets of the records from *position* on, as far as there are some."""
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
        """Yield what :meth:`browsed` yields, one message at a time and decoded."""
        for payloads in self.browsed(address, **how):
            yield from map(decoded, payloads)

    def browsed(
        self, address: str, *, selector: str = "", most: int | None = None, credit: int = CREDIT
    ) -> Iterator[list[bytes]]:
        """Yield copies of what waits in a queue, *most* of them at most; nothing is taken away.

        Without *most* it is as many as the broker says that there are, if it says so; else it ends when
        there are no more for a moment.

        Raises:
            AmqpError: The queue cannot be read, or not without taking messages away.
        """
        filters: dict[Any, Any] = {}
        if selector:
            filters[Symbol("selector")] = selector_filter(selector)
        inbox = _Inbox(RELEASED, credit)
        source = Source(address=address, distribution_mode=COPY, filter=filters or None)
        link = self.receive(address, inbox, source)
        taken = 0
        try:
            # RabbitMQ before 4.0 says yes to this, too, and takes them.
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
        """Yield copies of messages that a group has leased; *properties* say which ones."""
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
        """A link from *source* to *inbox*: a basket is sent nothing that is settled already, others are
        sent nothing else.

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
        """How many messages there are for *link*, if its sender says so."""
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
    ) -> None:
        """Wait until something is ready, or with *draining* until there is nothing; with *short* until
        there was nothing once.

        No more is read from the socket than it takes: what is on its way waits there.
        """

        def drained() -> bool:
            return draining and link.credit == 0 and not link.arriving

        def done() -> bool:
            return bool(inbox.ready) or inbox.over or drained()

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
            self.wait(done, self.endpoint.timeout_s)

    def _leave(self, link: Any, inbox: _Inbox) -> None:
        if inbox.over or self.connection.over:
            return
        link.detach()
        try:
            self.wait(lambda: inbox.over, self.endpoint.timeout_s)
        except AmqpError:
            # Whoever uses the connection next will see that.
            pass


def _taken(
    inbox: _Inbox, spelling: Spelling, *, batches: bool
) -> Iterator[tuple[list[int], list[bytes], list[int] | None]]:
    """Yield the offsets, the octets and the times of what is ready, which is single messages or *batches*.

    Raises:
        DecodeError: A batch is malformed, or the annotations of a message are.
    """
    if not batches:
        payloads = inbox.take()
        yield spelling.numbers(payloads), payloads, None
        return
    # One at a time, so that few records are there twice.
    while inbox.ready:
        offsets, times, payloads = _compiled_records(inbox.ready.popleft())
        yield offsets, payloads, times


class Spelling:
    """How a broker spells its logs. This is ours; those of others are in :mod:`.dialects`."""

    def node(self, address: str, partition: int) -> str:
        """The address of a partition."""
        return f"{address}/partitions/{partition}"

    def begin(self, position: Any) -> dict[Any, Any]:
        """Filters of a source that begins at *position*: an offset, a timestamp, ``first`` or ``last``."""
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
    """The spelling of our broker, which puts the number of a record at a place that can be looked at."""

    def numbers(self, payloads: list[bytes]) -> list[int]:
        return numbers(payloads)


#: Our own.
OURS: Final = _Ours()


def offset_spec(position: Any) -> Described:
    """Where in a log to begin, as RabbitMQ spells it for its streams."""
    return Described(Symbol("rabbitmq:stream-offset-spec"), position)


def selector_filter(selector: str) -> Described:
    """A filter by an SQL-like condition."""
    return Described(Symbol("apache.org:selector-filter:string"), selector)


_HEADER_BEGIN: Final = b"\x00\x53\x70\xc0"
_ANNOTATIONS_BEGIN: Final = b"\x00\x53\x72\xc1"
_FIRST_KEY: Final = b"\xa3\x0cx-opt-offset\xa1"
_SECOND_KEY: Final = b"\xa3\x15x-opt-sequence-number"


def numbers(payloads: list[bytes]) -> list[int]:
    """Return the number that our broker has given to each record of a log, or message of a lease.

    Raises:
        DecodeError: The annotations of one are malformed.
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
    """Return the number of a record whose annotations are, or begin with, those of our broker.

    Most records have these and no other, so that the map need not be decoded. ``numbers`` of the compiled
    module does the same.
    """
    at = 5 + payload[4] if payload.startswith(_HEADER_BEGIN) and len(payload) > 4 else 0
    if payload.startswith(_ANNOTATIONS_BEGIN, at) and payload.startswith(_FIRST_KEY, at + 6):
        # Past the first key, and its text with its size.
        at += 21
        at += 1 + int.from_bytes(payload[at : at + 1])
        if payload.startswith(_SECOND_KEY, at):
            # A long, or a small one.
            for constructor, width in ((b"\x81", 8), (b"\x55", 1)):
                number = payload[at + 24 : at + 24 + width]
                if payload.startswith(constructor, at + 23) and len(number) == width:
                    return int.from_bytes(number, signed=True)
    return None


def lost(node: str, first: int, end: int) -> str:
    """The sentence about records that are gone."""
    return (
        f"{node}: the records from {first} to {end - 1} are gone, since retention was faster; "
        "failOnDataLoss=false goes on without them"
    )


#: The connections of this process. A fork has to make its own.
_WIRES: Final[dict[tuple[int, Endpoint], Wire]] = {}


def wire(endpoint: Endpoint) -> Wire:
    """This process's connection to *endpoint*, made if there is none that lives.

    Raises:
        ConnectFailed: One sentence says where, and why not.
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
    """Do *work* with this process's connection to *endpoint*, again after each loss of the broker.

    Raises:
        AmqpError: It cannot be done, or the broker stays away for longer than ``retry_s``.
    """
    patience = Patience(endpoint.retry_s)
    while True:
        try:
            return work(wire(endpoint))
        except AmqpError as error:
            patience.bear(error)
            forget(endpoint)


def call(endpoint: Endpoint, address: str, operation: str, body: Any = None, **given: Any) -> Any:
    """Return the answer of ``<address>/$management``, asked again after each loss of the broker: for
    operations that may be done again.

    Raises:
        AmqpError: As for :func:`retried`.
    """
    return retried(endpoint, lambda there: there.call(address, operation, body, **given))


def records(
    endpoint: Endpoint, address: str, partition: int, start: int, end: int, **how: Any
) -> Iterator[tuple[list[int], list[bytes], list[int] | None]]:
    """Yield what :meth:`Wire.records` yields; after a loss of the broker it goes on at the next offset.

    Raises:
        AmqpError: As for :meth:`Wire.records` and :func:`retried`.
    """
    patience = Patience(endpoint.retry_s)
    while start < end:
        try:
            for found in wire(endpoint).records(address, partition, start, end, **how):
                # Before the lists are given away.
                after = found[0][-1] + 1
                yield found
                start = after
            return
        except AmqpError as error:
            patience.bear(error, start)
            forget(endpoint)


def browsed(endpoint: Endpoint, address: str, **how: Any) -> Iterator[list[bytes]]:
    """Yield what :meth:`Wire.browsed` yields; a loss of the broker before the first message is borne.

    A queue has no place to go on at, so that a later one ends the task, which is then done again.

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
