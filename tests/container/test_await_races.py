"""Senders and receivers whose state changes while a task of theirs waits."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing
from far_end import FarEnd, connected

from amqp_rt.container.deliveries import Delivery
from amqp_rt.container.receiving import Receiver
from amqp_rt.container.recovery import Reconnect
from amqp_rt.errors import LinkEnded, LocalProtocolError
from amqp_rt.limits import Limits
from amqp_rt.message import Message

Clock = trio.testing.MockClock
pytestmark = pytest.mark.req("A13")


async def settle() -> None:
    await trio.testing.wait_all_tasks_blocked()


class Getting:
    """A task in :meth:`Receiver.get`."""

    def __init__(self, nursery: trio.Nursery, messages: Receiver, **options: Any) -> None:
        self.scope = trio.CancelScope()
        self.error: Exception | None = None
        self.found: Delivery | None = None
        self.over = trio.Event()
        nursery.start_soon(self._run, messages, options)

    async def _run(self, messages: Receiver, options: dict[str, Any]) -> None:
        try:
            with self.scope:
                self.found = await messages.get(**options)
        except Exception as error:
            self.error = error
        self.over.set()


async def test_get_has_credit_after_one_before_it_was_cancelled_while_it_drained(
    autojump_clock: Clock,
) -> None:
    far = FarEnd()
    async with (
        connected(far) as peer,
        peer.receiver("q", credit=0) as messages,
        trio.open_nursery() as nursery,
    ):
        first = Getting(nursery, messages)
        await settle()
        assert far.link.draining
        first.scope.cancel()
        await settle()
        second = Getting(nursery, messages, within=60)
        await settle()
        # Only now does the peer answer the drain of the first.
        far.link.drained()
        await trio.sleep(1)
        assert far.link.credit == 1
        far.link.send(Message("x").encode())
        await second.over.wait()
        assert second.found is not None
        assert trio.current_time() < 30


async def test_get_has_credit_on_the_link_after_a_lost_connection(autojump_clock: Clock) -> None:
    far = FarEnd()
    async with (
        connected(far, reconnect=Reconnect()) as peer,
        peer.receiver("q", credit=0) as messages,
        trio.open_nursery() as nursery,
    ):
        asked = Getting(nursery, messages, within=60)
        await settle()
        far.drop()
        await trio.sleep(5)
        assert len(far.links) == 2
        assert far.link.credit == 1
        far.link.send(Message("x").encode())
        await asked.over.wait()
        assert asked.found is not None


async def test_get_asks_again_after_a_connection_lost_while_it_drained(
    autojump_clock: Clock,
) -> None:
    far = FarEnd()
    async with (
        connected(far, reconnect=Reconnect()) as peer,
        peer.receiver("q", credit=0) as messages,
        trio.open_nursery() as nursery,
    ):
        asked = Getting(nursery, messages)
        await settle()
        assert far.link.draining
        far.drop()
        await trio.sleep(5)
        assert not asked.over.is_set()
        far.link.send(Message("x").encode())
        await asked.over.wait()
        assert asked.found is not None


@pytest.mark.parametrize("credit", [0, 10])
@pytest.mark.parametrize("how", ["stop", "finish"])
async def test_a_receiver_that_is_stopped_while_another_task_is_in_get_stays_stopped(
    how: str, credit: int
) -> None:
    far = FarEnd()
    async with (
        connected(far) as peer,
        peer.receiver("q", credit=credit) as messages,
        trio.open_nursery() as nursery,
    ):
        asked = Getting(nursery, messages)
        await settle()
        assert far.link.draining
        getattr(messages, how)()
        await settle()
        if far.link.credit:
            far.link.drained()
        await settle()
        assert asked.over.is_set()
        assert messages.credit == far.link.credit == 0


@pytest.mark.parametrize("after", ["write", "end"])
async def test_a_message_with_a_write_that_was_cancelled_is_never_completed(after: str) -> None:
    limits = Limits(frame_size_max=4096, session_window=8, session_window_bytes=64 * 1024)
    far = FarEnd(credit=10, limits=limits)
    far.on_attach = lambda link: far.accept(link, streaming=True) and None
    async with connected(far) as peer, peer.sender("q") as out:

        async def write() -> None:
            async with out.stream() as body:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(body.write, bytes(1_000_000))
                    await settle()
                    nursery.cancel_scope.cancel()
                if after == "write":
                    await body.write(b"more")

        with pytest.raises(LocalProtocolError, match="cancelled"):
            await write()
        (delivery,) = far.heard.deliveries
        while not delivery.aborted:
            delivery.read_chunks()
            await settle()
        assert out.pending == 0
        out.abandon()


@pytest.mark.parametrize("then", ["write", "end", "raise"])
async def test_a_stream_whose_link_ends_without_an_error_hears_so(
    autojump_clock: Clock, then: str
) -> None:
    """Until it is known whether the connection closes too, the link is neither there nor lost."""
    far = FarEnd(credit=10)
    far.on_attach = lambda link: far.accept(link, streaming=True) and None
    async with connected(far, reconnect=Reconnect()) as peer, peer.sender("q") as out:

        async def write() -> None:
            async with out.stream() as body:
                await body.write(b"x")
                far.link.detach()
                await settle()
                if then == "write":
                    await body.write(b"y")
                elif then == "raise":
                    raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError if then == "raise" else LinkEnded):
            await write()


@pytest.mark.parametrize("at_head", [False, True])
async def test_two_readers_of_a_streamed_message_do_not_lose_each_other(at_head: bool) -> None:
    far = FarEnd()
    payload = Message(b"x" * 100, subject="s").encode()
    async with (
        connected(far) as peer,
        peer.receiver("q", streaming=True) as messages,
        trio.open_nursery() as nursery,
    ):
        await settle()
        sending = far.link.send(payload[: 2 if at_head else 50], more=True)
        delivery = await messages.receive()
        stream = delivery.chunks()
        first: list[bytes] = []

        async def read() -> None:
            first.extend([piece async for piece in stream])

        nursery.start_soon(read)
        await settle()
        with pytest.raises(trio.BusyResourceError):
            await delivery.head() if at_head else await anext(stream)
        sending.write(payload[2 if at_head else 50 :], more=False)
        await settle()
        assert sum(map(len, first)) == 100
        delivery.accept()
