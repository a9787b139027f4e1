"""Addresses of AMQP 1.0 for what ``reply-to`` names: an exchange and a routing key."""

from __future__ import annotations

from urllib.parse import quote

from amqp_rt.addresses import QUEUES, address_of
from amqp_rt.broker.topology.exchange_addresses import exchange_address, split_exchange

from .conversions import fits_str8
from .forms import NO_REPLY_EXCHANGE, NO_REPLY_KEY
from .layouts import ReplyTo


def address_for(reply_to: ReplyTo) -> str:
    """Return the address of *reply_to*: that of a queue if its exchange is the default one."""
    key = reply_to.routing_key or ""
    if reply_to.exchange:
        return exchange_address(reply_to.exchange, key)
    if address_of(key) != key or split_exchange(key) is not None:
        return QUEUES + quote(key, safe="")
    return key


def form_of(reply_to: ReplyTo) -> int:
    """Return which fields of *reply_to* are absent, as bits of a form."""
    return (NO_REPLY_EXCHANGE if reply_to.exchange is None else 0) | (
        NO_REPLY_KEY if reply_to.routing_key is None else 0
    )


def reply_to_for(address: str, form: int = 0) -> ReplyTo | None:
    """Return what *address* names; None if the names exceed their fields."""
    exchange, key = split_exchange(address) or ("", address_of(address))
    if not (fits_str8(exchange) and fits_str8(key)):
        return None
    return ReplyTo(
        exchange=None if form & NO_REPLY_EXCHANGE and not exchange else exchange,
        routing_key=None if form & NO_REPLY_KEY and not key else key,
    )
