"""Names of OpenTelemetry's semantic conventions for messaging, in one table.

The conventions are in development, so that names may change: this module alone has them, with the version that they
are of.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from ..events import Peer
from ..observers import Kind

#: Version of the conventions, sent with spans and metrics.
SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.37.0"

SYSTEM: Final = "messaging.system"
OPERATION_NAME: Final = "messaging.operation.name"
OPERATION_TYPE: Final = "messaging.operation.type"
DESTINATION_NAME: Final = "messaging.destination.name"
DESTINATION_TEMPLATE: Final = "messaging.destination.template"
DESTINATION_TEMPORARY: Final = "messaging.destination.temporary"
MESSAGE_ID: Final = "messaging.message.id"
BATCH_COUNT: Final = "messaging.batch.message_count"
CONVERSATION_ID: Final = "messaging.message.conversation_id"
SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"
ERROR_TYPE: Final = "error.type"

SENT: Final = "messaging.client.sent.messages"
CONSUMED: Final = "messaging.client.consumed.messages"
OPERATION_DURATION: Final = "messaging.client.operation.duration"
PROCESS_DURATION: Final = "messaging.process.duration"

#: Boundaries of the histograms, in seconds.
BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)


class Named(NamedTuple):
    """How an operation appears in spans and metrics."""

    #: First word of the span's name.
    name: str
    #: ``messaging.operation.type``.
    type: str
    #: Name of a member of ``opentelemetry.trace.SpanKind``.
    span_kind: str
    #: Whether the span is a child of the message's context; otherwise it links to it.
    is_child: bool
    #: Names of the counter and the histogram; None for none.
    counter: str | None
    histogram: str | None


#: Operation → its names. ``receive`` has no span: what follows it has one.
OPERATIONS: Final[Mapping[Kind, Named]] = {
    "send": Named("send", "send", "PRODUCER", False, SENT, OPERATION_DURATION),
    "create": Named("create", "create", "PRODUCER", False, None, None),
    "call": Named("call", "send", "CLIENT", False, SENT, OPERATION_DURATION),
    "settle": Named("settle", "settle", "CLIENT", False, None, OPERATION_DURATION),
    "process": Named("process", "process", "CONSUMER", False, CONSUMED, PROCESS_DURATION),
    "serve": Named("process", "process", "SERVER", True, CONSUMED, PROCESS_DURATION),
    "receive": Named("receive", "receive", "CLIENT", False, CONSUMED, None),
    "relay": Named("relay", "send", "PRODUCER", True, None, None),
}

#: Beginning of the product in a peer's open properties, in small letters → ``messaging.system``.
_SYSTEMS: Final = {
    "rabbitmq": "rabbitmq",
    "activemq": "activemq",
    "apache-activemq": "activemq",
    "microsoft.servicebus": "servicebus",
    "servicebus": "servicebus",
}


def system_of(peer: Peer | None) -> str:
    """Return ``messaging.system`` for *peer*: known products by its open properties, else ``amqp``."""
    product = "" if peer is None else str(peer.properties.get("product", "")).lower()
    for beginning, system in _SYSTEMS.items():
        if product.startswith(beginning):
            return system
    return "amqp"
