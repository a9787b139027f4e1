"""Credit of a subscription against a plain model, in both units and modes."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from amqp_rt_amqp010.credit import UNLIMITED, Credit
from hypothesis import given
from hypothesis import strategies as st

INFINITE = float("inf")

values = st.sampled_from([0, 1, 2, 10, 100, UNLIMITED - 1, UNLIMITED])
steps = st.one_of(
    st.tuples(st.just("add"), st.sampled_from([0, 1]), values),
    st.tuples(st.just("send"), st.integers(0, 120)),
    st.tuples(st.just("complete"), st.integers(0, 8)),
    st.tuples(st.just("clear")),
    st.tuples(st.just("mode"), st.booleans()),
)


@dataclass
class Model:
    """The rules of ``set-flow-mode`` and ``flow``, in the words of the specification."""

    windowed: bool = True
    balance: list[float] = field(default_factory=lambda: [0, 0])
    #: Transfers in the window: what they have used.
    used: dict[int, int] = field(default_factory=dict)
    blocked: bool = False

    def may_send(self, size: int) -> bool:
        return not self.blocked and self.balance[0] >= 1 and self.balance[1] >= max(size, 1)


@pytest.mark.req("D7")
@given(st.lists(steps, max_size=60))
def test_credit_follows_the_rules(script: list[tuple[object, ...]]) -> None:
    credit, model, number = Credit(), Model(), 0
    for step in script:
        match step:
            case ("add", int(unit), int(value)):
                credit.add(unit, value)
                model.balance[unit] += INFINITE if value == UNLIMITED else value
                model.blocked = False
            case ("send", int(size)):
                tried = credit.messages > 0
                assert tried == model.may_send(0)
                if not tried:
                    continue
                fits = model.may_send(size)
                assert credit.covers(size) == fits
                model.blocked = not fits
                if fits:
                    was_limited = INFINITE in model.balance and model.balance[0] == model.balance[1]
                    assert credit.use(number, size) == (model.windowed and not was_limited)
                    model.balance[0] -= 1
                    model.balance[1] -= size
                    if model.windowed:
                        model.used[number] = size
                    number += 1
            case ("complete", int(back)):
                credit.complete(number - back)
                size = model.used.pop(number - back, None)
                if size is not None:
                    model.balance[0] += 1
                    model.balance[1] += size
                    if INFINITE not in model.balance or model.balance[0] != model.balance[1]:
                        model.blocked = False
            case ("clear",):
                credit.clear()
                model.balance = [0, 0]
                model.used.clear()
                model.blocked = False
            case ("mode", bool(windowed)) if model.balance == [0, 0]:
                assert credit.is_zero
                if windowed != model.windowed:
                    credit.clear()
                    credit.is_windowed = model.windowed = windowed
                    model.used.clear()
        assert credit.is_zero == (model.balance == [0, 0])
        assert (credit.messages > 0) == model.may_send(0)
        if credit.messages and model.balance[0] != INFINITE:
            assert credit.messages == model.balance[0]


def test_what_is_cleared_names_the_transfers_that_return_nothing() -> None:
    credit = Credit()
    credit.add(0, 3)
    credit.add(1, 10)
    assert credit.use(7, 4)
    assert credit.use(9, 4)
    credit.complete(7)
    assert credit.outstanding == 1
    assert credit.clear() == [9]
    credit.complete(9)
    assert credit.is_zero
