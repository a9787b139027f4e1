"""qpid-python's clients, unchanged, with a broker."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import pytest
from driven010 import Driven, Refused, struct
from served010 import Served, serving

from amqp_rt import connect

pytestmark = [pytest.mark.foreign, pytest.mark.slow]


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    async with serving(users={"guest": "guest"}) as served:
        yield served


@pytest.fixture
async def high(messaging: Driven, served: Served) -> Driven:
    """Return ``qpid.messaging`` with a connection and a session."""
    await messaging.step("connect", "c", f"guest/guest@127.0.0.1:{served.port}")
    await messaging.step("session", "s", "c")
    return messaging


@pytest.fixture
async def low(commands: Driven, served: Served) -> Driven:
    """Return ``qpid.session`` with a connection and a session."""
    login = {"username": "guest", "password": "guest", "mechanism": "PLAIN"}
    await commands.step("connect", "c", "127.0.0.1", served.port, login)
    await commands.step("session", "s", "c")
    return commands


# --- qpid.messaging -------------------------------------------------------------------------------


@pytest.mark.req("N19", "D2")
@pytest.mark.parametrize(
    "content",
    ["text ü", b"\x00\xff", {"a": 1, "b": [True, None, 0.5]}, [1, "two", {"three": 3}]],
    ids=["text", "octets", "map", "list"],
)
async def test_messages_keep_content_and_fields(high: Driven, content: Any) -> None:
    await high.step("sender", "out", "s", "q; {create: always}")
    await high.step("receiver", "in", "s", "q", {"capacity": 10})
    fields = {
        "id": UUID(int=7),
        "subject": "news ü",
        "user_id": "guest",
        "correlation_id": b"\x01\xfe",
        "reply_to": "answers",
        "durable": False,
        "priority": 5,
        "ttl": 15.0,
        "properties": {"number": 1, "text": "ü", "map": {"x": None}},
    }
    await high.step("send", "out", content, fields)
    found = await high.step("fetch", "in")
    assert found["content"] == content
    unequal = {
        name: (found.get(name), value)
        for name, value in fields.items()
        if name not in ("user_id", "properties", "durable", "ttl") and found.get(name) != value
    }
    assert unequal == {}
    assert found["user_id"] == b"guest"
    assert 0 < found["ttl"] <= 15
    assert fields["properties"].items() <= found["properties"].items()  # type: ignore[attr-defined]
    await high.step("acknowledge", "s", found["key"])
    assert await high.step("unsettled", "in") == 0


async def test_an_empty_queue_is_fetched_as_nothing(high: Driven) -> None:
    await high.step("receiver", "in", "s", "q; {create: always}")
    assert await high.step("fetch", "in", 0) is None
    assert await high.step("next_receiver", "s", 0) is None


async def test_released_messages_come_again_and_browsed_ones_stay(high: Driven) -> None:
    await high.step("sender", "out", "s", "q; {create: always}")
    await high.step("send", "out", "text", None, False)
    await high.step("sync", "s")
    await high.step("receiver", "looking", "s", "q; {mode: browse}")
    assert (await high.step("fetch", "looking"))["content"] == "text"
    await high.step("receiver", "in", "s", "q")
    found = await high.step("fetch", "in")
    await high.step("acknowledge", "s", found["key"], "release", {"set_redelivered": True})
    again = await high.step("fetch", "in")
    assert again["content"] == "text"
    assert again["redelivered"]
    await high.step("acknowledge", "s", again["key"], "reject", {"code": 0, "text": "no"})
    assert await high.step("fetch", "in", 0) is None


@pytest.mark.req("R12")
async def test_transactions_commit_and_roll_back(high: Driven) -> None:
    await high.step("session", "tx", "c", True)
    await high.step("sender", "out", "tx", "q; {create: always}")
    await high.step("receiver", "in", "tx", "q")
    await high.step("send", "out", "text")
    await high.step("commit", "tx")
    await high.step("fetch", "in")
    await high.step("rollback", "tx")
    # The library takes its credit in bytes to have survived message.stop, until a fetch has found nothing.
    assert await high.step("fetch", "in", 0) is None
    found = await high.step("fetch", "in")
    assert (found["content"], found["redelivered"]) == ("text", True)
    await high.step("acknowledge", "tx")
    await high.step("commit", "tx")
    assert await high.step("fetch", "in", 0) is None


async def test_an_exchange_routes_by_subject(high: Driven) -> None:
    await high.step("receiver", "in", "s", "amq.topic/news.*", {"capacity": 10})
    await high.step("sender", "out", "s", "amq.topic")
    await high.step("send", "out", "other", {"subject": "sport.x"})
    await high.step("send", "out", "wanted", {"subject": "news.x"})
    found = await high.step("fetch", "in")
    assert (found["content"], found["subject"]) == ("wanted", "news.x")
    assert await high.step("fetch", "in", 0) is None


async def test_addresses_create_bind_and_delete(high: Driven) -> None:
    bindings = "x-bindings: [{exchange: 'e', key: 'k'}]"
    await high.step(
        "sender", "out", "s", "e; {create: always, node: {type: topic, x-declare: {type: direct}}}"
    )
    await high.step(
        "receiver",
        "in",
        "s",
        f"q; {{create: always, delete: always, node: {{{bindings}}}}}",
    )
    await high.step("send", "out", "text", {"subject": "k"})
    found = await high.step("fetch", "in")
    assert found["content"] == "text"
    await high.step("acknowledge", "s")
    await high.step("close", "in")
    with pytest.raises(Refused) as caught:
        await high.step("receiver", "again", "s", "q")
    assert caught.value.kind == "NotFound"


async def test_an_exchange_numbers_its_messages(high: Driven) -> None:
    declare = "x-declare: {arguments: {'qpid.msg_sequence': 1}}"
    address = f"e; {{create: always, node: {{type: topic, {declare}}}}}"
    await high.step("receiver", "in", "s", address, {"capacity": 10})
    await high.step("sender", "out", "s", "e")
    for number in (1, 2, 3):
        await high.step("send", "out", "text")
        found = await high.step("fetch", "in")
        assert (found["content"], found["properties"]["qpid.msg_sequence"]) == ("text", number)


async def test_a_queue_numbers_its_messages(high: Driven) -> None:
    declare = "x-declare: {arguments: {'qpid.queue_msg_sequence': 'k', 'qpid.max_count': 4, 'qpid.policy_type': ring}}"
    await high.step("sender", "out", "s", f"q; {{create: always, node: {{{declare}}}}}")
    await high.step("receiver", "in", "s", "q")
    await high.step("send", "out", "1", {"properties": {"k": 77}})
    assert (await high.step("fetch", "in"))["properties"]["k"] == 1
    # One that waits for its receiver's answer cannot be dropped, and counts among the four.
    for _ in range(5):
        await high.step("send", "out", "more")
    assert (await high.step("fetch", "in"))["properties"]["k"] == 4


async def test_many_messages_with_a_small_capacity(high: Driven) -> None:
    await high.step("sender", "out", "s", "q; {create: always}")
    await high.step("receiver", "in", "s", "q", {"capacity": 3})
    for number in range(50):
        await high.step("send", "out", f"{number}", None, False)
    await high.step("sync", "s")
    for number in range(50):
        assert (await high.step("fetch", "in"))["content"] == f"{number}"
    await high.step("acknowledge", "s")
    assert await high.step("fetch", "in", 0) is None


async def test_a_large_message(high: Driven) -> None:
    body = bytes(range(256)) * 1200
    await high.step("sender", "out", "s", "q; {create: always}")
    await high.step("receiver", "in", "s", "q")
    await high.step("send", "out", body)
    assert (await high.step("fetch", "in"))["content"] == body


async def test_a_wrong_password(messaging: Driven, served: Served) -> None:
    with pytest.raises(Refused) as caught:
        await messaging.step("connect", "c", f"guest/wrong@127.0.0.1:{served.port}")
    assert caught.value.kind == "ConnectionError"
    # The library forgets the text if it sees the end of the stream before it wakes its user.
    assert caught.value.text == "connection aborted" or "login failed" in caught.value.text


async def test_a_client_of_10_and_one_of_0_10_share_a_queue(high: Driven, served: Served) -> None:
    await high.step("sender", "out", "s", "q; {create: always}")
    await high.step("send", "out", "from 0-10")
    async with (
        connect(served.url.replace("://", "://guest:guest@")) as connection,
        connection.receiver("q") as receiver,
        connection.sender("q") as sender,
    ):
        message = await receiver.receive()
        assert message.body == b"from 0-10"
        message.accept()
        await sender.send("from 1.0")
    await high.step("receiver", "in", "s", "q")
    assert (await high.step("fetch", "in"))["content"] == "from 1.0"


@pytest.mark.req("D10")
async def test_a_client_reconnects(high: Driven, messaging: Driven, served: Served) -> None:
    options = {"reconnect": True, "reconnect_interval": 0.1, "reconnect_log": False}
    await messaging.step("connect", "r", f"guest/guest@127.0.0.1:{served.port}", options)
    await messaging.step("session", "rs", "r")
    await messaging.step("sender", "out", "rs", "q; {create: always}")
    await messaging.step("send", "out", "before")
    for connection in list(served.broker.container.connections):
        if connection.peer.protocol == "amqp0-10":
            connection.close()
    await messaging.step("send", "out", "after")
    await messaging.step("receiver", "in", "rs", "q")
    assert [(await messaging.step("fetch", "in"))["content"] for _ in range(2)] == [
        "before",
        "after",
    ]


# --- qpid.session ---------------------------------------------------------------------------------


async def test_commands_return_their_results(low: Driven) -> None:
    await low.step("command", "s", "queue.declare", {"queue": "q"})
    found = await low.step("command", "s", "queue.query", {"queue": "q"})
    assert found["result"]["queue"] == "q"


async def test_a_refused_command_tells_its_code(low: Driven) -> None:
    with pytest.raises(Refused) as caught:
        await low.step("command", "s", "queue.delete", {"queue": "nowhere"})
    assert caught.value.code == 404


async def test_messages_of_subscriptions_are_queued(low: Driven) -> None:
    await low.step("command", "s", "queue.declare", {"queue": "q"})
    headers = [
        struct("delivery-properties", routing_key="q", priority=3),
        struct("message-properties", correlation_id=b"\xff", message_id=UUID(int=1)),
    ]
    words = {"destination": "", "accept-mode": 0, "acquire-mode": 0}
    content = {"headers": headers, "body": b"\x00\x01"}
    await low.step("command", "s", "message.transfer", words, content)
    subscribe = {"queue": "q", "destination": "d", "accept-mode": 0, "acquire-mode": 1}
    await low.step("command", "s", "message.subscribe", subscribe)
    await low.step("message_flow", "s", "d")
    message = await low.step("incoming", "s", "d")
    assert message["body"] == b"\x00\x01"
    assert message["headers"]["delivery-properties"]["priority"] == 3
    assert message["headers"]["message-properties"]["correlation-id"] == b"\xff"
    ids = {"ranges": [[message["id"], message["id"]]]}
    acquired = await low.step("command", "s", "message.acquire", {"transfers": ids})
    assert acquired["result"] == {"transfers": [(message["id"], message["id"])]}
    await low.step("command", "s", "message.accept", {"transfers": ids})
    await low.step("complete", "s", ids["ranges"])
    assert await low.step("incoming", "s", "d", 0) is None
    found = await low.step("command", "s", "queue.query", {"queue": "q"})
    assert found["result"]["message-count"] == 0


@pytest.mark.req("R13")
@pytest.mark.parametrize("end", ["commit", "rollback"])
async def test_branches_move_messages(low: Driven, end: str) -> None:
    async def run(name: str, words: dict[str, Any] | None = None, *more: Any) -> Any:
        return (await low.step("command", "s", name, words or {}, *more))["result"]

    branch = {"xid": struct("xid", format=1, global_id=b"\xf0", branch_id=b"b")}
    words = {"destination": "", "accept-mode": 1, "acquire-mode": 0}
    for queue in ("from", "to"):
        await run("queue.declare", {"queue": queue})
    headers = {key: [struct("delivery-properties", routing_key=key)] for key in ("from", "to")}
    await run("message.transfer", words, {"headers": headers["from"], "body": b"one"})
    await run("dtx.select")
    assert await run("dtx.start", branch) == {"status": 0}
    subscribe = {"queue": "from", "destination": "d", "accept-mode": 0, "acquire-mode": 0}
    await run("message.subscribe", subscribe)
    await low.step("message_flow", "s", "d")
    message = await low.step("incoming", "s", "d")
    await run("message.accept", {"transfers": {"ranges": [[message["id"], message["id"]]]}})
    await run("message.transfer", words, {"headers": headers["to"], "body": message["body"]})
    assert await run("dtx.end", branch) == {"status": 0}
    assert await run("dtx.set-timeout", {**branch, "timeout": 100}) is None
    assert await run("dtx.get-timeout", branch) == {"timeout": 100}
    assert await run("dtx.prepare", branch) == {"status": 0}
    found = await run("dtx.recover")
    assert found == {"in-doubt": [{"format": 1, "global-id": b"\xf0", "branch-id": b"b"}]}
    await run("message.cancel", {"destination": "d"})
    assert await run(f"dtx.{end}", branch) == {"status": 0}
    counts = [
        (await run("queue.query", {"queue": queue}))["message-count"] for queue in ("from", "to")
    ]
    assert counts == ([0, 1] if end == "commit" else [1, 0])
    assert await run("dtx.recover") == {"in-doubt": []}


@pytest.mark.req("D18")
async def test_files_are_staged_published_and_received(low: Driven) -> None:
    async def run(name: str, words: dict[str, Any], *more: Any) -> None:
        await low.step("command", "s", name, words, *more)

    await run("queue.declare", {"queue": "q"})
    await run("file.consume", {"queue": "q", "consumer-tag": "c"})
    assert (await low.step("received", "s", "file.consume-ok"))["fields"]["consumer-tag"] == "c"
    # Twice the largest frame, so that content is cut and joined by both sides.
    body = bytes(range(256)) * 512
    for begin, end in ((0, 1_000), (1_000, len(body))):
        await run("file.open", {"identifier": "f", "content-size": len(body)})
        opened = await low.step("received", "s", "file.open-ok")
        assert opened["fields"].get("staged-size", 0) == begin
        properties = struct("file-properties", filename="a.txt", priority=4, headers={"a": 1})
        await run("file.stage", {}, {"headers": [properties], "body": body[begin:end]})
    await run("file.publish", {"routing-key": "q", "identifier": "f"})
    offered = await low.step("received", "s", "file.open")
    assert offered["fields"]["content-size"] == len(body)
    await run("file.open-ok", {"staged-size": 0})
    staged = await low.step("received", "s", "file.stage")
    assert staged["body"] == body
    assert staged["headers"]["file-properties"] == {
        "filename": "a.txt",
        "priority": 4,
        "headers": {"a": 1},
    }
    delivered = (await low.step("received", "s", "file.deliver"))["fields"]
    assert (delivered["consumer-tag"], delivered["routing-key"]) == ("c", "q")
    assert delivered["identifier"] == offered["fields"]["identifier"]
    await run("file.ack", {"delivery-tag": delivered["delivery-tag"]})
    with pytest.raises(Refused) as caught:
        await run("file.ack", {"delivery-tag": delivered["delivery-tag"]})
    assert caught.value.code == 542


@pytest.mark.req("D18")
async def test_packets_of_a_stream_are_received_and_returned(low: Driven) -> None:
    async def publish(key: str) -> None:
        words = {"routing-key": key, "mandatory": True}
        properties = struct("stream-properties", content_type="video/x", priority=7)
        content = {"headers": [properties], "body": b"frame"}
        await low.step("command", "s", "stream.publish", words, content)

    await low.step("command", "s", "queue.declare", {"queue": "q"})
    await low.step("command", "s", "stream.consume", {"queue": "q", "consumer-tag": "c"})
    await publish("q")
    packet = await low.step("received", "s", "stream.deliver")
    assert (packet["fields"]["consumer-tag"], packet["body"]) == ("c", b"frame")
    assert packet["headers"]["stream-properties"] == {"content-type": "video/x", "priority": 7}
    await publish("nowhere")
    returned = await low.step("received", "s", "stream.return")
    assert (returned["fields"]["reply-code"], returned["body"]) == (312, b"frame")
