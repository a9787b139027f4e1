"""Interceptors of a front: what they see, drop and refuse, and what their own faults end."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from amqp_rt_amqp010 import (
    Assembly,
    Command,
    CommandInterceptor,
    ErrorCode,
    Frame,
    Front,
    Refusal,
    SessionKey,
    Verdict,
    interceptors,
)
from octets010 import Operation, frames
from protocol010 import Failed, Session
from served010 import serving
from worlds010 import Client, World

from amqp_rt.events import ConnectionFailed, Peer

pytestmark = pytest.mark.req("D9")


class Counting:
    """Counts commands by class, separately for each session."""

    def __init__(self) -> None:
        self.of: list[tuple[SessionKey, Counter[str]]] = []

    def open(self, key: SessionKey) -> CommandInterceptor:
        counts: Counter[str] = Counter()
        self.of.append((key, counts))

        def count(number: int, command: Command, assembly: Assembly) -> None:
            counts[command.NAME.partition(".")[0]] += 1

        return count


def keeping_queues(key: SessionKey) -> CommandInterceptor:
    """Refuse to delete queues whose names begin with "kept"."""

    def judge(number: int, command: Command, assembly: Assembly) -> Verdict:
        if command.NAME == "queue.delete" and str(getattr(command, "queue", "")).startswith("kept"):
            raise Refusal("this queue is kept", ErrorCode.UNAUTHORIZED_ACCESS)
        return Verdict.PASS

    return judge


def of_all(call: Callable[[Command], Any]) -> Callable[[SessionKey], CommandInterceptor]:
    """The same interceptor without state for all sessions."""
    return lambda key: lambda number, command, assembly: call(command)


# --- of sessions -------------------------------------------------------------------------------------


async def test_commands_are_counted_by_class() -> None:
    counting = Counting()
    async with serving(Front(on_assembly=counting.open)) as served, served.client() as client:
        first = await client.session(b"first")
        await first.call("queue.declare", queue="q")
        for _ in range(3):
            first.transfer("", b"x", key="q")
        await first.sync()
        await (await client.session(b"second")).call("queue.query", queue="q")
    assert counting.of == [
        (SessionKey("", None, b"first"), Counter(queue=1, message=3)),
        (SessionKey("", None, b"second"), Counter(queue=1)),
    ]


async def test_a_refused_command_ends_its_session_only() -> None:
    async with serving(Front(on_assembly=keeping_queues)) as served, served.client() as client:
        session = await client.session(b"s")
        for name in ("kept-q", "other"):
            await session.call("queue.declare", queue=name)
        await session.call("queue.delete", queue="other")
        with pytest.raises(Failed) as caught:
            await session.call("queue.delete", queue="kept-q")
        assert caught.value.code == 403
        assert "this queue is kept" in caught.value.text
        again = await client.session(b"again")
        found = await again.call("queue.query", queue="kept-q")
        assert found is not None
        assert found.queue == "kept-q"


def test_an_interceptor_lives_as_long_as_its_session() -> None:
    """On another connection, where what was not complete is repeated: each command is seen once."""
    counting = Counting()
    world = World(front=Front(on_assembly=counting.open))
    client = world.connect()
    session = client.session(timeout=60)
    client.run(session, "queue.declare", queue="q")
    session.transfer("", b"x", key="q")
    client.pump()
    client.lose()
    other = world.connect()
    other.resume(session)
    other.run(session, "queue.query", queue="q")
    assert [counts for _, counts in counting.of] == [Counter(queue=2, message=1)]
    assert world.stats("q").available == 1


def test_a_new_session_of_the_same_name_has_an_interceptor_of_its_own() -> None:
    counting = Counting()
    client = World(front=Front(on_assembly=counting.open)).connect()
    for _ in range(2):
        session = client.session()
        client.run(session, "queue.query", queue="q")
        session.detach()
        client.pump()
    assert [counts for _, counts in counting.of] == [Counter(queue=1), Counter(queue=1)]


def test_a_dropped_command_is_complete_without_an_effect() -> None:
    dropping = of_all(
        lambda command: Verdict.DROP if command.NAME == "message.transfer" else Verdict.PASS
    )
    world = World(front=Front(on_assembly=dropping))
    client = world.connect()
    session = client.session()
    client.run(session, "queue.declare", queue="q")
    number = session.transfer("", b"x", key="q")
    client.run(session, "execution.sync")
    assert session.is_complete(number)
    assert world.stats("q").available == 0


def fails(command: Command) -> Any:
    if command.NAME == "queue.query":
        raise RuntimeError("a secret of the application")
    return None


@pytest.mark.parametrize(
    "front",
    [
        Front(on_assembly=of_all(fails)),
        Front(on_assembly=of_all(lambda command: command.NAME)),
    ],
    ids=["raises", "returns"],
)
def test_a_fault_of_an_interceptor_ends_the_session(
    front: Front, caplog: pytest.LogCaptureFixture
) -> None:
    client = World(front=front).connect()
    failing, other = client.session(b"failing"), client.session(b"other")
    with caplog.at_level(logging.ERROR, "amqp_rt.frames"):
        assert client.fails(failing, "queue.query", queue="q") == 541
    assert failing.exception is not None
    assert "secret" not in failing.exception.description
    assert "interceptor failed: queue.query of session b'failing'" in caplog.text
    assert not client.engine.finished
    assert other.detached is None


def test_a_session_without_its_interceptor_does_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def open_none(key: SessionKey) -> CommandInterceptor:
        raise LookupError("no interceptor today")

    client = World(front=Front(on_assembly=open_none)).connect()
    session = client.session()
    assert client.fails(session, "queue.declare", queue="q") == 541
    assert "interceptor failed: new session b's'" in caplog.text
    assert "q" not in client.world.host.space().nodes


# --- of frames ---------------------------------------------------------------------------------------


def test_frames_are_seen_in_order_with_their_peer() -> None:
    seen: list[tuple[int, int, str | None]] = []
    front = Front(
        on_frame=lambda frame, peer: seen.append((frame.channel, frame.type, peer.protocol))
    )
    client = World(front=front).connect()
    session = client.session(channel=7)
    session.transfer("", b"x", key="q")
    client.pump()
    # start-ok, tune-ok, open; attach, command-point; a transfer with header and body.
    assert seen == [
        *[(0, 0, "amqp0-10")] * 3,
        *[(7, 0, "amqp0-10")] * 2,
        *[(7, kind, "amqp0-10") for kind in (1, 2, 3)],
    ]


def test_a_dropped_frame_has_no_effect() -> None:
    def drop_attach(frame: Frame, peer: Peer) -> Verdict | None:
        return Verdict.DROP if frame.payload[:2] == b"\x02\x01" else None

    client = World(front=Front(on_frame=drop_attach)).connect()
    session = client.wire.session(b"s", 3)
    session.attach()
    client.pump()
    assert not session.attached
    (detached,) = client.received("session.detached")
    assert detached.code == 3


def refuse_channel(frame: Frame, peer: Peer) -> None:
    if frame.channel == 9:
        raise Refusal("channel 9 is closed to clients")


def fail_at_channel(frame: Frame, peer: Peer) -> None:
    if frame.channel == 9:
        raise RuntimeError("a secret of the application")


@pytest.mark.parametrize(
    ("interceptor", "text"),
    [
        (refuse_channel, "channel 9 is closed to clients"),
        (fail_at_channel, "an interceptor failed"),
    ],
)
def test_a_refused_frame_closes_its_connection_only(
    interceptor: Callable[[Frame, Peer], None], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(front=Front(on_frame=interceptor))
    client, other = world.connect(), world.connect()
    attach = b"".join(frames(Operation("session.attach", {"name": b"s"}).segments(), 9, 4000))
    client.feed(attach * 3)
    close = client.wire.close_of_broker
    assert close is not None
    assert (close.reply_code, close.reply_text) == (320, text)
    assert [type(each) for each in client.events[-1:]] == [ConnectionFailed]
    # Once: what follows on a connection that closes is not judged.
    assert sum(record.levelno >= logging.WARNING for record in caplog.records) <= 2
    other.run(other.session(), "queue.query", queue="q")


# --- none --------------------------------------------------------------------------------------------


def exchange_messages(client: Client, session: Session) -> None:
    for _ in range(20):
        session.transfer("", b"x", key="q")
    client.run(session, "execution.sync")


def test_without_interceptors_nothing_of_them_is_called() -> None:
    def calls(front: Front) -> int:
        client = World(front=front).connect()
        session = client.session()
        client.run(session, "queue.declare", queue="q")
        found = 0

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal found
            found += event == "call" and frame.f_code.co_filename == interceptors.__file__

        sys.setprofile(count)
        try:
            exchange_messages(client, session)
        finally:
            sys.setprofile(None)
        return found

    assert calls(Front()) == 0
    # For each transfer the handler's method and the verdict.
    assert calls(Front(on_assembly=of_all(lambda command: None))) == 2 * 20
