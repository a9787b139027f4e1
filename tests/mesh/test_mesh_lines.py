"""Containers in a line over real sockets: what clients of one end see of nodes at the other."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import trio
from meshed import client, line, until

from amqp_rt import Reject, Release
from amqp_rt.errors import DeadlineExceeded, DeliveryNotAccepted, DeliveryRejected, LinkRefused

pytestmark = pytest.mark.req("P3")


async def test_a_call_passes_two_hops() -> None:
    with trio.fail_after(10):
        async with line("A", "B", "C") as made:

            @made.boxes["C"].rpc("price")
            async def price(sku: str) -> str:
                return f"{sku} costs 1"

            await made.meshes["A"].reachable("price")
            async with client(made.urls["A"]) as peer:
                assert await peer.call("price", "A-1", reply=str, within=2) == "A-1 costs 1"
            assert await made.meshes["A"].call("price", "A-2", reply=str) == "A-2 costs 1"


async def test_cancelling_a_call_cancels_the_handler() -> None:
    with trio.fail_after(10):
        async with line("A", "B", "C") as made:
            started, ended = trio.Event(), trio.Event()

            @made.boxes["C"].rpc("slow")
            async def slow(sku: str) -> str:
                started.set()
                try:
                    await trio.sleep_forever()
                finally:
                    ended.set()
                return sku

            await made.meshes["A"].reachable("slow")
            async with client(made.urls["A"]) as peer, trio.open_nursery() as nursery:
                nursery.start_soon(peer.call, "slow", "A-1")
                await started.wait()
                nursery.cancel_scope.cancel()
            # The client's end also cancels the handler, but only after the connection has closed.
            await ended.wait()


async def test_a_cancelled_call_ends_while_the_connection_stays() -> None:
    with trio.fail_after(10):
        async with line("A", "B", "C") as made:
            ended = trio.Event()

            @made.boxes["C"].rpc("slow")
            async def slow(sku: str) -> str:
                try:
                    await trio.sleep_forever()
                finally:
                    ended.set()
                return sku

            await made.meshes["A"].reachable("slow")
            async with client(made.urls["A"]) as peer:
                with pytest.raises(DeadlineExceeded):
                    await peer.call("slow", "A-1", within=0.2)
                await ended.wait()


async def test_replies_in_a_stream_wait_for_their_reader() -> None:
    with trio.fail_after(20):
        async with line("A", "B", "C") as made:
            sent = 0

            @made.boxes["C"].rpc("rows")
            async def rows(count: int) -> AsyncIterator[int]:
                nonlocal sent
                for number in range(count):
                    sent += 1
                    yield number

            await made.meshes["A"].reachable("rows")
            async with client(made.urls["A"]) as peer:
                got = []
                async with peer.stream("rows", 3_000, reply=int, credit=10) as replies:
                    async for row in replies:
                        if not got:
                            await trio.sleep(0.2)
                            # Credit of 10 at each end of the way, and not the whole of the reply.
                            assert sent < 1_000
                        got.append(row)
                assert got == list(range(3_000))


async def test_outcomes_and_errors_pass_two_hops() -> None:
    with trio.fail_after(10):
        async with line("A", "B", "C") as made:

            @made.boxes["C"].node("orders")
            async def orders(order: str) -> None:
                if order == "bad":
                    raise Reject("no such thing", condition="amqp:not-allowed")
                if order == "later":
                    raise Release

            await made.meshes["A"].reachable("orders")
            async with client(made.urls["A"]) as peer, peer.sender("orders") as out:
                await out.send("good")
                with pytest.raises(DeliveryRejected) as refused:
                    await out.send("bad")
                assert refused.value.condition == "amqp:not-allowed"
                with pytest.raises(DeliveryNotAccepted):
                    await out.send("later")


async def test_credit_is_that_of_the_destination() -> None:
    with trio.fail_after(10):
        async with line("A", "B", "C") as made:
            open_gate = trio.Event()
            running = 0

            @made.boxes["C"].node("work", slots=3)
            async def work(order: str) -> None:
                nonlocal running
                running += 1
                await open_gate.wait()

            await made.meshes["A"].reachable("work")
            async with (
                client(made.urls["A"]) as peer,
                peer.sender("work") as out,
                trio.open_nursery() as nursery,
            ):
                for number in range(20):
                    nursery.start_soon(out.send, str(number))
                await trio.sleep(0.3)
                assert running <= 3
                open_gate.set()
            assert running == 20


async def test_a_receiver_gets_what_a_source_at_the_other_end_gives() -> None:
    with trio.fail_after(10):
        async with line("A", "B", "C") as made:

            @made.boxes["C"].source("ticks")
            async def ticks() -> AsyncIterator[str]:
                for number in range(5):
                    yield str(number)
                await trio.sleep_forever()

            await made.meshes["A"].reachable("ticks")
            async with client(made.urls["A"]) as peer, peer.receiver("ticks", credit=2) as source:
                got = []
                for _ in range(5):
                    delivery = await source.receive()
                    got.append(delivery.message.body)
                    delivery.accept()
                assert len(got) == 5


async def test_an_address_that_nobody_serves_is_refused_after_a_while() -> None:
    with trio.fail_after(10):
        async with line("A", "B") as made, client(made.urls["A"]) as peer:
            since = trio.current_time()
            with pytest.raises(LinkRefused) as refused:
                async with peer.sender("nothing"):
                    pass
            assert refused.value.condition == "amqp:not-found"
            assert 1.9 < trio.current_time() - since < 3


async def test_a_destination_that_appears_in_time_is_used() -> None:
    with trio.fail_after(10):
        async with (
            line("A", "B") as made,
            client(made.urls["A"]) as peer,
            trio.open_nursery() as nursery,
        ):

            async def appear() -> None:
                await trio.sleep(0.5)

                @made.boxes["B"].node("late")
                async def late(text: str) -> None:
                    pass

            nursery.start_soon(appear)
            async with peer.sender("late") as out:
                await out.send("here")


async def test_senders_wait_without_credit_while_the_last_destination_is_gone() -> None:
    with trio.fail_after(10):
        async with line("A", "B", "C") as made:

            async def price(sku: str) -> str:
                return sku

            made.boxes["C"].rpc("price")(price)
            await made.meshes["A"].reachable("price")
            async with client(made.urls["A"]) as peer:
                assert await peer.call("price", "1") == "1"
                made.boxes["C"].remove("price")
                await until(lambda: not made.meshes["A"].instances("price"))
                # The link stays, without credit, until there is a destination again.
                with pytest.raises(DeadlineExceeded):
                    await peer.call("price", "2", within=0.2)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(peer.call, "price", "3")
                    await trio.sleep(0.1)
                    made.boxes["C"].rpc("price")(price)
