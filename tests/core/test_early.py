"""Transfers without credit: an error, unless some are allowed at the beginning of a link (S3 2.3.8)."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from brokers import World
from sanity import check
from wire import begun, detached_with, frame, kinds, said, transfer

from amqp_rt import Broker, Container
from amqp_rt.broker.nodes import Queue
from amqp_rt.core.engine import Engine
from amqp_rt.core.frames import AMQP_HEADER
from amqp_rt.core.performatives import Attach, Begin, Detach, Disposition, Flow, Open
from amqp_rt.events import AttachRequested
from amqp_rt.limits import Limits
from amqp_rt.message import Message
from amqp_rt.outcomes import ACCEPTED, Error, Rejected
from amqp_rt.termini import Source, Target
from amqp_rt.testing.pairs import Recorder
from amqp_rt.transactions import TransactionalState

EARLY = Limits(early_deliveries_max=2)
COUNT = 0xFFFF_FFFF
HELLO = (
    AMQP_HEADER
    + frame(Open(container_id="peer"))
    + frame(Begin(next_outgoing_id=0, incoming_window=100, outgoing_window=100))
)


def attach(name: str = "l", handle: int = 0) -> bytes:
    return frame(
        Attach(
            name=name,
            handle=handle,
            role=False,
            source=Source(),
            target=Target(address="q"),
            initial_delivery_count=COUNT,
        )
    )


def requested(engine: Engine, data: bytes) -> Any:
    (event,) = engine.receive(data, 0.0)
    assert isinstance(event, AttachRequested)
    return event.link


class Once(Recorder):
    """Endpoint that grants credit when its link attaches, and never again."""

    def __init__(self, credit: int) -> None:
        super().__init__(settle=ACCEPTED)
        self.once = credit

    def on_attached(self, link: Any) -> None:
        super().on_attached(link)
        link.grant(self.once)


def only(engine: Engine, kind: type) -> Any:
    (found,) = [
        each[1] for each in said(engine) if isinstance(each, tuple) and type(each[1]) is kind
    ]
    return found


@pytest.mark.req("B18", "X8")
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(
    "pieces", [(b"", b"one"), (b"", b"", b"one"), (b"one", b""), (b"", b"o", b"ne"), (b"", b"")]
)
def test_a_delivery_whose_first_frames_are_empty_ends_like_any_other(
    pieces: tuple[bytes, ...], early: bool
) -> None:
    """The next one would count as its continuation."""
    engine = begun(limits=EARLY)
    first = b"".join(
        transfer(None if at else 0, piece, more=at + 1 < len(pieces))
        for at, piece in enumerate(pieces)
    )
    endpoint = Once(5)
    if early:
        link = requested(engine, attach() + first + transfer(1, b"two"))
        link.accept(endpoint)
    else:
        link = requested(engine, attach())
        link.accept(endpoint)
        engine.receive(first, 0.0)
        assert not link.arriving
        engine.receive(transfer(1, b"two"), 0.0)
    assert [each.payload for each in endpoint.deliveries] == [b"".join(pieces), b"two"]
    assert not link.arriving
    assert engine.assembling == 0
    assert Detach not in [type(each[1]) for each in said(engine) if isinstance(each, tuple)]
    check(engine)


@pytest.mark.req("B18")
def test_the_first_ones_wait_for_the_answer() -> None:
    engine = begun(limits=EARLY)
    link = requested(engine, attach() + transfer(0, b"one", more=True) + transfer(None, b"+"))
    engine.receive(transfer(1, b"two", settled=True), 0.0)
    assert kinds(engine) == []
    endpoint = Once(5)
    link.accept(endpoint)
    assert [each.payload for each in endpoint.deliveries] == [b"one+", b"two"]
    frames = [each[1] for each in said(engine) if isinstance(each, tuple)]
    # Early messages count against the credit granted later, as the peer counts them too.
    (flow,) = [each for each in frames if type(each) is Flow]
    assert (flow.delivery_count, flow.link_credit) == (1, 3)
    (disposition,) = [each for each in frames if type(each) is Disposition]
    assert (disposition.first, disposition.settled) == (0, True)
    engine.receive(transfer(2) + transfer(3) + transfer(4), 0.0)
    assert len(endpoint.deliveries) == 5
    engine.receive(transfer(5), 0.0)
    assert detached_with(engine) == "amqp:link:transfer-limit-exceeded"
    check(engine)


@pytest.mark.req("B18")
def test_at_the_bound_and_above_it() -> None:
    """Deliveries count when they begin, however they are split; one too many refuses the link."""
    for early, more in ((2, 0), (2, 1), (1, 0), (1, 1), (0, 1)):
        engine = begun(limits=Limits(early_deliveries_max=early))
        data = [transfer(n, b"a", more=True) + transfer(None, b"b") for n in range(early + more)]
        link = requested(engine, attach() + b"".join(data))
        if more:
            assert detached_with(engine) == "amqp:link:transfer-limit-exceeded"
        endpoint = Recorder()
        link.accept(endpoint)
        assert len(endpoint.deliveries) == (0 if more else early)
        check(engine)


@pytest.mark.req("B18")
def test_a_link_without_credit_takes_its_first_ones_too() -> None:
    engine = begun(limits=EARLY)
    link = requested(engine, attach())
    endpoint = Recorder()
    link.accept(endpoint)
    engine.receive(transfer(0) + transfer(1), 0.0)
    assert len(endpoint.deliveries) == 2
    link.grant(1)
    engine.take()
    engine.receive(transfer(2), 0.0)
    # The allowance is for the beginning of a link, whether it was used or not.
    engine.receive(transfer(3), 0.0)
    assert detached_with(engine) == "amqp:link:transfer-limit-exceeded"
    assert len(endpoint.deliveries) == 3


@pytest.mark.req("B18")
def test_credit_that_is_used_first_counts() -> None:
    engine = begun(limits=EARLY)
    link = requested(engine, attach())
    endpoint = Once(2)
    link.accept(endpoint)
    engine.receive(transfer(0) + transfer(1), 0.0)
    engine.take()
    engine.receive(transfer(2), 0.0)
    assert detached_with(engine) == "amqp:link:transfer-limit-exceeded"


@pytest.mark.req("B18")
@pytest.mark.parametrize("closed", [True, False])
def test_a_link_may_be_gone_before_it_is_accepted(closed: bool) -> None:
    """Attach, transfer and detach without waiting for anything."""
    engine = begun(limits=EARLY)
    link = requested(engine, attach() + transfer(0, b"m") + frame(Detach(0, closed)))
    endpoint = Recorder(credit=5, settle=ACCEPTED)
    link.accept(endpoint)
    assert [each.payload for each in endpoint.deliveries] == [b"m"]
    assert kinds(engine) == ["Attach", "Disposition", "Detach"]
    ((error, over),) = endpoint.detached
    assert (error, over) == (None, True)
    assert not link.attached
    # The name and the handle may be used again.
    again = requested(engine, attach() + transfer(1, b"n"))
    again.accept(endpoint)
    assert [each.payload for each in endpoint.deliveries] == [b"m", b"n"]
    check(engine)


@pytest.mark.req("B18", "X14")
def test_what_was_held_for_a_refused_link_is_gone() -> None:
    engine = begun(limits=EARLY)
    for how in ("refused", "ended"):
        link = requested(engine, attach(how) + transfer(0) + transfer(1, bytes(1000), more=True))
        assert engine.assembling > 1000
        if how == "refused":
            link.refuse(Error("amqp:not-found"))
            engine.receive(transfer(None, b"more"), 0.0)
            assert only(engine, Detach).error.condition == "amqp:not-found"
            engine.receive(frame(Detach(0, True)), 0.0)
        else:
            engine.receive_eof(0.0)
        assert engine.assembling == 0


@pytest.mark.req("B18", "X22")
def test_what_is_held_is_bounded_and_then_judged_like_the_rest() -> None:
    limits = Limits(early_deliveries_max=9, message_size_max=1_000)
    engine = begun(limits=limits)
    requested(engine, attach() + transfer(0, bytes(500)) + transfer(1, bytes(500)))
    assert detached_with(engine) == "amqp:link:message-size-exceeded"
    engine = begun(limits=limits)
    link = requested(engine, attach() + transfer(0, bytes(100)) + transfer(1, bytes(500)))
    endpoint = Recorder()
    link.accept(endpoint, max_message_size=200)
    assert [len(each.payload) for each in endpoint.deliveries] == [100]
    assert detached_with(engine) == "amqp:link:message-size-exceeded"
    check(engine)


@pytest.mark.req("B18", "X20")
def test_aborted_and_streamed() -> None:
    engine = begun(limits=EARLY)
    link = requested(
        engine,
        attach() + transfer(0, b"a", more=True) + transfer(None, aborted=True) + transfer(1, b"b"),
    )
    endpoint = Recorder()
    link.accept(endpoint, streaming=True)
    chunks = [b"".join(each.read_chunks()) for each in endpoint.deliveries]
    assert chunks[-1] == b"b"
    check(engine)


# --- Transactions ---


@pytest.mark.req("B18", "R3")
@pytest.mark.parametrize("settled", [False, True])
def test_transfers_of_a_transaction_need_credit(settled: bool) -> None:
    """A discharge does not wait for the answer to an attach, and would overtake a held transfer."""
    state = TransactionalState(b"txn")
    # Before the answer, in the first or the last frame of a delivery:
    for data in (
        transfer(0, b"m", state=state, settled=settled),
        transfer(0, b"m", more=True) + transfer(None, b"+", state=state, settled=settled),
    ):
        engine = begun(limits=EARLY)
        link = requested(engine, attach() + data)
        assert detached_with(engine) == "amqp:link:transfer-limit-exceeded"
        assert engine.assembling == 0
        endpoint = Recorder()
        link.accept(endpoint)
        assert endpoint.deliveries == []
        check(engine)
    # And after it, since a peer cannot know which of the two it was.
    engine = begun(limits=EARLY)
    endpoint = Recorder()
    requested(engine, attach()).accept(endpoint)
    engine.take()
    engine.receive(transfer(0) + transfer(1, state=state, settled=settled), 0.0)
    assert detached_with(engine) == "amqp:link:transfer-limit-exceeded"
    assert len(endpoint.deliveries) == 1
    check(engine)


@pytest.mark.req("B18", "R3")
def test_transfers_of_a_transaction_use_credit_on_such_a_link() -> None:
    engine = begun(limits=EARLY)
    endpoint = Once(3)
    requested(engine, attach() + transfer(0)).accept(endpoint)
    engine.take()
    engine.receive(transfer(1, state=TransactionalState(b"txn")) + transfer(2), 0.0)
    assert len(endpoint.deliveries) == 3
    assert "Detach" not in kinds(engine)


# --- The broker and the container ---


@pytest.mark.req("B18", "B17")
def test_a_broker_takes_what_there_is_room_for() -> None:
    world = World(Queue("q", length_max=3), limits=Limits(early_deliveries_max=2))
    client = world.client()
    raw = client.joined.client
    server = client.joined.server
    # By hand: our own clients wait for credit.
    for n in range(4):
        message = Message(n).encode()
        data = (
            attach(f"one-off-{n}", 100 + n)
            + transfer(n, message, handle=100 + n)
            + frame(Detach(100 + n, True))
        )
        for event in server.receive(data, 0.0):
            assert isinstance(event, AttachRequested)
            assert world.host.attach(event.link)
    states = [
        each[1].state
        for each in said(server)
        if isinstance(each, tuple) and type(each[1]) is Disposition
    ]
    assert [type(each) for each in states] == [type(ACCEPTED)] * 3 + [Rejected]
    assert world.stats("q").available == 3
    assert raw is not server


@pytest.mark.req("B18")
async def test_by_the_limits_of_a_container() -> None:
    """Over a real connection, with all frames at once."""
    data = HELLO + attach() + transfer(0, Message("m").encode()) + frame(Detach(0, True))
    for limits, there in ((EARLY, 1), (Limits(), 0)):
        container = Container("host", limits=limits, sasl_policy="off")
        async with Broker(container=container, auto_create=["queue:q"]) as broker:
            (url,) = await broker.listen("amqp://127.0.0.1:0")
            port = int(url.rpartition(":")[2])
            stream = await trio.open_tcp_stream("127.0.0.1", port)
            async with stream:
                await stream.send_all(data)
                with trio.fail_after(5):
                    answer = b""
                    while b"\0\x53\x16" not in answer:  # detach
                        answer += await stream.receive_some()
            assert broker.stats("q").available == there


@pytest.mark.req("B18")
async def test_handlers_get_them_too() -> None:
    container = Container("host", limits=EARLY, sasl_policy="off")
    bodies: list[str] = []
    heard = trio.Event()

    @container.node("q")
    async def handler(body: str) -> None:
        bodies.append(body)
        if len(bodies) == 2:
            heard.set()

    async with container:
        (url,) = await container.listen("amqp://127.0.0.1:0")
        stream = await trio.open_tcp_stream("127.0.0.1", int(url.rpartition(":")[2]))
        messages = transfer(0, Message("a").encode()) + transfer(1, Message("b").encode())
        async with stream:
            await stream.send_all(HELLO + attach() + messages)
            with trio.fail_after(5):
                await heard.wait()
    assert bodies == ["a", "b"]
