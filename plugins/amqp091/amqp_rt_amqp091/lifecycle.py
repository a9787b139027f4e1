"""How far a connection has got, and what may come then (0-9-1 §2.2.4, §1.4.1). One table."""

from __future__ import annotations

from enum import Enum
from typing import Final

from . import methods as m


class Stage(Enum):
    """What a server has to hear next on a connection."""

    HEADER = "protocol header"
    START = "start-ok"
    #: A login is being judged; nothing may come.
    LOGIN = "login"
    SECURE = "secure-ok"
    TUNE = "tune-ok"
    OPEN = "open"
    RUNNING = "running"
    #: We have said close, and hear nothing but the answer.
    CLOSING = "closing"
    CLOSED = "closed"


#: Stage → what a client may say on channel 0 then, and where that leads. What is absent is out of
#: sequence: reply code 503.
TRANSITIONS: Final[dict[Stage, dict[type[m.Method], Stage]]] = {
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
