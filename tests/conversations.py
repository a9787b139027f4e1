"""Recorded conversations, and an engine that replays one side of them.

A conversation is the output of two peers, in order: ``{"scenario", "chunks": [{"from", "hex"}]}``. The engine
receives the octets of one side and repeats the actions of the other. Its output is compared by meaning: peers
choose their own widths, windows and batching.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from msgspec import Struct
from wire import SASL

from amqp_rt.codec.composites import read_composite
from amqp_rt.codec.primitives import Reader
from amqp_rt.core.engine import Engine
from amqp_rt.core.frames import SASL_HEADER
from amqp_rt.core.performatives import (
    PERFORMATIVES,
    RECEIVER,
    SENDER,
    Attach,
    Begin,
    Close,
    Detach,
    Disposition,
    End,
    Flow,
    Open,
    Transfer,
)
from amqp_rt.core.sasl_frames import (
    OK,
    SaslChallenge,
    SaslInit,
    SaslMechanisms,
    SaslOutcome,
    SaslResponse,
)
from amqp_rt.core.states import is_outcome
from amqp_rt.events import AttachRequested, Event, LoginRequested
from amqp_rt.fronts import amqp10
from amqp_rt.fronts.base import ServerOptions
from amqp_rt.limits import Limits
from amqp_rt.outcomes import Error
from amqp_rt.testing.pairs import Recorder


class Frame(Struct):
    """A frame, or a protocol header, with ``performative`` None and its octets in ``payload``."""

    channel: int
    performative: Any
    payload: bytes = b""


def frames(data: bytes) -> Iterator[Frame]:
    """Yield the protocol headers and frames in *data*, which must be whole."""
    at = 0
    while at < len(data):
        if data[at : at + 4] == b"AMQP":
            yield Frame(0, None, data[at : at + 8])
            at += 8
            continue
        size, doff, kind, channel = struct.unpack_from(">IBBH", data, at)
        reader = Reader(data, at + doff * 4, at + size)
        if reader.at < reader.end:
            performative = read_composite(reader, *(SASL if kind else PERFORMATIVES))
            yield Frame(channel, performative, data[reader.at : at + size])
        at += size


def written(conversation: dict[str, Any], side: str) -> bytes:
    """Return all octets from *side*."""
    return b"".join(
        bytes.fromhex(chunk["hex"]) for chunk in conversation["chunks"] if chunk["from"] == side
    )


class Mechanism:
    """Client mechanism that repeats the responses of the recording."""

    def __init__(self, init: SaslInit, responses: list[bytes]) -> None:
        self.name = str(init.mechanism)
        self._initial = init.initial_response
        self._responses = responses

    def initial(self) -> bytes | None:
        return self._initial

    def respond(self, challenge: bytes) -> bytes:
        return self._responses.pop(0)


def _address(terminus: Any) -> object:
    return getattr(terminus, "address", type(terminus).__name__)


def _reason(error: Error | None) -> object:
    """Return an error without its description, which is for people and may be improved."""
    return None if error is None else (str(error.condition), error.info)


def meaning(data: bytes) -> list[tuple[Any, ...]]:
    """Return the meaning of *data*, without its encoding: transfers as deliveries, ranges as single deliveries."""
    found: list[tuple[Any, ...]] = []
    unfinished: dict[tuple[int, int], list[Any]] = {}
    for item in frames(data):
        channel, p = item.channel, item.performative
        if isinstance(p, Open):
            found.append(("open", p.container_id, p.hostname, p.properties))
        elif isinstance(p, Begin):
            found.append(("begin", channel, p.remote_channel))
        elif isinstance(p, Attach):
            termini = (_address(p.source), _address(p.target))
            modes = (p.snd_settle_mode, p.rcv_settle_mode)
            # The initial count is the sender's; a receiver's is passed over (§2.7.3).
            begins = p.initial_delivery_count if p.role == SENDER else None
            found.append(("attach", channel, p.name, p.handle, p.role, *termini, *modes, begins))
        elif isinstance(p, Flow):
            if p.handle is not None:
                count = p.delivery_count or 0
                found.append(("flow", channel, p.handle, count, p.link_credit, p.drain))
        elif isinstance(p, Transfer):
            parts = unfinished.setdefault(
                (channel, p.handle), [p.delivery_id, p.delivery_tag, False, p.state, b""]
            )
            parts[2] = parts[2] or bool(p.settled)
            parts[4] = b"" if p.aborted else parts[4] + item.payload
            if p.aborted or not p.more:
                del unfinished[channel, p.handle]
                found.append(("delivery", channel, p.handle, p.aborted, *parts))
        elif isinstance(p, Disposition):
            last = p.first if p.last is None else p.last
            found.extend(
                ("state", channel, p.role, delivery_id, p.settled, p.state)
                for delivery_id in range(p.first, last + 1)
            )
        elif isinstance(p, Detach):
            found.append(("detach", channel, p.handle, p.closed, _reason(p.error)))
        elif isinstance(p, End):
            found.append(("end", channel, _reason(p.error)))
        elif isinstance(p, Close):
            found.append(("close", _reason(p.error)))
        elif p is None:
            found.append(("header", item.payload))
        else:
            found.append((type(p).__name__, p))
    assert not unfinished
    return found


class Player:
    """Engine in the place of *side* of a conversation."""

    def __init__(self, conversation: dict[str, Any], side: str) -> None:
        self.side = side
        self.chunks = [
            (chunk["from"], bytes.fromhex(chunk["hex"])) for chunk in conversation["chunks"]
        ]
        self.script = list(frames(written(conversation, side)))
        self.out = bytearray()
        self.events: list[Event] = []
        self.endpoints: list[Recorder] = []
        self.requests: dict[tuple[str, bool], Any] = {}
        self.deliveries: dict[tuple[int, int], Any] = {}
        self.sendings: dict[tuple[int, int], Any] = {}
        self.unfinished: dict[tuple[int, int], Any] = {}
        self.login: LoginRequested | None = None
        self.engine = self._engine()

    def _engine(self) -> Engine:
        said = [frame.performative for frame in self.script]
        opening = next((p for p in said if isinstance(p, Open)), Open(container_id="none"))
        limits = Limits(
            frame_size_max=min(opening.max_frame_size, 65_536),
            channel_max=opening.channel_max,
            idle_timeout_s=0,
        )
        sasl = self.script[0].payload == SASL_HEADER
        if self.side == "server":
            mechanisms: tuple[str, ...] = ()
            if sasl:
                offer = next(p for p in said if isinstance(p, SaslMechanisms))
                mechanisms = tuple(str(name) for name in offer.sasl_server_mechanisms)
            options = ServerOptions(
                container_id=opening.container_id,
                limits=limits,
                mechanisms=mechanisms,
                sasl_required=sasl,
                properties=opening.properties or {},
            )
            return amqp10.Front().server(options, 0.0)
        responses = [p.response for p in said if isinstance(p, SaslResponse)]
        return amqp10.client(
            amqp10.ClientOptions(
                container_id=opening.container_id,
                hostname=opening.hostname,
                limits=limits,
                mechanisms=tuple(Mechanism(p, responses) for p in said if isinstance(p, SaslInit)),
                properties=opening.properties or {},
            ),
            0.0,
        )

    # --- replaying -----------------------------------------------------------------------

    def play(self, size: int = 0) -> None:
        """Replay the conversation, with the peer's chunks cut into pieces of *size*."""
        done = 0
        ours = bytearray()
        for side, data in self.chunks:
            if side == self.side:
                # Frames that this chunk completes.
                ours += data
                upto = _whole(ours)
                count = len(list(frames(bytes(ours[:upto]))))
                for index in range(done, count):
                    self.act(index)
                done = count
            else:
                step = size or len(data)
                for at in range(0, len(data), step):
                    self.hear(data[at : at + step])
            self.take()

    def hear(self, data: bytes) -> None:
        """Receive octets from the peer."""
        self._handle(self.engine.receive(data, 0.0))

    def _handle(self, events: list[Event]) -> None:
        for event in events:
            self.events.append(event)
            if isinstance(event, AttachRequested):
                self.requests[event.link.name, event.link.role] = event.link
            elif isinstance(event, LoginRequested):
                self.login = event

    def take(self) -> None:
        while data := self.engine.take():
            self.out += b"".join(data)

    def _link(self, channel: int, handle: int) -> Any:
        session = self.engine.sessions.get(channel)
        return None if session is None else session.links.get(handle)

    def _delivery(self, channel: int, delivery_id: int) -> Any:
        for endpoint in self.endpoints:
            for delivery in endpoint.deliveries:
                here = delivery.link.session.channel
                if (here, delivery.delivery_id) == (channel, delivery_id):
                    return delivery
        raise AssertionError(f"no delivery {delivery_id} has come on channel {channel}")

    def act(self, index: int) -> None:
        """Repeat an action of the recorded side; the engine's automatic answers are sent already."""
        item = self.script[index]
        channel, p = item.channel, item.performative
        if isinstance(p, Begin):
            if p.remote_channel is None:
                assert self.engine.begin(properties=p.properties).channel == channel
        elif isinstance(p, Attach):
            self._attach(index, channel, p)
        elif isinstance(p, Flow):
            self._flow(channel, p)
        elif isinstance(p, Transfer):
            self._transfer(channel, p, item.payload)
        elif isinstance(p, Disposition):
            for delivery_id in range(p.first, (p.first if p.last is None else p.last) + 1):
                self._settle(channel, delivery_id, p)
        elif isinstance(p, Detach):
            link = self._link(channel, p.handle)
            if link is not None:
                link.detach(p.error, closed=p.closed)
        elif isinstance(p, End):
            if channel in self.engine.sessions:
                self.engine.sessions[channel].end(p.error)
        elif isinstance(p, Close):
            self.engine.close(p.error)
        elif isinstance(p, SaslChallenge):
            assert self.login is not None
            self._handle(self.login.exchange.challenge(p.challenge))
        elif isinstance(p, SaslOutcome):
            assert self.login is not None
            if p.code == OK:
                self._handle(self.login.exchange.succeed("somebody"))
            else:
                self.login.exchange.fail()

    def _attach(self, index: int, channel: int, attach: Attach) -> None:
        endpoint = Recorder()
        self.endpoints.append(endpoint)
        request = self.requests.pop((attach.name, attach.role), None)
        local = attach.source if attach.role == SENDER else attach.target
        if request is not None and local is None:
            detach = next(
                frame.performative
                for frame in self.script[index:]
                if isinstance(frame.performative, Detach)
                and (frame.channel, frame.performative.handle) == (channel, attach.handle)
            )
            request.refuse(detach.error or Error("amqp:not-found"))
        elif request is not None:
            mode = (
                {"snd_settle_mode": attach.snd_settle_mode}
                if attach.role == SENDER
                else {"rcv_settle_mode": attach.rcv_settle_mode}
            )
            request.accept(endpoint, source=attach.source, target=attach.target, **mode)
        else:
            session = self.engine.sessions[channel]
            make = session.attach_sender if attach.role == SENDER else session.attach_receiver
            make(
                attach.name,
                endpoint,
                source=attach.source,
                target=attach.target,
                snd_settle_mode=attach.snd_settle_mode,
                rcv_settle_mode=attach.rcv_settle_mode,
            )

    def _flow(self, channel: int, flow: Flow) -> None:
        link = None if flow.handle is None else self._link(channel, flow.handle)
        if link is None:
            return
        if link.role == RECEIVER:
            if flow.link_credit is not None and not flow.drain:
                link.grant(flow.link_credit)
            elif flow.drain:
                if flow.link_credit != link.credit:
                    link.grant(flow.link_credit)
                link.drain()
        elif flow.drain:
            link.drained()

    def _transfer(self, channel: int, transfer: Transfer, payload: bytes) -> None:
        key = (channel, transfer.handle)
        sending = self.unfinished.pop(key, None)
        if sending is None:
            sending = self._link(channel, transfer.handle).send(
                payload,
                tag=transfer.delivery_tag,
                settled=bool(transfer.settled),
                message_format=transfer.message_format or 0,
                state=transfer.state,
                more=transfer.more,
            )
            assert transfer.delivery_id is not None
            self.sendings[channel, transfer.delivery_id] = sending
        elif transfer.aborted:
            sending.abort()
        else:
            sending.write(payload, more=transfer.more)
        if transfer.more:
            self.unfinished[key] = sending

    def _settle(self, channel: int, delivery_id: int, disposition: Disposition) -> None:
        if disposition.role == SENDER:
            self.sendings[channel, delivery_id].settle(disposition.state)
            return
        delivery = self._delivery(channel, delivery_id)
        if is_outcome(disposition.state):
            delivery.settle(disposition.state)
        else:
            delivery.update(disposition.state)


def _whole(data: bytearray) -> int:
    """Return the size of the whole headers and frames at the start of *data*."""
    at = 0
    while at + 8 <= len(data):
        size = 8 if data[at : at + 4] == b"AMQP" else struct.unpack_from(">I", data, at)[0]
        if at + size > len(data):
            break
        at += size
    return at
