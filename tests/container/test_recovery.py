"""Connecting and reconnecting: failover, back-off, redirects, messages in doubt, and ends."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
import trio
from far_end import FarEnd

import amqp_rt
from amqp_rt.container.connections import Connection
from amqp_rt.container.container import Container
from amqp_rt.container.declaring import node
from amqp_rt.container.recovery import FINAL_CONDITIONS, Reconnect, connect
from amqp_rt.errors import (
    AuthenticationFailed,
    ConnectFailed,
    ConnectionLost,
    LinkDetached,
    SessionEnded,
)
from amqp_rt.limits import Limits
from amqp_rt.message import Message
from amqp_rt.net.memory import MemoryNetwork
from amqp_rt.outcomes import ACCEPTED, Error
from amqp_rt.security.mechanisms import Anonymous, Plain
from amqp_rt.termini import Target
from amqp_rt.testing.pairs import Recorder
from amqp_rt.values import Symbol

Clock = trio.testing.MockClock

#: Pauses without chance: 1, 2, 4, 5, 5 … seconds.
STEADY = Reconnect(first_delay_s=1, factor=2, delay_max_s=5, jitter=0, give_up_after_s=1000)


@asynccontextmanager
async def client(far: FarEnd, *names: str, **options: Any) -> AsyncIterator[Connection]:
    """A connection to one of *names*, which come back after 1, 2, 4, 5 … seconds."""
    options.setdefault("reconnect", STEADY)
    async with Container("us", network=far.network) as us:
        async with us.connect([f"memory://{name}" for name in names], **options) as peer:
            yield peer
        # All tasks of the connection have ended with its block.
        assert us._started().connections.child_tasks == {us._started().listeners.parent_task}


def close(far: FarEnd, condition: str, **info: Any) -> None:
    """Let the peer close the present connection."""
    symbols = {Symbol(key.replace("_", "-")): value for key, value in info.items()}
    far.engine.close(Error(condition, "so it is", symbols or None))


async def until(connection: Connection, state: str) -> None:
    while connection.state != state:
        await connection.wait_changed()


# --- the first connection --------------------------------------------------------------------


@pytest.mark.req("X25")
async def test_the_urls_are_tried_in_order(nursery: trio.Nursery, autojump_clock: Clock) -> None:
    far = FarEnd()
    await nursery.start(far.listen, "b")
    async with client(far, "a", "b", "c") as peer:
        assert far.dialled == ["b"]
        assert peer.peer.address == "memory://b"
        # The address that worked is tried first, then those after it.
        for name in ("a", "c"):
            await nursery.start(far.listen, name)
        far.drop()
        await until(peer, "recovering")
        await peer.wait_open()
        assert far.dialled == ["b", "b"]
        far.close_door("b")
        far.drop()
        await until(peer, "recovering")
        await peer.wait_open()
        assert far.dialled == ["b", "b", "c"]
        far.close_door("c")
        far.drop()
        await until(peer, "recovering")
        await peer.wait_open()
        assert far.dialled == ["b", "b", "c", "a"]


async def test_if_none_works_every_reason_is_said() -> None:
    far = FarEnd()
    with pytest.raises(ConnectFailed) as caught:
        async with client(far, "a", "b", reconnect=None):
            pytest.fail("connected")
    assert caught.value.description == (
        "cannot connect to memory://a: nothing listens there; "
        "cannot connect to memory://b: nothing listens there"
    )
    assert not isinstance(caught.value, AuthenticationFailed)


async def test_a_peer_that_says_nothing_gets_its_time_and_no_more(autojump_clock: Clock) -> None:
    far = FarEnd()
    channel = far.network.listen("far")
    started = trio.current_time()
    with pytest.raises(ConnectFailed, match=r"cannot connect to memory://far: .*") as caught:
        async with client(far, "far", within=3, reconnect=None):
            pytest.fail("connected")
    # The peer has a moment to read the reason.
    assert 3 <= trio.current_time() - started <= 4.1
    assert caught.value.description.count("\n") == 0
    channel.close()


async def test_a_dial_that_hangs_is_bounded_too(autojump_clock: Clock) -> None:
    far = FarEnd()
    channel = far.network.listen("far")
    async with trio.open_nursery() as nursery:
        # The backlog is full, so that connecting waits.
        for _ in range(200):
            nursery.start_soon(far.network.dial, "far")
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(ConnectFailed, match="no answer within 2 s"):
            async with client(far, "far", within=2, reconnect=None):
                pytest.fail("connected")
        nursery.cancel_scope.cancel()
    channel.close()


async def test_a_peer_that_hangs_up_is_not_a_connection(nursery: trio.Nursery) -> None:
    far = FarEnd(on_open=lambda engine: engine.close(Error("amqp:not-allowed", "go away")))
    await nursery.start(far.listen, "far")
    with pytest.raises(ConnectFailed, match="cannot connect to memory://far: go away") as caught:
        async with client(far, "far"):
            pytest.fail("connected")
    assert caught.value.condition == "amqp:not-allowed"


async def test_a_peer_that_refuses_everybody_is_an_authentication_failure(
    nursery: trio.Nursery,
) -> None:
    far = FarEnd(on_open=lambda engine: engine.close(Error("amqp:unauthorized-access")))
    await nursery.start(far.listen, "far")
    with pytest.raises(AuthenticationFailed):
        async with client(far, "far"):
            pytest.fail("connected")
    # Another address may let us in.
    with pytest.raises(ConnectFailed) as caught:
        async with client(far, "far", "nowhere", reconnect=None):
            pytest.fail("connected")
    assert not isinstance(caught.value, AuthenticationFailed)


async def test_something_else_that_answers_is_a_sentence(nursery: trio.Nursery) -> None:
    far = FarEnd()
    channel = far.network.listen("far")

    async def http() -> None:
        stream = await channel.receive()
        await stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await stream.aclose()

    nursery.start_soon(http)
    with pytest.raises(ConnectFailed, match="cannot connect to memory://far: "):
        async with client(far, "far"):
            pytest.fail("connected")


@pytest.mark.parametrize(
    ("urls", "sentence"),
    [
        ("http://x", "http"),
        ("amqp://x:99999", "port"),
        ([], "URL"),
        ("amqp://u:secret@[::1", "amqp://"),
        (["memory://a", "nonsense://b"], "nonsense"),
    ],
)
async def test_a_wrong_url_is_one_sentence_and_shows_no_password(urls: Any, sentence: str) -> None:
    async with Container("us") as us:
        with pytest.raises(ConnectFailed) as caught:
            async with us.connect(urls):
                pytest.fail("connected")
    text = str(caught.value)
    assert sentence in text
    assert "secret" not in text
    assert "\n" not in text


async def test_the_environment_says_where(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = FarEnd()
    await nursery.start(far.listen, "b")
    monkeypatch.setenv("AMQP_URL", "memory://a,memory://b")
    async with Container("us", network=far.network) as us, us.connect() as peer:
        assert peer.peer.address == "memory://b"


async def test_without_an_environment_it_is_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AMQP_URL", raising=False)
    monkeypatch.setattr("amqp_rt.container.recovery.DEFAULT_URL", "amqp://127.0.0.1:1")
    with pytest.raises(ConnectFailed, match=r"amqp://127\.0\.0\.1:1: nothing listens there"):
        async with connect(reconnect=None):
            pytest.fail("connected")


async def test_connecting_needs_no_container_of_ones_own() -> None:
    got: list[str] = []

    @node("q")
    async def take(body: str) -> None:
        got.append(body)

    async with Container("far", nodes=[take]) as far:
        (url,) = await far.listen("amqp://127.0.0.1:0")
        async with amqp_rt.connect(url) as peer:
            async with peer.sender("q") as out:
                await out.send("x")
            (theirs,) = far.connections
            assert theirs.peer.container_id.startswith("client-")
            assert peer.peer.container_id == "far"
        with pytest.raises(ZeroDivisionError):
            async with amqp_rt.connect(url):
                raise ZeroDivisionError
    assert got == ["x"]


# --- who we are ------------------------------------------------------------------------------


@pytest.mark.req("SE2")
@pytest.mark.parametrize(
    ("options", "url"),
    [
        ({"auth": Plain("u", "p")}, "memory://far"),
        ({"auth": [Anonymous(), Plain("u", "p")]}, "memory://far"),
    ],
)
async def test_the_right_password_lets_us_in(options: Any, url: str) -> None:
    async with Container("far", users={"u": "p"}) as far:
        await far.listen(url)
        async with (
            Container("us", network=far.network) as us,
            us.connect(url, **options) as peer,
        ):
            assert far.connections[0].peer.user == "u"
            assert peer.state == "open"


@pytest.mark.req("SE2")
async def test_the_url_may_hold_user_and_password() -> None:
    async with Container("far", users={"u@x": "s:/"}) as far:
        (url,) = await far.listen("amqp://127.0.0.1:0")
        with_user = url.replace("amqp://", "amqp://u%40x:s%3A%2F@")
        async with Container("us") as us, us.connect(with_user) as peer:
            assert far.connections[0].peer.user == "u@x"
            assert "s:/" not in peer.peer.address + repr(peer)


@pytest.mark.req("SE2")
@pytest.mark.parametrize("auth", [Plain("u", "wrong"), Plain("nobody", "p"), None])
async def test_the_wrong_password_does_not(auth: Any) -> None:
    async with (
        Container("far", users={"u": "p"}, limits=Limits(failed_login_delay_s=0)) as far,
        Container("us", network=far.network) as us,
    ):
        await far.listen("memory://far")
        with pytest.raises(AuthenticationFailed) as caught:
            async with us.connect("memory://far", auth=auth):
                pytest.fail("connected")
        assert "memory://far" in str(caught.value)
        assert "wrong" not in str(caught.value)


@pytest.mark.req("SE2")
async def test_a_login_that_is_no_longer_valid_ends_it_at_once(autojump_clock: Clock) -> None:
    valid = True

    async def verify(user: str, password: str, peer: Any) -> Any:
        return user if valid else None

    async with (
        Container("far", users=verify) as far,
        Container("us", network=far.network) as us,
    ):
        await far.listen("memory://far")
        async with us.connect("memory://far", auth=Plain("u", "p"), reconnect=STEADY) as peer:
            sender = peer.sender("q")
            valid = False
            far.connections[0].close(Error("amqp:connection:forced", "restart"))
            started = trio.current_time()
            await peer.wait_closed()
            # A single pause, and the delay of a failed login.
            assert trio.current_time() - started < 3
            with pytest.raises(ConnectionLost) as caught:
                await sender.wait_attached()
            assert caught.value.condition == "amqp:unauthorized-access"


@pytest.mark.req("SE9")
async def test_a_password_does_not_cross_a_network_in_clear() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine is in no network")
        (host, _) = probe.getsockname()
    if host.startswith("127."):
        pytest.skip("this machine is in no network")
    async with Container("far", users={"u": "p"}, plain_in_clear=True) as far:
        (url,) = await far.listen(f"amqp://{host}:0")
        async with Container("us") as us:
            with pytest.raises(ConnectFailed, match="plain_in_clear=True") as caught:
                async with us.connect(url, auth=Plain("u", "p")):
                    pytest.fail("connected")
            assert caught.value.condition == "amqp:not-allowed"
            assert not far.connections
            async with us.connect(url, auth=Plain("u", "p"), plain_in_clear=True) as peer:
                assert peer.state == "open"


# --- pipelined frames ------------------------------------------------------------------------


@pytest.mark.req("X4", "M43")
async def test_the_open_says_what_it_was_told_to(nursery: trio.Nursery) -> None:
    far = FarEnd()
    await nursery.start(far.listen, "far")
    async with client(
        far,
        "far",
        virtual_host="house",
        properties={Symbol("product"): "x"},
        desired_capabilities=["c-1"],
    ):
        peer = far.engine.peer
        assert peer.container_id == "us"
        assert peer.virtual_host == "house"
        assert peer.properties["product"] == "x"
        assert peer.desired_capabilities == ("c-1",)
        assert peer.offered_capabilities == ("ANONYMOUS-RELAY",)


@pytest.mark.req("X1", "X5")
@pytest.mark.parametrize(
    ("options", "first"),
    [
        ({"sasl": False}, b"AMQP\x00\x01\x00\x00"),
        ({"sasl": False, "pipelined": False}, b"AMQP\x00\x01\x00\x00"),
        ({}, b"AMQP\x03\x01\x00\x00"),
        ({"pipelined": False}, b"AMQP\x03\x01\x00\x00"),
    ],
)
async def test_open_follows_the_header_at_once_or_when_the_peer_has_sent_its_own(
    options: Any, first: bytes, autojump_clock: Clock
) -> None:
    far = FarEnd()
    channel = far.network.listen("far")
    async with trio.open_nursery() as nursery, Container("us", network=far.network) as us:

        async def try_to() -> None:
            with pytest.raises(ConnectFailed):
                async with us.connect("memory://far", within=5, reconnect=None, **options):
                    pytest.fail("connected")

        nursery.start_soon(try_to)
        stream = await channel.receive()
        await trio.testing.wait_all_tasks_blocked()
        data = await stream.receive_some(100_000)
        assert data[:8] == first
        # With SASL the client always waits for the peer's mechanisms.
        assert (len(data) > 8) == (options == {"sasl": False})
        if options == {"sasl": False, "pipelined": False}:
            await stream.send_all(first)
            data = await stream.receive_some(100_000)
            assert data[8:11] == b"\x00\x53\x10"  # open
        await stream.aclose()
    channel.close()


# --- lost and opened again -------------------------------------------------------------------


@pytest.mark.req("X25")
@pytest.mark.parametrize(
    ("chance", "pauses"),
    [(0.0, [1, 2, 4, 5, 5, 5]), (1.0, [0.5, 1, 2, 2.5, 2.5, 2.5]), (0.5, [0.75, 1.5, 3, 3.75])],
)
async def test_pauses_grow_up_to_a_bound_and_chance_shortens_them(
    chance: float, pauses: list[float], nursery: trio.Nursery, autojump_clock: Clock
) -> None:
    far = FarEnd()
    await nursery.start(far.listen, "far")
    asked: list[float] = []

    def jitter() -> float:
        asked.append(trio.current_time())
        return chance

    policy = Reconnect(first_delay_s=1, factor=2, delay_max_s=5, jitter=0.5, give_up_after_s=1000)
    async with client(far, "far", reconnect=policy, jitter=jitter) as peer:
        far.close_door("far")
        far.drop()
        await trio.sleep(sum(pauses) + 5)
        taken = [late - early for early, late in pairwise(asked)]
        assert taken[: len(pauses)] == pytest.approx(pauses)
        assert peer.state == "recovering"
        await nursery.start(far.listen, "far")
        await peer.wait_open()


@pytest.mark.req("X25")
async def test_a_peer_that_lets_us_in_to_throw_us_out_is_not_asked_ever_faster(
    nursery: trio.Nursery, autojump_clock: Clock
) -> None:
    far = FarEnd()
    await nursery.start(far.listen, "far")
    times: list[float] = []

    async def open_for(seconds: float) -> None:
        await peer.wait_open()
        times.append(trio.current_time())
        await trio.sleep(seconds)
        far.engine.close(Error("amqp:resource-limit-exceeded", "too many"))
        await until(peer, "recovering")

    async with client(far, "far") as peer:
        for _ in range(4):
            await open_for(0.1)
        pauses = [late - early - 0.1 for early, late in pairwise(times)]
        assert pauses == pytest.approx([1, 2, 4], abs=0.05)
        # A connection that lasts for a while resets the pauses.
        await open_for(100)
        del times[:-1]
        await open_for(0)
        assert times[1] - times[0] == pytest.approx(101, abs=0.05)


@pytest.mark.req("X25")
async def test_it_is_given_up_in_the_end(nursery: trio.Nursery, autojump_clock: Clock) -> None:
    far = FarEnd()
    await nursery.start(far.listen, "far")
    policy = Reconnect(first_delay_s=1, delay_max_s=4, jitter=0, give_up_after_s=20)
    states: list[str] = []
    async with client(
        far, "far", reconnect=policy, on_state=lambda peer: states.append(peer.state)
    ) as peer:
        out = peer.sender("q")
        await out.wait_attached()
        started = trio.current_time()
        far.close_door("far")
        far.drop()
        await until(peer, "recovering")
        waiting = out.send_nowait("x")
        with pytest.raises(ConnectionLost, match="nothing listens there"):
            await waiting.outcome()
        assert peer.state == "closed"
        assert 20 <= trio.current_time() - started <= 24
        with pytest.raises(ConnectionLost, match="nothing listens there"):
            peer.receiver("q")
        with pytest.raises(ConnectionLost):
            await peer.call("q", 1)
    assert states == ["open", "recovering", "closed"]


@pytest.mark.req("X25", "X26")
@pytest.mark.parametrize("condition", sorted(FINAL_CONDITIONS))
async def test_what_would_be_said_again_ends_it(condition: str, nursery: trio.Nursery) -> None:
    far = FarEnd()
    await nursery.start(far.listen, "far")
    async with client(far, "far") as peer:
        out = peer.sender("q")
        close(far, condition)
        await peer.wait_closed()
        with pytest.raises(ConnectionLost, match="so it is") as caught:
            await out.send("x")
        assert caught.value.condition == condition
        with pytest.raises(ConnectionLost):
            await peer.wait_open()
    assert far.dialled == ["far"]


@pytest.mark.req("X25")
@pytest.mark.parametrize("condition", ["amqp:connection:forced", "amqp:internal-error", None])
async def test_anything_else_is_dialled_again(
    condition: str | None, nursery: trio.Nursery, autojump_clock: Clock
) -> None:
    far = FarEnd(settle=ACCEPTED, credit=10)
    await nursery.start(far.listen, "far")
    async with client(far, "far") as peer, peer.sender("q") as out:
        far.engine.close(None if condition is None else Error(condition))
        await until(peer, "recovering")
        assert await out.send("x") == ACCEPTED
    assert far.dialled == ["far", "far"]


@pytest.mark.req("X25", "X26")
async def test_without_recovery_a_loss_is_final(nursery: trio.Nursery) -> None:
    far = FarEnd()
    await nursery.start(far.listen, "far")
    async with client(far, "far", reconnect=None) as peer, peer.receiver("q") as inbox:
        far.drop()
        with pytest.raises(ConnectionLost, match="without a close"):
            await inbox.receive()
        assert peer.state == "closed"
    assert far.dialled == ["far"]


@pytest.mark.req("X6", "X25")
async def test_a_peer_that_falls_silent_is_lost(
    nursery: trio.Nursery, autojump_clock: Clock
) -> None:
    far = FarEnd()
    await nursery.start(far.listen, "far")
    async with client(far, "far", limits=Limits(idle_timeout_s=10)) as peer:
        # The peer keeps a connection alive as long as it lives.
        await trio.sleep(100)
        assert far.dialled == ["far"]
        far.mute()
        started = trio.current_time()
        await until(peer, "recovering")
        assert trio.current_time() - started <= 21
        await peer.wait_open()
    assert far.dialled == ["far", "far"]


@pytest.mark.req("X25")
async def test_after_a_silent_peer_the_next_url_is_tried_first(
    nursery: trio.Nursery, autojump_clock: Clock
) -> None:
    far = FarEnd()
    for name in ("a", "b"):
        await nursery.start(far.listen, name)
    async with client(far, "a", "b", limits=Limits(idle_timeout_s=10)) as peer:
        far.mute()
        await until(peer, "recovering")
        await peer.wait_open()
    # A stopped process still accepts connections, so that dialling "a" would take all of *within*.
    assert far.dialled == ["a", "b"]


# --- deliveries in flight --------------------------------------------------------------------


@pytest.mark.req("X25")
@pytest.mark.parametrize("in_doubt", ["raise", "resend"])
async def test_what_had_left_is_in_doubt_and_what_waited_goes_on(
    in_doubt: Any, nursery: trio.Nursery, autojump_clock: Clock
) -> None:
    far = FarEnd()
    await nursery.start(far.listen, "far")
    async with client(far, "far") as peer, peer.sender("q", in_doubt=in_doubt) as out:
        far.link.grant(2)
        receipts = [out.send_nowait(number) for number in range(4)]
        await far.until(lambda: len(far.heard.deliveries) == 2)
        far.heard.deliveries[0].settle(ACCEPTED)
        assert await receipts[0].outcome() == ACCEPTED
        before = far.heard
        far.credit, far.settle = 100, ACCEPTED
        far.drop()
        await until(peer, "recovering")
        late = out.send_nowait(4)
        if in_doubt == "raise":
            with pytest.raises(ConnectionLost, match="taken or not"):
                await receipts[1].accepted()
        else:
            await receipts[1].accepted()
        for receipt in (*receipts[2:], late):
            await receipt.accepted()
        assert far.heard is not before
    sent = [Message.decode(each.payload).body for each in far.heard.deliveries]
    assert sent == ([2, 3, 4] if in_doubt == "raise" else [1, 2, 3, 4])


@pytest.mark.req("X25")
async def test_links_come_back_under_their_names(
    nursery: trio.Nursery, autojump_clock: Clock
) -> None:
    far = FarEnd(settle=ACCEPTED, credit=10)
    await nursery.start(far.listen, "far")
    async with (
        client(far, "far") as peer,
        peer.sender("q") as out,
        peer.receiver("q", credit=7) as inbox,
        peer.receiver(dynamic=True) as made,
        peer.session() as session,
        session.sender("r") as other,
    ):
        names = sorted(link.name for link in far.links)
        assert len(set(names)) == 4
        first = made.address
        far.drop()
        await until(peer, "recovering")
        assert not out.attached
        assert (out.credit, inbox.credit, inbox.available) == (0, 0, 0)
        with pytest.raises(LinkDetached, match="at the moment"):
            out.link  # noqa: B018
        for link in (out, inbox, made, other):
            await link.wait_attached()
        assert sorted(link.name for link in far.links[4:]) == names
        assert made.address != first
        assert made.address in repr(made)
        await trio.testing.wait_all_tasks_blocked()
        assert inbox.credit == 7
        assert await out.send("x") == ACCEPTED
        assert await other.send("x") == ACCEPTED


@pytest.mark.req("X25")
async def test_deliveries_of_a_lost_connection_come_again(
    nursery: trio.Nursery, autojump_clock: Clock
) -> None:
    far = FarEnd()
    await nursery.start(far.listen, "far")
    async with client(far, "far") as peer, peer.receiver("q") as inbox:
        await far.until(lambda: far.link.credit)
        far.link.send(Message("taken").encode())
        taken = await inbox.receive()
        far.link.send(Message("waits").encode())
        far.link.send(Message("settled").encode(), settled=True)
        await trio.testing.wait_all_tasks_blocked()
        assert inbox.waiting == 2
        far.drop()
        await until(peer, "recovering")
        # Settled messages are not redelivered, so they stay in the receiver.
        assert (await inbox.receive()).body == "settled"
        assert inbox.waiting == 0
        taken.accept()  # no effect, and no error
        got: list[Any] = []

        async def take() -> None:
            got.append((await inbox.receive()).body)

        nursery.start_soon(take)
        await inbox.wait_attached()
        await far.until(lambda: far.link.credit)
        far.link.send(Message("again").encode())
        await far.until(lambda: got)
        assert got == ["again"]


@pytest.mark.req("X25", "X26")
async def test_a_link_that_is_refused_when_it_comes_back_says_so(
    nursery: trio.Nursery, autojump_clock: Clock
) -> None:
    far = FarEnd(settle=ACCEPTED, credit=10)
    await nursery.start(far.listen, "far")
    async with client(far, "far") as peer, peer.sender("q") as out:
        far.on_attach = lambda link: link.refuse(Error("amqp:not-found", "deleted meanwhile"))
        far.drop()
        await until(peer, "recovering")
        with pytest.raises(LinkDetached, match="deleted meanwhile"):
            await out.send("x")
        assert peer.state == "open"


@pytest.mark.req("X26")
async def test_an_ended_session_takes_its_links_and_no_others(nursery: trio.Nursery) -> None:
    far = FarEnd(settle=ACCEPTED, credit=10)
    await nursery.start(far.listen, "far")
    async with client(far, "far") as peer, peer.sender("q") as out, peer.session() as session:
        other = session.sender("q")
        await other.wait_attached()
        far.link.session.end(Error("amqp:session:errant-link", "enough"))
        with pytest.raises(SessionEnded, match="enough") as caught:  # noqa: PT012
            while True:
                await other.send("x")
                await trio.lowlevel.checkpoint()
        assert caught.value.condition == "amqp:session:errant-link"
        with pytest.raises(SessionEnded):
            session.sender("q")
        assert await out.send("x") == ACCEPTED
        # The default session of the connection begins again when it is needed.
        far.links[0].session.end(Error("amqp:session:errant-link"))
        with pytest.raises(SessionEnded):  # noqa: PT012
            while True:
                await out.send("x")
                await trio.lowlevel.checkpoint()
        async with peer.sender("q") as again:
            assert await again.send("x") == ACCEPTED
    assert far.dialled == ["far"]


# --- redirects -------------------------------------------------------------------------------


@pytest.mark.req("X27")
@pytest.mark.parametrize("when", ["at open", "later"])
@pytest.mark.parametrize("policy", [STEADY, None])
async def test_a_redirected_connection_is_followed_without_a_pause(
    when: str, policy: Any, nursery: trio.Nursery, autojump_clock: Clock
) -> None:
    first, second = FarEnd(), FarEnd(settle=ACCEPTED, credit=10)
    second.network = first.network
    info = {
        Symbol("network-host"): "second",
        Symbol("hostname"): "house",
        Symbol("port"): 5672,
    }
    redirect = Error("amqp:connection:redirect", "over there", info)
    if when == "at open":
        first.on_open = lambda engine: engine.close(redirect)
    await nursery.start(first.listen, "first")
    await nursery.start(second.listen, "second")
    started = trio.current_time()
    async with client(first, "first", reconnect=policy) as peer:
        if when == "later":
            out = peer.sender("q")
            await out.wait_attached()
            first.engine.close(redirect)
            if policy is None:
                with pytest.raises(ConnectionLost, match="over there") as caught:
                    await out.send("x")
                assert caught.value.condition == "amqp:connection:redirect"
                assert caught.value.info == info
                return
            await until(peer, "recovering")
            await out.send("x")
        else:
            async with peer.sender("q") as out:
                await out.send("x")
        assert trio.current_time() == started
        assert second.engine.peer.virtual_host == "house"
        if policy is None:
            return
        # After another loss the original address is tried first.
        first.on_open = None
        second.drop()
        await until(peer, "recovering")
        await peer.wait_open()
    assert first.dialled == ["first", "first"]
    assert second.dialled == ["second"]


@pytest.mark.req("X27")
async def test_redirects_in_a_circle_end(nursery: trio.Nursery) -> None:
    far = FarEnd()
    where = {Symbol("network-host"): "far"}
    far.on_open = lambda engine: engine.close(Error("amqp:connection:redirect", None, where))
    await nursery.start(far.listen, "far")
    with pytest.raises(ConnectFailed, match="redirects us without end"):
        async with client(far, "far", reconnect=None):
            pytest.fail("connected")
    assert len(far.dialled) < 10


@pytest.mark.req("X27")
async def test_a_redirect_to_nowhere_is_said(nursery: trio.Nursery) -> None:
    far = FarEnd()
    where = {Symbol("network-host"): "nowhere"}
    far.on_open = lambda engine: engine.close(Error("amqp:connection:redirect", None, where))
    await nursery.start(far.listen, "far")
    with pytest.raises(ConnectFailed, match="memory://nowhere: nothing listens there"):
        async with client(far, "far", reconnect=None):
            pytest.fail("connected")


def redirecting(to: FarEnd, /, **info: Any) -> Any:
    symbols = {Symbol(key.replace("_", "-")): value for key, value in info.items()}

    def refuse(link: Any) -> None:
        link.refuse(Error("amqp:link:redirect", "over there", symbols))

    return refuse


@pytest.mark.req("X27")
@pytest.mark.parametrize("kind", ["sender", "receiver"])
@pytest.mark.parametrize("when", ["refused", "detached"])
async def test_a_redirected_link_goes_on_elsewhere(
    kind: str, when: str, nursery: trio.Nursery, autojump_clock: Clock
) -> None:
    first, second = FarEnd(credit=1), FarEnd(settle=ACCEPTED, credit=10)
    second.network = first.network
    info = {Symbol("network-host"): "second", Symbol("address"): "q2"}
    error = Error("amqp:link:redirect", "over there", info)
    if when == "refused":
        first.on_attach = lambda link: link.refuse(error)
    await nursery.start(first.listen, "first")
    await nursery.start(second.listen, "second")
    async with client(first, "first") as peer:
        async with peer.sender("q") if kind == "sender" else peer.receiver("q") as link:
            if when == "detached":
                first.link.detach(error)
                await trio.testing.wait_all_tasks_blocked()
            await link.wait_attached()
            assert link.address == "q2"
            assert second.link.connection.peer.container_id == "us"
            if isinstance(link, amqp_rt.Sender):
                assert second.link.target.address == "q2"
                assert await link.send("x") == ACCEPTED
            else:
                assert second.link.source.address == "q2"
                await second.until(lambda: second.link.credit)
                second.link.send(Message("x").encode())
                assert (await link.receive()).body == "x"
            # The original connection stays open, and one new connection serves all such links.
            first.on_attach = lambda link: link.refuse(error)
            async with peer.sender("q") as another:
                assert await another.send("y") == ACCEPTED
            assert (first.dialled, second.dialled) == (["first"], ["second"])
            # The second connection recovers by itself, too.
            second.drop()
            if isinstance(link, amqp_rt.Sender):
                await trio.testing.wait_all_tasks_blocked()
                assert await link.send("z") == ACCEPTED
        assert peer.state == "open"
    # The second connection was closed properly with the first.
    assert second.engine.finished


@pytest.mark.req("X27")
async def test_a_link_that_was_redirected_is_no_link_of_the_first_connection_any_more(
    nursery: trio.Nursery, autojump_clock: Clock
) -> None:
    first, second = FarEnd(credit=1), FarEnd(settle=ACCEPTED, credit=10)
    second.network = first.network
    info = {Symbol("network-host"): "second", Symbol("address"): "q2"}
    first.on_attach = lambda link: link.refuse(Error("amqp:link:redirect", "over there", info))
    await nursery.start(first.listen, "first")
    await nursery.start(second.listen, "second")
    async with client(first, "first") as peer, peer.session() as session:
        out = session.sender("q")
        await out.wait_attached()
        first.drop()
        await until(peer, "recovering")
        await peer.wait_open()
        await trio.testing.wait_all_tasks_blocked()
        assert await out.send("x") == ACCEPTED
        # On the new first connection no link was requested.
        assert (len(first.links), len(second.links)) == (1, 1)
        assert await out.send("y") == ACCEPTED


@pytest.mark.req("X27")
async def test_a_link_redirected_within_the_same_place_stays_on_its_connection(
    nursery: trio.Nursery,
) -> None:
    far = FarEnd(settle=ACCEPTED, credit=10)
    error = Error("amqp:link:redirect", None, {Symbol("address"): "q2"})
    far.on_attach = lambda link: (
        link.refuse(error) if link.target.address == "q" else far.accept(link) and None
    )
    await nursery.start(far.listen, "far")
    async with client(far, "far") as peer, peer.sender("q") as out:
        assert await out.send("x") == ACCEPTED
        assert out.address == "q2"
    assert far.dialled == ["far"]


@pytest.mark.req("X27")
async def test_a_link_that_is_sent_round_in_circles_is_refused(nursery: trio.Nursery) -> None:
    far = FarEnd()
    error = Error("amqp:link:redirect", "round", {Symbol("address"): "q"})
    far.on_attach = lambda link: link.refuse(error)
    await nursery.start(far.listen, "far")
    async with client(far, "far") as peer:
        with pytest.raises(LinkDetached, match="round") as caught:
            async with peer.sender("q"):
                pytest.fail("attached")
        assert caught.value.condition == "amqp:link:redirect"
        assert len(far.links) < 10


@pytest.mark.req("X27")
async def test_a_link_redirected_to_nowhere_says_both(nursery: trio.Nursery) -> None:
    far = FarEnd()
    info = {Symbol("network-host"): "nowhere"}
    far.on_attach = lambda link: link.refuse(Error("amqp:link:redirect", "over there", info))
    await nursery.start(far.listen, "far")
    async with client(far, "far") as peer:
        with pytest.raises(LinkDetached, match=r"redirected us, but .*nothing listens") as caught:
            async with peer.sender("q"):
                pytest.fail("attached")
        assert caught.value.condition == "amqp:link:redirect"
        assert caught.value.info == info
        assert peer.state == "open"


# --- ends ------------------------------------------------------------------------------------


async def test_leaving_while_it_is_dialled_again_does_not_wait(
    nursery: trio.Nursery, autojump_clock: Clock
) -> None:
    far = FarEnd()
    await nursery.start(far.listen, "far")
    async with client(far, "far") as peer:
        far.close_door("far")
        far.drop()
        await until(peer, "recovering")
        await trio.sleep(30)
        started = trio.current_time()
    assert trio.current_time() == started
    assert peer.state == "closed"


async def test_leaving_waits_for_the_answer_but_not_for_ever(autojump_clock: Clock) -> None:
    for ends_well, grace in ((True, 5.0), (False, 0.5)):
        far = FarEnd()
        async with trio.open_nursery() as nursery:
            await nursery.start(far.listen, "far")
            try:
                async with client(far, "far", limits=Limits(close_grace_s=100)) as peer:
                    far.mute()
                    left = trio.current_time()
                    if not ends_well:
                        raise ZeroDivisionError
            except ZeroDivisionError:
                assert not ends_well
            assert trio.current_time() - left == pytest.approx(grace)
            assert peer.state == "closed"
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("grace", ["peaceful", "hasty"])
async def test_a_cancelled_end_leaves_nothing_either(grace: str, autojump_clock: Clock) -> None:
    far = FarEnd()
    async with trio.open_nursery() as nursery:
        await nursery.start(far.listen, "far")
        async with Container("us", network=far.network) as us:
            with trio.move_on_after(1) as scope:
                limits = Limits(close_grace_s=100)
                async with us.connect("memory://far", limits=limits) as peer:
                    far.mute()
                    if grace == "hasty":
                        await trio.sleep(2)
            assert scope.cancelled_caught
            assert trio.current_time() == pytest.approx(1 if grace == "peaceful" else 1.5)
            assert peer.state == "closed"
            assert us._started().connections.child_tasks == {us._started().listeners.parent_task}
        nursery.cancel_scope.cancel()


async def test_cancelled_with_its_container_a_connection_ends_at_once(
    autojump_clock: Clock,
) -> None:
    far = FarEnd()
    async with trio.open_nursery() as nursery:
        await nursery.start(far.listen, "far")
        with trio.move_on_after(1) as scope:
            async with client(far, "far") as peer:
                far.mute()
                await trio.sleep(2)
        assert scope.cancelled_caught
        assert trio.current_time() == pytest.approx(1)
        assert peer.state == "closed"
        nursery.cancel_scope.cancel()


async def test_what_is_raised_in_the_block_comes_out_as_it_is(nursery: trio.Nursery) -> None:
    far = FarEnd(settle=ACCEPTED, credit=10)
    await nursery.start(far.listen, "far")
    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        async with client(far, "far") as peer, peer.sender("q") as out, peer.receiver("q"):
            await out.send("x")
            raise ZeroDivisionError
    with pytest.raises(ConnectionLost):  # noqa: PT012
        async with client(far, "far", reconnect=None) as peer, peer.receiver("q") as inbox:
            far.drop()
            await inbox.receive()
    with pytest.raises(KeyboardInterrupt):
        async with client(far, "far"):
            raise KeyboardInterrupt


async def test_cancelled_while_it_connects_nothing_is_left(autojump_clock: Clock) -> None:
    far = FarEnd()
    channel = far.network.listen("far")
    async with Container("us", network=far.network) as us:
        for _ in range(3):
            with trio.move_on_after(1) as scope:
                async with us.connect("memory://far"):
                    pytest.fail("connected")
            assert scope.cancelled_caught
            stream = await channel.receive()
            while await stream.receive_some():
                pass  # the frames, and then the end
        assert len(us._started().connections.child_tasks) == 1
    channel.close()


async def test_states_are_told_and_a_listener_that_fails_harms_nobody(
    nursery: trio.Nursery, autojump_clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    far = FarEnd()
    await nursery.start(far.listen, "far")
    states: list[str] = []

    def tell(connection: Connection) -> None:
        states.append(connection.state)
        raise ZeroDivisionError

    async with client(far, "far", on_state=tell) as peer:
        far.drop()
        await until(peer, "recovering")
        await peer.wait_open()
    assert states == ["open", "recovering", "open", "closed"]
    assert "on_state failed" in caplog.text


async def test_nodes_of_ours_are_reached_over_the_next_connection_too(
    nursery: trio.Nursery, autojump_clock: Clock
) -> None:
    far = FarEnd()
    await nursery.start(far.listen, "far")
    got: list[str] = []

    @node("mine")
    async def take(body: str) -> None:
        got.append(body)

    async with (
        Container("us", nodes=[take], network=far.network) as us,
        us.connect("memory://far", reconnect=STEADY) as peer,
    ):
        for number in range(2):
            link = far.engine.begin().attach_sender("l", Recorder(), target=Target(address="mine"))
            await far.until(lambda link=link: link.credit)
            link.send(Message(f"m{number}").encode())
            await far.until(lambda number=number: len(got) == number + 1)
            if not number:
                far.drop()
                await until(peer, "recovering")
                await peer.wait_open()
    assert got == ["m0", "m1"]


@pytest.mark.slow
def test_connecting_is_a_public_name() -> None:
    # In a process of its own: nothing else is loaded yet.
    code = "import amqp_rt; print(amqp_rt.connect.__module__)"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert found.stdout.strip() == "amqp_rt.container.recovery"


async def test_a_memory_name_needs_a_network_that_has_it() -> None:
    with pytest.raises(ConnectFailed, match="nothing listens there"):
        async with connect("memory://far", reconnect=None):
            pytest.fail("connected")
    network = MemoryNetwork()
    async with Container("far", network=network) as far, Container("us", network=network) as us:
        await far.listen("memory://far")
        async with us.connect("memory://far") as peer:
            assert peer.state == "open"
