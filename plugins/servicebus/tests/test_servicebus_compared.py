"""The page that compares the namespace with the emulator and the service: its figures are those of the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from amqp_rt_servicebus import (
    atom,
    correlations,
    entity,
    hub_events,
    hub_producers,
    hubs,
    messages,
    operations,
    quotas,
    requests,
    sql_like,
    xml_trees,
)
from amqp_rt_servicebus.bounds import DEFAULT_BOUNDS, SERVICE_BOUNDS, Bounds
from amqp_rt_servicebus.declarations import Queue
from amqp_rt_servicebus.message_quotas import ID_MAX, PROPERTIES_MAX, PROPERTY_MAX
from amqp_rt_servicebus.messages import PARTITION_SHIFT
from amqp_rt_servicebus.testing import ServiceBus
from entities import Bench
from msgspec.structs import fields

from amqp_rt.limits import DEFAULT_LIMITS

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "servicebus-compared.md"
TEXT = PAGE.read_text("utf-8")


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the tables in the section *heading*."""
    section = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert section is not None
    lines = re.findall(r"^\| (.*) \|$", section[1], re.MULTILINE)
    return [[each.strip() for each in line.split(" | ")] for line in lines]


def number(cell: str) -> int:
    found = re.match(r"\**([\d,]+)", cell)
    assert found is not None, cell
    return int(found[1].replace(",", ""))


SETTINGS = {row[1].strip("`"): row for row in rows("Bounds") if row[1].startswith("`")}
FIXED = {row[0]: row for row in rows("Bounds") if len(row) == 3}


def test_each_setting_is_on_the_page_with_its_figures() -> None:
    shown = {name: (number(row[2]), number(row[3])) for name, row in SETTINGS.items()}
    assert shown == {
        field.name: (getattr(DEFAULT_BOUNDS, field.name), getattr(SERVICE_BOUNDS, field.name))
        for field in fields(Bounds)
    }


@pytest.mark.parametrize(
    ("bound", "value"),
    [
        ("messages of a batch", messages.BATCH_MESSAGES_MAX),
        ("octets after which an answer to a peek ends", requests.PEEKED_BYTES_MAX),
        ("messages that one request deletes", requests.DELETED_MAX),
        ("ids in a list of sessions, rules in a list of rules", requests.LISTED_MAX),
        ("ids in a list of sessions, rules in a list of rules", operations.RULES_MAX),
        ("forwarding entities on the way of a message", entity.HOPS_MAX),
        ("octets of an XML document", xml_trees.DOCUMENT_MAX),
        ("elements of an XML document", xml_trees.ELEMENTS_MAX),
        ("depth of an XML document", xml_trees.DEPTH_MAX),
        ("shared access policies in an XML document", atom.POLICIES_MAX),
        ("characters of a pattern of LIKE", sql_like.PATTERN_MAX),
        ("fields of a correlation filter", correlations.FIELDS_MAX),
        ("events of a batch", hub_events.BATCH_EVENTS_MAX),
        ("octets of an event or a batch of events", hubs.EVENT_SIZE_MAX),
        ("idempotent producers of a partition", hub_producers.PRODUCERS_MAX),
    ],
)
def test_each_bound_without_a_setting_is_that_of_the_page(bound: str, value: int) -> None:
    assert number(FIXED[bound][1]) == value


def test_what_realistic_applies_is_what_the_page_says() -> None:
    said = re.search(r"^## What `realistic` applies\n(.*?)^## ", TEXT, re.MULTILINE | re.DOTALL)
    assert said is not None
    text = " ".join(said[1].split())
    of_a_time: Any = quotas.QUOTAS.times
    for each in (
        f"{quotas.QUOTAS.message_bytes // 1024 if quotas.QUOTAS.message_bytes else 0} KiB for a message",
        f"{ID_MAX} characters of a message id",
        f"{PROPERTY_MAX // 1024} KiB of an application property, and {PROPERTIES_MAX // 1024} KiB of all",
        f"{of_a_time['lock_duration'][0]} seconds to {of_a_time['lock_duration'][1] // 60} minutes",
        f"{of_a_time['duplicate_detection_history_time_window'][0]} seconds to 7 days",
        f"at least {of_a_time['auto_delete_on_idle'][0] // 60} minutes of idleness",
        f"{quotas.QUOTAS.connections:,} connections",
        f"{quotas.QUOTAS.receivers:,} receivers",
        f"{quotas.QUOTAS.keys} shared access policies of an entity",
        f"transaction_work_max={quotas.SERVICE_LIMITS['transaction_work_max']}",
        f"transaction_s={quotas.SERVICE_LIMITS['transaction_s']:g})",
        f"{quotas.QUOTAS.partitions} partitions, {quotas.QUOTAS.consumer_groups} consumer groups",
        f"{hubs.READERS_MAX} readers without owner level",
    ):
        assert each in text, each


def test_limits_of_the_broker_are_those_of_the_page() -> None:
    assert f"{DEFAULT_LIMITS.connections_per_address_max:,} from one address" in TEXT
    assert f"{DEFAULT_LIMITS.message_size_max >> 20} MiB**, `message_size_max`" in TEXT


def test_numbers_of_a_partitioned_entity_carry_the_partition_and_its_messages_keep_their_order() -> (
    None
):
    bench = Bench(partitioned=True)
    numbers = [bench.send(body, message_id=str(body)) for body in range(50)]
    partitions = {each >> PARTITION_SHIFT for each in numbers}
    assert len(partitions) > 4
    receiver = bench.receiver(credit=50)
    assert receiver.bodies == list(range(50))
    assert [
        each.message_annotations["x-opt-sequence-number"] for each in receiver.messages
    ] == numbers


def test_messages_are_gone_with_their_namespace() -> None:
    for _ in range(2):
        with ServiceBus(Queue("q")) as bus:
            assert bus.queue("q").stats.active == 0
            bus.queue("q").send("m", durable=True)


def test_a_namespace_has_more_entities_than_the_emulator() -> None:
    with ServiceBus(*[Queue(f"q{n}") for n in range(60)]) as bus:
        assert bus.queue("q59").send("m") == 1
