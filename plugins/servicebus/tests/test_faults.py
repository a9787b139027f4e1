"""Faults that a test injects, as clients of Azure's SDK for Python see them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from amqp_rt_servicebus.declarations import Queue
from amqp_rt_servicebus.faults import FAULTS_MAX, Fault, Faults
from amqp_rt_servicebus.testing import ServiceBus
from driven import Dialler, Driven

from amqp_rt.outcomes import Error

BUSY = "com.microsoft:server-busy"
WAIT_S = 5


# --- Without a client --------------------------------------------------------------------------


def test_faults_occur_in_the_order_in_which_they_were_added() -> None:
    faults = Faults()
    for name, times in (("a", 2), ("b", 1)):
        faults.add(Fault(error=Error(name), on="send", times=times))
    found = [faults.take("send", "q") for _ in range(4)]
    assert [each.condition if each else None for each in found] == ["a", "a", "b", None]


def test_a_fault_waits_for_its_occasion_and_its_entity() -> None:
    faults = Faults()
    faults.add(Fault(error=Error("a"), on="send", path="q"))
    assert faults.take("settle", "Q") is None
    assert faults.take("send", "other") is None
    assert faults.take("send", "Q") == Error("a")
    assert faults.clear() == 0


def test_waiting_faults_are_bounded() -> None:
    faults = Faults()
    for _ in range(FAULTS_MAX):
        faults.add(Fault(error=Error("a"), on="send"))
    with pytest.raises(ValueError, match="wait for their occasion already"):
        faults.add(Fault(error=Error("a"), on="send"))
    assert faults.clear() == FAULTS_MAX


@pytest.mark.parametrize(
    ("options", "said"),
    [({"on": "nothing"}, "not one of attach, send"), ({"times": 0}, "at least once")],
)
def test_a_fault_that_could_never_occur_is_refused(options: dict[str, Any], said: str) -> None:
    with ServiceBus() as bus, pytest.raises(ValueError, match=said):
        bus.fault(BUSY, **options)


# --- Azure's SDK for Python --------------------------------------------------------------------

sdk = pytest.mark.usefixtures("azure_python")


@pytest.fixture
def bus() -> Iterator[ServiceBus]:
    with ServiceBus(Queue("q"), Queue("other")) as bus:
        yield bus


def send(client: Driven, queue: str = "q") -> None:
    from azure.servicebus import ServiceBusMessage

    with client.get_queue_sender(queue) as sender:
        sender.send_messages(ServiceBusMessage("a"))


@sdk
@pytest.mark.foreign
@pytest.mark.slow
def test_a_message_is_rejected_as_often_as_asked(
    bus: ServiceBus, client: Driven, dialler: Dialler
) -> None:
    from azure.servicebus.exceptions import ServiceBusServerBusyError

    bus.fault(BUSY, on="send", entity="Q", description="too much")
    send(client, "other")
    with pytest.raises(ServiceBusServerBusyError, match="too much"):
        send(client)
    bus.fault(BUSY, on="send", times=2)
    send(dialler.client(bus.connection_string, retry_total=2, retry_backoff_factor=0.01))
    assert (bus.queue("q").stats.active, bus.queue("other").stats.active) == (1, 1)


@sdk
@pytest.mark.foreign
@pytest.mark.slow
def test_a_link_is_refused(bus: ServiceBus, client: Driven) -> None:
    from azure.servicebus.exceptions import MessagingEntityDisabledError

    bus.fault("com.microsoft:entity-disabled", on="attach")
    with pytest.raises(MessagingEntityDisabledError):
        send(client)
    send(client)


@sdk
@pytest.mark.foreign
@pytest.mark.slow
def test_a_receiver_is_detached_and_attaches_again(bus: ServiceBus, dialler: Dialler) -> None:
    client = dialler.client(bus.connection_string, retry_total=1, retry_backoff_factor=0.01)
    bus.queue("q").send("a")
    bus.fault("amqp:link:detach-forced", on="receive")
    with client.get_queue_receiver("q") as receiver:
        (message,) = receiver.receive_messages(1, max_wait_time=WAIT_S)
        assert message.delivery_count == 0
        receiver.complete_message(message)
    bus.queue("q").wait_until(lambda sizes: not sizes.active)


@sdk
@pytest.mark.foreign
@pytest.mark.slow
def test_a_message_stays_locked_if_its_settlement_fails(bus: ServiceBus, client: Driven) -> None:
    from azure.servicebus.exceptions import ServiceBusError

    bus.queue("q").send("a")
    # The SDK settles by an operation if the link refuses.
    bus.fault(BUSY, on="settle", times=2)
    with client.get_queue_receiver("q") as receiver:
        (message,) = receiver.receive_messages(1, max_wait_time=WAIT_S)
        with pytest.raises(ServiceBusError):
            receiver.complete_message(message)
        (held,) = bus.queue("q").messages
        assert (held.locked, held.delivery_count) == (True, 0)
    assert bus.expire_locks() == 1


@sdk
@pytest.mark.foreign
@pytest.mark.slow
def test_an_operation_fails(bus: ServiceBus, client: Driven) -> None:
    from azure.servicebus.exceptions import ServiceBusServerBusyError

    bus.queue("q").send("a")
    bus.fault(BUSY, on="peek-message")
    with client.get_queue_receiver("q") as receiver:
        with pytest.raises(ServiceBusServerBusyError):
            receiver.peek_messages(1)
        assert len(receiver.peek_messages(1)) == 1
