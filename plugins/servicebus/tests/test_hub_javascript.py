"""Clients of Azure's SDK for JavaScript, unmodified, at event hubs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from amqp_rt_servicebus.declarations import Hub
from driven import performed
from hub_clients import ServedHubs, serving_hubs

CLICKS = Hub("clicks", partitions=3, consumer_groups=["audit"])
EARLIEST = {"offset": "-1"}

#: Node is a program of others, and takes a second to start.
pytestmark = [pytest.mark.req("Z20", "Z21"), pytest.mark.foreign, pytest.mark.slow]


@pytest.fixture
def served() -> Iterator[ServedHubs]:
    with serving_hubs(CLICKS) as served:
        yield served


@pytest.fixture
def perform(served: ServedHubs, azure_javascript: str) -> Callable[..., list[Any]]:
    """Function that has the JavaScript clients perform steps, and returns the results."""

    def perform(*steps: list[Any]) -> list[Any]:
        return performed(
            azure_javascript, "hubs.js", served.connection_string, "clicks", steps=steps
        )

    return perform


Perform = Callable[..., list[Any]]


def test_events_and_batches_are_sent_and_received(served: ServedHubs, perform: Perform) -> None:
    results = perform(
        ["producer", "p"],
        ["send", "p", ["a", "b"], {"partitionId": "1"}],
        ["batch", "p", ["c", "d"], {"partitionId": "1"}],
        ["batch", "p", ["k"], {"partitionKey": "alpha"}],
        ["receive", "$Default", "1", EARLIEST, 4, {"trackLastEnqueuedEventProperties": True}],
        ["receive", "audit", "1", {"sequenceNumber": 1}, 2],
        ["receive", "$Default", "1", {"offset": "3", "isInclusive": True}, 1],
        ["receive", "$Default", "1", {"enqueuedOn": 0}, 4],
    )
    size_max, events = results[2]["most"], results[4]["events"]
    assert size_max == 1024 * 1024
    assert [each["body"] for each in events][:4] == ["a", "b", "c", "d"]
    assert [(each["number"], each["offset"]) for each in events][:4] == [
        (number, str(number)) for number in range(4)
    ]
    assert events[0]["properties"] == {}
    assert set(events[0]["annotations"]) == {
        "x-opt-sequence-number",
        "x-opt-offset",
        "x-opt-enqueued-time",
    }
    last = results[4]["last"]
    assert (last["sequenceNumber"], last["offset"]) == (events[-1]["number"], events[-1]["offset"])
    assert [each["body"] for each in results[5]["events"]][:2] == ["c", "d"]
    assert results[6]["events"][0]["body"] == "d"
    assert len(results[7]["events"]) >= 4
    there = served.events()[served.chosen("alpha")]
    assert there[-1].message_annotations["x-opt-partition-key"] == "alpha"  # type: ignore[index]


def test_an_idempotent_producer_numbers_its_events(served: ServedHubs, perform: Perform) -> None:
    results = perform(
        ["producer", "p", {"idempotent": True}],
        ["publishing", "p", "0"],
        ["send", "p", ["a", "b"], {"partitionId": "0"}],
        ["batch", "p", ["c"], {"partitionId": "0"}],
        ["publishing", "p", "0"],
        ["send", "p", ["elsewhere"], {"partitionId": "1"}],
        ["receive", "$Default", "0", EARLIEST, 3],
    )
    _, begun, numbers, batch, after, other, received = results
    assert begun == {
        "isIdempotentPublishingEnabled": True,
        "partitionId": "0",
        "lastPublishedSequenceNumber": 0,
        "ownerLevel": 0,
        "producerGroupId": begun["producerGroupId"],
    }
    assert (numbers, batch["started"], other) == ([1, 2], 3, [1])
    assert after == {**begun, "lastPublishedSequenceNumber": 3}
    assert served.bodies() == [[b'"a"', b'"b"', b'"c"'], [b'"elsewhere"'], []]
    assert all(each["properties"].keys() <= {"messageId"} for each in received["events"])


def test_a_batch_that_an_idempotent_producer_sends_again_is_stored_once(
    served: ServedHubs, perform: Perform
) -> None:
    results = perform(
        ["producer", "p", {"idempotent": True}],
        ["send", "p", ["a", "b"], {"partitionId": "0"}],
        ["forget", "p", "0", 2],
        ["send", "p", ["a", "b"], {"partitionId": "0"}],
        ["send", "p", ["c"], {"partitionId": "0"}],
        ["forget", "p", "0", -5],
        ["send", "p", ["gap"], {"partitionId": "0"}],
        ["forget", "p", "0", 5],
        ["send", "p", ["d"], {"partitionId": "0"}],
    )
    assert served.bodies()[0] == [b'"a"', b'"b"', b'"c"', b'"d"']
    assert (results[1], results[3], results[4], results[8]) == ([1, 2], [1, 2], [3], [4])
    assert "3 was expected" not in json.dumps(results[6])
    assert "4 was expected next" in results[6]["message"]


def test_a_higher_owner_level_of_a_producer_takes_the_partition(
    served: ServedHubs, perform: Perform
) -> None:
    def options(level: int, **more: int) -> dict[str, Any]:
        known = {"producerGroupId": 7, "ownerLevel": level, **more}
        return {"idempotent": True, "partitions": {"0": known}}

    results = perform(
        ["producer", "old", options(1, startingSequenceNumber=40)],
        ["send", "old", ["a"], {"partitionId": "0"}],
        ["producer", "new", options(2)],
        ["send", "new", ["b"], {"partitionId": "0"}],
        ["send", "old", ["c"], {"partitionId": "0"}],
        ["producer", "late", options(1)],
        ["send", "late", ["d"], {"partitionId": "0"}],
    )
    assert (results[1], results[3]) == ([41], [42])
    for refused in (results[4], results[6]):
        assert "another client has taken over" in refused["message"]
    assert served.bodies()[0] == [b'"a"', b'"b"']


def test_a_buffered_producer_is_idempotent_and_computes_partitions_of_keys(
    served: ServedHubs, perform: Perform
) -> None:
    keys = [f"key-{number}" for number in range(12)]
    results = perform(
        ["buffered", keys, keys],
        ["buffered", ["x", "y", "z"], [], {"enableIdempotentRetries": True}],
        ["partitions", keys, 3],
    )
    assert results[:2] == [[], []]
    assert results[2] == [served.chosen(key) for key in keys]
    found = served.bodies()
    for key, chosen in zip(keys, results[2], strict=True):
        assert f'"{key}"'.encode() in found[chosen]
    assert sum(map(len, found)) == 15


def test_partitions_of_keys_are_those_of_the_service(served: ServedHubs, perform: Perform) -> None:
    keys = [
        *("", "a", "\u00e9t\u00e9", "\u4e16\u754c", "\U0001f600", "x" * 128),
        *("k" * size for size in range(2, 40)),
        *map(str, range(500)),
    ]
    (found,) = perform(["partitions", keys, 3])
    assert found[1:] == [served.chosen(key) for key in keys[1:]]


def test_owner_levels_of_readers(served: ServedHubs, perform: Perform) -> None:
    served.publish(b'"a"')
    owned, missing = perform(
        ["receive", "$Default", "0", EARLIEST, 1, {"ownerLevel": 3}],
        ["receive", "none", "0", EARLIEST, 1],
    )
    assert [each["body"] for each in owned["events"]] == ["a"]
    assert "no consumer group 'none'" in missing["error"]["message"]


def test_properties(served: ServedHubs, perform: Perform) -> None:
    served.publish(b"a", b"b", partition=1)
    hub, full, empty, missing = perform(
        ["hub"], ["partition", "1"], ["partition", "0"], ["partition", "9"]
    )
    assert (hub["name"], hub["partitionIds"]) == ("clicks", ["0", "1", "2"])
    assert hub["isGeoDrEnabled"] is False
    assert full["lastEnqueuedSequenceNumber"] == 1
    assert full["lastEnqueuedOffset"] == "1"
    assert full["isEmpty"] is False
    assert (empty["beginningSequenceNumber"], empty["lastEnqueuedSequenceNumber"]) == (0, -1)
    assert empty["lastEnqueuedOnUtc"].startswith("0001-01-01T00:00:00")
    assert "has no partition '9'" in missing["message"]
