"""Models of pydantic as payloads, recognized without importing pydantic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final, get_args, get_origin

import msgspec

from ..errors import DecodeError
from .faults import FAULTS_MAX, Fault, fault, info_of

#: Attribute of the classes that pydantic validates.
_MARK: Final = "__pydantic_core_schema__"
#: Faults beyond which only their number is reported: each costs memory.
_COUNTED_MAX: Final = 1_000
#: Depth to which the arguments of a type are searched for models.
_DEPTH_MAX: Final = 16


def is_model(kind: Any) -> bool:
    """Whether *kind* is a class of pydantic."""
    return isinstance(kind, type) and hasattr(kind, _MARK)


def plain_of_model(value: Any) -> Any:
    """Return *value*, an object of such a class, as built-in types that JSON has."""
    return type(value).__pydantic_serializer__.to_python(value, mode="json", by_alias=True)


class PydanticCodec:
    """Codec of pydantic's models, and of types made of them such as ``list[Model]``: JSON and MessagePack."""

    def claims(self, kind: Any) -> bool:
        """Whether *kind* is a model, or has one among its arguments."""
        return _has_model(kind, 0)

    def decoder(self, kind: Any, media_type: str) -> Callable[[bytes], Any] | None:
        """Return the decoder of *kind*; None for a media type that is neither JSON nor MessagePack.

        Raises:
            TypeError: pydantic does not support a part of *kind*, or is not installed.
        """
        adapter = _adapter(kind)
        if "msgpack" in media_type:
            return lambda octets: _validated(
                adapter.validate_python, msgspec.msgpack.decode(octets)
            )
        if media_type in ("", "application/json", "application/octet-stream"):
            return lambda octets: _validated(adapter.validate_json, octets)
        if media_type.endswith("+json"):
            return lambda octets: _validated(adapter.validate_json, octets)
        return None

    def encode(self, value: Any, media_type: str | None) -> tuple[str, bytes]:
        """Return content-type and octets of *value*."""
        if media_type is not None and "msgpack" in media_type:
            return media_type, msgspec.msgpack.encode(plain_of_model(value))
        if media_type is None or media_type.endswith(("/json", "+json")):
            octets: bytes = type(value).__pydantic_serializer__.to_json(value, by_alias=True)
            return media_type or "application/json", octets
        raise ValueError(f"a model has no encoding as {media_type[:80]!r}")

    def schema(self, kind: Any, references: str) -> dict[str, Any]:
        """Return the JSON schema of *kind*, with ``$defs``; *references* is the form of references to these."""
        template = references.replace("{name}", "{model}")
        schema: dict[str, Any] = _adapter(kind).json_schema(ref_template=template)
        return schema


def _has_model(kind: Any, depth: int) -> bool:
    if is_model(kind):
        return True
    args = get_args(kind)
    if get_origin(kind) is Annotated:
        args = args[:1]
    return depth < _DEPTH_MAX and any(_has_model(each, depth + 1) for each in args)


def _adapter(kind: Any) -> Any:
    try:
        from pydantic import TypeAdapter
        from pydantic.errors import PydanticUserError
    except ImportError:
        raise TypeError(
            "models need pydantic 2: install it with pip install 'amqp-rt[pydantic]'"
        ) from None
    try:
        return TypeAdapter(kind)
    except PydanticUserError as error:
        raise TypeError(f"pydantic: {str(error).partition(chr(10))[0]}") from None


def _validated(validate: Callable[[Any], Any], value: Any) -> Any:
    from pydantic import ValidationError

    try:
        return validate(value)
    except ValidationError as error:
        count = error.error_count()
        if count > _COUNTED_MAX:
            raise DecodeError(f"{count} faults") from None
        faults = [
            fault(_path(each["loc"]), each["msg"])
            for each in error.errors(include_url=False, include_context=False, include_input=False)
        ]
        raise DecodeError(_described(faults), info=info_of(faults)) from None


def _described(faults: list[Fault]) -> str:
    first = f"{faults[0]['message']} - at `{faults[0]['path']}`"
    more = len(faults) - 1
    return first if not more else f"{first}, and {more} more fault{'s' if more > 1 else ''}"


def _path(location: tuple[int | str, ...]) -> str:
    return "$" + "".join(
        f"[{each}]" if isinstance(each, int) else f".{each}" for each in location[:FAULTS_MAX]
    )
