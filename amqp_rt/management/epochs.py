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

from collections.abc import Sequence
from typing import Any, Final, Protocol, TypeVar

import msgspec
from msgspec import Struct

from ..errors import AmqpError
from ..events import Peer
from ..message import Message
from ..security.access import Rights
from .node import Management, reply_of, text_of

__all__ = ["COMMIT_EPOCH", "READ_EPOCH", "READ_STAGE", "add_epochs"]

COMMIT_EPOCH: Final = "COMMIT-EPOCH"
READ_EPOCH: Final = "EPOCH"
READ_STAGE: Final = "STAGE"


class Epochs(Protocol):
    """Methods of a broker that are used here."""

    async def commit_epoch(
        self,
        address: str,
        producer: str,
        run: str,
        epoch: int,
        parts: Sequence[tuple[int, int, int, int]],
        *,
        write: str = "",
        query: str = "",
        plan: str = "",
        content: str = "",
        skip_different: bool = False,
        virtual_host: str = "",
    ) -> bool:
        """Publish the staged messages once; return False if an earlier commit had."""

    async def count_staged(
        self,
        address: str,
        producer: str,
        run: str,
        epoch: int,
        part: int,
        attempt: int,
        *,
        virtual_host: str = "",
    ) -> tuple[int, int]:
        """Return the number of messages that an attempt has staged, and their checksum."""

    def committed_epoch(self, address: str, producer: str, *, virtual_host: str = "") -> int:
        """Return the last committed epoch, -1 for none."""

    def committed_query(self, address: str, producer: str, *, virtual_host: str = "") -> str:
        """Return the query of the last committed epoch, empty if it is unknown."""


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


def add_epochs(management: Management, epochs: Epochs) -> None:
    """Add the operations on epochs at the nodes of *epochs* to *management*."""

    async def commit(entity: str, message: Message, peer: Peer) -> Message:
        asked = _read(message, _Commit, COMMIT_EPOCH)
        published = await epochs.commit_epoch(
            entity,
            asked.producer,
            asked.run,
            asked.epoch,
            asked.parts,
            write=asked.write,
            query=asked.query,
            plan=asked.plan,
            content=asked.content,
            skip_different=asked.skip_different,
            virtual_host=peer.virtual_host,
        )
        return reply_of(200, {"published": published})

    async def read(entity: str, message: Message, peer: Peer) -> Message:
        producer = text_of(message, "producer")
        epoch = epochs.committed_epoch(entity, producer, virtual_host=peer.virtual_host)
        query = epochs.committed_query(entity, producer, virtual_host=peer.virtual_host)
        return reply_of(200, {"epoch": epoch, "query": query})

    async def count(entity: str, message: Message, peer: Peer) -> Message:
        asked = _read(message, _Staged, READ_STAGE)
        found, crc = await epochs.count_staged(
            entity,
            asked.producer,
            asked.run,
            asked.epoch,
            asked.part,
            asked.attempt,
            virtual_host=peer.virtual_host,
        )
        return reply_of(200, {"count": found, "crc": crc})

    management.add_hook(COMMIT_EPOCH, commit, rights=Rights.SEND)
    management.add_hook(READ_STAGE, count, rights=Rights.SEND)
    management.add_hook(READ_EPOCH, read, rights=Rights.SEND)


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
