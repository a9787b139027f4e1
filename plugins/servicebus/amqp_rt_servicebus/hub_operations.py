"""Operations at ``$management`` by which clients read the properties of hubs and their partitions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

from amqp_rt import Rights
from amqp_rt.errors import AmqpError
from amqp_rt.fronts import Peer
from amqp_rt.message import Message
from amqp_rt.values import Array, Int, Timestamp

from .conditions import ARGUMENT_ERROR
from .host import not_found
from .hubs import EventHub, HubHost
from .operations import STATUS

HUB_TYPE: Final = "com.microsoft:eventhub"
PARTITION_TYPE: Final = "com.microsoft:partition"


class TypeRegistry(Protocol):
    """Management nodes that answer requests about further types of entities."""

    def add_type(
        self,
        type_name: str,
        handler: Any,
        *,
        rights: Rights = Rights.MANAGE,
        operations: Sequence[str] = ("READ",),
    ) -> None:
        """Answer *operations* on entities of the type *type_name* with *handler*."""


class HubOperations:
    """Operation ``READ`` for hubs and partitions.

    Args:
        find: Returns the hubs that a peer reaches, None if it reaches none.
    """

    def __init__(self, find: Callable[[Peer], HubHost | None]) -> None:
        self._find = find

    def install(self, registry: TypeRegistry) -> None:
        """Add both types to the management nodes; any right at a hub is enough to read its properties."""
        registry.add_type(HUB_TYPE, self._hook(hub_properties), rights=Rights.NONE)
        registry.add_type(PARTITION_TYPE, self._hook(partition_properties), rights=Rights.NONE)

    def _hook(self, read: Callable[[EventHub, Message], dict[str, Any]]) -> Any:
        async def hook(name: str, message: Message, peer: Peer) -> Message:
            try:
                hubs = self._find(peer)
                if hubs is None:
                    raise not_found(name).raised_as(AmqpError)
                hub = hubs.find(name)
                fault = hub.fault("read")
                if fault is not None:
                    raise fault.raised_as(AmqpError)
                return _reply(200, read(hub, message))
            except AmqpError as error:
                return _reply(
                    STATUS.get(error.condition, 400), {}, error.description, error.condition
                )

        return hook


def hub_properties(hub: EventHub, request: Message) -> dict[str, Any]:
    """Return the properties of *hub*."""
    ids = [str(index) for index in range(hub.declared.partitions)]
    return {
        "name": hub.name,
        "type": HUB_TYPE,
        "created_at": Timestamp(int(hub.created_at * 1000)),
        "partition_count": Int(len(ids)),
        "partition_ids": Array(ids, of=str),
        "georeplication_factor": Int(1),
    }


def partition_properties(hub: EventHub, request: Message) -> dict[str, Any]:
    """Return the properties of the partition of *hub* that *request* names.

    Raises:
        AmqpError: It names none, or one that does not exist.
    """
    wanted = request.application_properties.get("partition")
    if isinstance(wanted, bool) or not isinstance(wanted, str | int):
        raise AmqpError(
            f"the request names no partition: set the property partition, not {wanted!r:.50}",
            condition=ARGUMENT_ERROR,
        )
    index = hub.find_partition(str(wanted))
    facts = hub.facts(index)
    return {
        "name": hub.name,
        "type": PARTITION_TYPE,
        "partition": str(index),
        "begin_sequence_number": facts.begin,
        "last_enqueued_sequence_number": facts.last,
        "last_enqueued_offset": str(facts.last),
        "last_enqueued_time_utc": Timestamp(facts.last_ms),
        "is_partition_empty": facts.is_empty,
    }


def _reply(
    status: int, body: Mapping[str, Any], description: str = "OK", condition: str | None = None
) -> Message:
    """Return a reply with the status in both spellings, of which each SDK reads one."""
    said: dict[str, object] = {
        "status-code": Int(status),
        "status-description": description,
        "statusCode": Int(status),
        "statusDescription": description,
    }
    if condition is not None:
        said["errorCondition"] = condition
    return Message(dict(body), application_properties=said)
