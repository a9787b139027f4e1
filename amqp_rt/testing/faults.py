"""Faults of a simulation, as data: each has a target and a time.

A list of faults and a seed reproduce a failure completely, so that the list can be printed,
shortened and kept in a test.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from msgspec import Struct

__all__ = [
    "Corrupt",
    "Cut",
    "Damaged",
    "Delay",
    "Fails",
    "Flap",
    "Full",
    "HalfClose",
    "InjectedFault",
    "Jump",
    "Kill",
    "NetworkPartition",
    "OneWay",
    "Slow",
    "Split",
    "Stall",
    "draw_faults",
]


class InjectedFault(Struct, frozen=True, kw_only=True):
    """Base of all faults.

    Connections are counted from 0 as they are dialled, commits as they are tried.
    """


# --- connections -----------------------------------------------------------------------------------


class Split(InjectedFault, frozen=True, kw_only=True):
    """Octets of a connection arrive in pieces of *size* octets."""

    connection: int
    size: int


class Delay(InjectedFault, frozen=True, kw_only=True):
    """Octets of a connection arrive *seconds* later, and so after those of other connections."""

    connection: int
    seconds: float


class Slow(InjectedFault, frozen=True, kw_only=True):
    """A direction of a connection carries at most *octets_per_s*.

    ``back`` selects the direction towards the side that dialled, here and below.
    """

    connection: int
    octets_per_s: int
    back: bool = False


class Cut(InjectedFault, frozen=True, kw_only=True):
    """A connection is lost: octets that have arrived can be read, octets on their way are lost.

    The cut follows *frames* frames of both directions together, or *octets* octets of one
    direction. Without a *connection*, *frames* counts those of all connections, and the one that
    carries the last is cut.
    """

    connection: int | None = None
    frames: int | None = None
    octets: int = 0
    back: bool = False


class HalfClose(InjectedFault, frozen=True, kw_only=True):
    """A direction of a connection ends after *octets*; the other continues."""

    connection: int
    octets: int
    back: bool = False


class Stall(InjectedFault, frozen=True, kw_only=True):
    """After *octets*, a direction of a connection stops for *seconds*."""

    connection: int
    octets: int
    seconds: float
    back: bool = False


class Corrupt(InjectedFault, frozen=True, kw_only=True):
    """Octet number *octet* of one direction of a connection has the bits of *mask* flipped."""

    connection: int
    octet: int
    mask: int = 0xFF
    back: bool = False


# --- hosts -----------------------------------------------------------------------------------------


class NetworkPartition(InjectedFault, frozen=True, kw_only=True):
    """A host is cut off from *at* on for *seconds*; octets to and from it are delayed, not lost."""

    host: str
    at: float
    seconds: float


class OneWay(InjectedFault, frozen=True, kw_only=True):
    """Octets that *host* sends are delayed from *at* on for *seconds*; those of others arrive.

    With *to*, only octets to that host are delayed.
    """

    host: str
    at: float
    seconds: float
    to: str | None = None


class Flap(InjectedFault, frozen=True, kw_only=True):
    """A host loses all its connections and is cut off, *times* times from *at* on.

    Each time it is cut off for *seconds*, and then reached for as long.
    """

    host: str
    at: float
    seconds: float
    times: int


class Kill(InjectedFault, frozen=True, kw_only=True):
    """A process dies without closing its connections, and is restarted.

    This happens at a time, or at a commit, with the batch on the disk if *kept*. If *silent*, peers
    do not even see the end of their connections, as when a machine loses power.
    """

    host: str
    at: float | None = None
    commit: int | None = None
    kept: bool = False
    silent: bool = False


class Jump(InjectedFault, frozen=True, kw_only=True):
    """The wall clock jumps by *seconds*, forward or back."""

    at: float
    seconds: float


# --- disks -----------------------------------------------------------------------------------------


class Full(InjectedFault, frozen=True, kw_only=True):
    """From commit number *commit* on, *count* commits that add data find no room."""

    host: str
    commit: int
    count: int


class Fails(InjectedFault, frozen=True, kw_only=True):
    """Commit number *commit* fails; *kept* decides whether the batch is on the disk.

    The caller cannot know which.
    """

    host: str
    commit: int
    kept: bool = False


class Damaged(InjectedFault, frozen=True, kw_only=True):
    """A page is torn when the process is killed for the *kill*-th time.

    On opening, the store finds the damaged message, reports it and sets it aside.
    """

    host: str
    kill: int = 1


def draw_faults(
    luck: Random,
    *,
    hosts: Sequence[str] = ("broker",),
    keepers: Sequence[str] = ("broker",),
    connections: int = 8,
    seconds: float = 20.0,
    corrupt: bool = False,
) -> list[InjectedFault]:
    """Draw a random number of faults, of all kinds but :class:`OneWay` and :class:`Flap`.

    Args:
        luck: Source of randomness.
        hosts: Hosts that may be cut off.
        keepers: Hosts with a disk, which may be killed.
        connections: Number of connections that faults may name.
        seconds: Latest time at which a fault begins.
        corrupt: Whether octets may be flipped. A corrupted peer may send any octets, and AMQP has
            no checksums: only the messages of other peers can be checked then.
    """

    def connection() -> int:
        return luck.randrange(connections)

    def octets() -> int:
        return int(2 ** luck.uniform(0, 13))

    def back() -> bool:
        return luck.random() < 0.5

    def at() -> float:
        return round(luck.uniform(0, seconds), 3)

    def commit() -> int:
        return luck.randint(2, 60)

    kinds: list[Callable[[], InjectedFault]] = [
        lambda: Split(connection=connection(), size=luck.choice([1, 2, 7, 64, 500])),
        lambda: Delay(connection=connection(), seconds=luck.choice([0.01, 0.3, 2.0])),
        lambda: Slow(
            connection=connection(), octets_per_s=luck.choice([500, 2_000, 20_000]), back=back()
        ),
        lambda: Cut(connection=connection(), frames=luck.randint(1, 60)),
        lambda: Cut(connection=connection(), octets=octets(), back=back()),
        lambda: Cut(frames=luck.randint(10, 400)),
        lambda: HalfClose(connection=connection(), octets=octets(), back=back()),
        lambda: Stall(
            connection=connection(),
            octets=octets(),
            seconds=luck.choice([0.5, 10.0, 100.0]),
            back=back(),
        ),
        lambda: NetworkPartition(
            host=luck.choice(hosts), at=at(), seconds=luck.choice([0.5, 10.0, 100.0])
        ),
        lambda: Kill(host=luck.choice(keepers), at=at(), silent=back()),
        lambda: Kill(host=luck.choice(keepers), commit=commit(), kept=back(), silent=back()),
        lambda: Jump(at=at(), seconds=luck.choice([-86_400.0, -1.0, 5.0, 86_400.0])),
        lambda: Full(host=luck.choice(keepers), commit=commit(), count=luck.randint(1, 5)),
        lambda: Fails(host=luck.choice(keepers), commit=commit(), kept=back()),
        lambda: Damaged(host=luck.choice(keepers), kill=luck.randint(1, 2)),
    ]
    if corrupt:
        kinds.append(
            lambda: Corrupt(
                connection=connection(), octet=octets(), mask=luck.randint(1, 255), back=back()
            )
        )
    return [luck.choice(kinds)() for _ in range(luck.choice([0, 1, 1, 2, 3, 5, 8]))]
