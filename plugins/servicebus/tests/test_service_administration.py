"""Administration and messages at one port, by one connection string: Azure's SDK for Python, unmodified."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from amqp_rt_servicebus.declarations import Queue, SasKey
from amqp_rt_servicebus.testing import ServiceBus
from driven import Dialler

pytestmark = [
    pytest.mark.filterwarnings("ignore:Testing an element's truth value"),
    pytest.mark.foreign,
    pytest.mark.slow,
    pytest.mark.usefixtures("azure_python"),
]


@pytest.fixture
def bus() -> Iterator[ServiceBus]:
    keys = {"root": SasKey("all"), "user": SasKey("using", rights=("Send", "Listen"))}
    with ServiceBus(Queue("q"), keys=keys) as bus:
        yield bus


def administrator(bus: ServiceBus, policy: str | None = None) -> Any:
    from azure.servicebus.management import ServiceBusAdministrationClient

    return ServiceBusAdministrationClient.from_connection_string(
        bus.connection_string_for(policy), retry_total=0, **bus.admin_options
    )


def test_one_connection_string_does_everything(bus: ServiceBus) -> None:
    from azure.servicebus import ServiceBusMessage
    from azure.servicebus.management import SqlRuleFilter

    with administrator(bus) as admin:
        admin.create_topic("t")
        admin.create_subscription("t", "s")
        admin.create_rule("t", "s", "eu", filter=SqlRuleFilter("region = 'eu'"))
        admin.delete_rule("t", "s", "$Default")
        assert [each.name for each in admin.list_queues()] == ["q"]
        dialler = Dialler("threads")
        client = dialler.client(bus.connection_string)
        with client.get_topic_sender("t") as sender:
            for region in ("eu", "us"):
                sender.send_messages(
                    ServiceBusMessage(region, application_properties={"region": region})
                )
        dialler.close()
        counts = admin.get_subscription_runtime_properties("t", "s")
        assert (counts.active_message_count, counts.total_message_count) == (1, 1)
        assert admin.get_topic_runtime_properties("t").subscription_count == 1
        admin.delete_topic("t")
        assert list(admin.list_topics()) == []


def test_options_of_a_queue_are_read_and_changed(bus: ServiceBus) -> None:
    from azure.core.exceptions import ResourceExistsError, ResourceNotFoundError

    with administrator(bus) as admin:
        admin.create_queue("new", max_delivery_count=3, lock_duration="PT20S")
        with pytest.raises(ResourceExistsError):
            admin.create_queue("NEW")
        queue = admin.get_queue("new")
        assert (queue.max_delivery_count, queue.lock_duration.total_seconds()) == (3, 20)
        queue.max_delivery_count = 1
        queue.forward_dead_lettered_messages_to = "q"
        admin.update_queue(queue)
        bus.queue("new").send("a")
        dialler = Dialler("threads")
        client = dialler.client(bus.connection_string)
        with client.get_queue_receiver("new", max_wait_time=5) as receiver:
            (message,) = receiver.receive_messages(1)
            receiver.abandon_message(message)
        dialler.close()
        bus.queue("q").wait_until(lambda sizes: sizes.active == 1)
        admin.delete_queue("new")
        with pytest.raises(ResourceNotFoundError):
            admin.get_queue("new")


def test_a_key_without_the_right_to_manage_administers_nothing(bus: ServiceBus) -> None:
    from azure.core.exceptions import ClientAuthenticationError

    with (
        administrator(bus, "user") as admin,
        pytest.raises(ClientAuthenticationError),
    ):
        admin.create_queue("more")
