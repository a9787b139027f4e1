"""All methods of AMQP 0-9-1, each declared once: code, fields and wire types (0-9-1 §1.2).

RabbitMQ's extensions that clients rely on are included. A test compares the whole table with the
machine-readable specification.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Final, TypeAlias

from msgspec import Struct

#: Wire types of fields (§4.2.5), by the names of the specification.
Bit: TypeAlias = Annotated[bool, "bit"]
Octet: TypeAlias = Annotated[int, "octet"]
ShortInt: TypeAlias = Annotated[int, "short"]
LongInt: TypeAlias = Annotated[int, "long"]
LongLong: TypeAlias = Annotated[int, "longlong"]
Time: TypeAlias = Annotated[int, "timestamp"]
ShortStr: TypeAlias = Annotated[str, "shortstr"]
LongStr: TypeAlias = Annotated[bytes, "longstr"]
Table: TypeAlias = Annotated[dict[str, object], "table"]


class Method(Struct, kw_only=True):
    """Content of a method frame. ``code`` joins the numbers of class and method, as on the wire."""

    name: ClassVar[str]
    code: ClassVar[int]
    #: Whether a content header and body follow (§4.2.6).
    content: ClassVar[bool] = False
    #: Names of the methods that answer it; empty if it has no answer.
    answers: ClassVar[tuple[str, ...]] = ()


# --- class connection (10) ---


class ConnectionStart(Method):
    """``connection.start``."""

    name = "connection.start"
    code = 0x000A000A
    answers = ("connection.start-ok",)

    version_major: Octet = 0
    version_minor: Octet = 0
    server_properties: Table = {}
    mechanisms: LongStr = b""
    locales: LongStr = b""


class ConnectionStartOk(Method):
    """``connection.start-ok``."""

    name = "connection.start-ok"
    code = 0x000A000B

    client_properties: Table = {}
    mechanism: ShortStr = ""
    response: LongStr = b""
    locale: ShortStr = ""


class ConnectionSecure(Method):
    """``connection.secure``."""

    name = "connection.secure"
    code = 0x000A0014
    answers = ("connection.secure-ok",)

    challenge: LongStr = b""


class ConnectionSecureOk(Method):
    """``connection.secure-ok``."""

    name = "connection.secure-ok"
    code = 0x000A0015

    response: LongStr = b""


class ConnectionTune(Method):
    """``connection.tune``."""

    name = "connection.tune"
    code = 0x000A001E
    answers = ("connection.tune-ok",)

    channel_max: ShortInt = 0
    frame_max: LongInt = 0
    heartbeat: ShortInt = 0


class ConnectionTuneOk(Method):
    """``connection.tune-ok``."""

    name = "connection.tune-ok"
    code = 0x000A001F

    channel_max: ShortInt = 0
    frame_max: LongInt = 0
    heartbeat: ShortInt = 0


class ConnectionOpen(Method):
    """``connection.open``."""

    name = "connection.open"
    code = 0x000A0028
    answers = ("connection.open-ok",)

    virtual_host: ShortStr = ""
    reserved_1: ShortStr = ""
    reserved_2: Bit = False


class ConnectionOpenOk(Method):
    """``connection.open-ok``."""

    name = "connection.open-ok"
    code = 0x000A0029

    reserved_1: ShortStr = ""


class ConnectionClose(Method):
    """``connection.close``."""

    name = "connection.close"
    code = 0x000A0032
    answers = ("connection.close-ok",)

    reply_code: ShortInt = 0
    reply_text: ShortStr = ""
    class_id: ShortInt = 0
    method_id: ShortInt = 0


class ConnectionCloseOk(Method):
    """``connection.close-ok``."""

    name = "connection.close-ok"
    code = 0x000A0033


class ConnectionBlocked(Method):
    """``connection.blocked``."""

    name = "connection.blocked"
    code = 0x000A003C

    reason: ShortStr = ""


class ConnectionUnblocked(Method):
    """``connection.unblocked``."""

    name = "connection.unblocked"
    code = 0x000A003D


class ConnectionUpdateSecret(Method):
    """``connection.update-secret``."""

    name = "connection.update-secret"
    code = 0x000A0046
    answers = ("connection.update-secret-ok",)

    new_secret: LongStr = b""
    reason: ShortStr = ""


class ConnectionUpdateSecretOk(Method):
    """``connection.update-secret-ok``."""

    name = "connection.update-secret-ok"
    code = 0x000A0047


# --- class channel (20) ---


class ChannelOpen(Method):
    """``channel.open``."""

    name = "channel.open"
    code = 0x0014000A
    answers = ("channel.open-ok",)

    reserved_1: ShortStr = ""


class ChannelOpenOk(Method):
    """``channel.open-ok``."""

    name = "channel.open-ok"
    code = 0x0014000B

    reserved_1: LongStr = b""


class ChannelFlow(Method):
    """``channel.flow``."""

    name = "channel.flow"
    code = 0x00140014
    answers = ("channel.flow-ok",)

    active: Bit = False


class ChannelFlowOk(Method):
    """``channel.flow-ok``."""

    name = "channel.flow-ok"
    code = 0x00140015

    active: Bit = False


class ChannelClose(Method):
    """``channel.close``."""

    name = "channel.close"
    code = 0x00140028
    answers = ("channel.close-ok",)

    reply_code: ShortInt = 0
    reply_text: ShortStr = ""
    class_id: ShortInt = 0
    method_id: ShortInt = 0


class ChannelCloseOk(Method):
    """``channel.close-ok``."""

    name = "channel.close-ok"
    code = 0x00140029


# --- class exchange (40) ---


class ExchangeDeclare(Method):
    """``exchange.declare``."""

    name = "exchange.declare"
    code = 0x0028000A
    answers = ("exchange.declare-ok",)

    reserved_1: ShortInt = 0
    exchange: ShortStr = ""
    type: ShortStr = ""
    passive: Bit = False
    durable: Bit = False
    auto_delete: Bit = False
    internal: Bit = False
    no_wait: Bit = False
    arguments: Table = {}


class ExchangeDeclareOk(Method):
    """``exchange.declare-ok``."""

    name = "exchange.declare-ok"
    code = 0x0028000B


class ExchangeDelete(Method):
    """``exchange.delete``."""

    name = "exchange.delete"
    code = 0x00280014
    answers = ("exchange.delete-ok",)

    reserved_1: ShortInt = 0
    exchange: ShortStr = ""
    if_unused: Bit = False
    no_wait: Bit = False


class ExchangeDeleteOk(Method):
    """``exchange.delete-ok``."""

    name = "exchange.delete-ok"
    code = 0x00280015


class ExchangeBind(Method):
    """``exchange.bind``."""

    name = "exchange.bind"
    code = 0x0028001E
    answers = ("exchange.bind-ok",)

    reserved_1: ShortInt = 0
    destination: ShortStr = ""
    source: ShortStr = ""
    routing_key: ShortStr = ""
    no_wait: Bit = False
    arguments: Table = {}


class ExchangeBindOk(Method):
    """``exchange.bind-ok``."""

    name = "exchange.bind-ok"
    code = 0x0028001F


class ExchangeUnbind(Method):
    """``exchange.unbind``."""

    name = "exchange.unbind"
    code = 0x00280028
    answers = ("exchange.unbind-ok",)

    reserved_1: ShortInt = 0
    destination: ShortStr = ""
    source: ShortStr = ""
    routing_key: ShortStr = ""
    no_wait: Bit = False
    arguments: Table = {}


class ExchangeUnbindOk(Method):
    """``exchange.unbind-ok``."""

    name = "exchange.unbind-ok"
    code = 0x00280033


# --- class queue (50) ---


class QueueDeclare(Method):
    """``queue.declare``."""

    name = "queue.declare"
    code = 0x0032000A
    answers = ("queue.declare-ok",)

    reserved_1: ShortInt = 0
    queue: ShortStr = ""
    passive: Bit = False
    durable: Bit = False
    exclusive: Bit = False
    auto_delete: Bit = False
    no_wait: Bit = False
    arguments: Table = {}


class QueueDeclareOk(Method):
    """``queue.declare-ok``."""

    name = "queue.declare-ok"
    code = 0x0032000B

    queue: ShortStr = ""
    message_count: LongInt = 0
    consumer_count: LongInt = 0


class QueueBind(Method):
    """``queue.bind``."""

    name = "queue.bind"
    code = 0x00320014
    answers = ("queue.bind-ok",)

    reserved_1: ShortInt = 0
    queue: ShortStr = ""
    exchange: ShortStr = ""
    routing_key: ShortStr = ""
    no_wait: Bit = False
    arguments: Table = {}


class QueueBindOk(Method):
    """``queue.bind-ok``."""

    name = "queue.bind-ok"
    code = 0x00320015


class QueueUnbind(Method):
    """``queue.unbind``."""

    name = "queue.unbind"
    code = 0x00320032
    answers = ("queue.unbind-ok",)

    reserved_1: ShortInt = 0
    queue: ShortStr = ""
    exchange: ShortStr = ""
    routing_key: ShortStr = ""
    arguments: Table = {}


class QueueUnbindOk(Method):
    """``queue.unbind-ok``."""

    name = "queue.unbind-ok"
    code = 0x00320033


class QueuePurge(Method):
    """``queue.purge``."""

    name = "queue.purge"
    code = 0x0032001E
    answers = ("queue.purge-ok",)

    reserved_1: ShortInt = 0
    queue: ShortStr = ""
    no_wait: Bit = False


class QueuePurgeOk(Method):
    """``queue.purge-ok``."""

    name = "queue.purge-ok"
    code = 0x0032001F

    message_count: LongInt = 0


class QueueDelete(Method):
    """``queue.delete``."""

    name = "queue.delete"
    code = 0x00320028
    answers = ("queue.delete-ok",)

    reserved_1: ShortInt = 0
    queue: ShortStr = ""
    if_unused: Bit = False
    if_empty: Bit = False
    no_wait: Bit = False


class QueueDeleteOk(Method):
    """``queue.delete-ok``."""

    name = "queue.delete-ok"
    code = 0x00320029

    message_count: LongInt = 0


# --- class basic (60) ---


class BasicQos(Method):
    """``basic.qos``."""

    name = "basic.qos"
    code = 0x003C000A
    answers = ("basic.qos-ok",)

    prefetch_size: LongInt = 0
    prefetch_count: ShortInt = 0
    global_: Bit = False


class BasicQosOk(Method):
    """``basic.qos-ok``."""

    name = "basic.qos-ok"
    code = 0x003C000B


class BasicConsume(Method):
    """``basic.consume``."""

    name = "basic.consume"
    code = 0x003C0014
    answers = ("basic.consume-ok",)

    reserved_1: ShortInt = 0
    queue: ShortStr = ""
    consumer_tag: ShortStr = ""
    no_local: Bit = False
    no_ack: Bit = False
    exclusive: Bit = False
    no_wait: Bit = False
    arguments: Table = {}


class BasicConsumeOk(Method):
    """``basic.consume-ok``."""

    name = "basic.consume-ok"
    code = 0x003C0015

    consumer_tag: ShortStr = ""


class BasicCancel(Method):
    """``basic.cancel``."""

    name = "basic.cancel"
    code = 0x003C001E
    answers = ("basic.cancel-ok",)

    consumer_tag: ShortStr = ""
    no_wait: Bit = False


class BasicCancelOk(Method):
    """``basic.cancel-ok``."""

    name = "basic.cancel-ok"
    code = 0x003C001F

    consumer_tag: ShortStr = ""


class BasicPublish(Method):
    """``basic.publish``."""

    name = "basic.publish"
    code = 0x003C0028
    content = True

    reserved_1: ShortInt = 0
    exchange: ShortStr = ""
    routing_key: ShortStr = ""
    mandatory: Bit = False
    immediate: Bit = False


class BasicReturn(Method):
    """``basic.return``."""

    name = "basic.return"
    code = 0x003C0032
    content = True

    reply_code: ShortInt = 0
    reply_text: ShortStr = ""
    exchange: ShortStr = ""
    routing_key: ShortStr = ""


class BasicDeliver(Method):
    """``basic.deliver``."""

    name = "basic.deliver"
    code = 0x003C003C
    content = True

    consumer_tag: ShortStr = ""
    delivery_tag: LongLong = 0
    redelivered: Bit = False
    exchange: ShortStr = ""
    routing_key: ShortStr = ""


class BasicGet(Method):
    """``basic.get``."""

    name = "basic.get"
    code = 0x003C0046
    answers = (
        "basic.get-ok",
        "basic.get-empty",
    )

    reserved_1: ShortInt = 0
    queue: ShortStr = ""
    no_ack: Bit = False


class BasicGetOk(Method):
    """``basic.get-ok``."""

    name = "basic.get-ok"
    code = 0x003C0047
    content = True

    delivery_tag: LongLong = 0
    redelivered: Bit = False
    exchange: ShortStr = ""
    routing_key: ShortStr = ""
    message_count: LongInt = 0


class BasicGetEmpty(Method):
    """``basic.get-empty``."""

    name = "basic.get-empty"
    code = 0x003C0048

    reserved_1: ShortStr = ""


class BasicAck(Method):
    """``basic.ack``."""

    name = "basic.ack"
    code = 0x003C0050

    delivery_tag: LongLong = 0
    multiple: Bit = False


class BasicReject(Method):
    """``basic.reject``."""

    name = "basic.reject"
    code = 0x003C005A

    delivery_tag: LongLong = 0
    requeue: Bit = False


class BasicRecoverAsync(Method):
    """``basic.recover-async``."""

    name = "basic.recover-async"
    code = 0x003C0064

    requeue: Bit = False


class BasicRecover(Method):
    """``basic.recover``."""

    name = "basic.recover"
    code = 0x003C006E

    requeue: Bit = False


class BasicRecoverOk(Method):
    """``basic.recover-ok``."""

    name = "basic.recover-ok"
    code = 0x003C006F


class BasicNack(Method):
    """``basic.nack``."""

    name = "basic.nack"
    code = 0x003C0078

    delivery_tag: LongLong = 0
    multiple: Bit = False
    requeue: Bit = False


# --- class tx (90) ---


class TxSelect(Method):
    """``tx.select``."""

    name = "tx.select"
    code = 0x005A000A
    answers = ("tx.select-ok",)


class TxSelectOk(Method):
    """``tx.select-ok``."""

    name = "tx.select-ok"
    code = 0x005A000B


class TxCommit(Method):
    """``tx.commit``."""

    name = "tx.commit"
    code = 0x005A0014
    answers = ("tx.commit-ok",)


class TxCommitOk(Method):
    """``tx.commit-ok``."""

    name = "tx.commit-ok"
    code = 0x005A0015


class TxRollback(Method):
    """``tx.rollback``."""

    name = "tx.rollback"
    code = 0x005A001E
    answers = ("tx.rollback-ok",)


class TxRollbackOk(Method):
    """``tx.rollback-ok``."""

    name = "tx.rollback-ok"
    code = 0x005A001F


# --- class confirm (85) ---


class ConfirmSelect(Method):
    """``confirm.select``."""

    name = "confirm.select"
    code = 0x0055000A
    answers = ("confirm.select-ok",)

    nowait: Bit = False


class ConfirmSelectOk(Method):
    """``confirm.select-ok``."""

    name = "confirm.select-ok"
    code = 0x0055000B


# --- content properties of class basic (60) ---


class BasicProperties(Struct, kw_only=True):
    """Properties of a message (``basic`` content header); None for absent ones."""

    content_type: ShortStr | None = None
    content_encoding: ShortStr | None = None
    headers: Table | None = None
    delivery_mode: Octet | None = None
    priority: Octet | None = None
    correlation_id: ShortStr | None = None
    reply_to: ShortStr | None = None
    expiration: ShortStr | None = None
    message_id: ShortStr | None = None
    timestamp: Time | None = None
    type: ShortStr | None = None
    user_id: ShortStr | None = None
    app_id: ShortStr | None = None
    reserved: ShortStr | None = None


#: Code on the wire → method.
METHODS: Final[dict[int, type[Method]]] = {
    method.code: method
    for method in (
        ConnectionStart,
        ConnectionStartOk,
        ConnectionSecure,
        ConnectionSecureOk,
        ConnectionTune,
        ConnectionTuneOk,
        ConnectionOpen,
        ConnectionOpenOk,
        ConnectionClose,
        ConnectionCloseOk,
        ConnectionBlocked,
        ConnectionUnblocked,
        ConnectionUpdateSecret,
        ConnectionUpdateSecretOk,
        ChannelOpen,
        ChannelOpenOk,
        ChannelFlow,
        ChannelFlowOk,
        ChannelClose,
        ChannelCloseOk,
        ExchangeDeclare,
        ExchangeDeclareOk,
        ExchangeDelete,
        ExchangeDeleteOk,
        ExchangeBind,
        ExchangeBindOk,
        ExchangeUnbind,
        ExchangeUnbindOk,
        QueueDeclare,
        QueueDeclareOk,
        QueueBind,
        QueueBindOk,
        QueueUnbind,
        QueueUnbindOk,
        QueuePurge,
        QueuePurgeOk,
        QueueDelete,
        QueueDeleteOk,
        BasicQos,
        BasicQosOk,
        BasicConsume,
        BasicConsumeOk,
        BasicCancel,
        BasicCancelOk,
        BasicPublish,
        BasicReturn,
        BasicDeliver,
        BasicGet,
        BasicGetOk,
        BasicGetEmpty,
        BasicAck,
        BasicReject,
        BasicRecoverAsync,
        BasicRecover,
        BasicRecoverOk,
        BasicNack,
        TxSelect,
        TxSelectOk,
        TxCommit,
        TxCommitOk,
        TxRollback,
        TxRollbackOk,
        ConfirmSelect,
        ConfirmSelectOk,
    )
}
