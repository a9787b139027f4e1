"""Leases at ``<queue>/$management``: peers with the right to receive can lease messages of a queue.

The operations ``OPEN-LEASE`` (*group*, and *seconds* if it is to expire), ``LEASE-STATE`` (*group*),
``LEASE`` (*group*, *generation*, *count*), ``ACCEPT-LEASE`` (*group*, *generation*, *to*),
``RETURN-LEASE`` (*group*, *generation*, and a body that lists the ranges ``[from, to]`` to return) and
``RELEASE-LEASE`` (*group*) take application-properties. All but the last reply with the state of the
group: *generation*, *first*, *next*, *available*, *id*; the last with the number of messages *released*.
All but the first and the last also take that *id*: a group that was released or has expired, and was
opened again, has a new one, and requests with the old one are refused.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Protocol

import trio

from ..errors import AmqpError
from ..events import Peer
from ..message import Message
from ..security.access import Rights
from .node import Management, reply_of, text_of, whole_of

__all__ = [
    "ACCEPT_LEASE",
    "LEASE",
    "LEASE_STATE",
    "OPEN_LEASE",
    "RELEASE_LEASE",
    "RETURN_LEASE",
    "add_leases",
]

OPEN_LEASE: Final = "OPEN-LEASE"
LEASE_STATE: Final = "LEASE-STATE"
LEASE: Final = "LEASE"
ACCEPT_LEASE: Final = "ACCEPT-LEASE"
RETURN_LEASE: Final = "RETURN-LEASE"
RELEASE_LEASE: Final = "RELEASE-LEASE"


class State(Protocol):
    """State of a group."""

    @property
    def generation(self) -> int: ...
    @property
    def first(self) -> int: ...
    @property
    def next(self) -> int: ...
    @property
    def available(self) -> int: ...
    @property
    def id(self) -> str: ...


class Leases(Protocol):
    """Methods of a broker that are used here."""

    async def open_lease(
        self, address: str, group: str, ttl_s: float | None = None, *, virtual_host: str = ""
    ) -> State: ...

    def lease_state(
        self, address: str, group: str, id_: object = None, *, virtual_host: str = ""
    ) -> State: ...

    async def lease(
        self, address: str, group: str, generation: int, count: int, *, virtual_host: str = ""
    ) -> State: ...

    async def accept_lease(
        self, address: str, group: str, generation: int, to: int, *, virtual_host: str = ""
    ) -> State: ...

    async def return_lease(
        self,
        address: str,
        group: str,
        generation: int,
        ranges: Sequence[tuple[int, int]],
        *,
        virtual_host: str = "",
    ) -> State: ...

    async def release_lease(self, address: str, group: str, *, virtual_host: str = "") -> int: ...


def add_leases(management: Management, leases: Leases) -> None:
    """Add the operations on leases of the queues of *leases* to *management*."""

    async def opens(entity: str, message: Message, peer: Peer) -> Any:
        seconds = message.application_properties.get("seconds")
        if seconds is not None and (
            isinstance(seconds, bool) or not isinstance(seconds, int | float)
        ):
            raise AmqpError(
                f"seconds must be a number, not {seconds!r:.50}", condition="amqp:invalid-field"
            )
        return _said(
            await leases.open_lease(
                entity,
                text_of(message, "group"),
                None if seconds is None else float(seconds),
                virtual_host=peer.virtual_host,
            )
        )

    def current(entity: str, message: Message, peer: Peer) -> State:
        """Return the state of the group, after checking the request's *id*."""
        group, id_ = text_of(message, "group"), message.application_properties.get("id")
        return leases.lease_state(entity, group, id_, virtual_host=peer.virtual_host)

    async def state(entity: str, message: Message, peer: Peer) -> Any:
        await trio.lowlevel.checkpoint()
        return _said(current(entity, message, peer))

    async def lease(entity: str, message: Message, peer: Peer) -> Any:
        current(entity, message, peer)
        return _said(
            await leases.lease(
                entity,
                text_of(message, "group"),
                whole_of(message, "generation"),
                whole_of(message, "count"),
                virtual_host=peer.virtual_host,
            )
        )

    async def accept(entity: str, message: Message, peer: Peer) -> Any:
        current(entity, message, peer)
        return _said(
            await leases.accept_lease(
                entity,
                text_of(message, "group"),
                whole_of(message, "generation"),
                whole_of(message, "to"),
                virtual_host=peer.virtual_host,
            )
        )

    async def give_back(entity: str, message: Message, peer: Peer) -> Any:
        current(entity, message, peer)
        return _said(
            await leases.return_lease(
                entity,
                text_of(message, "group"),
                whole_of(message, "generation"),
                _ranges(message.body),
                virtual_host=peer.virtual_host,
            )
        )

    async def release(entity: str, message: Message, peer: Peer) -> Any:
        group = text_of(message, "group")
        return {
            "released": await leases.release_lease(entity, group, virtual_host=peer.virtual_host)
        }

    for operation, answer in (
        (OPEN_LEASE, opens),
        (LEASE_STATE, state),
        (LEASE, lease),
        (ACCEPT_LEASE, accept),
        (RETURN_LEASE, give_back),
        (RELEASE_LEASE, release),
    ):
        management.add_hook(operation, _hook(answer), rights=Rights.LISTEN)


def _hook(
    answer: Callable[[str, Message, Peer], Awaitable[Any]],
) -> Callable[[str, Message, Peer], Awaitable[Message]]:
    async def hook(entity: str, message: Message, peer: Peer) -> Message:
        return reply_of(200, await answer(entity, message, peer))

    return hook


def _ranges(body: Any) -> list[tuple[int, int]]:
    """Return the pairs of numbers that *body* lists.

    Raises:
        AmqpError: The body has another form.
    """
    found = []
    for each in body if isinstance(body, list) else [body]:
        if (
            not isinstance(each, list)
            or len(each) != 2
            or not all(isinstance(number, int) for number in each)
        ):
            raise AmqpError(
                f"the body of {RETURN_LEASE} is a list of ranges, each of them [from, to]",
                condition="amqp:invalid-field",
            )
        found.append((int(each[0]), int(each[1])))
    return found


def _said(state: State) -> dict[str, Any]:
    return {
        "generation": state.generation,
        "first": state.first,
        "next": state.next,
        "available": state.available,
        "id": state.id,
    }
