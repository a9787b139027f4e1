"""Scenarios of the SDKs' own samples: iterators, prefetching, renewed locks, pools of workers, subscriptions to messages."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from amqp_rt_servicebus.declarations import Queue
from amqp_rt_servicebus.testing import ServiceBus
from driven import Dialler, Driven, Javascript

pytestmark = [pytest.mark.req("Z21"), pytest.mark.foreign, pytest.mark.slow]

#: Seconds that receivers wait for messages of which there are enough, and for those that do not come.
WAIT_S, SOON_S = 5, 0.5


@pytest.fixture
def bus() -> Iterator[ServiceBus]:
    with ServiceBus(Queue("q", lock_duration=5), Queue("s", requires_session=True)) as bus:
        yield bus


@pytest.fixture
def client(bus: ServiceBus, azure_python: None) -> Iterator[Driven]:
    dialler = Dialler("threads")
    yield dialler.client(bus.connection_string)
    dialler.close()


# --- Python ------------------------------------------------------------------------------------


def test_a_receiver_is_an_iterator_of_messages(bus: ServiceBus, client: Driven) -> None:
    for number in range(10):
        bus.queue("q").send(b"%d" % number)
    found = []
    with client.get_queue_receiver("q", max_wait_time=SOON_S) as receiver:
        for message in receiver.target:
            found.append(str(message))
            receiver.complete_message(message)
    assert found == [str(number) for number in range(10)]
    bus.queue("q").wait_until(lambda sizes: not sizes.active)


def test_prefetched_messages_are_released_when_their_receiver_closes(
    bus: ServiceBus, client: Driven
) -> None:
    for number in range(4):
        bus.queue("q").send(b"%d" % number)
    with client.get_queue_receiver("q", prefetch_count=4) as receiver:
        (message,) = receiver.receive_messages(1, max_wait_time=WAIT_S)
        receiver.complete_message(message)
        bus.queue("q").wait_until(lambda sizes: sizes.active == 3)
    with client.get_queue_receiver("q") as receiver:
        found = receiver.receive_messages(3, max_wait_time=WAIT_S)
        while len(found) < 3:
            found += receiver.receive_messages(3, max_wait_time=WAIT_S)
        assert [(str(each), each.delivery_count) for each in found] == [
            ("1", 0),
            ("2", 0),
            ("3", 0),
        ]


def test_a_lock_is_renewed_as_long_as_its_message_is_processed(
    bus: ServiceBus, client: Driven
) -> None:
    from azure.servicebus import AutoLockRenewer

    bus.queue("q").send(b"a")
    with (
        AutoLockRenewer(max_lock_renewal_duration=60) as renewer,
        client.get_queue_receiver("q") as receiver,
    ):
        (message,) = receiver.receive_messages(1, max_wait_time=WAIT_S)
        before = message.locked_until_utc
        renewer.register(receiver.target, message)
        deadline = time.monotonic() + 30
        # The SDK renews by its own clock, in the last seconds of the lock.
        while message.locked_until_utc == before and time.monotonic() < deadline:
            time.sleep(0.05)
        bus.advance(4)
        assert message.auto_renew_error is None
        receiver.complete_message(message)
    assert bus.queue("q").stats.active == 0


def test_sessions_with_messages_or_a_state_are_listed(bus: ServiceBus, client: Driven) -> None:
    for number in range(205):
        bus.queue("s").send("a", group_id=f"{number:03}")
    names = list(client.target.list_queue_sessions("s"))
    assert sorted(names) == [f"{number:03}" for number in range(205)]
    with client.get_queue_receiver("s", session_id="idle") as receiver:
        receiver.session.set_state("step")
    recent = datetime.now(UTC) - timedelta(minutes=1)
    assert list(client.target.list_queue_sessions("s", state_updated_after=recent)) == ["idle"]


def test_workers_share_the_messages_of_a_queue(bus: ServiceBus, azure_python: None) -> None:
    done: list[list[str]] = []

    def work() -> None:
        dialler = Dialler("threads")
        found: list[str] = []
        with dialler.client(bus.connection_string).get_queue_receiver("q") as receiver:
            while messages := receiver.receive_messages(5, max_wait_time=SOON_S):
                for each in messages:
                    receiver.complete_message(each)
                    found.append(str(each))
        dialler.close()
        done.append(found)

    for number in range(60):
        bus.queue("q").send(b"%d" % number)
    workers = [threading.Thread(target=work) for _ in range(3)]
    for each in workers:
        each.start()
    for each in workers:
        each.join()
    assert sorted(int(each) for found in done for each in found) == list(range(60))


def test_workers_take_sessions_until_none_is_left(bus: ServiceBus, client: Driven) -> None:
    from azure.servicebus import NEXT_AVAILABLE_SESSION
    from azure.servicebus.exceptions import OperationTimeoutError

    for session in "abc":
        for number in range(3):
            bus.queue("s").send(f"{session}{number}".encode(), group_id=session)
    found: dict[str, list[str]] = {}
    while True:
        receiver = client.get_queue_receiver(
            "s", session_id=NEXT_AVAILABLE_SESSION, max_wait_time=SOON_S
        )
        try:
            with receiver:
                bodies: list[str] = []
                while messages := receiver.receive_messages(3):
                    for each in messages:
                        receiver.complete_message(each)
                        bodies.append(str(each))
                found[receiver.session.session_id] = bodies
        except OperationTimeoutError:
            break
    assert found == {each: [f"{each}{number}" for number in range(3)] for each in "abc"}


# --- JavaScript --------------------------------------------------------------------------------


@pytest.fixture
def javascript(bus: ServiceBus, azure_javascript: str) -> Iterator[Javascript]:
    client = Javascript(azure_javascript, bus.connection_string)
    yield client
    client.close()


def test_messages_are_pushed_to_a_subscriber(bus: ServiceBus, javascript: Javascript) -> None:
    for number in range(20):
        bus.queue("q").send(b"%d" % number)
    javascript("open", "r", ["q"])
    found: list[Any] = javascript("subscribe", "r", 20, {"maxConcurrentCalls": 4})
    assert sorted(found) == list(range(20))
    bus.queue("q").wait_until(lambda sizes: not sizes.active)


def test_a_message_whose_processing_fails_is_pushed_again(
    bus: ServiceBus, javascript: Javascript
) -> None:
    bus.queue("q").send(b"a")
    javascript("open", "r", ["q"])
    assert javascript("subscribe", "r", 3, {}, "fail") == ["a"] * 3
    bus.queue("q").wait_until(lambda sizes: sizes.active == 1)
    (held,) = bus.queue("q").messages
    assert held.delivery_count >= 2


def test_messages_of_a_session_are_pushed_in_order(bus: ServiceBus, javascript: Javascript) -> None:
    for number in range(10):
        bus.queue("s").send(b"%d" % number, group_id="x")
    assert javascript("accept", "r", ["s"], None) == "x"
    assert javascript("subscribe", "r", 10) == list(range(10))
    bus.queue("s").wait_until(lambda sizes: not sizes.active)
