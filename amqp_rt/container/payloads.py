"""Typed payloads: conversion between Python values and message bodies.

The content-type determines how data sections are decoded. A body without one is an AMQP value,
which AMQP clients in any language read as a native value.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import types
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, TypeAlias, Union, cast, get_args, get_origin
from uuid import UUID

import msgspec

from ..codec.composites import from_described
from ..codec.plain_messages import PlainMessage
from ..errors import DecodeError, EncodeError
from ..limits import DEFAULT_LIMITS, Limits
from ..message import BodyKind, Message, Sequence
from ..values import Array, Char, Described, Float32, Map, Symbol, Timestamp
from .compression import MAGICS, decompressed, is_known
from .faults import INPUT_ERRORS, SEARCHED_MAX, find_faults, info_of
from .models import is_model, plain_of_model

if TYPE_CHECKING:
    from .codecs import Codecs

JSON: Final = "application/json"
MESSAGE_PACK: Final = ("application/msgpack", "application/x-msgpack", "application/vnd.msgpack")
OCTETS: Final = "application/octet-stream"
#: In place of a content-type: send structured values as amqp-value instead of JSON.
AMQP_VALUE: Final = "amqp-value"

#: Content-type, body and kind of body for :class:`~amqp_rt.message.Message`.
Encoded: TypeAlias = tuple[str | None, Any, BodyKind | None]

#: Message whose body is decoded.
Readable: TypeAlias = Message | PlainMessage

#: Supported character sets of text. Python knows others that are slow, or are not character sets.
_CHARSETS: Final = {
    "utf-8": "utf-8",
    "utf8": "utf-8",
    "us-ascii": "ascii",
    "ascii": "ascii",
    "utf-16": "utf-16",
    "iso-8859-1": "latin-1",
    "latin1": "latin-1",
    "iso-8859-15": "iso-8859-15",
    "windows-1252": "cp1252",
}

#: Creates the decoder of a type.
_Decoders: TypeAlias = Callable[[Any], msgspec.json.Decoder[Any] | msgspec.msgpack.Decoder[Any]]

_DECODERS_MAX: Final = 1024
_REASON_MAX: Final = 300


# --- Sending -----------------------------------------------------------------------------------


def encode_payload(
    value: object, content_type: str | None = None, codecs: Codecs | None = None
) -> Encoded:
    """Return the body for *value*.

    Without *content_type*, Structs, dataclasses, maps and lists are sent as JSON, bytes as data,
    and anything else as the corresponding AMQP value; a :class:`~amqp_rt.message.Sequence` and
    objects of composite classes keep their form. ``AMQP_VALUE`` also sends maps and lists as AMQP
    values, and Structs and dataclasses as maps. With a content-type, bytes count as encoded
    already. Models of pydantic are sent as JSON. Types that *codecs* claim are encoded by these.

    Raises:
        EncodeError: *value* cannot be encoded in this way.
    """
    if codecs is not None:
        claimed = codecs.encode(value, content_type)
        if claimed is not None:
            return claimed
    if content_type is None:
        if type(value) in AS_THEY_ARE:
            return None, value, "value"
        if isinstance(value, bytes | bytearray | memoryview):
            return None, bytes(value), "data"
        if isinstance(value, Sequence):
            return None, value, "sequence"
        if _is_structured(value):
            return JSON, _encoded(msgspec.json.encode, value), "data"
        return None, _as_value(value), "value"
    kind = media_type_of(content_type)
    if kind == AMQP_VALUE:
        try:
            return None, _as_value(value), "value"
        except RecursionError:
            raise EncodeError("the payload is nested too deeply, or holds itself") from None
    if isinstance(value, bytes | bytearray | memoryview):
        return content_type, bytes(value), "data"
    if kind == JSON or kind.endswith("+json"):
        return content_type, _encoded(msgspec.json.encode, value), "data"
    if kind in MESSAGE_PACK:
        return content_type, _encoded(msgspec.msgpack.encode, value), "data"
    if isinstance(value, str):
        charset = _charset(content_type)
        if charset is None:
            raise EncodeError(f"the charset of {content_type[:80]!r} is not known")
        try:
            return content_type, value.encode(charset), "data"
        except UnicodeEncodeError as error:
            raise EncodeError(f"the text is not {charset}: {error.reason}") from None
    raise EncodeError(
        f"{type(value).__name__} cannot be sent as {content_type[:80]!r}: give bytes, or text"
    )


#: Types of most unstructured payloads, which need no further tests.
AS_THEY_ARE: Final = frozenset({str, int, float, bool, type(None), UUID})


def _is_structured(value: object) -> bool:
    if hasattr(type(value), "__amqp_write__"):
        return False  # An object of a composite class.
    return (
        isinstance(value, msgspec.Struct | Mapping | list | tuple | set | frozenset)
        and not isinstance(value, Described)
    ) or (
        hasattr(type(value), "__dataclass_fields__")
        or hasattr(type(value), "__attrs_attrs__")
        or is_model(type(value))
    )


def _encoded(encode: Callable[..., bytes], value: object) -> bytes:
    try:
        return encode(value, enc_hook=_encodable)
    except INPUT_ERRORS as error:
        raise EncodeError(f"the payload cannot be encoded: {brief(error)}") from None


def _encodable(value: Any) -> Any:
    """Return a value that msgspec can encode in place of *value*, whose class only AMQP has."""
    if isinstance(value, Timestamp):
        return _moment(value)
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Map | Mapping):
        return dict(value.items())
    if isinstance(value, Array):
        return list(value)
    if is_model(type(value)):
        return plain_of_model(value)
    raise TypeError(f"{type(value).__name__} has no encoding there")


def _as_value(value: Any) -> Any:
    """Convert *value* to types that AMQP has."""
    kind = type(value)
    if isinstance(value, Mapping):
        return {_as_value(key): _as_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_as_value(item) for item in value]
    if isinstance(value, dt.datetime):
        return value if value.tzinfo is not None else value.isoformat()
    if hasattr(kind, "__amqp_write__") or isinstance(
        value, str | int | float | bytes | bytearray | memoryview | UUID | Described | Map | Array
    ):
        return value
    if isinstance(value, msgspec.Struct):
        return {
            field.encode_name: _as_value(getattr(value, field.name))
            for field in msgspec.structs.fields(value)
        }
    if is_model(kind):
        return plain_of_model(value)
    if dataclasses.is_dataclass(value):
        return {
            field.name: _as_value(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    try:
        # Decimals, dates, enumerations and the like have a form as text or number. Other values may
        # still be of an AMQP type; if not, writing them fails.
        return msgspec.to_builtins(value)
    except (TypeError, ValueError):
        return value


# --- Receiving ---------------------------------------------------------------------------------


def decode_payload(message: Readable, kind: Any, limits: Limits = DEFAULT_LIMITS) -> Any:
    """Decode the body of *message* as *kind*, according to its content-type.

    *kind* is any type that msgspec can validate, a class declared with ``@composite``, or ``Any``
    for the value as received. Data without a content-type are read as bytes, text or JSON,
    depending on *kind*. Compressed data are decoded within *limits*; data of another content-encoding
    can be had as bytes only, as they are.

    Raises:
        DecodeError: The body is not a valid *kind*; the reason names the field.
    """
    body = message.body
    if message.body_kind != "data":
        content_type = message.properties.content_type
        if content_type is not None and type(body) in (str, bytes):
            return _from_encoded_value(message, body, content_type, kind)
        return _from_value(body, kind)
    if kind is bytes and body[:2] not in MAGICS:
        return body
    properties = message.properties
    encoding = properties.content_encoding
    if encoding is not None and (kind is not bytes or is_known(encoding)):
        body = decompressed(body, encoding, limits)
    if kind is bytes:
        return body
    content_type = properties.content_type
    if content_type is None:
        return _from_untyped(body, kind)
    media_type = media_type_of(content_type)
    if media_type == JSON or media_type.endswith("+json"):
        return _from_encoded(_json_decoder, body, kind)
    if media_type in MESSAGE_PACK:
        return _from_encoded(_message_pack_decoder, body, kind)
    if media_type.startswith("text/"):
        return _from_text(_text(body, content_type), kind)
    if media_type == OCTETS or kind is Any or kind is object:
        return _from_untyped(body, kind)
    raise DecodeError(f"{name_of(kind)} cannot be made of {content_type[:80]!r}")


def has_no_payload(message: Readable) -> bool:
    """Whether *message* has no body, or an empty one, which clients send for no payload."""
    body = message.body
    return body is None or (
        isinstance(body, str | bytes | list | Mapping | Map | Sequence)
        and (not len(body) or body in (b"null", b"{}", b"[]"))
    )


def _from_encoded(
    decoder: _Decoders,
    body: bytes,
    kind: Any,
) -> Any:
    try:
        return decoder(kind).decode(body)
    except INPUT_ERRORS as error:
        raise _fault(error, decoder, body, kind) from None


def _fault(error: Exception, decoder: _Decoders, body: bytes | str, kind: Any) -> DecodeError:
    """Return the error for octets that are not a *kind*, with all their faults."""
    if not isinstance(error, msgspec.ValidationError) or len(body) > SEARCHED_MAX:
        return DecodeError(brief(error))
    # Not of this type: msgspec has stopped at the first fault. Octets behind it may be malformed.
    try:
        value = decoder(Any).decode(cast("bytes", body))
    except INPUT_ERRORS:
        return DecodeError(brief(error))
    return DecodeError(brief(error), info=info_of(find_faults(value, kind)))


def _from_encoded_value(message: Readable, body: str | bytes, content_type: str, kind: Any) -> Any:
    """Decode a string or binary amqp-value that has a content-type.

    Several clients (rhea, Proton, JMS) send JSON in this form, so the content-type decides, as for
    data. The text or the octets themselves are returned if *kind* asks for them.
    """
    media_type = media_type_of(content_type)
    decoder: _Decoders
    if media_type == JSON or media_type.endswith("+json"):
        decoder = _json_decoder
    elif media_type in MESSAGE_PACK and type(body) is bytes:
        decoder = _message_pack_decoder
    elif media_type.startswith("text/") and type(body) is bytes and kind is not bytes:
        return _from_text(_text(body, content_type), kind)
    else:
        return _from_value(body, kind)
    if kind is bytes:
        return body.encode() if isinstance(body, str) else body
    if message.properties.content_encoding is not None:
        return _from_value(body, kind)
    try:
        return decoder(kind).decode(cast("bytes", body))
    except INPUT_ERRORS as error:
        if type(body) in members_of(kind):
            return body
        raise _fault(error, decoder, body, kind) from None


def _from_untyped(body: bytes, kind: Any) -> Any:
    """Decode data whose content-type gives no format."""
    if kind is str:
        return _text(body, "")
    if kind is Any or kind is object or bytes in members_of(kind):
        return body
    return _from_encoded(_json_decoder, body, kind)


def _from_text(text: str, kind: Any) -> Any:
    if kind is str or kind is Any or kind is object:
        return text
    try:
        # Numbers in text are always written as text, so conversion is not strict.
        return msgspec.convert(text, kind, strict=False)
    except INPUT_ERRORS as error:
        raise DecodeError(brief(error)) from None


def _from_value(value: Any, kind: Any) -> Any:
    if kind is Any or kind is object or (type(value) is kind and kind not in _PLAIN):
        return value
    members = members_of(kind)
    if type(value) in members and type(value) not in _PLAIN:
        return value
    if isinstance(value, Described):
        composites = [member for member in members if hasattr(member, "__composite__")]
        if composites:
            return from_described(value, *composites)
    moments: list[Timestamp] = []
    try:
        plain = _plain(value, moments, numbers=False)
        try:
            return msgspec.convert(plain, kind)
        except msgspec.ValidationError:
            if not moments:
                raise
        # *kind* may expect a timestamp as a number.
        return msgspec.convert(_plain(value, moments, numbers=True), kind)
    except msgspec.ValidationError as error:
        raise DecodeError(brief(error), info=info_of(find_faults(plain, kind))) from None
    except INPUT_ERRORS as error:
        raise DecodeError(brief(error)) from None


_PLAIN: Final = frozenset({list, dict})


def _plain(value: Any, moments: list[Timestamp], *, numbers: bool) -> Any:
    """Convert *value* from types that only AMQP has, so that msgspec recognizes it."""
    kind = type(value)
    if kind is str or kind is int or kind is bool or kind is float or kind is bytes:
        return value
    if kind is dict or kind is Map:
        return {
            _plain(key, moments, numbers=numbers): _plain(item, moments, numbers=numbers)
            for key, item in value.items()
        }
    if isinstance(value, list) or kind is Array:
        return [_plain(item, moments, numbers=numbers) for item in value]
    if kind is Symbol or kind is Char:
        return str(value)
    if kind is Timestamp:
        moments.append(value)
        return int(value) if numbers else _moment(value)
    if isinstance(value, int):
        return int(value)
    if kind is Float32:
        return float(value)
    if kind is Described:
        return _plain(value.value, moments, numbers=numbers)
    return value


def _moment(timestamp: Timestamp) -> dt.datetime | int:
    try:
        return timestamp.datetime
    except OverflowError:
        return int(timestamp)


# --- Types and content-types -------------------------------------------------------------------


def check_payload_type(kind: Any) -> None:
    """Check that payloads can be decoded as *kind*.

    Raises:
        TypeError: Payloads cannot; the error names the part of *kind* that is not supported.
    """
    # AMQP's own classes are recognized by descriptor or type, before msgspec is involved.
    members = [
        member
        for member in members_of(kind)
        if not (isinstance(member, type) and (_is_of_amqp(member) or member is type(None)))
    ]
    if not members:
        return
    try:
        wanted = cast("Any", Union)[tuple(members)]
        msgspec.json.Decoder(wanted)
        unknown = _custom_types(msgspec.inspect.type_info(wanted))
    except NameError:
        return  # A field mentions a class that is defined later.
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name_of(kind)} cannot be decoded: {brief(error)}") from None
    for each in unknown:
        if not (isinstance(each, type) and _is_of_amqp(each)):
            whole = str(kind) if get_origin(kind) is not None else name_of(kind)
            inside = "" if each is kind else f" (in {whole})"
            raise TypeError(
                f"{name_of(each)}{inside} cannot be decoded from a message: use a msgspec.Struct, a "
                "dataclass, a TypedDict, a pydantic model, a codec that claims it (codecs=), or take the "
                "value (Any) or the octets (bytes)"
            )


def _is_of_amqp(kind: type) -> bool:
    return (
        kind is object or hasattr(kind, "__composite__") or kind.__module__.startswith("amqp_rt.")
    )


def _custom_types(info: object) -> list[Any]:
    """Return the types within *info* that msgspec knows only by their names."""
    found: list[Any] = []
    seen: set[int] = set()
    pending: list[object] = [info]
    while pending:
        each = pending.pop()
        if isinstance(each, msgspec.inspect.CustomType):
            found.append(each.cls)
        elif isinstance(each, msgspec.inspect.Type | msgspec.inspect.Field):
            # Types may refer to themselves.
            if id(each) not in seen:
                seen.add(id(each))
                pending += [getattr(each, name) for name in each.__struct_fields__]
        elif isinstance(each, tuple):
            pending += each
    return found


def members_of(kind: Any) -> tuple[Any, ...]:
    """Return the members of a union, or *kind* alone."""
    if get_origin(kind) in (Union, types.UnionType):
        return get_args(kind)
    return (kind,)


def name_of(kind: Any) -> str:
    """Return the name of *kind* for errors."""
    return cast("str", getattr(kind, "__name__", None)) or str(kind)[:80]


def media_type_of(content_type: str) -> str:
    """Return *content_type* without parameters, in lower case."""
    return content_type.partition(";")[0].strip().lower()


def _charset(content_type: str) -> str | None:
    """Return Python's name of the character set: UTF-8 by default, None if it is not supported."""
    for parameter in content_type.split(";")[1:]:
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "charset":
            return _CHARSETS.get(value.strip().strip('"').lower())
    return "utf-8"


def _text(body: bytes, content_type: str) -> str:
    charset = _charset(content_type)
    if charset is None:
        raise DecodeError(f"the charset of {content_type[:80]!r} is not known")
    try:
        return body.decode(charset)
    except UnicodeDecodeError as error:
        raise DecodeError(f"the text is not {charset}: {error.reason}") from None


def brief(error: Exception) -> str:
    """Return the text of *error*, cut to its limit."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    text = str(error) or type(error).__name__
    return text if len(text) <= _REASON_MAX else text[:_REASON_MAX] + "…"


@lru_cache(_DECODERS_MAX)
def _json_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


@lru_cache(_DECODERS_MAX)
def _message_pack_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)
