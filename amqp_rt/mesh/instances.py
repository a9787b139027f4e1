"""Instances of an address, as one node of a mesh knows them."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from .legs import Leg
from .records import Offer
from .routing import MeshRoute

#: Seconds after which a message without an outcome counts as stuck.
STUCK_S = 10.0


class MeshInstance(Struct, frozen=True, kw_only=True):
    """A node that serves an address; counts and latencies are those of messages from the clients of the node that is asked.

    They are there while the clients send, and for a minute afterwards.
    """

    node: str
    zone: str
    #: Sum of the costs of the links on the way, and the nodes on it; the path to this node itself is empty.
    cost: int
    path: tuple[str, ...]
    offer: Offer
    #: Whether new messages may come to it.
    alive: bool
    #: Messages that wait or are processed there, and those that it processes at a time, as it has told; None if it has not.
    load: int | None = None
    slots: int | None = None
    #: Messages without an outcome; of these, the messages that were sent more than ten seconds ago.
    in_flight: int = 0
    stuck: int = 0
    #: Seconds from sending to the outcome of the latest 256 messages; None without any.
    latency_p50_s: float | None = None
    latency_p99_s: float | None = None
    #: Number of messages by outcome: ``accepted``, ``rejected``, ``modified``, ``released``.
    outcomes: dict[str, int] = {}
    #: Seconds for which it gets nothing, since messages in a row have failed; 0 for none.
    ejected_s: float = 0.0


def instance_of(route: MeshRoute, legs: Iterable[Leg], now: float) -> MeshInstance:
    """Return the instance at the end of *route*, with what *legs* to it have measured."""
    found = list(legs)
    load = slots = None
    outcomes: dict[str, int] = {}
    for leg in found:
        if leg.standing.slots:
            load, slots = leg.standing.load, leg.standing.slots
        for name, count in leg.answers.outcomes.items():
            outcomes[name] = outcomes.get(name, 0) + count
    # Legs of several users differ little; the slowest counts.
    p50 = [each for leg in found if (each := leg.answers.quantile(0.5)) is not None]
    p99 = [each for leg in found if (each := leg.answers.quantile(0.99)) is not None]
    return MeshInstance(
        node=route.node,
        zone=route.zone,
        cost=route.cost,
        path=route.path,
        offer=route.offer,
        alive=route.offer.weight > 0,
        load=load,
        slots=slots,
        in_flight=sum(len(leg.pending) for leg in found),
        stuck=sum(leg.stuck(now - STUCK_S) for leg in found),
        latency_p50_s=max(p50, default=None),
        latency_p99_s=max(p99, default=None),
        outcomes=outcomes,
        ejected_s=max((leg.standing.ejected_until - now for leg in found), default=0.0)
        if any(leg.standing.ejected_until > now for leg in found)
        else 0.0,
    )
