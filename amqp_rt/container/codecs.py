"""Codecs of payloads, by type: those of the application, of installed packages, and of pydantic.

A type that no codec claims is msgspec's, by :mod:`amqp_rt.container.payloads`. The codec of a type is looked
up when a route is created, or when a call begins; messages of other types pay nothing for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from importlib.metadata import entry_points
from typing import Any, Final, Protocol, TypeAlias, runtime_checkable

import msgspec

from ..errors import AmqpError, DecodeError, EncodeError
from ..limits import DEFAULT_LIMITS, Limits
from ..message import Message
from .compression import decompressed
from .faults import INPUT_ERRORS
from .models import PydanticCodec
from .payloads import (
    AMQP_VALUE,
    JSON,
    Encoded,
    Readable,
    brief,
    check_payload_type,
    decode_payload,
    encode_payload,
    media_type_of,
    name_of,
)

#: Entry points of packages that bring a codec: classes or functions, called without arguments.
_GROUP: Final = "amqp_rt.codecs"
#: Types and media types whose codecs and decoders are remembered.
_KNOWN_MAX: Final = 1_024
_MEDIA_TYPES_MAX: Final = 16

#: Decodes the body of a message as a type.
Decode: TypeAlias = Callable[[Readable, Any], Any]


@runtime_checkable
class Codec(Protocol):
    """Codec of a family of types, such as messages of protobuf; without state for each message."""

    def claims(self, kind: Any) -> bool:
        """Whether payloads of the type *kind* are encoded and decoded by this codec."""

    def decoder(self, kind: Any, media_type: str) -> Callable[[bytes], Any] | None:
        """Return a function that decodes octets as *kind*; None if *media_type* is not one of the codec's.

        It is called when a route is created, with ``application/json``, and with the first message of each
        other media type. *media_type* is in lower case, and empty for data without a content-type. Bodies
        that are AMQP values are decoded from their form in JSON.

        The function raises ``DecodeError``, or any ``ValueError`` or ``TypeError``, for invalid octets.

        Raises:
            TypeError: *kind* cannot be decoded; the route is refused with this sentence.
        """

    def encode(self, value: Any, media_type: str | None) -> tuple[str, bytes]:
        """Return content-type and octets of *value*; the codec chooses the first if it is None.

        Raises:
            ValueError: *value* has no such encoding.
        """

    def schema(self, kind: Any, references: str) -> dict[str, Any] | None:
        """Return the JSON schema of *kind* for AsyncAPI, None if there is none.

        Schemas in its ``$defs`` are referred to by *references*, a template with ``{name}``.
        """


class Codecs:
    """Codecs of a container, in the order in which they are asked.

    Args:
        given: The application's own. Those of installed packages and that of pydantic follow.
        limits: Limits for compressed bodies.

    Raises:
        TypeError: One of *given* is no codec.
    """

    def __init__(self, given: Iterable[Codec] = (), limits: Limits = DEFAULT_LIMITS) -> None:
        self.limits = limits
        own = [*given]
        for each in own:
            if isinstance(each, type) or not isinstance(each, Codec):
                raise TypeError(
                    f"codecs= takes objects with claims, decoder, encode and schema, not {each!r:.80}"
                )
        own += _installed()
        #: What encodes payloads before msgspec does; None if that has nothing to ask.
        self.encoding: Codecs | None = self if own else None
        self._codecs: list[Codec] = [*own, PydanticCodec()]
        self._known: dict[Any, Decode] = {}
        #: What replies of a type are decoded as, where that was checked.
        self.replies: dict[Any, Any] = {}
        #: Whether compressed bodies have the limits that decode_payload() has by itself.
        self._usual = all(
            getattr(limits, name) == getattr(DEFAULT_LIMITS, name)
            for name in ("decompressed_max", "decompressed_ratio_max")
        )

    def claiming(self, kind: Any) -> Codec | None:
        """Return the first codec that claims *kind*; None if it is left to msgspec."""
        if kind is Any or kind is object or kind is Message or kind is bytes:
            return None
        return next((each for each in self._codecs if each.claims(kind)), None)

    def decoding(self, kind: Any) -> Decode:
        """Return the function that decodes bodies as *kind*.

        Raises:
            TypeError: Payloads cannot be decoded as *kind*; the error names the part that is not supported.
        """
        try:
            found = self._known.get(kind)
        except TypeError:  # An annotation that is not hashable.
            return self._made(kind)
        if found is None:
            found = self._made(kind)
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
            self._known[kind] = found
        return found

    def remember_reply(self, kind: Any, checked: Any) -> None:
        """Remember that replies of the type *kind*, unless it has no hash, are decoded as *checked*."""
        if len(self.replies) >= _KNOWN_MAX:
            self.replies.clear()
        try:
            self.replies[kind] = checked
        except TypeError:
            pass

    def _made(self, kind: Any) -> Decode:
        codec = self.claiming(kind)
        if codec is not None:
            return Claimed(codec, kind, self.limits)
        check_payload_type(kind)
        return decode_payload if self._usual else Limited(self.limits)

    def decoding_parts(self, kinds: list[Any]) -> Decode:
        """Return the function that decodes a list of several arguments, of which codecs may claim some.

        Raises:
            TypeError: As :meth:`decoding`.
        """
        decoding = [self.decoding(each) for each in kinds]
        if not any(isinstance(each, Claimed) for each in decoding):
            return decoding[0]
        return _Parts(kinds, decoding, self.limits)

    def encode(self, value: object, content_type: str | None) -> Encoded | None:
        """Return the body for *value*; None if no codec claims its type.

        Raises:
            EncodeError: The codec cannot encode it.
        """
        media_type = None if content_type is None else media_type_of(content_type)
        codec = None if media_type == AMQP_VALUE else self.claiming(type(value))
        if codec is None:
            return None
        own: Any
        octets: Any
        try:
            own, octets = codec.encode(value, media_type)
        except AmqpError:
            raise
        except (ValueError, TypeError) as error:
            raise EncodeError(f"the payload cannot be encoded: {brief(error)}") from None
        if not isinstance(own, str) or not isinstance(octets, bytes):
            raise EncodeError(
                f"{type(codec).__name__}.encode returned {type(own).__name__} and {type(octets).__name__}, and not a "
                "content-type and octets"
            )
        return content_type or own, octets, "data"


class Limited:
    """Decoding by msgspec with other limits for compressed bodies than the usual ones."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits

    def __call__(self, message: Readable, kind: Any) -> Any:
        """Decode the body of *message*, as :func:`decode_payload` does."""
        return decode_payload(message, kind, self._limits)


class Claimed:
    """Decoding of one type by the codec that claims it.

    Raises:
        TypeError: The codec does not support the type.
    """

    def __init__(self, codec: Codec, kind: Any, limits: Limits) -> None:
        self._codec = codec
        self._limits = limits
        self._kind = kind
        self._decoders: dict[str, Callable[[bytes], Any]] = {}
        try:
            decoder = codec.decoder(kind, JSON)
        except TypeError as error:
            raise TypeError(f"{name_of(kind)} cannot be decoded: {brief(error)}") from None
        if decoder is not None:
            self._decoders[JSON] = decoder

    def __call__(self, message: Readable, kind: Any) -> Any:
        """Decode the body of *message*.

        Raises:
            DecodeError: It is not of the type, or of a media type that the codec does not know.
        """
        media_type, octets = _octets_of(message, self._limits)
        decoder = self._decoders.get(media_type) or self._decoder(media_type)
        try:
            return decoder(octets)
        except DecodeError:
            raise
        except INPUT_ERRORS as error:
            raise DecodeError(brief(error)) from None

    def _decoder(self, media_type: str) -> Callable[[bytes], Any]:
        found = self._codec.decoder(self._kind, media_type)
        if found is None:
            as_what = repr(media_type[:80]) if media_type else "data without a content-type"
            raise DecodeError(f"{name_of(self._kind)} cannot be made of {as_what}")
        if len(self._decoders) < _MEDIA_TYPES_MAX:
            self._decoders[media_type] = found
        return found


def _octets_of(message: Readable, limits: Limits) -> tuple[str, bytes]:
    """Return media type and octets of the body of *message*.

    Raises:
        DecodeError: The body cannot be decompressed, or is an AMQP value that has no form in JSON.
    """
    body = message.body
    content_type = message.properties.content_type
    if message.body_kind == "data":
        encoding = message.properties.content_encoding
        if encoding is not None:
            body = decompressed(body, encoding, limits)
        return "" if content_type is None else media_type_of(content_type), body
    if content_type is not None and type(body) in (str, bytes):
        return media_type_of(content_type), body.encode() if isinstance(body, str) else body
    # Timestamps and other types that only AMQP has get the form that msgspec gives them.
    value = decode_payload(message, Any)
    try:
        return JSON, encode_payload(value, JSON)[1]
    except EncodeError as error:
        raise DecodeError(f"the AMQP value has no form in JSON: {error.description}") from None


class _Parts:
    """Decoding of several arguments, sent as a list."""

    def __init__(self, kinds: list[Any], decoding: list[Decode], limits: Limits) -> None:
        self._limits = limits
        self._parts = list(zip(kinds, decoding, strict=True))
        # A type for each argument: the right number is checked with it.
        self._raw = tuple[(msgspec.Raw,) * len(kinds)]  # type: ignore[misc]

    def __call__(self, message: Readable, kind: Any) -> Any:
        if message.body_kind != "data" and isinstance(message.body, list):
            items = [Message(each, body_kind="value") for each in message.body]
            if len(items) != len(self._parts):
                raise DecodeError(
                    f"Expected `array` of length {len(self._parts)}, got {len(items)}"
                )
        else:
            content_type = message.properties.content_type or JSON
            raw = decode_payload(message, self._raw, self._limits)
            items = [Message(bytes(each), content_type=content_type) for each in raw]
        return tuple(self._decoded(at, item) for at, item in enumerate(items))

    def _decoded(self, at: int, item: Message) -> Any:
        kind, decode = self._parts[at]
        try:
            return decode(item, kind)
        except DecodeError as error:
            for each in error.info.get("errors") or ():  # type: ignore[attr-defined]
                each["path"] = f"$[{at}]{each['path'][1:]}"
            raise


@lru_cache(maxsize=1)
def default_codecs() -> Codecs:
    """Return the codecs without any of an application."""
    return Codecs()


@lru_cache(maxsize=1)
def _installed() -> list[Codec]:
    """Return the codecs of installed packages, by the names of their entry points."""
    found = sorted(entry_points(group=_GROUP), key=lambda each: each.name)
    return [each.load()() for each in found]
