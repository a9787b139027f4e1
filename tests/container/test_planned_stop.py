"""Planned ends: frames of a container that stops, and the reaction of clients to a peer's end."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from far_end import FarEnd

from amqp_rt import Broker, Message
from amqp_rt.broker import Queue
from amqp_rt.container.connections import Connection
from amqp_rt.container.container import Container
from amqp_rt.container.declaring import node, rpc, source
from amqp_rt.container.feeding import SourceLink
from amqp_rt.container.receiving import Receiver
from amqp_rt.container.recovery import CLOSING_S, Reconnect
from amqp_rt.errors import (
    AuthenticationFailed,
    ConnectFailed,
    ConnectionLost,
    LinkDetached,
    LinkEnded,
    LinkRefused,
    LocalProtocolError,
    SessionEnded,
)
from amqp_rt.limits import Limits
from amqp_rt.net.memory import MemoryNetwork
from amqp_rt.outcomes import ACCEPTED, Error

Clock = trio.testing.MockClock

#: Pauses without chance: 1, 2, 4, 5, 5 … seconds.
STEADY = Reconnect(first_delay_s=1, factor=2, delay_max_s=5, jitter=0, give_up_after_s=100)

FORCED = Error("amqp:link:detach-forced", "maintenance")


@asynccontextmanager
async def client(
    far: FarEnd, *nodes: Any, reconnect: Reconnect | None = STEADY
) -> AsyncIterator[tuple[Container, Connection]]:
    async with trio.open_nursery() as nursery:
        await nursery.start(far.listen, "far")
        async with Container("us", nodes=nodes, network=far.network) as us:
            async with us.connect("memory://far", reconnect=reconnect) as peer:
                yield us, peer
            # All tasks of the connection have ended with its block.
            assert us._started().connections.child_tasks <= {us._started().listeners.parent_task}
        nursery.cancel_scope.cancel()


def encoded(body: Any) -> bytes:
    return Message(body).encode()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


# --- a container that stops --------------------------------------------------------------------


class Everything:
    """Nodes of each kind whose handlers do not end by themselves."""

    @node("take")
    async def take(self, number: int) -> None:
        pass

    @rpc("double")
    async def double(self, number: int) -> int:
        return 2 * number

    @source("ticks")
    async def ticks(self, link: SourceLink) -> AsyncIterator[int]:
        yield 1
        await trio.sleep_forever()

    @node.link("raw")
    async def raw(self, link: Receiver) -> None:
        async for _ in link:
            pass


@pytest.mark.req("A10")
@pytest.mark.parametrize("failing", [False, True])
async def test_a_container_that_stops_closes_with_an_error_and_detaches_nothing(
    failing: bool,
) -> None:
    heard: list[tuple[str | None, bool]] = []

    def listen_to(link: Any) -> None:
        method = link.on_detached

        def on_detached(raw: Any, error: Error | None, closed: bool) -> None:
            heard.append((None if error is None else str(error.condition), closed))
            method(raw, error, closed)

        link.on_detached = on_detached

    network = MemoryNetwork()
    async with Container("client", network=network) as us, trio.open_nursery() as nursery:
        running = trio.Event()
        stop = trio.Event()

        async def serve() -> None:
            broker = Broker("b", nodes=[Everything()], network=network)
            try:
                async with broker:
                    await broker.declare(Queue("q"))
                    await broker.listen("memory://b")
                    running.set()
                    await stop.wait()
                    if failing:
                        raise KeyError
            except KeyError:
                pass

        nursery.start_soon(serve)
        await running.wait()
        async with us.connect("memory://b", reconnect=None) as peer:
            links = [
                *(peer.sender(each) for each in ("take", "raw", "double", "q")),
                *(peer.receiver(each) for each in ("ticks", "q")),
            ]
            for link in links:
                await link.wait_attached()
                listen_to(link)
            assert await peer.call("double", 2, reply=int) == 4
            stop.set()
            await peer.wait_closed()
            assert peer.ended_with is not None
            assert peer.ended_with.condition == "amqp:connection:forced"
            assert peer.ended_with.description == "'b' is stopping"
    assert heard == [("amqp:connection:forced", False)] * len(links)


@pytest.mark.req("A10")
async def test_a_link_that_is_asked_for_while_a_container_stops_waits_for_the_close(
    autojump_clock: Clock,
) -> None:
    @node("slow")
    async def slow(number: int) -> None:
        await trio.sleep(3)

    network = MemoryNetwork()
    async with Container("client", network=network) as us, trio.open_nursery() as nursery:
        stop = trio.Event()

        async def serve(*, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
            async with Container("c", nodes=[slow], network=network) as c:
                await c.listen("memory://c")
                task_status.started()
                await stop.wait()

        await nursery.start(serve)
        async with us.connect("memory://c", reconnect=STEADY) as peer, peer.sender("slow") as out:
            receipt = out.send_nowait(1)
            await trio.sleep(1)
            stop.set()
            await trio.sleep(1)
            late = peer.sender("slow")
            await trio.sleep(0.5)
            assert not late.closed
            # Running handlers end before the close.
            assert await receipt.outcome() == ACCEPTED
            await peer.wait_changed()
            assert peer.state == "recovering"
            stop = trio.Event()
            await nursery.start(serve)
            await late.wait_attached()
            await out.send(2)
            stop.set()


@pytest.mark.req("X4")
async def test_a_client_that_leaves_closes_without_an_error() -> None:
    network = MemoryNetwork()
    async with Container("c", network=network) as c:
        await c.listen("memory://c")
        async with Container("us", network=network) as us, us.connect("memory://c"):
            (accepted,) = c.connections
        await accepted.wait_closed()
        assert accepted.ended_with is None


# --- links that are detached -------------------------------------------------------------------


@pytest.mark.req("X25")
@pytest.mark.parametrize(
    ("error", "closed"),
    [
        (FORCED, True),
        (FORCED, False),
        (Error("amqp:connection:forced", "maintenance"), True),
        (None, False),
    ],
)
async def test_a_link_that_is_detached_for_a_passing_reason_attaches_again(
    error: Error | None, closed: bool, autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    far = FarEnd(settle=ACCEPTED, credit=10)
    async with (
        client(far) as (_, peer),
        peer.sender("q", name="out") as out,
        peer.receiver("q", name="in") as messages,
    ):
        await far.until(lambda: messages.credit)
        times = []
        for pause in (1, 2, 4):
            before = len(far.links)
            for link in far.links[-2:]:
                link.detach(error, closed=closed)
            started = trio.current_time()
            while out.attached or messages.attached:
                await trio.lowlevel.checkpoint()
            assert not out.closed
            sent = out.send_nowait("waits")
            await messages.wait_attached()
            await sent.accepted()
            times.append(trio.current_time() - started)
            assert len(far.links) == before + 2
            (back,) = [each for each in far.links[-2:] if hasattr(each, "send")]
            await far.until(lambda back=back: back.credit)
            back.send(encoded(pause))
            async with await messages.receive() as delivery:
                assert delivery.body == pause
        assert times == pytest.approx([1, 2, 4], abs=0.2)
        assert peer.state == "open"
        said = warnings(caplog)
        assert len(said) == 6
        assert all("detached: 'q'" in each or "detached the link to 'q'" in each for each in said)
        if error is not None:
            assert all("maintenance" in each for each in said)


@pytest.mark.req("X25")
@pytest.mark.parametrize("condition", ["amqp:connection:forced", "amqp:link:detach-forced"])
async def test_a_session_that_is_ended_for_maintenance_comes_back(
    condition: str, autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[int] = []

    @node("jobs")
    def take(number: int) -> None:
        seen.append(number)

    far = FarEnd(settle=ACCEPTED, credit=10)
    async with (
        client(far, take) as (us, peer),
        peer.session() as session,
        session.sender("own") as other,
        peer.sender("q", in_doubt="resend") as out,
        peer.receiver("q") as messages,
    ):
        await peer.serve(take)
        for pause in (1, 2, 4):
            for recorder in far.recorders:
                recorder.settle = None
            doubtful = out.send_nowait("in doubt")
            await trio.testing.wait_all_tasks_blocked()
            assert not doubtful.done
            started, before = trio.current_time(), len(far.links)
            ended = {link.session: None for link in far.links if link.attached}
            assert len(ended) == 2
            for each in ended:
                each.end(Error(condition, "maintenance"))
            waiting = out.send_nowait("later")
            await doubtful.accepted()
            await waiting.accepted()
            assert trio.current_time() - started == pytest.approx(pause, abs=0.2)
            await other.send("x")
            await far.until(lambda before=before: len(far.links) == before + 4)
            for link in far.links[before:]:
                if hasattr(link, "send"):
                    await far.until(lambda link=link: link.credit)
                    link.send(encoded(pause))
            async with await messages.receive() as delivery:
                assert delivery.body == pause
            await trio.testing.wait_all_tasks_blocked()
            assert seen[-1] == pause
        assert peer.state == "open"
        assert len(far.engines) == 1
        said = warnings(caplog)
        assert len(said) == 6
        assert all("maintenance" in each for each in said)
        assert us.stats()["jobs"]["links"] == 1


@pytest.mark.req("X25")
async def test_a_session_that_is_ended_again_and_again_is_given_up(autojump_clock: Clock) -> None:
    far = FarEnd(on_attach=lambda link: link.session.end(FORCED))
    async with client(far) as (_, peer):
        started = trio.current_time()
        with pytest.raises(SessionEnded, match="maintenance"):
            await peer.sender("q").wait_attached()
        assert 100 <= trio.current_time() - started <= 106
        # The next link begins another one.
        far.on_attach = far.accept
        await peer.sender("q").wait_attached()


@pytest.mark.req("X25")
@pytest.mark.parametrize("then", ["ends", "closes", "is lost", "cannot begin"])
async def test_what_happens_in_the_pause_of_a_session(then: str, autojump_clock: Clock) -> None:
    far = FarEnd(settle=ACCEPTED, credit=10, limits=Limits(channel_max=0))
    async with client(far) as (_, peer), peer.session() as session:
        out = session.sender("q")
        await out.wait_attached()
        far.link.session.end(FORCED)
        await trio.testing.wait_all_tasks_blocked()
        # The late link joins the others.
        late = session.sender("late")
        if then == "ends":
            session.end()
        elif then == "closes":
            peer.close()
        elif then == "is lost":
            far.drop()
        else:
            # Another session takes the only channel.
            peer.engine.begin()
        await trio.sleep(10)
        if then == "is lost":
            await out.send("x")
            await late.send("x")
            assert len(far.engines) == 2
            assert len(far.links) == 3
        else:
            with pytest.raises(
                {"ends": SessionEnded, "closes": ConnectionLost}.get(then, LocalProtocolError)
            ):
                await late.send("x")
            assert out.closed
            assert len(far.links) == 1


@pytest.mark.req("X25")
async def test_without_a_policy_an_ended_session_is_over(autojump_clock: Clock) -> None:
    far = FarEnd()
    async with client(far, reconnect=None) as (_, peer), peer.receiver("q") as messages:
        far.link.session.end(FORCED)
        with pytest.raises(SessionEnded, match="maintenance"):
            await anext(messages)


@pytest.mark.req("X25")
async def test_a_link_that_is_refused_for_a_passing_reason_attaches_again(
    autojump_clock: Clock,
) -> None:
    far = FarEnd(on_attach=lambda link: link.refuse(FORCED))
    async with client(far) as (_, peer):
        out = peer.sender("q")
        await far.until(lambda: far.links)
        far.on_attach = far.accept
        await out.wait_attached()


@pytest.mark.req("X25")
async def test_a_peer_that_detaches_again_and_again_is_given_up(autojump_clock: Clock) -> None:
    far = FarEnd(on_attach=lambda link: link.refuse(FORCED))
    async with client(far) as (_, peer):
        started = trio.current_time()
        with pytest.raises(LinkRefused, match="maintenance"):
            await peer.sender("q").wait_attached()
        assert 100 <= trio.current_time() - started <= 106
        assert len(far.links) < 30


@pytest.mark.req("X26")
@pytest.mark.parametrize(
    "condition", ["amqp:not-found", "amqp:unauthorized-access", "amqp:resource-deleted"]
)
async def test_any_other_reason_is_final_and_logged(
    condition: str, autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    far = FarEnd()
    async with client(far) as (_, peer), peer.receiver("q") as messages:
        far.link.detach(Error(condition, "so it is"))
        with pytest.raises(LinkDetached, match="'q': so it is") as caught:
            await anext(messages)
        assert caught.value.condition == condition
        await trio.sleep(30)
        assert len(far.links) == 1
    (said,) = warnings(caplog)
    assert "link lost" in said
    assert "so it is" in said
    assert condition in said


@pytest.mark.req("X25")
@pytest.mark.parametrize("pause", [0.0, CLOSING_S / 2])
async def test_links_that_are_detached_before_their_connection_closes_come_back(
    pause: float, autojump_clock: Clock
) -> None:
    far = FarEnd(settle=ACCEPTED, credit=10)
    async with (
        client(far) as (_, peer),
        peer.sender("q", in_doubt="resend") as out,
        peer.receiver("q") as messages,
    ):
        await far.until(lambda: messages.credit)
        far.settle = None
        far.recorders[0].settle = None
        doubtful = out.send_nowait("in doubt")
        await far.until(lambda: far.recorders[0].deliveries)
        for link in list(far.links):
            link.detach()
        if pause:
            await trio.sleep(pause)
        far.engine.close()
        far.settle = ACCEPTED
        while peer.state == "open":
            await peer.wait_changed()
        await doubtful.accepted()
        await out.send("after")
        (back,) = [each for each in far.links[-2:] if hasattr(each, "send")]
        await far.until(lambda: back.credit)
        back.send(encoded("x"))
        async with await messages.receive() as delivery:
            assert delivery.body == "x"
        assert len(far.links) == 4


@pytest.mark.req("X26")
async def test_a_link_that_ends_alone_has_ended(autojump_clock: Clock) -> None:
    far = FarEnd()
    async with (
        client(far) as (_, peer),
        peer.sender("q") as out,
        peer.receiver("q") as messages,
    ):
        await far.until(lambda: messages.credit)
        receipt = out.send_nowait("x")
        (feeding,) = [each for each in far.links if hasattr(each, "send")]
        await far.until(lambda: feeding.credit)
        feeding.send(encoded("last"))
        for link in list(far.links):
            link.detach()
        started = trio.current_time()
        taken: list[Any] = []

        async def take() -> None:
            async for delivery in messages:
                taken.append(delivery.body)  # noqa: PERF401  # messages before the end count

        with pytest.raises(LinkEnded):
            await take()
        assert taken == ["last"]
        with pytest.raises(LinkEnded):
            await receipt.outcome()
        assert trio.current_time() - started == pytest.approx(CLOSING_S, abs=0.05)
        assert len(far.links) == 2


async def test_a_link_that_is_closed_in_the_pause_stays_closed(autojump_clock: Clock) -> None:
    far = FarEnd()
    async with client(far) as (_, peer):
        for error in (FORCED, None):
            async with peer.receiver("q") as messages:
                far.link.detach(error)
                while messages.attached:
                    await trio.lowlevel.checkpoint()
        await trio.sleep(30)
        assert len(far.links) == 2


async def test_a_connection_lost_in_the_pause_attaches_each_link_once(
    autojump_clock: Clock,
) -> None:
    far = FarEnd()
    async with client(far) as (_, peer), peer.receiver("q") as messages:
        far.link.detach(FORCED)
        while messages.attached:
            await trio.lowlevel.checkpoint()
        far.drop()
        await messages.wait_attached()
        await trio.sleep(30)
        assert len(far.links) == 2


# --- nodes that are served at a peer -----------------------------------------------------------


@pytest.mark.req("X25")
@pytest.mark.parametrize("how", ["forced", "links first", "close"])
async def test_nodes_are_served_again(how: str, autojump_clock: Clock) -> None:
    taken: list[str] = []

    @node("q")
    async def take(body: str) -> None:
        taken.append(body)

    far = FarEnd(settle=ACCEPTED, credit=10)
    async with client(far, take) as (_, peer):
        await peer.serve()
        for number in range(3):
            link = far.link
            await far.until(lambda link=link: link.credit)
            link.send(encoded(f"x{number}"))
            await far.until(lambda number=number: len(taken) == number + 1)
            count = len(far.links)
            if how == "forced":
                link.detach(FORCED)
            else:
                if how == "links first":
                    link.detach()
                far.engine.close(
                    Error("amqp:connection:forced", "stopping") if how == "close" else None
                )
            await trio.sleep(6)
            assert len(far.links) == count + 1
    assert taken == ["x0", "x1", "x2"]


@pytest.mark.req("A10", "X25")
async def test_a_connection_lost_during_a_drain_brings_no_new_messages(
    autojump_clock: Clock,
) -> None:
    gate = trio.Event()
    taken: list[str] = []

    @node("q", prefetch=5)
    async def take(body: str) -> None:
        taken.append(body)
        await gate.wait()

    far = FarEnd(settle=ACCEPTED)
    async with client(far, take) as (us, peer):
        await peer.serve()
        await far.until(lambda: far.link.credit)
        far.link.send(encoded("first"))
        await far.until(lambda: len(taken) == 1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(us.drain)
            await trio.sleep(1)
            far.engine.close(Error("amqp:connection:forced", "stopping"))
            await trio.sleep(6)
            assert len(far.links) == 2
            assert far.link.attached
            assert far.link.credit == 0
            assert taken == ["first"]
            gate.set()


@pytest.mark.req("A10")
async def test_handlers_have_the_time_of_a_stop_once(autojump_clock: Clock) -> None:
    @node("q")
    async def take(body: str) -> None:
        await trio.sleep_forever()

    far = FarEnd(settle=ACCEPTED)
    async with client(far, take) as (us, peer):
        await peer.serve()
        await far.until(lambda: far.link.credit)
        far.link.send(encoded("first"))
        await trio.sleep(1)
        began = trio.current_time()
        await us.drain()
        assert trio.current_time() - began == pytest.approx(us.drain_s)
        await trio.sleep(1)
        await us.drain()
        assert trio.current_time() - began == pytest.approx(us.drain_s + 1)


@pytest.mark.req("X25")
async def test_replies_go_on_when_their_link_is_back(autojump_clock: Clock) -> None:
    @rpc("q")
    async def double(number: int) -> int:
        return 2 * number

    far = FarEnd(settle=ACCEPTED, credit=10)
    async with client(far, double) as (_, peer):
        await peer.serve()
        requests, answers = far.link, far.links[0]
        heard = far.recorders[0]
        for number in range(3):
            await far.until(lambda: requests.credit)
            requests.send(Message(number, reply_to="back", message_id="m").encode())
            await far.until(lambda heard=heard: heard.deliveries)
            (delivery,) = heard.deliveries
            assert Message.decode(delivery.payload).body == 2 * number
            count = len(far.links)
            answers.detach(FORCED)
            await trio.sleep(6)
            # Only this link was attached again.
            assert len(far.links) == count + 1
            answers, heard = far.link, far.heard
            assert requests.attached


@pytest.mark.req("X25", "X26")
@pytest.mark.parametrize("nodes", ["node", "rpc"])
async def test_a_node_whose_link_ends_for_good_ends_serve(
    nodes: str, autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    kind = node if nodes == "node" else rpc

    @kind("q")
    async def take(number: int) -> None:
        pass

    far = FarEnd(credit=10)
    async with client(far, take) as (us, peer):
        await peer.serve()
        far.link.detach(Error("amqp:resource-deleted", "gone for good"))
        with pytest.raises(LinkDetached, match="gone for good") as caught:
            await us.serve()
        assert caught.value.condition == "amqp:resource-deleted"
    assert any("not served any more" in each and "gone" in each for each in warnings(caplog))


@pytest.mark.req("X25")
async def test_a_worker_whose_broker_does_not_come_back_hears_so(
    autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    @node("q")
    async def take(number: int) -> None:
        pass

    far = FarEnd()
    async with client(far, take) as (us, peer):
        await peer.serve()
        far.close_door("far")
        far.engine.close(Error("amqp:connection:forced", "stopping"))
        started = trio.current_time()
        with pytest.raises(ConnectionLost, match="nothing listens there"):
            await us.serve()
        assert 100 <= trio.current_time() - started <= 106
        # A second call raises the same error at once.
        with pytest.raises(ConnectionLost):
            await us.serve()
    assert any("connection given up" in each for each in warnings(caplog))


@pytest.mark.parametrize("how", ["stop", "leave", "removed", "source ends"])
async def test_what_ends_as_it_should_ends_serve_without_an_error(
    how: str, autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    @node("q")
    async def take(body: str) -> None:
        pass

    @source("s")
    async def one() -> AsyncIterator[int]:
        yield 1

    far = FarEnd(settle=ACCEPTED, credit=10)
    async with client(far, take, one) as (us, peer):
        if how == "source ends":
            await us.consume(peer, [one])
            await far.until(lambda: far.heard.detached)
        else:
            await us.consume(peer, [take])
        if how == "removed":
            us.remove(take)
            await far.until(lambda: far.heard.detached)
        if how == "leave":
            await peer.aclose()
        await trio.sleep(1)
        us.stop()
        await us.serve()
    assert warnings(caplog) == []


# --- the first connection ----------------------------------------------------------------------


@pytest.mark.req("X25")
async def test_the_first_connection_is_tried_again(
    nursery: trio.Nursery, autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    far = FarEnd()

    async def come_late() -> None:
        await trio.sleep(5)
        await far.listen("far")

    nursery.start_soon(come_late)
    async with (
        Container("us", network=far.network) as us,
        us.connect("memory://far", reconnect=STEADY) as peer,
    ):
        assert trio.current_time() == pytest.approx(7, abs=0.1)
        assert peer.state == "open"
    assert [each for each in warnings(caplog) if "nothing listens there" in each]


@pytest.mark.req("X25")
async def test_the_first_connection_is_given_up_by_the_same_policy(autojump_clock: Clock) -> None:
    async with Container("us") as us:
        started = trio.current_time()
        with pytest.raises(ConnectFailed, match="nothing listens there"):
            async with us.connect("memory://far", reconnect=STEADY):
                pytest.fail("connected")
        assert 100 <= trio.current_time() - started <= 106


@pytest.mark.parametrize(
    ("condition", "kind"),
    [
        ("amqp:unauthorized-access", AuthenticationFailed),
        ("amqp:not-found", ConnectFailed),
        ("amqp:not-allowed", ConnectFailed),
    ],
)
async def test_a_peer_that_would_refuse_us_again_is_not_asked_again(
    condition: str, kind: type[Exception], nursery: trio.Nursery, autojump_clock: Clock
) -> None:
    far = FarEnd(on_open=lambda engine: engine.close(Error(condition, "no")))
    await nursery.start(far.listen, "far")
    async with Container("us", network=far.network) as us:
        with pytest.raises(kind):
            async with us.connect("memory://far", reconnect=STEADY):
                pytest.fail("connected")
    assert far.dialled == ["far"]
