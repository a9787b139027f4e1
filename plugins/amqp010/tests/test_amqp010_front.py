"""Connections and sessions of clients at a broker, over sockets."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from protocol010 import Failed, Login
from served010 import serving

from amqp_rt import Limits, Message, connect
from amqp_rt.broker import Queue
from amqp_rt.security.access import Access, Rights, Rule


async def test_clients_log_in_and_attach_sessions() -> None:
    async with serving() as served, served.client() as client:
        first = await client.session(b"first")
        second = await client.session(b"second")
        assert first.state.channel != second.state.channel
        await first.sync()
        await second.sync()
        await first.detach()
        await second.sync()


async def test_clients_that_insist_on_plain_are_anonymous_where_that_is_allowed() -> None:
    async with serving() as served, served.client(login=Login.plain("any", "thing")) as client:
        await (await client.session(b"s")).sync()


@pytest.mark.req("D2", "D7")
async def test_a_message_passes_through_a_queue() -> None:
    async with serving() as served, served.client() as client:
        session = await client.session(b"s")
        await session.call("queue.declare", queue="q")
        session.transfer("", b"text", key="q")
        await session.subscribe("q", "d")
        message = await session.message()
        assert message.body == b"text"
        await session.done(session.accept(message.id))
        found = await session.call("queue.query", queue="q")
        assert found is not None
        assert found.message_count == 0


@pytest.mark.req("D10")
async def test_a_subscription_goes_on_with_its_session_on_another_connection() -> None:
    async with serving() as served:
        async with served.client() as client:
            session = await client.session(b"s")
            session.state.ask_timeout(60)
            await session.call("queue.declare", queue="q", exclusive=True)
            await session.subscribe("q", "d")
            session.transfer("", b"before", key="q")
            held = await session.message()
            await client.cut()
        async with served.client() as other, served.client() as client:
            # The queue is the session's, and so is what it holds.
            stranger = await other.session(b"other")
            with pytest.raises(Failed) as caught:
                await stranger.call("message.subscribe", queue="q", destination="x")
            assert caught.value.code == 405
            again = await client.resume(session.state)
            await again.done(again.accept(held.id))
            again.transfer("", b"after", key="q")
            for unit in (0, 1):
                await again.call("message.flow", destination="d", unit=unit, value=10_000)
            await again.until(lambda: len(again.state.messages) == 2)
            assert again.state.messages[1].body == b"after"
            await again.done(again.accept(again.state.messages[1].id))
            found = await again.call("queue.query", queue="q")
            assert found is not None
            assert found.message_count == 0


async def test_what_a_lost_session_held_goes_to_others() -> None:
    async with serving() as served:
        async with served.client() as client:
            session = await client.session(b"s")
            await session.call("queue.declare", queue="q")
            await session.subscribe("q", "d")
            session.transfer("", b"text", key="q")
            await session.message()
            await client.cut()
        async with served.client() as client:
            other = await client.session(b"other")
            await other.subscribe("q", "d")
            message = await other.message()
            assert message.body == b"text"
            assert message.header("delivery-properties").redelivered


async def test_many_messages_in_both_directions_at_once() -> None:
    count = 3_000
    async with serving() as served, served.client() as client:
        session = await client.session(b"s")
        await session.call("queue.declare", queue="q")
        await session.subscribe("q", "d", accept_mode=1)
        for number in range(count):
            session.transfer("", b"%d" % number, key="q")
        await session.until(lambda: len(session.state.messages) == count)
        assert [each.body for each in session.state.messages] == [b"%d" % n for n in range(count)]
        await session.sync()


async def test_a_client_that_does_not_read_holds_up_no_other() -> None:
    async with serving() as served, served.client() as client:
        session = await client.session(b"s")
        await session.call("queue.declare", queue="q")
        await session.subscribe("q", "d", accept_mode=1)
        client.reads = trio.Event()
        async with served.client() as other:
            sender = await other.session(b"sender")
            for _ in range(100):
                sender.transfer("", bytes(100_000), key="q")
            await sender.sync()
        client.reads.set()
        await session.until(lambda: len(session.state.messages) == 100)


async def test_a_field_that_is_not_implemented_ends_its_session_only() -> None:
    async with serving() as served, served.client() as client:
        failing = await client.session(b"failing")
        other = await client.session(b"other")
        with pytest.raises(Failed) as caught:
            await failing.call("file.qos", prefetch_size=0, global_=True)
        assert caught.value.code == 540
        await other.sync()


async def test_a_wrong_password_closes_the_connection() -> None:
    async with serving(users={"ada": "secret"}) as served:
        async with served.client(login=Login.plain("ada", "secret")) as client:
            await client.session(b"s")
        with pytest.raises(Failed) as caught:
            async with served.client(login=Login.plain("ada", "wrong")):
                pass
        assert caught.value.code == 320


@pytest.mark.req("D10")
async def test_a_session_goes_on_after_its_connection_was_lost() -> None:
    async with serving() as served:
        async with served.client() as client:
            session = await client.session(b"s")
            session.state.ask_timeout(60)
            await session.sync()
            assert session.state.timeout_s == 60
            await client.cut()
        async with served.client() as client:
            again = await client.resume(session.state)
            assert again.state.expected == [(1, 1)]
            await again.sync()


@pytest.mark.req("D19", "SE1")
async def test_a_mechanism_that_is_not_offered_ends_the_stream() -> None:
    async with serving() as served:
        login = Login("SCRAM-SHA-256", b"n,,n=a,r=b")
        with pytest.raises(Failed) as caught:
            async with served.client(login=login):
                pass
    # Without connection.close, so that there is no code.
    assert caught.value.code is None


RULES = [
    Rule("*", Rights.LISTEN, users=("reader",), virtual_host="one"),
    Rule("q", Rights.SEND, users=("writer",)),
    Rule("other", Rights.SEND, users=("elsewhere",), virtual_host="two"),
]


@pytest.mark.req("D19")
@pytest.mark.parametrize(
    ("user", "host", "enters"),
    [
        ("reader", "one", True),
        ("reader", "/", False),
        ("writer", "one", True),
        ("writer", None, True),
        ("elsewhere", "one", False),
        ("nobody", "one", False),
        ("writer", "unknown", False),
    ],
)
async def test_a_virtual_host_is_entered_with_a_right_there(
    user: str, host: str | None, enters: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    users = dict.fromkeys(("reader", "writer", "elsewhere", "nobody"), "pw")
    options = {"users": users, "access": Access(RULES), "virtual_hosts": ["", "one", "two"]}
    async with serving(**options) as served:
        login = Login.plain(user, "pw")
        if enters:
            async with served.client(login=login, virtual_host=host) as client:
                await client.session(b"s")
        else:
            with pytest.raises(Failed) as caught:
                async with served.client(login=login, virtual_host=host):
                    pass
            # The same for a virtual host that is unknown, so that there is nothing to probe for.
            assert caught.value.code == 402
            name = "" if host == "/" else f"vhost:{host}"
            assert caught.value.text == f"there is no virtual host {name!r}"
    refused = (
        "connection refused: " in caplog.text and "no right in its virtual host" in caplog.text
    )
    assert refused == (not enters and host != "unknown")


async def test_a_message_that_is_stored_in_pieces_is_left_to_consumers_of_1_0(
    tmp_path: Path,
) -> None:
    """Messages of 0-10 are sent whole here, and such a one may be larger than memory."""
    limits = Limits(message_size_max=20_000)
    large = b"x" * 3_000_000
    async with serving(store=f"sqlite:{tmp_path / 'store'}", limits=limits) as served:
        await served.broker.declare(Queue("q"))
        async with (
            connect(served.url, limits=Limits(message_size_max=10_000_000)) as modern,
            served.client() as client,
        ):
            async with modern.sender("q") as link:
                for body in (large, b"small"):
                    await link.send(Message(body, durable=True))
            session = await client.session(b"s")
            await session.subscribe("q", "d")
            message = await session.message()
            assert message.body == b"small"
            await session.done(session.accept(message.id))
            await session.sync()
            assert len(session.state.messages) == 1
            async with modern.receiver("q") as receiver:
                with trio.fail_after(10):
                    found = await receiver.receive()
                assert found.body == large


@pytest.mark.parametrize("more", [0, 1], ids=["at the bound", "above"])
async def test_a_message_is_stored_in_pieces_if_transfers_follow_above_the_limit(
    tmp_path: Path, more: int
) -> None:
    """A message that ends with the transfer in which it exceeds the limit is whole, and is sent."""
    limits = Limits(message_size_max=20_000)
    async with serving(store=f"sqlite:{tmp_path / 'store'}", limits=limits) as served:
        await served.broker.declare(Queue("q"))
        async with (
            connect(served.url, limits=Limits(message_size_max=10_000_000)) as modern,
            served.client() as client,
        ):
            frame = min(limits.frame_size_max, Limits().frame_size_max)
            # A transfer frame has some octets of its own.
            body = b"x" * (frame - 200 + more * 400)
            async with modern.sender("q") as link:
                for each in (body, b"small"):
                    await link.send(Message(each, durable=True))
            session = await client.session(b"s")
            await session.subscribe("q", "d")
            assert (await session.message()).body == (b"small" if more else body)


@pytest.mark.req("D20")
async def test_a_realm_gives_its_rights_at_each_of_its_addresses() -> None:
    rules = [Rule(realm="billing", rights=Rights.MANAGE, users=("ada",))]
    access = Access(rules, realms={"billing": ["invoices", "payments/*"]})
    login = Login.plain("ada", "pw")
    async with (
        serving(users={"ada": "pw"}, access=access) as served,
        served.client(login=login) as client,
    ):
        session = await client.session(b"s")
        for name in ("invoices", "payments/1"):
            await session.call("queue.declare", queue=name)
            await session.done(session.transfer("", b"x", key=name))
        with pytest.raises(Failed) as caught:
            await session.call("queue.declare", queue="orders")
        assert caught.value.code == 403
