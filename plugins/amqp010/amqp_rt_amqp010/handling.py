"""Layer above a session: owns the parts that carry out its commands."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from hashlib import sha256
from typing import Final, TypeAlias

from amqp_rt.fronts import Limits, Peer, Topology, TransactionBranches
from amqp_rt.fronts.anchors import Anchor
from amqp_rt.fronts.links import FrontLink

from .assembling import Assembly
from .contexts import Connection
from .deliveries import OutgoingDelivery
from .faults import CommandFault
from .handlers import LATER, Answer
from .layouts import Command, ExecutionException, FileStage
from .order import SessionContext
from .parts import Parts, carry_out
from .serials import RangeSet
from .sessions import Session, SessionKey

log = logging.getLogger("amqp_rt.frames")

#: Makes the topology of a session for its peer and its anchor.
MakeTopology: TypeAlias = Callable[[Peer, Anchor], Topology]
#: Returns the branches of distributed transactions that a session may use, likewise.
MakeBranches: TypeAlias = Callable[[Peer, Anchor], TransactionBranches]

#: Characters of the names of sessions that names of links repeat.
_NAME_MAX: Final = 100


class Handler:
    """Layer above one session (:class:`~amqp_rt_amqp010.handlers.CommandHandler`).

    Args:
        session: The session.
        peer: Peer of the connection that attaches it.
        limits: Bounds on resources that the peer may use.
        make_topology: Makes the topology of the session; None if nothing can be declared.
        make_branches: Returns its branches of distributed transactions; None if there are none.
    """

    def __init__(
        self,
        session: Session,
        peer: Peer,
        limits: Limits,
        make_topology: MakeTopology | None,
        make_branches: MakeBranches | None = None,
    ) -> None:
        anchor = Anchor(limits, peer, anchor_name(session.key))
        topology = None if make_topology is None else make_topology(peer, anchor)
        branches = None if make_branches is None else make_branches(peer, anchor)
        context = SessionContext(session, anchor, topology, branches, self._carry_out)
        #: None after the end of the session: they refer to it, and it refers to its handler.
        self._parts: Parts | None = Parts(context)

    @property
    def links(self) -> Iterable[FrontLink]:
        """Links of the session."""
        return () if self._parts is None else tuple(self._parts.context.anchor.links)

    @property
    def unsettled(self) -> Mapping[int, OutgoingDelivery]:
        """Messages that the client has acquired and not settled, in the order of sending."""
        return {} if self._parts is None else self._parts.subscriptions.deliveries.held

    @property
    def subscription_count(self) -> int:
        """Number of subscriptions of the session, requested and cancelled ones included."""
        return 0 if self._parts is None else len(self._parts.subscriptions)

    def on_attached(self, connection: Connection) -> None:
        """Continue on *connection*, to which the session has been attached."""
        if self._parts is None:
            return
        context = self._parts.context
        if context.anchor.peer is not connection.peer:
            if context.topology is not None:
                context.topology.moved(connection.peer)
            if context.branches is not None:
                context.branches.moved(connection.peer)
            # Before any other event of the session: the container judges the links by it.
            connection.report(context.anchor.moved(connection.peer))
        context.report_waiting()
        context.order.resume()

    # --- for the session --------------------------------------------------------------------------

    @property
    def is_congested(self) -> bool:
        """Whether so many commands wait here that input of the channel should wait."""
        return self._parts is not None and self._parts.is_congested

    def execute(self, number: int, command: Command, assembly: Assembly, *, sync: bool) -> Answer:
        """Carry out *command*, after those that wait before it.

        Raises:
            CommandFault: It failed; the session ends.
        """
        parts = self._parts
        assert parts is not None
        context = parts.context
        if context.order.is_busy:
            context.order.hold(number, command, assembly)
            return LATER
        return carry_out(parts.methods, context, number, command, assembly)

    def _carry_out(self, number: int, command: Command, assembly: Assembly) -> Answer:
        parts = self._parts
        assert parts is not None
        return carry_out(parts.methods, parts.context, number, command, assembly)

    def salvage(self, assembly: Assembly) -> None:
        """Keep the part of a file that has arrived of a command that will not be complete."""
        parts = self._parts
        if (
            parts is not None
            and not parts.context.order.is_busy
            and assembly.code == FileStage.CODE
        ):
            parts.staging.salvage(assembly)

    def on_result(self, number: int, value: object) -> None:
        """Refuse a result: no command that a server sends has one.

        Raises:
            CommandFault: Always.
        """
        raise CommandFault(f"command {number} has no result")

    def on_exception(self, exception: ExecutionException) -> None:
        """Log the exception: the peer detaches after it."""
        log.warning(
            "execution.exception from a client: %s %s",
            exception.error_code,
            exception.description or "",
        )

    def on_completed(self, commands: RangeSet) -> None:
        """Pass on that the peer has completed *commands*."""
        if self._parts is not None:
            self._parts.on_completed(commands)

    def on_ready(self) -> None:
        """Continue to send."""
        if self._parts is not None:
            self._parts.on_ready()

    def on_suspended(self) -> None:
        """Stop sending: the session was detached, and its state is kept."""
        if self._parts is not None:
            self._parts.on_suspended()

    def on_resumed(self) -> None:
        """Continue to send: the session is attached again."""
        if self._parts is not None:
            self._parts.on_resumed()

    def on_ended(self) -> None:
        """End the parts, then the links of the session, and what follows it."""
        parts = self._parts
        if parts is None:
            return
        self._parts = None
        context = parts.context
        context.order.end()
        parts.on_ended()
        context.anchor.end()
        if context.topology is not None:
            context.topology.close()


def anchor_name(key: SessionKey) -> str:
    """Return a text that names the session of *key*, and no other session of its user."""
    name = key.name
    try:
        text = name.decode()
    except UnicodeDecodeError:
        text = ""
    if text and len(text) <= _NAME_MAX and text.isprintable() and not text.startswith("session-"):
        return text
    return f"session-{sha256(name).hexdigest()}"
