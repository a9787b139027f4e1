"""Stages of a connection and the methods allowed in each (0-9-1 §2.2.4, §1.4.1), for both roles."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

from . import methods as m


class Stage(Enum):
    """The input that a connection expects next."""

    HEADER = "protocol header"
    START = "start, or start-ok"
    #: The application decides about a login: a server accepts no method meanwhile. A client waits
    #: for the decision, or for a challenge.
    LOGIN = "login"
    SECURE = "secure-ok"
    TUNE = "tune-ok"
    OPEN = "open, or open-ok"
    RUNNING = "running"
    #: Close was sent: only its answer, or the peer's close, counts.
    CLOSING = "closing"
    CLOSED = "closed"


#: Looked up once: attributes of an enumeration are slow.
RUNNING: Final = Stage.RUNNING
CLOSED: Final = Stage.CLOSED

#: Stage → methods allowed on channel 0, with the stage that follows. Absent methods are out of
#: sequence: reply code 503.
Transitions = Mapping[Stage, Mapping[type[m.Method], Stage]]

#: Methods that a server receives.
TRANSITIONS: Final[Transitions] = {
    Stage.HEADER: {},
    Stage.START: {m.ConnectionStartOk: Stage.LOGIN, m.ConnectionClose: Stage.CLOSED},
    Stage.LOGIN: {},
    Stage.SECURE: {m.ConnectionSecureOk: Stage.LOGIN, m.ConnectionClose: Stage.CLOSED},
    Stage.TUNE: {m.ConnectionTuneOk: Stage.OPEN, m.ConnectionClose: Stage.CLOSED},
    Stage.OPEN: {m.ConnectionOpen: Stage.RUNNING, m.ConnectionClose: Stage.CLOSED},
    Stage.RUNNING: {
        m.ConnectionClose: Stage.CLOSED,
        m.ConnectionUpdateSecret: Stage.RUNNING,
        m.ConnectionBlocked: Stage.RUNNING,
        m.ConnectionUnblocked: Stage.RUNNING,
    },
    Stage.CLOSING: {m.ConnectionClose: Stage.CLOSED, m.ConnectionCloseOk: Stage.CLOSED},
    Stage.CLOSED: {},
}

#: Methods that a client receives.
CLIENT_TRANSITIONS: Final[Transitions] = {
    Stage.START: {m.ConnectionStart: Stage.LOGIN, m.ConnectionClose: Stage.CLOSED},
    Stage.LOGIN: {
        m.ConnectionSecure: Stage.LOGIN,
        m.ConnectionTune: Stage.OPEN,
        m.ConnectionClose: Stage.CLOSED,
    },
    Stage.OPEN: {m.ConnectionOpenOk: Stage.RUNNING, m.ConnectionClose: Stage.CLOSED},
    Stage.RUNNING: {
        m.ConnectionClose: Stage.CLOSED,
        m.ConnectionUpdateSecretOk: Stage.RUNNING,
        m.ConnectionBlocked: Stage.RUNNING,
        m.ConnectionUnblocked: Stage.RUNNING,
    },
    Stage.CLOSING: {m.ConnectionClose: Stage.CLOSED, m.ConnectionCloseOk: Stage.CLOSED},
    Stage.CLOSED: {},
}
