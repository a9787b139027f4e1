"""Declarations: defaults of the service, times in each form, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from math import inf

import pytest
from amqp_rt_servicebus.declarations import (
    Correlation,
    Everything,
    Hub,
    Queue,
    Rule,
    SasKey,
    Sql,
    Subscription,
    Topic,
)
from amqp_rt_servicebus.timespans import FOREVER, Timespan, iso_of, seconds_of


@pytest.mark.parametrize(
    ("value", "seconds", "text"),
    [
        ("PT30S", 30, "PT30S"),
        (" PT5M ", 300, "PT5M"),
        ("P14DT12H", 1_252_800, "P14DT12H"),
        (timedelta(hours=25, milliseconds=500), 90_000.5, "P1DT1H0.5S"),
        (0, 0, "PT0S"),
        (FOREVER, inf, FOREVER),
        (inf, inf, FOREVER),
        (timedelta.max, inf, FOREVER),
    ],
)
def test_times(value: Timespan, seconds: float, text: str) -> None:
    assert seconds_of(value) == seconds
    assert iso_of(seconds) == text
    assert seconds_of(text) == seconds


@pytest.mark.parametrize(
    "value", ["30", "P1Y", "", "-PT3S", -1, timedelta(seconds=-1), float("nan")]
)
def test_other_texts_and_negative_times_are_refused(value: Timespan) -> None:
    with pytest.raises(ValueError, match=r"not an ISO 8601 duration|negative"):
        seconds_of(value)


def test_defaults_are_those_of_the_service() -> None:
    queue = Queue("orders")
    assert (queue.lock_duration, queue.max_delivery_count) == (60, 10)
    assert queue.default_message_time_to_live == inf
    assert queue.duplicate_detection_history_time_window == 600
    (rule,) = Subscription("all").rules or ()
    assert rule == Rule("$Default", Everything())
    assert Subscription("none", []).rules == ()
    assert Hub("clicks").consumer_groups == ()


def test_times_of_options_are_seconds_once_declared() -> None:
    queue = Queue("q", lock_duration=timedelta(minutes=2), default_message_time_to_live="P1D")
    assert (queue.lock_duration, queue.default_message_time_to_live) == (120, 86_400)
    assert Queue("q", forward_to="").forward_to is None


def test_a_text_is_an_sql_filter() -> None:
    assert Rule("eu", "region = 'eu'").filter == Sql("region = 'eu'")
    assert Rule("eu", Correlation(label="eu")).filter == Correlation(label="eu")


@pytest.mark.parametrize(
    ("declare", "said"),
    [
        (lambda: Queue(""), "queue ''"),
        (lambda: Queue("a" * 261), "at most 260"),
        (lambda: Queue("a b"), "letters, digits"),
        (lambda: Queue("/a"), "slash"),
        (lambda: Queue("a/$management"), "letters, digits"),
        (lambda: Queue("a/Subscriptions/b"), "reserved"),
        (lambda: Subscription("a/b"), "subscription 'a/b'"),
        (lambda: Subscription("s" * 51), "at most 50"),
        (lambda: Rule("r" * 51), "at most 50"),
        (lambda: Topic("t", [Subscription("S"), Subscription("s")]), "two subscriptions"),
        (lambda: Subscription("s", [Rule("a"), Rule("A")]), "two rules"),
        (lambda: Queue("q", lock_duration="soon"), "queue 'q': lock_duration: 'soon'"),
        (lambda: Queue("q", lock_duration=0), "lock_duration is 0"),
        (lambda: Queue("q", max_delivery_count=0), "max_delivery_count"),
        (lambda: Queue("q", requires_session=True, forward_to="p"), "requires sessions"),
        (lambda: Queue("q", user_metadata="x" * 1_025), "user_metadata"),
        (lambda: Hub("h", partitions=0), "partitions is 0"),
        (lambda: Hub("h", consumer_groups=["a", "A"]), "two consumer groups"),
        (lambda: SasKey(""), "empty"),
    ],
)
def test_wrong_declarations_are_refused_in_a_sentence(
    declare: Callable[[], object], said: str
) -> None:
    with pytest.raises(ValueError, match=said.replace("$", r"\$")):
        declare()
