"""The bound on log lines that others can repeat."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from amqp_rt.events import Peer
from amqp_rt.limits import Limits
from amqp_rt.loglimit import LogLimiter, error_text, log_refusal
from amqp_rt.outcomes import Error
from amqp_rt.termini import Target

LIMITS = Limits(log_lines_max=2, log_period_s=10, log_keys_max=3)


def test_a_period_has_so_many_lines_and_the_next_one_says_what_was_left_out() -> None:
    limiter = LogLimiter(LIMITS)
    assert [limiter.admit("a", now) for now in (0, 1, 2, 9.9)] == ["", "", None, None]
    assert limiter.admit("b", 9.9) == "", "each key has its own"
    assert limiter.admit("a", 10) == " (2 more like this were not logged)"
    assert [limiter.admit("a", now) for now in (11, 12)] == ["", None]


def test_only_so_many_keys_are_remembered() -> None:
    limiter = LogLimiter(LIMITS)
    for number in range(100):
        assert limiter.admit(number, 0) == ""
        assert limiter.admit(number, 0) == ""
    assert len(limiter._keys) == LIMITS.log_keys_max
    assert limiter.admit(99, 0) is None
    assert limiter.admit(0, 0) == "", "the oldest are forgotten"


def test_a_clock_that_is_put_back_begins_a_new_period() -> None:
    limiter = LogLimiter(LIMITS)
    assert [limiter.admit("a", 1_000) for _ in range(3)] == ["", "", None]
    assert limiter.admit("a", 5) == " (1 more like this were not logged)"


def test_a_peer_forges_no_line_by_its_error() -> None:
    said = error_text(Error("a\nWARNING forged" + "b" * 500, "c\nd\x1b[2J"))
    assert said.isprintable()
    assert len(said) < 200
    assert error_text(Error("amqp:not-found", "no")) == "amqp:not-found: 'no'"
    assert error_text(Error("amqp:not-found")) == "amqp:not-found"


@pytest.mark.parametrize(
    ("addresses", "lines"),
    [
        # A peer chooses its container-id and its port, and in IPv6 the second half of its address.
        (["192.0.2.1:1", "192.0.2.1:2", "192.0.2.1:3"], 2),
        (["[2001:db8::1]:1", "[2001:db8::2]:1", "[2001:db8::ffff:1]:1"], 2),
        (["192.0.2.1:1", "[::ffff:192.0.2.1]:2", "192.0.2.1:3"], 2),
        (["192.0.2.1:1", "192.0.2.2:1", "192.0.2.3:1"], 3),
        (["[2001:db8::1]:1", "[2001:db8:0:1::1]:1", "192.0.2.1:1"], 3),
        (["unix", "unix", "unix"], 2),
        (["memory://a", "memory://b:5672", "memory://a"], 3),
    ],
)
def test_refused_links_are_counted_by_the_network_of_their_peer(
    addresses: list[str], lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    limiter = LogLimiter(LIMITS)
    for number, address in enumerate(addresses):
        peer = Peer(container_id=f"c{number}", address=address)
        link = SimpleNamespace(name="l", peer=peer, source=None, target=Target(address="q"))
        log_refusal(logging.getLogger(), limiter, link, Error("amqp:not-found", "no"), 0)
    assert len(caplog.records) == lines
