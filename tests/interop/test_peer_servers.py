"""Our client and the servers in tests/peers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from peer_programs import (
    SIMPLE,
    VALUES,
    PeerPrograms,
    PeerServer,
    digest,
    filler,
    numbers,
    typed,
    with_values,
)

from amqp_rt import Connection, Container, Message, Sender
from amqp_rt.errors import (
    AmqpError,
    ConnectionLost,
    DeliveryNotAccepted,
    DeliveryRejected,
    LinkDetached,
    LinkRefused,
)
from amqp_rt.fronts.base import RCV_SECOND
from amqp_rt.outcomes import Accepted, Modified, Released


@asynccontextmanager
async def connected(
    peer: PeerPrograms, server: PeerServer, **options: Any
) -> AsyncIterator[Connection]:
    # rhea's server loses what arrives in one segment with the protocol header.
    options.setdefault("pipelined", peer.name != "rhea")
    async with (
        Container("client") as container,
        container.connect(server.url, reconnect=None, **options) as connection,
    ):
        yield connection


@pytest.mark.req("X4", "SE1", "SE2")
@pytest.mark.parametrize("sasl", [True, False])
async def test_it_opens_with_and_without_a_sasl_layer(peer: PeerPrograms, sasl: bool) -> None:
    async with peer.serve() as server, connected(peer, server, sasl=sasl) as connection:
        assert connection.peer.container_id == f"{peer}-server"


@pytest.mark.req("X5")
async def test_header_open_begin_and_attach_may_leave_together(
    proton_programs: PeerPrograms,
) -> None:
    peer = proton_programs
    async with (
        peer.serve() as server,
        connected(peer, server, sasl=False, pipelined=True) as connection,
        connection.sender("sink") as out,
    ):
        assert await out.send("hello") == Accepted()


@pytest.mark.req("X15", "X21", "M20", "M21", "M22", "M23")
async def test_outcomes_of_their_receiver(peer: PeerPrograms) -> None:
    async with peer.serve() as server, connected(peer, server) as connection:
        async with connection.sender("sink/accept") as out:
            assert await out.send(1) == Accepted()
        async with connection.sender("sink/reject") as out:
            with pytest.raises(DeliveryRejected, match="not wanted") as caught:
                await out.send(1)
            assert caught.value.condition == "test:unwanted"
        async with connection.sender("sink/release") as out:
            assert await out.send_nowait(1).outcome() == Released()
            with pytest.raises(DeliveryNotAccepted):
                await out.send(1)
        async with connection.sender("sink/modify") as out:
            outcome = await out.send_nowait(1).outcome()
            assert isinstance(outcome, Modified)
            assert (outcome.delivery_failed, outcome.undeliverable_here) == (True, True)


@pytest.mark.req("X15", "B17")
async def test_one_credit_at_a_time(peer: PeerPrograms) -> None:
    async with (
        peer.serve() as server,
        connected(peer, server) as connection,
        connection.sender("slow") as out,
    ):
        assert await out.send_many(range(10)) == 10


@pytest.mark.req("X15", "X21")
async def test_messages_arrive_in_order_a_few_at_a_time(peer: PeerPrograms) -> None:
    async with (
        peer.serve() as server,
        connected(peer, server) as connection,
        connection.receiver("count/50", credit=5) as messages,
    ):
        seen = []
        async for delivery in messages:
            seen.append(delivery.body)
            delivery.accept()
            if len(seen) == 50:
                break
        assert seen == list(range(50))


@pytest.mark.req("X16")
async def test_their_sender_answers_a_drain(peer: PeerPrograms) -> None:
    async with (
        peer.serve() as server,
        connected(peer, server) as connection,
        connection.receiver("count/3", credit=10) as messages,
    ):
        first = await messages.receive()
        await messages.drain()
        assert messages.credit == 0
        rest = [messages.receive_nowait() for _ in range(messages.waiting)]
        assert [delivery.body for delivery in (first, *rest) if delivery] == [0, 1, 2]


@pytest.mark.req("X16")
async def test_getting_one_message_if_there_is_one(peer: PeerPrograms) -> None:
    async with (
        peer.serve() as server,
        connected(peer, server) as connection,
        connection.receiver("count/2", credit=0) as messages,
    ):
        found = [await messages.get(within=5) for _ in range(2)]
        assert [delivery.body for delivery in found if delivery] == [0, 1]
        assert await messages.get() is None
        assert messages.credit == 0


@pytest.mark.req("X18")
@pytest.mark.parametrize("size", [70_000, 3_000_000])
async def test_large_messages_both_ways(peer: PeerPrograms, size: int) -> None:
    async with peer.serve() as server:
        async with connected(peer, server) as connection:
            async with connection.receiver(f"large/{size}", credit=1) as messages:
                delivery = await messages.receive()
                assert delivery.body == filler(size)
                delivery.accept()
            async with connection.sender("sink") as out:
                await out.send(filler(size))
        sinks = await server.stop()
        assert sinks["sink"]["messages"][0]["body"] == digest(filler(size))


@pytest.mark.req("X19")
async def test_streaming_to_them_and_from_them(peer: PeerPrograms) -> None:
    body = filler(1_000_000)
    async with peer.serve() as server:
        async with connected(peer, server) as connection:
            async with connection.receiver("large/1000000", streaming=True) as messages:
                delivery = await messages.receive()
                chunks = [chunk async for chunk in delivery.chunks()]
                assert b"".join(chunks) == body
                delivery.accept()
            async with (
                connection.sender("sink") as out,
                out.stream(content_type="application/octet-stream") as stream,
            ):
                # A single data section, since the peers show no more.
                await stream.write(body[:60_000])
        received = (await server.stop())["sink"]["messages"]
        assert received[0]["body"] == digest(body[:60_000])


@pytest.mark.req("X20")
async def test_a_message_that_they_abort_never_was(proton_programs: PeerPrograms) -> None:
    peer = proton_programs
    async with (
        peer.serve() as server,
        connected(peer, server) as connection,
        connection.receiver("abort", credit=10) as messages,
    ):
        delivery = await messages.receive()
        assert delivery.body == "whole"
        delivery.accept()
        await messages.drain()
        assert messages.waiting == 0


@pytest.mark.req("X20")
async def test_a_message_that_we_abort_never_was(proton_programs: PeerPrograms) -> None:
    peer = proton_programs

    async def give_up(out: Sender) -> None:
        async with out.stream() as stream:
            await stream.write(filler(100_000))
            raise ZeroDivisionError

    async with peer.serve() as server:
        async with connected(peer, server) as connection, connection.sender("sink") as out:
            with pytest.raises(ZeroDivisionError):
                await give_up(out)
            assert await out.send("whole") == Accepted()
        sinks = await server.stop()
        assert [each["body"][1][1] for each in sinks["sink"]["messages"]] == ["whole"]


@pytest.mark.req("T1", "T2", "T3", "T4", "T5", "T6", "M1", "M16")
async def test_all_types_from_them(peer: PeerPrograms) -> None:
    async with (
        peer.serve(values=VALUES) as server,
        connected(peer, server) as connection,
        connection.receiver("values") as messages,
        await messages.receive() as delivery,
    ):
        assert dict(zip(VALUES, map(typed, delivery.body), strict=True)) == VALUES
        named = delivery.message.application_properties
        assert {name: typed(value) for name, value in named.items()} == SIMPLE


@pytest.mark.req("T1", "T2", "T3", "T4", "T5", "T6", "M1", "M16")
async def test_all_types_to_them(peer: PeerPrograms) -> None:
    async with peer.serve() as server:
        async with connected(peer, server) as connection, connection.sender("sink") as out:
            await out.send(with_values())
        message = (await server.stop())["sink"]["messages"][0]
        assert dict(zip(VALUES, message["body"][1][1], strict=True)) == VALUES
        assert message["application_properties"] == SIMPLE


@pytest.mark.req("M4", "M12", "M13")
async def test_header_and_properties_to_them(peer: PeerPrograms) -> None:
    sent = Message(
        "body",
        durable=True,
        priority=7,
        ttl_ms=60_000,
        message_id="id-1",
        to="there",
        subject="new",
        reply_to="here",
        correlation_id=17,
        content_type="text/plain",
        group_id="g",
        group_sequence=3,
    )
    plain = Message(b"plain")
    async with peer.serve() as server:
        async with connected(peer, server) as connection, connection.sender("sink") as out:
            await out.send_many([sent.replace(content_type=None), plain])
        first, second = (await server.stop())["sink"]["messages"]
        assert first["properties"] == {
            "message_id": ["string", "id-1"],
            "to": "there",
            "subject": "new",
            "reply_to": "here",
            "correlation_id": ["ulong", "17"],
            "group_id": "g",
            "group_sequence": 3,
        }
        assert first["header"] == {
            "durable": True,
            "priority": 7,
            "ttl": 60_000,
            "delivery_count": 0,
        }
        assert second["header"] == {
            "durable": False,
            "priority": 4,
            "ttl": 0,
            "delivery_count": 0,
        }
        assert second["properties"] == {}
        assert second["body"] == ["data", b"plain".hex()]


@pytest.mark.req("M30")
async def test_browsing_their_queue(peer: PeerPrograms) -> None:
    async with peer.serve() as server, connected(peer, server) as connection:
        async with connection.sender("q") as out:
            await out.send_many(range(3))
        for mode in ("copy", "copy", "move"):
            async with connection.receiver("q", mode=mode, credit=10) as messages:
                seen = [await messages.receive() for _ in range(3)]
                assert [delivery.body for delivery in seen] == [0, 1, 2]
                for delivery in seen:
                    delivery.accept()


@pytest.mark.req("A6", "M33")
async def test_calling_their_server(peer: PeerPrograms) -> None:
    async with peer.serve() as server, connected(peer, server) as connection:
        assert await connection.call("echo", "hello", reply=str, within=10) == "hello"
        answers: list[bytes] = []

        async def ask(number: int) -> None:
            request = str(number).encode()
            assert await connection.call("echo", request, reply=bytes, within=10) == request
            answers.append(request)

        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(ask, number)
        assert len(answers) == 20


@pytest.mark.req("M41")
async def test_sending_through_their_relay(peer: PeerPrograms) -> None:
    async with peer.serve() as server, connected(peer, server) as connection:
        async with connection.sender() as relay:
            for number, address in enumerate(["a", "b", "a"]):
                await relay.send(number, to=address)
        for address, expected in (("a", [0, 2]), ("b", [1])):
            async with connection.receiver(address) as messages:
                for number in expected:
                    async with await messages.receive() as delivery:
                        assert delivery.body == number


@pytest.mark.req("X21", "B12")
async def test_nothing_presettled_is_lost_by_closing_at_once(peer: PeerPrograms) -> None:
    async with peer.serve() as server:
        async with (
            connected(peer, server) as connection,
            connection.sender("sink", settled=True) as out,
        ):
            await out.send_many(range(500))
        sinks = await server.stop()
        assert sinks["sink"]["received"] == 500
        assert numbers(sinks["sink"]["messages"]) == list(range(10))


@pytest.mark.req("X21")
async def test_their_receiver_settles_second(peer: PeerPrograms) -> None:
    async with peer.serve() as server:
        async with (
            connected(peer, server) as connection,
            connection.sender("sink", rcv_settle_mode=RCV_SECOND) as out,
        ):
            assert out.link.rcv_settle_mode == RCV_SECOND
            assert await out.send_many(range(10)) == 10
        sinks = await server.stop()
        assert (sinks["sink"]["received"], sinks["sink"]["settled"]) == (10, 10)


@pytest.mark.req("X21")
async def test_we_settle_second(peer: PeerPrograms) -> None:
    async with (
        peer.serve() as server,
        connected(peer, server) as connection,
        connection.receiver("count/5", rcv_settle_mode=RCV_SECOND) as messages,
    ):
        for number in range(5):
            delivery = await messages.receive()
            assert delivery.body == number
            delivery.accept()
            await delivery.settled()


@pytest.mark.req("X14")
async def test_a_link_that_they_refuse(peer: PeerPrograms) -> None:
    async with peer.serve() as server, connected(peer, server) as connection:
        for link in (connection.sender("refuse"), connection.receiver("refuse")):
            with pytest.raises(LinkRefused, match="no such node") as caught:
                async with link:
                    pytest.fail("it was attached")
            assert caught.value.condition == "amqp:not-found"
        async with connection.sender("sink") as out:
            assert await out.send("still here") == Accepted()


@pytest.mark.req("X26")
async def test_a_link_that_they_detach(peer: PeerPrograms) -> None:
    async with peer.serve() as server, connected(peer, server) as connection:
        async with connection.sender("detach") as out:
            with pytest.raises(LinkDetached, match="the first message was enough") as caught:
                await out.send(1)
            assert caught.value.condition == "amqp:resource-deleted"
        async with connection.sender("sink") as out:
            assert await out.send("still here") == Accepted()


@pytest.mark.req("X26")
async def test_a_connection_that_they_close(peer: PeerPrograms) -> None:
    async with peer.serve() as server, connected(peer, server) as connection:
        out = connection.sender("close")
        with pytest.raises(ConnectionLost, match="told to") as caught:
            async with out:
                await out.send(1)
        assert caught.value.condition == "amqp:internal-error"
        await connection.wait_closed()


@pytest.mark.req("X22")
async def test_their_bound_on_messages_is_kept(peer: PeerPrograms) -> None:
    async with (
        peer.serve() as server,
        connected(peer, server) as connection,
        connection.sender("small") as out,
    ):
        assert out.link.max_message_size == 100
        with pytest.raises(AmqpError, match=r"size|large|100"):
            await out.send(bytes(200))
        assert await out.send(bytes(20)) == Accepted()
