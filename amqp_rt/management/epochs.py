"""Epochs at ``<node>/$management``: peers with the right to send can publish a node's messages by epochs.

``COMMIT-EPOCH`` takes a map with *producer*, *run*, *epoch* and *parts*, a list of ``[part, attempt,
count, crc]``, and replies whether this published the messages or an earlier commit had. The map may
also have *write*, *query*, *plan* and *content*, by which the broker distinguishes a repeated commit of an
epoch from another epoch under the same number; the latter is refused with ``amqp_rt:epoch-different``,
unless *skip_different* is true. ``EPOCH`` takes the application-property *producer* and returns its last
committed epoch, -1 for none, and the query of that. ``STAGE`` takes a map with *producer*, *run*, *epoch*,
*part* and *attempt*, and returns the number of messages staged by that attempt (*count*) and their checksum
(*crc*), from which a sender continues after its connection was lost.
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct

from ..broker.durable.facts import Claim, Identity
from ..broker.kinds.base import Node
from ..broker.staging.attempts import Part
from ..broker.staging.staging import Staging
from ..errors import AmqpError
from ..message import Message
from ..security.access import Rights
from .answering import text_of
from .node import Management

__all__ = ["COMMIT_EPOCH", "READ_EPOCH", "READ_STAGE", "add_epochs"]

COMMIT_EPOCH: Final = "COMMIT-EPOCH"
READ_EPOCH: Final = "EPOCH"
READ_STAGE: Final = "STAGE"


class _Commit(Struct, forbid_unknown_fields=True):
    """Body of ``COMMIT-EPOCH``."""

    producer: str
    run: str
    epoch: int
    parts: list[tuple[int, int, int, int]]
    write: str = ""
    query: str = ""
    plan: str = ""
    content: str = ""
    skip_different: bool = False


class _Staged(Struct, forbid_unknown_fields=True):
    """Body of ``STAGE``."""

    producer: str
    run: str
    epoch: int
    part: int
    attempt: int


_Body = TypeVar("_Body", _Commit, _Staged)


def add_epochs(management: Management, staging: Staging) -> None:
    """Add the operations on epochs, which *staging* carries out, to *management*."""

    async def commit(node: Node, message: Message) -> Any:
        asked = _read(message, _Commit, COMMIT_EPOCH)
        published = await staging.commits.commit(
            node,
            asked.producer,
            asked.run,
            asked.epoch,
            [Part(*part) for part in asked.parts],
            Identity(asked.write, asked.query, asked.plan, asked.content),
            skip_different=asked.skip_different,
        )
        return {"published": published}

    async def read(node: Node, message: Message) -> Any:
        producer = text_of(message, "producer")
        producers = staging.producers
        epoch, query = producers.committed(node, producer), producers.query(node, producer)
        return {"epoch": epoch, "query": query}

    async def count(node: Node, message: Message) -> Any:
        asked = _read(message, _Staged, READ_STAGE)
        claim = Claim(asked.producer, asked.run, asked.epoch, asked.part, asked.attempt)
        found, crc = await staging.count(node, claim)
        return {"count": found, "crc": crc}

    management.add_node_hook(COMMIT_EPOCH, commit, Rights.SEND)
    management.add_node_hook(READ_STAGE, count, Rights.SEND)
    management.add_node_hook(READ_EPOCH, read, Rights.SEND)


def _read(message: Message, kind: type[_Body], operation: str) -> _Body:
    """Return the body of *message*, a request of *operation*, as *kind*.

    Raises:
        AmqpError: It is no map with the fields of *kind*.
    """
    try:
        return msgspec.convert(_plain(message.body), kind)
    except msgspec.ValidationError as error:
        *names, last = [field.name for field in msgspec.structs.fields(kind) if field.required]
        raise AmqpError(
            f"the body of {operation} is a map with {', '.join(names)} and {last}: {error}",
            condition="amqp:invalid-field",
        ) from error


def _plain(value: Any) -> Any:
    """Convert a body for msgspec: AMQP types to plain Python types."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value)
    return value
