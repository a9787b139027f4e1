"""Lifecycle state machines of connections, sessions and links.

Each endpoint holds two half-machines from the same table, ours and the peer's. The state names of
the standard (Part 2 §2.4.6, §2.5.5, §2.6.3) stand for pairs of stages; :func:`connection_state` and
its siblings compute them for display.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from ..errors import LocalProtocolError, ProtocolError, RemoteProtocolError


class Stage(Enum):
    """Stage that one half of an endpoint has reached."""

    # That of Enum is Python, and is called for each look-up in the tables below.
    __hash__ = object.__hash__

    START = "start"
    HEADER = "header"
    OPENED = "opened"
    CLOSED = "closed"
    UNMAPPED = "unmapped"
    MAPPED = "mapped"
    ENDED = "ended"
    DETACHED = "detached"
    ATTACHED = "attached"
    SUSPENDED = "suspended"


# Read for every frame; access through the enum class takes ten times as long.
START: Final = Stage.START
HEADER: Final = Stage.HEADER
OPENED: Final = Stage.OPENED
CLOSED: Final = Stage.CLOSED
UNMAPPED: Final = Stage.UNMAPPED
MAPPED: Final = Stage.MAPPED
ENDED: Final = Stage.ENDED
DETACHED: Final = Stage.DETACHED
ATTACHED: Final = Stage.ATTACHED


# Input that an engine reads next; see ``Engine.layer``.
READS_HEADER: Final = 0  # a protocol header
READS_SASL: Final = 1  # SASL frames
AWAITS_LOGIN: Final = 2  # nothing until the application has decided on the login
READS_FRAMES: Final = 3  # frames of AMQP
READS_NOTHING: Final = 4  # nothing any more


class Step(Enum):
    """Performatives and headers that change a stage."""

    __hash__ = object.__hash__

    HEADER = "header"
    OPEN = "open"
    CLOSE = "close"
    BEGIN = "begin"
    END = "end"
    ATTACH = "attach"
    DETACH = "detach"
    DETACH_CLOSED = "detach(closed)"


#: Steps allowed in each stage, and the stage each leads to. Absent steps are forbidden.
CONNECTION: Final[dict[Stage, dict[Step, Stage]]] = {
    Stage.START: {Step.HEADER: Stage.HEADER},
    Stage.HEADER: {Step.OPEN: Stage.OPENED},
    Stage.OPENED: {Step.CLOSE: Stage.CLOSED},
    Stage.CLOSED: {},
}

SESSION: Final[dict[Stage, dict[Step, Stage]]] = {
    Stage.UNMAPPED: {Step.BEGIN: Stage.MAPPED},
    Stage.MAPPED: {Step.END: Stage.ENDED},
    Stage.ENDED: {},
}

LINK: Final[dict[Stage, dict[Step, Stage]]] = {
    Stage.DETACHED: {Step.ATTACH: Stage.ATTACHED},
    Stage.ATTACHED: {Step.DETACH: Stage.SUSPENDED, Step.DETACH_CLOSED: Stage.CLOSED},
    Stage.SUSPENDED: {Step.ATTACH: Stage.ATTACHED},
    Stage.CLOSED: {},
}


class Half:
    """Half of an endpoint, ours or the peer's, and the only writer of its stage."""

    def __init__(self, table: dict[Stage, dict[Step, Stage]], start: Stage, *, ours: bool) -> None:
        self.table = table
        self.stage = start
        self.ours = ours

    def take(self, step: Step) -> None:
        """Perform *step*.

        Raises:
            LocalProtocolError: The step is not allowed now, and this is our half.
            RemoteProtocolError: The step is not allowed now, and this is the peer's half.
        """
        following = self.table[self.stage].get(step)
        if following is None:
            raise self._forbidden(step)
        self.stage = following

    def may(self, step: Step) -> bool:
        """Return whether *step* is allowed now."""
        return step in self.table[self.stage]

    def _forbidden(self, step: Step) -> ProtocolError:
        where = f"{step.value} is not allowed when {self.stage.value}"
        if self.ours:
            return LocalProtocolError(where)
        return RemoteProtocolError(where, condition="amqp:not-allowed")


_CONNECTION_STATES: Final[dict[tuple[Stage, Stage], str]] = {
    (Stage.START, Stage.START): "START",
    (Stage.START, Stage.HEADER): "HDR_RCVD",
    (Stage.HEADER, Stage.START): "HDR_SENT",
    (Stage.HEADER, Stage.HEADER): "HDR_EXCH",
    (Stage.OPENED, Stage.START): "OPEN_PIPE",
    (Stage.CLOSED, Stage.START): "OC_PIPE",
    (Stage.HEADER, Stage.OPENED): "OPEN_RCVD",
    (Stage.OPENED, Stage.HEADER): "OPEN_SENT",
    (Stage.CLOSED, Stage.HEADER): "CLOSE_PIPE",
    (Stage.OPENED, Stage.OPENED): "OPENED",
    (Stage.OPENED, Stage.CLOSED): "CLOSE_RCVD",
    (Stage.CLOSED, Stage.OPENED): "CLOSE_SENT",
    (Stage.CLOSED, Stage.CLOSED): "END",
}


def connection_state(ours: Half, theirs: Half) -> str:
    """Return the state name of Part 2 §2.4.6 for this pair of stages."""
    return _CONNECTION_STATES.get((ours.stage, theirs.stage), "DISCARDING")


_SESSION_STATES: Final[dict[tuple[Stage, Stage], str]] = {
    (Stage.UNMAPPED, Stage.UNMAPPED): "UNMAPPED",
    (Stage.MAPPED, Stage.UNMAPPED): "BEGIN_SENT",
    (Stage.UNMAPPED, Stage.MAPPED): "BEGIN_RCVD",
    (Stage.MAPPED, Stage.MAPPED): "MAPPED",
    (Stage.ENDED, Stage.MAPPED): "END_SENT",
    (Stage.MAPPED, Stage.ENDED): "END_RCVD",
    (Stage.ENDED, Stage.ENDED): "UNMAPPED",
}


def session_state(ours: Half, theirs: Half) -> str:
    """Return the state name of Part 2 §2.5.5 for this pair of stages."""
    return _SESSION_STATES.get((ours.stage, theirs.stage), "DISCARDING")


def link_state(ours: Half, theirs: Half) -> str:
    """Return attached, half attached or detached, seen from our side (Part 2 §2.6.3)."""
    here = ours.stage is Stage.ATTACHED
    there = theirs.stage is Stage.ATTACHED
    if here and there:
        return "ATTACHED"
    if here:
        return "ATTACH_SENT" if theirs.stage is Stage.DETACHED else "DETACH_RCVD"
    if there:
        return "ATTACH_RCVD" if ours.stage is Stage.DETACHED else "DETACH_SENT"
    return "DETACHED"
