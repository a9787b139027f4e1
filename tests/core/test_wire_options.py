"""Options of a server's engine for clients that are particular: repeated addresses, whole errors and frames."""

from __future__ import annotations

from typing import Any

import pytest

from amqp_rt.codec.composites import encode_composite, read_composite
from amqp_rt.codec.primitives import Reader
from amqp_rt.core.frames import WHOLE_FRAME_GROWTH, performative_frame, whole_frame
from amqp_rt.core.performatives import Begin, Close, Detach, End, Open
from amqp_rt.errors import LocalProtocolError
from amqp_rt.events import Closed
from amqp_rt.fronts import amqp10
from amqp_rt.fronts.base import ServerOptions
from amqp_rt.limits import DEFAULT_LIMITS, Limits
from amqp_rt.outcomes import Error, Modified, Rejected, Released
from amqp_rt.termini import Coordinator, Source, Target
from amqp_rt.testing.pairs import Joined, Recorder
from amqp_rt.transactions import TransactionalState

REFUSED = Error("amqp:not-found", "no such node")


def joined_with(**options: Any) -> tuple[Joined, Any]:
    """Return both ends, the server with *options*, and a session of the client."""
    server = amqp10.Front().server(
        ServerOptions(container_id="server", sasl_required=False, **options), 0.0
    )
    joined = Joined(server=server)
    joined.pump()
    return joined, joined.client.begin()


# --- Repeated addresses ---------------------------------------------------------------------


@pytest.mark.parametrize(("echoes", "answered"), [(False, "q"), (True, "amqps://ns/q")])
@pytest.mark.parametrize("sends", [False, True])
def test_an_answer_repeats_the_address_that_was_asked_for(
    echoes: bool, answered: str, sends: bool
) -> None:
    joined, session = joined_with(echo_addresses=echoes)

    def accept(link: Any) -> None:
        link.asked = "amqps://ns/q"
        if sends:
            link.accept(joined.endpoint, target=Target(address="q"))
            assert link.target.address == "q"
        else:
            link.accept(joined.endpoint, source=Source(address="q"))
            assert link.source.address == "q"

    joined.on_attach = accept
    if sends:
        link = session.attach_sender("l", Recorder(), target=Target(address="amqps://ns/q"))
    else:
        link = session.attach_receiver("l", Recorder(), source=Source(address="amqps://ns/q"))
    joined.pump()
    assert (link.target if sends else link.source).address == answered


def test_the_address_of_the_peers_own_terminus_is_answered_as_it_was() -> None:
    joined, session = joined_with(echo_addresses=True)

    def accept(link: Any) -> None:
        link.asked = "amqps://ns/q"
        link.accept(joined.endpoint)

    joined.on_attach = accept
    link = session.attach_sender(
        "l", Recorder(), source=Source(address="mine"), target=Target(address="q")
    )
    joined.pump()
    assert (link.source.address, link.target.address) == ("mine", "amqps://ns/q")


@pytest.mark.parametrize("target", [Coordinator(), Target(address="made", dynamic=True)])
def test_a_link_that_asked_for_no_address_is_answered_as_agreed(target: Any) -> None:
    joined, session = joined_with(echo_addresses=True)
    joined.on_attach = lambda link: link.accept(joined.endpoint, target=target)
    asked = Coordinator() if isinstance(target, Coordinator) else Target(dynamic=True)
    link = session.attach_sender("l", Recorder(), source=Source(), target=asked)
    joined.pump()
    assert link.target == target


def test_a_refusal_repeats_no_address() -> None:
    joined, session = joined_with(echo_addresses=True)

    def refuse(link: Any) -> None:
        link.asked = "q"
        link.refuse(REFUSED)

    joined.on_attach = refuse
    recorder = Recorder()
    link = session.attach_receiver("l", recorder, source=Source(address="q"))
    joined.pump()
    assert link.refused
    assert [error for error, _ in recorder.detached] == [REFUSED]


# --- Whole errors ---------------------------------------------------------------------------


def test_an_empty_info_is_encoded_and_an_absent_one_is_not() -> None:
    assert encode_composite(Error("a:b", None, {})).endswith(b"\xa3\x03a:b\x40\xc1\x01\x00")
    assert encode_composite(Error("a:b")).endswith(b"\xa3\x03a:b")


@pytest.mark.parametrize(("whole", "info"), [(False, None), (True, {})])
def test_errors_of_the_server_have_all_their_fields(whole: bool, info: Any) -> None:
    joined, session = joined_with(whole_errors=whole)
    joined.on_attach = lambda link: link.refuse(REFUSED)
    recorder = Recorder()
    session.attach_receiver("l", recorder, source=Source(address="q"))
    joined.pump()
    (error, _) = recorder.detached[0]
    assert error is not None
    assert error.info == info
    (their_session,) = joined.server.sessions.values()
    their_session.end(REFUSED)
    joined.pump()
    assert session.error.info == info
    joined.server.close(REFUSED)
    joined.pump()
    (closed,) = [each for each in joined.client_events if isinstance(each, Closed)]
    assert closed.error is not None
    assert closed.error.info == info


@pytest.mark.parametrize(
    ("state", "seen"),
    [
        (Rejected(Error("a:b", "c")), Rejected(Error("a:b", "c", {}))),
        (Rejected(Error("a:b", "c", {"x": 1})), Rejected(Error("a:b", "c", {"x": 1}))),
        (Rejected(), Rejected()),
        (Released(), Released()),
        (
            TransactionalState(b"t", Rejected(Error("a:b"))),
            TransactionalState(b"t", Rejected(Error("a:b", None, {}))),
        ),
    ],
)
def test_errors_of_outcomes_have_all_their_fields(state: Any, seen: Any) -> None:
    joined, session = joined_with(whole_errors=True)
    joined.endpoint = Recorder(credit=10)
    joined.on_attach = lambda link: link.accept(joined.endpoint)
    link = session.attach_sender("l", Recorder(), source=Source(), target=Target(address="q"))
    joined.pump()
    first, second = link.send(b"\x00Sw@"), link.send(b"\x00Sw@")
    joined.pump()
    for each in joined.endpoint.deliveries:
        each.update(state)
    joined.pump()
    assert (first.state, second.state) == (seen, seen)


def test_a_shortened_error_keeps_all_its_fields() -> None:
    joined, session = joined_with(whole_errors=True)
    joined.on_attach = lambda link: link.refuse(Error("amqp:not-found", "x" * 100_000))
    recorder = Recorder()
    session.attach_receiver("l", recorder, source=Source(address="q"))
    joined.pump()
    (error, _) = recorder.detached[0]
    assert error is not None
    assert error.info == {}
    assert set(error.description or "") == {"x"}
    assert len(error.description or "") < 100_000


def test_a_state_that_is_too_large_only_with_its_empty_info_is_shortened() -> None:
    joined, session = joined_with(whole_errors=True)
    joined.endpoint = Recorder(credit=10)
    joined.on_attach = lambda link: link.accept(joined.endpoint)
    link = session.attach_sender("l", Recorder(), source=Source(), target=Target(address="q"))
    joined.pump()
    sent = link.send(b"\x00Sw@")
    joined.pump()
    (delivery,) = joined.endpoint.deliveries
    room = joined.links[0].session.payload_max
    bare = Rejected(Error("a:b", "x" * (room - 100)))
    while len(encode_composite(bare)) < room:
        bare = Rejected(Error("a:b", (bare.error.description or "") + "x"))  # type: ignore[union-attr]
    with pytest.raises(LocalProtocolError, match="does not fit"):
        delivery.update(Modified(message_annotations={"x": "x" * room}))
    delivery.update(bare)
    joined.pump()
    assert sent.state == Rejected(Error("a:b", "x" * 64, {}))


# --- Whole frames ---------------------------------------------------------------------------


NAMES = ("open", "begin", "attach", "flow", "transfer", "disposition", "detach", "end", "close")


def fields_of(data: bytes) -> tuple[str, int]:
    """Return the performative of a frame, and the number of fields with which it is written."""
    assert data[8:10] == b"\x00\x53"
    at = {0x45: None, 0xC0: 13, 0xD0: 19}[data[11]]
    return NAMES[data[10] - 0x10], 0 if at is None else data[at]


FIELDS = (10, 8, 14, 11, 11, 6, 3, 1, 1)
ALL_FIELDS = dict(zip(NAMES, FIELDS, strict=True))


def frames_in(output: Any) -> list[bytes]:
    """Return the frames in the output of an engine."""
    data = b"".join(bytes(each) for each in output)
    found: list[bytes] = []
    while data:
        size = int.from_bytes(data[:4])
        found.append(data[:size])
        data = data[size:]
    return found


class Tapped:
    """Engine whose output is also added to *frames*. Compiled engines cannot be patched."""

    def __init__(self, engine: Any, frames: list[bytes]) -> None:
        self._engine = engine
        self._frames = frames

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def take(self) -> list[bytes]:
        data = b"".join(bytes(each) for each in self._engine.take())
        self._frames += frames_in([data])
        return [data]


class Conversation:
    """Links in both directions with messages, errors and ends, between a client and a server with *options*."""

    def __init__(self, **options: Any) -> None:
        self.frames: list[bytes] = []
        self.joined, session = joined_with(**options)
        self.joined.server = Tapped(self.joined.server, self.frames)  # type: ignore[assignment]
        joined = self.joined
        joined.endpoint = Recorder(credit=10)
        joined.on_attach = lambda link: link.accept(joined.endpoint)
        sender = session.attach_sender("s", Recorder(), source=Source(), target=Target(address="q"))
        self.inbox = Recorder()
        receiver = session.attach_receiver("r", self.inbox, source=Source(address="q"))
        joined.pump()
        receiver.grant(10)
        sender.send(b"\x00Sw@")
        joined.pump()
        (delivery,) = joined.endpoint.deliveries
        delivery.settle(Released())
        (out,) = (link for link in joined.links if hasattr(link, "send"))
        for payload in (b"\x00Sw@", b"\x00Sw\xb0\x00\x00\x80\x00" + bytes(32_768)):
            out.send(payload)
        joined.pump()
        out.detach(REFUSED)
        joined.pump()
        (their_session,) = joined.server.sessions.values()
        their_session.end()
        joined.server.close()
        joined.pump()

    @property
    def counts(self) -> set[tuple[str, int]]:
        return {fields_of(each) for each in self.frames if len(each) > 8 and each[5] == 0}


def test_performatives_are_written_with_all_fields_if_asked() -> None:
    usual, whole = Conversation(), Conversation(whole_frames=True)
    written = {name for name, _ in usual.counts} - {"open"}
    assert written == ALL_FIELDS.keys() - {"open"}
    trimmed = {name for name, count in usual.counts if count < ALL_FIELDS[name]}
    assert trimmed >= {"begin", "attach", "flow", "transfer", "disposition"}
    assert whole.counts == {(name, ALL_FIELDS[name]) for name in written}
    for each in (usual, whole):
        assert [len(got.payload) for got in each.inbox.deliveries] == [4, 32_776]
        ((error, _),) = each.inbox.detached
        assert error == REFUSED


@pytest.mark.parametrize("size", [0, 200, 249, 250, 251, 252, 253, 254, 255, 300])
def test_a_whole_frame_says_the_same_whatever_the_size_of_its_list(size: int) -> None:
    detach = Detach(7, True, Error("a:b", "x" * size, {}))
    begin = Begin(next_outgoing_id=1, incoming_window=2, outgoing_window=3)
    for performative in (detach, begin, Close(), End(), Open(container_id="c" * size)):
        data = whole_frame(performative_frame(5, performative))
        assert int.from_bytes(data[:4]) == len(data)
        assert len(data) <= len(performative_frame(5, performative)) + WHOLE_FRAME_GROWTH
        name, count = fields_of(data)
        assert count == ALL_FIELDS[name]
        reader = Reader(data, 8, len(data), DEFAULT_LIMITS)
        assert read_composite(reader, type(performative)) == performative


def test_whole_frames_are_no_larger_than_the_peer_takes() -> None:
    client = amqp10.client(
        amqp10.ClientOptions(container_id="c", limits=Limits(frame_size_max=512), mechanisms=()),
        0.0,
    )
    server = amqp10.Front().server(
        ServerOptions(container_id="server", sasl_required=False, whole_frames=True), 0.0
    )
    joined = Joined(client=client, server=server)
    joined.pump()
    session = joined.client.begin()
    joined.on_attach = lambda link: link.accept(joined.endpoint)
    link = session.attach_receiver("r", Recorder(), source=Source(address="q"))
    joined.pump()
    link.grant(1)
    joined.pump()
    (out,) = joined.links
    out.send(b"\x00Sw\xb0\x00\x00\x20\x00" + bytes(8_192))
    frames = frames_in(joined.server.take())
    assert len(frames) > 10
    size = max(
        size
        for size in range(600)
        if joined.server.frame_size_out >= len(performative_frame(0, refusal(size)))
    )
    joined.server.write_bytes(joined.server.frame_of(0, refusal(size)))
    with pytest.raises(LocalProtocolError, match="the detach needs"):
        joined.server.frame_of(0, refusal(size + 1))
    (frame,) = frames_in(joined.server.take())
    assert len(frame) <= 512
    assert max(map(len, frames)) <= 512


def refusal(size: int) -> Detach:
    return Detach(handle=7, error=Error("a:b", "x" * size))
