"""Receivers: taking, credit, outcomes, drains and gets, streams, ends."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import trio
from far_end import FarEnd, connected

from amqp_rt.container.deliveries import Delivery
from amqp_rt.container.raising import Modify, Reject, Release
from amqp_rt.container.receiving import Receiver
from amqp_rt.errors import (
    AmqpError,
    DeadlineExceeded,
    DecodeError,
    LinkDetached,
    LinkEnded,
    LinkRefused,
    LocalProtocolError,
)
from amqp_rt.fronts.base import RCV_SECOND, SND_SETTLED
from amqp_rt.limits import Limits
from amqp_rt.message import Message
from amqp_rt.outcomes import (
    ACCEPTED,
    MODIFIED_FAILED,
    RELEASED,
    Error,
    Modified,
    Rejected,
)
from amqp_rt.termini import DeleteOnClose, Source
from amqp_rt.values import Symbol


def encoded(body: Any, **properties: Any) -> bytes:
    return Message(body, **properties).encode()


def send(far: FarEnd, *bodies: Any, **options: Any) -> list[Any]:
    """Send *bodies* on the latest link of *far*, which has the credit for them."""
    return [far.link.send(encoded(body), **options) for body in bodies]


# --- taking ----------------------------------------------------------------------------------


async def test_deliveries_are_taken_in_order_each_in_its_way() -> None:
    far = FarEnd()
    async with connected(far) as peer, peer.receiver("q") as messages:
        await far.until(lambda: far.link.credit)
        send(far, *range(12))
        await far.until(lambda: messages.waiting == 12)
        first = await messages.receive()
        assert (first.body, first.message.body, first.decode(int)) == (0, 0, 0)
        assert first.payload == encoded(0)
        assert first.link is messages.link
        assert (first.tag, first.message_format, first.presettled) == (b"\0\0\0\1", 0, False)
        second = messages.receive_nowait()
        assert second is not None
        assert second.body == 1
        assert messages.waiting == 10
        assert [each.body for each in await messages.receive_batch(3)] == [2, 3, 4]
        taken = []
        async for delivery in messages:
            taken.append(delivery.body)
            if len(taken) == 4:
                break
        assert taken == [5, 6, 7, 8]
        assert [each.body for each in await messages.receive_batch()] == [9, 10, 11]
        assert messages.receive_nowait() is None


async def test_waiting_has_a_bound(autojump_clock: trio.testing.MockClock) -> None:
    far = FarEnd()
    async with connected(far) as peer, peer.receiver("q") as messages:
        started = trio.current_time()
        with pytest.raises(DeadlineExceeded, match="'q' in 2 s"):
            await messages.receive(within=2)
        with pytest.raises(DeadlineExceeded):
            await messages.receive_batch(within=3)
        assert trio.current_time() - started == pytest.approx(5)
        send(far, "x")
        assert (await messages.receive(within=2)).body == "x"


async def test_several_tasks_may_take_from_one_receiver() -> None:
    far = FarEnd()
    taken: list[tuple[int, int]] = []

    async def take(number: int) -> None:
        async for delivery in messages:
            taken.append((number, delivery.body))
            delivery.accept()
            await trio.lowlevel.checkpoint()

    async with connected(far) as peer:
        messages = peer.receiver("q")
        async with messages, trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(take, number)
            await far.until(lambda: far.link.credit)
            send(far, *range(40))
            await far.until(lambda: len(taken) == 40)
            await messages.close()
        assert sorted(body for _, body in taken) == list(range(40))
        assert {number for number, _ in taken} == {0, 1, 2, 3}


async def test_taking_from_a_full_receiver_lets_others_run() -> None:
    far = FarEnd()
    ran = 0

    async def other() -> None:
        nonlocal ran
        while True:
            await trio.lowlevel.checkpoint()
            ran += 1

    async with connected(far) as peer, peer.receiver("q", credit=1000) as messages:
        await far.until(lambda: far.link.credit)
        send(far, *range(1000))
        await far.until(lambda: messages.waiting == 1000)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(other)
            async for delivery in messages:
                if delivery.body == 499:
                    break
            assert ran >= 3
            for _ in range(500):
                await messages.receive()
            assert ran >= 6
            nursery.cancel_scope.cancel()


# --- credit ----------------------------------------------------------------------------------


@pytest.mark.req("X15", "A11")
async def test_credit_bounds_what_has_no_outcome() -> None:
    far = FarEnd()
    async with connected(far) as peer, peer.receiver("q", credit=4) as messages:
        await far.until(lambda: far.link.credit == 4)
        send(far, *range(4))
        held = [await messages.receive() for _ in range(4)]
        assert messages.credit == 0
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert far.link.credit == 0
        held[0].accept()
        held[1].release()
        await far.until(lambda: far.link.credit == 2)
        held[1].release()
        assert messages.credit == 2
        held[2].reject()
        held[3].modify()
        await far.until(lambda: far.link.credit == 4)


@pytest.mark.req("X15")
async def test_settled_messages_give_their_credit_back_when_taken() -> None:
    far = FarEnd()
    async with (
        connected(far) as peer,
        peer.receiver("q", credit=4, snd_settle_mode=SND_SETTLED) as messages,
    ):
        await far.until(lambda: far.link.credit == 4)
        send(far, *range(4))
        for _ in range(4):
            assert (await messages.receive()).presettled
        await far.until(lambda: far.link.credit == 4)


@pytest.mark.req("X15", "X16")
async def test_credit_is_stopped_and_started() -> None:
    far = FarEnd()
    async with connected(far) as peer, peer.receiver("q", credit=4) as messages:
        await far.until(lambda: far.link.credit == 4)
        messages.stop()
        await far.until(lambda: far.link.credit == 0)
        messages.start()
        await far.until(lambda: far.link.credit == 4)
        messages.start(10)
        await far.until(lambda: far.link.credit == 10)
        send(far, 1)
        await messages.receive()
        messages.start(0)
        await far.until(lambda: far.link.credit == 0)
        with pytest.raises(ValueError, match="negative"):
            messages.start(-1)


@pytest.mark.req("X16")
async def test_a_drain_brings_what_there_is_and_nothing_after() -> None:
    far = FarEnd()
    async with connected(far) as peer, peer.receiver("q", credit=10) as messages:
        await far.until(lambda: far.link.credit == 10)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(messages.drain)
            await far.until(lambda: far.link.draining)
            send(far, 1, 2)
            far.link.drained()
        assert (messages.credit, messages.waiting) == (0, 2)
        for delivery in await messages.receive_batch():
            delivery.accept()
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert far.link.credit == 0
        messages.start()
        await far.until(lambda: far.link.credit == 10)
        assert not far.link.draining


@pytest.mark.req("X16")
async def test_a_drain_is_over_when_messages_have_used_the_credit() -> None:
    far = FarEnd()
    async with connected(far) as peer, peer.receiver("q", credit=2) as messages:
        await far.until(lambda: far.link.credit == 2)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(messages.drain)
            await far.until(lambda: far.link.draining)
            # There is nothing left to be given back, and so nothing more to be said.
            send(far, 1, 2)
        assert (messages.credit, messages.waiting) == (0, 2)
        for delivery in await messages.receive_batch():
            delivery.accept()
        messages.start()
        await far.until(lambda: far.link.credit == 2)


class Node:
    """A far end with a few messages, which answers drains."""

    def __init__(self, *bodies: Any) -> None:
        self.bodies = list(bodies)
        self.far = FarEnd(on_attach=self.attach)

    def attach(self, link: Any) -> None:
        self.far.accept(link)
        self.far.heard.on_credit = self.on_credit  # type: ignore[method-assign]

    def on_credit(self, link: Any) -> None:
        while self.bodies and link.credit:
            link.send(encoded(self.bodies.pop(0)))
        link.drained()


@pytest.mark.req("X16")
@pytest.mark.parametrize("credit", [0, 5])
async def test_one_is_got_if_there_is_one(
    credit: int, autojump_clock: trio.testing.MockClock
) -> None:
    node = Node("a", "b")
    async with connected(node.far) as peer, peer.receiver("q", credit=credit) as messages:
        got = [await messages.get() for _ in range(3)]
        assert [each and each.body for each in got] == ["a", "b", None]
        started = trio.current_time()
        assert await messages.get(within=2) is None
        assert trio.current_time() - started == pytest.approx(2)

        async def put() -> None:
            await trio.sleep(1)
            node.bodies.append("c")
            node.on_credit(node.far.link)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(put)
            late = await messages.get(within=5)
        assert late is not None
        assert late.body == "c"
        assert trio.current_time() - started == pytest.approx(3)
        await trio.testing.wait_all_tasks_blocked(0.01)
        # With credit=0 nothing can come unasked.
        assert messages.credit == (0 if not credit else 5 - 3)


async def test_only_one_task_gets() -> None:
    far = FarEnd()
    async with (
        connected(far) as peer,
        peer.receiver("q", credit=0) as messages,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(messages.get)
        await far.until(lambda: far.link.draining)
        with pytest.raises(trio.BusyResourceError):
            await messages.get()
        far.link.drained()


# --- outcomes --------------------------------------------------------------------------------


def annotated(delivery: Delivery) -> None:
    delivery.modify(failed=False, undeliverable_here=True, annotations={Symbol("x-opt-a"): 1})


@pytest.mark.req("X21")
@pytest.mark.parametrize(
    ("say", "outcome"),
    [
        (Delivery.accept, ACCEPTED),
        (Delivery.release, RELEASED),
        (Delivery.modify, MODIFIED_FAILED),
        (annotated, Modified(False, True, {"x-opt-a": 1})),
        (
            lambda delivery: delivery.reject("bad", condition="amqp:not-allowed", info={"a": 1}),
            Rejected(Error("amqp:not-allowed", "bad", {"a": 1})),
        ),
        (Delivery.reject, Rejected(Error("amqp:precondition-failed"))),
        (lambda delivery: delivery.settle(RELEASED), RELEASED),
    ],
)
async def test_outcomes_are_said_at_once(say: Any, outcome: Any) -> None:
    far = FarEnd()
    async with connected(far) as peer, peer.receiver("q") as messages:
        await far.until(lambda: far.link.credit)
        (sending,) = send(far, "x")
        delivery = await messages.receive()
        assert delivery.outcome is None
        say(delivery)
        say(delivery)
        assert delivery.outcome == outcome
        other = ACCEPTED if outcome != ACCEPTED else RELEASED
        with pytest.raises(LocalProtocolError, match="outcome"):
            delivery.settle(other)
        await far.until(lambda: far.heard.outcomes)
        assert sending.state == outcome
        assert sending.remote_settled


async def end_cancelled(delivery: Delivery) -> None:
    with trio.CancelScope() as scope:
        async with delivery:
            scope.cancel()
            await trio.sleep_forever()


async def end_by_hand(delivery: Delivery) -> None:
    async with delivery:
        delivery.release()


async def end_with_an_outcome_and_an_error(delivery: Delivery) -> None:
    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        async with delivery:
            delivery.accept()
            raise ZeroDivisionError


def end_by_raising(error: Exception) -> Any:
    async def end(delivery: Delivery) -> None:
        async with delivery:
            raise error

    return end


@pytest.mark.req("A9", "X21")
@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        (end_cancelled, RELEASED),
        (end_by_hand, RELEASED),
        (end_with_an_outcome_and_an_error, ACCEPTED),
        (end_by_raising(Reject("no")), Rejected(Error("amqp:precondition-failed", "no"))),
        (end_by_raising(Release()), RELEASED),
        (end_by_raising(Modify(undeliverable_here=True)), Modified(True, True)),
    ],
)
async def test_a_block_says_the_outcome_by_how_it_ends(end: Any, outcome: Any) -> None:
    far = FarEnd()
    async with connected(far) as peer, peer.receiver("q") as messages:
        await far.until(lambda: far.link.credit)
        (sending,) = send(far, "x")
        await end(await messages.receive())
        await far.until(lambda: sending.remote_settled)
        assert sending.state == outcome


@pytest.mark.req("A9")
@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (ZeroDivisionError(), MODIFIED_FAILED),
        (DecodeError("not mine"), Rejected(Error("amqp:decode-error", "not mine"))),
    ],
)
async def test_other_exceptions_go_on(error: Exception, outcome: Any) -> None:
    far = FarEnd()
    async with connected(far) as peer, peer.receiver("q") as messages:
        await far.until(lambda: far.link.credit)
        for manner in ("async", "sync"):
            (sending,) = send(far, "x")
            delivery = await messages.receive()
            with pytest.raises(type(error)):  # noqa: PT012
                if manner == "async":
                    async with delivery:
                        raise error
                else:
                    with delivery:
                        raise error
            await far.until(lambda s=sending: s.remote_settled)
            assert sending.state == outcome


@pytest.mark.req("X21")
async def test_settling_second_waits_for_the_sender() -> None:
    far = FarEnd()
    async with (
        connected(far) as peer,
        peer.receiver("q", rcv_settle_mode=RCV_SECOND) as messages,
    ):
        await far.until(lambda: far.link.credit)
        (sending,) = send(far, "x")
        delivery = await messages.receive()
        delivery.accept()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(delivery.settled)
            await far.until(lambda: far.heard.outcomes)
            assert not sending.remote_settled
            assert len(nursery.child_tasks) == 1
            sending.settle()
        await delivery.settled()


@pytest.mark.req("X21")
async def test_settling_first_needs_no_waiting() -> None:
    far = FarEnd()
    async with connected(far) as peer, peer.receiver("q") as messages:
        await far.until(lambda: far.link.credit)
        send(far, "x")
        delivery = await messages.receive()
        delivery.accept()
        await delivery.settled()


@pytest.mark.req("X21", "X26")
async def test_a_link_that_goes_leaves_settling_second_in_doubt() -> None:
    far = FarEnd()
    async with (
        connected(far) as peer,
        peer.receiver("q", rcv_settle_mode=RCV_SECOND) as messages,
    ):
        await far.until(lambda: far.link.credit)
        send(far, "x")
        delivery = await messages.receive()
        delivery.accept()
        async with trio.open_nursery() as nursery:

            async def wait() -> None:
                with pytest.raises(LinkDetached, match="'q'"):
                    await delivery.settled()

            nursery.start_soon(wait)
            await far.until(lambda: far.heard.outcomes)
            far.link.detach(Error("amqp:resource-deleted"))


class Order(msgspec.Struct):
    sku: str


@pytest.mark.req("A3")
async def test_payloads_are_decoded_by_their_content_type() -> None:
    far = FarEnd()
    async with connected(far) as peer, peer.receiver("q") as messages:
        await far.until(lambda: far.link.credit)
        far.link.send(encoded(b'{"sku":"A-1"}', content_type="application/json"))
        far.link.send(b"\x00\x53\x99\x45")
        far.link.send(b"whatever", message_format=7)
        assert (await messages.receive()).decode(Order) == Order("A-1")
        with pytest.raises(DecodeError):
            (await messages.receive()).body  # noqa: B018
        foreign = await messages.receive()
        with pytest.raises(DecodeError, match="message-format 0x7"):
            foreign.message  # noqa: B018
        assert foreign.payload == b"whatever"


# --- what is asked for -----------------------------------------------------------------------


@pytest.mark.req("M28", "M30", "M40", "M43", "X12")
async def test_the_source_is_asked_for_in_full() -> None:
    far = FarEnd()
    async with (
        connected(far) as peer,
        peer.receiver(
            "q",
            mode="copy",
            filter={"apache.org:no-local-filter:list": [1]},
            durable=2,
            name="mine",
            capabilities=["queue"],
            properties={Symbol("x"): 1},
            target="me",
            rcv_settle_mode=RCV_SECOND,
            snd_settle_mode=SND_SETTLED,
        ) as messages,
    ):
        link = far.link
        assert link.name == messages.name == "mine"
        assert link.source.address == "q"
        assert link.source.distribution_mode == "copy"
        assert link.source.filter == {"apache.org:no-local-filter:list": [1]}
        assert (link.source.durable, link.source.expiry_policy) == (2, "never")
        assert link.source.capabilities == ("queue",)
        assert link.target.address == "me"
        assert link.properties == {"x": 1}
        assert (link.snd_settle_mode, link.rcv_settle_mode) == (SND_SETTLED, RCV_SECOND)
        assert messages.source.address == "q"


@pytest.mark.req("M28")
async def test_the_source_is_what_the_peer_answers() -> None:
    far = FarEnd()
    far.on_attach = lambda link: far.accept(link, source=Source(address="q")) and None
    async with connected(far) as peer, peer.receiver("q", filter={"mine": 1}) as messages:
        assert messages.source.filter is None
        far.link.detach()
        await far.until(lambda: messages.closed)
        assert messages.source.address == "q"
        far.on_attach = lambda link: None
        with pytest.raises(LinkDetached, match="not attached yet"):
            peer.receiver("q").source  # noqa: B018
        with pytest.raises(LinkDetached, match="not attached yet"):
            peer.sender("q").target  # noqa: B018


@pytest.mark.req("M33", "M34")
async def test_the_peer_makes_a_dynamic_node() -> None:
    far = FarEnd()
    async with connected(far) as peer, peer.receiver(dynamic=True) as messages:
        asked = far.link
        assert messages.address == "made-1"
        assert asked.source.dynamic
    far.on_attach = lambda link: seen.append(link.source) or far.accept(link)  # type: ignore[func-returns-value]
    seen: list[Source] = []
    async with connected(far, "again") as peer, peer.receiver(dynamic=True):
        (source,) = seen
        assert source.dynamic_node_properties is not None
        lifetime = source.dynamic_node_properties[Symbol("lifetime-policy")]
        assert lifetime == DeleteOnClose() or "0x2b" in repr(lifetime) or "43" in repr(lifetime)


@pytest.mark.parametrize(
    ("options", "word"), [({"credit": -1}, "credit"), ({"mode": "steal"}, "mode")]
)
async def test_impossible_options_are_refused(options: Any, word: str) -> None:
    far = FarEnd()
    async with connected(far) as peer:
        with pytest.raises(ValueError, match=word):
            peer.receiver("q", **options)


# --- ends ------------------------------------------------------------------------------------


@pytest.mark.req("X14")
async def test_a_refused_link_says_why() -> None:
    far = FarEnd(on_attach=lambda link: link.refuse(Error("amqp:unauthorized-access", "not you")))
    async with connected(far) as peer:
        with pytest.raises(LinkRefused, match="'q': not you") as caught:
            async with peer.receiver("q"):
                pytest.fail("attached")
        assert caught.value.condition == "amqp:unauthorized-access"


@pytest.mark.req("X26")
@pytest.mark.parametrize("error", [None, Error("amqp:resource-deleted", "gone for good")])
async def test_what_had_arrived_is_taken_before_the_end(error: Any) -> None:
    far = FarEnd()
    async with connected(far) as peer, peer.receiver("q") as messages:
        await far.until(lambda: far.link.credit)
        send(far, 1, 2, 3)
        far.link.detach(error)
        await far.until(lambda: messages.closed)
        taken: list[int] = []

        async def take() -> None:
            async for delivery in messages:
                taken.append(delivery.body)  # noqa: PERF401  # what came before an error counts

        if error is None:
            with pytest.raises(LinkEnded, match="detached the link to 'q'"):
                await take()
        else:
            with pytest.raises(LinkDetached, match="gone for good"):
                await take()
        assert taken == [1, 2, 3]
        with pytest.raises(LinkDetached):
            await messages.receive()
        with pytest.raises(LinkDetached):
            await messages.get()
        with pytest.raises(LinkDetached):
            await messages.drain()


@pytest.mark.req("X16", "A10")
async def test_leaving_releases_what_was_not_taken() -> None:
    far = FarEnd()
    async with connected(far) as peer:
        async with peer.receiver("q") as messages:
            await far.until(lambda: far.link.credit)
            first, *rest = send(far, 1, 2, 3)
            (await messages.receive()).accept()
            await far.until(lambda: messages.waiting == 2)
        await far.until(lambda: far.heard.detached)
        assert first.state == ACCEPTED
        assert [each.state for each in rest] == [RELEASED] * 2
        assert far.heard.detached == [(None, True)]
        assert messages.receive_nowait() is None
        assert [delivery async for delivery in messages] == []
        assert "closed" in repr(messages)


async def test_leaving_with_an_exception_releases_too() -> None:
    far = FarEnd()
    async with connected(far) as peer:
        with pytest.raises(ZeroDivisionError):  # noqa: PT012
            async with peer.receiver("q") as messages:
                await far.until(lambda: far.link.credit)
                sent = send(far, 1, 2)
                await far.until(lambda: messages.waiting == 2)
                raise ZeroDivisionError
        await far.until(lambda: far.heard.detached)
        assert [each.state for each in sent] == [RELEASED] * 2


@pytest.mark.req("X23")
async def test_a_durable_subscription_is_suspended_and_attached_again() -> None:
    far = FarEnd()
    async with connected(far) as peer:
        for _ in range(2):
            messages = peer.receiver("topic", name="mine", durable=2)
            async with messages:
                await messages.suspend()
        async with peer.receiver("topic", name="mine", durable=2):
            pass
        await far.until(lambda: far.heard.detached)
        assert [each.detached for each in far.recorders] == [
            [(None, False)],
            [(None, False)],
            [(None, True)],
        ]


# --- streams ---------------------------------------------------------------------------------


@pytest.mark.req("X11", "X19")
async def test_a_streamed_body_is_read_as_it_arrives_in_bounded_memory() -> None:
    limits = Limits(frame_size_max=4096)
    far = FarEnd()
    size = 0
    async with (
        connected(far, limits=limits) as peer,
        peer.session(window_bytes=64 * 1024) as session,
        session.receiver("q", streaming=True) as messages,
    ):
        await far.until(lambda: far.link.credit)
        sending = far.link.send(Message(b"", subject="s").encode_front(), more=True)
        for _ in range(100):
            sending.write(encoded(bytes(10_000)))
        sending.write(b"", more=False)
        delivery = await messages.receive()
        assert (await delivery.head()).subject == "s"
        with pytest.raises(LocalProtocolError, match="chunks"):
            delivery.body  # noqa: B018
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert delivery.raw._unread < 80_000
        async for chunk in delivery.chunks():
            size += len(chunk)
            assert delivery.raw._unread < 80_000
        delivery.accept()
        await far.until(lambda: sending.remote_settled)
    assert size == 1_000_000


@pytest.mark.req("X19")
async def test_a_body_that_is_not_wanted_is_dropped_as_it_comes() -> None:
    limits = Limits(frame_size_max=4096)
    far = FarEnd()
    async with (
        connected(far, limits=limits) as peer,
        peer.session(window_bytes=16 * 1024) as session,
        session.receiver("q", streaming=True) as messages,
    ):
        await far.until(lambda: far.link.credit)
        for how in ("settled", "block"):
            sending = far.link.send(encoded(bytes(100_000)))
            delivery = await messages.receive()
            if how == "settled":
                delivery.reject("too long")
            else:
                async with delivery:
                    pass
            await far.until(lambda s=sending: s.remote_settled and far.link.writable)


@pytest.mark.req("X20")
async def test_an_aborted_stream_says_so() -> None:
    far = FarEnd()
    async with connected(far) as peer, peer.receiver("q", streaming=True) as messages:
        await far.until(lambda: far.link.credit)
        sending = far.link.send(encoded(b"begin"), more=True)
        delivery = await messages.receive()
        chunks = delivery.chunks()
        assert await chunks.__anext__() == b"begin"
        sending.abort()
        with pytest.raises(AmqpError, match="gave up"):
            await chunks.__anext__()


@pytest.mark.req("X19", "X26")
async def test_a_stream_whose_link_goes_says_so() -> None:
    far = FarEnd()
    async with connected(far) as peer, peer.receiver("q", streaming=True) as messages:
        await far.until(lambda: far.link.credit)
        far.link.send(encoded(b"begin"), more=True)
        delivery = await messages.receive()
        async with trio.open_nursery() as nursery:

            async def read() -> None:
                with pytest.raises(AmqpError, match="gave up"):
                    assert [chunk async for chunk in delivery.chunks()] == [b"begin"]

            nursery.start_soon(read)
            await trio.testing.wait_all_tasks_blocked()
            far.link.detach(Error("amqp:resource-deleted"))


async def test_a_whole_message_has_no_chunks_but_a_head() -> None:
    far = FarEnd()
    async with connected(far) as peer, peer.receiver("q") as messages:
        await far.until(lambda: far.link.credit)
        send(far, b"x")
        delivery = await messages.receive()
        assert (await delivery.head()).body == b"x"
        with pytest.raises(LocalProtocolError, match="not streaming"):
            delivery.chunks()


async def test_what_a_receiver_is_shows() -> None:
    far = FarEnd()
    async with connected(far) as peer, peer.receiver("q", credit=5) as messages:
        await far.until(lambda: far.link.credit)
        assert repr(messages) == "<Receiver 'q', attached, credit 5, 0 waiting>"
        assert isinstance(messages, Receiver)
        send(far, b"x")
        far.link.offer(7)
        delivery = await messages.receive()
        assert repr(delivery) == "<Delivery 00000001: 6 bytes, None>"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(messages.drain)
            await far.until(lambda: far.link.draining)
            far.link.drained()
        assert messages.available == 7


@pytest.mark.req("M38")
async def test_a_durable_receiver_has_a_name() -> None:
    far = FarEnd()
    async with connected(far) as peer:
        with pytest.raises(ValueError, match="a durable receiver needs a name"):
            peer.receiver("news", durable=1)
        with pytest.raises(ValueError, match="a durable receiver needs a name"):
            peer.default_session.receiver("news", durable=2)
        assert peer.receiver("news", name="inbox", durable=1).name == "inbox"
