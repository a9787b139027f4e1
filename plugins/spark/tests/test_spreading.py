"""A sink without an address: rows name theirs in the column ``to``."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from amqp_rt_spark import spreading
from amqp_rt_spark.options import read_options
from amqp_rt_spark.spreading import Spread, SpreadSink
from amqp_rt_spark.writing import EpochDiffers, Task

from amqp_rt.broker import Log, Queue
from amqp_rt.errors import AmqpError, LinkRefused

pytestmark = pytest.mark.req("K1", "K3")

COLUMNS = ["body", "to"]


def sink(served: Any, *, streaming: bool = True, **given: str) -> SpreadSink:
    said = {"url": served.url, **given}
    return SpreadSink(read_options(said, "sink"), COLUMNS, streaming=streaming)


def task(part: int = 0, attempt: int = 0, epoch: int = 0, run: str = "one") -> Task:
    return Task(part, attempt, epoch, "query", run)


def rows(*pairs: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"body": body, "to": to} for body, to in pairs]


@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_each_row_goes_where_it_says(
    served: Any, delivery: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order for each address, over as many chunks as it takes."""
    monkeypatch.setattr(spreading, "ROWS", 3)
    it = sink(served, delivery=delivery)
    numbers = range(10)
    sent = it.send(rows(*((f"b{n}", ("in", "out")[n % 2]) for n in numbers)), task())
    it.publish([pickle.loads(pickle.dumps(sent)), None])
    assert served.bodies("in") == ["b0", "b2", "b4", "b6", "b8"]
    assert served.bodies("out") == ["b1", "b3", "b5", "b7", "b9"]
    assert {message.properties.to for message in served.messages("in")} == {"in"}


def test_what_is_done_again_is_there_once(served: Any) -> None:
    """Although the first commit reached one address of two only."""
    it = sink(served)
    given = rows(("a", "in"), ("b", "out"), ("c", "in"))
    first = it.send(given, task())
    # A task that ran twice at once counts once.
    it.send(given, task(attempt=1))
    it.publish([Spread(tuple(each for each in first.written if each[0] == "in"))])
    assert (served.bodies("in"), served.bodies("out")) == (["a", "c"], [])
    again = sink(served)
    assert again.publish([again.send(given, task(attempt=2, run="two"))])
    assert (served.bodies("in"), served.bodies("out")) == (["a", "c"], ["b"])
    # The next one needs not go where the one before went.
    again.publish([again.send(rows(("d", "in")), task(epoch=1, run="two"))])
    assert (served.bodies("in"), served.bodies("out")) == (["a", "c", "d"], ["b"])


def test_what_differs_at_one_address_is_published_at_none(served: Any) -> None:
    """A checkpoint that was restored plans a wider range under the same number; the next range has the rest."""
    it = sink(served)
    it.publish([it.send(rows(("a", "out")), task())])
    wider = sink(served)
    sent = wider.send(rows(("a", "out"), ("b", "in"), ("c", "out")), task(attempt=1, run="two"))
    with pytest.raises(EpochDiffers, match="restore the latest checkpoint"):
        wider.publish([sent])
    assert (served.bodies("in"), served.bodies("out")) == ([], ["a"])


def test_without_staging_it_would_come_twice(served: Any) -> None:
    """The negative control."""
    for attempt in range(2):
        it = sink(served, delivery="at-least-once")
        it.publish([it.send(rows(("a", "in")), task(attempt=attempt))])
    assert served.bodies("in") == ["a", "a"]


def test_a_batch_has_one_run_for_all_addresses(served: Any) -> None:
    given = {"producer": "the tenth"}
    it = sink(served, streaming=False, **given)
    parts = [
        pickle.loads(pickle.dumps(it)).send(rows((f"{n}", "in"), ("x", "out")), Task(n, n))
        for n in range(3)
    ]
    assert it.publish(parts)
    assert served.bodies("in") == ["0", "1", "2"]
    with pytest.raises(ValueError, match="needs the option producer"):
        sink(served, streaming=False, delivery="exactly-once")


@pytest.mark.parametrize(
    ("to", "why"),
    [
        (None, "'to' is null or empty in a row"),
        ("", "'to' is null or empty in a row"),
        ("$management", "not sent to a broker's own nodes"),
        ("in/$management", "not sent to a broker's own nodes"),
    ],
)
def test_addresses_that_data_may_not_choose(served: Any, to: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        sink(served).send(rows(("a", to)), task())


def test_an_address_that_is_not_there(served: Any) -> None:
    with pytest.raises(LinkRefused, match="cannot send to 'nowhere'") as caught:
        sink(served, delivery="at-least-once").send(rows(("a", "nowhere")), task())
    assert isinstance(caught.value, AmqpError)


def test_keys_choose_partitions(served: Any) -> None:
    served.broker.declare(Log("keyed", partitions=4), Queue("other"))
    said = {"url": served.url}
    it = SpreadSink(read_options(said, "sink"), [*COLUMNS, "key"], streaming=True)
    given = [{"body": str(n), "to": "keyed", "key": str(n % 2)} for n in range(40)]
    it.publish([it.send(given, task())])
    from amqp_rt_spark.batch import Batch

    options = {**said, "address": "keyed", "columns": "key,partition"}
    batch = Batch(read_options(options, "source"))
    found = {row for span in batch.partitions() for row in batch.read(span)}
    assert {key for key, _ in found} == {"0", "1"}
    assert len(found) == 2
