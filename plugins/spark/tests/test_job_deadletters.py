"""The job ``deadletters``: its report, and replays that are interrupted anywhere (K7)."""

from __future__ import annotations

from typing import Any

import pytest
from amqp_rt_spark import connections

from amqp_rt import Message
from amqp_rt.broker import Log, Queue
from amqp_rt.errors import ConnectionLost

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300), pytest.mark.req("K7")]

DEAD = "dead"


@pytest.fixture
def letters(served: Any) -> Any:
    """Two queues whose consumers did not like what they got."""
    served.broker.declare(
        Queue(DEAD), Queue("a", dead_letter=DEAD, max_deliveries=2), Queue("b", dead_letter=DEAD)
    )
    for number in range(6):
        served.send("a", {"number": number, "name": "x"}, message_id=f"a{number}", durable=True)
        served.send("b", f"text {number}".encode(), message_id=f"b{number}", durable=True)
    with served.broker.local() as peer:
        with peer.receiver("a") as messages:
            for _ in range(12):
                messages.receive().modify(failed=True)
        with peer.receiver("b") as messages:
            for _ in range(6):
                messages.receive().reject("<b>no</b> such thing", condition="amqp:decode-error")
    return served


def run(spark: Any, served: Any, **given: Any) -> Any:
    from amqp_rt_spark.jobs.deadletters import Deadletters, deadletters

    given = {"address": DEAD, **given}
    return deadletters(spark, Deadletters(url=served.url, **given))


def ids(served: Any, address: str) -> list[str]:
    return sorted(str(message.message_id) for message in served.messages(address))


@pytest.mark.slow
def test_letters_are_grouped_by_why_and_what_they_are(spark: Any, letters: Any) -> None:
    letters.send(DEAD, Message(None, message_id="stray"))
    report = run(spark, letters)
    assert report.exit_code == 0
    assert (report.facts["letters"], report.facts["groups"]) == (13, 3)
    groups, details = (each for each in report.sections if hasattr(each, "rows"))
    rows = {
        group[2]: dict(zip([*groups.columns, *details.columns], [*group, *detail], strict=True))
        for group, detail in zip(groups.rows, details.rows, strict=True)
    }
    assert rows["a"]["messages"] == rows["b"]["messages"] == 6
    assert rows["a"]["reason"] == "max-deliveries"
    assert rows["a"]["body"] == "data application/json OBJECT<name: STRING, number: BIGINT>"
    assert rows["a"]["deliveries"] == 2
    assert rows["b"]["reason"] == "rejected: amqp:decode-error: <b>no</b> such thing"
    assert rows["b"]["body"] == "data text"
    assert "2000" < rows["b"]["first"] <= rows["b"]["last"]
    assert rows["b"]["for example"].split(", ")[0] == "b0"
    assert rows[None]["for example"] == "stray"
    assert rows[None]["first"] == ""
    assert len(letters.messages(DEAD)) == 13
    assert sum(map(sum, report.sections[-1].series.values())) == 12
    assert "&lt;b&gt;no" in report.html()
    some = run(
        spark, letters, where="source = 'a' and variant_get(body_variant, '$.number', 'int') < 2"
    )
    assert some.facts["letters"] == 2
    assert run(spark, letters, where="false").facts == {
        "letters": 0,
        "groups": 0,
        "first_seen": None,
        "last_seen": None,
    }


@pytest.mark.slow
def test_a_log_of_dead_letters_is_read_too(spark: Any, served: Any) -> None:
    served.broker.declare(Log("logged", partitions=1))
    served.send("logged", *(f"text {number}" for number in range(3)))
    report = run(spark, served, address="logged")
    assert report.facts["letters"] == 3
    with pytest.raises(ValueError, match="is a log, whose records stay"):
        run(spark, served, address="logged", replay_to="original")


@pytest.mark.slow
def test_those_that_are_chosen_go_back_and_the_others_stay(spark: Any, letters: Any) -> None:
    dry = run(
        spark, letters, replay_to="original", where="message_id in ('a1', 'b2')", dry_run=True
    )
    assert dry.facts["replay"] == {
        "dry_run": True,
        "would_replay": 2,
        "failed": 0,
        "set_aside": 0,
    }
    assert len(ids(letters, DEAD)) == 12
    for _ in range(2):
        report = run(spark, letters, replay_to="original", where="message_id in ('a1', 'b2')")
    assert report.facts["replay"]["replayed"] == 0
    assert report.facts["replay"]["kept"] == 10
    (one,) = letters.messages("a")
    assert one.message_id == "a1"
    assert one.body == b'{"number":1,"name":"x"}'
    assert one.durable
    assert one.delivery_count == 0
    assert str(one.message_annotations["x-opt-replay-id"]).startswith("dead-")
    assert len(one.message_annotations["x-opt-dead-letter-history"]) == 1
    assert "x-opt-sequence-number" not in one.message_annotations
    assert ids(letters, "b") == ["b2"]
    # The dead letters are where they were.
    assert [each.message_id for each in letters.messages(DEAD)][:3] == ["a0", "a2", "a3"]
    assert run(spark, letters, replay_to="out", rate="1000/s").facts["replay"]["replayed"] == 10
    assert len(ids(letters, "out")) == 10
    assert ids(letters, DEAD) == []


@pytest.mark.slow
def test_what_cannot_go_anywhere_stays(spark: Any, letters: Any) -> None:
    def stray(source: str | None) -> Message:
        said = {} if source is None else {"x-opt-deadletter-source": source}
        return Message("x", message_annotations=said, message_id=str(source), durable=True)

    for source in (None, "$management", "a/$management", "nowhere", DEAD):
        letters.send(DEAD, stray(source))
    dry = run(spark, letters, replay_to="original", dry_run=True)
    assert (dry.facts["replay"]["would_replay"], dry.facts["replay"]["failed"]) == (12, 5)
    report = run(spark, letters, replay_to="original")
    assert report.exit_code == 3
    assert (report.facts["replay"]["replayed"], report.facts["replay"]["failed"]) == (12, 5)
    assert ids(letters, DEAD) == sorted(["None", "$management", "a/$management", "nowhere", DEAD])
    assert "nowhere" in report.console()


@pytest.mark.slow
def test_a_replay_goes_on_after_an_interruption(
    spark: Any, letters: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has published to one of two queues, and the next run has another condition."""
    ask = connections.call
    commits = []

    def call(endpoint: Any, address: str, operation: str, *args: Any, **given: Any) -> Any:
        if operation == "COMMIT-EPOCH":
            commits.append(address)
            if len(commits) > 1:
                raise ConnectionLost("the driver ends")
        return ask(endpoint, address, operation, *args, **given)

    with monkeypatch.context() as broken:
        broken.setattr(connections, "call", call)
        with pytest.raises(ConnectionLost):
            run(spark, letters, replay_to="original", where="message_id not like '%3'")
    assert sorted(commits) == ["a", "b"]
    one, other = commits
    dry = run(spark, letters, replay_to="original", where="message_id like '%1'", dry_run=True)
    assert dry.facts["replay"]["set_aside"] == 12
    report = run(spark, letters, replay_to="original", where="message_id like '%1'")
    assert (report.facts["replay"]["finished"], report.facts["replay"]["replayed"]) == (5, 1)
    assert ids(letters, one) == [f"{one}{number}" for number in (0, 1, 2, 4, 5)]
    assert ids(letters, other) == [f"{other}1"]
    assert ids(letters, DEAD) == sorted(
        [f"{one}3", *(f"{other}{each}" for each in (0, 2, 3, 4, 5))]
    )


def test_mistakes_are_one_sentence(spark: Any, letters: Any) -> None:
    for wrong, why in (
        ({"where": "sauce = 'a'"}, "where is no condition: .*sauce"),
        ({"where": "source ="}, "where is no condition"),
        ({"replay_to": DEAD}, "the dead-letter queue itself"),
        ({"rate": "many"}, "rate"),
    ):
        with pytest.raises(ValueError, match=why):
            run(spark, letters, **wrong)
