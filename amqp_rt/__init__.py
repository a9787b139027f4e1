"""An AMQP runtime: declare a function on an address, and any AMQP client can talk to it.

The public names are looked up on first use (PEP 562), so that importing the pure parts, such as
``amqp_rt.core``, does not import trio.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .broker.broker import Broker
    from .container.connections import Connection
    from .container.container import Container
    from .container.declaring import Router, node, rpc, source
    from .container.deliveries import Delivery
    from .container.delivery_logs import DeliveryLogs
    from .container.item_sending import stream
    from .container.profiles import Profile
    from .container.raising import Modify, Reject, Release
    from .container.receiving import Receiver
    from .container.recovery import Reconnect, connect
    from .container.routes import Batch, Deadline
    from .container.scopes import Depends, PerMessage
    from .container.sending import Sender
    from .container.timing import cron, every
    from .container.tokens import Sas
    from .container.transactions import Transaction
    from .events import Peer
    from .limits import Limits
    from .message import Message
    from .net.proxy_headers import ProxyProtocol
    from .net.tls import ClientTls, ServerTls
    from .policies import Breaker, Bulkhead, Cache, Hedge, Retry
    from .security.access import Access, Rights, Rule
    from .security.bearer import CbsLogin, Login, OAuthBearer, XOAuth2
    from .security.identities import Users
    from .security.jwts import Jwt
    from .security.mechanisms import Anonymous, External, Plain
    from .security.scram import Scram
    from .security.tokens import BearerToken, Cbs, SasKey, SasKeys, Swt

__all__ = [
    "COMPILED",
    "Access",
    "Anonymous",
    "Batch",
    "BearerToken",
    "Breaker",
    "Broker",
    "Bulkhead",
    "Cache",
    "Cbs",
    "CbsLogin",
    "ClientTls",
    "Connection",
    "Container",
    "Deadline",
    "Delivery",
    "DeliveryLogs",
    "Depends",
    "External",
    "Hedge",
    "Jwt",
    "Limits",
    "Login",
    "Message",
    "Modify",
    "OAuthBearer",
    "Peer",
    "PerMessage",
    "Plain",
    "Profile",
    "ProxyProtocol",
    "Receiver",
    "Reconnect",
    "Reject",
    "Release",
    "Retry",
    "Rights",
    "Router",
    "Rule",
    "Sas",
    "SasKey",
    "SasKeys",
    "Scram",
    "Sender",
    "ServerTls",
    "Swt",
    "Transaction",
    "Users",
    "XOAuth2",
    "__version__",
    "connect",
    "cron",
    "every",
    "node",
    "rpc",
    "source",
    "stream",
]

__version__ = "0.1.0"

#: Whether the codec and the engines run compiled (mypyc) or as plain Python.
COMPILED: bool

#: Public name → the module that defines it. ``__all__`` and the imports under ``TYPE_CHECKING``
#: repeat the names, for readers and type checkers; ``tests/test_public_api.py`` keeps them equal.
_HOMES: dict[str, str] = {
    "Access": "amqp_rt.security.access",
    "Anonymous": "amqp_rt.security.mechanisms",
    "Batch": "amqp_rt.container.routes",
    "BearerToken": "amqp_rt.security.tokens",
    "Breaker": "amqp_rt.policies",
    "Broker": "amqp_rt.broker.broker",
    "Bulkhead": "amqp_rt.policies",
    "Cache": "amqp_rt.policies",
    "Cbs": "amqp_rt.security.tokens",
    "CbsLogin": "amqp_rt.security.bearer",
    "ClientTls": "amqp_rt.net.tls",
    "connect": "amqp_rt.container.recovery",
    "cron": "amqp_rt.container.timing",
    "every": "amqp_rt.container.timing",
    "Connection": "amqp_rt.container.connections",
    "Container": "amqp_rt.container.container",
    "Deadline": "amqp_rt.container.routes",
    "Delivery": "amqp_rt.container.deliveries",
    "DeliveryLogs": "amqp_rt.container.delivery_logs",
    "Depends": "amqp_rt.container.scopes",
    "External": "amqp_rt.security.mechanisms",
    "Hedge": "amqp_rt.policies",
    "Jwt": "amqp_rt.security.jwts",
    "Limits": "amqp_rt.limits",
    "Login": "amqp_rt.security.bearer",
    "Message": "amqp_rt.message",
    "Modify": "amqp_rt.container.raising",
    "node": "amqp_rt.container.declaring",
    "OAuthBearer": "amqp_rt.security.bearer",
    "Peer": "amqp_rt.events",
    "PerMessage": "amqp_rt.container.scopes",
    "Plain": "amqp_rt.security.mechanisms",
    "Profile": "amqp_rt.container.profiles",
    "Receiver": "amqp_rt.container.receiving",
    "ProxyProtocol": "amqp_rt.net.proxy_headers",
    "Reconnect": "amqp_rt.container.recovery",
    "Reject": "amqp_rt.container.raising",
    "Release": "amqp_rt.container.raising",
    "Retry": "amqp_rt.policies",
    "Rights": "amqp_rt.security.access",
    "Router": "amqp_rt.container.declaring",
    "rpc": "amqp_rt.container.declaring",
    "Rule": "amqp_rt.security.access",
    "Sas": "amqp_rt.container.tokens",
    "SasKey": "amqp_rt.security.tokens",
    "SasKeys": "amqp_rt.security.tokens",
    "Scram": "amqp_rt.security.scram",
    "Sender": "amqp_rt.container.sending",
    "ServerTls": "amqp_rt.net.tls",
    "source": "amqp_rt.container.declaring",
    "stream": "amqp_rt.container.item_sending",
    "Swt": "amqp_rt.security.tokens",
    "Transaction": "amqp_rt.container.transactions",
    "Users": "amqp_rt.security.identities",
    "XOAuth2": "amqp_rt.security.bearer",
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
