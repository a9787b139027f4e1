"""Blocking AMQP connections, without an event loop, for the processes that Spark starts.

A reader runs in a short-lived process that is forked, makes plain calls, and is killed without notice. So
this module runs the engine over a blocking socket (:mod:`amqp_rt.net.blocking`); nothing here imports
trio, unless the URL requires TLS.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Generator, Iterator, Mapping
from itertools import count
from typing import Any, Final, Self

from amqp_rt import Message
from amqp_rt.addresses import parse_url
from amqp_rt.batches import RECORD_BATCHES, read_records
from amqp_rt.clock import SystemClock
from amqp_rt.errors import (
    AmqpError,
    ConnectionLost,
    DeadlineExceeded,
    LinkDetached,
    LinkRefused,
)
from amqp_rt.fronts import amqp10
from amqp_rt.net.blocking import connect_blocking
from amqp_rt.outcomes import ACCEPTED, RELEASED, Error
from amqp_rt.termini import COPY, Source, Target
from amqp_rt.values import Symbol

from .data_loss import DataLost, describe_loss
from .endpoints import Endpoint, mechanism_of
from .link_ends import CREDIT, SND_SETTLED, Basket, Inbox, LinkEnd, Outbox
from .malformed import decoded
from .spelling import OURS, Spelling, selector_filter

try:
    from ._columnar import records as _compiled_records
except ImportError:
    _compiled_records = read_records

#: ``x-opt-incarnation``: property of a log's links that distinguishes it from others of its name.
INCARNATION: Final = Symbol("x-opt-incarnation")

_CLOCK: Final = SystemClock()
#: Seconds without use after which a connection is polled before reuse, and seconds of that poll: the peer
#: may have closed it meanwhile.
_IDLE_S: Final = 1.0
_GLANCE_S: Final = 0.01
#: Seconds without a record after which a log is asked whether there are any.
_SILENT_S: Final = 1.0
#: Time limit for an answer that some brokers do not give.
_ECHO_S: Final = 1.0


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
            mechanisms=(mechanism_of(endpoint),),
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
        self._replies: tuple[Inbox, Any] | None = None
        self._requests: dict[str, tuple[Outbox, Any]] = {}

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

    def ended(self, end: LinkEnd, what: str, kind: type[AmqpError]) -> AmqpError:
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
            outbox = Outbox()
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
        inbox, outbox, number = Inbox(ACCEPTED), Outbox(), self.name()
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

    def _reply_link(self) -> tuple[Inbox, Any]:
        if self._replies is None or self._replies[0].over:
            inbox = Inbox(ACCEPTED)
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
        inbox = Inbox(ACCEPTED, credit)
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
                        raise DataLost(describe_loss(node, expected, end))
                    break
                for offsets, payloads, times in _taken(inbox, spelling, batches=batches):
                    messages += 1 if batches else len(offsets)
                    records += len(offsets)
                    for at, offset in enumerate(offsets):
                        if offset > expected and not selector and not may_lose:
                            raise DataLost(describe_loss(node, expected, min(offset, end)))
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
        inbox = Inbox(ACCEPTED, credit)
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
        inbox = Inbox(RELEASED, credit)
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
        inbox = Inbox(ACCEPTED, credit)
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
        inbox: Inbox | Basket,
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
        settled = 0 if isinstance(inbox, Basket) else SND_SETTLED
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

    def _available(self, link: Any, inbox: Inbox) -> int | None:
        """Return how many messages are available for *link*, None if its sender does not report it."""
        link.grant(0, echo=True)
        with contextlib.suppress(DeadlineExceeded):
            self.wait(lambda: inbox.over or inbox.answered, _ECHO_S)
        return int(link.available) or None

    def _next(
        self,
        link: Any,
        inbox: Inbox,
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

    def _leave(self, link: Any, inbox: Inbox) -> None:
        if inbox.over or self.connection.over:
            return
        link.detach()
        try:
            self.wait(lambda: inbox.over, self.endpoint.timeout_s)
        except AmqpError:
            # The next use of the connection notices the loss.
            pass


def _taken(
    inbox: Inbox, spelling: Spelling, *, batches: bool
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
