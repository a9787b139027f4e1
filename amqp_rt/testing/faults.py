"""What goes wrong in a simulation, as data: each fault says what happens to whom, and when.

A list of faults and a seed are all there is to a failure, so that the list can be printed, made
shorter, and kept in a test.
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
    "Fault",
    "Full",
    "HalfClose",
    "Jump",
    "Kill",
    "Partition",
    "Slow",
    "Split",
    "Stall",
    "draw_faults",
]


class Fault(Struct, frozen=True, kw_only=True):
    """Any of them. Connections are counted from 0 as they are dialled, commits as they are tried."""


# --- connections -----------------------------------------------------------------------------------


class Split(Fault, frozen=True, kw_only=True):
    """What crosses a connection arrives in pieces of *size* octets."""

    connection: int
    size: int


class Delay(Fault, frozen=True, kw_only=True):
    """Everything on a connection arrives *seconds* later, and so after what others carry."""

    connection: int
    seconds: float


class Slow(Fault, frozen=True, kw_only=True):
    """One side of a connection reads no more than so many octets in a second.

    ``back`` is the direction of who dialled, here and below.
    """

    connection: int
    octets_per_s: int
    back: bool = False


class Cut(Fault, frozen=True, kw_only=True):
    """A connection is lost: what had arrived can be read, what was on its way is gone.

    After *frames*, of both directions together, or after *octets* of one direction. Without a
    *connection*, *frames* counts those of all connections, and the one is cut that carries the last.
    """

    connection: int | None = None
    frames: int | None = None
    octets: int = 0
    back: bool = False


class HalfClose(Fault, frozen=True, kw_only=True):
    """One direction of a connection ends after *octets*; the other one goes on."""

    connection: int
    octets: int
    back: bool = False


class Stall(Fault, frozen=True, kw_only=True):
    """After *octets*, one direction of a connection stands still for *seconds*."""

    connection: int
    octets: int
    seconds: float
    back: bool = False


class Corrupt(Fault, frozen=True, kw_only=True):
    """Octet number *octet* of one direction of a connection arrives with the bits of *mask* flipped."""

    connection: int
    octet: int
    mask: int = 0xFF
    back: bool = False


# --- hosts -----------------------------------------------------------------------------------------


class Partition(Fault, frozen=True, kw_only=True):
    """From *at* on nothing reaches or leaves a host for *seconds*, and then everything does."""

    host: str
    at: float
    seconds: float


class Kill(Fault, frozen=True, kw_only=True):
    """A process dies without a word, and is started again.

    At a time, or at a boundary of a commit: *kept* says whether the batch is on the disk then.
    *silent* says that its peers are not even told that their connections are gone, as when a
    machine loses power.
    """

    host: str
    at: float | None = None
    commit: int | None = None
    kept: bool = False
    silent: bool = False


class Jump(Fault, frozen=True, kw_only=True):
    """The wall clock is put forward, or back, by *seconds*."""

    at: float
    seconds: float


# --- disks -----------------------------------------------------------------------------------------


class Full(Fault, frozen=True, kw_only=True):
    """From commit number *commit* on, *count* of those that bring something find no room."""

    host: str
    commit: int
    count: int


class Fails(Fault, frozen=True, kw_only=True):
    """Commit number *commit* fails; *kept* says what nobody knows then."""

    host: str
    commit: int
    kept: bool = False


class Damaged(Fault, frozen=True, kw_only=True):
    """A page is torn when the process is killed for the *kill*-th time: the store finds a message
    damaged when it is opened, names it and puts it aside."""

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
) -> list[Fault]:
    """Some faults, few or many.

    Args:
        luck: Where they are drawn from.
        hosts: Who may be cut off.
        keepers: Who has a disk, and is killed.
        connections: How many there may be.
        seconds: When the last ones begin.
        corrupt: Whether octets are flipped. What a peer says then is anything at all: AMQP has no
            checksums, so nothing can be promised about its messages, only about everybody else's.
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

    kinds: list[Callable[[], Fault]] = [
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
        lambda: Partition(
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
