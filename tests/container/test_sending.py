"""Senders: messages and their properties, credit, outcomes, pipelining, streams."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import msgspec
import pytest
import trio
from far_end import FarEnd, connected

from amqp_rt.container import sending
from amqp_rt.container.payloads import AMQP_VALUE
from amqp_rt.container.sending import Receipt, Sender
from amqp_rt.errors import (
    ConnectionLost,
    DeliveryNotAccepted,
    DeliveryRejected,
    EncodeError,
    LinkDetached,
    LinkRefused,
    LocalProtocolError,
    WouldBlock,
)
from amqp_rt.fronts.base import RCV_SECOND, SND_SETTLED
from amqp_rt.limits import Limits
from amqp_rt.message import Message, Sequence
from amqp_rt.outcomes import (
    ACCEPTED,
    RELEASED,
    Error,
    Modified,
    Rejected,
    rejected,
)
from amqp_rt.values import Symbol


def messages(far: FarEnd) -> list[Message]:
    return [Message.decode(each.payload) for each in far.heard.deliveries]


def bodies(far: FarEnd) -> list[Any]:
    return [message.body for message in messages(far)]


# --- what is sent ----------------------------------------------------------------------------


@pytest.mark.req("M1", "M2", "M4", "M16")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("durable", True),
        ("priority", 7),
        ("ttl_s", 60.0),
        ("ttl_ms", 1500),
        ("first_acquirer", True),
        ("message_id", UUID(int=7)),
        ("message_id", 7),
        ("user_id", b"me"),
        ("to", "there"),
        ("subject", "new"),
        ("reply_to", "here"),
        ("correlation_id", "c-1"),
        ("content_type", "text/plain"),
        ("content_encoding", "gzip"),
        ("absolute_expiry_time", datetime(2030, 1, 2, tzinfo=UTC)),
        ("creation_time", datetime(2026, 1, 2, tzinfo=UTC)),
        ("group_id", "g"),
        ("group_sequence", 3),
        ("reply_to_group_id", "r"),
        ("application_properties", {"region": "eu", "count": 3}),
        ("message_annotations", {Symbol("x-opt-a"): 1}),
        ("delivery_annotations", {Symbol("x-opt-b"): True}),
        ("footer", {Symbol("x-opt-c"): b"sum"}),
    ],
)
@pytest.mark.parametrize("kind", ["payload", "message", "pipelined", "streamed"])
async def test_every_property_and_header_can_be_said_with_each_send(
    name: str, value: Any, kind: str
) -> None:
    far = FarEnd(settle=ACCEPTED, credit=10)
    properties: Any = {name: value}
    async with connected(far) as peer, peer.sender("q") as out:
        if kind == "payload":
            await out.send(b"x", **properties)
        elif kind == "message":
            await out.send(Message(b"x", subject="old"), **properties)
        elif kind == "pipelined":
            await out.send_nowait(b"x", **properties).accepted()
        else:
            async with out.stream(**properties) as body:
                await body.write(b"x")
    (message,) = messages(far)
    said = getattr(message, name)
    if isinstance(value, datetime):
        assert said == int(value.timestamp() * 1000)
    else:
        assert said == value
    assert message.body == b"x"
    if kind == "message" and name != "subject":
        assert message.subject == "old"


class Order(msgspec.Struct):
    sku: str


@pytest.mark.req("A3")
@pytest.mark.parametrize(
    ("payload", "options", "body", "content_type"),
    [
        (b"x", {}, b"x", None),
        ("text", {}, "text", None),
        (17, {}, 17, None),
        (None, {}, None, None),
        (Order("A-1"), {}, b'{"sku":"A-1"}', "application/json"),
        (Order("A-1"), {"content_type": "application/msgpack"}, b"\x81\xa3sku\xa3A-1", ...),
        ("text", {"content_type": "text/plain"}, b"text", ...),
        (Sequence([1, 2]), {}, [1, 2], None),
        (b"x", {"body_kind": "value"}, b"x", None),
        ({"a": 1}, {"body_kind": "value"}, {"a": 1}, None),
        ({"a": 1}, {"content_type": AMQP_VALUE}, {"a": 1}, None),
    ],
)
async def test_a_payload_becomes_a_message(
    payload: Any, options: Any, body: Any, content_type: Any
) -> None:
    far = FarEnd(settle=ACCEPTED, credit=10)
    async with connected(far) as peer, peer.sender("q") as out:
        await out.send(payload, **options)
    (message,) = messages(far)
    assert message.body == body
    assert message.content_type == (
        options["content_type"] if content_type is ... else content_type
    )


@pytest.mark.req("M23")
async def test_encoded_messages_of_any_format_are_passed_on_as_they_are() -> None:
    far = FarEnd(settle=ACCEPTED, credit=10)
    async with connected(far) as peer, peer.sender("q") as out:
        await out.send_payload(b"\x00\x53\x77\x43")
        await out.send_payload([b"any", b"thing"], message_format=0x80013700)
        await out.send_payload_nowait(b"!", message_format=5).accepted()
    assert [(each.payload, each.message_format) for each in far.heard.deliveries] == [
        (b"\x00\x53\x77\x43", 0),
        (b"anything", 0x80013700),
        (b"!", 5),
    ]


@pytest.mark.req("M41")
async def test_the_anonymous_terminus_needs_to() -> None:
    far = FarEnd(settle=ACCEPTED, credit=10)
    async with connected(far) as peer, peer.sender(None) as out:
        with pytest.raises(LocalProtocolError, match="to=") as caught:
            await out.send("x")
        assert caught.value.condition == "amqp:precondition-failed"
        with pytest.raises(LocalProtocolError):
            out.stream()
        await out.send("x", to="q")
        await out.send(Message("y", to="q"))
    assert far.link.target.address is None
    assert [message.to for message in messages(far)] == ["q", "q"]


# --- credit ----------------------------------------------------------------------------------


@pytest.mark.req("X15")
async def test_a_message_waits_for_credit_in_line(autojump_clock: trio.testing.MockClock) -> None:
    far = FarEnd(settle=ACCEPTED)
    async with connected(far) as peer, peer.sender("q") as out:
        sent: list[int] = []

        async def send(number: int) -> None:
            await out.send(number)
            sent.append(number)

        async with trio.open_nursery() as nursery:
            for number in range(5):
                nursery.start_soon(send, number)
                await trio.testing.wait_all_tasks_blocked()
            assert (sent, out.pending) == ([], 5)
            far.link.grant(3)
            await far.until(lambda: len(sent) == 3)
            assert bodies(far) == [0, 1, 2]
            far.link.grant(3)
    assert bodies(far) == [0, 1, 2, 3, 4]


@pytest.mark.req("X15", "X16")
async def test_a_drain_is_answered_when_nothing_waits() -> None:
    far = FarEnd(settle=ACCEPTED)
    async with connected(far) as peer, peer.sender("q") as out:
        receipts = [out.send_nowait(number) for number in range(3)]
        far.link.grant(10)
        far.link.drain()
        for receipt in receipts:
            await receipt.accepted()
        await far.until(lambda: far.link.credit == 0)
        assert len(far.heard.deliveries) == 3
        far.link.grant(1)
        await out.send("more")


@pytest.mark.req("X15")
async def test_the_peer_hears_how_many_wait() -> None:
    far = FarEnd(settle=ACCEPTED)
    async with connected(far) as peer, peer.sender("q") as out:
        receipts = [out.send_nowait(number) for number in range(5)]
        far.link.grant(2)
        far.link.drain()
        await receipts[1].accepted()
        # The answer to a drain says it, though there is no credit to give back.
        await far.until(lambda: far.link.available == 3)
        far.link.grant(10)


# --- outcomes --------------------------------------------------------------------------------


@pytest.mark.req("X21")
@pytest.mark.parametrize(
    ("outcome", "raised", "condition", "words"),
    [
        (ACCEPTED, None, "", ""),
        (rejected("amqp:not-allowed", "no such sku"), DeliveryRejected, "amqp:not-allowed", "sku"),
        (Rejected(), DeliveryRejected, "amqp:not-allowed", "the receiver rejected"),
        (RELEASED, DeliveryNotAccepted, "amqp:precondition-failed", "released"),
        (Modified(), DeliveryNotAccepted, "amqp:precondition-failed", "modified"),
        (Modified(delivery_failed=True), DeliveryNotAccepted, "amqp:precondition-failed", "failed"),
    ],
)
async def test_what_is_not_accepted_raises(
    outcome: Any, raised: Any, condition: str, words: str
) -> None:
    far = FarEnd(settle=outcome, credit=10)
    async with connected(far) as peer, peer.sender("q") as out:
        receipt = out.send_nowait("x")
        assert await receipt.outcome() == outcome
        assert receipt.done
        if raised is None:
            assert await out.send("x") == outcome
            assert await out.send_many(["x", "y"]) == 2
            return
        for attempt in (out.send("x"), receipt.accepted(), out.send_many(["x"])):
            with pytest.raises(raised, match=words) as caught:
                await attempt
            assert caught.value.condition == condition
            if raised is DeliveryNotAccepted:
                assert caught.value.info["outcome"] == outcome


@pytest.mark.req("X21")
async def test_settled_without_an_outcome_is_not_accepted() -> None:
    far = FarEnd(credit=10)
    async with connected(far) as peer, peer.sender("q") as out:
        receipt = out.send_nowait("x")
        await far.until(lambda: far.heard.deliveries)
        far.heard.deliveries[0].settle(None)
        assert await receipt.outcome() == RELEASED


@pytest.mark.req("X21")
async def test_a_receiver_that_settles_second_hears_us_settle() -> None:
    far = FarEnd(settle=ACCEPTED, credit=10)
    async with connected(far) as peer, peer.sender("q", rcv_settle_mode=RCV_SECOND) as out:
        assert await out.send("x") == ACCEPTED
        await far.until(lambda: far.heard.settled)
        assert far.link.rcv_settle_mode == RCV_SECOND
        assert far.heard.settled == far.heard.deliveries


@pytest.mark.req("X21")
async def test_a_state_that_is_no_outcome_changes_nothing() -> None:
    from amqp_rt.outcomes import Received

    far = FarEnd(credit=10)
    async with connected(far) as peer, peer.sender("q") as out:
        receipt = out.send_nowait("x")
        await far.until(lambda: far.heard.deliveries)
        (delivery,) = far.heard.deliveries
        delivery.update(Received(0, 0))
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert not receipt.done
        delivery.settle(ACCEPTED)
        assert await receipt.outcome() == ACCEPTED


@pytest.mark.req("X21")
async def test_a_settled_sender_hears_no_outcomes() -> None:
    far = FarEnd(credit=10)
    async with connected(far) as peer, peer.sender("q", settled=True) as out:
        assert await out.send("x") == ACCEPTED
        receipt = out.send_nowait("y")
        assert receipt.done
        async with out.stream() as body:
            await body.write(b"z")
        assert out.pending == 0
    assert far.link.snd_settle_mode == SND_SETTLED
    assert [each.settled for each in far.heard.deliveries] == [True] * 3


@pytest.mark.req("X18", "X21")
async def test_leaving_waits_until_what_was_sent_settled_has_left(
    autojump_clock: trio.testing.MockClock,
) -> None:
    # Larger than the session's window and the output together.
    far = FarEnd(credit=10, limits=Limits(frame_size_max=4096, session_window=4))
    async with connected(far) as peer, peer.sender("q", settled=True) as out:
        for _ in range(3):
            out.send_nowait(bytes(100_000))
    assert [len(body) for body in bodies(far)] == [100_000] * 3


async def test_several_tasks_may_wait_for_one_outcome() -> None:
    far = FarEnd(credit=10)
    async with connected(far) as peer, peer.sender("q") as out:
        receipt = out.send_nowait("x")
        heard: list[Any] = []

        async def wait() -> None:
            heard.append(await receipt.outcome())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            nursery.start_soon(wait)
            await far.until(lambda: far.heard.deliveries)
            far.heard.deliveries[0].settle(ACCEPTED)
        assert heard == [ACCEPTED, ACCEPTED]


# --- pipelining ------------------------------------------------------------------------------


async def test_pending_messages_are_bounded(autojump_clock: trio.testing.MockClock) -> None:
    far = FarEnd()
    async with connected(far) as peer, peer.sender("q", max_pending=4) as out:
        far.link.grant(2)
        await far.until(lambda: out.credit)
        receipts = [out.send_nowait(number) for number in range(4)]
        assert (out.pending, out.credit) == (4, 0)
        with pytest.raises(WouldBlock, match="4 messages to 'q'"):
            out.send_nowait("one more")
        # send waits instead, for room first and for credit then.
        async with trio.open_nursery() as nursery:
            nursery.start_soon(out.send, "patient")
            await far.until(lambda: len(far.heard.deliveries) == 2)
            far.heard.settle = ACCEPTED
            for each in list(far.heard.deliveries):
                each.settle(ACCEPTED)
            far.link.grant(10)
        for receipt in receipts:
            await receipt.accepted()
    assert bodies(far) == [0, 1, 2, 3, "patient"]


async def test_many_are_sent_and_counted() -> None:
    far = FarEnd(settle=ACCEPTED, credit=50)
    async with connected(far) as peer, peer.sender("q", max_pending=20) as out:
        assert await out.send_many(range(500), subject="n") == 500
        assert await out.send_many([]) == 0
    assert bodies(far) == list(range(500))
    assert {message.subject for message in messages(far)} == {"n"}


@pytest.mark.parametrize(
    ("turn_s", "most"),
    [pytest.param(math.inf, 256, id="in time"), pytest.param(-1.0, 64, id="late")],
)
async def test_other_tasks_run_while_many_are_sent(
    monkeypatch: pytest.MonkeyPatch, turn_s: float, most: int
) -> None:
    monkeypatch.setattr(sending, "TURN_S", turn_s)
    far = FarEnd(settle=ACCEPTED, credit=1000)
    taken: list[int] = []
    seen: list[int] = []

    def numbers() -> Any:
        for number in range(900):
            taken.append(number)
            yield number

    async def look() -> None:
        while len(taken) < 900:
            await trio.lowlevel.checkpoint()
            seen.append(len(taken))

    async with connected(far) as peer, peer.sender("q") as out, trio.open_nursery() as nursery:
        nursery.start_soon(look)
        assert await out.send_many(numbers()) == 900
    between = {*seen} - {0, 900}
    assert not {each % most for each in between} - {0}
    # In a pass the other task runs before the sender or after it, so that it sees each turn or each second one.
    assert len(between) >= 900 // most // 3
    assert bodies(far) == list(range(900))


async def test_outcomes_out_of_order_do_not_pile_up() -> None:
    far = FarEnd(credit=20)
    taken: list[int] = []

    def numbers() -> Any:
        for number in range(100):
            taken.append(number)
            yield number

    async with (
        connected(far) as peer,
        peer.sender("q", max_pending=10) as out,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(out.send_many, numbers())
        await far.until(lambda: len(far.heard.deliveries) == 10)
        first, *others = far.heard.deliveries
        far.heard.settle = ACCEPTED
        for each in others:
            each.settle(ACCEPTED)
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert len(taken) <= 12
        first.settle(ACCEPTED)
    assert len(taken) == 100


async def test_the_first_refusal_ends_many() -> None:
    far = FarEnd(settle=rejected("amqp:not-allowed", "full"), credit=1)
    taken: list[int] = []

    def numbers() -> Any:
        for number in range(100):
            taken.append(number)
            yield number

    async with connected(far) as peer, peer.sender("q", max_pending=5) as out:
        with pytest.raises(DeliveryRejected, match="full"):
            await out.send_many(numbers())
        await out.flush()
        assert out.pending == 0
    assert len(taken) < 10
    assert bodies(far) == list(range(len(far.heard.deliveries)))


@pytest.mark.parametrize("credit", [0, 50])
async def test_messages_before_one_that_cannot_be_encoded_are_sent(credit: int) -> None:
    far = FarEnd(settle=ACCEPTED, credit=credit)
    async with connected(far) as peer, peer.sender("q") as out:
        with pytest.raises(EncodeError):
            await out.send_many([0, 1, object(), 3])
        if not credit:
            # They waited, and are withdrawn with the task that waited for them.
            assert out.pending == 0
    assert bodies(far) == ([0, 1] if credit else [])


async def test_messages_behind_one_that_is_too_large_are_not_sent() -> None:
    far = FarEnd(settle=ACCEPTED, credit=50)
    far.on_attach = lambda link: far.accept(link, max_message_size=100) and None
    async with connected(far) as peer, peer.sender("q") as out:
        with pytest.raises(LocalProtocolError):
            await out.send_many([0, 1, bytes(200), 3])
        assert await out.send_many([4, 5]) == 2
    assert bodies(far) == [0, 1, 4, 5]


async def test_many_that_wait_for_credit_leave_in_order_at_once() -> None:
    far = FarEnd(settle=ACCEPTED)
    async with connected(far) as peer, peer.sender("q") as out:
        receipts = [out.send_nowait(number) for number in range(200)]
        for left in (70, 0):
            far.link.grant(out.pending - left)
            await far.until(lambda: out.pending == left)  # noqa: B023
        for receipt in receipts:
            await receipt.accepted()
    assert bodies(far) == list(range(200))


async def test_messages_that_wait_for_credit_leave_in_order_with_those_that_are_not_plain() -> None:
    far = FarEnd(settle=ACCEPTED)
    async with connected(far) as peer, peer.sender("q") as out:
        receipts = [out.send_nowait(number) for number in range(3)]
        receipts.append(out.send_payload_nowait(Message(3).encode(), message_format=7))
        receipts += [out.send_nowait(number) for number in range(4, 7)]
        assert out.pending == 7
        for credit in (2, 3, 2):
            left = out.pending - credit
            far.link.grant(credit)
            await far.until(lambda: out.pending == left)  # noqa: B023
        for receipt in receipts:
            await receipt.accepted()
    assert bodies(far) == list(range(7))
    assert [each.message_format for each in far.heard.deliveries] == [0, 0, 0, 7, 0, 0, 0]


async def test_a_loop_of_sends_that_never_wait_lets_others_run() -> None:
    far = FarEnd(credit=10_000)
    ran = 0
    async with connected(far) as peer, peer.sender("q", settled=True) as out:

        async def other() -> None:
            nonlocal ran
            while True:
                await trio.lowlevel.checkpoint()
                ran += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(other)
            for number in range(1000):
                await out.send(number)
            assert ran >= 10
            ran = 0
            await out.send_many(range(4000))
            assert ran >= 10
            nursery.cancel_scope.cancel()


async def test_a_message_may_be_taken_back_before_it_leaves() -> None:
    far = FarEnd(settle=ACCEPTED, credit=1)
    async with connected(far) as peer, peer.sender("q") as out:
        first = out.send_nowait(1)
        await first.accepted()
        far.heard.credit = 0
        far.link.grant(0)
        await far.until(lambda: out.credit == 0)
        second, third = out.send_nowait(2), out.send_nowait(3)
        assert second.withdraw()
        assert not second.withdraw()
        assert not first.withdraw()
        with pytest.raises(LinkDetached, match="withdrawn"):
            await second.outcome()
        far.link.grant(5)
        await third.accepted()
    assert bodies(far) == [1, 3]


async def test_giving_up_settles_what_has_left() -> None:
    far = FarEnd(credit=1)
    async with connected(far) as peer, peer.sender("q") as out:
        sent, waiting = out.send_nowait(1), out.send_nowait(2)
        await far.until(lambda: far.heard.deliveries)
        sent.give_up()
        waiting.give_up()
        await far.until(lambda: far.heard.settled)
        assert out.pending == 0
        with pytest.raises(LinkDetached, match="gave up"):
            await sent.outcome()


# --- ends ------------------------------------------------------------------------------------


@pytest.mark.req("X14")
async def test_a_refused_link_says_why() -> None:
    far = FarEnd(on_attach=lambda link: link.refuse(Error("amqp:not-found", "no such queue")))
    async with connected(far) as peer:
        with pytest.raises(LinkRefused, match="'q': no such queue") as caught:
            async with peer.sender("q"):
                pytest.fail("attached")
        assert caught.value.condition == "amqp:not-found"


@pytest.mark.req("X22")
async def test_a_message_too_large_for_the_peer_is_not_sent() -> None:
    far = FarEnd(settle=ACCEPTED, credit=10)
    far.on_attach = lambda link: far.accept(link, max_message_size=100) and None
    async with connected(far) as peer, peer.sender("q") as out:
        for attempt in (lambda: out.send(bytes(200)), lambda: out.send_many([bytes(200)])):
            with pytest.raises(LocalProtocolError) as caught:
                await attempt()
            assert caught.value.condition == "amqp:link:message-size-exceeded"
        with pytest.raises(LocalProtocolError):
            out.send_nowait(bytes(200))
        await out.send(bytes(50))
        assert out.pending == 0


@pytest.mark.req("X26")
async def test_a_detached_sender_tells_everybody_why() -> None:
    far = FarEnd(credit=1)
    async with connected(far) as peer:
        async with peer.sender("q", max_pending=2) as out:
            sent, waiting = out.send_nowait(1), out.send_nowait(2)
            async with trio.open_nursery() as nursery:

                async def fail(call: Any) -> None:
                    with pytest.raises(LinkDetached, match="gone for good") as caught:
                        await call
                    assert caught.value.condition == "amqp:resource-deleted"

                nursery.start_soon(fail, sent.outcome())
                nursery.start_soon(fail, waiting.outcome())
                nursery.start_soon(fail, out.send(3))  # waits for room
                nursery.start_soon(fail, out.flush())
                await far.until(lambda: far.heard.deliveries)
                far.link.detach(Error("amqp:resource-deleted", "gone for good"))
            for call in (out.send_nowait, lambda x: out.stream()):
                if call is out.send_nowait:
                    with pytest.raises(LinkDetached, match="gone for good"):
                        call(4)
            assert out.closed
        assert peer.state == "open"


async def test_errors_are_copies_so_that_tracebacks_stay_apart() -> None:
    far = FarEnd(credit=1)
    async with connected(far) as peer, peer.sender("q") as out:
        far.link.detach(Error("amqp:resource-deleted"))
        await far.until(lambda: out.closed)
        with pytest.raises(LinkDetached) as one:
            await out.send(1)
        with pytest.raises(LinkDetached) as other:
            await out.send(1)
        assert one.value is not other.value


async def test_leaving_waits_for_outcomes_and_leaving_with_an_exception_does_not(
    autojump_clock: trio.testing.MockClock,
) -> None:
    far = FarEnd(credit=10)
    async with connected(far) as peer:
        async with trio.open_nursery() as nursery:

            async def settle_later() -> None:
                await trio.sleep(5)
                far.heard.deliveries[0].settle(ACCEPTED)

            started = trio.current_time()
            async with peer.sender("q") as out:
                receipt = out.send_nowait("x")
                nursery.start_soon(settle_later)
            assert receipt.done
            assert trio.current_time() - started == pytest.approx(5)
        await far.until(lambda: far.heard.detached)
        with pytest.raises(ZeroDivisionError):  # noqa: PT012
            async with peer.sender("q") as out:
                receipt = out.send_nowait("y")
                raise ZeroDivisionError
        with pytest.raises(LinkDetached, match="closed"):
            await receipt.outcome()
        with pytest.raises(LinkDetached, match="closed"):
            await out.send("z")


@pytest.mark.parametrize(
    ("answered", "other", "left"), [(None, None, 6), (3, None, 3), (None, 20, 25), (22, 20, 22)]
)
@pytest.mark.parametrize("many", [False, True])
async def test_leaving_waits_briefly_for_the_outcome_of_a_cancelled_send(
    many: bool,
    answered: float | None,
    other: float | None,
    left: float,
    autojump_clock: trio.testing.MockClock,
) -> None:
    """No task gets that outcome: at most five seconds, after the outcomes of other messages."""
    far = FarEnd(credit=10)
    async with connected(far) as peer, trio.open_nursery() as nursery:
        started = trio.current_time()

        async def settle(number: int, at: float | None) -> None:
            if at is not None:
                await trio.sleep_until(started + at)
                far.heard.deliveries[number].settle(ACCEPTED)

        nursery.start_soon(settle, 0, answered)
        nursery.start_soon(settle, 1, other)
        async with peer.sender("q") as out:
            with trio.move_on_after(1) as scope:
                await (out.send_many(["x"]) if many else out.send("x"))
            assert scope.cancelled_caught
            receipt = out.send_nowait("y") if other else None
        assert trio.current_time() - started == pytest.approx(left)
        assert receipt is None or receipt.known_outcome == ACCEPTED
        await far.until(lambda: far.heard.detached)
        assert bodies(far) == ["x", *(["y"] if other else [])]


async def test_a_send_may_be_cancelled_while_another_task_closes_its_sender(
    autojump_clock: trio.testing.MockClock,
) -> None:
    far = FarEnd(credit=10)
    async with connected(far) as peer:
        out = await peer.sender("q").__aenter__()
        started = trio.current_time()
        async with trio.open_nursery() as nursery:

            async def send() -> None:
                with trio.move_on_after(3):
                    await out.send("x")

            nursery.start_soon(send)
            await trio.testing.wait_all_tasks_blocked()
            await out.close()
            assert trio.current_time() - started == pytest.approx(8)


async def test_a_name_may_be_used_again_at_once() -> None:
    far = FarEnd(settle=ACCEPTED, credit=10)
    async with connected(far) as peer:
        for _ in range(3):
            async with peer.sender("q", name="mine") as out:
                await out.send("x")
        assert [link.name for link in far.links] == ["mine"] * 3
        async with peer.sender("q", name="mine"):
            with pytest.raises(LocalProtocolError, match="'mine'"):
                peer.sender("q", name="mine")


@pytest.mark.parametrize(
    "options",
    [{"max_pending": 0}, {"in_doubt": "perhaps"}],
    ids=lambda options: next(iter(options)),
)
async def test_impossible_options_are_refused(options: Any) -> None:
    far = FarEnd()
    async with connected(far) as peer:
        with pytest.raises(ValueError, match=next(iter(options))):
            peer.sender("q", **options)


async def test_the_target_is_what_the_peer_answers() -> None:
    far = FarEnd()
    async with connected(far) as peer:
        async with peer.sender(
            "q",
            durable=1,
            capabilities=["queue"],
            properties={Symbol("x"): 1},
            source="me",
        ) as out:
            link = far.link
            assert link.target.durable == 1
            assert link.target.capabilities == ("queue",)
            assert link.properties == {"x": 1}
            assert link.source.address == "me"
            assert out.target.address == "q"
            assert out.link.name == link.name
        with pytest.raises(LinkDetached):
            out.link  # noqa: B018
        assert "closed" in repr(out)


# --- streams ---------------------------------------------------------------------------------


@pytest.mark.req("X19")
async def test_a_stream_is_held_back_by_the_window() -> None:
    limits = Limits(frame_size_max=4096, session_window=8, session_window_bytes=64 * 1024)
    far = FarEnd(credit=10, limits=limits)
    far.on_attach = lambda link: far.accept(link, streaming=True) and None
    written = 0
    async with connected(far, limits=limits) as peer, peer.sender("q") as out:
        async with trio.open_nursery() as nursery:

            async def write() -> None:
                nonlocal written
                async with out.stream(content_type="video/mp4") as body:
                    for _ in range(64):
                        await body.write(bytes(10_000))
                        written += 1

            nursery.start_soon(write)
            await trio.testing.wait_all_tasks_blocked(0.01)
            # The window, and one piece that waits at the link.
            assert 3 <= written <= 14
            read = 0
            (delivery,) = far.heard.deliveries
            while not delivery.complete or delivery._chunks:
                read += sum(map(len, delivery.read_chunks()))
                await trio.testing.wait_all_tasks_blocked(0.001)
            delivery.settle(ACCEPTED)
        assert written == 64
        assert 640_000 < read < 650_000


@pytest.mark.req("X19")
async def test_each_write_is_one_data_section() -> None:
    far = FarEnd(settle=ACCEPTED, credit=10)
    async with connected(far) as peer, peer.sender("q") as out:
        async with out.stream(Message(b"ignored", subject="s"), priority=9) as body:
            pass
        async with out.stream(subject="s") as body:
            await body.write(b"a")
            await body.write(bytearray(300_000))
            await body.write(memoryview(b"bc"))
    # An empty stream, then what was written.
    empty, full = messages(far)
    assert (empty.subject, empty.body_kind) == ("s", "data")
    assert [len(data) for data in full.data] == [1, 300_000, 2]


@pytest.mark.req("X20")
async def test_an_exception_aborts_the_message() -> None:
    far = FarEnd(settle=ACCEPTED, credit=10)
    async with connected(far) as peer, peer.sender("q") as out:
        with pytest.raises(ZeroDivisionError):  # noqa: PT012
            async with out.stream() as body:
                await body.write(bytes(100_000))
                raise ZeroDivisionError
        assert out.pending == 0
        await out.send("after")
        with pytest.raises(LocalProtocolError, match="not open"):
            await body.write(b"late")
    assert bodies(far) == ["after"]


@pytest.mark.req("X19")
async def test_others_wait_behind_a_stream_and_a_stream_behind_others() -> None:
    far = FarEnd(settle=ACCEPTED)
    async with connected(far) as peer, peer.sender("q") as out:
        first = out.send_nowait("first")
        async with trio.open_nursery() as nursery:

            async def write() -> None:
                async with out.stream(content_type="text/plain") as body:
                    await body.write(b"str")
                    assert first.raw is not None
                    behind.append(out.send_nowait("behind"))
                    await body.write(b"eam")
                    assert behind[0].raw is None

            behind: list[Receipt] = []
            nursery.start_soon(write)
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert far.heard.deliveries == []
            far.link.grant(10)
        await behind[0].accepted()
    assert bodies(far) == ["first", b"stream", "behind"]


@pytest.mark.req("X19")
async def test_a_receiver_may_refuse_the_rest_of_a_stream() -> None:
    far = FarEnd(credit=10)
    far.on_attach = lambda link: far.accept(link, streaming=True) and None
    async with connected(far) as peer, peer.sender("q") as out:
        with pytest.raises(DeliveryRejected, match="too long"):  # noqa: PT012
            async with out.stream() as body:
                await body.write(b"begin")
                await far.until(lambda: far.heard.deliveries)
                far.heard.deliveries[0].settle(rejected("amqp:not-allowed", "too long"))
                while True:
                    await body.write(b"more")
        assert out.pending == 0


@pytest.mark.req("X19", "X26")
async def test_a_stream_whose_link_goes_says_so() -> None:
    far = FarEnd(credit=10)
    async with connected(far) as peer:
        out = peer.sender("q")
        await out.wait_attached()
        with pytest.raises(LinkDetached, match="no more") as caught:  # noqa: PT012
            async with out.stream() as body:
                await body.write(b"begin")
                far.link.detach(Error("amqp:resource-deleted", "no more"))
                while True:
                    await body.write(b"more")
        assert caught.value.condition == "amqp:resource-deleted"
        with pytest.raises(LinkDetached, match="no more"):
            async with out.stream():
                pytest.fail("the link is gone")


async def test_a_stream_is_used_once() -> None:
    far = FarEnd(settle=ACCEPTED, credit=10)
    async with connected(far) as peer, peer.sender("q") as out:
        body = out.stream()
        with pytest.raises(LocalProtocolError, match="not open"):
            await body.write(b"early")
        async with body:
            pass
        with pytest.raises(LocalProtocolError, match="one message"):
            async with body:
                pass


async def test_what_a_sender_is_shows() -> None:
    far = FarEnd(credit=1)
    async with connected(far) as peer, peer.sender("q") as out:
        await far.until(lambda: out.credit)
        assert repr(out) == "<Sender 'q', attached, credit 1, 0 pending>"
        sent, waiting = out.send_nowait(1), out.send_nowait(2)
        assert repr(sent) == "<Receipt: sent>"
        assert repr(waiting) == "<Receipt: waits for credit>"
        assert isinstance(out, Sender)
        far.link.detach()
        with pytest.raises((LinkDetached, ConnectionLost)):
            await sent.outcome()
        assert "LinkDetached" in repr(sent) or "detached" in repr(sent)


@pytest.mark.parametrize(("options", "seconds"), [({}, 0), ({"name": "mine"}, 5)])
async def test_only_a_name_of_the_applications_is_awaited_to_be_free(
    autojump_clock: Any, options: dict[str, Any], seconds: float
) -> None:
    """The peer does not answer the detach."""
    far = FarEnd(credit=10, settle=ACCEPTED)
    async with connected(far) as peer:
        async with peer.sender("q", **options) as out:
            await out.send(b"one")
            far.mute()
            began = trio.current_time()
        assert out.closed
        assert trio.current_time() - began == pytest.approx(seconds)
        far.drop()


async def test_a_detach_leaves_with_the_close() -> None:
    far = FarEnd(credit=10, settle=ACCEPTED)
    async with connected(far) as peer, peer.sender("q") as out:
        await out.send(b"one")
    assert far.recorders[-1].detached == [(None, True)]


async def test_ending_the_block_of_a_sender_can_be_cancelled() -> None:
    far = FarEnd(credit=10, settle=ACCEPTED)
    async with connected(far) as peer:
        with trio.CancelScope() as scope:
            async with peer.sender("q") as out:
                await out.send(b"one")
                scope.cancel()
        assert scope.cancelled_caught
        assert out.closed
