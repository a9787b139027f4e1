"""Commands of class stream: consumers that keep up, or lose packets of low priority (0-10 §stream).

A packet leaves its queue when it is sent. Where there is no room on the way to the client it waits for some, as
long as no packets of higher priority, or newer ones of its own, need the place.
"""

from __future__ import annotations

from itertools import count
from typing import Any, Final, NamedTuple

from amqp_rt.fronts import LocalProtocolError, Payload, Source

from .assembling import Assembly
from .codec import write_command
from .consumers import (
    ConsumerLink,
    check_consume,
    no_global,
    source_of,
    start_consumer,
    take_consumer,
)
from .content_properties import STREAM, from_payload, to_content
from .content_transfers import ContentTransfer
from .contexts import Context
from .deliveries import Deliveries, OutgoingDelivery
from .handlers import Answer, Method
from .layouts import (
    AcceptMode,
    AcquireMode,
    Command,
    StreamCancel,
    StreamConsume,
    StreamConsumeOk,
    StreamDeliver,
    StreamProperties,
    StreamPublish,
    StreamQos,
    StreamQosOk,
)
from .limits import GIVEN_MAX, GIVEN_OCTETS, STREAM_WAITING_MAX, STREAM_WAITING_OCTETS_MAX
from .publishing import Publisher
from .recent import Delivered
from .serials import RangeSet
from .windows import Window

#: Priorities of packets, from 0.
_PRIORITIES: Final = 10
_CREDIT: Final = 1 << 31


class Packet(NamedTuple):
    """A packet on its way to a client."""

    command: bytes
    header: bytes
    body: list[bytes]
    size: int
    priority: int


class WaitingPackets:
    """Packets that wait for room, in their order; if there are too many, those of low priority are dropped."""

    def __init__(self) -> None:
        self.octets = 0
        self._packets: dict[int, Packet] = {}
        #: The same by priority: numbers of packets.
        self._levels: list[dict[int, None]] = [{} for _ in range(_PRIORITIES)]
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._packets)

    def first(self) -> Packet:
        """Return the oldest packet."""
        return self._packets[next(iter(self._packets))]

    def add(self, packet: Packet) -> None:
        """Add *packet*; drop packets of the lowest priority, the oldest first, while there are too many."""
        number = next(self._numbers)
        self._packets[number] = packet
        self._levels[packet.priority][number] = None
        self.octets += packet.size
        while len(self) > STREAM_WAITING_MAX or (
            self.octets > STREAM_WAITING_OCTETS_MAX and len(self) > 1
        ):
            level = next(each for each in self._levels if each)
            self._remove(next(iter(level)))

    def take(self) -> Packet:
        """Remove the oldest packet, and return it."""
        return self._remove(next(iter(self._packets)))

    def _remove(self, number: int) -> Packet:
        packet = self._packets.pop(number)
        del self._levels[packet.priority][number]
        self.octets -= packet.size
        return packet

    def clear(self) -> None:
        """Drop all packets."""
        self._packets.clear()
        for each in self._levels:
            each.clear()
        self.octets = 0


class StreamLink(ConsumerLink):
    """Link of a consumer of class stream.

    Args:
        context: Context of its session.
        tag: Tag of the consumer.
        source: The queue, with filters.
        window: Prefetch of the session.
        tags: Makes the delivery-tags of the session.
    """

    def __init__(
        self, context: Context, tag: str, source: Source, window: Window, tags: count[int]
    ) -> None:
        super().__init__(
            context,
            Deliveries(_nothing),
            tag,
            source,
            accept_mode=AcceptMode.NONE,
            acquire_mode=AcquireMode.PRE_ACQUIRED,
        )
        self._window = window
        self._tags = tags
        self.waiting = WaitingPackets()

    @property
    def credit(self) -> int:
        """Packets that may be sent now, whatever room there is.

        A consumer whose window is closed still takes packets, and drops those that it cannot keep. No rule says so:
        "the server MAY drop low-priority messages in favor of high-priority messages" (§stream.qos), and delivery
        is unreliable. Packets left in the queue would come late, and one slow consumer would hold up a live stream
        for the publisher. A queue that has to keep them has consumers of class message.
        """
        if not self.attached or not self.started or self.session_context.connection is None:
            return 0
        return _CREDIT

    @property
    def writable(self) -> bool:
        """Whether this turn has room."""
        connection = self.session_context.connection
        if connection is None:
            return False
        if connection.given < GIVEN_MAX:
            return True
        connection.thirsty[self] = None
        return False

    def offer_credit(self) -> None:
        """Send packets that wait for room; notify the queue."""
        self.send_waiting()
        super().offer_credit()

    def send(
        self,
        payload: Payload,
        context: Any = None,
        *,
        settled: bool | None = None,
        tag: bytes | None = None,
        message_format: int = 0,
        state: Any = None,
        more: bool = False,
    ) -> OutgoingDelivery:
        """Send one packet, or let it wait for room.

        Raises:
            LocalProtocolError: There is no credit, or 0-10 cannot carry the message.
        """
        connection = self.session_context.connection
        if self.credit <= 0 or connection is None:
            raise LocalProtocolError(f"consumer {self.destination!r} has no credit")
        if more or message_format != 0:
            raise LocalProtocolError("0-10 sends messages of format 0, and whole, here")
        delivered = from_payload(
            payload if isinstance(payload, bytes) else b"".join(payload),
            StreamProperties,
            address=self.address,
            limits=self.session_context.limits,
            recents=connection.recents,
        )
        number = next(self._tags)
        self.waiting.add(self._packet_of(delivered, number))
        connection.given += 1 + len(delivered.header) // GIVEN_OCTETS
        self.send_waiting()
        return OutgoingDelivery(self, number, context, True)

    def _packet_of(self, delivered: Delivered, number: int) -> Packet:
        command = StreamDeliver(
            consumer_tag=self.destination,
            delivery_tag=number,
            exchange=delivered.exchange,
            queue=self.address,
        )
        size = len(delivered.header) + sum(map(len, delivered.body))
        return Packet(
            write_command(command), delivered.header, delivered.body, size, delivered.priority
        )

    def send_waiting(self) -> None:
        """Send packets that wait, as far as window, session and output have room."""
        context, waiting, window = self.session_context, self.waiting, self._window
        while len(waiting) and window.covers(waiting.first().size):
            connection = context.connection
            if connection is None or not context.session.can_send:
                return
            if connection.output_size >= connection.limits.output_max:
                connection.thirsty[self] = None
                return
            packet = waiting.take()
            number = context.session.send(packet.command, packet.header, packet.body)
            if number < 0:
                return
            window.add(number, packet.size)

    def stop(self) -> None:
        """Drop the packets that wait."""
        self.waiting.clear()

    def _gather(self) -> None:
        self.waiting.clear()
        super()._gather()


class Streams:
    """Carries out the commands of class stream.

    Args:
        context: Context of the session.
        publisher: Its publisher.
    """

    def __init__(self, context: Context, publisher: Publisher) -> None:
        self._context = context
        self._publisher = publisher
        self._window = Window()
        self._tags = count(1)
        self._consumers: dict[str, StreamLink] = {}

    def methods(self) -> dict[type[Command], Method]:
        """Return the method for each command."""
        return {
            StreamQos: self.qos,
            StreamConsume: self.consume,
            StreamCancel: self.cancel,
            StreamPublish: self.publish,
        }

    # --- commands ---------------------------------------------------------------------------------

    def qos(self, number: int, command: StreamQos, assembly: Assembly) -> None:
        """Set how much the consumers of the session are sent before the client has completed it.

        A rate is not kept: packets come as fast as they are published.

        Raises:
            CommandFault: It is to apply to the connection (540).
        """
        if command.global_:
            raise no_global(3)
        self._window.count_max = command.prefetch_count or 0
        self._window.size_max = command.prefetch_size or 0
        self._context.session.send(write_command(StreamQosOk()), urgent=True)
        self._offer()

    def consume(self, number: int, command: StreamConsume, assembly: Assembly) -> Answer:
        """Attach a consumer to a queue; commands after it wait for that.

        Raises:
            CommandFault: Queue or tag are empty, or the tag is in use (530), there are too many consumers
                (506), or an argument is unknown (540).
        """
        tag = command.consumer_tag or ""
        check_consume(command.queue, tag, self._consumers, command.arguments, 5)
        link = StreamLink(
            self._context,
            tag,
            source_of(command.queue or "", STREAM, no_local=command.no_local),
            self._window,
            self._tags,
        )
        answer = StreamConsumeOk(consumer_tag=tag)
        return start_consumer(self._context, number, command, link, self._consumers, answer)

    def cancel(self, number: int, command: StreamCancel, assembly: Assembly) -> None:
        """End a consumer; packets that wait for room are dropped.

        Raises:
            CommandFault: There is no such consumer (404).
        """
        link = take_consumer(self._consumers, command.consumer_tag)
        self._context.anchor.drop(link)

    def publish(self, number: int, command: StreamPublish, assembly: Assembly) -> Answer:
        """Hand a packet to the queues that it is routed to; those without room drop it.

        Raises:
            CommandFault: The content is malformed (503), or 1.0 cannot hold a value (542).
        """
        body = assembly.body or ()
        connection = self._context.connection
        content = to_content(
            assembly.header,
            body,
            StreamProperties,
            StreamPublish.CODE,
            exchange=command.exchange or "",
            routing_key=command.routing_key or "",
            recents=None if connection is None else connection.recents,
        )
        transfer = ContentTransfer(self._publisher, number, command, assembly.header, body)
        steps = self._publisher.spread_content(command, transfer, content, None)
        return self._context.run(number, command, steps)

    # --- hooks of the session ---------------------------------------------------------------------

    def on_completed(self, commands: RangeSet) -> None:
        """Make room in the window for the packets among *commands*."""
        outstanding = self._window.outstanding
        if not outstanding:
            return
        for number in commands.among(outstanding):
            self._window.remove(number)
        self._offer()

    def on_ready(self) -> None:
        """Continue to send: the session has room again."""
        self._offer()

    def on_resumed(self) -> None:
        """Continue to send: the session is attached again."""
        self._offer()

    def on_suspended(self) -> None:
        """Drop the packets that wait: their time will be over."""
        for link in self._consumers.values():
            link.stop()

    def on_ended(self) -> None:
        """Forget the links, which end with the session."""
        self._consumers.clear()

    # --- private ----------------------------------------------------------------------------------

    def _offer(self) -> None:
        for link in list(self._consumers.values()):
            link.offer_credit()


def _nothing() -> None:
    """Tidy nothing: packets are settled when they are sent."""
