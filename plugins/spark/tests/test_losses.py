"""Which errors are a loss of the broker, and how long one is borne."""

from __future__ import annotations

import pytest
from amqp_rt_spark.losses import Patience, is_loss

from amqp_rt.errors import (
    AmqpError,
    AuthenticationFailed,
    ConnectFailed,
    ConnectionLost,
    DeadlineExceeded,
    DeliveryRejected,
    LinkDetached,
    LinkRefused,
    SessionEnded,
)

pytestmark = pytest.mark.req("K2", "K3")


@pytest.mark.parametrize(
    ("error", "loss"),
    [
        (ConnectionLost("reset"), True),
        (ConnectionLost("idle", condition="amqp:resource-limit-exceeded"), True),
        (ConnectionLost("who?", condition="amqp:unauthorized-access"), False),
        (ConnectFailed("nothing listens there"), True),
        (ConnectFailed("no such scheme", condition="amqp:not-implemented"), False),
        (AuthenticationFailed("wrong password"), False),
        (SessionEnded("ended"), True),
        (DeadlineExceeded("no answer"), True),
        (DeadlineExceeded("no room", condition="amqp:resource-limit-exceeded"), False),
        (LinkDetached("by an operator"), True),
        (LinkDetached("gone", condition="amqp:resource-deleted"), False),
        (LinkDetached("taken over", condition="amqp:link:stolen"), False),
        (LinkRefused("no such node"), False),
        (DeliveryRejected("too large"), False),
        (AmqpError("the broker stops", condition="amqp:connection:forced"), True),
        (AmqpError("no such epoch", condition="amqp:precondition-failed"), False),
    ],
)
def test_what_is_a_loss(error: AmqpError, loss: bool) -> None:
    assert is_loss(error) is loss


class Time:
    """A clock that goes on when one sleeps."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.slept.append(seconds)
        self.now += seconds

    def patience(self, retry_s: float) -> Patience:
        return Patience(retry_s, now=lambda: self.now, sleep=self.sleep)


def test_the_first_attempt_comes_at_once_and_later_ones_after_longer_and_longer_pauses() -> None:
    time = Time()
    patience = time.patience(60)
    with pytest.raises(ConnectionLost, match=r"away; tried again for 60 s \(retryTimeout\)"):  # noqa: PT012 - the last one of many
        for _ in range(1_000):
            patience.bear(ConnectionLost("away"))
    # The first one at once.
    for pause, most in zip(time.slept[:6], (0.1, 0.2, 0.4, 0.8, 1.6, 3.2), strict=True):
        assert most / 2 <= pause <= most
    assert all(pause <= 5 for pause in time.slept)
    # The last one is when the time is over, and not before.
    assert time.now == pytest.approx(160)


def test_the_time_is_counted_from_each_loss() -> None:
    time = Time()
    patience = time.patience(60)
    patience.bear(ConnectionLost("away"), 1)
    time.now += 59
    patience.bear(ConnectionLost("away"), 1)
    # The query has progressed meanwhile: this is another loss.
    patience.bear(ConnectionLost("away"), 2)
    time.now += 59
    patience.bear(ConnectionLost("away"), 2)
    time.now += 2
    with pytest.raises(ConnectionLost, match="tried again for 60 s"):
        patience.bear(ConnectionLost("away"), 2)


def test_what_is_no_loss_is_not_borne() -> None:
    time = Time()
    error = LinkRefused("no such node")
    with pytest.raises(LinkRefused) as caught:
        time.patience(60).bear(error)
    assert caught.value is error
    lost = ConnectionLost("away")
    with pytest.raises(ConnectionLost) as at_once:
        time.patience(0).bear(lost)
    assert at_once.value is lost
    assert time.slept == []
