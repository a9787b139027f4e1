"""Controls of classes connection and session, and the structs of session."""

from __future__ import annotations

from .declaring import (
    ArrayField,
    Bit,
    ByteRangesField,
    Composite,
    Control,
    MapField,
    SequenceNoField,
    SequenceSetField,
    Str8Field,
    Str16ArrayField,
    Str16Field,
    Uint8Field,
    Uint16Field,
    Uint32Field,
    Uint64Field,
    Vbin16Field,
    Vbin32Field,
)

# --- class connection (1) ---


class ConnectionStart(Control):
    """``connection.start``."""

    NAME = "connection.start"
    CODE = 0x0101
    TO_SERVER = False
    ANSWERS = ("connection.start-ok",)

    server_properties: MapField | None = None
    mechanisms: Str16ArrayField | None = None
    locales: Str16ArrayField | None = None


class ConnectionStartOk(Control):
    """``connection.start-ok``."""

    NAME = "connection.start-ok"
    CODE = 0x0102
    TO_CLIENT = False

    client_properties: MapField | None = None
    mechanism: Str8Field | None = None
    response: Vbin32Field | None = None
    locale: Str8Field | None = None


class ConnectionSecure(Control):
    """``connection.secure``."""

    NAME = "connection.secure"
    CODE = 0x0103
    TO_SERVER = False
    ANSWERS = ("connection.secure-ok",)

    challenge: Vbin32Field | None = None


class ConnectionSecureOk(Control):
    """``connection.secure-ok``."""

    NAME = "connection.secure-ok"
    CODE = 0x0104
    TO_CLIENT = False

    response: Vbin32Field | None = None


class ConnectionTune(Control):
    """``connection.tune``."""

    NAME = "connection.tune"
    CODE = 0x0105
    TO_SERVER = False
    ANSWERS = ("connection.tune-ok",)

    channel_max: Uint16Field | None = None
    max_frame_size: Uint16Field | None = None
    heartbeat_min: Uint16Field | None = None
    heartbeat_max: Uint16Field | None = None


class ConnectionTuneOk(Control):
    """``connection.tune-ok``."""

    NAME = "connection.tune-ok"
    CODE = 0x0106
    TO_CLIENT = False

    channel_max: Uint16Field | None = None
    max_frame_size: Uint16Field | None = None
    heartbeat: Uint16Field | None = None


class ConnectionOpen(Control):
    """``connection.open``."""

    NAME = "connection.open"
    CODE = 0x0107
    TO_CLIENT = False
    ANSWERS = (
        "connection.open-ok",
        "connection.redirect",
    )

    virtual_host: Str8Field | None = None
    capabilities: Str16ArrayField | None = None
    insist: Bit = False


class ConnectionOpenOk(Control):
    """``connection.open-ok``."""

    NAME = "connection.open-ok"
    CODE = 0x0108
    TO_SERVER = False

    known_hosts: Str16ArrayField | None = None


class ConnectionRedirect(Control):
    """``connection.redirect``."""

    NAME = "connection.redirect"
    CODE = 0x0109
    TO_SERVER = False

    host: Str16Field | None = None
    known_hosts: Str16ArrayField | None = None


class ConnectionHeartbeat(Control):
    """``connection.heartbeat``."""

    NAME = "connection.heartbeat"
    CODE = 0x010A


class ConnectionClose(Control):
    """``connection.close``."""

    NAME = "connection.close"
    CODE = 0x010B
    ANSWERS = ("connection.close-ok",)

    reply_code: Uint16Field | None = None
    reply_text: Str8Field | None = None


class ConnectionCloseOk(Control):
    """``connection.close-ok``."""

    NAME = "connection.close-ok"
    CODE = 0x010C


# --- class session (2) ---


class SessionHeader(Composite):
    """``session.header``."""

    NAME = "session.header"
    SIZE = 1
    PACK = 1

    sync: Bit = False


class CommandFragment(Composite):
    """``session.command-fragment``."""

    NAME = "session.command-fragment"
    SIZE = 0
    PACK = 0

    command_id: SequenceNoField | None = None
    byte_ranges: ByteRangesField | None = None


class SessionAttach(Control):
    """``session.attach``."""

    NAME = "session.attach"
    CODE = 0x0201
    ANSWERS = (
        "session.attached",
        "session.detached",
    )

    name: Vbin16Field | None = None
    force: Bit = False


class SessionAttached(Control):
    """``session.attached``."""

    NAME = "session.attached"
    CODE = 0x0202

    name: Vbin16Field | None = None


class SessionDetach(Control):
    """``session.detach``."""

    NAME = "session.detach"
    CODE = 0x0203
    ANSWERS = ("session.detached",)

    name: Vbin16Field | None = None


class SessionDetached(Control):
    """``session.detached``."""

    NAME = "session.detached"
    CODE = 0x0204

    name: Vbin16Field | None = None
    code: Uint8Field | None = None


class SessionRequestTimeout(Control):
    """``session.request-timeout``."""

    NAME = "session.request-timeout"
    CODE = 0x0205
    ANSWERS = ("session.timeout",)

    timeout: Uint32Field | None = None


class SessionTimeout(Control):
    """``session.timeout``."""

    NAME = "session.timeout"
    CODE = 0x0206

    timeout: Uint32Field | None = None


class SessionCommandPoint(Control):
    """``session.command-point``."""

    NAME = "session.command-point"
    CODE = 0x0207

    command_id: SequenceNoField | None = None
    command_offset: Uint64Field | None = None


class SessionExpected(Control):
    """``session.expected``."""

    NAME = "session.expected"
    CODE = 0x0208

    commands: SequenceSetField | None = None
    fragments: ArrayField | None = None


class SessionConfirmed(Control):
    """``session.confirmed``."""

    NAME = "session.confirmed"
    CODE = 0x0209

    commands: SequenceSetField | None = None
    fragments: ArrayField | None = None


class SessionCompleted(Control):
    """``session.completed``."""

    NAME = "session.completed"
    CODE = 0x020A

    commands: SequenceSetField | None = None
    timely_reply: Bit = False


class SessionKnownCompleted(Control):
    """``session.known-completed``."""

    NAME = "session.known-completed"
    CODE = 0x020B

    commands: SequenceSetField | None = None


class SessionFlush(Control):
    """``session.flush``."""

    NAME = "session.flush"
    CODE = 0x020C

    expected: Bit = False
    confirmed: Bit = False
    completed: Bit = False


class SessionGap(Control):
    """``session.gap``."""

    NAME = "session.gap"
    CODE = 0x020D

    commands: SequenceSetField | None = None
