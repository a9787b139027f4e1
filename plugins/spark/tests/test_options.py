"""The options: read, checked, and refused with what was meant."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
from amqp_rt_spark import kafka_names
from amqp_rt_spark.options import OPTIONS, Options, explain, read_options
from amqp_rt_spark.schema import COLUMNS

pytestmark = pytest.mark.req("K1")

HERE = {"url": "amqp://h", "address": "a"}


def test_names_have_no_case() -> None:
    found = read_options(
        {"URL": "amqp://h", "ADDRESS": "a, b", "StartingOffsets": "Latest"}, "source"
    )
    assert (found.url, found.addresses, found.starting_offsets) == (
        "amqp://h",
        ("a", "b"),
        "latest",
    )
    assert pickle.loads(pickle.dumps(found)) == found


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("maxTriggerDelay", "500ms", "max_delay", 0.5),
        ("maxTriggerDelay", "5m", "max_delay", 300),
        ("hold", "2", "hold", 2),
        ("startingOffsets", '{"a": {"0": 5}}', "starting_offsets", {"a": {0: 5}}),
        ("startingTimestamp", "1970-01-01T00:00:01Z", "starting_timestamp", 1_000),
        ("startingTimestamp", "17", "starting_timestamp", 17),
        ("failOnDataLoss", "FALSE", "fail_on_data_loss", False),
        ("columns", "body, offset", "columns", ("body", "offset")),
        ("maxMessagesPerTrigger", "7", "max_messages", 7),
        ("checkpointLocation", "x", "url", "amqp://h"),
    ],
)
def test_values(name: str, text: str, field: str, value: Any) -> None:
    assert getattr(read_options({**HERE, name: text}, "source"), field) == value


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"startingOffset": "latest"}, "did you mean startingOffsets?"),
        ({"xyz": "1"}, "no option 'xyz'; there are address"),
        ({"delivery": "exactly-once"}, "delivery is for a sink, not for a source"),
        ({"maxMessagesPerTrigger": "0"}, "a whole number from 1 on"),
        ({"maxMessagesPerTrigger": "ten"}, "a whole number"),
        ({"failOnDataLoss": "maybe"}, "true or false"),
        ({"mode": "queue"}, "one of auto, log, lease, spool, browse"),
        ({"startingOffsets": "now"}, "it is earliest, latest, committed, or offsets as JSON"),
        ({"startingOffsets": "[1]"}, "or offsets as JSON"),
        ({"startingTimestamp": "2026-01-01T00:00:00"}, "with its zone"),
        ({"maxTriggerDelay": "soon"}, "a time such as 30s"),
        ({"columns": "body,offzet"}, "no column 'offzet'; did you mean offset?"),
        ({"group": " "}, "it is empty"),
        ({"subscribe": "x"}, "no option 'subscribe', which is Kafka's: did you mean address?"),
        ({"kafka.bootstrap.servers": "x"}, "did you mean url, such as amqp://host:5672?"),
        ({"maxOffsetsPerTrigger": "5"}, "Kafka's: did you mean maxMessagesPerTrigger?"),
        ({"kafka.max.poll.records": "5"}, "Kafka's, and nothing takes its place: leave it out"),
        ({"columns": "body,value"}, "no column 'value', which is Kafka's: did you mean body?"),
        ({"startingOffsets": '{"a": {"0": -2}}'}, "for Kafka's -2, earliest, leave the partition"),
        ({"addressPattern": "a*"}, "address or addressPattern, not both"),
        ({"startingOffsets": "latest", "startingTimestamp": "1"}, "not both"),
        ({"endingOffsets": '{"a": {}}', "endingTimestamp": "1"}, "not both"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(given: dict[str, str], why: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is looked at below
        read_options({**HERE, **given}, "source")
    assert why in str(caught.value)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"address": "a"}, "needs the option url"),
        ({"url": "amqp://h", "addressPattern": "a*"}, "for a source, not for a sink"),
        ({**HERE, "topic": "x"}, "Kafka's: did you mean address?"),
        ({**HERE, "address": "a,b"}, "a sink has one address"),
        ({**HERE, "onReject": "deadletter"}, "go together"),
        ({**HERE, "deadLetterAddress": "d"}, "go together"),
        ({**HERE, "group": "g"}, "for a source, not for a sink"),
    ],
)
def test_what_a_sink_needs(given: dict[str, str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read_options(given, "sink")


def test_the_guide_knows_every_option() -> None:
    guide = Path(__file__).parents[3] / "docs" / "guides" / "spark.md"
    text = guide.read_text("utf-8").partition("## Options")[2]
    assert [option.name for option in OPTIONS.values() if f"`{option.name}`" not in text] == []


def test_what_kafka_calls_an_option_is_none_of_ours() -> None:
    assert not kafka_names.OPTIONS.keys() & OPTIONS.keys()
    assert not kafka_names.COLUMNS.keys() & COLUMNS.keys()


def test_every_option_is_a_field_and_explained() -> None:
    # Spark's own option checkpointLocation is read, too, and explained by Spark.
    fields = set(Options.__struct_fields__) - {"checkpoint"}
    assert {option.field for option in OPTIONS.values()} == fields
    table = explain()
    assert all(f"`{option.name}`" in table and option.help for option in OPTIONS.values())
    assert "`delivery`" not in explain("source")
