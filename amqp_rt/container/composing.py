"""Messages composed of a payload and properties."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..message import BodyKind, Message, MessageFields
from .compression import Compression, compressed
from .payloads import encode_payload

if TYPE_CHECKING:
    from .codecs import Codecs


class MessageProperties(MessageFields, total=False):
    """Properties of a message that is sent whole; ``compress`` names the encoding of its data."""

    body_kind: BodyKind | None
    compress: Compression | None


def build_message(
    content: object,
    properties: MessageProperties | Mapping[str, Any],
    codecs: Codecs | None = None,
) -> Message:
    """Return *content*, a message or the payload of one, with *properties*.

    Raises:
        EncodeError: The payload has no encoding, or cannot be compressed.
    """
    if not properties:
        return content if isinstance(content, Message) else make_message(content, {}, codecs)
    encoding = None
    if "compress" in properties:
        properties = dict(properties)
        encoding = properties.pop("compress")
    if isinstance(content, Message):
        built = content.replace(**properties)
    else:
        built = make_message(content, properties, codecs)
    return built if encoding is None else compressed(built, encoding)


def make_message(
    payload: object,
    properties: MessageProperties | Mapping[str, Any],
    codecs: Codecs | None = None,
) -> Message:
    """Create a message for a typed payload, whose type determines body and content-type.

    With ``body_kind`` among the properties the payload is the body without conversion. *codecs* encode the
    types that they claim.

    Raises:
        EncodeError: The payload has no encoding.
    """
    if "body_kind" in properties:
        return Message(payload, **properties)
    given = properties.get("content_type")
    content_type, body, kind = encode_payload(payload, given, codecs)
    if content_type == given:
        return Message(body, body_kind=kind, **properties)
    # Use the content-type of the encoded body: AMQP_VALUE is our own word for having none.
    return Message(body, body_kind=kind, **{**properties, "content_type": content_type})
