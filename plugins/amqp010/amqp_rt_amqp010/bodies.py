"""Bodies of AMQP 1.0 as octets of 0-10, with the content types of Qpid."""

from __future__ import annotations

from typing import Final

from amqp_rt.fronts import AmqpError, Message
from amqp_rt.fronts.headers import AMQP10, body_sections

from .conversions import from_amqp10, is_plain
from .type_codes import LIST, MAP
from .writing import put_typed

MAP_TYPE: Final = "amqp/map"
LIST_TYPE: Final = "amqp/list"
TEXT_TYPE: Final = "text/plain"


class OutgoingBody:
    """Body of a message in 0-10.

    Args:
        pieces: The octets.
        content_type: The content type that tells how to read them; None for that of the message.
        kind: Value of the header ``x-basic-type``; None for none.
    """

    __slots__ = ("content_type", "kind", "pieces")

    def __init__(
        self, pieces: list[bytes], content_type: str | None = None, kind: str | None = None
    ) -> None:
        self.pieces = pieces
        self.content_type = content_type
        self.kind = kind

    @property
    def size(self) -> int:
        """Octets of the body."""
        return sum(map(len, self.pieces))


def body_of(message: Message) -> OutgoingBody:
    """Convert the body of *message*.

    Data is passed on as it is, a text, a map or a list in the form of Qpid's clients, and anything else as the
    sections of 1.0.

    Raises:
        AmqpError: It is malformed.
    """
    kind = message.body_kind
    if kind is None:
        return OutgoingBody([])
    if kind == "data":
        return OutgoingBody(list(message.data))
    body = message.body
    if kind == "value":
        if type(body) is str:
            stated = None if _content_type(message) else TEXT_TYPE
            return OutgoingBody([body.encode()], stated)
        if type(body) is dict and is_plain(body):
            return OutgoingBody([_encoded(MAP, body)], MAP_TYPE)
        if type(body) is list and is_plain(body):
            return OutgoingBody([_encoded(LIST, body)], LIST_TYPE)
    return OutgoingBody([body_sections(message)], None, AMQP10)


def _encoded(code: int, value: dict[str, object] | list[object]) -> bytes:
    out = bytearray()
    if isinstance(value, dict):
        put_typed(out, code, {name: from_amqp10(each) for name, each in value.items()})
    else:
        put_typed(out, code, from_amqp10(value))
    return bytes(out)


def _content_type(message: Message) -> str | None:
    try:
        return message.properties.content_type
    except AmqpError:
        return None
