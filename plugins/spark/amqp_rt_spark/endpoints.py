"""Endpoints: the address of a broker, and the login there."""

from __future__ import annotations

import os

from msgspec import Struct

from amqp_rt import Anonymous, External, Plain, Scram
from amqp_rt.fronts import amqp10


class Endpoint(Struct, frozen=True):
    """Address of a broker, and the login there. Contains no secret, only the place of one."""

    url: str
    credentials_file: str = ""
    credentials_env: str = ""
    mechanism: str = ""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    container_id: str = ""
    timeout_s: float = 30.0
    #: Seconds to retry after a loss of the broker; 0 for not at all.
    retry_s: float = 120.0


def _secret(endpoint: Endpoint) -> tuple[str, str] | None:
    """Read user and password from their place: one line, ``user:password``."""
    if endpoint.credentials_file:
        try:
            with open(endpoint.credentials_file, encoding="utf-8") as file:
                line = file.readline().strip()
        except OSError as error:
            raise ValueError(
                f"credentialsFile {endpoint.credentials_file!r} cannot be read: {error.strerror}"
            ) from error
        where = f"credentialsFile {endpoint.credentials_file!r}"
    elif endpoint.credentials_env:
        line = os.environ.get(endpoint.credentials_env, "")
        where = f"the environment variable {endpoint.credentials_env!r} (credentialsEnv)"
    else:
        return None
    user, colon, password = line.partition(":")
    if not colon or not user:
        raise ValueError(f"{where} has to hold one line, user:password")
    return user, password


def mechanism_of(endpoint: Endpoint) -> amqp10.ClientMechanism:
    """Return the SASL mechanism with which to log in at *endpoint*.

    Raises:
        ValueError: The options contradict each other, or the secret cannot be read.
    """
    wanted = endpoint.mechanism.upper()
    secret = _secret(endpoint)
    if wanted == "EXTERNAL" or (not wanted and secret is None and endpoint.tls_cert):
        return External()
    if wanted == "ANONYMOUS" or (not wanted and secret is None):
        return Anonymous()
    if secret is None:
        raise ValueError(f"sasl.mechanism={wanted} needs credentialsFile or credentialsEnv")
    if wanted in ("", "PLAIN"):
        return Plain(*secret)
    if wanted.startswith("SCRAM-"):
        return Scram(*secret, wanted.removeprefix("SCRAM-"))
    raise ValueError(
        f"sasl.mechanism={wanted} is not one of ANONYMOUS, PLAIN, EXTERNAL, "
        "SCRAM-SHA-1, SCRAM-SHA-256 and SCRAM-SHA-512"
    )
