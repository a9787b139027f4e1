"""The programs on qpid-python do what their steps say, with the server's half of that library."""

from __future__ import annotations

import ssl
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import trio
import trustme
from driven010 import Driven, Refused, struct

pytestmark = [pytest.mark.foreign, pytest.mark.slow]


@pytest.fixture
def high(messaging: Driven, qpid_server: int) -> Driven:
    """Return the high-level API with a connection, a session and a queue ``q``."""
    messaging("connect", "c", f"127.0.0.1:{qpid_server}")
    messaging("session", "s", "c")
    return messaging


@pytest.fixture
def low(commands: Driven, qpid_server: int) -> Driven:
    """Return the low-level API with a connection and a session."""
    commands("connect", "c", "127.0.0.1", qpid_server)
    commands("session", "s", "c")
    return commands


@pytest.mark.parametrize(
    "content",
    ["text ü", b"\x00\xff", {"a": 1, "b": [True, None, 0.5]}, [1, "two", {"three": 3}]],
)
def test_messages_keep_content_and_fields(high: Driven, content: Any) -> None:
    high("sender", "out", "s", "q; {create: always}")
    high("receiver", "in", "s", "q", {"capacity": 10})
    fields = {
        "id": UUID(int=7),
        "subject": "news ü",
        "user_id": "guest",
        "correlation_id": b"\x01\xfe",
        "reply_to": "answers",
        "durable": True,
        "priority": 5,
        "ttl": 1.5,
        "properties": {"number": 1, "text": "ü", "map": {"x": None}},
    }

    high("send", "out", content, fields)
    found = high("fetch", "in")

    assert found["content"] == content
    assert {name: found[name] for name in fields if name not in ("user_id", "properties")} == {
        name: fields[name] for name in fields if name not in ("user_id", "properties")
    }
    assert found["user_id"] == b"guest"
    assert fields["properties"].items() <= found["properties"].items()
    assert high("available", "in") == 0
    high("acknowledge", "s", found["key"])
    assert high("unsettled", "in") == 0


def test_an_empty_queue_is_fetched_as_nothing(high: Driven) -> None:
    high("receiver", "in", "s", "q; {create: always}")
    assert high("fetch", "in", 0) is None
    assert high("next_receiver", "s", 0) is None


def test_released_messages_come_again_and_browsed_ones_stay(high: Driven) -> None:
    high("sender", "out", "s", "q; {create: always}")
    high("send", "out", "text", None, False)
    high("sync", "s")
    high("receiver", "looking", "s", "q; {mode: browse}")
    assert high("fetch", "looking")["content"] == "text"
    high("receiver", "in", "s", "q")
    found = high("fetch", "in")
    high("acknowledge", "s", found["key"], "release", {"set_redelivered": True})
    again = high("fetch", "in")
    assert again["content"] == "text"
    high("acknowledge", "s", again["key"], "reject", {"code": 0, "text": "no"})
    assert high("fetch", "in", 0) is None


def test_transactions_commit_and_roll_back(high: Driven) -> None:
    high("session", "tx", "c", True)
    high("sender", "out", "tx", "q; {create: always}")
    high("receiver", "in", "tx", "q")
    high("send", "out", "text")
    high("commit", "tx")
    high("fetch", "in")
    high("rollback", "tx")
    assert high("fetch", "in")["content"] == "text"
    high("acknowledge", "tx")
    high("commit", "tx")
    high("close", "c")


def test_an_error_of_the_library_names_its_class(high: Driven) -> None:
    with pytest.raises(Refused) as caught:
        high("receiver", "in", "s", "nowhere")
    assert caught.value.kind == "NotFound"
    assert high("error", "s") is None


def test_a_refused_command_tells_its_code(low: Driven) -> None:
    with pytest.raises(Refused) as caught:
        low("command", "s", "queue.delete", {"queue": "nowhere"})
    assert caught.value.code == 404
    assert low("error", "s") == [[404, "no such queue: nowhere"]]


def test_commands_return_their_results(low: Driven) -> None:
    low("command", "s", "queue.declare", {"queue": "q"})
    found = low("command", "s", "queue.query", {"queue": "q"})
    assert found["result"]["queue"] == "q"
    assert found["id"] == 1

    low("session", "waiting", "c", None, False)
    number = low("command", "waiting", "queue.query", {"queue": "q"}, None, True)["id"]
    assert low("result", "waiting", number)["queue"] == "q"


def test_messages_of_subscriptions_are_queued(low: Driven) -> None:
    low("command", "s", "queue.declare", {"queue": "q"})
    headers = [
        struct("delivery-properties", routing_key="q", priority=3),
        struct("message-properties", correlation_id=b"\xff", message_id=UUID(int=1)),
    ]
    words = {"destination": "", "accept-mode": 0, "acquire-mode": 0}
    low("command", "s", "message.transfer", words, {"headers": headers, "body": b"\x00\x01"})
    subscribe = {"queue": "q", "destination": "d", "accept-mode": 0, "acquire-mode": 0}
    low("command", "s", "message.subscribe", subscribe)
    low("message_flow", "s", "d")

    message = low("incoming", "s", "d")

    assert message["body"] == b"\x00\x01"
    assert message["headers"]["delivery-properties"]["priority"] == 3
    assert message["headers"]["message-properties"]["correlation-id"] == b"\xff"
    ids = {"ranges": [[message["id"], message["id"]]]}
    assert low("command", "s", "message.acquire", {"transfers": ids})["result"] == {
        "transfers": [(message["id"], message["id"])]
    }
    low("command", "s", "message.accept", {"transfers": ids})
    low("complete", "s", ids["ranges"])
    assert low("incoming", "s", "d", 0) is None


def test_branches_and_controls(low: Driven) -> None:
    branch = struct("xid", format=1, global_id=b"\xf0", branch_id=b"b")
    assert low("command", "s", "dtx.start", {"xid": branch})["result"] == {"status": 0}
    found = low("command", "s", "dtx.recover")["result"]
    assert found == {"in-doubt": [{"format": 1, "global-id": b"\xf0", "branch-id": b"b"}]}
    low("control", "s", "session.flush", {"completed": True})
    low("start_at", "s", 2**32 - 1)
    assert low("command", "s", "queue.query", {"queue": "q"})["id"] == 2**32 - 1
    assert low("command", "s", "queue.query", {"queue": "q"})["id"] == 0
    low("detach", "s")
    low("close", "c")


def test_a_cut_connection_fails_what_waits(low: Driven) -> None:
    low("cut", "c")
    with pytest.raises(Refused):
        low("command", "s", "queue.query", {"queue": "q"})


def test_a_connection_goes_on_with_another_server(messaging: Driven, qpid_python: str) -> None:
    with closing(Driven(qpid_python, "server.py")) as other:
        with closing(Driven(qpid_python, "server.py")) as server:
            ports = [each.line()["port"] for each in (server, other)]
            options = {
                "reconnect": True,
                "reconnect_interval": 0.1,
                "reconnect_urls": [f"127.0.0.1:{ports[1]}"],
                "reconnect_log": False,
            }
            messaging("connect", "c", f"127.0.0.1:{ports[0]}", options)
            messaging("session", "s", "c")
            messaging("sender", "out", "s", "q; {create: always}")
            messaging("send", "out", "to the first")
        messaging("send", "out", "to the other")
        assert messaging("attached", "c")
        messaging("receiver", "in", "s", "q")
        assert messaging("fetch", "in")["content"] == "to the other"


async def test_both_speak_tls(
    messaging: Driven, commands: Driven, qpid_server: int, tmp_path: Path
) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(context)

    async def carry(source: trio.abc.Stream, target: trio.abc.Stream) -> None:
        # Python 2.7 ends a connection without the close of TLS.
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            async for octets in source:
                await target.send_all(octets)

    async def relay(outer: trio.abc.Stream) -> None:
        inner = await trio.open_tcp_stream("127.0.0.1", qpid_server)
        async with inner, trio.open_nursery() as nursery:
            nursery.start_soon(carry, inner, outer)
            await carry(outer, inner)
            nursery.cancel_scope.cancel()
        await trio.aclose_forcefully(outer)

    async with trio.open_nursery() as nursery:
        serve = partial(trio.serve_ssl_over_tcp, relay, 0, context, host="127.0.0.1")
        (listener,) = await nursery.start(serve)
        port = listener.transport_listener.socket.getsockname()[1]
        trusted = {"transport": "ssl", "ssl_trustfile": str(tmp_path / "ca.pem")}
        await messaging.step("connect", "c", f"localhost:{port}", trusted)
        await messaging.step("session", "s", "c")
        await messaging.step("sender", "out", "s", "q; {create: always}")
        await messaging.step("send", "out", "text")
        await messaging.step("close", "c")
        await commands.step("connect", "c", "localhost", port, None, True)
        await commands.step("session", "s", "c")
        found = await commands.step("command", "s", "queue.query", {"queue": "q"})
        assert found["result"]["message-count"] == 1
        await commands.step("close", "c")
        nursery.cancel_scope.cancel()
