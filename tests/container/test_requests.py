"""Calls and streamed replies as the caller sees them, and what the node sees of the caller."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Callable
from typing import Any
from uuid import UUID

import msgspec
import pytest
import trio
from answering import Node, echoing
from far_end import FarEnd, connected

from amqp_rt.container.container import Container
from amqp_rt.container.declaring import rpc
from amqp_rt.container.recovery import Reconnect
from amqp_rt.errors import (
    AmqpError,
    CallFailed,
    ConnectionLost,
    DeadlineExceeded,
    DecodeError,
    DeliveryNotAccepted,
    DeliveryRejected,
    LinkDetached,
    LinkRefused,
)
from amqp_rt.message import Message
from amqp_rt.outcomes import ACCEPTED, RELEASED, Error, Outcome, rejected
from amqp_rt.values import Symbol

# --- calls -----------------------------------------------------------------------------------


class Order(msgspec.Struct):
    sku: str


@pytest.mark.req("A6", "A3", "M12")
@pytest.mark.parametrize(
    ("args", "body"),
    [((), None), (("A-1",), "A-1"), ((1, 2), b"[1,2]"), ((Order("A-1"),), b'{"sku":"A-1"}')],
)
async def test_a_request_says_where_its_reply_goes(args: Any, body: Any) -> None:
    node = Node(lambda node, request: node.reply(request, "done"))
    async with connected(node.far) as peer:
        assert await peer.call("q", *args, reply=str, subject="s") == "done"
    (request,) = node.requests
    assert request.body == body
    assert request.subject == "s"
    assert isinstance(request.message_id, str)
    assert request.reply_to == "made-2"
    assert request.ttl_ms is None
    assert not node.deliveries[0].settled


@pytest.mark.req("A3")
async def test_a_message_is_sent_as_it_is() -> None:
    node = Node(lambda node, request: node.reply(request, "done"))
    async with connected(node.far) as peer:
        reply = await peer.call(
            "q", Message([1], subject="s", priority=9, correlation_id=5), reply=Message
        )
    assert isinstance(reply, Message)
    assert reply.body == "done"
    (request,) = node.requests
    assert (request.body, request.subject, request.priority) == ([1], "s", 9)
    assert request.reply_to is not None
    assert request.correlation_id is None


@pytest.mark.parametrize("name", ["message_id", "correlation_id", "reply_to"])
async def test_what_finds_the_reply_is_the_calls_own(name: str) -> None:
    node = Node(echoing)
    async with connected(node.far) as peer:
        with pytest.raises(ValueError, match=name):
            await peer.call("q", **{name: "mine"})
        assert await peer.call("q", 1) == 1


@pytest.mark.req("A6", "M12")
async def test_requests_have_keys_of_their_own_that_look_like_uuids() -> None:
    node = Node(echoing)
    async with connected(node.far) as peer:
        for body in ("text", b"data", Order("A-1"), Order("A-2"), None, 17):
            await peer.call("q", body, within=60)
        await peer.call("q", subject="s")
    keys = [request.message_id for request in node.requests]
    assert len({UUID(str(key)) for key in keys}) == 7
    assert all(request.reply_to == "made-2" for request in node.requests)
    assert [request.content_type for request in node.requests].count("application/json") == 2
    assert all(request.ttl_ms for request in node.requests[:6])
    assert node.requests[6].ttl_ms is None


@pytest.mark.req("A3")
async def test_the_reply_is_decoded_as_asked() -> None:
    node = Node(
        lambda node, request: node.reply(request, b'{"sku":"A-1"}', content_type="application/json")
    )
    async with connected(node.far) as peer:
        assert await peer.call("q", reply=Order) == Order("A-1")
        assert await peer.call("q") == {"sku": "A-1"}
        assert await peer.call("q", reply=bytes) == b'{"sku":"A-1"}'
        with pytest.raises(DecodeError):
            await peer.call("q", reply=int)


@pytest.mark.req("A6")
async def test_replies_find_their_calls_in_any_order() -> None:
    node = Node()
    replies: dict[int, Any] = {}

    async def call(number: int) -> None:
        replies[number] = await peer.call("q", number, reply=int)

    async with connected(node.far) as peer:
        async with trio.open_nursery() as nursery:
            for number in range(50):
                nursery.start_soon(call, number)
            await node.far.until(lambda: len(node.requests) == 50)
            # Replies without a request follow.
            node.reply(node.requests[0], "stray", settle=False, correlation_id="unknown")
            node.reply(node.requests[0], "stray", settle=False, correlation_id=7)
            node.replies[str(node.requests[0].reply_to)].send(b"no message", settled=True)
            for request in reversed(node.requests):
                node.reply(request, request.body)
        assert replies == {number: number for number in range(50)}
        # A link for the requests, and another for the replies.
        assert len(node.far.links) == 2


@pytest.mark.slow
@pytest.mark.req("A6", "A8")
async def test_the_deadline_travels_and_giving_up_is_told(
    autojump_clock: trio.testing.MockClock,
) -> None:
    node = Node()
    async with connected(node.far) as peer:
        started = trio.current_time()
        with pytest.raises(DeadlineExceeded, match="'q' did not answer within 2 s"):
            await peer.call("q", within=2)
        assert trio.current_time() - started == pytest.approx(2, abs=0.1)
        (request,) = node.requests
        assert request.ttl_ms == pytest.approx(2000, abs=50)
        await node.far.until(lambda: node.given_up)
        assert node.given_up == node.deliveries
        # Answered too late: dropped, and its credit is given again.
        for _ in range(3000):
            node.reply(request, "late", settle=False)
            await trio.lowlevel.checkpoint()
        node.answer = echoing
        assert await peer.call("q", 1, reply=int, within=2) == 1


@pytest.mark.req("A8")
async def test_a_cancelled_call_is_given_up() -> None:
    node = Node()
    async with connected(node.far) as peer:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(peer.call, "q")
            await node.far.until(lambda: node.requests)
            nursery.cancel_scope.cancel()
        await node.far.until(lambda: node.given_up)
        assert node.given_up == node.deliveries


@pytest.mark.req("A8")
async def test_a_call_cancelled_before_there_was_credit_was_never_sent() -> None:
    far = FarEnd()
    async with connected(far) as peer:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(peer.call, "q")
            await far.until(lambda: len(far.links) == 2)
            await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
        requests = next(link for link in far.links if hasattr(link, "grant"))
        requests.grant(10)
        async with peer.sender("q"):
            await far.until(lambda: len(far.links) == 3)
        assert all(recorder.deliveries == [] for recorder in far.recorders)


@pytest.mark.parametrize(
    ("properties", "raised", "condition", "words"),
    [
        (
            {"statusCode": 500, "statusDescription": "oh", "errorCondition": Symbol("a:b")},
            CallFailed,
            "a:b",
            "oh",
        ),
        ({"statusCode": 404}, CallFailed, "amqp:internal-error", "the request failed"),
        ({"errorCondition": Symbol("amqp:not-found")}, CallFailed, "amqp:not-found", "failed"),
        (
            {"statusCode": 408, "statusDescription": "too late", "errorCondition": Symbol("a:b")},
            DeadlineExceeded,
            "amqp:timeout",
            "too late",
        ),
    ],
)
async def test_a_failure_reply_raises(
    properties: Any, raised: Any, condition: str, words: str
) -> None:
    node = Node(lambda node, request: node.reply(request, None, application_properties=properties))
    async with connected(node.far) as peer:
        with pytest.raises(raised, match=words) as caught:
            await peer.call("q")
        assert caught.value.condition == condition
        if raised is CallFailed and "statusCode" in properties:
            assert caught.value.info["statusCode"] == properties["statusCode"]


async def test_a_success_may_carry_a_status() -> None:
    node = Node(
        lambda node, request: node.reply(request, 1, application_properties={"statusCode": 200})
    )
    async with connected(node.far) as peer:
        assert await peer.call("q") == 1


@pytest.mark.parametrize(
    ("outcome", "raised", "words"),
    [
        (rejected("amqp:decode-error", "no sku"), DeliveryRejected, "no sku"),
        (RELEASED, DeliveryNotAccepted, "released"),
    ],
)
async def test_a_request_that_is_not_accepted_raises(
    outcome: Outcome, raised: type[AmqpError], words: str
) -> None:
    node = Node(lambda node, request: node.deliveries[-1].settle(outcome))
    async with connected(node.far) as peer:
        with pytest.raises(raised, match=words):
            await peer.call("q")


async def test_the_outcome_may_come_before_the_reply() -> None:
    node = Node(lambda node, request: node.deliveries[-1].settle(ACCEPTED))
    async with connected(node.far) as peer, trio.open_nursery() as nursery:
        replies = []

        async def call() -> None:
            replies.append(await peer.call("q"))

        nursery.start_soon(call)
        await node.far.until(lambda: node.requests)
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert replies == []
        node.reply(node.requests[0], "late", settle=False)
        await node.far.until(lambda: replies)


@pytest.mark.req("X14")
async def test_an_unknown_node_is_refused() -> None:
    far = FarEnd()

    def attach(link: Any) -> None:
        if hasattr(link, "grant"):
            link.refuse(Error("amqp:not-found", "no such node"))
        else:
            far.accept(link)

    far.on_attach = attach
    async with connected(far) as peer:
        for _ in range(2):
            with pytest.raises(LinkRefused, match="no such node"):
                await peer.call("q")
        assert len(far.links) == 2


@pytest.mark.req("X26")
@pytest.mark.parametrize("which", [0, 1])
async def test_links_of_calls_that_are_detached_are_attached_again(which: int) -> None:
    node = Node()
    async with connected(node.far) as peer:
        async with trio.open_nursery() as nursery:

            async def call() -> None:
                with pytest.raises(LinkDetached, match="moved"):
                    await peer.call("q")

            nursery.start_soon(call)
            await node.far.until(lambda: node.requests)
            node.far.links[which].detach(Error("amqp:resource-deleted", "moved"))
        node.answer = echoing
        assert await peer.call("q", 1) == 1
        assert len(node.far.links) == 3


async def test_a_node_that_never_settles_costs_no_memory() -> None:
    node = Node(lambda node, request: node.reply(request, request.body, settle=False))
    async with connected(node.far) as peer:
        for number in range(600):
            assert await peer.call("q", number, reply=int) == number
        await node.far.until(lambda: len(node.given_up) > 300)


@pytest.mark.req("A6")
@pytest.mark.parametrize("streamed", [False, True])
async def test_calls_to_many_addresses_at_once_do_not_detach_the_senders_of_each_other(
    streamed: bool,
) -> None:
    answers: list[str] = []
    # A session has 256 links at most, and a stream takes two.
    count = 120 if streamed else 200

    async with Container("c") as c, c.local() as peer:

        @c.rpc("of/{name}")
        def own(name: str) -> str:
            return name

        async def ask(number: int, times: int) -> None:
            # Calls that start later make senders in the very pass in which the others wake.
            for _ in range(times):
                await trio.lowlevel.checkpoint()
            if streamed:
                answers.extend([each async for each in peer.stream(f"of/{number}")])
            else:
                answers.append(await peer.call(f"of/{number}"))

        async with trio.open_nursery() as nursery:
            for number in range(count):
                nursery.start_soon(ask, number, number // 10)
    assert sorted(answers) == sorted(map(str, range(count)))


@pytest.mark.slow
async def test_senders_of_calls_are_kept_within_bounds() -> None:
    node = Node(echoing)
    async with connected(node.far) as peer:
        for number in range(200):
            assert await peer.call(f"q/{number}", number, reply=int) == number
        attached = [link for link in node.far.links if link.attached]
        assert len(attached) <= 70
        before = len(node.far.links)
        await peer.call("q/199")
        assert len(node.far.links) == before


async def test_the_connection_lost_is_told_to_every_call() -> None:
    node = Node()
    async with connected(node.far) as peer, trio.open_nursery() as nursery:

        async def call() -> None:
            with pytest.raises(ConnectionLost):
                await peer.call("q")

        async def read() -> None:
            with pytest.raises(ConnectionLost):
                await anext(peer.stream("q"))

        for _ in range(3):
            nursery.start_soon(call)
            nursery.start_soon(read)
        await node.far.until(lambda: len(node.requests) == 6)
        node.far.drop()


# --- when the connection is lost and comes back -----------------------------------------------

SOON = Reconnect(first_delay_s=1, jitter=0)


@pytest.mark.req("A6", "X25")
async def test_a_call_waits_for_the_next_connection(autojump_clock: trio.testing.MockClock) -> None:
    node = Node(echoing)
    async with connected(node.far, reconnect=SOON) as peer:
        assert await peer.call("q", 1) == 1
        node.far.drop()
        await peer.wait_changed()
        started = trio.current_time()
        assert (peer.state, await peer.call("q", 2)) == ("recovering", 2)
        assert trio.current_time() - started == pytest.approx(1, abs=0.1)
        assert [part async for part in peer.stream("q", 3)] == [3]
        # The reply address is the new connection's.
        first, second, _ = node.requests
        assert first.reply_to != second.reply_to


@pytest.mark.req("A6", "X25")
async def test_a_call_does_not_wait_longer_than_its_deadline(
    autojump_clock: trio.testing.MockClock,
) -> None:
    node = Node(echoing)
    async with connected(node.far, reconnect=SOON) as peer:
        await peer.call("q", 1)
        node.far.close_door("far")
        node.far.drop()
        await peer.wait_changed()
        started = trio.current_time()
        with pytest.raises(DeadlineExceeded):
            await peer.call("q", 2, within=5)
        with pytest.raises(DeadlineExceeded):
            await anext(peer.stream("q", 2, within=5))
        assert trio.current_time() - started == pytest.approx(10)
        assert len(node.requests) == 1


@pytest.mark.req("A6", "X25")
async def test_a_request_that_had_left_is_in_doubt_and_one_that_had_not_goes_on(
    autojump_clock: trio.testing.MockClock,
) -> None:
    node = Node()
    outcomes: dict[str, Any] = {}

    async def call(body: str) -> None:
        try:
            outcomes[body] = await peer.call("q", body)
        except ConnectionLost as error:
            outcomes[body] = error

    async def read(body: str) -> None:
        try:
            outcomes[body] = [part async for part in peer.stream("q", body)]
        except ConnectionLost as error:
            outcomes[body] = error

    async with connected(node.far, reconnect=SOON) as peer:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call, "left")
            nursery.start_soon(read, "streamed")
            await node.far.until(lambda: len(node.requests) == 2)
            requests = next(link for link in node.far.links if hasattr(link, "grant"))
            requests.grant(0)
            await node.far.until(lambda: not peer._calls()._senders["q"].credit)
            nursery.start_soon(call, "waits")
            await trio.testing.wait_all_tasks_blocked()
            node.answer = echoing
            node.far.drop()
        assert outcomes.pop("waits") == "waits"
        assert set(outcomes) == {"left", "streamed"}
        assert all(isinstance(each, ConnectionLost) for each in outcomes.values())
        assert [str(request.body) for request in node.requests[2:]] == ["waits"]


# --- streams ---------------------------------------------------------------------------------


def counting(count: int) -> Callable[[Node, Message], None]:
    def answer(node: Node, request: Message) -> None:
        for number in range(count):
            node.part(request, number)
        node.part(request, -1)

    return answer


@pytest.mark.req("A7")
@pytest.mark.parametrize("count", [0, 1, 50])
async def test_the_parts_of_a_reply_come_in_order(count: int) -> None:
    node = Node(counting(count))
    async with connected(node.far) as peer:
        stream = peer.stream("q", reply=int)
        assert [part async for part in stream] == list(range(count))
        assert [part async for part in stream] == []
        assert "over" in repr(stream)


@pytest.mark.req("A7")
async def test_streams_one_after_the_other_use_one_link() -> None:
    node = Node(counting(3))
    async with connected(node.far) as peer:
        for _ in range(5):
            assert [part async for part in peer.stream("q")] == [0, 1, 2]
        assert len(node.far.links) == 2
        assert [part async for part in peer.stream("q", credit=7)] == [0, 1, 2]
        assert len(node.far.links) == 3


@pytest.mark.req("A7")
async def test_streams_at_a_time_do_not_hold_each_other_up() -> None:
    node = Node()
    async with connected(node.far) as peer:
        slow, fast = peer.stream("q", "slow", credit=2), peer.stream("q", "fast", credit=2)
        async with trio.open_nursery() as nursery:
            got: list[Any] = []

            async def begin(stream: Any) -> None:
                got.append(await anext(stream))

            nursery.start_soon(begin, slow)
            nursery.start_soon(begin, fast)
            await node.far.until(lambda: len(node.requests) == 2)
            by_body = {str(each.body): each for each in node.requests}
            for request in by_body.values():
                node.part(request, 0)
        link = node.replies[str(by_body["slow"].reply_to)]
        other = node.replies[str(by_body["fast"].reply_to)]
        await node.far.until(lambda: link.credit == other.credit == 2)
        node.part(by_body["slow"], 1)
        node.part(by_body["slow"], 2)
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert link.credit == 0
        for number in range(1, 20):
            await node.far.until(lambda: other.credit)
            node.part(by_body["fast"], number)
            assert await anext(fast) == number
        assert await anext(slow) == 1
        assert await anext(slow) == 2
        await node.far.until(lambda: link.credit == 2)


@pytest.mark.req("A7", "A8")
@pytest.mark.parametrize("how", ["break", "block", "aclose", "cancel", "deadline"])
async def test_a_stream_that_is_left_is_given_up(
    how: str, autojump_clock: trio.testing.MockClock
) -> None:
    node = Node(lambda node, request: node.part(request, 0))
    async with connected(node.far) as peer:
        if how == "break":
            async for part in peer.stream("q"):
                assert part == 0
                break
            gc.collect()
        elif how == "block":
            async with peer.stream("q") as stream:
                assert await anext(stream) == 0
        elif how == "aclose":
            stream = peer.stream("q")
            assert await anext(stream) == 0
            await stream.aclose()
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
        elif how == "cancel":
            with trio.move_on_after(1):
                async for part in peer.stream("q"):
                    assert part == 0
        else:
            with pytest.raises(DeadlineExceeded, match="'q'"):  # noqa: PT012
                async for part in peer.stream("q", within=3):
                    assert part == 0
            assert node.requests[0].ttl_ms == pytest.approx(3000, abs=50)
        await node.far.until(lambda: node.given_up)
        assert node.given_up == node.deliveries
        # Late replies to it are not taken for those of the next call.
        request = node.requests[0]
        node.part(request, 1)
        node.answer = counting(2)
        assert [part async for part in peer.stream("q")] == [0, 1]


@pytest.mark.req("A7")
async def test_a_stream_that_fails_gives_out_what_came_before() -> None:
    def answer(node: Node, request: Message) -> None:
        node.part(request, 0)
        failure = {"statusCode": 500, "statusDescription": "broke", "errorCondition": Symbol("a:b")}
        node.reply(request, None, application_properties=failure)

    node = Node(answer)
    async with connected(node.far) as peer:
        parts = []
        with pytest.raises(CallFailed, match="broke"):  # noqa: PT012
            async for part in peer.stream("q"):
                parts.append(part)  # noqa: PERF401  # what came before an error counts
        assert parts == [0]


@pytest.mark.req("A7")
async def test_a_part_that_is_something_else_ends_the_stream() -> None:
    node = Node(lambda node, request: node.part(request, 0, "text"))
    async with connected(node.far) as peer:
        with pytest.raises(DecodeError):
            await anext(peer.stream("q", reply=int))
        await node.far.until(lambda: node.given_up)


@pytest.mark.req("A7")
async def test_one_reply_is_a_stream_of_one() -> None:
    node = Node(echoing)
    async with connected(node.far) as peer:
        assert [part async for part in peer.stream("q", 5)] == [5]


@pytest.mark.req("A7")
async def test_a_stream_that_is_not_accepted_raises() -> None:
    node = Node(lambda node, request: node.deliveries[-1].settle(rejected("a:b", "never")))
    async with connected(node.far) as peer:
        with pytest.raises(DeliveryRejected, match="never"):
            await anext(peer.stream("q"))


async def test_only_one_task_reads_a_stream() -> None:
    node = Node()
    async with connected(node.far) as peer, trio.open_nursery() as nursery:
        stream = peer.stream("q")
        nursery.start_soon(stream.__anext__)
        await node.far.until(lambda: node.requests)
        with pytest.raises(trio.BusyResourceError):
            await anext(stream)
        nursery.cancel_scope.cancel()


async def test_a_stream_needs_credit() -> None:
    node = Node()
    async with connected(node.far) as peer:
        with pytest.raises(ValueError, match="credit"):
            peer.stream("q", credit=0)


# --- against our own nodes -------------------------------------------------------------------


@rpc("double")
async def double(number: int) -> int:
    return 2 * number


@rpc("count")
async def count(to: int) -> AsyncIterator[int]:
    for number in range(to):
        yield number


@pytest.mark.slow
@pytest.mark.req("A6", "A7", "A12")
async def test_calls_and_streams_reach_our_own_nodes() -> None:
    async with Container("c", nodes=[double, count]) as container, container.local() as peer:
        async with trio.open_nursery() as nursery:
            for number in range(100):

                async def call(number: int = number) -> None:
                    assert await peer.call("double", number, reply=int, within=5) == 2 * number

                async def read(number: int = number) -> None:
                    stream = peer.stream("count", number, reply=int, credit=5)
                    assert [part async for part in stream] == list(range(number))

                nursery.start_soon(call)
                nursery.start_soon(read)
        assert container.stats()["count"]["cancelled"] == 0


@pytest.mark.req("A7", "A8")
async def test_breaking_off_ends_our_own_generator() -> None:
    ended = trio.Event()

    @rpc("endless")
    async def endless() -> AsyncIterator[int]:
        try:
            number = 0
            while True:
                yield number
                number += 1
        finally:
            ended.set()

    async with Container("c", nodes=[endless]) as container, container.local() as peer:
        async for part in peer.stream("endless"):
            if part == 500:
                break
        with trio.fail_after(10):
            await ended.wait()


@pytest.mark.req("A3")
async def test_an_argument_for_a_handler_that_takes_none_is_refused() -> None:
    @rpc("now")
    async def now() -> int:
        return 12

    @rpc("whole")
    async def whole(message: Message) -> Any:
        return message.body

    async with Container("c", nodes=[now, whole]) as c, c.local() as peer:
        assert await peer.call("now", reply=int) == 12
        # Clients that have nothing to say send something empty.
        for nothing in (None, "", b"", [], {}):
            assert await peer.call("now", nothing, reply=int) == 12
        for arguments in ((0,), (False,), ("x",), (1, 2)):
            with pytest.raises(CallFailed, match="'now' takes no argument, and the request has"):
                await peer.call("now", *arguments)
        assert await peer.call("whole", "x") == "x"


async def test_a_refusal_names_its_address_once() -> None:
    async with Container("c") as c, c.local() as peer:
        with pytest.raises(LinkRefused) as caught:
            await peer.call("nowhere")
        assert str(caught.value) == "'c' has no node 'nowhere' [amqp:not-found]"
