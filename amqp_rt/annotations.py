"""Annotations and application properties of messages on their way: checking those of a peer, merging changes.

A relay checks the keys of annotations under an :data:`AnnotationPolicy` (Part 3 §3.2.10), and adds the
annotations of a ``modified`` outcome to a message that it keeps (§3.4.5).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias

from .codec.composites import from_described
from .codec.primitives import shown
from .codec.section_types import Head
from .codec.sections import (
    DELIVERY_ANNOTATIONS,
    FOOTER,
    MESSAGE_ANNOTATIONS,
    SECTION_NAMES,
    is_simple,
    read_annotations,
    write_annotations,
)
from .errors import DecodeError
from .limits import DEFAULT_LIMITS, Limits
from .message import Message
from .outcomes import Error
from .trace_context import TRACEPARENT, TRACESTATE
from .values import Symbol

__all__ = [
    "NUMBER_PREFIX",
    "AnnotationPolicy",
    "check_annotations",
    "check_application_properties",
    "check_maps",
    "merge_annotations",
    "number_annotation",
]

#: Beginning of the names of annotations with the number of a message in a queue; the rest is the name of the
#: header with the number, in protocols that have headers.
NUMBER_PREFIX: Final = "x-opt-queue-number-"
_HEADER_MAX: Final = 100

#: Policy for annotation keys that we do not know.
AnnotationPolicy: TypeAlias = Literal["default", "strict", "lenient"]


def check_annotations(
    subject: Message | Head,
    policy: AnnotationPolicy = "default",
    *,
    understood: Collection[object] = (),
    limits: Limits = DEFAULT_LIMITS,
) -> Error | None:
    """Return the error to detach with because of an annotation key, or None (§3.2.10).

    Reserved keys, which are ulongs and symbols without ``x-``, are refused unless they are
    *understood*. ``"strict"`` also refuses ``x-`` keys without ``x-opt-``, as the standard demands,
    and ``"lenient"`` relays everything. Under every policy the delivery annotation ``rejected`` must
    hold an error (§3.2.2). Of a :class:`Message` the footer is checked too.

    Raises:
        DecodeError: An annotation section is malformed.
    """
    if isinstance(subject, Head):
        if not subject.delivery_annotations and not subject.message_annotations:
            return None
        delivery: Mapping[Any, object] = read_annotations(subject.delivery_annotations, limits)
        message: Mapping[Any, object] = read_annotations(subject.message_annotations, limits)
        return check_maps(delivery, message, policy, understood=understood)
    return check_maps(
        subject.delivery_annotations,
        subject.message_annotations,
        policy,
        footer=subject.footer,
        understood=understood,
    )


def check_maps(
    delivery: Mapping[Any, object],
    message: Mapping[Any, object],
    policy: AnnotationPolicy = "default",
    *,
    footer: Mapping[Any, object] = MappingProxyType({}),
    understood: Collection[object] = (),
) -> Error | None:
    """Return the error of :func:`check_annotations` for annotations that are decoded already."""
    rejected = delivery.get("rejected")
    if rejected is not None and not isinstance(rejected, Error):
        try:
            from_described(rejected, Error)
        except DecodeError as error:
            return Error(
                "amqp:invalid-field",
                f"the delivery annotation 'rejected' holds no error: {error.description}",
            )
    if policy == "lenient":
        return None
    free = "x-opt" if policy == "strict" else "x-"
    for code, section in (
        (DELIVERY_ANNOTATIONS, delivery),
        (MESSAGE_ANNOTATIONS, message),
        (FOOTER, footer),
    ):
        for key in section:
            if isinstance(key, str) and (
                key.startswith(free) or (key == "rejected" and code == DELIVERY_ANNOTATIONS)
            ):
                continue
            if code == MESSAGE_ANNOTATIONS and key in (TRACEPARENT, TRACESTATE):
                # W3C's draft for AMQP: intermediaries write the trace context there.
                continue
            if key not in understood:
                return Error(
                    "amqp:not-implemented",
                    f"the key {shown(key)} in the {SECTION_NAMES[code]} is not understood",
                )
    return None


def check_application_properties(message: Message) -> Error | None:
    """Return the error for an application property that is not a simple value, or None (§3.2.5).

    Used by the policy ``"strict"``.
    """
    for key, value in message.application_properties.items():
        if not is_simple(value):
            return Error(
                DecodeError.default_condition,
                f"the application property {shown(key)} is {shown(value)}, no simple value",
            )
    return None


def merge_annotations(
    section: bytes, changes: Mapping[Any, object], limits: Limits = DEFAULT_LIMITS
) -> bytes:
    """Return the message-annotations *section* with *changes*, which win (§3.4.5 ``modified``)."""
    if not changes:
        return section
    out = bytearray()
    write_annotations(
        out, MESSAGE_ANNOTATIONS, {**read_annotations(section, limits), **dict(changes.items())}
    )
    return bytes(out)


def number_annotation(header: str) -> Symbol:
    """Return the annotation for the number of a message in a queue whose ``number_header`` is *header*.

    Raises:
        ValueError: *header* cannot be the end of a symbol, or is too long.
    """
    if not (header.isascii() and header.isprintable() and 0 < len(header) <= _HEADER_MAX):
        raise ValueError(
            f"number_header has 1 to {_HEADER_MAX} printable characters of ASCII, and is {header!r:.150}"
        )
    return Symbol(NUMBER_PREFIX + header)
