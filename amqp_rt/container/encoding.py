"""Payloads that are sent without properties, encoded without a message object.

mypyc compiles this module: each such message of a sender passes through it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from ..codec.whole_messages import data_opening, value_section
from ..message import Message
from ..trace_context import trace_section
from .payloads import AS_THEY_ARE, Encoded, encode_payload

if TYPE_CHECKING:
    from .codecs import Codecs


def encode_body(payload: object, codecs: Codecs | None) -> Encoded:
    """Return what :func:`~.payloads.encode_payload` does for *payload* without a content-type.

    Raises:
        EncodeError: The payload has no encoding.
    """
    if codecs is None:
        # Most payloads are of these types.
        if type(payload) is bytes:
            return None, payload, "data"
        if type(payload) in AS_THEY_ARE:
            return None, payload, "value"
    return encode_payload(payload, None, codecs)


def encode_plain(payload: object, codecs: Codecs | None = None) -> bytes:
    """Encode a message of *payload* alone, as that of :func:`~.composing.make_message` without properties is encoded.

    Raises:
        EncodeError: The payload has no encoding.
    """
    content_type, body, kind = encode_body(payload, codecs)
    if kind == "data":
        # One copy of the body, however large it is.
        if content_type is None:
            return b"".join((data_opening(len(body)), body))
        return b"".join((_front_of(content_type), data_opening(len(body)), body))
    if kind == "value" and content_type is None:
        return value_section(body)
    return Message(body, body_kind=kind, content_type=content_type).encode()


def encode_traced(payload: object, trace: Mapping[str, str], codecs: Codecs | None = None) -> bytes:
    """Encode a message of *payload* alone, with the trace context *trace* in its application-properties.

    Raises:
        EncodeError: The payload has no encoding.
    """
    content_type, body, kind = encode_body(payload, codecs)
    if kind != "data":
        made = Message(
            body, body_kind=kind, content_type=content_type, application_properties=trace
        )
        return made.encode()
    front = b"" if content_type is None else _front_of(content_type)
    return b"".join((front, trace_section(trace), data_opening(len(body)), body))


@lru_cache(maxsize=16)
def _front_of(content_type: str) -> bytes:
    """Encode the sections before the body of a message that has only a content-type."""
    return Message(b"", content_type=content_type).encode_front()
