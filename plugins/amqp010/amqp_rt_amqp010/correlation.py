"""Correlation identifiers: octets in 0-10, of four types in AMQP 1.0."""

from __future__ import annotations

from uuid import UUID

from amqp_rt.fronts.headers import typed_id

from .type_codes import SIZE16_MAX


def correlation_id_of(octets: bytes, kind: object) -> tuple[str | bytes | int | UUID, bool]:
    """Return the id of 1.0 for *octets*, whose type a header may name as *kind*.

    Returns:
        The id, and whether its type is *kind*.
    """
    try:
        text = octets.decode()
    except UnicodeDecodeError:
        return octets, False
    if kind in ("uuid", "ulong"):
        found = typed_id(text, kind)
        return found, found is not text
    return text, False


def octets_of(value: object) -> tuple[bytes | None, str | None]:
    """Return the octets for an id of 1.0, and the name of its type if they do not tell it.

    The octets are None if there are too many.
    """
    if isinstance(value, bytes):
        octets, kind = value, None
    elif isinstance(value, str):
        octets, kind = value.encode(), None
    else:
        octets, kind = str(value).encode(), "uuid" if isinstance(value, UUID) else "ulong"
    return (octets if len(octets) <= SIZE16_MAX else None), kind
