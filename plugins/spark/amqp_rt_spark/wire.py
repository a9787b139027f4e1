"""AMQP in the calling thread: what the processes that Spark starts need, and no event loop.

A reader lives in a short-lived process that is forked, runs plain calls, and is killed without
notice. So this is the engine over a blocking socket (:mod:`amqp_rt.net.blocking`); nothing here
imports trio, unless the URL says TLS. A process keeps the connections it has made and uses them
again: a task is then not charged a handshake.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import zlib
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from itertools import count
from typing import Any, Final, Self

from msgspec import Struct

from amqp_rt import Anonymous, External, Message, Plain, Scram
from amqp_rt.addresses import parse_url
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

from .malformed import decoded

#: ``x-opt-incarnation``: the property of a log's links that tells it from others of its name.
INCARNATION: Final = Symbol("x-opt-incarnation")
SEQUENCE_NUMBER: Final = "x-opt-sequence-number"

#: Messages on the way to a reader; half of them are asked for again when they have come.
CREDIT: Final = 1_000

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


class _Inbox(_End):
    """Keeps what comes, until it is taken. Whatever is not settled is answered with *outcome*."""

    def __init__(self, outcome: Any) -> None:
        super().__init__()
        self.ready: deque[bytes] = deque()
        #: Everything there is has been asked for, and so many messages came of it.
        self.asked = False
        self.came = 0
        #: The sender has spoken of its credit.
        self.answered = False
        self._outcome = outcome

    def deliver(self, link: Any, deliveries: list[Any]) -> None:
        self.came += len(deliveries)
        for delivery in deliveries:
            self.ready.append(delivery.payload)
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
    answer a message is kept: the bound is what a task takes in memory.

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
        skip: bool = False,
        keep_refused: bool = False,
    ) -> None:
        self.count = 0
        self.crc = 0
        self.refused = 0
        self.refusals: list[tuple[bytes, Error]] = []
        self._keep_refused = keep_refused
        self._wire = wire
        self._address = address
        self._most = max_in_flight
        self._room = self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._skip = skip
        self._unanswered: deque[tuple[Any, bytes]] = deque()
        self._end = _Outbox()
        self._link = wire.session.attach_sender(
            wire.name(), self._end, target=Target(address=address), properties=properties
        )
        wire.wait(lambda: self._end.over or self._end.attached, timeout_s)
        # A refusal is an attach without a target, and a detach after it (Part 2 §2.6.3).
        if self._end.over or self._link.target is None:
            wire.wait(lambda: self._end.over, timeout_s)
            raise self._end.failure(f"cannot send to {address!r}", LinkRefused)
        #: What the broker says of the link, and what it can do.
        self.properties: Mapping[Any, Any] = self._link.properties
        self.capabilities: tuple[str, ...] = self._link.offered_capabilities

    def send(self, payload: bytes) -> None:
        """Send *payload* as soon as there is room for it.

        Raises:
            DeliveryRejected: The broker did not take one of those that were sent.
            LinkDetached: The link is over.
        """
        link = self._link
        size = min(len(payload), self._max_bytes)
        if not (
            link.credit
            and link.writable
            and len(self._unanswered) < self._most
            and size <= self._room
        ):
            self._wait(
                lambda: bool(
                    link.credit
                    and link.writable
                    and self._settled() < self._most
                    and size <= self._room
                )
            )
        self._room -= size
        self._unanswered.append((link.send(payload), payload))

    def finish(self) -> None:
        """Wait until everything has been answered, and let the link go.

        Raises:
            DeliveryRejected: The broker did not take one of those that were sent.
            LinkDetached: The link is over.
        """
        self._wait(lambda: not self._settled())
        self.close()

    def close(self) -> None:
        """Let the link go."""
        if not self._end.over and not self._wire.connection.over:
            self._link.detach()
            self._wire.connection.flush(timeout_s=self._timeout_s)

    def _wait(self, done: Any) -> None:
        self._wire.wait(lambda: self._end.over or done(), self._timeout_s)
        if self._end.over:
            raise self._end.failure(f"sending to {self._address!r} has ended", LinkDetached)

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
            raise basket.failure(f"reading {self._address!r} has ended", LinkDetached)
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
        return self.connection.over or self.session.ended

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
                raise outbox.failure(f"{node!r} cannot be asked", LinkRefused)
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
            raise outbox.failure(f"{node!r} cannot be asked", LinkDetached)
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
            raise (inbox if inbox.over else outbox).failure(
                f"{node!r} did not answer", LinkDetached
            )
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
                raise (inbox if inbox.over else outbox).failure(
                    f"{node!r} cannot be asked", LinkRefused
                )
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
                raise inbox.failure("the broker makes no addresses for replies", LinkRefused)
            receiver.grant(10)
            self._replies = inbox, receiver
        return self._replies

    # --- reading ---

    def read(
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
    ) -> Iterator[tuple[int, Message]]:
        """The records of a log from offset *start* on and before *end*, all of which are there.

        It ends by the offset, not by a count: a record is left out only if *selector* refuses it.

        Raises:
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
        inbox = _Inbox(ACCEPTED)
        link = self.receive(node, inbox, Source(address=node, filter=filters))
        found = str(link.properties.get(INCARNATION, ""))
        try:
            if incarnation and found != incarnation:
                raise DataLost(
                    f"{address!r} was deleted and made again: it is the log {found}, and the "
                    f"offsets are of {incarnation}"
                )
            expected = start
            while expected < end:
                self._next(link, inbox, node, credit, draining=bool(selector))
                if not inbox.ready:
                    break
                while inbox.ready and expected < end:
                    payload = inbox.ready.popleft()
                    message = decoded(payload)
                    offset = spelling.number(payload, message)
                    if offset > expected and not selector and not may_lose:
                        raise DataLost(lost(node, expected, min(offset, end)))
                    expected = offset + 1
                    if offset < end:
                        yield offset, message
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
        inbox = _Inbox(ACCEPTED)
        link = self.receive(node, inbox, Source(address=node, filter=spelling.begin(position)))
        try:
            while True:
                self._next(link, inbox, node, credit, draining=True)
                if not inbox.ready:
                    return
                while inbox.ready:
                    payload = inbox.ready.popleft()
                    yield spelling.number(payload, decoded(payload))
        finally:
            self._leave(link, inbox)

    def browse(
        self, address: str, *, selector: str = "", most: int | None = None, credit: int = CREDIT
    ) -> Iterator[Message]:
        """Copies of what waits in a queue, *most* of them at most; nothing is taken away.

        Without *most* it is as many as the broker says that there are, if it says so; else it ends when
        there are no more for a moment.

        Raises:
            AmqpError: The queue cannot be read, or not without taking messages away.
        """
        filters: dict[Any, Any] = {}
        if selector:
            filters[Symbol("selector")] = selector_filter(selector)
        inbox = _Inbox(RELEASED)
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
                self._next(link, inbox, address, credit, draining=True, short=most is None)
                if not inbox.ready:
                    return
                while inbox.ready and (most is None or taken < most):
                    taken += 1
                    yield decoded(inbox.ready.popleft())
        finally:
            self._leave(link, inbox)

    def leased(
        self, address: str, properties: Mapping[Any, Any], *, credit: int = CREDIT
    ) -> Iterator[Message]:
        """Copies of messages that a group has leased; *properties* say which ones."""
        inbox = _Inbox(ACCEPTED)
        source = Source(address=address, distribution_mode=COPY)
        link = self.receive(address, inbox, source, properties)
        try:
            while True:
                self._next(link, inbox, address, credit, draining=True)
                if not inbox.ready:
                    return
                while inbox.ready:
                    yield decoded(inbox.ready.popleft())
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
    ) -> Any:
        """A link from *source* to *inbox*: a basket is sent nothing that is settled already, others are
        sent nothing else.

        Raises:
            LinkRefused: *what* cannot be read.
        """
        settled = 0 if isinstance(inbox, _Basket) else 1
        link = (session or self.session).attach_receiver(
            self.name(), inbox, source=source, snd_settle_mode=settled, properties=properties
        )
        self.wait(lambda: inbox.over or inbox.attached, self.endpoint.timeout_s)
        if inbox.over or link.source is None:
            self.wait(lambda: inbox.over, self.endpoint.timeout_s)
            raise inbox.failure(f"{what!r} cannot be read", LinkRefused)
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
        credit: int,
        *,
        draining: bool,
        short: bool = False,
    ) -> None:
        """Wait until something is ready, or with *draining* until there is nothing; with *short* until
        there was nothing once.

        No more is read from the socket than it takes: what is on its way waits there.
        """
        while not inbox.ready:
            if draining and link.credit == 0 and not link.arriving:
                if inbox.asked and inbox.came < (credit if short else 1):
                    return
                inbox.asked, inbox.came = True, 0
                link.grant(credit)
                link.drain()
            elif not draining and link.credit <= credit // 2:
                link.grant(credit)
            self.wait(
                lambda: (
                    inbox.ready
                    or inbox.over
                    or (draining and link.credit == 0 and not link.arriving)
                ),
                self.endpoint.timeout_s,
            )
            if inbox.over and not inbox.ready:
                raise inbox.failure(f"reading {what!r} has ended", LinkDetached)

    def _leave(self, link: Any, inbox: _Inbox) -> None:
        if inbox.over or self.connection.over:
            return
        link.detach()
        try:
            self.wait(lambda: inbox.over, self.endpoint.timeout_s)
        except AmqpError:
            # Whoever uses the connection next will see that.
            pass


class Spelling:
    """How a broker spells its logs. This is ours; those of others are in :mod:`.dialects`."""

    def node(self, address: str, partition: int) -> str:
        """The address of a partition."""
        return f"{address}/partitions/{partition}"

    def begin(self, position: Any) -> dict[Any, Any]:
        """Filters of a source that begins at *position*: an offset, a timestamp, ``first`` or ``last``."""
        return {Symbol("start"): offset_spec(position)}

    def number(self, payload: bytes, message: Message) -> int:
        """The offset of a record."""
        return _number(payload, message)


#: Our own.
OURS: Final = Spelling()


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


def _number(payload: bytes, message: Message) -> int:
    """The number of a record in its partition.

    Most records have the annotations that a log gives them, and no other: then it is found by its
    place, and the map stays as it came until somebody asks for it.
    """
    at = 5 + payload[4] if payload.startswith(_HEADER_BEGIN) else 0
    if payload.startswith(_ANNOTATIONS_BEGIN, at) and payload.startswith(_FIRST_KEY, at + 6):
        # Past the first key, and its text with its size.
        at += 21
        at += 1 + int.from_bytes(payload[at : at + 1])
        if payload.startswith(_SECOND_KEY, at):
            number = payload[at + 23 : at + 32]
            if number[:1] == b"\x81" and len(number) == 9:
                return int.from_bytes(number[1:], signed=True)
    return int(message.message_annotations[SEQUENCE_NUMBER])


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


def call(endpoint: Endpoint, address: str, operation: str, body: Any = None, **given: Any) -> Any:
    """The answer of ``<address>/$management``, asked twice if the connection breaks meanwhile: for
    operations that may be done again.

    Raises:
        AmqpError: It cannot be done.
    """
    try:
        return wire(endpoint).call(address, operation, body, **given)
    except (ConnectionLost, DeadlineExceeded):
        forget(endpoint)
        return wire(endpoint).call(address, operation, body, **given)
