"""Stages of a connection and the controls of class connection that a server handles in each."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final, TypeAlias

from .layouts import (
    ConnectionClose,
    ConnectionCloseOk,
    ConnectionHeartbeat,
    ConnectionOpen,
    ConnectionSecureOk,
    ConnectionStartOk,
    ConnectionTuneOk,
    Control,
)


class Stage(Enum):
    """The input that a connection expects next."""

    HEADER = "protocol header"
    START = "start-ok"
    #: The application decides about a login: no control is handled meanwhile.
    LOGIN = "login"
    SECURE = "secure-ok"
    TUNE = "tune-ok"
    OPEN = "open"
    RUNNING = "running"
    #: Close was sent: only its answer, or the peer's close, counts.
    CLOSING = "closing"
    CLOSED = "closed"


#: Looked up once: attributes of an enumeration are slow.
RUNNING: Final = Stage.RUNNING
CLOSED: Final = Stage.CLOSED

Transitions: TypeAlias = Mapping[Stage, Mapping[type[Control], Stage]]

#: Stage → controls that a server handles, with the stage that follows. Others are out of sequence.
TRANSITIONS: Final[Transitions] = {
    Stage.HEADER: {},
    Stage.START: {ConnectionStartOk: Stage.LOGIN, ConnectionClose: Stage.CLOSED},
    Stage.LOGIN: {ConnectionClose: Stage.CLOSED},
    Stage.SECURE: {ConnectionSecureOk: Stage.LOGIN, ConnectionClose: Stage.CLOSED},
    Stage.TUNE: {ConnectionTuneOk: Stage.OPEN, ConnectionClose: Stage.CLOSED},
    # A client may send heartbeats as soon as it has asked for them.
    Stage.OPEN: {
        ConnectionOpen: Stage.RUNNING,
        ConnectionHeartbeat: Stage.OPEN,
        ConnectionClose: Stage.CLOSED,
    },
    Stage.RUNNING: {ConnectionHeartbeat: Stage.RUNNING, ConnectionClose: Stage.CLOSED},
    Stage.CLOSING: {ConnectionClose: Stage.CLOSED, ConnectionCloseOk: Stage.CLOSED},
    Stage.CLOSED: {},
}
