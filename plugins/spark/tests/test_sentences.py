"""An error, as Spark shows it, begins with its sentence."""

from __future__ import annotations

import io
import json
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from amqp_rt_spark.sentences import sentence_first

from amqp_rt.errors import LinkRefused

pytestmark = pytest.mark.req("K1")


def shown(call: Callable[[], Any]) -> str:
    """Return the full traceback of the error that *call* raises."""
    try:
        call()
    except Exception:
        return traceback.format_exc()
    raise AssertionError("nothing was raised")


def shown_by_spark(call: Callable[[], Any]) -> str:
    """Return the text that a Spark worker sends to the driver for the error that *call* raises."""
    util = pytest.importorskip("pyspark.util")
    out = io.BytesIO()
    try:
        call()
    except Exception as error:
        util.handle_worker_exception(error, out)
        return out.getvalue()[8:].decode()
    raise AssertionError("nothing was raised")


class Plain:
    """A reader that fails in several ways."""

    def partitions(self) -> None:
        raise LinkRefused("cannot send to 'x': there is no such node")

    def latestOffset(self) -> None:  # noqa: N802
        try:
            json.loads("{")
        except ValueError as error:
            raise ValueError("the checkpoint holds no offset") from error

    def commit(self) -> None:
        self.latestOffset()

    def read(self) -> Iterator[int]:
        yield 1
        try:
            json.loads("{")
        except ValueError:
            raise ValueError("row 2 is none") from None


@sentence_first
class Reader(Plain):
    """The same."""


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("partitions", "LinkRefused: cannot send to 'x': there is no such node"),
        ("latestOffset", "ValueError: the checkpoint holds no offset"),
        ("commit", "ValueError: the checkpoint holds no offset"),
        ("read", "ValueError: row 2 is none"),
    ],
)
def test_the_sentence_comes_first_and_the_traceback_after(name: str, sentence: str) -> None:
    first = shown(lambda: list(getattr(Reader(), name)() or ())).splitlines()
    assert first[0].startswith(sentence)
    assert sum(line.startswith(sentence) for line in first) <= 2
    assert "Traceback (most recent call last):" in first
    assert sentence.partition(": ")[2] in first[-1]
    # The negative control.
    assert shown(lambda: list(getattr(Plain(), name)() or ())).startswith("Traceback")
    assert Reader.partitions.__name__ == "partitions"


@pytest.mark.parametrize("simplified", ["", "1"])
@pytest.mark.parametrize("name", ["partitions", "latestOffset", "commit", "read"])
def test_spark_shows_the_sentence_first(
    name: str, simplified: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when it shortens tracebacks, as it does by default, and takes the cause of the error away."""
    monkeypatch.setenv("SPARK_SIMPLIFIED_TRACEBACK", simplified)
    first = shown_by_spark(lambda: list(getattr(Reader(), name)() or ())).splitlines()
    assert "Traceback (most recent call last):" in first[1:]
    assert first[0].partition(": ")[2] == first[-1].partition(": ")[2]
    assert shown_by_spark(Plain().partitions).startswith("Traceback")


def test_an_error_stays_what_it_is() -> None:
    with pytest.raises(LinkRefused, match="cannot send") as caught:
        Reader().partitions()
    assert caught.value.condition == LinkRefused("x").condition


def test_an_error_that_is_raised_again_stays_as_it_is() -> None:
    reader = Reader()
    with pytest.raises(ValueError, match="no offset") as caught:
        reader.latestOffset()
    error = caught.value

    @sentence_first
    class Again:
        def commit(self) -> None:
            raise error

    assert shown(Again().commit).count("ValueError: the checkpoint holds no offset") == 2


def test_an_option_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyspark")
    from amqp_rt_spark.source import AmqpDataSource

    text = shown(AmqpDataSource({"subscribe": "flights"}).schema)
    assert text.startswith("ValueError: amqp has no option 'subscribe', which is Kafka's")
