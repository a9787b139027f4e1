"""How far a connection has got, and what may come then (0-9-1 §2.2.4, §1.4.1). One table a role."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

from . import methods as m


class Stage(Enum):
    """What has to be heard next on a connection."""

    HEADER = "protocol header"
    START = "start, or start-ok"
    #: A login is being judged: a server hears nothing then, a client hears what comes of it.
    LOGIN = "login"
    SECURE = "secure-ok"
    TUNE = "tune-ok"
    OPEN = "open, or open-ok"
    RUNNING = "running"
    #: We have said close, and hear nothing but the answer.
    CLOSING = "closing"
    CLOSED = "closed"


#: Stage → what may be said on channel 0 then, and where that leads. What is absent is out of
#: sequence: reply code 503.
Transitions = Mapping[Stage, Mapping[type[m.Method], Stage]]

#: What a server hears.
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

#: What a client hears.
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
