"""Failed logins are told later each time."""

from __future__ import annotations

import pytest

from amqp_rt.limits import Limits
from amqp_rt.security.backoff import Backoff


@pytest.mark.req("SE2", "SE18")
def test_failures_cost_more_and_more() -> None:
    backoff = Backoff(Limits(failed_login_delay_s=1, failed_login_delay_max_s=8))
    assert [backoff.failed(["ada"], 0.0) for _ in range(6)] == [1, 2, 4, 8, 8, 8]
    assert backoff.failed(["bob"], 0.0) == 1
    # Whichever of the two has failed more often.
    assert backoff.failed(["address", "ada"], 0.0) == 8
    assert [Backoff(Limits(failed_login_delay_s=0)).failed(["x"], 0.0) for _ in range(3)] == [0] * 3
    assert Backoff(Limits(failed_login_delay_s=20)).failed(["x"], 0.0) == 20


@pytest.mark.req("SE2", "SE18")
def test_failures_are_forgotten() -> None:
    backoff = Backoff(Limits(failed_login_memory_s=60))
    assert [backoff.failed(["ada"], now) for now in (0, 59, 118, 178, 179)] == [1, 2, 4, 1, 2]


@pytest.mark.req("SE2", "SE18")
def test_what_is_remembered_is_bounded() -> None:
    backoff = Backoff(Limits(failed_logins_kept=10))
    for number in range(11):
        backoff.failed([f"user {number}"], 0.0)
        assert len(backoff._failures) <= 10
    assert backoff.failed(["user 10"], 0.0) == 2
    assert backoff.failed(["user 0"], 0.0) == 1
