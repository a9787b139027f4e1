"""A container that counts flights: one of several competing consumers of a queue.

main.py runs it as a process of its own, with the broker's URL as its argument. It prints the URL for
calls of its ``@rpc`` node, then works until it is terminated.
"""

from __future__ import annotations

import sys

import msgspec
import trio

from amqp_rt import Container, node, rpc


class Flight(msgspec.Struct):
    """Message about a flight; delays are in minutes, and absent if it was cancelled."""

    carrier: str
    #: Scheduled hour of departure.
    hour: int
    dep_delay: float | None = None
    arr_delay: float | None = None


class Delays(msgspec.Struct):
    """Sums for one carrier so far."""

    flights: int = 0
    departed: int = 0
    arrived: int = 0
    dep_delay: float = 0.0
    arr_delay: float = 0.0

    def count(self, flight: Flight) -> None:
        """Add one flight."""
        self.flights += 1
        if flight.dep_delay is not None:
            self.departed += 1
            self.dep_delay += flight.dep_delay
        if flight.arr_delay is not None:
            self.arrived += 1
            self.arr_delay += flight.arr_delay

    def add(self, other: Delays) -> None:
        """Add the sums of another station."""
        self.flights += other.flights
        self.departed += other.departed
        self.arrived += other.arrived
        self.dep_delay += other.dep_delay
        self.arr_delay += other.arr_delay


class Station:
    """Nodes of this container."""

    def __init__(self) -> None:
        self.carriers: dict[str, Delays] = {}

    @node("flights", prefetch=1000)
    async def count(self, flight: Flight) -> None:
        """Count a flight from the broker's queue of this name; its message is accepted on return."""
        self.carriers.setdefault(flight.carrier, Delays()).count(flight)

    @rpc("delays")
    async def delays(self) -> dict[str, Delays]:
        """Return the sums; called directly, from container to container."""
        return self.carriers


async def main(broker_url: str) -> None:
    station = Station()
    async with Container("station", nodes=[station]) as container:
        (url,) = await container.listen("amqp://127.0.0.1:0")
        async with container.connect(broker_url) as broker:
            await broker.serve(station.count)
            print(url, flush=True)
            await container.serve()


if __name__ == "__main__":
    try:
        trio.run(main, sys.argv[1])
    except KeyboardInterrupt:
        sys.exit(130)
