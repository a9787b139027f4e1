"""A namespace with an event hub, and clients of Azure's SDK for Python in both forms."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from amqp_rt_servicebus.declarations import Hub
from amqp_rt_servicebus.testing import ServiceBus

from amqp_rt import Message

#: Seconds after which a client that waits for events has failed.
PATIENCE_S = 20.0


class ServedHubs:
    """The hub ``clicks`` of a namespace at a port of this machine, in the thread of the test."""

    def __init__(self, bus: ServiceBus) -> None:
        self.bus = bus
        self.handle = bus.hub("clicks")

    @property
    def connection_string(self) -> str:
        return self.bus.connection_string

    def bodies(self) -> list[list[Any]]:
        """Return the bodies of all events, partition by partition."""
        return [[each.body for each in part] for part in self.events()]

    def events(self) -> list[list[Message]]:
        """Return all events as readers get them, partition by partition."""
        found: list[list[Message]] = [[] for _ in self.handle.stats.partitions]
        for each in self.handle.events:
            found[each.partition].append(each.message)
        return found

    def publish(self, *bodies: Any, partition: int = 0) -> None:
        """Store events, as if a client had sent them."""
        for body in bodies:
            self.handle.send(body, partition=partition)

    def chosen(self, key: str) -> int:
        """Return the partition of a key."""
        return self.bus.call(lambda: self.bus.namespace.hubs.find("clicks").choose(key.encode()))


@contextmanager
def serving_hubs(*hubs: Hub, **options: Any) -> Iterator[ServedHubs]:
    """Serve *hubs* at a free port."""
    with ServiceBus(*hubs, **options) as bus:
        yield ServedHubs(bus)


class Received:
    """Events that one consumer got."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        #: For each event, what the consumer knew of the last one of the partition.
        self.last: list[Any] = []
        self.errors: list[Exception] = []

    @property
    def bodies(self) -> list[str]:
        return [event.body_as_str() for event in self.events]


class SyncClients:
    """Clients with threads. Those that send stay open for the next call, since opening one takes a second."""

    def __init__(self, connection_string: str, hub: str) -> None:
        self.connection_string = connection_string
        self.hub = hub
        self._sender: Any = None

    def __enter__(self) -> SyncClients:
        return self

    def __exit__(self, *_: object) -> None:
        if self._sender is not None:
            self._sender.close()

    def producer(self, **options: Any) -> Any:
        from azure.eventhub import EventHubProducerClient

        return EventHubProducerClient.from_connection_string(
            self.connection_string, eventhub_name=self.hub, **{"retry_total": 0, **options}
        )

    @property
    def sender(self) -> Any:
        if self._sender is None:
            self._sender = self.producer()
        return self._sender

    def consumer(self, group: str = "$Default") -> Any:
        from azure.eventhub import EventHubConsumerClient

        return EventHubConsumerClient.from_connection_string(
            self.connection_string, group, eventhub_name=self.hub, retry_total=0
        )

    def send(self, *events: Any, **options: Any) -> None:
        """Send *events* in one batch."""
        self.sender.send_batch(list(events), **options)

    def send_one(self, event: Any, **options: Any) -> None:
        """Send an event that is no batch."""
        self.sender.send_event(event, **options)

    def fill(self, *events: Any, **options: Any) -> int:
        """Send *events* in a batch that the client makes; return the largest size of such."""
        batch = self.sender.create_batch(**options)
        for event in events:
            batch.add(event)
        self.sender.send_batch(batch)
        return int(batch.max_size_in_bytes)

    def buffer(self, events: list[tuple[Any, str | None]]) -> list[Exception]:
        """Send *events*, each with a key or none, with a producer that buffers; return its errors."""
        errors: list[Exception] = []
        client = self.producer(
            buffered_mode=True,
            max_wait_time=1,
            on_success=lambda events, partition: None,
            on_error=lambda events, partition, error: errors.append(error),
        )
        with client:
            for event, key in events:
                client.send_event(event, partition_key=key)
            client.flush()
        return errors

    def hub_properties(self) -> dict[str, Any]:
        return dict(self.sender.get_eventhub_properties())

    def partition_properties(self, partition: str) -> dict[str, Any]:
        return dict(self.sender.get_partition_properties(partition))

    def receive(
        self, count: int, partition: str = "0", *, group: str = "$Default", **options: Any
    ) -> Received:
        """Receive until there are *count* events, or an error."""
        with self.receiving(count, partition, group=group, **options) as (found, done):
            assert done.wait(PATIENCE_S), f"received {found.bodies}"
        return found

    @contextmanager
    def receiving(
        self, count: int, partition: str = "0", *, group: str = "$Default", **options: Any
    ) -> Iterator[tuple[Received, threading.Event]]:
        """Receive in a thread, until the end of the block."""
        found, done = Received(), threading.Event()

        def on_event(context: Any, event: Any) -> None:
            found.events.append(event)
            found.last.append(context.last_enqueued_event_properties)
            if len(found.events) >= count:
                done.set()

        def on_error(context: Any, error: Exception) -> None:
            found.errors.append(error)
            done.set()

        client = self.consumer(group)
        options = {"starting_position": "-1", **options, "partition_id": partition}
        thread = threading.Thread(
            target=client.receive, args=(on_event,), kwargs={"on_error": on_error, **options}
        )
        thread.start()
        try:
            yield found, done
        finally:
            client.close()
            thread.join()


class AsyncClients:
    """The same with asyncio, whose loop runs while an operation does."""

    def __init__(self, connection_string: str, hub: str) -> None:
        self.connection_string = connection_string
        self.hub = hub
        self.loop = asyncio.new_event_loop()
        self._sender: Any = None

    def __enter__(self) -> AsyncClients:
        return self

    def __exit__(self, *_: object) -> None:
        if self._sender is not None:
            self._run(self._sender.close())
        self.loop.close()

    @property
    def sender(self) -> Any:
        if self._sender is None:
            self._sender = self.producer()
        return self._sender

    def _run(self, work: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, PATIENCE_S))

    def producer(self, **options: Any) -> Any:
        from azure.eventhub.aio import EventHubProducerClient

        return EventHubProducerClient.from_connection_string(
            self.connection_string, eventhub_name=self.hub, **{"retry_total": 0, **options}
        )

    def consumer(self, group: str = "$Default") -> Any:
        from azure.eventhub.aio import EventHubConsumerClient

        return EventHubConsumerClient.from_connection_string(
            self.connection_string, group, eventhub_name=self.hub, retry_total=0
        )

    def send(self, *events: Any, **options: Any) -> None:
        self._run(self.sender.send_batch(list(events), **options))

    def send_one(self, event: Any, **options: Any) -> None:
        self._run(self.sender.send_event(event, **options))

    def fill(self, *events: Any, **options: Any) -> int:
        async def send() -> int:
            batch = await self.sender.create_batch(**options)
            for event in events:
                batch.add(event)
            await self.sender.send_batch(batch)
            return int(batch.max_size_in_bytes)

        return int(self._run(send()))

    def buffer(self, events: list[tuple[Any, str | None]]) -> list[Exception]:
        errors: list[Exception] = []

        async def on_success(events: Any, partition: Any) -> None:
            """Nothing is left to do."""

        async def on_error(events: Any, partition: Any, error: Exception) -> None:
            errors.append(error)

        async def send() -> None:
            client = self.producer(
                buffered_mode=True, max_wait_time=1, on_success=on_success, on_error=on_error
            )
            async with client:
                for event, key in events:
                    await client.send_event(event, partition_key=key)
                await client.flush()

        self._run(send())
        return errors

    def hub_properties(self) -> dict[str, Any]:
        return dict(self._run(self.sender.get_eventhub_properties()))

    def partition_properties(self, partition: str) -> dict[str, Any]:
        return dict(self._run(self.sender.get_partition_properties(partition)))

    def receive(
        self, count: int, partition: str = "0", *, group: str = "$Default", **options: Any
    ) -> Received:
        found = Received()

        async def receive() -> None:
            done = asyncio.Event()

            async def on_event(context: Any, event: Any) -> None:
                found.events.append(event)
                found.last.append(context.last_enqueued_event_properties)
                if len(found.events) >= count:
                    done.set()

            async def on_error(context: Any, error: Exception) -> None:
                found.errors.append(error)
                done.set()

            async with self.consumer(group) as client:
                chosen = {"starting_position": "-1", **options, "partition_id": partition}
                task = asyncio.create_task(client.receive(on_event, on_error=on_error, **chosen))
                await done.wait()
                # Closing the client would be waited for up to the interval of its balancing.
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

        self._run(receive())
        return found
