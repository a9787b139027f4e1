"""Rows are sent once more, each once, wherever that is interrupted (K7). Without Spark."""

from __future__ import annotations

import json
from typing import Any

import pytest
from amqp_rt_spark import connections
from amqp_rt_spark.jobs import publishing
from amqp_rt_spark.jobs.conf import JobConf
from amqp_rt_spark.jobs.publishing import Pace
from amqp_rt_spark.jobs.sending import Sender, producer_of, shown

from amqp_rt import Message
from amqp_rt.errors import AmqpError, ConnectionLost, DeliveryRejected

pytestmark = [pytest.mark.req("K7"), pytest.mark.timeout(120)]

Rows = list[dict[str, Any]]


def rows_of(count: int, *, begin: int = 0) -> Rows:
    """Rows of two partitions in turn, as ingest writes them."""
    return [
        {
            "address": "log",
            "partition": number % 2,
            "offset": number // 2,
            "header": {"durable": True, "priority": 7, "ttl": None, "delivery_count": 3},
            "message_annotations": json.dumps({"x-opt-partition-key": "k", "x-opt-offset": "9"}),
            "message": Message(number, message_id=str(number)).bare,
        }
        for number in range(begin, count)
    ]


def send(served: Any, rows: Rows, replay: str = "r", **properties: str) -> Sender:
    sender = Sender(JobConf(url=served.url), "out", replay, Pace(None), properties)
    sender.send(dict(row) for row in rows)
    return sender


def test_each_is_sent_once_under_an_id(served: Any) -> None:
    rows = rows_of(9)
    assert send(served, rows).counts == {("log", 0): [5, 0], ("log", 1): [4, 0]}
    assert send(served, rows_of(10)).counts == {("log", 0): [0, 5], ("log", 1): [1, 4]}
    assert sorted(served.bodies("out")) == list(range(10))
    first = served.messages("out")[0]
    assert (first.durable, first.priority, first.delivery_count) == (True, 7, 0)
    assert first.bare == rows[0]["message"]
    assert first.message_annotations == {"x-opt-partition-key": "k", "x-opt-replay-id": "r"}
    send(served, rows_of(1), "another", a="b")
    assert served.messages("out")[-1].application_properties == {"a": "b"}


def test_another_choice_of_rows_needs_another_id(served: Any) -> None:
    def chosen(rows: Rows, choice: str, replay: str = "r") -> None:
        sender = Sender(JobConf(url=served.url), "out", replay, Pace(None), {}, choice)
        sender.send(dict(row) for row in rows)

    rows = rows_of(10)
    chosen(rows[::4], "where=even")
    # Messages left out now are before the last one that was sent, and would not be sent at all.
    with pytest.raises(
        ValueError, match="has begun to publish 'where=even' at 'out', and this is 'where=odd'"
    ):
        chosen(rows[2::4], "where=odd")
    assert served.bodies("out") == [0, 4, 8]
    chosen(rows_of(13)[::4], "where=even")
    chosen(rows[2::4], "where=odd", "another")
    assert sorted(served.bodies("out")) == [0, 2, 4, 6, 8, 12]


def test_a_group_stays_together_in_a_log(served: Any) -> None:
    (row,) = rows_of(1)
    row |= {"message_annotations": None, "message": Message("x", group_id="g").bare}
    send(served, [row])
    (message,) = served.messages("out")
    assert message.message_annotations["x-opt-partition-key"] == "g"


@pytest.mark.parametrize("done", [True, False])
def test_an_interruption_anywhere_loses_and_doubles_nothing(
    served: Any, monkeypatch: pytest.MonkeyPatch, done: bool
) -> None:
    """Each run ends at its third commit: before it is done, or before its answer is heard. Meanwhile
    rows come along."""
    monkeypatch.setattr(publishing, "PIECE_MESSAGES", 3)
    ask = connections.call
    runs = 0
    while True:
        left = [3]

        def call(
            endpoint: Any,
            address: str,
            operation: str,
            *args: Any,
            left: list[int] = left,
            **given: Any,
        ) -> Any:
            left[0] -= operation == "COMMIT-EPOCH"
            if left[0] == 0 and not done:
                raise ConnectionLost("before")
            answer = ask(endpoint, address, operation, *args, **given)
            if left[0] == 0:
                raise ConnectionLost("after")
            return answer

        runs += 1
        with monkeypatch.context() as broken:
            broken.setattr(connections, "call", call)
            try:
                send(served, rows_of(20 + runs))
                break
            except ConnectionLost:
                pass
    assert runs > 3
    bodies = served.bodies("out")
    assert sorted(bodies) == list(range(20 + runs))
    for partition in range(2):
        mine = [body for body in bodies if body % 2 == partition]
        assert mine == sorted(mine)


def test_rows_that_are_there_twice_are_sent_once(served: Any) -> None:
    rows = rows_of(3)
    send(served, [rows[0], rows[0], *rows[1:], rows[2]])
    assert served.bodies("out") == [0, 2, 1]
    with pytest.raises(ValueError, match="two messages of 'log', partition 0 at offset 0"):
        send(served, [rows[0], rows[0] | {"message": b"\x00Sw\xa1\x01x"}], "again")
    for name in ("offset", "message"):
        with pytest.raises(ValueError, match=f"partition 0 has no {name}"):
            send(served, [rows[0] | {name: None}], "again")


def test_what_is_not_taken_ends_it(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> int:
        raise DeliveryRejected("too large", condition="amqp:link:message-size-exceeded")

    monkeypatch.setattr(publishing.Publisher, "publish", refuse)
    with pytest.raises(DeliveryRejected, match="offsets 0 to 1, and has none of them") as caught:
        send(served, rows_of(3))
    assert caught.value.condition == "amqp:link:message-size-exceeded"


def test_a_replay_that_was_thought_dead_is_shut_out(served: Any) -> None:
    class Slow(Pace):
        def wait(self, count: int) -> None:
            send(served, rows_of(1))

    sender = Sender(JobConf(url=served.url), "out", "r", Slow(None), {})
    with pytest.raises(AmqpError) as caught:
        sender.send(rows_of(1))
    assert caught.value.condition == "amqp:link:stolen"
    assert served.bodies("out") == [0]


def test_names() -> None:
    assert producer_of("a/1", ("x", None)) != producer_of("a", ("1/x", None))
    assert shown(("q", None)) == "'q'"
