"""Commands and structs of classes exchange and queue."""

from __future__ import annotations

from .declaring import Bit, Command, Composite, MapField, Str8Field, Uint32Field

# --- class exchange (7) ---


class ExchangeDeclare(Command):
    """``exchange.declare``."""

    NAME = "exchange.declare"
    CODE = 0x0701
    TO_CLIENT = False

    exchange: Str8Field | None = None
    type: Str8Field | None = None
    alternate_exchange: Str8Field | None = None
    passive: Bit = False
    durable: Bit = False
    auto_delete: Bit = False
    arguments: MapField | None = None


class ExchangeDelete(Command):
    """``exchange.delete``."""

    NAME = "exchange.delete"
    CODE = 0x0702
    TO_CLIENT = False

    exchange: Str8Field | None = None
    if_unused: Bit = False


class ExchangeQueryResult(Composite):
    """``exchange.exchange-query-result``."""

    NAME = "exchange.exchange-query-result"
    CODE = 0x0701

    type: Str8Field | None = None
    durable: Bit = False
    not_found: Bit = False
    arguments: MapField | None = None


class ExchangeQuery(Command):
    """``exchange.query``."""

    NAME = "exchange.query"
    CODE = 0x0703
    TO_CLIENT = False
    RESULT = ExchangeQueryResult

    name: Str8Field | None = None


class ExchangeBind(Command):
    """``exchange.bind``."""

    NAME = "exchange.bind"
    CODE = 0x0704
    TO_CLIENT = False

    queue: Str8Field | None = None
    exchange: Str8Field | None = None
    binding_key: Str8Field | None = None
    arguments: MapField | None = None


class ExchangeUnbind(Command):
    """``exchange.unbind``."""

    NAME = "exchange.unbind"
    CODE = 0x0705
    TO_CLIENT = False

    queue: Str8Field | None = None
    exchange: Str8Field | None = None
    binding_key: Str8Field | None = None


class ExchangeBoundResult(Composite):
    """``exchange.exchange-bound-result``."""

    NAME = "exchange.exchange-bound-result"
    CODE = 0x0702

    exchange_not_found: Bit = False
    queue_not_found: Bit = False
    queue_not_matched: Bit = False
    key_not_matched: Bit = False
    args_not_matched: Bit = False


class ExchangeBound(Command):
    """``exchange.bound``."""

    NAME = "exchange.bound"
    CODE = 0x0706
    TO_CLIENT = False
    RESULT = ExchangeBoundResult

    exchange: Str8Field | None = None
    queue: Str8Field | None = None
    binding_key: Str8Field | None = None
    arguments: MapField | None = None


# --- class queue (8) ---


class QueueDeclare(Command):
    """``queue.declare``."""

    NAME = "queue.declare"
    CODE = 0x0801
    TO_CLIENT = False

    queue: Str8Field | None = None
    alternate_exchange: Str8Field | None = None
    passive: Bit = False
    durable: Bit = False
    exclusive: Bit = False
    auto_delete: Bit = False
    arguments: MapField | None = None


class QueueDelete(Command):
    """``queue.delete``."""

    NAME = "queue.delete"
    CODE = 0x0802
    TO_CLIENT = False

    queue: Str8Field | None = None
    if_unused: Bit = False
    if_empty: Bit = False


class QueuePurge(Command):
    """``queue.purge``."""

    NAME = "queue.purge"
    CODE = 0x0803
    TO_CLIENT = False

    queue: Str8Field | None = None


class QueueQueryResult(Composite):
    """``queue.queue-query-result``."""

    NAME = "queue.queue-query-result"
    CODE = 0x0801

    queue: Str8Field | None = None
    alternate_exchange: Str8Field | None = None
    durable: Bit = False
    exclusive: Bit = False
    auto_delete: Bit = False
    arguments: MapField | None = None
    message_count: Uint32Field | None = None
    subscriber_count: Uint32Field | None = None


class QueueQuery(Command):
    """``queue.query``."""

    NAME = "queue.query"
    CODE = 0x0804
    TO_CLIENT = False
    RESULT = QueueQueryResult

    queue: Str8Field | None = None
