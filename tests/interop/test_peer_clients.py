"""The clients in tests/peers and our broker and containers."""

from __future__ import annotations

import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from peer_programs import SIMPLE, VALUES, PeerPrograms, digest, filler, numbers

from amqp_rt import (
    Broker,
    Container,
    Limits,
    Message,
    Modify,
    Peer,
    Reject,
    Release,
    node,
    rpc,
    source,
)
from amqp_rt.broker import Queue, Topic


@asynccontextmanager
async def a_broker(*declared: Queue | Topic, **options: Any) -> AsyncIterator[int]:
    """A broker with these nodes; its port."""
    async with Broker(**options) as broker:
        for declaration in declared:
            await broker.declare(declaration)
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        yield port_of(url)


@asynccontextmanager
async def a_container(*nodes: Any, **options: Any) -> AsyncIterator[int]:
    """A container with these nodes; its port."""
    async with Container("nodes", nodes=nodes, **options) as container:
        (url,) = await container.listen("amqp://127.0.0.1:0")
        yield port_of(url)


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def outcomes(result: dict[str, Any]) -> list[str]:
    """What the sender was told, in a word each."""
    return [state[0] for state in result["states"]]


# --- Broker ------------------------------------------------------------------------------------


@pytest.mark.req("X4", "SE1", "SE2")
@pytest.mark.parametrize("sasl", [True, False])
async def test_opening_with_and_without_a_sasl_layer(peer: PeerPrograms, sasl: bool) -> None:
    async with a_broker() as port:
        result = await peer.run("open", port=port, sasl=sasl)
    assert result["container"]
    assert "error" not in result
    assert "ANONYMOUS-RELAY" in result["offered_capabilities"]


@pytest.mark.req("SE1", "SE2")
async def test_passwords(peer: PeerPrograms) -> None:
    async with a_broker(Queue("q"), users={"ada": "secret"}) as port:
        good = await peer.run("send", port=port, user="ada", password="secret", address="q")
        assert outcomes(good) == ["accepted"]
        bad = await peer.run("open", port=port, user="ada", password="guess")
        assert bad["error"]["scope"] in ("transport", "connection")
        nobody = await peer.run("open", port=port)
        assert "error" in nobody


@pytest.mark.smoke
@pytest.mark.req("B5", "B19", "M19", "X12", "X15")
async def test_a_queue_keeps_the_order(peer: PeerPrograms) -> None:
    async with a_broker(Queue("q")) as port:
        sent = await peer.run("send", port=port, address="q", count=250)
        assert outcomes(sent) == ["accepted"] * 250
        assert sent["settled"] == 250
        received = await peer.run("receive", port=port, address="q", count=250, credit=7)
        assert numbers(received["messages"]) == list(range(250))


@pytest.mark.req("B5", "B16", "M21", "M22", "M23")
async def test_outcomes_of_their_receiver(peer: PeerPrograms) -> None:
    async with a_broker(Queue("q", dead_letter="dead")) as port:
        await peer.run("send", port=port, address="q", count=4)
        # In turn: of two outcomes that rhea learns of at the same time it reports one.
        seen = []
        for outcome in ("accept", "reject", "release", "modify", "none"):
            result = await peer.run("receive", port=port, address="q", count=1, outcomes=[outcome])
            (message,) = result["messages"]
            seen.append((*numbers([message]), message["header"]["delivery_count"]))
        # Released does not count as an attempt. Modified with undeliverable-here is for others,
        # and each of these is another link.
        assert seen == [(0, 0), (1, 0), (2, 0), (2, 0), (2, 1)]
        again = await peer.run("receive", port=port, address="q", count=2)
        assert numbers(again["messages"]) == [2, 3]
        dead = await peer.run("receive", port=port, address="dead", count=1)
        assert numbers(dead["messages"]) == [1]


@pytest.mark.req("X16")
async def test_draining_a_queue(peer: PeerPrograms) -> None:
    async with a_broker(Queue("q")) as port:
        await peer.run("send", port=port, address="q", count=3)
        result = await peer.run("receive", port=port, address="q", credit=10, drain=True)
        assert numbers(result["messages"]) == [0, 1, 2]
        assert (result["drained"], result["credit"]) == (True, 0)
        empty = await peer.run("receive", port=port, address="q", credit=10, drain=True)
        assert (empty["received"], empty["drained"]) == (0, True)


@pytest.mark.req("X18", "X22")
@pytest.mark.parametrize("size", [70_000, 3_000_000])
async def test_large_messages(peer: PeerPrograms, size: int) -> None:
    async with a_broker(Queue("q")) as port:
        sent = await peer.run("send", port=port, address="q", size=size, count=2)
        assert outcomes(sent) == ["accepted"] * 2
        received = await peer.run("receive", port=port, address="q", count=2, credit=1)
    assert [each["body"] for each in received["messages"]] == [digest(filler(size))] * 2


@pytest.mark.req("X4", "X18")
async def test_small_frames(peer: PeerPrograms) -> None:
    async with a_broker(Queue("q")) as port:
        options = {"port": port, "address": "q", "max_frame_size": 512}
        sent = await peer.run("send", size=20_000, **options)
        assert outcomes(sent) == ["accepted"]
        received = await peer.run("receive", count=1, **options)
    assert received["messages"][0]["body"] == digest(filler(20_000))


@pytest.mark.req("X22")
async def test_a_message_too_large(peer: PeerPrograms) -> None:
    async with a_broker(Queue("q"), limits=Limits(message_size_max=10_240)) as port:
        result = await peer.run("send", port=port, address="q", size=100_000)
        if "error" in result:
            assert result["error"]["scope"] == "link"
            assert result["error"]["condition"] == "amqp:link:message-size-exceeded"
        else:
            assert outcomes(result) == ["rejected"]
        fine = await peer.run("send", port=port, address="q", size=1_000)
        assert outcomes(fine) == ["accepted"]


@pytest.mark.req("T1", "T2", "T3", "T4", "T5", "T6", "M1", "M2", "M16")
async def test_all_types_pass_through(peer: PeerPrograms) -> None:
    async with a_broker(Queue("q")) as port:
        result = await peer.run("mirror", port=port, address="q", values=VALUES)
    (message,) = result["messages"]
    assert dict(zip(VALUES, message["body"][1][1], strict=True)) == VALUES
    assert message["application_properties"] == SIMPLE


@pytest.mark.req("M2", "M4", "M12")
async def test_header_and_properties_pass_through(peer: PeerPrograms) -> None:
    sent = {
        "body": ["sequence", [["int", 1], ["string", "two"]]],
        "properties": {
            "message_id": ["uuid", "00112233445566778899aabbccddeeff"],
            "to": "there",
            "subject": "new",
            "reply_to": "here",
            "correlation_id": ["string", "c"],
            "group_id": "g",
            "group_sequence": 3,
        },
        "header": {"durable": False, "priority": 7, "ttl": 60_000},
    }
    async with a_broker(Queue("q")) as port:
        await peer.run("send", port=port, address="q", messages=[sent])
        result = await peer.run("receive", port=port, address="q", count=1)
    (message,) = result["messages"]
    assert message["body"] == sent["body"]
    assert message["properties"] == sent["properties"]
    assert message["header"]["priority"] == 7
    assert 0 < message["header"]["ttl"] <= 60_000


@pytest.mark.req("B20", "M30")
async def test_browsing(peer: PeerPrograms) -> None:
    async with a_broker(Queue("q")) as port:
        await peer.run("send", port=port, address="q", count=3)
        for _ in range(2):
            seen = await peer.run("receive", port=port, address="q", browse=True, quiet_ms=300)
            assert numbers(seen["messages"]) == [0, 1, 2]
        taken = await peer.run("receive", port=port, address="q", count=3)
        assert numbers(taken["messages"]) == [0, 1, 2]


@pytest.mark.req("A1", "A3")
async def test_a_streamed_request_and_a_compressed_payload(peer: PeerPrograms) -> None:
    taken: list[Any] = []

    @rpc("sum")
    async def add(numbers: AsyncIterator[int]) -> int:
        return sum([number async for number in numbers])

    @node("rows")
    async def rows(payload: dict[str, int]) -> None:
        taken.append(payload)

    key = {"correlation_id": ["string", "stream"]}
    bodies = [
        {"body": ["value", ["long", str(number)]], "properties": dict(key)} for number in range(5)
    ]
    bodies[0]["properties"]["reply_to"] = "replies"  # type: ignore[index]
    end = {
        "body": ["data", ""],
        "properties": dict(key),
        "message_annotations": {"x-opt-stream-end": ["boolean", True]},
    }
    packed = {
        "body": ["data", gzip.compress(b'{"a": 1}').hex()],
        "properties": {"content_type": "application/json", "content_encoding": "gzip"},
    }
    async with Broker() as broker:
        await broker.declare(Queue("replies"))
        broker.container.add(add, rows)
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        port = port_of(url)
        sent = await peer.run("send", port=port, address="sum", messages=[*bodies, end])
        assert outcomes(sent) == ["accepted"] * 6
        found = await peer.run("receive", port=port, address="replies", count=1)
        sent = await peer.run("send", port=port, address="rows", messages=[packed])
        assert outcomes(sent) == ["accepted"]
    (reply,) = found["messages"]
    assert reply["body"][1][1] == "10"
    assert reply["properties"]["correlation_id"] == ["string", "stream"]
    assert taken == [{"a": 1}]


def coloured(*colours: str, **header: Any) -> list[dict[str, Any]]:
    """Messages of these colours, with their number as the body."""
    return [
        {
            "body": ["value", ["long", str(number)]],
            "application_properties": {"colour": ["string", colour]},
            "header": header,
        }
        for number, colour in enumerate(colours)
    ]


@pytest.mark.req("M27", "M29", "B20")
async def test_selectors(peer: PeerPrograms) -> None:
    async with a_broker(Queue("q")) as port:
        messages = coloured("red", "blue", "red", "green", "blue")
        await peer.run("send", port=port, address="q", messages=messages)
        some = {"port": port, "address": "q", "selector": "colour IN ('blue', 'green')"}
        for _ in range(2):
            seen = await peer.run("receive", browse=True, quiet_ms=300, **some)
            assert numbers(seen["messages"]) == [1, 3, 4]
        # The credit that nothing matches is used up by a drain.
        taken = await peer.run("receive", credit=10, drain=True, **some)
        assert numbers(taken["messages"]) == [1, 3, 4]
        assert (taken["drained"], taken["credit"]) == (True, 0)
        rest = await peer.run("receive", port=port, address="q", credit=10, drain=True)
        assert numbers(rest["messages"]) == [0, 2]
        wrong = await peer.run("receive", port=port, address="q", selector="colour = = 1")
        assert wrong["error"]["scope"] == "link"
        assert wrong["error"]["condition"] == "amqp:invalid-field"


def described(name: str, value: list[Any]) -> list[Any]:
    return ["described", [["symbol", name], value]]


def text_map(**values: str) -> list[Any]:
    return ["map", [[["string", name], ["string", value]] for name, value in values.items()]]


#: Filters as Part 3 §3.5.8 has them, and the numbers of the messages of SUBJECTS that pass.
FILTERS = {
    "selector": (
        described("apache.org:selector-filter:string", ["string", "place < 3"]),
        [0, 1, 2],
    ),
    "sql": (described("amqp:sql-filter", ["string", "properties.subject LIKE 'sport.%'"]), [0, 2]),
    "subject": (
        described("apache.org:legacy-amqp-direct-binding:string", ["string", "weather.today"]),
        [1],
    ),
    "one word": (
        described("apache.org:legacy-amqp-topic-binding:string", ["string", "*.tennis"]),
        [2],
    ),
    "any words": (
        described("apache.org:legacy-amqp-topic-binding:string", ["string", "sport.#"]),
        [0, 2, 4],
    ),
    "property": (
        described(
            "amqp:properties-filter",
            ["map", [[["symbol", "subject"], ["string", "weather.today"]]]],
        ),
        [1],
    ),
    "beginning of a property": (
        described(
            "amqp:properties-filter", ["map", [[["symbol", "subject"], ["string", "&p:sport."]]]]
        ),
        [0, 2],
    ),
    "application property": (
        described("amqp:application-properties-filter", text_map(colour="red")),
        [0, 3],
    ),
    "end of an application property": (
        described("amqp:application-properties-filter", text_map(colour="&s:een")),
        [2, 4],
    ),
}
SUBJECTS = [
    ("sport.football", "red"),
    ("weather.today", "blue"),
    ("sport.tennis", "green"),
    ("arts", "red"),
    ("sport", "green"),
]


@pytest.mark.req("M28", "M29")
@pytest.mark.parametrize("kind", FILTERS)
async def test_filters(peer: PeerPrograms, kind: str) -> None:
    messages = [
        {
            "body": ["value", ["long", str(number)]],
            "properties": {"subject": subject},
            "application_properties": {"colour": ["string", colour], "place": ["int", number]},
        }
        for number, (subject, colour) in enumerate(SUBJECTS)
    ]
    wanted, passes = FILTERS[kind]
    async with a_broker(Queue("q")) as port:
        await peer.run("send", port=port, address="q", messages=messages)
        took = {"port": port, "address": "q", "credit": 10, "drain": True}
        found = await peer.run("receive", filter={"wanted": wanted}, **took)
        assert numbers(found["messages"]) == passes
        rest = await peer.run("receive", **took)
        assert sorted(numbers(rest["messages"]) + passes) == list(range(len(messages)))


@pytest.mark.req("M29")
async def test_no_local(peer: PeerPrograms) -> None:
    wanted = {"others": described("apache.org:no-local-filter:list", ["list", []])}
    async with a_broker(Queue("q")) as port:
        for container, number in (("here", 0), ("there", 1), ("here", 2)):
            message = {"body": ["value", ["long", str(number)]]}
            await peer.run("send", port=port, address="q", container=container, messages=[message])
        took = {"port": port, "address": "q", "container": "here", "credit": 10, "drain": True}
        found = await peer.run("receive", filter=wanted, **took)
        assert numbers(found["messages"]) == [1]
        found = await peer.run("receive", **took)
        assert numbers(found["messages"]) == [0, 2]


@pytest.mark.req("M29", "B19")
async def test_subscribers_with_selectors(peer: PeerPrograms) -> None:
    async with a_broker(Topic("news")) as port:
        common = {"port": port, "address": "news"}
        async with (
            peer.start("receive", count=2, selector="colour = 'red'", **common) as red,
            peer.start("receive", count=1, selector="colour = 'blue'", **common) as blue,
        ):
            await red.said("attached")
            await blue.said("attached")
            await peer.run("send", messages=coloured("red", "blue", "red"), **common)
            assert numbers((await red.result())["messages"]) == [0, 2]
            assert numbers((await blue.result())["messages"]) == [1]


@pytest.mark.req("M7", "B16")
async def test_what_has_expired_is_not_delivered(peer: PeerPrograms) -> None:
    async with a_broker(Queue("q", dead_letter="dead"), Queue("dead")) as port:
        for ttl, messages in ((200, 2), (60_000, 1)):
            sent = await peer.run(
                "send", port=port, address="q", messages=coloured(*["red"] * messages, ttl=ttl)
            )
            assert outcomes(sent) == ["accepted"] * messages
        dead = await peer.run("receive", port=port, address="dead", count=2)
        assert numbers(dead["messages"]) == [0, 1]
        alive = await peer.run("receive", port=port, address="q", credit=10, drain=True)
        (message,) = alive["messages"]
        # The broker forwards what is left of the ttl.
        assert 0 < message["header"]["ttl"] <= 60_000


@pytest.mark.req("B19")
async def test_a_topic_copies_to_every_subscriber(peer: PeerPrograms) -> None:
    async with a_broker(Topic("news")) as port:
        subscribe = {"port": port, "address": "news", "count": 3}
        async with (
            peer.start("receive", **subscribe) as one,
            peer.start("receive", **subscribe) as other,
        ):
            await one.said("attached")
            await other.said("attached")
            await peer.run("send", port=port, address="news", count=3)
            for program in (one, other):
                assert numbers((await program.result())["messages"]) == [0, 1, 2]


@pytest.mark.req("B1", "B2", "M33", "M41")
async def test_requests_through_queues(peer: PeerPrograms) -> None:
    @rpc("double")
    async def double(number: int) -> int:
        return 2 * number

    async with (
        a_broker(Queue("double")) as port,
        Container("worker", nodes=[double]) as worker,
        worker.connect(f"amqp://127.0.0.1:{port}") as connection,
    ):
        await connection.serve(double)
        requests = [["long", str(number)] for number in range(5)]
        result = await peer.run("rpc", port=port, address="double", requests=requests, in_flight=3)
    assert numbers(result["replies"]) == [0, 2, 4, 6, 8]
    assert len(result["reply_to"]) > 20


@pytest.mark.req("M41")
async def test_relay(peer: PeerPrograms) -> None:
    async with a_broker(Queue("a"), Queue("b")) as port:
        sent = await peer.run("send", port=port, to=["a", "b", "a"])
        assert outcomes(sent) == ["accepted"] * 3
        received = await peer.run("receive", port=port, address="a", count=2)
        assert numbers(received["messages"]) == [0, 2]


@pytest.mark.req("B12", "X21")
async def test_presettled_messages(peer: PeerPrograms) -> None:
    async with a_broker(Queue("q")) as port:
        sent = await peer.run("send", port=port, address="q", count=500, settle="settled")
        assert sent["sent"] == 500
        received = await peer.run("receive", port=port, address="q", count=500, settle="settled")
        assert numbers(received["messages"]) == list(range(500))


@pytest.mark.req("X26")
async def test_a_close_that_overtakes_transfers_hurts_nobody_else(
    rhea_programs: PeerPrograms,
) -> None:
    peer = rhea_programs
    async with (
        a_broker(Queue("q"), Queue("other")) as port,
        peer.start("receive", port=port, address="q", count=1) as bystander,
    ):
        await bystander.said("attached")
        hasty = {"port": port, "address": "other", "count": 500, "settle": "settled"}
        await peer.run("send", hasty=True, **hasty)
        await peer.run("send", port=port, address="q")
        assert (await bystander.result())["received"] == 1


@pytest.mark.req("X21")
async def test_settling_second_both_ways(peer: PeerPrograms) -> None:
    async with a_broker(Queue("q")) as port:
        sent = await peer.run("send", port=port, address="q", count=20, second=True)
        assert outcomes(sent) == ["accepted"] * 20
        received = await peer.run("receive", port=port, address="q", count=20, second=True)
        assert (received["received"], received["settled"]) == (20, 20)
        left = await peer.run("receive", port=port, address="q", credit=10, drain=True)
        assert left["received"] == 0


@pytest.mark.req("X5")
async def test_everything_in_the_first_segment(proton_programs: PeerPrograms) -> None:
    # Without SASL proton sends header, open, begin, attach and flow at once.
    peer = proton_programs
    async with a_broker(Queue("q")) as port:
        sent = await peer.run("send", port=port, address="q", sasl=False)
        assert outcomes(sent) == ["accepted"]
        received = await peer.run("receive", port=port, address="q", sasl=False, count=1)
        assert received["received"] == 1


@pytest.mark.req("X14", "B8")
async def test_there_is_no_such_node(peer: PeerPrograms) -> None:
    async with a_broker() as port:
        for role in ("send", "receive"):
            result = await peer.run(role, port=port, address="nowhere", count=1)
            assert result["error"]["scope"] == "link"
            assert result["error"]["condition"] == "amqp:not-found"


# --- Containers --------------------------------------------------------------------------------


class Order(msgspec.Struct):
    sku: str
    quantity: int


@pytest.mark.req("A1", "A3", "A11", "M13")
async def test_a_node_takes_typed_payloads(peer: PeerPrograms) -> None:
    seen: list[tuple[str, Order]] = []

    @node("orders/{region}")
    async def place(order: Order, region: str) -> None:
        seen.append((region, order))

    def message(body: bytes) -> dict[str, Any]:
        return {"body": ["data", body.hex()], "properties": {"content_type": "application/json"}}

    bodies = [b'{"sku": "A", "quantity": 2}', b'{"sku": "A"}', b"not json"]
    async with a_container(place) as port:
        result = await peer.run(
            "send", port=port, address="orders/eu", messages=list(map(message, bodies))
        )
    assert outcomes(result) == ["accepted", "rejected", "rejected"]
    assert result["states"][1][1]["condition"] == "amqp:decode-error"
    assert "quantity" in result["states"][1][1]["description"]
    assert seen == [("eu", Order("A", 2))]


@pytest.mark.req("A9", "M21", "M22", "M23")
async def test_how_a_handler_ends_is_what_they_hear(peer: PeerPrograms) -> None:
    @node("ends")
    async def end(how: int) -> None:
        if how == 1:
            raise Reject("no such thing")
        if how == 2:
            raise Release
        if how == 3:
            raise Modify(undeliverable_here=True)
        if how == 4:
            raise ZeroDivisionError

    async with a_container(end) as port:
        result = await peer.run("send", port=port, address="ends", count=5)
    assert outcomes(result) == ["accepted", "rejected", "released", "modified", "modified"]
    assert result["states"][1][1]["description"] == "no such thing"
    assert result["states"][3][1] == {"failed": True, "undeliverable": True}
    assert result["states"][4][1] == {"failed": True, "undeliverable": False}


@pytest.mark.req("A2", "A6", "M33")
async def test_requests_to_a_node(peer: PeerPrograms) -> None:
    @rpc("double", slots=4)
    async def double(number: int) -> int:
        return 2 * number

    requests = [["long", str(number)] for number in range(20)]
    async with a_container(double) as port:
        result = await peer.run("rpc", port=port, address="double", requests=requests, in_flight=8)
    assert numbers(result["replies"]) == [2 * number for number in range(20)]
    ids = [reply["properties"]["correlation_id"] for reply in result["replies"]]
    assert ids == [["ulong", str(number)] for number in range(20)]


@pytest.mark.req("A9")
async def test_a_request_that_fails_is_answered(peer: PeerPrograms) -> None:
    @rpc("fragile")
    async def fragile(number: int) -> int:
        return 1 // number

    async with a_container(fragile) as port:
        result = await peer.run(
            "rpc", port=port, address="fragile", requests=[["long", "1"], ["long", "0"]]
        )
    good, bad = result["replies"]
    assert "statusCode" not in good["application_properties"]
    assert bad["application_properties"]["statusCode"][1] == 500


@pytest.mark.req("A2", "X15", "X16")
async def test_a_source_runs_as_far_as_their_credit(peer: PeerPrograms) -> None:
    made = 0

    @source("count")
    async def count() -> AsyncIterator[int]:
        nonlocal made
        for number in range(1_000):
            made += 1
            yield number

    async with a_container(count) as port:
        result = await peer.run("receive", port=port, address="count", count=20, credit=5)
        assert numbers(result["messages"]) == list(range(20))
        assert made <= 40


@pytest.mark.req("X16", "M30")
async def test_a_source_answers_a_drain(peer: PeerPrograms) -> None:
    @source("three")
    async def three() -> AsyncIterator[int]:
        for number in range(3):
            yield number
        await trio.sleep_forever()

    async with a_container(three) as port:
        result = await peer.run("receive", port=port, address="three", credit=10, drain=True)
    assert result["drained"]
    assert numbers(result["messages"]) == [0, 1, 2]


@pytest.mark.req("X18", "X19")
async def test_large_messages_to_a_node_whole_and_streamed(peer: PeerPrograms) -> None:
    sizes: list[int] = []

    @node("whole")
    async def whole(message: Message) -> None:
        sizes.append(len(message.body))

    @node("streamed", streaming=True)
    async def streamed(body: AsyncIterator[bytes]) -> None:
        sizes.append(sum([len(chunk) async for chunk in body]))

    async with a_container(whole, streamed) as port:
        for address in ("whole", "streamed"):
            result = await peer.run("send", port=port, address=address, size=2_000_000)
            assert outcomes(result) == ["accepted"]
    assert sizes == [2_000_000, 2_000_000]


@pytest.mark.req("X21", "B12")
async def test_presettled_and_second_to_a_node(peer: PeerPrograms) -> None:
    seen: list[int] = []

    @node("numbers")
    async def take(number: int) -> None:
        seen.append(number)

    async with a_container(take) as port:
        await peer.run("send", port=port, address="numbers", count=50, settle="settled")
        second = await peer.run("send", port=port, address="numbers", count=5, second=True)
    assert outcomes(second) == ["accepted"] * 5
    assert seen == [*range(50), *range(5)]


@pytest.mark.req("X14")
async def test_a_container_has_no_such_node(peer: PeerPrograms) -> None:
    @node("here")
    async def here(number: int) -> None: ...

    async with a_container(here) as port:
        result = await peer.run("send", port=port, address="there")
    assert result["error"]["condition"] == "amqp:not-found"


# --- Transactions --------------------------------------------------------------------------------


@pytest.mark.req("R1", "R2", "R3", "R4", "R7")
@pytest.mark.parametrize("first", [False, True])
async def test_transactions_that_commit_and_abort(
    proton_programs: PeerPrograms, first: bool
) -> None:
    """rhea has no transactions of its own."""
    async with Broker() as broker:
        await broker.declare(Queue("q"), Queue("out"))
        (url,) = await broker.listen("amqp://127.0.0.1:0")
        for number in range(4):
            broker.publish("q", Message(number).encode())
        result = await proton_programs.run(
            "transact",
            port=port_of(url),
            address="q",
            to="out",
            count=2,
            ends=["commit", "abort", "commit"],
            settle_before_discharge=first,
        )
        assert "error" not in result
        assert result["ended"] == ["committed", "aborted", "committed"]
        assert result["received"] == [0, 1, 2, 3, 2, 3]
        moved = [Message.decode(each).body for each in await broker.peek("out", 9)]
        assert moved == [0, 1, 2, 3]
        stats = broker.stats("q")
        assert (stats.available, stats.acquired, stats.accepted) == (0, 0, 4)


@pytest.mark.req("R2")
async def test_transactions_where_there_are_none(proton_programs: PeerPrograms) -> None:
    async with a_container() as port:
        result = await proton_programs.run(
            "transact", port=port, address="q", to="out", count=1, ends=["commit"]
        )
    assert result["ended"] == []
    assert result["error"]["scope"] == "link"


@pytest.mark.req("M39", "B19")
@pytest.mark.parametrize("timeout", [0, 600])
@pytest.mark.parametrize("policy", ["link-detach", "session-end", "connection-close", "never"])
async def test_a_source_is_kept_as_long_as_its_policy_and_timeout_say(
    peer: PeerPrograms, policy: str, timeout: int
) -> None:
    """The link is detached, then the connection is closed: the subscription gathers or is gone."""
    subscriber = {"address": "t", "container": "them", "name": "news", "quiet_ms": 200}
    async with a_broker(Topic("t")) as port:
        subscriber |= {"port": port, "expiry_policy": policy, "timeout": timeout}
        first = await peer.run("receive", **subscriber)
        assert "error" not in first
        await peer.run("send", port=port, address="t", count=2)
        again = await peer.run("receive", **subscriber)
    kept = policy == "never" or timeout > 0
    assert numbers(again["messages"]) == ([0, 1] if kept else [])


@pytest.mark.req("SE17", "SE11")
async def test_the_application_authorises_each_attach_and_each_transfer(
    peer: PeerPrograms,
) -> None:
    """With the address, the role, the user and what the verifier returned for it."""
    asked: list[tuple[str, str, str | None, Any]] = []

    async def login(user: str, password: str, _peer: Peer) -> str | None:
        await trio.lowlevel.checkpoint()
        return f"badge of {user}" if password == "right" else None

    async def authorize(of: Peer, address: str, role: str) -> bool:
        await trio.lowlevel.checkpoint()
        asked.append((address, role, of.user, of.identity))
        return (of.identity, address, role) in {
            ("badge of ann", "a", "sender"),
            ("badge of bob", "a", "receiver"),
        }

    options: dict[str, Any] = {"users": login, "plain_in_clear": True, "authorize": authorize}
    async with a_broker(Queue("a"), Queue("b"), **options) as port:
        ann = {"port": port, "user": "ann", "password": "right"}
        bob = {"port": port, "user": "bob", "password": "right"}
        assert outcomes(await peer.run("send", address="a", **ann)) == ["accepted"]
        # Each message that the anonymous relay is given is a transfer to an address of its own.
        relayed = await peer.run("send", to=["a", "b", "a"], **ann)
        assert outcomes(relayed) == ["accepted", "rejected", "accepted"]
        assert relayed["states"][1][1]["condition"] == "amqp:unauthorized-access"
        for role, who, address in (
            ("send", bob, "a"),
            ("send", ann, "b"),
            ("receive", ann, "a"),
            ("receive", bob, "b"),
        ):
            refused = await peer.run(role, address=address, count=1, **who)
            assert refused["error"]["condition"] == "amqp:unauthorized-access", (role, address)
        taken = await peer.run("receive", address="a", count=3, **bob)
        assert numbers(taken["messages"]) == [0, 0, 2]
    a, b = ("ann", "badge of ann"), ("bob", "badge of bob")
    # Messages of one chunk are asked about at once, in any order.
    asked[1:3] = sorted(asked[1:3])
    assert asked == [
        ("a", "sender", *a),
        # Once for each address on a link: what it was told holds as long as the link does.
        *(("a", "sender", *a), ("b", "sender", *a)),
        *(("a", "sender", *b), ("b", "sender", *a), ("a", "receiver", *a), ("b", "receiver", *b)),
        ("a", "receiver", *b),
    ]


@pytest.mark.req("B19", "M38", "X23")
async def test_a_durable_subscription_gathers_while_its_client_is_away(
    peer: PeerPrograms, tmp_path: Path
) -> None:
    """Over connections, and over a restart of the broker."""
    subscriber = {"address": "t", "container": "them", "name": "news", "durable": True}
    store = f"sqlite:{tmp_path / 'broker.db'}"
    messages = [
        {"body": ["value", ["string", text]], "header": {"durable": True}} for text in "abc"
    ]

    async def receive(port: int, **options: Any) -> int:
        result = await peer.run("receive", port=port, quiet_ms=300, **subscriber, **options)
        assert "error" not in result, result["error"]
        return int(result["received"])

    async with a_broker(Topic("t"), store=store) as port:
        assert await receive(port) == 0
        sent = await peer.run("send", port=port, address="t", messages=messages)
        assert outcomes(sent) == ["accepted"] * 3
        assert await receive(port) == 3
        await peer.run("send", port=port, address="t", messages=messages[:2])
    async with a_broker(Topic("t"), store=store) as port:
        assert await receive(port, unsubscribe=True) == 2
        await peer.run("send", port=port, address="t", messages=messages)
        assert await receive(port, unsubscribe=True) == 0
