"""The carrier's own rules, step by step, with a host that only takes notes."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
from carriers import Echo

from amqp_rt.clock import SystemClock
from amqp_rt.events import Closed, ConnectionFailed, Event
from amqp_rt.limits import Limits
from amqp_rt.net.carrier import Carrier
from amqp_rt.net.memory import MemoryStream, memory_stream_pair
from amqp_rt.outcomes import Error


class Counted:
    """A stream in memory, as a socket, that counts the calls."""

    def __init__(self, stream: MemoryStream) -> None:
        self.stream = stream
        self.sends: list[int] = []
        self.gathers: list[int] = []
        self.broken = False

    def recv(self, size: int, /) -> bytes:
        return self.stream.recv(size)

    def send(self, data: bytes | memoryview, /) -> int:
        if self.broken:
            raise BrokenPipeError(32, "Broken pipe")
        self.sends.append(len(data))
        return self.stream.send(data)

    def sendmsg(self, buffers: Any, /) -> int:
        self.gathers.append(len(buffers))
        return self.stream.sendmsg(buffers)

    def shutdown(self, how: int, /) -> None:
        self.stream.shutdown(how)

    def close(self) -> None:
        self.stream.close()


class Notes:
    """A host that remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def watch(self, carrier: Carrier) -> None:
        self.told.append("watch")

    def alarm(self, carrier: Carrier) -> None:
        self.told.append("alarm")

    def later(self, carrier: Carrier) -> None:
        self.told.append("later")

    def ended(self, carrier: Carrier) -> None:
        self.told.append("ended")


class Bench:
    def __init__(self, engine: Any, **limits: Any) -> None:
        ours, self.peer = memory_stream_pair()
        self.channel = Counted(ours)
        self.host = Notes()
        self.events: list[Event] = []
        self.engine = engine
        self.carrier = Carrier(
            self.channel,
            engine,
            self.events.extend,
            limits=Limits(**limits),
            clock=SystemClock(),
        )
        self.carrier.start(self.host)


def test_what_is_said_in_one_pass_leaves_together() -> None:
    bench = Bench(Echo())
    for word in (b"one", b"two", b"three"):
        bench.engine.say(word)
    assert bench.channel.sends == []
    assert set(bench.host.told) == {"later"}
    bench.carrier.flush()
    assert bench.channel.sends == [11]
    assert bench.peer.recv(100) == b"onetwothree"


def test_answers_to_a_chunk_leave_together_right_after_it() -> None:
    bench = Bench(Echo(repeat=10))
    bench.peer.send(b"abc")
    bench.carrier.readable()
    assert bench.channel.sends == [30]
    assert bench.host.told == []


class SpeaksWhileTaken(Echo):
    """Taking its output makes room, and room makes more output."""

    def take(self) -> list[bytes]:
        taken = super().take()
        if taken and self.heard < 3:
            self.heard += 1
            self.say(str(self.heard).encode())
        return taken


def test_output_that_taking_provokes_stays_in_order() -> None:
    bench = Bench(SpeaksWhileTaken())
    bench.engine.say(b"0")
    bench.carrier.flush()
    assert bench.peer.recv(100) == b"0123"


def test_many_small_buffers_are_few_calls_and_large_ones_are_not_copied() -> None:
    bench = Bench(Echo())
    bench.engine.say(*[b"x" * 100] * 1_500)
    bench.carrier.flush()
    assert bench.channel.gathers == [3]
    large = bytes(20_000)
    bench = Bench(Echo())
    bench.engine.say(b"head", large, b"head", b"more", large, *[b"tail"] * 10_000)
    bench.carrier.flush()
    assert bench.channel.gathers == [5]
    received = bench.peer.recv(1_000_000)
    assert received == b"head" + large + b"headmore" + large + b"tail" * 10_000


def test_one_call_hands_over_a_bounded_number_of_buffers() -> None:
    bench = Bench(Echo())
    bench.engine.say(*[bytes(16_384)] * 600)
    bench.carrier.flush()
    assert max(bench.channel.gathers) <= 512


class Endless(Echo):
    def take(self) -> list[bytes]:
        return [bytes(100_000)]


class Swallowing(Counted):
    def send(self, data: bytes | memoryview, /) -> int:
        self.sends.append(len(data))
        return len(data)


def test_one_connection_does_not_send_for_ever() -> None:
    bench = Bench(Echo())
    bench.carrier.engine = Endless()
    bench.carrier.channel = channel = Swallowing(bench.channel.stream)
    bench.carrier.flush()
    assert 1_000_000 < sum(channel.sends) < 1_200_000
    assert bench.host.told == ["later"]


def test_what_the_peer_said_last_is_heard_though_it_cannot_be_answered() -> None:
    bench = Bench(Echo())
    bench.peer.send(b"because")
    bench.channel.broken = True
    bench.engine.say(b"x")
    # Output may arise deep inside the engine: nothing is sent there.
    assert bench.engine.heard == 0
    assert not bench.carrier.over
    bench.carrier.flush()
    assert bench.engine.heard == len(b"because")
    assert bench.carrier.over
    assert bench.host.told[-1] == "ended"


class Ends(Echo):
    """Reports its end as engines do."""

    def receive_eof(self, now: float) -> list[Event]:
        self.finished = True
        return [ConnectionFailed(Error("amqp:connection:forced", "no close")), Closed()]


def test_the_owner_hears_why() -> None:
    bench = Bench(Ends())
    bench.carrier.drop("the cable is cut")
    assert bench.events == [
        ConnectionFailed(Error("amqp:connection:forced", "the cable is cut")),
        Closed(),
    ]
    bench.carrier.drop("again")
    assert len(bench.events) == 2


def test_after_the_end_nothing_is_sent() -> None:
    bench = Bench(Echo())
    bench.carrier.drop("over")
    bench.engine.say(b"x")
    assert bench.channel.sends == []
    bench.carrier.stop(1)
    assert bench.host.told == ["ended"]


def test_an_engine_that_goes_on_after_the_peers_end_is_bounded() -> None:
    class Stubborn(Echo):
        def receive_eof(self, now: float) -> list[Event]:
            return []

    bench = Bench(Stubborn(), write_stall_s=30)
    bench.peer.shutdown(1)
    bench.carrier.readable()
    assert not bench.carrier.over
    assert bench.carrier.wakes_at < inf
    bench.carrier.expire(bench.carrier.wakes_at)
    assert bench.carrier.over


def test_an_alarm_for_nothing_changes_nothing() -> None:
    bench = Bench(Echo())
    bench.engine.deadline = 1e12
    bench.carrier.flush()
    assert bench.carrier.wakes_at == 1e12
    bench.carrier.expire(0.0)
    assert bench.carrier.wakes_at == 1e12
    assert bench.engine.ticks == []


@pytest.mark.req("SE18")
def test_input_is_refused_above_the_bound_and_taken_again_below() -> None:
    bench = Bench(Echo(repeat=10), output_max=100_000)
    taken = 0
    for _ in range(200):
        if not bench.carrier.wants_read:
            break
        bench.peer.send(bytes(4_000))
        taken += bench.carrier.readable()
    assert not bench.carrier.wants_read
    assert 300_000 < 10 * taken < 800_000
    heard = 0
    while bench.carrier.wants_write:
        heard += len(bench.peer.recv(1_000_000))
        bench.carrier.writable()
    assert bench.carrier.wants_read
    heard += len(bench.peer.recv(1_000_000))
    assert heard == 10 * taken


def test_a_tick_between_two_alarms_may_wake_tasks() -> None:
    """The host has to run them before it waits for input."""
    bench = Bench(Echo())
    bench.engine.notifies = False
    bench.engine.say(b"one")
    bench.engine.deadline = 0.0
    bench.carrier.notified = False
    bench.carrier.flush()
    assert bench.channel.sends == [3]
    assert bench.carrier.notified
