"""Consumers of RabbitMQ's clients: streams, filters, direct reply-to, and the activity of a single active consumer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from amqp_rt_rabbitmq.profile import ACTIVE
from brokers import client_of
from rabbit_requests import Managing, managing
from wire import BEGIN, OPEN, Octets, frame

from amqp_rt import Broker, Connection, Message
from amqp_rt.addresses import parse_url
from amqp_rt.core.frames import AMQP_HEADER
from amqp_rt.core.performatives import Attach, Detach, Flow, Transfer
from amqp_rt.errors import LinkRefused
from amqp_rt.termini import Source, Target
from amqp_rt.values import Described, Symbol, Timestamp, ULong

pytestmark = pytest.mark.req("G4")

URL = "memory://rabbit"
VOLATILE = "rabbitmq:volatile-queue"


@asynccontextmanager
async def rabbit(**options: Any) -> AsyncIterator[tuple[Broker, Connection, Managing]]:
    async with Broker("b", volatile=True, **options) as broker:
        await broker.listen(f"{URL}?profile=rabbitmq")
        async with client_of(broker, url=URL) as peer, managing(peer) as manage:
            yield broker, peer, manage


def described(**filters: object) -> dict[object, object]:
    """Return a filter-set with the names and descriptors of RabbitMQ's clients."""
    known = {
        "offset": "rabbitmq:stream-offset-spec",
        "values": "rabbitmq:stream-filter",
        "unfiltered": "rabbitmq:stream-match-unfiltered",
        "sql": "amqp:sql-filter",
        "properties": "amqp:properties-filter",
        "application": "amqp:application-properties-filter",
    }
    return {
        Symbol("sql-filter" if name == "sql" else known[name]): Described(
            Symbol(known[name]), value
        )
        for name, value in filters.items()
    }


# --- streams ---------------------------------------------------------------------------------------


async def bodies(peer: Connection, address: str, count: int, **filters: object) -> list[Any]:
    """Return bodies and offsets of the first *count* messages that a consumer with *filters* gets."""
    found: list[Any] = []
    async with peer.receiver(address, filter=described(**filters)) as inbox:
        while len(found) < count:
            async with await inbox.receive() as delivery:
                place = delivery.message.message_annotations["x-stream-offset"]
                assert type(place) is ULong
                found.append((delivery.body, int(place)))
    return found


async def test_a_stream_is_read_from_an_offset() -> None:
    async with rabbit() as (broker, peer, manage):
        arguments = {"x-queue-type": "stream", "x-max-age": "7D", "x-max-length-bytes": 10**6}
        status, state = await manage("PUT", "/queues/s", {"arguments": arguments})
        assert (status, state["type"], state["arguments"]) == ("201", "stream", arguments)
        before = broker.host.clock.wall()
        async with peer.sender("/queues/s") as out:
            for number in range(5):
                await out.send(number)
        for offset, count, first in (
            ("first", 5, 0),
            ("last", 1, 4),
            (ULong(3), 2, 3),
            (Timestamp(int(before * 1000) - 1000), 5, 0),
            ("1h", 5, 0),
        ):
            found = await bodies(peer, "/queues/s", count, offset=offset)
            assert found == [(number, number) for number in range(first, 5)], offset
        # Several consumers read the same stream, whose length is that of all its records.
        assert (await manage("GET", "/queues/s"))[1]["message_count"] == 5


async def test_a_consumer_without_an_offset_begins_with_what_comes() -> None:
    async with rabbit() as (_, peer, manage):
        await manage("PUT", "/queues/s", {"arguments": {"x-queue-type": "stream"}})
        async with peer.sender("/queues/s") as out:
            await out.send("before")
            for filters in (None, described(offset="next")):
                async with peer.receiver("/queues/s", filter=filters) as inbox:
                    await inbox.wait_attached()
                    await out.send("after")
                    async with await inbox.receive() as delivery:
                        assert delivery.body == "after"


async def test_filters_of_a_stream_are_applied() -> None:
    async with rabbit() as (_, peer, manage):
        await manage("PUT", "/queues/s", {"arguments": {"x-queue-type": "stream"}})
        async with peer.sender("/queues/s") as out:
            for number, (value, subject, region) in enumerate(
                (
                    ("invoice", "a.1", "north"),
                    (None, "a.2", "south"),
                    ("order", "b.1", "north"),
                    ("order", "b.2", "south"),
                )
            ):
                annotations = None if value is None else {"x-stream-filter-value": value}
                message = Message(
                    number,
                    subject=subject,
                    application_properties={"region": region, "n": number},
                    message_annotations=annotations,
                )
                await out.send(message)
        for filters, expected in (
            ({"values": ["order"]}, [2, 3]),
            ({"values": "invoice"}, [0]),
            ({"values": ["invoice"], "unfiltered": True}, [0, 1]),
            ({"properties": {Symbol("subject"): "&p:a."}}, [0, 1]),
            ({"application": {"region": "south"}}, [1, 3]),
            ({"sql": "region = 'north' AND properties.subject LIKE 'b%'"}, [2]),
            ({"sql": "n > 0", "values": ["order"], "application": {"region": "north"}}, [2]),
        ):
            found = await bodies(peer, "/queues/s", len(expected), offset="first", **filters)
            assert [body for body, _ in found] == expected, filters


async def test_filters_in_place_are_answered() -> None:
    """RabbitMQ's client for Java refuses a consumer of whose filters one is missing in the answer."""
    async with rabbit() as (_, peer, manage):
        await manage("PUT", "/queues/s", {"arguments": {"x-queue-type": "stream"}})
        await manage("PUT", "/queues/q", {})
        filters = described(offset="first", values=["a"], unfiltered=True, sql="TRUE")
        for address, expected in (("/queues/s", filters), ("/queues/q", described(sql="TRUE"))):
            async with peer.receiver(address, filter=filters) as inbox:
                await inbox.wait_attached()
                assert inbox.source.filter == expected
        wrong = described(offset="yesterday")
        with pytest.raises(LinkRefused, match="stream-offset-spec"):
            async with peer.receiver("/queues/s", filter=wrong) as inbox:
                await inbox.wait_attached()


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ({"arguments": {"x-queue-type": "stream", "x-max-age": "soon"}}, "x-max-age"),
        ({"arguments": {"x-queue-type": "lake"}}, "x-queue-type"),
        ({"durable": False, "arguments": {"x-queue-type": "stream"}}, "durable"),
        ({"exclusive": True, "arguments": {"x-queue-type": "stream"}}, "exclusive"),
        ({"auto_delete": True, "arguments": {"x-queue-type": "quorum"}}, "auto-delete"),
        ({"arguments": {"x-queue-type": "quorum", "x-delayed-retry-type": "all"}}, "failed"),
        ({"arguments": {"x-delayed-retry-type": "failed"}}, "x-delayed-retry-min"),
        ({"arguments": {"x-delayed-retry-type": "often"}}, "x-delayed-retry-type"),
    ],
)
async def test_what_no_queue_can_be_is_refused(body: dict[str, Any], why: str) -> None:
    async with rabbit() as (_, _, manage):
        status, said = await manage("PUT", "/queues/s", body)
        assert status == "409"
        assert why in said
        assert (await manage("GET", "/queues/s"))[0] == "404"


async def test_a_stream_is_not_purged() -> None:
    async with rabbit() as (_, _, manage):
        await manage("PUT", "/queues/s", {"arguments": {"x-queue-type": "stream"}})
        status, why = await manage("DELETE", "/queues/s/messages")
        assert (status, "'s'" in why) == ("400", True)


# --- delayed retries -------------------------------------------------------------------------------


async def test_failed_messages_pause_longer_each_time(autojump_clock: Any) -> None:
    arguments = {
        "x-queue-type": "quorum",
        "x-delayed-retry-type": "failed",
        "x-delayed-retry-min": 2_000,
        "x-delayed-retry-max": 5_000,
    }
    async with rabbit() as (_, peer, manage):
        assert (await manage("PUT", "/queues/q", {"arguments": arguments}))[0] == "201"
        async with peer.sender("/queues/q") as out, peer.receiver("/queues/q") as inbox:
            await out.send("again and again")
            waited: list[float] = []
            for _ in range(4):
                delivery = await inbox.receive()
                began = trio.current_time()
                delivery.modify(failed=True)
                again = await inbox.receive()
                waited.append(trio.current_time() - began)
                # Returned without having failed: at once.
                again.release()
        assert waited == pytest.approx([2.0, 4.0, 5.0, 5.0], abs=0.2)


# --- direct reply-to -------------------------------------------------------------------------------


async def test_replies_go_to_a_volatile_queue() -> None:
    async with rabbit() as (broker, peer, manage):
        await manage("PUT", "/queues/requests", {})
        async with client_of(broker, "responder", url=URL) as responder:
            async with peer.receiver(
                dynamic=True, capabilities=(VOLATILE,), snd_settle_mode=1
            ) as replies:
                await replies.wait_attached()
                address = replies.source.address
                assert address.startswith("/queues/")
                assert "/" not in address.removeprefix("/queues/")
                async with peer.sender("/queues/requests") as out:
                    await out.send(Message("ping", reply_to=address, message_id="7"))
                async with (
                    responder.receiver("/queues/requests") as inbox,
                    await inbox.receive() as asked,
                ):
                    back = asked.message.reply_to
                # By a link of its own, and by one for all addresses.
                async with responder.sender(back) as answer:
                    await answer.send(Message("pong", correlation_id="7"))
                async with responder.sender(None) as answer:
                    await answer.send(Message("pong again", to=back, correlation_id="7"))
                for body in ("pong", "pong again"):
                    delivery = await replies.receive()
                    assert (delivery.body, delivery.message.correlation_id) == (body, "7")
            # The queue went with its link.
            with pytest.raises(LinkRefused):
                async with responder.sender(back) as answer:
                    await answer.wait_attached()


# --- activity --------------------------------------------------------------------------------------


def name_of(wire: Octets, handle: int) -> str:
    """Return the link to which the broker has given *handle*."""
    names = [each.name for each in wire.heard if type(each) is Attach and each.handle == handle]
    return str(names[-1])


async def activities(wire: Octets, name: str, count: int) -> list[object]:
    """Return what the first *count* flows with such a property say to the consumer *name*."""
    while True:
        flows = [each for each in wire.heard if type(each) is Flow]
        found = [
            each.properties[ACTIVE]
            for each in flows
            if each.properties and name_of(wire, each.handle) == name
        ]
        if len(found) >= count or wire.over:
            return found
        await wire.hear(Flow, len(flows) + 1)


def consumer(handle: int, credit: int = 10) -> bytes:
    """Return the attach of a consumer of ``q``, with its first credit."""
    attach = Attach(
        name=f"c{handle}",
        handle=handle,
        role=True,
        source=Source(address="/queues/q"),
        target=Target(address="/queues/q"),
    )
    return frame(attach) + credited(handle, credit)


def credited(handle: int, credit: int) -> bytes:
    return frame(
        Flow(
            next_incoming_id=0,
            incoming_window=100,
            next_outgoing_id=0,
            outgoing_window=100,
            handle=handle,
            delivery_count=0,
            link_credit=credit,
        )
    )


@asynccontextmanager
async def octets(url: str) -> AsyncIterator[Octets]:
    """Connect a client of octets to *url*, and open a session."""
    where = parse_url(url)
    async with await trio.open_tcp_stream(where.host, where.port) as stream:
        wire = Octets(stream)
        await wire.say(AMQP_HEADER, OPEN, BEGIN)
        with trio.fail_after(10):
            yield wire


async def test_a_single_active_consumer_is_told_of_its_turn() -> None:
    async with rabbit() as (broker, peer, manage):
        arguments = {"x-queue-type": "quorum", "x-single-active-consumer": True}
        await manage("PUT", "/queues/q", {"arguments": arguments})
        [url] = await broker.listen("amqp://127.0.0.1:0?profile=rabbitmq")
        async with octets(url) as wire:
            # Not before they have given credit.
            await wire.say(consumer(0, 0), consumer(1, 0), consumer(2, 0))
            await wire.hear(Attach, 3)
            assert not [each for each in wire.heard if type(each) is Flow and each.properties]
            for handle, active in ((2, False), (0, True), (1, False)):
                await wire.say(credited(handle, 10))
                assert await activities(wire, f"c{handle}", 1) == [active]
            # More credit changes nothing; the end of the active one does.
            await wire.say(credited(0, 20), credited(1, 20), frame(Detach(0, True, None)))
            assert await activities(wire, "c1", 2) == [False, True]
            await wire.say(frame(Detach(1, True, None)))
            assert await activities(wire, "c2", 2) == [False, True]
            # The active one gets the messages.
            async with peer.sender("/queues/q") as out:
                await out.send(b"x")
            assert name_of(wire, (await wire.hear(Transfer)).handle) == "c2"


async def test_each_consumer_of_another_queue_is_active() -> None:
    async with rabbit() as (broker, _, manage):
        await manage("PUT", "/queues/q", {"arguments": {"x-queue-type": "quorum"}})
        [url] = await broker.listen("amqp://127.0.0.1:0?profile=rabbitmq")
        async with octets(url) as wire:
            await wire.say(consumer(0), consumer(1))
            assert await activities(wire, "c0", 1) == [True]
            assert await activities(wire, "c1", 1) == [True]


async def test_consumers_of_other_listeners_are_told_nothing() -> None:
    async with rabbit() as (broker, peer, manage):
        await manage("PUT", "/queues/q", {"arguments": {"x-single-active-consumer": True}})
        [url] = await broker.listen("amqp://127.0.0.1:0")
        async with octets(url) as wire, peer.sender("/queues/q") as out:
            await wire.say(consumer(0), consumer(1), frame(Detach(0, True, None)))
            await wire.hear(Detach)
            await out.send(b"x")
            assert name_of(wire, (await wire.hear(Transfer)).handle) == "c1"
            assert not [each for each in wire.heard if type(each) is Flow and each.properties]
