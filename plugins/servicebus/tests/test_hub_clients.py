"""Clients of Azure's SDK for Python, unmodified, at event hubs: with threads and with asyncio."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Any

import pytest
from amqp_rt_servicebus.declarations import Hub
from hub_clients import PATIENCE_S, AsyncClients, Received, ServedHubs, SyncClients, serving_hubs

CLICKS = Hub("Clicks", partitions=4, consumer_groups=["audit"])

#: The SDK is a program of others, which polls.
pytestmark = [
    pytest.mark.req("Z20", "Z21"),
    pytest.mark.foreign,
    pytest.mark.slow,
    pytest.mark.usefixtures("azure_python"),
]


@pytest.fixture
def served() -> Iterator[ServedHubs]:
    with serving_hubs(CLICKS) as served:
        yield served


@pytest.fixture(params=[SyncClients, AsyncClients], ids=["sync", "aio"])
def clients(served: ServedHubs, request: pytest.FixtureRequest) -> Iterator[Any]:
    with request.param(served.connection_string, "Clicks") as clients:
        yield clients


@pytest.fixture
def sync(served: ServedHubs) -> Iterator[SyncClients]:
    """Return clients with threads, for what does not differ with asyncio."""
    with SyncClients(served.connection_string, "Clicks") as clients:
        yield clients


def data(body: object = "e", **properties: Any) -> Any:
    from azure.eventhub import EventData

    event = EventData(body)  # type: ignore[arg-type]
    event.properties = properties
    return event


# --- Sending ---------------------------------------------------------------------------------


def test_a_batch_goes_to_the_partition_that_the_client_names(
    served: ServedHubs, clients: Any
) -> None:
    clients.send(data("a", color="red"), data("b"), partition_id="2")
    clients.send_one(data("c"), partition_id="2")
    assert served.bodies() == [[], [], [b"a", b"b", b"c"], []]
    assert served.events()[2][0].application_properties == {"color": "red"}


def test_events_with_a_key_go_to_its_partition(served: ServedHubs, clients: Any) -> None:
    for key in ("alpha", "beta", "gamma"):
        clients.send(data(f"{key}-1"), data(f"{key}-2"), partition_key=key)
        clients.send_one(data(f"{key}-3"), partition_key=key)
        chosen = served.chosen(key)
        there = served.events()[chosen][-3:]
        assert [each.body for each in there] == [f"{key}-{n}".encode() for n in (1, 2, 3)]
        assert {each.message_annotations["x-opt-partition-key"] for each in there} == {key}  # type: ignore[index]


def test_batches_without_a_key_go_to_one_partition_each(
    served: ServedHubs, sync: SyncClients
) -> None:
    for number in range(4):
        sync.send(*(data(f"{number}-{at}") for at in range(3)))
    assert served.bodies() == [[f"{n}-{at}".encode() for at in range(3)] for n in range(4)]


def test_batches_of_the_client_have_the_size_of_the_link(
    served: ServedHubs, sync: SyncClients
) -> None:
    size_max = sync.fill(*(data("x" * 1_000) for _ in range(500)), partition_id="1")
    assert size_max == 1024 * 1024
    assert len(served.bodies()[1]) == 500
    sync.fill(data("k"), partition_key="alpha")
    assert served.bodies()[served.chosen("alpha")][-1] == b"k"


def test_a_buffered_producer_sends_all_events(served: ServedHubs, clients: Any) -> None:
    keys = [None, "alpha", "beta", None]
    errors = clients.buffer([(data(str(at)), keys[at % 4]) for at in range(40)])
    assert errors == []
    found = served.bodies()
    assert sorted(int(each) for part in found for each in part) == list(range(40))
    for first in (1, 2):
        alike = {str(at).encode() for at in range(first, 40, 4)}
        assert sum(bool(alike & set(part)) for part in found) == 1


def test_a_client_that_is_throttled_tries_again(served: ServedHubs, clients: Any) -> None:
    served.bus.fault("com.microsoft:server-busy", on="send", entity="clicks")
    clients.send(data("a"))
    assert [each.body for each in served.handle.events] == [b"a"]


def test_a_partition_that_is_not_there_is_an_error(clients: Any) -> None:
    from azure.eventhub.exceptions import EventHubError

    with pytest.raises(EventHubError, match="partition 9"):
        clients.send(data(), partition_id="9")


# --- Receiving -------------------------------------------------------------------------------


def test_events_come_as_they_were_sent_with_their_place(served: ServedHubs, clients: Any) -> None:
    event = data(b"\x00\xff", number=7, text="t")
    event.content_type, event.correlation_id, event.message_id = "a/b", "c", "m"
    clients.send(event, partition_key="alpha")
    partition = served.chosen("alpha")
    (found,) = clients.receive(1, str(partition)).events
    assert b"".join(found.body) == b"\x00\xff"
    assert found.properties == {b"number": 7, b"text": b"t"}
    assert (found.content_type, found.correlation_id, found.message_id) == ("a/b", "c", "m")
    assert (found.sequence_number, found.offset) == (0, "0")
    assert found.partition_key == b"alpha"
    age_s = (datetime.now(UTC) - found.enqueued_time).total_seconds()
    assert -1 < age_s < 60
    assert set(found.raw_amqp_message.annotations) == {
        b"x-opt-sequence-number",
        b"x-opt-offset",
        b"x-opt-enqueued-time",
        b"x-opt-partition-key",
    }


def test_consumers_begin_at_each_kind_of_position(served: ServedHubs, sync: SyncClients) -> None:
    served.publish(b"0", b"1", b"2", b"3")
    # Readers of one partition, all at the same time. The tests without the SDK have further positions.
    cases: list[tuple[object, bool, list[str]]] = [
        ("1", True, ["1", "2", "3"]),
        (1, False, ["2", "3"]),
        ("@latest", False, []),
        (datetime(2020, 1, 1, tzinfo=UTC), False, ["0", "1", "2", "3"]),
    ]
    with ExitStack() as stack:
        receiving = [
            stack.enter_context(
                sync.receiving(
                    len(bodies) + 1,
                    starting_position=position,
                    starting_position_inclusive=inclusive,
                )
            )
            for position, inclusive, bodies in cases
        ]
        wait_until(lambda: served.handle.stats.readers == len(cases))
        served.publish(b"new")
        for (found, done), (position, inclusive, bodies) in zip(receiving, cases, strict=True):
            assert done.wait(PATIENCE_S), (position, inclusive, found.bodies)
            assert found.bodies == [*bodies, "new"]


def wait_until(true: Any) -> None:
    """Wait for something that another thread brings about."""
    end = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_time_between_two_events_is_a_position(served: ServedHubs, sync: SyncClients) -> None:
    served.publish(b"old")
    served.bus.advance(60)
    served.publish(b"new")
    time_ms = served.handle.stats.partitions[0].last_ms
    before = datetime.fromtimestamp(time_ms / 1000 - 30, UTC)
    assert sync.receive(1, starting_position=before).bodies == ["new"]


def test_each_consumer_group_has_all_events(served: ServedHubs, sync: SyncClients) -> None:
    served.publish(b"a", b"b")
    assert sync.receive(2).bodies == ["a", "b"]
    assert sync.receive(2, group="AUDIT").bodies == ["a", "b"]


def test_a_group_or_position_that_is_not_there_is_an_error_of_the_consumer(
    served: ServedHubs, sync: SyncClients
) -> None:
    # Consumers with asyncio attach again, and report no errors but stolen links.
    served.publish(b"a")
    (error,) = sync.receive(1, group="none").errors[:1]
    assert "no consumer group 'none'" in str(error)
    (error,) = sync.receive(1, starting_position="77").errors[:1]
    assert "the last sequence number of the partition is 0" in str(error)


def test_many_events_are_received_in_order(served: ServedHubs, clients: Any) -> None:
    served.publish(*(str(at).encode() for at in range(1_500)))
    assert clients.receive(1_500).bodies == [str(at) for at in range(1_500)]


def test_consumers_that_ask_know_the_last_event_of_the_partition(
    served: ServedHubs, sync: SyncClients
) -> None:
    served.publish(b"a", b"b", b"c")
    found = sync.receive(1, track_last_enqueued_event_properties=True)
    last = found.last[0]
    assert (last["sequence_number"], last["offset"]) == (2, "2")
    assert last["enqueued_time"] <= last["retrieval_time"]
    assert sync.receive(1).last[0] is None


def test_a_consumer_with_an_owner_level_takes_the_place_of_another(
    served: ServedHubs, sync: SyncClients
) -> None:
    served.publish(b"a")
    with sync.receiving(99, owner_level=1) as (first, lost):
        wait_until(lambda: first.bodies == ["a"])
        second = sync.receive(1, owner_level=2)
        assert second.bodies == ["a"]
        assert lost.wait(PATIENCE_S)
    assert "link:stolen" in str(first.errors[0]) or "owner level 2" in str(first.errors[0])


def test_a_consumer_with_a_lower_owner_level_is_refused(
    served: ServedHubs, sync: SyncClients
) -> None:
    served.publish(b"a")
    with sync.receiving(99, owner_level=5) as (owner, _):
        wait_until(lambda: owner.bodies == ["a"])
        for level in ({}, {"owner_level": 4}):
            refused: Received = sync.receive(1, **level)
            assert "owner level 5 is attached" in str(refused.errors[0])
        assert not owner.errors


def test_a_balancing_consumer_receives_from_all_partitions(served: ServedHubs) -> None:
    for partition in range(4):
        served.publish(str(partition).encode(), partition=partition)
    client = SyncClients(served.connection_string, "clicks").consumer()
    found: set[tuple[str, str]] = set()
    done = threading.Event()

    def on_event(context: Any, event: Any) -> None:
        found.add((context.partition_id, event.body_as_str()))
        if len(found) == 4:
            done.set()

    thread = threading.Thread(
        target=client.receive, args=(on_event,), kwargs={"starting_position": "-1"}
    )
    thread.start()
    try:
        assert done.wait(PATIENCE_S), found
    finally:
        client.close()
        thread.join()
    assert found == {(str(each), str(each)) for each in range(4)}


def test_a_consumer_continues_at_the_checkpoint_of_another(served: ServedHubs) -> None:
    from azure.eventhub import EventHubConsumerClient
    from azure.eventhub._eventprocessor.in_memory_checkpoint_store import InMemoryCheckpointStore

    store = InMemoryCheckpointStore()  # type: ignore[no-untyped-call]
    served.publish("a", "b", partition=0)
    served.publish("c", partition=1)

    def consume(*wanted: str) -> list[str]:
        client = EventHubConsumerClient.from_connection_string(
            served.bus.connection_string_for(entity="Clicks"),
            "$Default",
            checkpoint_store=store,
            load_balancing_interval=1,
            retry_total=0,
        )
        found: list[str] = []
        done = threading.Event()

        def on_event(context: Any, event: Any) -> None:
            found.append(event.body_as_str())
            context.update_checkpoint(event)
            if set(wanted) <= set(found):
                done.set()

        options = {"starting_position": "-1"}
        thread = threading.Thread(target=client.receive, args=(on_event,), kwargs=options)
        thread.start()
        try:
            assert done.wait(PATIENCE_S), found
        finally:
            client.close()
            thread.join()
        return sorted(found)

    assert consume("a", "b", "c") == ["a", "b", "c"]
    served.publish("d", partition=0)
    served.publish("e", partition=3)
    assert consume("d", "e") == ["d", "e"]


# --- Properties ------------------------------------------------------------------------------


def test_properties_of_the_hub(served: ServedHubs, clients: Any) -> None:
    found = clients.hub_properties()
    created = served.bus.call(lambda: served.bus.namespace.hubs.find("clicks").created_at)
    assert found == {
        "eventhub_name": "Clicks",
        "created_at": found["created_at"],
        "partition_ids": ["0", "1", "2", "3"],
    }
    assert found["created_at"].timestamp() == pytest.approx(created, abs=0.01)


def test_properties_of_partitions(served: ServedHubs, clients: Any) -> None:
    served.publish(b"a", b"b", partition=1)
    full, empty = clients.partition_properties("1"), clients.partition_properties("0")
    moment = full.pop("last_enqueued_time_utc")
    assert full == {
        "eventhub_name": "Clicks",
        "id": "1",
        "beginning_sequence_number": 0,
        "last_enqueued_sequence_number": 1,
        "last_enqueued_offset": "1",
        "is_empty": False,
    }
    assert abs((datetime.now(UTC) - moment).total_seconds()) < 60
    assert empty == {
        "eventhub_name": "Clicks",
        "id": "0",
        "beginning_sequence_number": 0,
        "last_enqueued_sequence_number": -1,
        "last_enqueued_offset": "-1",
        "is_empty": True,
        "last_enqueued_time_utc": datetime(1, 1, 1, tzinfo=UTC),
    }


def test_properties_of_what_is_not_there_are_errors(served: ServedHubs, sync: SyncClients) -> None:
    from azure.eventhub.exceptions import ConnectError

    with pytest.raises(ConnectError, match="has no partition '7'"):
        sync.partition_properties("7")
    with (
        SyncClients(served.connection_string, "none") as others,
        pytest.raises(ConnectError, match="could not be found"),
    ):
        others.hub_properties()


def test_a_wrong_key_is_an_error_of_authentication(served: ServedHubs) -> None:
    from azure.eventhub.exceptions import AuthenticationError

    text = served.connection_string.replace("SAS_KEY_VALUE", "other")
    with pytest.raises(AuthenticationError):
        SyncClients(text, "clicks").send(data())
