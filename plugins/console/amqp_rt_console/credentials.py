"""Credentials in the headers of requests, as mechanisms of SASL."""

from __future__ import annotations

import binascii
from base64 import b64decode
from collections.abc import Collection
from typing import Final

from amqp_rt import Anonymous, External, OAuthBearer, Plain, Scram
from amqp_rt.container.doors import DoorArrival
from amqp_rt.errors import AuthenticationFailed

from .problems import Problem
from .sessions import Login

#: Octets of credentials, so that a token of usual size fits.
_SIZE_MAX: Final = 8 * 1024
#: Characters of a user name and a password.
_PASSWORD_MAX: Final = 1_024


def by_password(user: str, password: str, virtual_host: str = "") -> Login:
    """Return the login of a user with a password.

    Raises:
        AuthenticationFailed: No mechanism can carry them.
    """
    if len(user) + len(password) > _PASSWORD_MAX:
        raise AuthenticationFailed("user and password are too long")
    # Brokers that keep no passwords, but secrets of SCRAM only, offer no PLAIN.
    scram = [Scram(user, password, hash_name=each) for each in ("SHA-512", "SHA-256", "SHA-1")]
    secret = f"{user}\0{password}".encode()
    return Login((Plain(user, password), *scram), secret, virtual_host)


async def by_token(token: str, virtual_host: str = "") -> Login:
    """Return the login of a bearer token.

    Raises:
        AuthenticationFailed: It is no token.
    """
    mechanism = OAuthBearer(token)
    await mechanism.prepare()
    return Login((mechanism,), token.encode(), virtual_host)


async def in_header(value: str, virtual_host: str) -> Login:
    """Return the login in *value*, the header ``authorization`` of a request (RFC 9110 §11.6.2).

    Raises:
        AuthenticationFailed: The credentials are malformed.
        Problem: It is neither Basic (RFC 7617) nor Bearer (RFC 6750).
    """
    scheme, _, rest = value.partition(" ")
    rest = rest.strip()
    if len(rest) > _SIZE_MAX:
        raise Problem(431, f"the credentials have more than {_SIZE_MAX} octets")
    if scheme.lower() == "bearer":
        return await by_token(rest, virtual_host)
    if scheme.lower() != "basic":
        raise Problem(401, "credentials are Basic or Bearer")
    try:
        user, colon, password = b64decode(rest, validate=True).decode().partition(":")
    except (binascii.Error, ValueError):
        user = colon = password = ""
    if not colon:
        raise AuthenticationFailed("the credentials are malformed")
    return by_password(user, password, virtual_host)


def without(offered: Collection[str], arrival: DoorArrival, virtual_host: str) -> Login | None:
    """Return the login of a request without credentials, None if the broker demands some.

    Args:
        offered: Mechanisms that the broker offers.
        arrival: How the connection of the request has arrived.
        virtual_host: Virtual host of the request.
    """
    if arrival.certificate is not None and "EXTERNAL" in offered:
        return Login((External(),), b"", virtual_host)
    if not offered:
        return Login((), b"", virtual_host)
    if "ANONYMOUS" in offered:
        return Login((Anonymous(),), b"", virtual_host)
    return None
