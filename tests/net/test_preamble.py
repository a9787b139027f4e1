"""The first eight octets: who is meant, and what everybody else is told."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing

from amqp_rt.fronts import amqp10
from amqp_rt.fronts.base import Front
from amqp_rt.limits import Limits
from amqp_rt.net.memory import memory_stream_pair
from amqp_rt.net.preamble import decidable, match, select_front


class Older(amqp10.Front):
    """A second protocol on the same port."""

    name = "amqp0.9.1"
    headers = (b"AMQP\x00\x00\x09\x01",)
    preferred_header = headers[0]


NATIVE, OLDER = amqp10.Front(), Older()

FOREIGN = [
    b"AMQP\x00\x00\x09\x01",  # 0-9-1
    b"AMQP\x01\x01\x00\x0a",  # 0-10
    b"AMQP\x01\x01\x08\x00",  # 0-8
    b"AMQP\x00\x01\x00\x01",  # a later 1.0
    b"AMQP\x02\x01\x00\x00",  # TLS within the port: not offered
    b"GET / HTTP/1.1\r\nHost: example.com\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),  # TLS ClientHello
    b"PROXY TCP4 192.0.2.1 192.0.2.2 1 2\r\n",
    b"amqp\x00\x01\x00\x00",
    b"\x00" * 8,
    b"\xff" * 1_000,
    b"A",
    b"AMQP\x00\x01\x00",
]


@pytest.mark.req("X1", "X2")
@pytest.mark.parametrize("front", [NATIVE, OLDER], ids=lambda front: front.name)
@pytest.mark.parametrize("trailing", [b"", b"\x00\x00\x00\x08more"])
async def test_a_header_is_known_however_it_is_cut(front: Front, trailing: bytes) -> None:
    for header in front.headers:
        data = header + trailing
        for cut in range(1, len(data)):
            ours, theirs = memory_stream_pair()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(send_in_two, theirs, data, cut)
                found = await select_front(ours, [NATIVE, OLDER])
                assert found is not None
                rest = found[1]
                while len(rest) < len(data):
                    rest += await ours.receive_some()
            assert (found[0], rest) == (front, data)


async def send_in_two(stream: trio.abc.Stream, data: bytes, cut: int) -> None:
    await stream.send_all(data[:cut])
    await trio.testing.wait_all_tasks_blocked()
    await stream.send_all(data[cut:])


@pytest.mark.req("X1", "X2")
@pytest.mark.parametrize("data", FOREIGN, ids=lambda data: repr(data[:8]))
async def test_a_foreign_header_is_told_ours_then_the_end(
    data: bytes, autojump_clock: trio.testing.MockClock
) -> None:
    ours, theirs = memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(select_front, ours, [NATIVE])
        await theirs.send_all(data)
        await theirs.send_eof()
        answer = b""
        while piece := await theirs.receive_some():
            answer += piece
    # A peer that leaves before its protocol is clear gets no answer.
    assert answer == (b"" if len(data) < 8 else b"AMQP\x00\x01\x00\x00")
    assert trio.current_time() == 0


@pytest.mark.req("X1", "X2")
@pytest.mark.parametrize("data", FOREIGN, ids=lambda data: repr(data[:8]))
@pytest.mark.parametrize("kind", ["tcp"], indirect=True)
async def test_over_tcp_the_answer_is_not_lost_by_a_reset(
    data: bytes, carried: Any, clock: Any
) -> None:
    ours, theirs = await carried.pair()
    async with trio.open_nursery() as nursery:
        await theirs.send_all(data * 50)
        nursery.start_soon(select_front, ours, [NATIVE])
        answer = b""
        while len(answer) < 8 and (piece := await theirs.receive_some()):
            answer += piece
        await theirs.send_eof()
    assert answer == b"AMQP\x00\x01\x00\x00"


@pytest.mark.req("X2")
def test_the_first_octet_that_differs_decides() -> None:
    assert not decidable(b"", [NATIVE])
    assert not decidable(b"AMQP\x00", [NATIVE])
    assert decidable(b"G", [NATIVE])
    assert decidable(b"AMQP\x01", [NATIVE])
    assert not decidable(b"AMQP\x00\x00", [NATIVE, OLDER])
    assert decidable(b"AMQP\x00\x00", [NATIVE])
    assert match(b"AMQP\x03\x01\x00\x00rest", [OLDER, NATIVE]) is NATIVE
    assert match(b"AMQP\x00\x00\x09\x01", [NATIVE]) is None


@pytest.mark.req("X7")
@pytest.mark.parametrize("beginning", [b"", b"A", b"AMQP\x00\x01\x00"])
async def test_who_does_not_finish_the_header_in_time_is_dropped(
    beginning: bytes, autojump_clock: trio.testing.MockClock
) -> None:
    ours, theirs = memory_stream_pair()
    if beginning:
        await theirs.send_all(beginning)
    assert await select_front(ours, [NATIVE], limits=Limits(handshake_s=10)) is None
    assert trio.current_time() == pytest.approx(10)
    assert await theirs.receive_some() == b""


@pytest.mark.req("X7")
async def test_who_does_not_take_the_answer_is_dropped(
    autojump_clock: trio.testing.MockClock,
) -> None:
    ours, theirs = memory_stream_pair()
    await theirs.send_all(b"GET / HTTP/1.1")
    assert await select_front(ours, [NATIVE]) is None
    assert trio.current_time() <= 1


async def test_who_is_gone_is_nobody() -> None:
    ours, theirs = memory_stream_pair()
    await theirs.aclose()
    assert await select_front(ours, [NATIVE]) is None


class Web(amqp10.Front):
    """Protocol that is recognised by methods of different lengths."""

    name = "http"
    headers = (b"GET /", b"DELETE /", b"OPTIONS /")
    preferred_header = b"HTTP/1.1 501 Not Implemented\r\n\r\n"


WEB = Web()


@pytest.mark.parametrize("beginning", Web.headers)
async def test_a_beginning_of_any_length_is_recognised_however_it_is_cut(beginning: bytes) -> None:
    data = beginning + b"q HTTP/1.1\r\n"
    for cut in range(1, len(data)):
        ours, theirs = memory_stream_pair()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_in_two, theirs, data, cut)
            found = await select_front(ours, [NATIVE, OLDER, WEB])
            assert found is not None
            rest = found[1]
            while len(rest) < len(data):
                rest += await ours.receive_some()
        assert (found[0], rest) == (WEB, data)


@pytest.mark.parametrize(
    ("data", "front", "decided"),
    [
        (b"GET /", WEB, True),
        (b"GET ", None, False),
        (b"OPTIONS ", None, False),  # eight octets that may still become a beginning
        (b"OPTIONS /", WEB, True),
        (b"OPTIONAL", None, True),
        (b"PUT /q", None, True),
        (b"AMQP\x00\x01\x00", None, False),
        (b"AMQP\x00\x01\x00\x00", NATIVE, True),
        (b"", None, False),
    ],
)
def test_a_beginning_is_decided_as_soon_as_no_other_can_follow(
    data: bytes, front: Front | None, decided: bool
) -> None:
    fronts = [NATIVE, OLDER, WEB]
    assert match(data, fronts) is front
    assert decidable(data, fronts) is decided


async def test_a_request_that_no_front_answers_gets_the_most_similar_answer() -> None:
    ours, theirs = memory_stream_pair()

    async def ask() -> None:
        await theirs.send_all(b"HEAD / HTTP/1.1\r\n\r\n")
        await theirs.send_eof()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        assert await select_front(ours, [NATIVE, WEB]) is None
    assert await theirs.receive_some() == Web.preferred_header
