"""Typed payloads: what a Python value becomes in a message, and back (A3).

The content-type decides. Without one the body is an AMQP value, which every AMQP client reads
as its own kind of value.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from decimal import Decimal
from functools import lru_cache
from typing import Any, Final, TypeAlias
from uuid import UUID

import msgspec

from ..errors import DecodeError, EncodeError
from ..message import BodyKind, Message, Sequence
from ..values import Described, Symbol, Timestamp

JSON: Final = "application/json"
MESSAGE_PACK: Final = ("application/msgpack", "application/x-msgpack", "application/vnd.msgpack")

#: Content-type, body and kind of body for :class:`~amqp_rt.message.Message`.
Encoded: TypeAlias = tuple[str | None, Any, BodyKind | None]

#: Types that AMQP has itself: sent as amqp-value, so that every peer sees a value and not text.
_VALUES: Final = (str, int, float, UUID, datetime, Described)

_DECODERS_MAX: Final = 1024
_REASON_MAX: Final = 500


def encode_payload(value: object, content_type: str | None = None) -> Encoded:
    """The body for *value*.

    Without *content_type*: bytes as data, values that AMQP has a type for as amqp-value, Structs,
    dataclasses, maps and lists as JSON.

    Raises:
        EncodeError: It cannot be encoded so.
    """
    if content_type is None:
        if isinstance(value, bytes | bytearray | memoryview):
            return None, bytes(value), "data"
        if value is None or isinstance(value, _VALUES):
            return None, value, "value"
        if isinstance(value, Sequence):
            return None, value, "sequence"
        if isinstance(value, Decimal):
            return None, str(value), "value"
        return JSON, _to_json(value), "data"
    kind = _kind(content_type)
    if isinstance(value, bytes | bytearray | memoryview):
        return content_type, bytes(value), "data"
    if kind == JSON or kind.endswith("+json"):
        return content_type, _to_json(value), "data"
    if kind in MESSAGE_PACK:
        try:
            return content_type, msgspec.msgpack.encode(value), "data"
        except (TypeError, OverflowError, ValueError) as error:
            raise EncodeError(f"no MessagePack for it: {error}") from error
    if isinstance(value, str):
        return content_type, value.encode(), "data"
    raise EncodeError(
        f"{type(value).__name__} cannot be sent as {content_type!r}: give bytes, or text"
    )


def _to_json(value: object) -> bytes:
    try:
        return msgspec.json.encode(value)
    except (TypeError, OverflowError, ValueError, RecursionError) as error:
        raise EncodeError(f"no JSON for it: {error}") from error


def decode_payload(message: Message, kind: Any) -> Any:
    """The body of *message* as *kind*, by its content-type.

    Raises:
        DecodeError: It is none; the reason names the field, as msgspec does.
    """
    body = message.body
    if isinstance(body, bytes):
        content_type = message.content_type
        if content_type is not None:
            encoding = message.content_encoding
            if encoding:
                raise DecodeError(f"content-encoding {encoding!r:.50} is not decoded here")
            return _decode_bytes(body, _kind(content_type), kind)
        return _decode_untyped(body, kind)
    return _from_value(body, kind)


def _decode_bytes(body: bytes, content_type: str, kind: Any) -> Any:
    if kind is bytes:
        return body
    try:
        if content_type == JSON or content_type.endswith("+json"):
            return _json_decoder(kind).decode(body)
        if content_type in MESSAGE_PACK:
            return _message_pack_decoder(kind).decode(body)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise DecodeError(_brief(error)) from error
    if content_type.startswith("text/"):
        return _from_value(_text(body), kind)
    return _decode_untyped(body, kind)


def _decode_untyped(body: bytes, kind: Any) -> Any:
    """Data without a content-type: bytes, unless something else is asked for."""
    if kind is Any or kind is bytes:
        return body
    if kind is str:
        return _text(body)
    try:
        return _json_decoder(kind).decode(body)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        try:
            return msgspec.convert(body, kind)
        except (msgspec.ValidationError, ValueError):
            raise DecodeError(_brief(error)) from error


def _from_value(value: Any, kind: Any) -> Any:
    if kind is Any:
        return value
    try:
        return msgspec.convert(_plain(value), kind, strict=False, str_keys=False)
    except (msgspec.ValidationError, RecursionError, ValueError, TypeError) as error:
        raise DecodeError(_brief(error)) from error


def _plain(value: Any) -> Any:
    """*value* without the types that only AMQP has, so that msgspec knows what it is."""
    kind = type(value)
    if kind is str or kind is int or kind is float or kind is bool or kind is bytes:
        return value
    if isinstance(value, Timestamp):
        return value.datetime
    if isinstance(value, bool):
        return bool(value)
    if isinstance(value, Symbol | str):
        return str(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, Described):
        return _plain(value.value)
    return value


def _text(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError:
        raise DecodeError("the text is not UTF-8") from None


def _kind(content_type: str) -> str:
    return content_type.partition(";")[0].strip().lower()


def _brief(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text if len(text) <= _REASON_MAX else text[:_REASON_MAX] + "…"


@lru_cache(_DECODERS_MAX)
def _json_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


@lru_cache(_DECODERS_MAX)
def _message_pack_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)
