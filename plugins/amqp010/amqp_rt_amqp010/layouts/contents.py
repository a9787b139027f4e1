"""Commands and structs of classes file and stream."""

from __future__ import annotations

from .declaring import (
    Bit,
    Command,
    Composite,
    DatetimeField,
    MapField,
    Str8Field,
    Uint8Field,
    Uint16Field,
    Uint32Field,
    Uint64Field,
)

# --- class file (9) ---


class FileProperties(Composite):
    """``file.file-properties``."""

    NAME = "file.file-properties"
    CODE = 0x0901

    content_type: Str8Field | None = None
    content_encoding: Str8Field | None = None
    headers: MapField | None = None
    priority: Uint8Field | None = None
    reply_to: Str8Field | None = None
    message_id: Str8Field | None = None
    filename: Str8Field | None = None
    timestamp: DatetimeField | None = None
    cluster_id: Str8Field | None = None


class FileQos(Command):
    """``file.qos``."""

    NAME = "file.qos"
    CODE = 0x0901
    TO_CLIENT = False
    ANSWERS = ("file.qos-ok",)

    prefetch_size: Uint32Field | None = None
    prefetch_count: Uint16Field | None = None
    global_: Bit = False


class FileQosOk(Command):
    """``file.qos-ok``."""

    NAME = "file.qos-ok"
    CODE = 0x0902
    TO_SERVER = False


class FileConsume(Command):
    """``file.consume``."""

    NAME = "file.consume"
    CODE = 0x0903
    TO_CLIENT = False
    ANSWERS = ("file.consume-ok",)

    queue: Str8Field | None = None
    consumer_tag: Str8Field | None = None
    no_local: Bit = False
    no_ack: Bit = False
    exclusive: Bit = False
    nowait: Bit = False
    arguments: MapField | None = None


class FileConsumeOk(Command):
    """``file.consume-ok``."""

    NAME = "file.consume-ok"
    CODE = 0x0904
    TO_SERVER = False

    consumer_tag: Str8Field | None = None


class FileCancel(Command):
    """``file.cancel``."""

    NAME = "file.cancel"
    CODE = 0x0905
    TO_CLIENT = False

    consumer_tag: Str8Field | None = None


class FileOpen(Command):
    """``file.open``."""

    NAME = "file.open"
    CODE = 0x0906
    ANSWERS = ("file.open-ok",)

    identifier: Str8Field | None = None
    content_size: Uint64Field | None = None


class FileOpenOk(Command):
    """``file.open-ok``."""

    NAME = "file.open-ok"
    CODE = 0x0907
    ANSWERS = ("file.stage",)

    staged_size: Uint64Field | None = None


class FileStage(Command):
    """``file.stage``."""

    NAME = "file.stage"
    CODE = 0x0908
    CONTENT = (FileProperties,)
    HEADER_REQUIRED = True


class FilePublish(Command):
    """``file.publish``."""

    NAME = "file.publish"
    CODE = 0x0909
    TO_CLIENT = False

    exchange: Str8Field | None = None
    routing_key: Str8Field | None = None
    mandatory: Bit = False
    immediate: Bit = False
    identifier: Str8Field | None = None


class FileReturn(Command):
    """``file.return``."""

    NAME = "file.return"
    CODE = 0x090A
    TO_SERVER = False
    CONTENT = (FileProperties,)
    HEADER_REQUIRED = True

    reply_code: Uint16Field | None = None
    reply_text: Str8Field | None = None
    exchange: Str8Field | None = None
    routing_key: Str8Field | None = None


class FileDeliver(Command):
    """``file.deliver``."""

    NAME = "file.deliver"
    CODE = 0x090B
    TO_SERVER = False

    consumer_tag: Str8Field | None = None
    delivery_tag: Uint64Field | None = None
    redelivered: Bit = False
    exchange: Str8Field | None = None
    routing_key: Str8Field | None = None
    identifier: Str8Field | None = None


class FileAck(Command):
    """``file.ack``."""

    NAME = "file.ack"
    CODE = 0x090C
    TO_CLIENT = False

    delivery_tag: Uint64Field | None = None
    multiple: Bit = False


class FileReject(Command):
    """``file.reject``."""

    NAME = "file.reject"
    CODE = 0x090D
    TO_CLIENT = False

    delivery_tag: Uint64Field | None = None
    requeue: Bit = False


# --- class stream (10) ---


class StreamProperties(Composite):
    """``stream.stream-properties``."""

    NAME = "stream.stream-properties"
    CODE = 0x0A01

    content_type: Str8Field | None = None
    content_encoding: Str8Field | None = None
    headers: MapField | None = None
    priority: Uint8Field | None = None
    timestamp: DatetimeField | None = None


class StreamQos(Command):
    """``stream.qos``."""

    NAME = "stream.qos"
    CODE = 0x0A01
    TO_CLIENT = False
    ANSWERS = ("stream.qos-ok",)

    prefetch_size: Uint32Field | None = None
    prefetch_count: Uint16Field | None = None
    consume_rate: Uint32Field | None = None
    global_: Bit = False


class StreamQosOk(Command):
    """``stream.qos-ok``."""

    NAME = "stream.qos-ok"
    CODE = 0x0A02
    TO_SERVER = False


class StreamConsume(Command):
    """``stream.consume``."""

    NAME = "stream.consume"
    CODE = 0x0A03
    TO_CLIENT = False
    ANSWERS = ("stream.consume-ok",)

    queue: Str8Field | None = None
    consumer_tag: Str8Field | None = None
    no_local: Bit = False
    exclusive: Bit = False
    nowait: Bit = False
    arguments: MapField | None = None


class StreamConsumeOk(Command):
    """``stream.consume-ok``."""

    NAME = "stream.consume-ok"
    CODE = 0x0A04
    TO_SERVER = False

    consumer_tag: Str8Field | None = None


class StreamCancel(Command):
    """``stream.cancel``."""

    NAME = "stream.cancel"
    CODE = 0x0A05
    TO_CLIENT = False

    consumer_tag: Str8Field | None = None


class StreamPublish(Command):
    """``stream.publish``."""

    NAME = "stream.publish"
    CODE = 0x0A06
    TO_CLIENT = False
    CONTENT = (StreamProperties,)
    HEADER_REQUIRED = True

    exchange: Str8Field | None = None
    routing_key: Str8Field | None = None
    mandatory: Bit = False
    immediate: Bit = False


class StreamReturn(Command):
    """``stream.return``."""

    NAME = "stream.return"
    CODE = 0x0A07
    TO_SERVER = False
    CONTENT = (StreamProperties,)
    HEADER_REQUIRED = True

    reply_code: Uint16Field | None = None
    reply_text: Str8Field | None = None
    exchange: Str8Field | None = None
    routing_key: Str8Field | None = None


class StreamDeliver(Command):
    """``stream.deliver``."""

    NAME = "stream.deliver"
    CODE = 0x0A08
    TO_SERVER = False
    CONTENT = (StreamProperties,)
    HEADER_REQUIRED = True

    consumer_tag: Str8Field | None = None
    delivery_tag: Uint64Field | None = None
    exchange: Str8Field | None = None
    queue: Str8Field | None = None
