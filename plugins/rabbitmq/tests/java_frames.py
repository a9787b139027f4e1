"""Frames of RabbitMQ's client for Java, which no registry within reach has, written by hand.

Their fields and order are those of its published source (``AmqpConnection``, ``AmqpManagement``, ``AmqpPublisher`` and
``AmqpConsumer``, on ProtonJ2): what it sends, and which answers it takes.
"""

from __future__ import annotations

import struct
from typing import Any
from uuid import UUID, uuid4

import trio
from wire import SASL, frame

from amqp_rt.codec.composites import read_composite
from amqp_rt.codec.primitives import Reader
from amqp_rt.core.frames import AMQP_HEADER, SASL_HEADER
from amqp_rt.core.performatives import (
    PERFORMATIVES,
    Attach,
    Begin,
    Close,
    Detach,
    Disposition,
    Flow,
    Open,
    Transfer,
)
from amqp_rt.core.sasl_frames import SaslInit, SaslOutcome
from amqp_rt.message import Message
from amqp_rt.outcomes import ACCEPTED, Modified
from amqp_rt.termini import Source, Target
from amqp_rt.values import Array, Symbol

OUTCOMES = tuple(
    Symbol(f"amqp:{each}:list") for each in ("accepted", "rejected", "released", "modified")
)
PAIR = "management-link-pair"


class JavaClient:
    """Client of octets that speaks as the one for Java does, over one session for each purpose.

    Args:
        stream: Connection to the broker.
    """

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream = stream
        self._data = b""
        #: Frames received: channel, performative and payload.
        self.heard: list[tuple[int, Any, bytes]] = []
        #: Channel of the broker → ours.
        self._channels: dict[int, int] = {}
        self._deliveries: dict[int, int] = {}

    async def say(self, *frames: bytes) -> None:
        await self._stream.send_all(b"".join(frames))

    async def hear(self, kind: type, channel: int = 0) -> tuple[Any, bytes]:
        """Return the next frame of *kind* on *channel*, with its payload; each is returned once."""
        with trio.fail_after(10):
            while True:
                for at, (where, found, payload) in enumerate(self.heard):
                    if type(found) is kind and where == channel:
                        del self.heard[at]
                        return found, payload
                data = await self._stream.receive_some(65_536)
                if not data:
                    raise AssertionError(f"it ended before a {kind.__name__}, after {self.heard}")
                self._data += data
                self._cut()

    def _cut(self) -> None:
        data, at = self._data, 0
        while len(data) - at >= 8:
            if data[at : at + 4] == b"AMQP":
                at += 8
                continue
            size, doff, kind, channel = struct.unpack_from(">IBBH", data, at)
            if len(data) - at < size:
                break
            if size > doff * 4:
                reader = Reader(data, at + doff * 4, at + size)
                found = read_composite(reader, *(SASL if kind else PERFORMATIVES))
                if isinstance(found, Begin):
                    self._channels[channel] = found.remote_channel or 0
                ours = 0 if isinstance(found, Open | Close) else self._channels.get(channel, 0)
                self.heard.append((ours, found, data[reader.at : at + size]))
            at += size
        self._data = data[at:]

    # --- connection ------------------------------------------------------------------------

    async def open(self, user: str = "guest", password: str = "guest") -> Open:
        """Log in with PLAIN, and open; return the broker's open."""
        response = b"\0".join((b"", user.encode(), password.encode()))
        init = SaslInit(Symbol("PLAIN"), response, "127.0.0.1")
        await self.say(SASL_HEADER, frame(init, kind=1))
        outcome, _ = await self.hear(SaslOutcome)
        assert outcome.code == 0
        opening = Open(
            container_id=f"ID:{uuid4()}:1",
            hostname="vhost:/",
            max_frame_size=65_536,
            channel_max=65_535,
            idle_time_out=30_000,
            desired_capabilities=(Symbol("ANONYMOUS-RELAY"),),
            properties={Symbol("connection_name"): "java"},
        )
        await self.say(AMQP_HEADER, frame(opening))
        found, _ = await self.hear(Open)
        return found

    async def begin(self, channel: int) -> None:
        begin = Begin(
            next_outgoing_id=0,
            incoming_window=2**31 - 1,
            outgoing_window=2**31 - 1,
            handle_max=65_535,
        )
        await self.say(frame(begin, channel))
        await self.hear(Begin, channel)
        self._deliveries[channel] = 0

    async def close(self) -> None:
        await self.say(frame(Close()))
        closed, _ = await self.hear(Close)
        assert closed.error is None

    # --- links -----------------------------------------------------------------------------

    async def attach_sender(
        self, channel: int, handle: int, address: str | None, **fields: Any
    ) -> Attach:
        given = {
            "name": f"sender-{channel}-{handle}",
            "snd_settle_mode": 0,
            "target": Target(address=address),
            **fields,
        }
        attach = Attach(
            handle=handle,
            role=False,
            rcv_settle_mode=0,
            source=Source(address=given["name"], outcomes=OUTCOMES),
            initial_delivery_count=0,
            **given,
        )
        await self.say(frame(attach, channel))
        found, _ = await self.hear(Attach, channel)
        return found

    async def attach_receiver(
        self, channel: int, handle: int, source: Source, **fields: Any
    ) -> Attach:
        given = {"name": f"receiver-{channel}-{handle}", "snd_settle_mode": 0, **fields}
        source.default_outcome = Modified(delivery_failed=True)
        source.outcomes = OUTCOMES
        attach = Attach(
            handle=handle,
            role=True,
            rcv_settle_mode=0,
            source=source,
            target=Target(address=given["name"]),
            **given,
        )
        await self.say(frame(attach, channel))
        found, _ = await self.hear(Attach, channel)
        return found

    async def grant(self, channel: int, handle: int, credit: int = 100) -> None:
        flow = Flow(
            next_incoming_id=0,
            incoming_window=2**31 - 1,
            next_outgoing_id=self._deliveries[channel],
            outgoing_window=2**31 - 1,
            handle=handle,
            delivery_count=0,
            link_credit=credit,
        )
        await self.say(frame(flow, channel))

    async def send(
        self, channel: int, handle: int, payload: bytes, *, settled: bool = False
    ) -> None:
        number = self._deliveries[channel]
        self._deliveries[channel] = number + 1
        transfer = Transfer(handle, number, struct.pack(">I", number), 0, settled=settled)
        await self.say(frame(transfer, channel, payload))

    async def outcome(self, channel: int) -> Any:
        """Return the outcome of the oldest message sent on *channel* that has none yet."""
        found, _ = await self.hear(Disposition, channel)
        return found.state

    async def receive(self, channel: int) -> tuple[Transfer, Message]:
        """Return the next delivery on *channel*, and accept it if it is unsettled."""
        found, payload = await self.hear(Transfer, channel)
        if not found.settled:
            accepted = Disposition(True, found.delivery_id, found.delivery_id, True, ACCEPTED)
            await self.say(frame(accepted, channel))
        return found, Message.decode(payload)

    async def detach(self, channel: int, handle: int) -> None:
        await self.say(frame(Detach(handle, True, None), channel))
        found, _ = await self.hear(Detach, channel)
        assert found.error is None

    # --- management ------------------------------------------------------------------------

    async def open_management(self, channel: int = 1) -> None:
        """Attach the pair of links, as ``AmqpManagement.init`` does."""
        await self.begin(channel)
        pair: dict[str, Any] = {
            "name": PAIR,
            "snd_settle_mode": 1,
            "properties": {Symbol("paired"): True},
        }
        out = await self.attach_sender(channel, 0, "/management", **pair)
        back = await self.attach_receiver(channel, 1, Source(address="/management"), **pair)
        # ProtonJ2 takes these for the links that it has asked for.
        assert out.target.address == back.source.address == "/management"
        await self.grant(channel, 1)
        await self.hear(Flow, channel)

    async def request(
        self, method: str, path: str, body: object = None, channel: int = 1
    ) -> tuple[int, Any]:
        """Send a request, and return the status and the body of its answer."""
        number = uuid4()
        message = Message(
            body,
            body_kind="value",
            message_id=number,
            to=path,
            subject=method,
            reply_to="$me",
        )
        await self.send(channel, 0, message.encode(), settled=True)
        found, answer = await self.receive(channel)
        assert found.settled
        # The client looks for the request by this, and ignores what is not a UUID.
        assert isinstance(answer.correlation_id, UUID)
        assert answer.correlation_id == number
        assert answer.subject is not None
        return int(answer.subject), answer.body


def is_string_array(value: object) -> bool:
    """Return whether ProtonJ2 decodes *value* to ``String[]``, to which the client casts."""
    return isinstance(value, Array) and value.of is str
