"""Calls of a handler that are due in the next turn."""

from __future__ import annotations

import pytest
from amqp_rt_amqp010.codec import write_command
from amqp_rt_amqp010.faults import CommandFault
from amqp_rt_amqp010.layouts import (
    ErrorCode,
    MessageAccept,
    QueueDelete,
    SessionCompleted,
    SessionDetach,
)
from scenes010 import Channel, Scene, ranges

ACCEPT = MessageAccept(transfers=ranges((0, 0)))


class Accepting:
    """Part of a handler that accepts and completes a transfer in the next turn."""

    def __init__(self, channel: Channel) -> None:
        self.session = channel.session
        self.calls = 0

    def conclude(self) -> None:
        self.calls += 1
        self.session.send(write_command(ACCEPT), urgent=True)
        self.session.complete(0)


@pytest.fixture
def channel() -> Channel:
    made = Scene().attached()
    made.command(QueueDelete(queue="q"))
    assert made.taken() == []
    return made


@pytest.mark.req("D15")
def test_a_due_call_comes_before_completions_and_only_once(channel: Channel) -> None:
    part = Accepting(channel)
    before = channel.transport.turns
    channel.session.at_turn(part.conclude)
    channel.session.at_turn(part.conclude)
    assert channel.transport.turns > before
    assert part.calls == 0
    channel.turn()
    channel.turn()
    assert part.calls == 1
    assert channel.taken() == [ACCEPT, SessionCompleted(commands=ranges((0, 0)))]


@pytest.mark.req("D15")
def test_a_due_call_comes_before_an_exception(channel: Channel) -> None:
    part = Accepting(channel)
    channel.session.at_turn(part.conclude)
    channel.session.fail(CommandFault("no", ErrorCode.NOT_FOUND), 1)
    sent = channel.taken()
    assert sent[:2] == [ACCEPT, SessionCompleted(commands=ranges((0, 0)))]
    assert isinstance(sent[-1], SessionDetach)


def test_a_due_call_may_end_the_session(channel: Channel) -> None:
    session = channel.session
    session.at_turn(lambda: session.fail(CommandFault("no", ErrorCode.NOT_FOUND), 0))
    channel.turn()
    assert channel.failure().error_code == ErrorCode.NOT_FOUND


def test_nothing_is_due_after_the_end(channel: Channel) -> None:
    part = Accepting(channel)
    channel.session.at_turn(part.conclude)
    channel.session.end()
    part.session.at_turn(part.conclude)
    channel.attachment.turn(0.0)
    assert part.calls == 0
