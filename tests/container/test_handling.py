"""Handlers that take octets: those that return at once, those that wait, and what both raise."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Generator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from amqp_rt.codec.plain_messages import read_data_behind_properties, read_plain_data
from amqp_rt.codec.sections import read_data
from amqp_rt.container.container import Container
from amqp_rt.container.credit import SharedSlots
from amqp_rt.container.declaring import node, rpc
from amqp_rt.container.handling import (
    TURN_MESSAGES,
    TURN_REQUESTS,
    TURN_S,
    InboxSteps,
    Suspended,
    WorkersSteps,
)
from amqp_rt.container.raising import Reject
from amqp_rt.errors import DecodeError, DeliveryNotAccepted, DeliveryRejected
from amqp_rt.message import Message
from amqp_rt.outcomes import ACCEPTED, MODIFIED_FAILED, Accepted, Released


class Trap:
    """Awaitable that yields *asked* and returns the answer."""

    def __init__(self, asked: str) -> None:
        self.asked = asked

    def __await__(self) -> Generator[str, Any, Any]:
        return (yield self.asked)


async def two_questions(log: list[object]) -> str:
    try:
        log.append(await Trap("first"))
        log.append(await Trap("second"))
    except KeyError as error:
        log.append(error)
        return "caught"
    finally:
        log.append("end")
    return "done"


async def awaited(rest: Awaitable[Any]) -> Any:
    return await rest


def test_the_rest_of_a_coroutine_runs_where_it_is_awaited() -> None:
    log: list[object] = []
    begun = two_questions(log)
    outer = awaited(Suspended(begun, begun.send(None)))
    assert outer.send(None) == "first"
    assert outer.send(1) == "second"
    with pytest.raises(StopIteration) as stopped:
        outer.send(2)
    assert (stopped.value.value, log) == ("done", [1, 2, "end"])


def test_exceptions_reach_the_rest_of_a_coroutine() -> None:
    log: list[object] = []
    begun = two_questions(log)
    outer = awaited(Suspended(begun, begun.send(None)))
    outer.send(None)
    error = KeyError("k")
    with pytest.raises(StopIteration) as stopped:
        outer.throw(error)
    assert (stopped.value.value, log) == ("caught", [error, "end"])


def test_closing_ends_the_rest_of_a_coroutine() -> None:
    log: list[object] = []
    begun = two_questions(log)
    outer = awaited(Suspended(begun, begun.send(None)))
    outer.send(None)
    outer.close()
    assert log == ["end"]


@pytest.mark.req("A2")
async def test_the_frames_of_a_handler_that_waits_are_seen() -> None:
    names: list[str] = []
    waits, over = trio.Event(), trio.Event()

    async def innermost() -> None:
        await trio.lowlevel.checkpoint()
        waits.set()
        await over.wait()

    task: trio.lowlevel.Task | None = None

    @node("here")
    async def handler(body: bytes) -> None:
        nonlocal task
        task = trio.lowlevel.current_task()
        await innermost()

    async with Container("c", nodes=[handler]) as c, c.local() as peer, peer.sender("here") as out:
        out.send_nowait(b"x")
        await waits.wait()
        await trio.testing.wait_all_tasks_blocked()
        assert task is not None
        names = [frame.f_code.co_name for frame, _ in task.iter_await_frames()]
        at = names.index("handler")
        assert names[at : at + 3] == ["handler", "innermost", "wait"]
        over.set()


@pytest.mark.req("A2")
async def test_handlers_that_wait_run_beside_each_other_and_each_has_its_outcome() -> None:
    present = 0
    together = trio.Event()

    @node("here", slots=5)
    async def handler(body: bytes) -> Released | None:
        nonlocal present
        present += 1
        if present == 5:
            together.set()
        await together.wait()
        await trio.lowlevel.checkpoint()
        if body == b"1":
            raise Reject("this one is refused")
        return Released() if body == b"2" else None

    async with Container("c", nodes=[handler]) as c, c.local() as peer, peer.sender("here") as out:
        outcomes: dict[int, str] = {}

        async def send(number: int) -> None:
            try:
                await out.send(b"%d" % number)
                outcomes[number] = "accepted"
            except DeliveryRejected:
                outcomes[number] = "rejected"
            except DeliveryNotAccepted:
                outcomes[number] = "not accepted"

        with trio.fail_after(5):
            async with trio.open_nursery() as nursery:
                for number in range(5):
                    nursery.start_soon(send, number)
        assert outcomes == {
            0: "accepted",
            1: "rejected",
            2: "not accepted",
            3: "accepted",
            4: "accepted",
        }
        assert c.stats()["here"]["accepted"] == 3


@pytest.mark.req("A2")
async def test_a_handler_may_return_any_awaitable() -> None:
    async def waits() -> None:
        await trio.lowlevel.checkpoint()

    class Answer:
        def __await__(self) -> Generator[Any, Any, Released]:
            yield from waits().__await__()
            return Released()

    @node("here")
    def handler(body: bytes) -> Any:
        return Answer()

    async with Container("c", nodes=[handler]) as c, c.local() as peer, peer.sender("here") as out:
        with pytest.raises(DeliveryNotAccepted):
            await out.send(b"x")


@pytest.mark.req("A2")
async def test_handlers_that_never_wait_let_other_tasks_run() -> None:
    handled: list[bytes] = []

    @node("here", prefetch=1000)
    async def handler(body: bytes) -> None:
        handled.append(body)

    async with Container("c", nodes=[handler]) as c, c.local() as peer, peer.sender("here") as out:
        await trio.testing.wait_all_tasks_blocked()
        for number in range(500):
            out.send_nowait(b"%d" % number)
        seen = []
        with trio.fail_after(5):
            while len(handled) < 500:
                seen.append(len(handled))
                await trio.lowlevel.checkpoint()
        # Within a pass of the scheduler tasks run in any order: there may be two turns between two steps.
        assert max(after - before for before, after in pairwise(seen)) <= 2 * TURN_MESSAGES
        assert handled == [b"%d" % number for number in range(500)]


@pytest.mark.req("A2")
async def test_the_time_of_a_turn_is_bounded() -> None:
    handled = 0

    @node("here", prefetch=100)
    async def handler(body: bytes) -> None:
        nonlocal handled
        handled += 1
        time.sleep(1.5 * TURN_S)  # noqa: ASYNC251  # a handler that works without waiting

    async with Container("c", nodes=[handler]) as c, c.local() as peer, peer.sender("here") as out:
        await trio.testing.wait_all_tasks_blocked()
        for number in range(40):
            out.send_nowait(b"%d" % number)
        seen = []
        with trio.fail_after(30):
            while handled < 40:
                seen.append(handled)
                await trio.lowlevel.checkpoint()
        # The clock is read after every fourth message, and there may be two turns between two steps.
        assert max(after - before for before, after in pairwise([*seen, handled])) <= 8


async def _octets(body: bytes) -> Released | None:
    return Released() if body == b"bad" else None


async def _message(message: Message) -> Released | None:
    return Released() if message.body == b"bad" else None


@pytest.mark.req("A2")
@pytest.mark.parametrize("handler", [_octets, _message])
async def test_a_defect_of_ours_stops_no_worker(
    handler: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    container = Container("c", nodes=[node("here")(handler)])
    async with container as c, c.local() as peer, peer.sender("here") as out:

        def fail(*_: object) -> None:
            raise RuntimeError("a defect")

        monkeypatch.setattr("amqp_rt.container.serving.conclude", fail)
        with caplog.at_level(logging.ERROR), pytest.raises(DeliveryNotAccepted):
            await out.send(b"bad")
        (record,) = caplog.records
        assert "could not be handled" in record.message
        assert "a defect" in str(record.exc_info and record.exc_info[1])
        # Its slot is free: the only worker handles the next one.
        await out.send(b"good")
        assert c.stats()["here"]["accepted"] == 1


class Arrived:
    """A message of a link that settles one by one, as those of other protocols."""

    link = SimpleNamespace()
    settled = False

    def __init__(self, payload: bytes, *, fails: bool = False) -> None:
        self.payload = payload
        self.fails = fails
        self.outcomes: list[Any] = []

    def settle(self, outcome: Any) -> None:
        if self.fails and not self.outcomes:
            self.fails = False
            raise RuntimeError("a defect")
        self.outcomes.append(outcome)


class Slots(WorkersSteps):
    def rotate_unused_credit(self) -> None:
        """No other link waits."""


class Open(InboxSteps):
    binding = SimpleNamespace(address="here")


@pytest.mark.req("A2")
@pytest.mark.parametrize(
    ("turn", "waiting", "processed"),
    [
        (TURN_REQUESTS, 20, TURN_REQUESTS),
        (TURN_REQUESTS, 64, TURN_REQUESTS),
        (TURN_REQUESTS, 200, 50),
        (TURN_REQUESTS, 1000, TURN_MESSAGES),
        (TURN_MESSAGES, 100, TURN_MESSAGES),
    ],
)
def test_a_turn_of_requests_is_short_unless_many_wait(
    turn: int, waiting: int, processed: int
) -> None:
    workers = Slots(1, 0, 0, SharedSlots(waiting + 1), None, turn)
    workers.shared.held = waiting + 1
    inbox = Open(None, workers, None)
    inbox.run = lambda *_: None
    inbox.waiting += [Arrived(b"1") for _ in range(waiting)]
    workers.put(inbox)
    worker = SimpleNamespace(cancelled=False, timed=False)
    result = workers._run_turn(inbox, Arrived(b"1"), worker, 0, time.perf_counter() + 1000)
    assert result == (TURN_MESSAGES, None, None, False)
    assert waiting + 1 - len(inbox.waiting) == processed


@pytest.mark.req("A2")
async def test_replies_of_many_requests_leave_in_parts() -> None:
    handled = 0

    @rpc("here", prefetch=64)
    async def handler(body: bytes) -> bytes:
        nonlocal handled
        handled += 1
        return body

    async def call(number: int) -> None:
        assert await peer.call("here", b"%d" % number) == b"%d" % number

    async with Container("c", nodes=[handler]) as c, c.local() as peer:
        seen = [0]
        async with trio.open_nursery() as nursery:
            for number in range(64):
                nursery.start_soon(call, number)
            with trio.fail_after(5):
                while handled < 64:
                    await trio.lowlevel.checkpoint()
                    seen.append(handled)
        # Output leaves between two passes of the scheduler, within which there may be two turns between two steps.
        assert max(after - before for before, after in pairwise(seen)) <= 2 * TURN_REQUESTS


@pytest.mark.req("A2")
def test_a_defect_while_a_turn_is_settled_keeps_no_room(caplog: pytest.LogCaptureFixture) -> None:
    workers = Slots(1, 1, 0, SharedSlots(5), None)
    workers.load = workers.shared.held = 3
    taken = [Arrived(b"1"), Arrived(b"2", fails=True), Arrived(b"3")]
    with caplog.at_level(logging.ERROR):
        Open(None, workers, None).accept(taken)
    assert [each.outcomes for each in taken] == [[ACCEPTED], [MODIFIED_FAILED], [ACCEPTED]]
    assert (workers.load, workers.shared.held) == (0, 0)
    (record,) = caplog.records
    assert "could not be handled" in record.message


@pytest.mark.req("A2")
async def test_a_handler_that_waits_outlives_its_link_and_gives_its_slot_back() -> None:
    waits, over = trio.Event(), trio.Event()
    ended: list[bytes] = []

    @node("here")
    async def handler(body: bytes) -> None:
        waits.set()
        await over.wait()
        ended.append(body)

    async with Container("c", nodes=[handler]) as c, c.local() as peer:
        first = peer.sender("here")
        async with first as out:
            out.send_nowait(b"1")
            await waits.wait()
            out.link.detach()
            await trio.testing.wait_all_tasks_blocked()
            over.set()
            await trio.testing.wait_all_tasks_blocked()
            assert ended == [b"1"]
        with trio.fail_after(5):
            async with peer.sender("here") as out:
                await out.send(b"2")
        assert ended == [b"1", b"2"]


@pytest.mark.req("A2")
async def test_a_handler_that_waits_is_cancelled_with_its_container() -> None:
    waits = trio.Event()
    log: list[str] = []

    @node("here")
    async def handler(body: bytes) -> None:
        try:
            waits.set()
            await trio.sleep_forever()
        except trio.Cancelled:
            log.append("cancelled")
            raise

    with trio.CancelScope() as scope:
        async with (
            Container("c", nodes=[handler]) as c,
            c.local() as peer,
            peer.sender("here") as out,
        ):
            out.send_nowait(b"x")
            await waits.wait()
            scope.cancel()
    assert log == ["cancelled"]


_MESSAGES = st.builds(
    lambda body, fields, more: Message([body, b"2"] if more else body, body_kind="data", **fields),
    st.binary(max_size=300),
    st.fixed_dictionaries(
        {},
        optional={
            "message_id": st.integers(0, 2**64 - 1) | st.text(max_size=300),
            "to": st.text(max_size=9),
            "durable": st.booleans(),
            "application_properties": st.just({"a": 1}),
        },
    ),
    st.booleans(),
)


@pytest.mark.req("M1")
@given(_MESSAGES, st.integers(0, 400), st.integers(-1, 255))
def test_the_quick_look_at_a_body_agrees_with_the_full_one(
    message: Message, at: int, octet: int
) -> None:
    payload = bytearray(message.encode())
    if octet >= 0 and at < len(payload):
        payload[at] = octet
    elif octet >= 0:
        del payload[octet:]
    quick = read_plain_data(bytes(payload))
    if quick is not None:
        assert quick == read_data(bytes(payload))
    elif octet < 0 and set(dict(message.application_properties)) == set() and not message.durable:
        # Only large properties, and several sections, are left to the full one.
        assert len(message.data) > 1 or len(payload) > 255
    behind = read_data_behind_properties(bytes(payload))
    if behind is not None:
        assert behind == read_data(bytes(payload))
    else:
        assert quick is None
        if octet < 0 and not message.durable:
            assert len(message.data) > 1 or len(payload) > 255
    try:
        read_data(bytes(payload))
    except DecodeError:
        assert quick is behind is None


@node("octets")
async def take_octets(body: bytes) -> None:
    """Accept each message."""


async def test_a_malformed_message_is_rejected_and_the_next_one_is_handled() -> None:
    async with (
        Container("all", nodes=[take_octets]) as all_,
        all_.local() as peer,
        peer.sender("octets") as sender,
    ):
        for malformed in (b"no message", b"\x00\x53\x74\xc1\xff", b""):
            with pytest.raises(DeliveryRejected) as refused:
                await sender.send_payload(malformed)
            assert refused.value.condition == DecodeError.default_condition
            await sender.send(b"good")


@pytest.mark.req("A2")
@pytest.mark.parametrize("end", ["waits", "rejects", "returns an outcome", "takes a message"])
async def test_what_a_turn_has_accepted_is_settled_whatever_ends_it(end: str) -> None:
    began, over = trio.Event(), trio.Event()

    @node("here", slots=1, prefetch=10)
    async def handler(body: bytes) -> Released | None:
        if body == b"last":
            began.set()
            if end == "rejects":
                raise Reject("this one is refused")
            if end == "returns an outcome":
                return Released()
            if end == "waits":
                await over.wait()
        return None

    async with Container("c", nodes=[handler]) as c, c.local() as peer, peer.sender("here") as out:
        first = [out.send_nowait(b"%d" % number) for number in range(5)]
        # What cannot be handed out as octets goes another way.
        last = out.send_nowait("text" if end == "takes a message" else b"last")
        with trio.fail_after(5):
            for receipt in first:
                await receipt.accepted()
            if end == "waits":
                assert began.is_set()
                assert not last.done
                assert c.stats()["here"]["accepted"] == 5
                over.set()
            outcome = await last.outcome()
        assert (
            type(outcome).__name__
            == {
                "waits": "Accepted",
                "rejects": "Rejected",
                "returns an outcome": "Released",
                "takes a message": "Accepted",
            }[end]
        )
        assert c.stats()["here"]["accepted"] == 5 + (type(outcome) is Accepted)
        # All room was given back.
        for number in range(30):
            await out.send(b"%d" % number)


class Stop(BaseException):
    """Exception that no handler catches, as the interrupt of a user."""


@pytest.mark.req("A2")
async def test_a_turn_that_is_cut_short_has_settled_what_it_accepted() -> None:
    taken: list[bytes] = []

    @node("here", slots=1, prefetch=10)
    async def handler(body: bytes) -> None:
        taken.append(body)
        if body == b"3":
            raise Stop

    c = Container("c", nodes=[handler])

    async def send() -> None:
        async with c, c.local() as peer:
            out = peer.sender("here")
            for number in range(5):
                out.send_nowait(b"%d" % number)
            await trio.sleep(5)

    with pytest.raises(Stop):
        await send()
    assert taken == [b"0", b"1", b"2", b"3"]
    assert c.stats()["here"]["accepted"] == 3
