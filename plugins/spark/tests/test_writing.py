"""The sink's options, without Spark: what tells messages apart, and what is not taken."""

from __future__ import annotations

from typing import Any

import pytest
from amqp_rt_spark import connections
from amqp_rt_spark.options import read_options
from amqp_rt_spark.rows import payload_of
from amqp_rt_spark.writing import Sink, Task, Written

from amqp_rt import Message
from amqp_rt.broker import Queue
from amqp_rt.errors import AmqpError, DeadlineExceeded, DeliveryRejected

pytestmark = pytest.mark.req("K1")


def sink(served: Any, address: str, *columns: str, streaming: bool = True, **given: str) -> Sink:
    said = {"url": served.url, "address": address, **given}
    return Sink(read_options(said, "sink"), ["body", *columns], streaming=streaming)


def written(it: Sink, rows: list[dict[str, Any]], attempt: int = 1) -> Written:
    done = it.send(rows, Task(0, attempt, 0, "query", "one"))
    it.publish([done])
    return done


@pytest.mark.req("K3")
@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_a_column_says_which_message_it_is(served: Any, delivery: str) -> None:
    it = sink(served, "out", "key", dedupColumn="key", delivery=delivery)
    written(it, [{"body": "a", "key": "k1"}, {"body": "b", "key": 2}])
    assert [each.message_id for each in served.messages("out")] == ["k1", "2"]
    with pytest.raises(ValueError, match="'key' is null in a row"):
        it.send([{"body": "a", "key": None}], Task(0, 2, 1, "query", "one"))


def test_artemis_has_a_property_of_its_own(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    options = read_options({"url": "amqp://h", "address": "a", "dedupColumn": "key"}, "sink")
    there = connections.wire(served.endpoint)
    assert there.named_by == ""
    monkeypatch.setattr(there.engine.peer, "properties", {"product": "apache-activemq-artemis"})
    row = {"body": "a", "key": 7, "application_properties": {"other": 1}}
    message = Message.decode(payload_of(row, options, there.named_by))
    assert dict(message.application_properties) == {"other": 1, "_AMQ_DUPL_ID": "7"}
    assert message.message_id == "7"


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        (["body"], "names a column 'key' that is not there"),
        (["message", "key"], "cannot name them"),
    ],
)
def test_a_column_that_cannot_be_it(columns: list[str], why: str) -> None:
    options = read_options({"url": "amqp://h", "address": "a", "dedupColumn": "key"}, "sink")
    with pytest.raises(ValueError, match=why):
        Sink(options, columns, streaming=True)


ROWS = [{"body": str(number)} for number in range(5)]


def test_what_is_not_taken_goes_to_the_dead_letters(served: Any) -> None:
    served.broker.declare(Queue("full", length_max=2, overflow="reject"), Queue("dead"))
    given = {"onReject": "deadletter", "deadLetterAddress": "dead"}
    done = written(sink(served, "full", delivery="at-least-once", **given), ROWS)
    dead = served.messages("dead")
    assert (done.count, done.refused) == (2, 3)
    assert [each.body for each in dead] == ["2", "3", "4"]
    for each in dead:
        said = each.message_annotations
        assert said["x-opt-deadletter-source"] == "full"
        assert said["x-opt-dead-letter-reason"] == "rejected"
        assert "length_max 2 is reached" in said["x-opt-dead-letter-description"]


def test_a_dead_letter_that_is_not_taken_ends_the_query(served: Any) -> None:
    full = {"length_max": 1, "overflow": "reject"}
    served.broker.declare(Queue("full", **full), Queue("dead", **full))
    it = sink(
        served,
        "full",
        delivery="at-least-once",
        onReject="deadletter",
        deadLetterAddress="dead",
    )
    with pytest.raises(DeliveryRejected, match="'dead' did not take a message"):
        written(it, ROWS)


def test_how_long_an_answer_may_take(served: Any) -> None:
    served.broker.declare(Queue("full", length_max=1, overflow="block"))
    it = sink(served, "full", delivery="at-least-once", settleTimeout="200ms")
    assert (it.options.settle_timeout, it.options.connect_timeout) == (0.2, 30)
    with pytest.raises(DeadlineExceeded):
        written(it, ROWS)
    connections.forget(it.options.endpoint)


@pytest.mark.req("K3")
def test_a_new_write_is_not_published_without_what_it_left_out(served: Any) -> None:
    """Its tasks began while the write before it was still to be repeated."""

    def send(it: Sink, body: str, attempt: int, run: str) -> Written:
        return it.send([{"body": body}], Task(0, attempt, 0, "query", run))

    earlier, first, second = (sink(served, "out", producer="job") for _ in range(3))
    assert earlier.publish([send(earlier, "a", 1, "one")])
    late = send(second, "b", 2, "two")
    assert (late.messages, late.count, late.skipped) == (1, 0, True)
    assert not first.publish([send(first, "a", 3, "two")])
    with pytest.raises(AmqpError, match="each need a producer of their own; start the query again"):
        second.publish([late])
    assert served.bodies("out") == ["a"]
    assert second.publish([send(second, "b", 4, "two")])
    assert served.bodies("out") == ["a", "b"]
