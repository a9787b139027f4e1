"""Connections as the application holds them: opening, sessions, losing, closing."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import trio
from far_end import FarEnd, connected
from transports import Reach

from amqp_rt.container.connections import Connection
from amqp_rt.container.container import Container
from amqp_rt.container.declaring import node
from amqp_rt.container.recovery import connect
from amqp_rt.errors import (
    AmqpError,
    AuthenticationFailed,
    ConnectFailed,
    ConnectionLost,
    LinkDetached,
    LocalProtocolError,
    SessionEnded,
)
from amqp_rt.limits import Limits
from amqp_rt.message import Message
from amqp_rt.outcomes import ACCEPTED, Error
from amqp_rt.security.identities import Users, password_line
from amqp_rt.security.mechanisms import Anonymous, Plain
from amqp_rt.termini import Target
from amqp_rt.testing.pairs import Recorder
from amqp_rt.values import Symbol

# --- opening ---------------------------------------------------------------------------------


@pytest.mark.req("X4", "M43")
async def test_both_sides_say_who_they_are() -> None:
    far = FarEnd()
    options: Any = {
        "properties": {Symbol("product"): "shop"},
        "desired_capabilities": ["SOLE"],
        "virtual_host": "vh",
        "idle_timeout_s": 17,
    }
    async with connected(far, **options) as peer:
        assert peer.state == "open"
        assert peer.peer.container_id == "far"
        assert peer.peer.address == "memory://far"
        assert repr(peer) == "<Connection to 'far', open>"
        us = far.engine.peer
        assert (us.container_id, us.virtual_host) == ("us", "vh")
        assert us.properties == {"product": "shop"}
        assert us.desired_capabilities == ("SOLE",)
        assert "ANONYMOUS-RELAY" in us.offered_capabilities
        assert peer.engine.limits.idle_timeout_s == 17
    assert peer.state == "closed"
    assert far.failures == []


@pytest.mark.req("X4")
@pytest.mark.parametrize(
    ("url", "host"), [("memory://far", "far"), ("amqp://127.0.0.1:0/vh", "vh")]
)
async def test_the_virtual_host_comes_from_the_url(url: str, host: str) -> None:
    async with Container("c") as c:
        (bound,) = await c.listen(url.removesuffix("/vh"))
        async with (
            Container("us", network=c.network) as us,
            us.connect(bound + ("/vh" if "vh" in url else "")) as peer,
        ):
            assert peer.peer.virtual_host == host


@pytest.mark.req("X5", "SE1", "SE6")
@pytest.mark.parametrize("sasl", [True, False])
@pytest.mark.parametrize("pipelined", [True, False])
async def test_the_handshake_has_its_variants(sasl: bool, pipelined: bool) -> None:
    far = FarEnd(settle=ACCEPTED, credit=1)
    async with (
        connected(far, sasl=sasl, pipelined=pipelined) as peer,
        peer.sender("q") as out,
    ):
        assert await out.send("x") == ACCEPTED


@pytest.mark.req("SE2")
@pytest.mark.parametrize(
    "auth", [Plain("joe", "s%cret"), [Plain("joe", "s%cret"), Anonymous()]], ids=["one", "several"]
)
async def test_who_we_are_is_given_as_an_object(reach: Reach, auth: Any) -> None:
    container = Container("c", users={"joe": "s%cret"})
    # Within the container itself, nobody needs to log in.
    async with container, reach(container, auth=auth) as peer:
        assert peer.state == "open"


@pytest.mark.req("SE2")
async def test_a_login_that_fails_is_one_sentence() -> None:
    async with Container("c", users={"joe": "secret"}, limits=Limits(failed_login_delay_s=0)) as c:
        (url,) = await c.listen("amqp://127.0.0.1:0")
        where = url.removeprefix("amqp://")
        for attempt in (
            c.connect(url, auth=Plain("joe", "wrong")),
            c.connect(f"amqp://joe:wrong@{where}"),
            connect(f"amqp://joe:wrong@{where}"),
        ):
            with pytest.raises(AuthenticationFailed) as caught:
                async with attempt:
                    pytest.fail("let in")
            assert where in caught.value.description
            assert "login" in caught.value.description
            assert "wrong" not in str(caught.value)
            assert caught.value.condition == "amqp:unauthorized-access"
        with pytest.raises(AuthenticationFailed, match="PLAIN"):
            async with c.connect(url):
                pytest.fail("let in")
        async with c.connect(f"amqp://joe:secret@{where}") as peer:
            assert peer.state == "open"


@pytest.mark.req("SE9")
async def test_a_password_does_not_cross_a_network_in_clear() -> None:
    ours = _outside_address()
    if ours is None:
        pytest.skip("this machine has no address but loopback")
    async with Container("c", users={"joe": "secret"}, plain_in_clear=True) as c:
        (url,) = await c.listen(f"amqp://{ours}:0")
        with pytest.raises(ConnectFailed, match="in clear") as caught:
            async with c.connect(url, auth=Plain("joe", "secret")):
                pytest.fail("sent it")
        assert caught.value.condition == "amqp:not-allowed"
        async with c.connect(url, auth=Plain("joe", "secret"), plain_in_clear=True) as peer:
            assert peer.state == "open"


@pytest.mark.req("SE9")
async def test_a_url_logs_in_by_scram_where_a_password_may_not_be_sent(tmp_path: Path) -> None:
    ours = _outside_address()
    if ours is None:
        pytest.skip("this machine has no address but loopback")
    scram, plain = tmp_path / "scram", tmp_path / "plain"
    scram.write_text(password_line("joe", "secret", scram=["SHA-256"]) + "\n")
    plain.write_text(password_line("joe", "secret") + "\n")
    users = Users()
    users.load(scram)
    async with Container("c", users=users) as c:
        (url,) = await c.listen(f"amqp://{ours}:0")
        assert await pinged(url.replace("://", "://joe:secret@")) == "open"
        with pytest.raises(AuthenticationFailed, match="did not accept"):
            await pinged(url.replace("://", "://joe:wrong@"))
    users = Users()
    users.load(plain)
    async with Container("c", users=users, plain_in_clear=True) as c:
        (url,) = await c.listen(f"amqp://{ours}:0")
        with pytest.raises(AuthenticationFailed, match="PLAIN sends the password itself"):
            await pinged(url.replace("://", "://joe:secret@"))


async def pinged(url: str) -> str:
    async with connect(url) as peer:
        return peer.state


def _outside_address() -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        address = str(probe.getsockname()[0])
        return None if address.startswith("127.") else address


@pytest.mark.parametrize(
    ("urls", "sentence"),
    [
        ("http://x", "http://x: .*scheme"),
        ("amqp://h:port", "port"),
        ("", "no URL"),
        ([], "no URL"),
        ("memory://nowhere", "memory://nowhere: nothing listens there"),
        ("amqp+unix:///nowhere/at/all", "/nowhere/at/all: "),
        ("amqps://h", "amqps://h:5671"),
        ("memory://a,memory://b", "memory://a: .*; .*memory://b: "),
    ],
)
async def test_where_nobody_is_reached_one_sentence_says_why(urls: Any, sentence: str) -> None:
    async with Container("c") as c:
        with pytest.raises(ConnectFailed, match=sentence):
            async with c.connect(urls, reconnect=None):
                pytest.fail("connected")


async def test_a_port_where_nobody_listens_is_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(ConnectFailed, match=f"amqp://127.0.0.1:{port}: "):
            async with connect(f"amqp://127.0.0.1:{port}", reconnect=None):
                pytest.fail("connected")


async def test_a_peer_that_never_opens_is_given_up(autojump_clock: trio.testing.MockClock) -> None:
    async with Container("c") as c:
        streams = c.network.listen("mute")
        started = trio.current_time()
        with pytest.raises(ConnectFailed, match="memory://mute: the handshake took too long"):
            async with c.connect("memory://mute", within=3, reconnect=None):
                pytest.fail("connected")
        assert trio.current_time() - started == pytest.approx(3, abs=1.1)
        streams.close()


@pytest.mark.req("X4", "X26")
async def test_a_peer_that_has_no_place_says_why() -> None:
    far = FarEnd(on_open=lambda engine: engine.close(Error("amqp:not-found", "no such host")))
    with pytest.RaisesGroup(pytest.RaisesExc(ConnectFailed, match="no such host")):
        async with connected(far):
            pytest.fail("connected")


async def test_the_url_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Container("c") as c:
        (url,) = await c.listen("amqp://127.0.0.1:0")
        monkeypatch.setenv("AMQP_URL", url)
        async with c.connect() as peer:
            assert peer.peer.address == url
        monkeypatch.setenv("AMQP_URL", "memory://elsewhere")
        with pytest.raises(ConnectFailed, match="memory://elsewhere"):
            async with connect(reconnect=None):
                pytest.fail("connected")


async def test_without_a_container_one_is_made() -> None:
    taken = []

    @node("q")
    async def take(body: str) -> None:
        taken.append(body)

    async with Container("c", nodes=[take]) as c:
        (url,) = await c.listen("amqp://127.0.0.1:0")
        async with connect(url) as peer, peer.sender("q") as out:
            await out.send("x")
        assert peer.state == "closed"
    assert taken == ["x"]


@pytest.mark.req("A13")
async def test_an_exception_in_the_block_comes_out_as_it_is(reach: Reach) -> None:
    async with Container("c") as c:
        with pytest.raises(ZeroDivisionError):
            async with reach(c) as peer, peer.receiver(dynamic=True):
                raise ZeroDivisionError
        assert peer.state == "closed"


# --- symmetry --------------------------------------------------------------------------------


@pytest.mark.req("A18", "X9")
async def test_the_peer_sends_to_our_nodes_over_the_connection_we_dialled() -> None:
    taken = []

    @node("ours")
    async def take(body: str) -> None:
        taken.append(body)

    far = FarEnd()
    async with trio.open_nursery() as nursery:
        await nursery.start(far.listen, "far")
        async with (
            Container("us", network=far.network, nodes=[take]) as us,
            us.connect("memory://far", reconnect=None),
        ):
            session = far.engine.begin()
            heard = Recorder()
            link = session.attach_sender("l", heard, target=Target(address="ours"))
            await far.until(lambda: heard.credits)
            link.send(Message("x").encode())
            await far.until(lambda: heard.outcomes)
            refused = Recorder()
            session.attach_sender("m", refused, target=Target(address="nowhere"))
            await far.until(lambda: refused.detached)
        nursery.cancel_scope.cancel()
    assert taken == ["x"]
    assert refused.detached[0][0].condition == "amqp:not-found"


# --- sessions --------------------------------------------------------------------------------


@pytest.mark.req("X8", "X11")
async def test_a_session_has_its_own_windows_and_ends_with_its_block() -> None:
    far = FarEnd(settle=ACCEPTED, credit=5)
    async with connected(far) as peer:
        async with peer.sender("q") as first, peer.session(window_bytes=200_000) as session:
            out = session.sender("q")
            async with out:
                await out.send("x")
                ours, theirs = far.links[0].session, far.links[1].session
                assert ours is not theirs
                assert theirs.remote_incoming_window < ours.remote_incoming_window
            left = session.receiver("q")
            await left.wait_attached()
            await first.send("x")
        await far.until(lambda: theirs.ended)
        with pytest.raises(SessionEnded, match="was ended"):
            await left.receive()
        with pytest.raises(SessionEnded):
            session.sender("q")
        assert not ours.ended
        assert "ended" in repr(session)


@pytest.mark.req("X26")
async def test_a_session_that_the_peer_ends_takes_its_links_and_no_more() -> None:
    far = FarEnd()
    async with connected(far) as peer:
        out = peer.sender("q")
        await out.wait_attached()
        receipt = out.send_nowait("x")
        async with trio.open_nursery() as nursery:

            async def wait() -> None:
                with pytest.raises(SessionEnded, match="no room") as caught:
                    await receipt.outcome()
                assert caught.value.condition == "amqp:resource-limit-exceeded"

            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            far.link.session.end(Error("amqp:resource-limit-exceeded", "no room"))
        with pytest.raises(SessionEnded, match="no room"):
            await out.send("y")
        assert peer.state == "open"
        # The next link gets a new session.
        far.settle, far.credit = ACCEPTED, 5
        async with peer.sender("q") as again:
            await again.send("z")


@pytest.mark.req("X8")
async def test_more_sessions_and_links_than_the_peer_allows_are_refused() -> None:
    far = FarEnd(limits=Limits(channel_max=1, handle_max=1))
    async with connected(far) as peer, peer.sender("a"), peer.sender("b"):
        with pytest.raises(LocalProtocolError, match="2 links") as caught:
            peer.sender("c")
        assert caught.value.condition == "amqp:resource-limit-exceeded"
        async with peer.session() as session, session.sender("c"):
            with pytest.raises(LocalProtocolError, match="2 sessions"):
                async with peer.session():
                    pytest.fail("begun")


# --- losing ----------------------------------------------------------------------------------


async def expect_lost(lost: list[ConnectionLost], call: Awaitable[Any]) -> None:
    with pytest.raises(ConnectionLost) as caught:
        await call
    lost.append(caught.value)


@pytest.mark.req("X26", "A13")
@pytest.mark.parametrize(
    ("lose", "condition", "words"),
    [
        (
            lambda far, peer: far.engine.close(Error("amqp:connection:forced", "going down")),
            "amqp:connection:forced",
            "going down",
        ),
        (lambda far, peer: far.engine.close(), "amqp:connection:forced", "the peer closed"),
        (lambda far, peer: far.drop(), "amqp:connection:forced", "lost"),
        (lambda far, peer: peer.close(), "amqp:connection:forced", "was closed"),
        (
            lambda far, peer: far.engine.write_bytes(b"\0\0\0\7\2\0\0\0"),
            "amqp:connection:framing-error",
            "lost",
        ),
    ],
    ids=["closed with an error", "closed", "dropped", "closed by us", "broken"],
)
async def test_everybody_who_waits_hears_of_the_loss_once(
    lose: Callable[[FarEnd, Connection], None], condition: str, words: str
) -> None:
    far = FarEnd()
    lost: list[ConnectionLost] = []
    async with connected(far) as peer:
        out, messages = peer.sender("q"), peer.receiver("q")
        await out.wait_attached()
        await messages.wait_attached()
        far.links[0].grant(1)
        await far.until(lambda: out.credit)
        far.on_attach = lambda link: None
        pending = peer.sender("never answered")
        async with trio.open_nursery() as nursery:
            for call in (
                out.send("left"),
                out.send("waits"),
                messages.receive(),
                messages.drain(),
                pending.wait_attached(),
                peer.call("q"),
                anext(peer.stream("q")),
            ):
                nursery.start_soon(expect_lost, lost, call)
            nursery.start_soon(peer.wait_closed)
            await trio.testing.wait_all_tasks_blocked(0.01)
            lose(far, peer)
        assert len(lost) == 7
        assert {each.condition for each in lost} == {condition}
        assert all(words in each.description for each in lost)
        assert len({id(each) for each in lost}) == 7
        assert peer.state == "closed"
        for call in (out.send("late"), messages.receive(), peer.call("q"), peer.wait_open()):
            await expect_lost(lost, call)
        with pytest.raises(ConnectionLost):
            peer.sender("q")
        with pytest.raises(ConnectionLost):
            async with peer.session():
                pytest.fail("begun")


async def test_one_that_is_lost_while_the_block_runs_does_not_disturb_it(
    autojump_clock: trio.testing.MockClock,
) -> None:
    far = FarEnd()
    async with connected(far) as peer:
        far.drop()
        await peer.wait_closed()
        await trio.sleep(100)
    assert peer.state == "closed"


# --- closing ---------------------------------------------------------------------------------


@pytest.mark.req("X5")
async def test_closing_is_said_at_once_and_once() -> None:
    far = FarEnd()
    async with connected(far) as peer:
        peer.close(Error("amqp:not-allowed", "enough"))
        peer.close()
        assert peer.closing
        with pytest.raises(ConnectionLost, match="was closed"):
            peer.sender("q")
        await peer.aclose()
        assert peer.state == "closed"
    assert far.failures == []


async def test_a_connection_that_has_not_begun_says_so() -> None:
    async with Container("c") as c:
        connection = Connection(c)
        assert connection.state == "opening"
        assert repr(connection) == "<Connection, opening>"
        with pytest.raises(ConnectionLost, match="no connection yet"):
            connection.peer  # noqa: B018
        out = connection.sender("q")
        assert "waiting" in repr(out)
        connection.close()
        assert connection.state == "closed"
        with pytest.raises(ConnectionLost):
            await out.wait_attached()


async def test_changes_of_state_are_told(caplog: pytest.LogCaptureFixture) -> None:
    far = FarEnd()
    seen: list[str] = []

    def tell(connection: Connection) -> None:
        seen.append(connection.state)
        if connection.state == "closed":
            raise AmqpError("the hook fails")

    async with connected(far, on_state=tell):
        assert seen == ["open"]
    assert seen == ["open", "closed"]
    assert "on_state failed" in caplog.text


@pytest.mark.req("A12")
async def test_a_local_connection_ends_with_its_block() -> None:
    async with Container("c") as c:
        async with c.local() as peer:
            assert (peer.state, peer.peer.container_id) == ("open", "c")
            messages = peer.receiver(dynamic=True)
            await messages.wait_attached()
        assert peer.state == "closed"
        with pytest.raises((ConnectionLost, LinkDetached)):
            await messages.receive()
        with pytest.raises(ZeroDivisionError):
            async with c.local():
                raise ZeroDivisionError
