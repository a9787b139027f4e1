"""Administration and messages at one port, by one connection string: Azure's SDK for Python, unmodified."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import jwt
import pytest
from amqp_rt_servicebus.declarations import Queue, SasKey
from amqp_rt_servicebus.testing import ServiceBus
from driven import Dialler

from amqp_rt import Jwt

pytestmark = [
    pytest.mark.req("Z19", "Z21"),
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


# --- Web tokens --------------------------------------------------------------------------------

SECRET = b"0123456789abcdef0123456789abcdef"
AUDIENCE = "https://servicebus.azure.net"


class Credential:
    """Credential with a token of its issuer for some roles."""

    def __init__(self, *roles: str) -> None:
        self._roles = [f"Azure Service Bus Data {each}" for each in roles]

    def get_token(self, *scopes: str, **options: Any) -> Any:
        from azure.core.credentials import AccessToken

        until = int(time.time()) + 600
        claims = {"aud": AUDIENCE, "exp": until, "roles": self._roles}
        return AccessToken(jwt.encode(claims, SECRET, algorithm="HS256"), until)


@pytest.fixture
def guarded() -> Iterator[ServiceBus]:
    with ServiceBus(Queue("q"), validators=[Jwt(audience=AUDIENCE, secret=SECRET)]) as bus:
        yield bus


def test_a_role_administers_with_a_web_token(guarded: ServiceBus) -> None:
    from azure.core.exceptions import ClientAuthenticationError
    from azure.servicebus.management import ServiceBusAdministrationClient

    place = f"localhost:{guarded.port}"
    options = {"retry_total": 0, **guarded.admin_options}
    with ServiceBusAdministrationClient(place, Credential("Owner"), **options) as admin:
        admin.create_queue("new", forward_to="q")
        assert admin.get_queue("new").forward_to.endswith("/q")
    with (
        ServiceBusAdministrationClient(place, Credential("Sender"), **options) as admin,
        pytest.raises(ClientAuthenticationError),
    ):
        admin.create_queue("more")


def test_a_role_sends_or_receives_with_a_web_token(guarded: ServiceBus) -> None:
    from azure.servicebus import ServiceBusClient, ServiceBusMessage, TransportType
    from azure.servicebus.exceptions import ServiceBusError

    options = {
        "connection_verify": guarded.ca_file,
        "custom_endpoint_address": f"sb://localhost:{guarded.port}",
        "transport_type": TransportType.Amqp,
        "retry_total": 0,
    }
    with (
        ServiceBusClient("localhost", Credential("Sender"), **options) as client,
        client.get_queue_sender("q") as sender,
    ):
        sender.send_messages(ServiceBusMessage("a"))
        with pytest.raises(ServiceBusError):
            client.get_queue_receiver("q").receive_messages(1, max_wait_time=5)
    with (
        ServiceBusClient("localhost", Credential("Receiver"), **options) as client,
        client.get_queue_receiver("q") as receiver,
    ):
        assert [str(each) for each in receiver.receive_messages(1, max_wait_time=5)] == ["a"]


# --- Limits of the service ---------------------------------------------------------------------


def test_a_message_is_no_larger_than_at_the_service() -> None:
    from azure.servicebus import ServiceBusMessage
    from azure.servicebus.exceptions import MessageSizeExceededError

    with ServiceBus(Queue("q"), realistic=True) as bus:
        dialler = Dialler("threads")
        client = dialler.client(bus.connection_string)
        with client.get_queue_sender("q") as sender:
            sender.send_messages(ServiceBusMessage(b"x" * 250_000))
            for large in (
                ServiceBusMessage(b"x" * 270_000),
                [ServiceBusMessage(b"x" * 140_000)] * 2,
            ):
                with pytest.raises(MessageSizeExceededError):
                    sender.send_messages(large)
        dialler.close()
        assert bus.queue("q").stats.active == 1
