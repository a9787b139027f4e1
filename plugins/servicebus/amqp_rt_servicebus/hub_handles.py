"""Event hubs as tests see them: their events and partitions, from any thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, cast

import trio
from msgspec import Struct

from amqp_rt.message import Message
from amqp_rt.testing import LoopbackBroker

from .hubs import EventHub, HubHost, PartitionFacts
from .stored import PARTITION_KEY

__all__ = ["HeldEvent", "HubHandle", "HubSizes"]

#: Seconds between two checks of a hub that a test waits for, and the default of the seconds that it waits.
_LOOK_S: Final = 0.002
PATIENCE_S: Final = 5.0


def message_of(body: object, fields: Mapping[str, Any]) -> Message:
    """Return the message that a client of the service would send for *body*.

    Args:
        body: The body, or a whole message, which is returned as it is. A text becomes a data section: the SDK
            for Python shows an ``amqp-value`` with a text as ``b'text'``.
        fields: Other arguments of :class:`~amqp_rt.Message`.
    """
    if isinstance(body, Message):
        return body
    return Message(body.encode() if isinstance(body, str) else body, **fields)


class HeldEvent(Struct, frozen=True):
    """An event that a hub holds."""

    #: Index of its partition.
    partition: int
    sequence_number: int
    #: The event with the annotations of the service, as a reader gets it.
    message: Message

    @property
    def body(self) -> Any:
        """Body of the event."""
        return self.message.body

    @property
    def application_properties(self) -> Mapping[str, Any]:
        """Application properties of the event."""
        return self.message.application_properties

    @property
    def partition_key(self) -> str | None:
        """Partition key; None without one."""
        return cast("str | None", self.message.message_annotations.get(PARTITION_KEY))

    def __repr__(self) -> str:
        return f"<HeldEvent {self.partition}/{self.sequence_number}: {self.body!r:.80}>"


class HubSizes(Struct, frozen=True, kw_only=True):
    """Numbers of a hub."""

    #: Events in all partitions.
    events: int
    #: Links that receive.
    readers: int
    partitions: tuple[PartitionFacts, ...]


class HubHandle:
    """A hub of the namespace, for tests: plain calls, from any thread.

    Args:
        broker: The broker with the namespace.
        hubs: The hubs.
        name: Name of the hub, which need not exist yet.
    """

    def __init__(self, broker: LoopbackBroker, hubs: HubHost, name: str) -> None:
        self._broker = broker
        self._hubs = hubs
        self.name = name

    @property
    def stats(self) -> HubSizes:
        """Numbers of events and readers, and the state of each partition.

        Raises:
            AmqpError: There is no such hub.
        """

        async def sizes() -> HubSizes:
            return _sizes(self._hubs.find(self.name))

        return self._broker.call(sizes)

    @property
    def events(self) -> list[HeldEvent]:
        """Events that are kept, partition by partition in their order.

        Raises:
            AmqpError: There is no such hub.
        """

        async def collect() -> list[HeldEvent]:
            hub = self._hubs.find(self.name)
            return [
                HeldEvent(index, number, Message.decode(payload))
                for index in range(hub.declared.partitions)
                for number, payload in hub.events(index)
            ]

        return self._broker.call(collect)

    def send(
        self,
        body: object = None,
        *,
        partition: int | None = None,
        key: str | None = None,
        **fields: Any,
    ) -> HeldEvent:
        """Put an event into the hub, as if a client had sent it; return it as it is kept.

        Args:
            body: The body, or a whole :class:`~amqp_rt.Message`. A text is sent in UTF-8 as the SDKs send it,
                in a data section; a message with a text has it as an ``amqp-value``.
            partition: Index of the partition; by default that of the key, or the next one in turn.
            key: Partition key.
            fields: Other arguments of :class:`~amqp_rt.Message`, such as ``application_properties``.

        Raises:
            AmqpError: There is no such hub or partition, the event is malformed, or there is no room.
        """
        message = message_of(body, fields)
        if key is not None:
            message.message_annotations = {**message.message_annotations, PARTITION_KEY: key}
        payload = bytes(message.encode())

        async def put() -> HeldEvent:
            hub = self._hubs.find(self.name)
            index = None if partition is None else hub.find_partition(str(partition))
            index = hub.publish(payload, index)
            number = hub.facts(index).last
            return HeldEvent(index, number, Message.decode(hub.event(index, number)))

        return self._broker.call(put)

    def purge(self) -> int:
        """Drop all events; return how many there were. Sequence numbers continue.

        Raises:
            AmqpError: There is no such hub.
        """

        async def purge() -> int:
            return await self._hubs.find(self.name).log.purge()

        return self._broker.call(purge)

    def wait_until(
        self, condition: Callable[[HubSizes], bool], *, timeout_s: float = PATIENCE_S
    ) -> HubSizes:
        """Wait until *condition* is true of the numbers of the hub; return those.

        Raises:
            AmqpError: There is no such hub.
            AssertionError: It was not within *timeout_s* seconds of real time.
        """
        __tracebackhide__ = True

        async def wait() -> HubSizes:
            with trio.move_on_after(timeout_s):
                while True:
                    sizes = _sizes(self._hubs.find(self.name))
                    if condition(sizes):
                        return sizes
                    await trio.sleep(_LOOK_S)
            raise AssertionError(
                f"the hub {self.name!r} did not become as wanted within {timeout_s:g} s:"
                f" {_sizes(self._hubs.find(self.name))!r}"
            )

        return self._broker.call(wait)

    def __repr__(self) -> str:
        return f"<HubHandle {self.name!r}>"


def _sizes(hub: EventHub) -> HubSizes:
    return HubSizes(
        events=hub.log.available,
        readers=len(hub.log.readers),
        partitions=tuple(hub.facts(index) for index in range(hub.declared.partitions)),
    )
