"""Tests of the shop: the unmodified SDK against a namespace in the process of the test.

Run them with ``pytest`` in this folder; ``pip install amqp-rt-servicebus azure-servicebus pytest`` is all they need.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from amqp_rt_servicebus.testing import ServiceBus
from azure.servicebus import ServiceBusClient, ServiceBusMessage
from azure.servicebus.exceptions import MessageLockLostError, ServiceBusAuthorizationError
from shop import Shop

NAMESPACE = Path(__file__).parent / "namespace.toml"

# Each test has a namespace of its own, with the entities of the file.
pytestmark = pytest.mark.servicebus(config=NAMESPACE)


@pytest.fixture
def shop(servicebus: ServiceBus) -> Iterator[Shop]:
    with Shop(servicebus.connection_string, {"apple": 2}) as opened:
        yield opened


def test_an_order_is_sold_and_reported(shop: Shop, servicebus: ServiceBus) -> None:
    shop.place("7", "apple")

    assert shop.work() == ["7"]
    assert shop.stock == {"apple": 1}
    assert servicebus.queue("orders").stats.active == 0
    (event,) = servicebus.subscription("events", "all").messages
    assert event.message.subject == "sold"


def test_the_rule_of_a_subscription_selects_and_changes_events(
    shop: Shop, servicebus: ServiceBus
) -> None:
    shop.place("7", "apple", region="eu")
    shop.place("8", "apple", region="us")
    shop.work()

    (event,) = servicebus.subscription("events", "eu").messages
    assert event.application_properties["invoice"] == "required"
    assert len(servicebus.subscription("events", "all").messages) == 2


def test_an_order_that_is_sent_twice_is_sold_once(shop: Shop, servicebus: ServiceBus) -> None:
    shop.place("7", "apple")
    shop.place("7", "apple")
    assert shop.work() == ["7"]

    servicebus.advance(601)  # the queue has forgotten the number
    shop.place("7", "apple")
    assert shop.work() == ["7"]


def test_a_malformed_order_is_a_dead_letter_with_its_reason(
    shop: Shop, servicebus: ServiceBus
) -> None:
    servicebus.queue("orders").send("no JSON")

    assert shop.work() == []
    (dead,) = servicebus.queue("orders").dead_letters
    assert dead.reason == "Malformed"
    assert "JSONDecodeError" in str(dead.description)


def test_an_order_whose_workers_crash_is_a_dead_letter_in_the_end(
    shop: Shop, servicebus: ServiceBus
) -> None:
    shop.place("7", "apple")
    orders = servicebus.queue("orders")
    for _ in range(3):
        client = ServiceBusClient.from_connection_string(servicebus.connection_string)
        with client, client.get_queue_receiver("orders", max_wait_time=5) as receiver:
            assert len(receiver.receive_messages()) == 1  # and settle nothing
        servicebus.advance(31)  # the lock ends

    assert orders.stats.active == 0
    assert orders.dead_letters[0].reason == "MaxDeliveryCountExceeded"


def test_a_worker_that_is_too_slow_has_lost_the_order(shop: Shop, servicebus: ServiceBus) -> None:
    shop.place("7", "apple")
    client = ServiceBusClient.from_connection_string(servicebus.connection_string)
    with client, client.get_queue_receiver("orders", max_wait_time=5) as receiver:
        (message,) = receiver.receive_messages()
        servicebus.expire_locks()
        with pytest.raises(MessageLockLostError):
            receiver.complete_message(message)

    assert shop.work() == ["7"]  # another worker has it


def test_an_order_without_stock_waits_for_it(shop: Shop, servicebus: ServiceBus) -> None:
    shop.place("7", "pear")
    assert shop.work() == []

    (deferred,) = servicebus.queue("orders").deferred
    shop.stock["pear"] = 1
    assert shop.sell_deferred(deferred.sequence_number) == "7"
    assert servicebus.queue("orders").deferred == []


def test_a_reminder_comes_at_its_time_and_not_if_it_was_cancelled(
    shop: Shop, servicebus: ServiceBus
) -> None:
    in_a_day = datetime.now(UTC) + timedelta(days=1)
    shop.remind("water the plants", in_a_day)
    shop.forget(shop.remind("feed the cat", in_a_day))
    reminders = servicebus.queue("reminders")
    assert reminders.messages == []

    servicebus.advance(86_400 + 60)
    assert [str(each.body, "utf-8") for each in reminders.messages] == ["water the plants"]


def test_each_customer_has_a_cart_that_remembers_its_sum(shop: Shop) -> None:
    shop.put_into_cart("ada", 3)
    shop.put_into_cart("bob", 100)
    shop.put_into_cart("ada", 4)

    assert shop.add_up("ada") == 7
    shop.put_into_cart("ada", 5)
    assert shop.add_up("ada") == 12
    assert shop.add_up("bob") == 100


def test_the_shop_survives_a_lost_connection(shop: Shop, servicebus: ServiceBus) -> None:
    shop.place("7", "apple")
    servicebus.disconnect()

    assert shop.work() == ["7"]


def test_the_shop_survives_a_busy_service(shop: Shop, servicebus: ServiceBus) -> None:
    servicebus.fault("com.microsoft:server-busy", on="send", times=2)
    shop.place("7", "apple")  # the third attempt

    assert shop.work() == ["7"]


@pytest.mark.servicebus(config=NAMESPACE.with_name("keys.toml"))
def test_a_clerk_may_send_and_not_receive(servicebus: ServiceBus) -> None:
    clerk = servicebus.connection_string_for("clerk")
    with ServiceBusClient.from_connection_string(clerk, retry_total=0) as client:
        with client.get_queue_sender("orders") as sender:
            sender.send_messages(ServiceBusMessage(json.dumps({"number": "7"})))
        with pytest.raises(ServiceBusAuthorizationError):
            client.get_queue_receiver("orders").receive_messages()
    assert servicebus.queue("orders").stats.active == 1
