"""Addresses of exchanges, for rights and for peers of AMQP 1.0."""

from __future__ import annotations

from functools import lru_cache
from urllib.parse import quote, unquote

from ...addresses import EXCHANGES
from ...security.access import EVERYWHERE


@lru_cache(maxsize=1024)
def exchange_address(name: str, key: str = "") -> str:
    """Return the address of an exchange, for rights and for peers of AMQP 1.0."""
    # Names that are not UTF-8 are encoded too, and lead to the error for an unknown exchange.
    address = EXCHANGES + quote(name, safe="", errors="surrogateescape")
    return f"{address}/{quote(key, safe='', errors='surrogateescape')}" if key else address


def split_exchange(address: str) -> tuple[str, str] | None:
    """Return the exchange and the routing key in *address*; None if it is no such address."""
    if not address.startswith(EXCHANGES):
        return None
    name, _, key = address.removeprefix(EXCHANGES).partition("/")
    return unquote(name, errors="surrogateescape"), unquote(key, errors="surrogateescape")


@lru_cache(maxsize=1024)
def own_name(address: str) -> str:
    """Return the name under which rights at the exchange at *address* are granted."""
    found = split_exchange(address)
    if found is None:
        return address
    name, key = found
    if name:
        return exchange_address(name)
    # The default exchange leads to the queue named by the key; without a key, to the queue named by
    # each message, which may be any.
    return key or EVERYWHERE
