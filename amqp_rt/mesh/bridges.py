"""Bridges between a mesh and brokers outside of it: what is pulled, pushed and linked."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any, Final

from msgspec import Struct

from ..addresses import parse_urls
from ..container.recovery import connect

#: Options of ``connect`` that are the bridge's own.
_RESERVED: Final = ("urls", "container", "on_state")
_OPTIONS: Final = frozenset(inspect.signature(connect).parameters) - set(_RESERVED)


class Pull(Struct, frozen=True):
    """Messages of an address outside, sent to an address of the mesh.

    A message is settled outside when its destination in the mesh has settled it, with the same outcome.

    Args:
        address: The address outside, such as ``/queue/new`` of RabbitMQ.
        to: The address in the mesh.
        settled: Ask for settled messages: those on their way when something fails are lost, and none comes twice.
    """

    address: str
    to: str
    settled: bool = False


class Push(Struct, frozen=True):
    """Address of the mesh, whose messages are sent to an address outside.

    Args:
        address: The address in the mesh, offered while the broker outside can be reached.
        to: The address outside.
    """

    address: str
    to: str


class Bridge:
    """Bridge of one member of a mesh to a broker outside.

    ``Bridge("rabbit", "amqp://broker", pull=[Pull("/queue/new", to="new")], push=[Push("done", to="/queue/done")])``, given to
    :class:`~amqp_rt.mesh.Mesh`. Links to addresses of either side are joined end to end; nothing is stored in between. What a
    bridge pulls into the mesh is sent by the member itself.

    Args:
        name: Name of the bridge, unique in its member.
        url: URL of the broker, or several as a failover list.
        pull: What to receive from the broker.
        push: What to send to it.
        links: Prefix with ``/*`` at its end, such as ``rabbit/*``: links of clients to addresses below it lead to the address
            outside without the prefix, each with the settle modes, filters and transactions of the broker. Each session of
            a client has a connection of its own to the broker.
        hops_max: Meshes that a message pulled may have passed before; one with more is rejected.
        options: Options of :func:`amqp_rt.connect`, such as ``auth`` and ``tls``.

    Raises:
        ValueError: An address is missing, or is both pulled and pushed; or the bridge has nothing to do.
        TypeError: An option is none of ``connect``.
    """

    def __init__(
        self,
        name: str,
        url: str | Sequence[str],
        *,
        pull: Iterable[Pull] = (),
        push: Iterable[Push] = (),
        links: str = "",
        hops_max: int = 1,
        **options: Any,
    ) -> None:
        self.name = name
        self.url = url
        self.pull = tuple(pull)
        self.push = tuple(push)
        self.links = links
        self.hops_max = hops_max
        self.options = options
        #: Prefix of the addresses that are linked; empty for none.
        self.prefix = links.removesuffix("*")
        self._pushed = {each.address: each for each in self.push}
        parse_urls(url)
        unknown = sorted(options.keys() - _OPTIONS)
        if unknown:
            raise TypeError(f"bridge {name!r}: connect has no option {unknown[0]!r}")
        wrong = self._wrong()
        if wrong:
            raise ValueError(f"bridge {name!r}: {wrong}")

    def pushed(self, address: str) -> Push | None:
        """Return what is done with messages to *address*; None if they are not pushed."""
        return self._pushed.get(address)

    def linked(self, address: str) -> str:
        """Return the address outside to which links to *address* lead; empty if they are not linked."""
        if self.prefix and address.startswith(self.prefix):
            return address[len(self.prefix) :]
        return ""

    def _wrong(self) -> str:
        """Return the mistake in the arguments, empty if there is none."""
        if not self.name or "/" in self.name:
            return "a bridge has a name, without '/' in it"
        if not (self.pull or self.push or self.links):
            return "it has nothing to do; give pull=, push= or links="
        if self.hops_max < 0:
            return f"hops_max must be at least 0, got {self.hops_max}"
        if self.links and (not self.links.endswith("/*") or "*" in self.prefix[:-1]):
            return f"links is a prefix that ends in '/*', such as 'rabbit/*', not {self.links!r}"
        if len(self.prefix) == 1:
            return f"links needs a name before '/*', got {self.links!r}"
        return self._wrong_addresses()

    def _wrong_addresses(self) -> str:
        here = [each.to for each in self.pull] + [each.address for each in self.push]
        outside = [each.address for each in self.pull] + [each.to for each in self.push]
        if not all(here) or not all(outside):
            return "an address is empty; Pull and Push need one on either side"
        reserved = next((each for each in [*here, self.links] if each.startswith("$")), None)
        if reserved is not None:
            return (
                f"{reserved!r} is reserved in a mesh; use an address without '$' at its beginning"
            )
        for what, where in (
            ([each.address for each in self.pull], "pulled"),
            ([each.address for each in self.push], "pushed"),
        ):
            twice = next((each for each in what if what.count(each) > 1), None)
            if twice is not None:
                return f"{twice!r} is {where} twice; remove one of the two"
        for side, there in ((outside, "outside"), (here, "in the mesh")):
            pulled, pushed = set(side[: len(self.pull)]), side[len(self.pull) :]
            both = next((each for each in pushed if each in pulled), None)
            if both is not None:
                return (
                    f"{both!r} {there} is both pulled and pushed, so that its messages would come "
                    "back; use an address for each direction"
                )
        below = next((each for each in here if self.linked(each)), None)
        if below is not None:
            return (
                f"{below!r} is below {self.links!r}, whose links lead outside; "
                "use an address that does not begin so"
            )
        return ""

    def __repr__(self) -> str:
        return f"<Bridge {self.name!r}: {len(self.pull)} pulled, {len(self.push)} pushed>"


def check_together(bridges: Sequence[Bridge]) -> None:
    """Check the bridges of one member.

    Raises:
        ValueError: Two have one name, or take links to the same addresses of the mesh.
    """
    for at, one in enumerate(bridges):
        for other in bridges[:at]:
            if one.name == other.name:
                raise ValueError(f"two bridges have the name {one.name!r}; give each its own")
            taken = [each.address for each in one.push if other.pushed(each.address)]
            taken += [each.address for each in one.push if other.linked(each.address)]
            taken += [each.address for each in other.push if one.linked(each.address)]
            if one.prefix and other.prefix and _nested(one.prefix, other.prefix):
                taken.append(one.links)
            if taken:
                raise ValueError(
                    f"bridges {other.name!r} and {one.name!r} both take links to {taken[0]!r}; "
                    "remove it from one of the two"
                )


def _nested(one: str, other: str) -> bool:
    return one.startswith(other) or other.startswith(one)
