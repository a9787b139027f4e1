"""Streams in memory are streams, by trio's own definition."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from amqp_rt.net.memory import MemoryStream, memory_stream_pair


async def make_pair() -> tuple[MemoryStream, MemoryStream]:
    return memory_stream_pair()


async def make_clogged_pair() -> tuple[MemoryStream, MemoryStream]:
    """A pair in which neither end can send more until the other has read."""
    pair = memory_stream_pair()
    for stream in pair:
        with trio.move_on_after(0.01):
            while True:
                await stream.send_all(bytes(65_536))
    return pair


@pytest.mark.req("L4")
async def test_trios_own_check(autojump_clock: trio.testing.MockClock) -> None:
    await trio.testing.check_half_closeable_stream(make_pair, make_clogged_pair)


@pytest.mark.req("L4")
async def test_a_sender_cannot_run_far_ahead(autojump_clock: trio.testing.MockClock) -> None:
    ours, theirs = memory_stream_pair()
    with trio.move_on_after(1) as scope:
        await ours.send_all(bytes(100_000_000))
    assert scope.cancelled_caught
    await ours.aclose()
    held = 0
    while piece := await theirs.receive_some(1_000):
        assert len(piece) <= 1_000
        held += len(piece)
    assert held < 400_000


@pytest.mark.req("L4")
@pytest.mark.parametrize("size", [1, 7, 1_000, 65_536, None])
async def test_bytes_stay_in_order(size: int | None) -> None:
    ours, theirs = memory_stream_pair()
    sent = bytes(range(256)) * 100
    for start in range(0, len(sent), 999):
        ours.send(sent[start : start + 999])
    ours.shutdown(1)
    heard = b""
    while piece := await theirs.receive_some(size):
        heard += piece
    assert heard == sent


@pytest.mark.req("L4")
def test_the_calls_of_a_socket_never_wait() -> None:
    ours, theirs = memory_stream_pair()
    with pytest.raises(BlockingIOError):
        theirs.recv(10)
    assert ours.sendmsg([b"ab", b"cd"]) == 4
    assert (theirs.recv(3), theirs.recv(3)) == (b"abc", b"d")
    for _ in range(6):
        ours.send(bytes(50_000))
    with pytest.raises(BlockingIOError):
        ours.send(b"x")
    theirs.close()
    with pytest.raises(BrokenPipeError):
        ours.send(b"x")
    assert ours.recv(10) == b""
    ours.close()
    for call in (lambda: ours.send(b"x"), lambda: ours.recv(1)):
        with pytest.raises(OSError, match="closed"):
            call()


@pytest.mark.req("L4")
def test_gathering_stops_where_the_peer_is_far_behind() -> None:
    ours, theirs = memory_stream_pair()
    buffers = [bytes(100_000)] * 10
    sent = ours.sendmsg(buffers)
    assert 0 < sent < 1_000_000
    assert sent % 100_000 == 0
    while sent:
        sent -= len(theirs.recv(65_536))


@pytest.mark.req("L4")
async def test_close_lets_the_peer_read_what_was_sent() -> None:
    ours, theirs = memory_stream_pair()
    await ours.send_all(b"last words")
    await ours.aclose()
    assert await theirs.receive_some() == b"last words"
    assert await theirs.receive_some() == b""
    with pytest.raises(trio.BrokenResourceError):
        await theirs.send_all(b"too late")
