"""The stage tables crossed with every step, the standard's names, and numbers that wrap."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amqp_rt.core import serial
from amqp_rt.core.lifecycle import (
    CONNECTION,
    LINK,
    SESSION,
    Half,
    Stage,
    Step,
    connection_state,
    link_state,
    session_state,
)
from amqp_rt.errors import LocalProtocolError, RemoteProtocolError

TABLES = {"connection": CONNECTION, "session": SESSION, "link": LINK}

#: Transitions that the standard allows, written down a second time: (table, stage, step) → stage.
ALLOWED = {
    ("connection", Stage.START, Step.HEADER): Stage.HEADER,
    ("connection", Stage.HEADER, Step.OPEN): Stage.OPENED,
    ("connection", Stage.OPENED, Step.CLOSE): Stage.CLOSED,
    ("session", Stage.UNMAPPED, Step.BEGIN): Stage.MAPPED,
    ("session", Stage.MAPPED, Step.END): Stage.ENDED,
    ("link", Stage.DETACHED, Step.ATTACH): Stage.ATTACHED,
    ("link", Stage.ATTACHED, Step.DETACH): Stage.SUSPENDED,
    ("link", Stage.ATTACHED, Step.DETACH_CLOSED): Stage.CLOSED,
    ("link", Stage.SUSPENDED, Step.ATTACH): Stage.ATTACHED,
}
STAGES = [(name, stage) for name, table in TABLES.items() for stage in table]


@pytest.mark.req("X26")
@pytest.mark.parametrize("ours", [True, False], ids=["ours", "theirs"])
@pytest.mark.parametrize("step", Step)
@pytest.mark.parametrize(("table", "stage"), STAGES)
def test_every_stage_with_every_step(table: str, stage: Stage, step: Step, ours: bool) -> None:
    half = Half(TABLES[table], stage, ours=ours)
    after = ALLOWED.get((table, stage, step))
    assert half.may(step) is (after is not None)
    if after is not None:
        half.take(step)
        assert half.stage is after
        return
    # Whose half it is says whose fault it is.
    with pytest.raises(
        LocalProtocolError if ours else RemoteProtocolError, match=re.escape(step.value)
    ) as caught:
        half.take(step)
    assert half.stage is stage
    if not ours:
        assert caught.value.condition == "amqp:not-allowed"


def test_every_stage_can_be_reached() -> None:
    for name, table in TABLES.items():
        reached = {next(iter(table))}
        while True:
            further = {after for stage in reached for after in table[stage].values()}
            if further <= reached:
                break
            reached |= further
        assert reached == set(table), name


CONNECTION_STATES = {
    (Stage.START, Stage.START): "START",
    (Stage.START, Stage.HEADER): "HDR_RCVD",
    (Stage.HEADER, Stage.START): "HDR_SENT",
    (Stage.HEADER, Stage.HEADER): "HDR_EXCH",
    (Stage.HEADER, Stage.OPENED): "OPEN_RCVD",
    (Stage.OPENED, Stage.START): "OPEN_PIPE",
    (Stage.OPENED, Stage.HEADER): "OPEN_SENT",
    (Stage.OPENED, Stage.OPENED): "OPENED",
    (Stage.OPENED, Stage.CLOSED): "CLOSE_RCVD",
    (Stage.CLOSED, Stage.START): "OC_PIPE",
    (Stage.CLOSED, Stage.HEADER): "CLOSE_PIPE",
    (Stage.CLOSED, Stage.OPENED): "CLOSE_SENT",
    (Stage.CLOSED, Stage.CLOSED): "END",
}
SESSION_STATES = {
    (Stage.UNMAPPED, Stage.UNMAPPED): "UNMAPPED",
    (Stage.MAPPED, Stage.UNMAPPED): "BEGIN_SENT",
    (Stage.UNMAPPED, Stage.MAPPED): "BEGIN_RCVD",
    (Stage.MAPPED, Stage.MAPPED): "MAPPED",
    (Stage.ENDED, Stage.MAPPED): "END_SENT",
    (Stage.MAPPED, Stage.ENDED): "END_RCVD",
    (Stage.ENDED, Stage.ENDED): "UNMAPPED",
}
LINK_STATES = {
    (Stage.DETACHED, Stage.DETACHED): "DETACHED",
    (Stage.ATTACHED, Stage.DETACHED): "ATTACH_SENT",
    (Stage.DETACHED, Stage.ATTACHED): "ATTACH_RCVD",
    (Stage.ATTACHED, Stage.ATTACHED): "ATTACHED",
    (Stage.SUSPENDED, Stage.ATTACHED): "DETACH_SENT",
    (Stage.CLOSED, Stage.ATTACHED): "DETACH_SENT",
    (Stage.ATTACHED, Stage.SUSPENDED): "DETACH_RCVD",
    (Stage.ATTACHED, Stage.CLOSED): "DETACH_RCVD",
    (Stage.CLOSED, Stage.CLOSED): "DETACHED",
    (Stage.SUSPENDED, Stage.SUSPENDED): "DETACHED",
}


@pytest.mark.parametrize(
    ("table", "name", "states", "otherwise"),
    [
        (CONNECTION, connection_state, CONNECTION_STATES, "DISCARDING"),
        (SESSION, session_state, SESSION_STATES, "DISCARDING"),
        (LINK, link_state, LINK_STATES, None),
    ],
    ids=["connection", "session", "link"],
)
def test_every_pair_of_stages_has_a_name(
    table: dict[Stage, dict[Step, Stage]],
    name: object,
    states: dict[tuple[Stage, Stage], str],
    otherwise: str | None,
) -> None:
    for ours in table:
        for theirs in table:
            found = name(  # type: ignore[operator]
                Half(table, ours, ours=True), Half(table, theirs, ours=False)
            )
            if (ours, theirs) in states or otherwise is not None:
                assert found == states.get((ours, theirs), otherwise)
            else:
                assert found in states.values()


# --- numbers that wrap -------------------------------------------------------------------------

TOP = 0xFFFFFFFF
HALF = 0x80000000


@pytest.mark.req("X10")
@pytest.mark.parametrize(
    ("value", "count", "result"),
    [
        (0, 0, 0),
        (0, 1, 1),
        (TOP, 1, 0),
        (TOP - 3, 10, 6),
        (0, -1, TOP),
        (5, -10, TOP - 4),
        (HALF, HALF - 1, TOP),
        (HALF, HALF, 0),
    ],
)
def test_moving_on(value: int, count: int, result: int) -> None:
    assert serial.add(value, count) == result


@pytest.mark.req("X10")
@pytest.mark.parametrize(
    ("later", "earlier", "distance"),
    [
        (0, 0, 0),
        (1, 0, 1),
        (0, 1, -1),
        (0, TOP, 1),
        (TOP, 0, -1),
        (5, TOP - 4, 10),
        (TOP - 4, 5, -10),
        (HALF - 1, 0, HALF - 1),
        # RFC 1982 leaves half the circle undefined; ours counts as before.
        (HALF, 0, -HALF),
        (HALF + 1, 0, -HALF + 1),
        (0, HALF, -HALF),
    ],
)
def test_how_far_one_number_is_after_another(later: int, earlier: int, distance: int) -> None:
    assert serial.difference(later, earlier) == distance


@pytest.mark.req("X10")
@pytest.mark.parametrize(
    ("value", "first", "last", "inside"),
    [
        (3, 3, 3, True),
        (2, 3, 3, False),
        (4, 3, 5, True),
        (6, 3, 5, False),
        (TOP, TOP - 1, 1, True),
        (0, TOP - 1, 1, True),
        (1, TOP - 1, 1, True),
        (2, TOP - 1, 1, False),
        (TOP - 2, TOP - 1, 1, False),
        (3, 5, 4, False),
        (5, 5, 4, False),
        (0, 0, HALF - 1, True),
        (0, 0, HALF, False),
    ],
)
def test_what_lies_in_a_range(value: int, first: int, last: int, inside: bool) -> None:
    assert serial.within(value, first, last) is inside


numbers = st.integers(0, TOP)
steps = st.integers(-HALF + 1, HALF - 1)


@pytest.mark.req("X10")
@given(numbers, steps)
def test_what_was_added_is_the_difference(value: int, count: int) -> None:
    assert serial.difference(serial.add(value, count), value) == count


@pytest.mark.req("X10")
@given(numbers, st.integers(0, 1_000), st.integers(-1_000, 2_000))
def test_a_range_holds_what_is_counted_from_its_first(first: int, width: int, at: int) -> None:
    last = serial.add(first, width)
    assert serial.within(serial.add(first, at), first, last) is (0 <= at <= width)
