"""Declarations of sessions of AMQP 0-10 at a real broker, without connections."""

from __future__ import annotations

from typing import Any

import pytest
from amqp_rt_amqp010.assembling import Assembly
from amqp_rt_amqp010.contexts import WAIT, Steps
from amqp_rt_amqp010.declarations import Declarations
from amqp_rt_amqp010.faults import CommandFault
from amqp_rt_amqp010.frames import COMMAND
from amqp_rt_amqp010.handlers import LATER, Answer, Later
from amqp_rt_amqp010.layouts import Command
from amqp_rt_amqp010.order import fault_of

from amqp_rt import Broker
from amqp_rt.errors import AmqpError
from amqp_rt.fronts import Limits, Peer, Topology
from amqp_rt.fronts.anchors import Anchor


class DeclaringSession:
    """Context of a session that only declares. Steps run to their end, or to what they wait for.

    Args:
        broker: The broker.
        peer: The peer of the session.
    """

    def __init__(self, broker: Broker, peer: Peer | None = None) -> None:
        peer = Peer() if peer is None else peer
        self.limits = Limits()
        self.anchor = Anchor(self.limits, peer, "s")
        self.topology: Topology | None = broker.topologies.of(peer, self.anchor)
        self.connection = None
        self.session: Any = None
        self.declarations = Declarations(self)
        self._steps: Steps | None = None
        #: Work of the steps so far, in frames.
        self.work = 0

    def report(self, event: object) -> None:
        raise AssertionError("declarations report nothing")

    def run(self, number: int, command: Command, steps: Steps) -> Later:
        self._steps = steps
        self.wake()
        return LATER

    def wake(self) -> None:
        if self._steps is None:
            return
        try:
            while (work := next(self._steps)) != WAIT:
                self.work += work
        except StopIteration:
            self._steps = None

    @property
    def is_waiting(self) -> bool:
        """Whether a command waits for something."""
        return self._steps is not None

    def execute(self, command: Command) -> Answer:
        """Carry out *command*."""
        return self.declarations.methods()[type(command)](0, command, Assembly(0, COMMAND))

    def refusal(self, command: Command) -> int:
        """Return the error code with which *command* is refused."""
        return int(self.fault(command).code)

    def fault(self, command: Command) -> CommandFault:
        """Return the fault with which *command* is refused."""
        with pytest.raises((CommandFault, AmqpError)) as caught:
            self.execute(command)
        return fault_of(caught.value, command)

    def end(self) -> None:
        """End the session."""
        assert self.topology is not None
        self.topology.close()
