"""Times with units."""

from __future__ import annotations

import pytest

from amqp_rt.durations import parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0),
        ("30", 30),
        ("2.5", 2.5),
        ("500ms", 0.5),
        ("30s", 30),
        (" 1.5 m ", 90),
        ("2h", 7_200),
        ("1d", 86_400),
        ("10000000000", 1e10),
    ],
)
def test_a_time_is_a_number_with_or_without_a_unit(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "s", "soon", "-1s", "-1", "1y", "inf", "infs", "nan", "1e9s", "1s2", "1,5s", "٣s"]
)
def test_other_texts_are_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a time such as 30s, 500ms, 5m or 2h$"):
        parse_duration(text)


@pytest.mark.parametrize("text", ["10000000001", "115741d", "9" * 400])
def test_a_time_has_a_bound(text: str) -> None:
    with pytest.raises(ValueError, match=r"is longer than 10000000000 seconds$"):
        parse_duration(text)
