"""The scenarios of the sample programs of Azure's SDK for Python that need nothing else of Azure."""

from __future__ import annotations

import base64
import hmac
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote

import pytest
from amqp_rt_servicebus.declarations import Queue, SasKey, Subscription, Topic
from amqp_rt_servicebus.testing import ServiceBus
from driven import Dialler, Driven

pytestmark = [
    pytest.mark.req("Z21"),
    pytest.mark.foreign,
    pytest.mark.slow,
    pytest.mark.usefixtures("azure_python"),
]

WAIT_S = 5
KEY = "c2VjcmV0"


@pytest.fixture
def bus() -> Iterator[ServiceBus]:
    with ServiceBus(
        Queue("q", lock_duration=5),
        Queue("s", requires_session=True, lock_duration=5),
        Topic("t", [Subscription("all"), Subscription("none", [])]),
        keys={"root": SasKey(KEY)},
    ) as bus:
        yield bus


def send(client: Driven, *bodies: str, **options: Any) -> None:
    from azure.servicebus import ServiceBusMessage

    with client.get_queue_sender("s" if "session_id" in options else "q") as sender:
        sender.send_messages([ServiceBusMessage(body, **options) for body in bodies])


def receive(receiver: Driven, count: int = 1) -> list[Any]:
    found: list[Any] = []
    while len(found) < count:
        more = receiver.receive_messages(count - len(found), max_wait_time=WAIT_S)
        assert more
        found += more
    return found


# --- Locks ---------------------------------------------------------------------------------------


def test_the_lock_of_a_session_is_renewed_in_the_background(client: Driven) -> None:
    from azure.servicebus import AutoLockRenewer

    send(client, "a", session_id="a")
    failures: list[Any] = []
    with AutoLockRenewer() as renewer, client.get_queue_receiver("s", session_id="a") as receiver:
        (message,) = receive(receiver)
        renewed = receiver.target.session
        begun = renewed.locked_until_utc
        renewer.register(
            receiver.target,
            renewed,
            max_lock_renewal_duration=30,
            on_lock_renew_failure=lambda *found: failures.append(found),
        )
        until = time.monotonic() + WAIT_S
        while renewed.locked_until_utc == begun and time.monotonic() < until:
            time.sleep(0.05)
        assert renewed.locked_until_utc > begun
        receiver.complete_message(message)
    assert failures == []


# --- Failures ------------------------------------------------------------------------------------


def test_a_dead_letter_is_corrected_and_sent_again(bus: ServiceBus, client: Driven) -> None:
    from azure.servicebus import ServiceBusMessage, ServiceBusSubQueue

    send(client, "unreadable")
    with client.get_queue_receiver("q") as receiver:
        receiver.dead_letter_message(receive(receiver)[0], reason="Unreadable")
    with (
        client.get_queue_receiver("q", sub_queue=ServiceBusSubQueue.DEAD_LETTER) as dead,
        client.get_queue_sender("q") as sender,
    ):
        (letter,) = receive(dead)
        assert letter.dead_letter_reason == "Unreadable"
        sender.send_messages(ServiceBusMessage("readable", subject=letter.subject))
        dead.complete_message(letter)

    bus.queue("q").wait_until(lambda sizes: not sizes.dead_letters)
    assert [each.body for each in bus.queue("q").messages] == [b"readable"]


def test_a_batch_that_is_full_says_so_and_the_rest_is_sent_in_another(
    bus: ServiceBus, client: Driven
) -> None:
    from azure.servicebus import ServiceBusMessage
    from azure.servicebus.exceptions import MessageSizeExceededError

    body = "a" * 300_000
    with client.get_queue_sender("q") as sender:
        left, batches = 8, 0
        while left:
            batch = sender.create_message_batch()
            try:
                while left:
                    batch.add_message(ServiceBusMessage(body))
                    left -= 1
            except ValueError:
                pass
            sender.send_messages(batch)
            batches += 1
        with pytest.raises((MessageSizeExceededError, ValueError)):
            sender.send_messages([ServiceBusMessage(body)] * 8)
    assert batches == 3
    assert bus.queue("q").stats.active == 8


def test_a_receiver_recovers_from_a_lost_connection(bus: ServiceBus, dialler: Dialler) -> None:
    client = dialler.client(bus.connection_string, retry_total=3, retry_backoff_factor=0.05)
    send(client, "a", "b")
    with client.get_queue_receiver("q") as receiver:
        receiver.complete_message(receive(receiver)[0])
        bus.disconnect()
        (message,) = receive(receiver)
        receiver.complete_message(message)
        assert str(message) == "b"


# --- Schedules ---------------------------------------------------------------------------------


def test_messages_of_a_topic_are_scheduled_and_cancelled(bus: ServiceBus, client: Driven) -> None:
    from azure.servicebus import ServiceBusMessage

    at = datetime.now(UTC) + timedelta(hours=1)
    with client.get_topic_sender("t") as sender:
        numbers = sender.schedule_messages([ServiceBusMessage("1"), ServiceBusMessage("2")], at)
        sender.cancel_scheduled_messages(numbers[0])
    bus.advance(3601)

    assert [each.body for each in bus.subscription("t", "all").messages] == [b"2"]


# --- Rules ---------------------------------------------------------------------------------------


def test_subscriptions_get_what_rules_of_the_administration_select(
    bus: ServiceBus, client: Driven
) -> None:
    from azure.servicebus import ServiceBusMessage
    from azure.servicebus.management import (
        CorrelationRuleFilter,
        ServiceBusAdministrationClient,
        SqlRuleAction,
        SqlRuleFilter,
        TrueRuleFilter,
    )

    rules: dict[str, Any] = {
        "true": TrueRuleFilter(),
        "sql": SqlRuleFilter("color = 'blue' AND quantity = 10"),
        "correlation": CorrelationRuleFilter(label="red", correlation_id="high"),
    }
    with ServiceBusAdministrationClient.from_connection_string(
        bus.connection_string, **bus.admin_options
    ) as admin:
        for name, condition in rules.items():
            admin.create_subscription("t", name)
            action = SqlRuleAction("SET quantity = quantity * 2") if name == "sql" else None
            admin.create_rule("t", name, "own", filter=condition, action=action)
            admin.delete_rule("t", name, "$Default")
    with client.get_topic_sender("t") as sender:
        sender.send_messages(
            [
                ServiceBusMessage(
                    "x",
                    subject=color,
                    correlation_id=priority,
                    application_properties={"color": color, "quantity": quantity},
                )
                for color, quantity, priority in (
                    ("blue", 10, "low"),
                    ("red", 10, "high"),
                    ("blue", 5, "high"),
                )
            ]
        )

    counts = {name: bus.subscription("t", name).stats.active for name in rules}
    assert counts == {"true": 3, "sql": 1, "correlation": 1}
    (changed,) = bus.subscription("t", "sql").messages
    assert changed.application_properties["quantity"] == 20


# --- Bodies of each kind -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "body"),
    [("data_body", [b"aa", b"bb"]), ("sequence_body", [[1, 2], [3]]), ("value_body", {"a": 1})],
)
def test_annotated_messages_arrive_with_all_sections(client: Driven, kind: str, body: Any) -> None:
    from azure.servicebus.amqp import (
        AmqpAnnotatedMessage,
        AmqpMessageHeader,
        AmqpMessageProperties,
    )

    message = AmqpAnnotatedMessage(
        **{kind: body},
        header=AmqpMessageHeader(priority=7, durable=True),
        properties=AmqpMessageProperties(subject="s", message_id="one"),
        application_properties={"key": "value"},
        annotations={"x-mine": 1},
        footer={"sum": 2},
    )
    with client.get_queue_sender("q") as sender:
        sender.send_messages(message)
    with client.get_queue_receiver("q") as receiver:
        raw = receive(receiver)[0].raw_amqp_message
    found = raw.body if kind == "value_body" else list(raw.body)

    def plain(value: Any) -> Any:
        if isinstance(value, bytes):
            return value.decode()
        if isinstance(value, dict):
            return {plain(key): plain(each) for key, each in value.items()}
        return value

    assert (found if kind == "data_body" else plain(found)) == body
    assert raw.header.priority == 7
    assert (plain(raw.properties.subject), plain(raw.properties.message_id)) == ("s", "one")
    assert plain(raw.application_properties) == {"key": "value"}
    assert plain(raw.annotations)["x-mine"] == 1
    assert plain(raw.footer) == {"sum": 2}


# --- Addresses and credentials -------------------------------------------------------------------


def signature(resource: str) -> str:
    """Sign a token for *resource*, as applications do that give their clients no key."""
    quoted, expiry = quote(resource, safe=""), int(time.time()) + 300
    digest = hmac.digest(KEY.encode(), f"{quoted}\n{expiry}".encode(), "sha256")
    signed = quote(base64.b64encode(digest), safe="")
    return f"SharedAccessSignature sr={quoted}&sig={signed}&se={expiry}&skn=root"


def credentials() -> dict[str, Any]:
    from azure.core.credentials import AzureNamedKeyCredential, AzureSasCredential

    return {
        "named key": AzureNamedKeyCredential("root", KEY),
        "signature": AzureSasCredential(signature("sb://shop.servicebus.windows.net/q")),
    }


@pytest.mark.parametrize("kind", ["named key", "signature"])
def test_a_client_for_the_service_is_sent_here_by_a_custom_endpoint(
    bus: ServiceBus, kind: str
) -> None:
    """Connect with the name of a namespace of the service, and no word about an emulator."""
    from azure.servicebus import ServiceBusClient, ServiceBusMessage, TransportType

    with ExitStack() as stack:
        client = stack.enter_context(
            ServiceBusClient(
                "shop.servicebus.windows.net",
                credentials()[kind],
                custom_endpoint_address=f"sb://localhost:{bus.port}",
                connection_verify=bus.ca_file,
                transport_type=TransportType.Amqp,
                retry_total=0,
            )
        )
        sender = stack.enter_context(client.get_queue_sender("q"))
        sender.send_messages(ServiceBusMessage("a"))
    assert bus.queue("q").stats.active == 1


def test_a_connection_string_has_its_parts(bus: ServiceBus) -> None:
    from azure.servicebus import parse_connection_string

    parts = parse_connection_string(bus.connection_string_for(entity="q"))
    assert parts.fully_qualified_namespace == f"127.0.0.1:{bus.port}"
    assert (parts.entity_path, parts.shared_access_key_name) == ("q", "root")
    assert parts.shared_access_key == KEY
