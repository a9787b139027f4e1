"""Commands and structs of class message."""

from __future__ import annotations

from .declaring import (
    Bit,
    Command,
    Composite,
    DatetimeField,
    MapField,
    SequenceSetField,
    Str8Field,
    Str16Field,
    Uint8Field,
    Uint16Field,
    Uint32Field,
    Uint64Field,
    UuidField,
    Vbin16Field,
)

# --- class message (4) ---


class DeliveryProperties(Composite):
    """``message.delivery-properties``."""

    NAME = "message.delivery-properties"
    CODE = 0x0401

    discard_unroutable: Bit = False
    immediate: Bit = False
    redelivered: Bit = False
    priority: Uint8Field | None = None
    delivery_mode: Uint8Field | None = None
    ttl: Uint64Field | None = None
    timestamp: DatetimeField | None = None
    expiration: DatetimeField | None = None
    exchange: Str8Field | None = None
    routing_key: Str8Field | None = None
    resume_id: Str16Field | None = None
    resume_ttl: Uint64Field | None = None


class FragmentProperties(Composite):
    """``message.fragment-properties``."""

    NAME = "message.fragment-properties"
    CODE = 0x0402

    first: Bit = True
    last: Bit = True
    fragment_size: Uint64Field | None = None


class ReplyTo(Composite):
    """``message.reply-to``."""

    NAME = "message.reply-to"
    SIZE = 2

    exchange: Str8Field | None = None
    routing_key: Str8Field | None = None


class MessageProperties(Composite):
    """``message.message-properties``."""

    NAME = "message.message-properties"
    CODE = 0x0403

    content_length: Uint64Field | None = None
    message_id: UuidField | None = None
    correlation_id: Vbin16Field | None = None
    reply_to: ReplyTo | None = None
    content_type: Str8Field | None = None
    content_encoding: Str8Field | None = None
    user_id: Vbin16Field | None = None
    app_id: Vbin16Field | None = None
    application_headers: MapField | None = None


class MessageTransfer(Command):
    """``message.transfer``."""

    NAME = "message.transfer"
    CODE = 0x0401
    CONTENT = (
        DeliveryProperties,
        FragmentProperties,
        MessageProperties,
    )

    destination: Str8Field | None = None
    accept_mode: Uint8Field | None = None
    acquire_mode: Uint8Field | None = None


class MessageAccept(Command):
    """``message.accept``."""

    NAME = "message.accept"
    CODE = 0x0402

    transfers: SequenceSetField | None = None


class MessageReject(Command):
    """``message.reject``."""

    NAME = "message.reject"
    CODE = 0x0403

    transfers: SequenceSetField | None = None
    code: Uint16Field | None = None
    text: Str8Field | None = None


class MessageRelease(Command):
    """``message.release``."""

    NAME = "message.release"
    CODE = 0x0404

    transfers: SequenceSetField | None = None
    set_redelivered: Bit = False


class Acquired(Composite):
    """``message.acquired``."""

    NAME = "message.acquired"
    CODE = 0x0404

    transfers: SequenceSetField | None = None


class MessageAcquire(Command):
    """``message.acquire``."""

    NAME = "message.acquire"
    CODE = 0x0405
    TO_CLIENT = False
    RESULT = Acquired

    transfers: SequenceSetField | None = None


class MessageResumeResult(Composite):
    """``message.message-resume-result``."""

    NAME = "message.message-resume-result"
    CODE = 0x0405

    offset: Uint64Field | None = None


class MessageResume(Command):
    """``message.resume``."""

    NAME = "message.resume"
    CODE = 0x0406
    RESULT = MessageResumeResult

    destination: Str8Field | None = None
    resume_id: Str16Field | None = None


class MessageSubscribe(Command):
    """``message.subscribe``."""

    NAME = "message.subscribe"
    CODE = 0x0407
    TO_CLIENT = False

    queue: Str8Field | None = None
    destination: Str8Field | None = None
    accept_mode: Uint8Field | None = None
    acquire_mode: Uint8Field | None = None
    exclusive: Bit = False
    resume_id: Str16Field | None = None
    resume_ttl: Uint64Field | None = None
    arguments: MapField | None = None


class MessageCancel(Command):
    """``message.cancel``."""

    NAME = "message.cancel"
    CODE = 0x0408
    TO_CLIENT = False

    destination: Str8Field | None = None


class MessageSetFlowMode(Command):
    """``message.set-flow-mode``."""

    NAME = "message.set-flow-mode"
    CODE = 0x0409

    destination: Str8Field | None = None
    flow_mode: Uint8Field | None = None


class MessageFlow(Command):
    """``message.flow``."""

    NAME = "message.flow"
    CODE = 0x040A

    destination: Str8Field | None = None
    unit: Uint8Field | None = None
    value: Uint32Field | None = None


class MessageFlush(Command):
    """``message.flush``."""

    NAME = "message.flush"
    CODE = 0x040B
    TO_CLIENT = False

    destination: Str8Field | None = None


class MessageStop(Command):
    """``message.stop``."""

    NAME = "message.stop"
    CODE = 0x040C

    destination: Str8Field | None = None
