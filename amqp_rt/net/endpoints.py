"""Helpers for endpoints, shared by dialling and listening. No I/O."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from functools import lru_cache
from typing import Any, Final

from ..addresses import Url
from ..errors import ConnectFailed

#: Reasons of failed connections; the system's texts describe system calls instead.
_WORDS: Final = {
    errno.ECONNREFUSED: "nothing listens there",
    errno.ENOENT: "there is no such file or folder",
    errno.EHOSTUNREACH: "the host cannot be reached",
    errno.ENETUNREACH: "its network cannot be reached",
    errno.ETIMEDOUT: "it does not answer",
    errno.EADDRINUSE: "the address is already in use",
    errno.EADDRNOTAVAIL: "the address is not one of this machine",
    errno.EACCES: "it is not allowed",
}


def check_scheme(url: Url, *, doing: str = "connect to") -> None:
    """Refuse a URL whose scheme this system does not support.

    Raises:
        ConnectFailed: The system has no Unix sockets.
    """
    if url.scheme == "amqp+unix" and not hasattr(socket, "AF_UNIX"):
        raise ConnectFailed(
            f"cannot {doing} {url}: this system has no Unix sockets",
            condition="amqp:not-implemented",
        )


def reason(error: OSError) -> str:
    """Describe *error* in one clause. The failures of several addresses may come as a group."""
    if isinstance(error, socket.gaierror):
        return "the host's name is not known"
    if isinstance(error, TimeoutError):
        return "it does not answer"
    cause = error.__cause__
    if isinstance(cause, BaseExceptionGroup):
        cause = next((each for each in cause.exceptions if isinstance(each, OSError)), None)
    if isinstance(cause, OSError):
        return reason(cause)
    if error.errno is None:
        return str(error)
    return _WORDS.get(error.errno) or error.strerror or os.strerror(error.errno)


def is_local(family: int, address: Any) -> bool:
    """Return whether the peer of a socket address is on this machine; names are not trusted."""
    if family not in (socket.AF_INET, socket.AF_INET6):
        return True
    return is_loopback(address[0])


@lru_cache(maxsize=1_024)
def is_loopback(host: str) -> bool:
    """Return whether *host*, an IP address with or without a zone, is a loopback address.

    Raises:
        ValueError: *host* is not an IP address.
    """
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped.is_loopback
    return address.is_loopback
