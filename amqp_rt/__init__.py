"""An AMQP runtime: declare a function on an address, and any AMQP client can talk to it.

The public names are looked up on first use (PEP 562), so that importing the pure parts, such as
``amqp_rt.core``, does not import trio.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .container.connections import Connection
    from .container.container import Container
    from .container.receiving import Delivery, Receiver
    from .container.recovery import Reconnect, connect
    from .container.routes import Deadline, Modify, Reject, Release, Router, node, rpc, source
    from .container.sending import Sender
    from .container.transactions import Transaction
    from .events import Peer
    from .limits import Limits
    from .message import Message
    from .net.tls import ClientTls, ServerTls
    from .runtime import Broker
    from .security.mechanisms import Anonymous, External, Plain

__all__ = [
    "COMPILED",
    "Anonymous",
    "Broker",
    "ClientTls",
    "Connection",
    "Container",
    "Deadline",
    "Delivery",
    "External",
    "Limits",
    "Message",
    "Modify",
    "Peer",
    "Plain",
    "Receiver",
    "Reconnect",
    "Reject",
    "Release",
    "Router",
    "Sender",
    "ServerTls",
    "Transaction",
    "__version__",
    "connect",
    "node",
    "rpc",
    "source",
]

__version__ = "0.1.0"

#: Whether the codec and the engines run compiled (mypyc) or as plain Python.
COMPILED: bool

#: Public name → the module that defines it. ``__all__`` and the imports under ``TYPE_CHECKING``
#: repeat the names, for readers and type checkers; ``tests/test_public_api.py`` keeps them equal.
_HOMES: dict[str, str] = {
    "Anonymous": "amqp_rt.security.mechanisms",
    "Broker": "amqp_rt.runtime",
    "ClientTls": "amqp_rt.net.tls",
    "Connection": "amqp_rt.container.connections",
    "Container": "amqp_rt.container.container",
    "Deadline": "amqp_rt.container.routes",
    "Delivery": "amqp_rt.container.receiving",
    "External": "amqp_rt.security.mechanisms",
    "Limits": "amqp_rt.limits",
    "Message": "amqp_rt.message",
    "Modify": "amqp_rt.container.routes",
    "Peer": "amqp_rt.events",
    "Plain": "amqp_rt.security.mechanisms",
    "Reconnect": "amqp_rt.container.recovery",
    "Receiver": "amqp_rt.container.receiving",
    "Reject": "amqp_rt.container.routes",
    "Release": "amqp_rt.container.routes",
    "Router": "amqp_rt.container.routes",
    "Sender": "amqp_rt.container.sending",
    "ServerTls": "amqp_rt.net.tls",
    "Transaction": "amqp_rt.container.transactions",
    "connect": "amqp_rt.container.recovery",
    "node": "amqp_rt.container.routes",
    "rpc": "amqp_rt.container.routes",
    "source": "amqp_rt.container.routes",
}


def __getattr__(name: str) -> object:
    value: object
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    elif name == "COMPILED":
        codec = find_spec("amqp_rt.codec.primitives")
        value = codec is not None and not str(codec.origin).endswith(".py")
    else:
        raise AttributeError(f"module 'amqp_rt' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
