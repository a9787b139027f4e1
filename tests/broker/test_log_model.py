"""A log against lists: whatever is sent, read, held and dropped, both agree on every record."""

from __future__ import annotations

from typing import Any

import pytest
from brokers import Receiving, World
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from runs import machine_settings

from amqp_rt.broker.log.log import MessageLog
from amqp_rt.broker.nodes import Log
from amqp_rt.message import Message
from amqp_rt.outcomes import ACCEPTED, RELEASED, rejected
from amqp_rt.values import Described, Symbol, Timestamp

PARTITIONS = 2
AGE_S = 60

_partitions = st.integers(0, PARTITIONS - 1)


class Reader:
    """A link of the model: where it is in each partition, and what it should have got."""

    def __init__(self, link: Receiving, places: dict[int, int], since: int = -1) -> None:
        self.link = link
        self.places = places
        self.since = since
        self.credit = 0
        self.got: dict[int, list[int]] = {partition: [] for partition in places}
        #: How many of its deliveries have been compared, and how many were settled.
        self.compared = 0
        self.settled = 0


class LogModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World(Log("l", partitions=PARTITIONS, max_age_s=AGE_S))
        client = self.world.client()
        self.senders = [client.sender(f"l/partitions/{index}") for index in range(PARTITIONS)]
        self.whole = client.sender("l")
        #: Partition → the times of its records, by offset; and the first that may still be there.
        self.times: list[list[int]] = [[] for _ in range(PARTITIONS)]
        self.turn = 0
        self.readers: list[Reader] = []
        #: A hold that lasts: its offset in each partition.
        self.hold: dict[int, int] = {}

    @property
    def now(self) -> int:
        return int(self.world.time.now * 1000)

    def first(self, partition: int) -> int:
        """The first offset that is there, as the log says."""
        return self.log.partitions[partition].first

    @property
    def log(self) -> MessageLog:
        held: Any = self.world.host.space().find("l").held
        assert isinstance(held, MessageLog)
        return held

    def append(self, partition: int) -> None:
        self.times[partition].append(self.now)
        for reader in self.readers:
            self.serve(reader)

    def serve(self, reader: Reader) -> None:
        """Let *reader* have what it has credit for; the order among partitions is not compared."""
        for partition in reader.places:
            place = max(reader.places[partition], self.first(partition))
            times = self.times[partition]
            while place < len(times) and (reader.credit > 0 or times[place] < reader.since):
                if times[place] >= reader.since:
                    reader.got[partition].append(place)
                    reader.credit -= 1
                place += 1
            reader.places[partition] = place

    # --- Rules ---

    @rule(partition=_partitions, count=st.integers(1, 10))
    def send(self, partition: int, count: int) -> None:
        for _ in range(count):
            self.senders[partition].send(len(self.times[partition]))
            self.append(partition)

    @rule()
    def send_anywhere(self) -> None:
        partition = self.turn % PARTITIONS
        self.turn += 1
        self.whole.send(len(self.times[partition]))
        self.append(partition)

    @rule(seconds=st.sampled_from([1.0, 3.0, 10.0, 25.0, 57.0, 80.0]))
    def wait(self, seconds: float) -> None:
        self.world.time.now += seconds

    @rule()
    def sweep(self) -> None:
        self.world.host.sweep()

    @rule(
        data=st.data(),
        partition=_partitions,
        kind=st.sampled_from(["first", "last", "next", "offset", "time", "none"]),
    )
    def attach(self, data: st.DataObject, partition: int, kind: str) -> None:
        count = len(self.times[partition])
        first = self.first(partition)
        since = -1
        spec: Any = kind
        place = count
        if kind == "first":
            place = first
        elif kind == "last":
            place = max(first, count - 1)
        elif kind == "offset":
            spec = data.draw(st.integers(0, count + 3))
            place = max(first, spec)
        elif kind == "time":
            since = self.now - data.draw(st.integers(-5_000, 100_000))
            spec = Timestamp(since)
            found = [at for at in range(first, count) if self.times[partition][at] >= since]
            place = found[0] if found else count
        asked = {Symbol("at"): Described(Symbol("rabbitmq:stream-offset-spec"), spec)}
        link = self.world.client().receiver(
            f"l/partitions/{partition}", filter=None if kind == "none" else asked
        )
        assert link.error is None
        self.readers.append(Reader(link, {partition: place}, since))

    @precondition(lambda self: self.readers)
    @rule(data=st.data(), credit=st.integers(1, 50))
    def grant(self, data: st.DataObject, credit: int) -> None:
        reader = data.draw(st.sampled_from(self.readers))
        reader.credit = credit
        self.serve(reader)
        reader.link.grant(credit)

    @precondition(lambda self: self.readers)
    @rule(data=st.data(), outcome=st.sampled_from([ACCEPTED, RELEASED, rejected("amqp:x", "y")]))
    def settle(self, data: st.DataObject, outcome: Any) -> None:
        """Whatever is said, nothing changes."""
        reader = data.draw(st.sampled_from(self.readers))
        for delivery in reader.link.endpoint.deliveries[reader.settled :]:
            delivery.settle(outcome)
        reader.settled = len(reader.link.endpoint.deliveries)
        self.world.pump()

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        reader = data.draw(st.sampled_from(self.readers))
        self.readers.remove(reader)
        reader.link.detach()

    @rule(data=st.data(), partition=_partitions)
    def take_hold(self, data: st.DataObject, partition: int) -> None:
        offset = data.draw(st.integers(0, len(self.times[partition])))
        # Records that are gone do not return.
        self.hold = {partition: max(offset, self.first(partition))}
        self.log.holds["me"] = ({partition: offset}, self.world.time.now + 1_000_000)

    @rule()
    def release_hold(self) -> None:
        self.hold = {}
        self.log.holds.clear()

    # --- Both agree ---

    @invariant()
    def check_received(self) -> None:
        for reader in self.readers:
            deliveries = reader.link.endpoint.deliveries
            for partition, expected in reader.got.items():
                assert len(deliveries) == len(expected)
                for delivery, offset in list(zip(deliveries, expected, strict=True))[
                    reader.compared :
                ]:
                    message = Message.decode(delivery.payload)
                    assert message.body == offset
                    assert message.message_annotations["x-opt-offset"] == str(offset)
                    assert message.message_annotations["x-opt-partition-id"] == str(partition)
            reader.compared = len(deliveries)
            assert reader.link.link.credit == reader.credit

    @invariant()
    def check_retained(self) -> None:
        stats = self.world.log_stats("l")
        for partition in stats.partitions:
            times = self.times[partition.partition]
            assert partition.next == len(times)
            assert 0 <= partition.first <= partition.next
            # Nothing goes that is young, or held.
            assert partition.first <= self.hold.get(partition.partition, partition.next)
            assert all(at <= self.now - AGE_S * 1000 for at in times[: partition.first])
        assert self.log.memory.held == sum(each.held for each in self.log.partitions)

    @invariant()
    def check_aged(self) -> None:
        self.world.host.sweep()
        for partition in range(PARTITIONS):
            times = self.times[partition]
            old = sum(1 for at in times if at < self.now - AGE_S * 1000)
            block_ms = AGE_S * 1000 // 8
            old_blocks = sum(1 for at in times if at < self.now - AGE_S * 1000 - block_ms)
            if partition not in self.hold:
                assert old_blocks <= self.first(partition) <= old


LogModel.TestCase.settings = machine_settings()
TestLog = pytest.mark.slow(pytest.mark.req("K4", "B27")(LogModel.TestCase))
